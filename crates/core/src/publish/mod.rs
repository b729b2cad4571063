//! Parses a request to publish a volume into checked types, or reports the first problem.

mod connection;
mod identity;
mod inline;
mod workload;

use std::collections::BTreeMap;

use crate::arguments::{InvalidArgument, MountArguments};
use crate::bucket::InvalidBucketName;
use crate::bucket_reference::BucketReference;
use crate::ca_certificates::{CaCertificates, InvalidCaCertificates};
use crate::endpoint::{EndpointUrl, InvalidEndpointUrl};
use crate::identifiers::{PvName, VolumeId};
use crate::prefix::{self, InvalidPrefix, Prefix};
use crate::role::InvalidRoleArn;
use crate::secret::Secret;
use crate::sharing::SharingKey;
use crate::store_connection::{self, Addressing, InvalidConnection, StoreConnection};
use crate::target::{InvalidTargetPath, TargetPath};

use self::connection::all_certificates;
pub(crate) use self::connection::{parse_connection, require_own_keys};
use self::identity::parse_identity;
pub(crate) use self::identity::parse_source;
pub use self::identity::{AuthenticationSource, Identity, SecretFallback, UnusableSecret};
pub(crate) use self::inline::restrict_inline;
pub use self::inline::{InlineVolumes, InvalidInline, inline_options, is_inline, volume_name};
pub(crate) use self::workload::parse_role;
pub use self::workload::{Grant, UnusableToken, WorkloadIdentity, guard_tokens};

/// Keys of the volume context: a PV's `volumeAttributes` and what kubelet adds to them.
pub mod context {
    pub const BUCKET_NAME: &str = "bucketName";
    pub const AUTHENTICATION_SOURCE: &str = "authenticationSource";
    /// The part of the bucket that the volume shows.
    pub const PREFIX: &str = "prefix";
    /// Another store than the driver's; only with keys of its own.
    pub const ENDPOINT_URL: &str = "endpointUrl";
    /// With `authenticationSource: pod`: the role whose keys are asked for, unless the service account names one.
    pub const ROLE_ARN: &str = "roleArn";
    /// The mount options of an inline volume, with commas between them.
    pub const MOUNT_OPTIONS: &str = "mountOptions";
    /// `"true"` for an inline volume.
    pub const EPHEMERAL: &str = "csi.storage.k8s.io/ephemeral";
    pub const POD_NAMESPACE: &str = "csi.storage.k8s.io/pod.namespace";
    pub const SERVICE_ACCOUNT_NAME: &str = "csi.storage.k8s.io/serviceAccount.name";
    /// Also among the secrets, if the `CSIDriver` object says so.
    pub const SERVICE_ACCOUNT_TOKENS: &str = "csi.storage.k8s.io/serviceAccount.tokens";
}

/// A request as received, unchecked.
#[derive(Clone, Debug)]
pub struct RawPublish<'a> {
    pub volume_id: &'a str,
    pub target_path: &'a str,
    pub volume_context: &'a BTreeMap<String, String>,
    pub capability: Option<RawCapability<'a>>,
    pub readonly: bool,
    pub secrets: &'a BTreeMap<String, Secret<String>>,
}

#[derive(Clone, Debug)]
pub struct RawCapability<'a> {
    pub access_mode: Option<AccessMode>,
    pub access_type: AccessType<'a>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AccessMode {
    /// `ReadWriteMany`.
    MultiNodeMultiWriter,
    /// `ReadOnlyMany`.
    MultiNodeReaderOnly,
    /// `ReadWriteOnce`: any number of Pods on one node.
    SingleNodeMultiWriter,
    /// `ReadWriteOncePod`: one Pod in the cluster, which the Kubernetes scheduler enforces as well.
    SingleNodeSingleWriter,
    Other(String),
}

/// Whether anything keeps a `ReadWriteOnce` or `ReadWriteOncePod` volume from being used on a second node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SingleNodeVolumes {
    /// Strategy `pod`: the controller does.
    Enforced,
    /// The other strategies know only their own node.
    Refused,
}

#[derive(Clone, Debug)]
pub enum AccessType<'a> {
    /// `fs_type` has no meaning for a bucket and is ignored.
    Mount {
        fs_type: &'a str,
        mount_flags: &'a [String],
        volume_mount_group: &'a str,
    },
    Block,
    /// Old callers leave it out: a mount without options.
    Unset,
}

/// A checked request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Publish {
    pub volume_id: VolumeId,
    /// What attachments call the volume; see [`volume_name`].
    pub volume: PvName,
    pub is_inline: bool,
    pub bucket: BucketReference,
    /// Also among the arguments.
    pub prefix: Option<Prefix>,
    /// `None`: the driver's.
    pub endpoint: Option<EndpointUrl>,
    /// Also among the arguments, as far as they can say it.
    pub connection: StoreConnection,
    /// Certificates of the volume's attribute and its Secret.
    pub ca_certificates: Option<CaCertificates>,
    pub target: TargetPath,
    pub workload_namespace: Option<String>,
    pub service_account: Option<String>,
    /// What this workload may do.
    pub access: Access,
    /// What any workload may do with this volume on this node.
    pub volume_access: Access,
    /// The PV's mount options with our defaults, before policy. `--read-only` became `volume_access`.
    pub arguments: MountArguments,
    pub fs_group: Option<String>,
    pub identity: Identity,
    /// What the volume says. The identity is another one where [`SecretFallback`] applies.
    pub declared_source: AuthenticationSource,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Access {
    ReadOnly,
    ReadWrite,
}

/// The first problem of a request, and how to correct it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidPublish {
    #[error("Volume ID not provided: set spec.csi.volumeHandle of the PersistentVolume")]
    VolumeIdMissing,

    #[error("Bucket name not provided: set spec.csi.volumeAttributes.bucketName of the PersistentVolume")]
    BucketNameMissing,

    #[error("Bucket name not valid: correct spec.csi.volumeAttributes.bucketName of the PersistentVolume")]
    BucketName {
        #[source]
        cause: InvalidBucketName,
    },

    #[error("Target path not provided: kubelet must say where to mount")]
    TargetPathMissing,

    #[error("Target path not understood: only paths that kubelet makes for volumes of Pods are served")]
    TargetPath {
        #[source]
        cause: InvalidTargetPath,
    },

    #[error("Volume capability not provided: kubelet must say how the volume is used")]
    CapabilityMissing,

    #[error(
        "Volume capability not supported: access mode is {mode}; use ReadWriteMany (MULTI_NODE_MULTI_WRITER), \
         ReadOnlyMany (MULTI_NODE_READER_ONLY), or with strategy pod ReadWriteOnce or ReadWriteOncePod"
    )]
    AccessMode { mode: String },

    #[error("Volume capability not supported: a bucket is not a block device; use volumeMode: Filesystem")]
    Block,

    #[error("mountOptions not understood: correct spec.mountOptions of the PersistentVolume")]
    MountOptions {
        #[source]
        cause: InvalidArgument,
    },

    #[error("mount option --read-only takes no value, but has {value:?}; remove the value, or the option")]
    ReadOnlyWithValue { value: String },

    #[error(
        "mount option {option}=0 is not possible: the engine refuses to show files as owned by root; use a number from \
         1 up (root itself has access anyway)"
    )]
    OwnedByRoot { option: &'static str },

    #[error("prefix not usable: correct spec.csi.volumeAttributes.prefix of the PersistentVolume")]
    Prefix {
        #[source]
        cause: InvalidPrefix,
    },

    #[error("mount option prefix {value:?} is reserved for the driver's metadata; use another prefix")]
    ReservedPrefix { value: String },

    #[error("mount option prefix and volume attribute prefix exclude each other; remove one of them")]
    PrefixTwice,

    #[error("endpointUrl not usable: correct spec.csi.volumeAttributes.endpointUrl of the PersistentVolume")]
    Endpoint {
        #[source]
        cause: InvalidEndpointUrl,
    },

    #[error(
        "endpointUrl is only for volumes with keys of their own: set authenticationSource: secret (or pod), so that the \
         driver's are never sent elsewhere"
    )]
    EndpointWithoutSecret,

    #[error("correct spec.csi.volumeAttributes of the PersistentVolume")]
    Connection {
        #[source]
        cause: InvalidConnection,
    },

    #[error(
        "{attribute} is only for volumes with keys of their own: set authenticationSource: secret (or pod), so that the driver's keys \
         are used only where its administrator says"
    )]
    WithoutOwnKeys { attribute: &'static str },

    #[error("key {} of the volume's Secret not usable", store_connection::SECRET_CA)]
    SecretCertificates {
        #[source]
        cause: InvalidCaCertificates,
    },

    #[error(
        "forcePathStyle is not possible with the ARN of an access point, which only the host of requests can name; remove it"
    )]
    PathStyleWithArn,

    #[error("correct the volume in the spec of the Pod")]
    Inline {
        #[source]
        cause: InvalidInline,
    },

    #[error("fsGroup {value:?} is not a number: correct securityContext.fsGroup of the Pod")]
    FsGroup { value: String },

    #[error("authenticationSource {value:?} is not known: only \"driver\", \"secret\" and \"pod\" are supported")]
    AuthenticationSource { value: String },

    #[error("roleArn not usable: correct spec.csi.volumeAttributes.roleArn of the PersistentVolume")]
    RoleArn {
        #[source]
        cause: InvalidRoleArn,
    },

    /// This variant and the next are about credentials.
    #[error("authenticationSource is \"secret\", but no usable Secret came with the request")]
    Credentials {
        #[source]
        cause: UnusableSecret,
    },

    #[error("authenticationSource is \"pod\", but no usable token came with the request")]
    Token {
        #[source]
        cause: UnusableToken,
    },
}

impl Publish {
    /// Checks in the order of the CSI contract; the first failure wins.
    pub fn parse(raw: &RawPublish<'_>, fallback: &SecretFallback) -> Result<Self, InvalidPublish> {
        let RawPublish { volume_id, target_path, volume_context, capability, readonly, secrets } = raw;
        let attribute = |key: &str| volume_context.get(key).map(String::as_str).filter(|it| !it.is_empty());

        let parsed_id = volume_id.parse().map_err(|_| InvalidPublish::VolumeIdMissing)?;
        let bucket = attribute(context::BUCKET_NAME).ok_or(InvalidPublish::BucketNameMissing)?;
        if target_path.is_empty() {
            return Err(InvalidPublish::TargetPathMissing);
        }
        let capability = capability.as_ref().ok_or(InvalidPublish::CapabilityMissing)?;
        let mode_access = parse_access_mode(capability.access_mode.as_ref())?;
        let (mount_flags, fs_group) = match capability.access_type {
            AccessType::Mount { mount_flags, volume_mount_group, .. } => (mount_flags, volume_mount_group),
            AccessType::Block => return Err(InvalidPublish::Block),
            AccessType::Unset => ([].as_slice(), ""),
        };

        let bucket: BucketReference = bucket.parse().map_err(|cause| InvalidPublish::BucketName { cause })?;
        let target = target_path.parse().map_err(|cause| InvalidPublish::TargetPath { cause })?;
        let inline = |cause| InvalidPublish::Inline { cause };
        let volume = volume_name(volume_id, &target, volume_context).map_err(inline)?;
        let is_inline = is_inline(volume_context);
        let inline_flags = if is_inline { inline_options(volume_context) } else { Vec::new() };
        let mut arguments = MountArguments::parse(mount_flags.iter().chain(&inline_flags))
            .map_err(|cause| InvalidPublish::MountOptions { cause })?;
        let declared_source = parse_source(attribute(context::AUTHENTICATION_SOURCE))?;
        if is_inline {
            restrict_inline(volume_context, declared_source, &arguments).map_err(inline)?;
        }
        refuse_root_as_owner(&arguments)?;
        let volume_access = mode_access.and(take_read_only(&mut arguments)?);
        let access = volume_access.and(if *readonly { Access::ReadOnly } else { Access::ReadWrite });
        let fs_group = parse_fs_group(fs_group)?;
        let prefix = parse_prefix(attribute(context::PREFIX), &arguments)?;
        if let Some(prefix) = &prefix {
            arguments.set("--prefix", Some(prefix.as_str()));
        }
        let connection = parse_connection(volume_context, &arguments, &bucket)?;
        add_defaults(&mut arguments, fs_group);
        connection.add_to(&mut arguments, if bucket.is_arn() { Addressing::VirtualHost } else { Addressing::Path });
        // The author of a Pod must never get the driver's keys.
        let no_fallback = SecretFallback::default();
        let fallback = if is_inline || connection.needs_own_keys().is_some() { &no_fallback } else { fallback };
        let identity = parse_identity(declared_source, volume_context, secrets, fallback)?;
        let endpoint = parse_endpoint(attribute(context::ENDPOINT_URL), identity.source())?;
        require_own_keys(&connection, identity.source())?;
        let ca_certificates = all_certificates(&connection, identity.source(), secrets)?;

        Ok(Self {
            volume_id: parsed_id,
            volume,
            is_inline,
            bucket,
            prefix,
            endpoint,
            connection,
            ca_certificates,
            target,
            workload_namespace: attribute(context::POD_NAMESPACE).map(str::to_owned),
            service_account: attribute(context::SERVICE_ACCOUNT_NAME).map(str::to_owned),
            access,
            volume_access,
            arguments,
            fs_group: fs_group.map(|it| it.to_string()),
            identity,
            declared_source,
        })
    }

    /// Whether the driver's keys are used in place of a Secret. Such a workload never shares a source with one that has a Secret, because
    /// the identity is part of the sharing key.
    pub fn has_fallen_back(&self) -> bool {
        self.identity.source() != self.declared_source
    }

    /// What must be equal for another workload on this node to share this one's source.
    pub fn sharing_key(&self, node: &str) -> SharingKey {
        SharingKey {
            node: node.to_owned(),
            persistent_volume: self.volume.as_str().to_owned(),
            volume_id: self.volume_id.as_str().to_owned(),
            bucket: self.bucket.as_str().to_owned(),
            prefix: self.prefix.clone(),
            endpoint: self.endpoint.clone(),
            connection: self.connection.clone(),
            mount_options: self.arguments.normalised().join("\n"),
            fs_group: self.fs_group.clone(),
            authentication_source: self.identity.source(),
            secret: None,
            volume_access: self.volume_access,
            // Other identities belong to the volume: the driver's, or that of the Secret the PV names.
            workload_namespace: self.identity.workload().map(|it| it.namespace.clone()),
            service_account: self.identity.workload().map(|it| it.service_account.clone()),
            role: self.identity.workload().and_then(|it| it.role.clone()),
        }
    }
}

impl AccessMode {
    pub const fn is_single_node(&self) -> bool {
        matches!(self, Self::SingleNodeMultiWriter | Self::SingleNodeSingleWriter)
    }
}

impl Access {
    pub const fn is_read_only(self) -> bool {
        matches!(self, Self::ReadOnly)
    }

    /// The stricter of both.
    pub(crate) const fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::ReadWrite, Self::ReadWrite) => Self::ReadWrite,
            (Self::ReadOnly, _) | (_, Self::ReadOnly) => Self::ReadOnly,
        }
    }
}

impl InvalidPublish {
    /// Whether the request is well formed and only its credentials are not usable.
    pub const fn is_about_credentials(&self) -> bool {
        matches!(self, Self::Credentials { .. } | Self::Token { .. })
    }
}

pub(crate) fn parse_access_mode(mode: Option<&AccessMode>) -> Result<Access, InvalidPublish> {
    match mode {
        Some(
            AccessMode::MultiNodeMultiWriter | AccessMode::SingleNodeMultiWriter | AccessMode::SingleNodeSingleWriter,
        ) => Ok(Access::ReadWrite),
        Some(AccessMode::MultiNodeReaderOnly) => Ok(Access::ReadOnly),
        Some(AccessMode::Other(mode)) => Err(InvalidPublish::AccessMode { mode: mode.clone() }),
        None => Err(InvalidPublish::AccessMode { mode: "missing".to_owned() }),
    }
}

/// The kernel enforces read-only, on the source and on the bind mount: the engine need not know.
pub(crate) fn take_read_only(arguments: &mut MountArguments) -> Result<Access, InvalidPublish> {
    let values = arguments.remove("--read-only");
    let access = if values.is_empty() { Access::ReadWrite } else { Access::ReadOnly };
    match values.into_iter().flatten().next() {
        Some(value) => Err(InvalidPublish::ReadOnlyWithValue { value }),
        None => Ok(access),
    }
}

pub(crate) fn refuse_root_as_owner(arguments: &MountArguments) -> Result<(), InvalidPublish> {
    for option in ["--uid", "--gid"] {
        let is_root = |value: &str| value.parse::<u32>() == Ok(0);
        if arguments.values(option).flatten().any(is_root) {
            return Err(InvalidPublish::OwnedByRoot { option });
        }
    }
    Ok(())
}

pub(crate) fn parse_prefix(text: Option<&str>, arguments: &MountArguments) -> Result<Option<Prefix>, InvalidPublish> {
    refuse_reserved_prefix(arguments)?;
    let Some(text) = text else {
        return Ok(None);
    };
    if arguments.has("--prefix") {
        return Err(InvalidPublish::PrefixTwice);
    }
    text.parse().map(Some).map_err(|cause| InvalidPublish::Prefix { cause })
}

/// The attribute is checked when it is parsed; the mount option takes any text.
pub(crate) fn refuse_reserved_prefix(arguments: &MountArguments) -> Result<(), InvalidPublish> {
    match arguments.values("--prefix").flatten().find(|it| prefix::is_reserved(it)) {
        Some(value) => Err(InvalidPublish::ReservedPrefix { value: value.to_owned() }),
        None => Ok(()),
    }
}

pub(crate) fn parse_endpoint(
    text: Option<&str>,
    source: AuthenticationSource,
) -> Result<Option<EndpointUrl>, InvalidPublish> {
    let Some(text) = text else {
        return Ok(None);
    };
    let endpoint = text.parse().map_err(|cause| InvalidPublish::Endpoint { cause })?;
    match source {
        AuthenticationSource::Secret | AuthenticationSource::Pod => Ok(Some(endpoint)),
        AuthenticationSource::Driver => Err(InvalidPublish::EndpointWithoutSecret),
    }
}

fn parse_fs_group(text: &str) -> Result<Option<u32>, InvalidPublish> {
    if text.is_empty() {
        return Ok(None);
    }
    text.parse().map(Some).map_err(|_| InvalidPublish::FsGroup { value: text.to_owned() })
}

/// Defaults for what the mount options do not set.
fn add_defaults(arguments: &mut MountArguments, fs_group: Option<u32>) {
    // The engine rejects group 0; Pods with fsGroup 0 work without these defaults.
    if let Some(group @ 1..) = fs_group
        && !arguments.has("--gid")
    {
        arguments.set("--gid", Some(&group.to_string()));
        // The engine rejects both at once; the option asks for root alone.
        if !arguments.has("--allow-root") {
            arguments.set_if_absent("--allow-other", None);
        }
        arguments.set_if_absent("--dir-mode", Some("770"));
        arguments.set_if_absent("--file-mode", Some("660"));
    }
    if !arguments.has("--allow-other") {
        arguments.set_if_absent("--allow-root", None);
    }
}

#[cfg(test)]
mod tests;
