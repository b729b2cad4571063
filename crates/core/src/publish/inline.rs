//! Inline volumes: written in the spec of a Pod, by the Pod's author and not by an administrator. They bring their own keys, and have
//! only the attributes and options that concern the workload itself.

use std::collections::BTreeMap;

use super::{AuthenticationSource, context};
use crate::arguments::MountArguments;
use crate::identifiers::PvName;
use crate::store_connection::context as connection;
use crate::target::TargetPath;

/// Whether inline volumes are served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InlineVolumes {
    Allowed,
    #[default]
    Refused,
}

/// Why an inline volume is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidInline {
    #[error("inline volumes are not enabled: set the chart value inlineVolumes.enabled, or use a PersistentVolume")]
    Disabled,

    #[error(
        "an inline volume must bring its own keys: set authenticationSource: secret and nodePublishSecretRef, or \
         authenticationSource: pod"
    )]
    DriverKeys,

    #[error(
        "volume attribute {attribute} is not available to inline volumes, only to those of administrators: use a PersistentVolume"
    )]
    Attribute { attribute: String },

    #[error("mount option {option} is not available to inline volumes; available are {}", OPTIONS.join(", "))]
    Option { option: String },

    #[error("volume ID {volume_id:?} is not one that kubelet makes for inline volumes")]
    VolumeId { volume_id: String },
}

/// Attributes for the authors of Pods. Neither the place and size of what the driver runs for them nor where requests go is theirs to
/// decide.
const ATTRIBUTES: [&str; 9] = [
    context::BUCKET_NAME,
    context::AUTHENTICATION_SOURCE,
    context::PREFIX,
    context::ROLE_ARN,
    context::MOUNT_OPTIONS,
    connection::REGION,
    connection::FORCE_PATH_STYLE,
    connection::REQUESTER_PAYS,
    connection::CA_BUNDLE,
];

/// kubelet adds attributes of this form.
const ADDED_BY_KUBELET: &str = "csi.storage.k8s.io/";

/// Options for the authors of Pods: how files look and what may be done with them.
const OPTIONS: [&str; 19] = [
    "--allow-delete",
    "--allow-other",
    "--allow-overwrite",
    "--allow-root",
    "--dir-mode",
    "--expected-bucket-owner",
    "--file-mode",
    "--force-path-style",
    "--gid",
    "--infer-content-type",
    "--metadata-ttl",
    "--negative-metadata-ttl",
    "--prefix",
    "--read-only",
    "--region",
    "--requester-pays",
    "--sse",
    "--sse-kms-key-id",
    "--uid",
];

/// Whether kubelet says that a volume is inline.
pub fn is_inline(volume_context: &BTreeMap<String, String>) -> bool {
    volume_context.get(context::EPHEMERAL).is_some_and(|it| it == "true")
}

/// What attachments and Events call a volume: the name of its PV, or the handle that kubelet made for an inline volume.
pub fn volume_name(
    volume_id: &str,
    target: &TargetPath,
    volume_context: &BTreeMap<String, String>,
) -> Result<PvName, InvalidInline> {
    if !is_inline(volume_context) {
        return Ok(target.volume().clone());
    }
    volume_id.parse().map_err(|_| InvalidInline::VolumeId { volume_id: volume_id.to_owned() })
}

/// The mount options of an inline volume, which are an attribute: Pods have no other place for them.
pub fn inline_options(attributes: &BTreeMap<String, String>) -> Vec<String> {
    let text = attributes.get(context::MOUNT_OPTIONS).map_or("", String::as_str);
    text.split(',').map(str::trim).filter(|it| !it.is_empty()).map(str::to_owned).collect()
}

/// Refuses what the author of a Pod may not say.
pub(crate) fn restrict_inline(
    attributes: &BTreeMap<String, String>,
    source: AuthenticationSource,
    options: &MountArguments,
) -> Result<(), InvalidInline> {
    match source {
        AuthenticationSource::Driver => return Err(InvalidInline::DriverKeys),
        AuthenticationSource::Secret | AuthenticationSource::Pod => {}
    }
    let is_known = |it: &str| ATTRIBUTES.contains(&it) || it.starts_with(ADDED_BY_KUBELET);
    if let Some(attribute) = attributes.keys().find(|it| !is_known(it)) {
        return Err(InvalidInline::Attribute { attribute: attribute.clone() });
    }
    match options.names().into_iter().find(|it| !OPTIONS.contains(&it.as_str())) {
        Some(option) => Err(InvalidInline::Option { option }),
        None => Ok(()),
    }
}
