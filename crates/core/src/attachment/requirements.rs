//! Which of a workload's volumes are ours, and what each of them requires. Claims and PVs may appear in any order: when
//! something that was missing appears, the workload is reconciled again.

use std::collections::BTreeMap;

use crate::arguments::MountArguments;
use crate::bucket_reference::BucketReference;
use crate::identifiers::{PvName, VolumeId, WorkloadUid};
use crate::names::inline_volume_name;
use crate::policy::{self, PolicyError};
use crate::publish::{
    AccessMode, AuthenticationSource, InvalidPublish, context, inline_options, parse_access_mode, parse_connection,
    parse_endpoint, parse_prefix, parse_role, parse_source, refuse_root_as_owner, require_own_keys, restrict_inline,
    take_read_only,
};
use crate::sharing::SharingKey;

use super::facts::{AttachmentFields, Workload};

/// How a workload names a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClaimSource {
    Claim(String),
    /// A generic ephemeral volume: its claim is created for this workload alone and named after both.
    Ephemeral {
        volume: String,
    },
    /// A volume of this driver that is written in the workload's spec.
    Inline(InlineVolume),
}

/// An inline volume: it exists as long as its workload, and belongs to it alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InlineVolume {
    /// Its name in the workload's spec.
    pub name: String,
    pub attributes: BTreeMap<String, String>,
    /// Name of the Secret in the workload's namespace.
    pub secret: Option<String>,
}

/// A PVC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    pub namespace: String,
    pub name: String,
    pub uid: String,
    pub is_bound: bool,
    pub volume: Option<String>,
    /// The Pod that controls it, for claims of ephemeral volumes.
    pub owner: Option<WorkloadUid>,
}

/// A PV.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeFacts {
    pub name: PvName,
    /// `None` if it is no CSI volume.
    pub driver: Option<String>,
    pub handle: String,
    pub claim: Option<ClaimRef>,
    /// `namespace/name` of `nodePublishSecretRef`.
    pub secret: Option<String>,
    pub mount_options: Vec<String>,
    pub attributes: BTreeMap<String, String>,
    /// The first of its access modes: the one that kubelet sends.
    pub access_mode: Option<AccessMode>,
    /// Why no Mountpoint Pod can be created from its attributes.
    pub pod_problem: Option<String>,
    pub lifecycle: VolumeLifecycle,
}

/// Who wrote a volume: an administrator, or the author of a Pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VolumeLifecycle {
    Persistent,
    Inline,
}

/// The claim that a PV is bound to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimRef {
    pub namespace: String,
    pub name: String,
    /// Missing in a PV that an administrator reserved and that is not claimed yet.
    pub uid: Option<String>,
}

/// Looks up claims and PVs.
pub trait VolumeLister {
    fn claim(&self, namespace: &str, name: &str) -> Option<Claim>;
    fn volume(&self, name: &str) -> Option<VolumeFacts>;
}

/// A volume that a workload requires on a node, with everything that must be equal to share its source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountRequirement {
    pub key: SharingKey,
    pub fields: AttachmentFields,
    pub scope: NodeScope,
}

/// On how many nodes a volume may be used at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeScope {
    AllNodes,
    /// `ReadWriteOnce` or `ReadWriteOncePod`.
    SingleNode,
}

/// The volumes of a workload.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequiredVolumes {
    /// Each of our volumes once, however often the workload mounts it.
    pub ours: BTreeMap<PvName, Result<MountRequirement, VolumeRefusal>>,
    /// Claims that do not lead to a volume yet.
    pub unresolved: BTreeMap<String, UnresolvedClaim>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnresolvedClaim {
    #[error("the claim does not exist yet")]
    ClaimMissing,

    #[error("the claim belongs to another Pod")]
    ClaimOfAnother,

    #[error("the claim is not bound yet")]
    ClaimNotBound,

    #[error("the claim's PersistentVolume does not exist yet")]
    VolumeMissing,

    #[error("the claim's PersistentVolume is bound to another claim")]
    VolumeOfAnother,
}

/// Why a volume is not served, with the same message as the node's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VolumeRefusal {
    #[error("the volume cannot be published")]
    Publish {
        #[source]
        cause: InvalidPublish,
    },

    #[error("the volume's mount options contradict each other")]
    MountOptions {
        #[source]
        cause: PolicyError,
    },

    #[error("no Mountpoint Pod can be created for the volume: {problem}")]
    MountpointPod { problem: String },
}

/// The volumes of this workload, as far as they are known now. A workload without a node requires none yet.
pub fn required_volumes(workload: &Workload, driver: &str, catalog: &impl VolumeLister) -> RequiredVolumes {
    match &workload.node {
        Some(node) => volumes_on(node, workload, driver, catalog),
        None => RequiredVolumes::default(),
    }
}

/// What a workload will require on whatever node it is scheduled to; the requirements name no node.
pub fn unscheduled_volumes(workload: &Workload, driver: &str, catalog: &impl VolumeLister) -> RequiredVolumes {
    volumes_on("", workload, driver, catalog)
}

fn volumes_on(node: &str, workload: &Workload, driver: &str, catalog: &impl VolumeLister) -> RequiredVolumes {
    let mut required = RequiredVolumes::default();
    for reference in &workload.claims {
        if let ClaimSource::Inline(inline) = reference {
            let volume = inline.facts(workload, driver);
            required.ours.insert(volume.name.clone(), volume.requirement(workload, node));
            continue;
        }
        let name = reference.claim_name(workload);
        match find_volume(workload, reference, &name, catalog) {
            Ok(volume) if volume.driver.as_deref() == Some(driver) => {
                let requirement = volume.requirement(workload, node);
                required.ours.insert(volume.name, requirement);
            }
            Ok(_) => {}
            Err(cause) => {
                required.unresolved.insert(name, cause);
            }
        }
    }
    required
}

impl ClaimSource {
    /// The name of the claim that is meant.
    pub fn claim_name(&self, workload: &Workload) -> String {
        match self {
            Self::Claim(name) => name.clone(),
            Self::Ephemeral { volume } => format!("{}-{volume}", workload.name),
            // It has none; no claim has this name.
            Self::Inline(_) => String::new(),
        }
    }
}

impl InlineVolume {
    /// What stands in for the name of a PV: the handle that kubelet makes of the volume.
    pub fn volume_name(&self, workload: &WorkloadUid) -> PvName {
        inline_volume_name(workload, &self.name)
    }

    /// The same as for a PV.
    pub fn facts(&self, workload: &Workload, driver: &str) -> VolumeFacts {
        let name = self.volume_name(&workload.uid);
        VolumeFacts {
            handle: name.to_string(),
            name,
            driver: Some(driver.to_owned()),
            claim: None,
            secret: self.secret.as_ref().map(|it| format!("{}/{it}", workload.namespace)),
            mount_options: inline_options(&self.attributes),
            attributes: self.attributes.clone(),
            // The volume belongs to one Pod.
            access_mode: Some(AccessMode::MultiNodeMultiWriter),
            pod_problem: None,
            lifecycle: VolumeLifecycle::Inline,
        }
    }
}

impl VolumeFacts {
    pub fn scope(&self) -> NodeScope {
        match &self.access_mode {
            Some(mode) if mode.is_single_node() => NodeScope::SingleNode,
            Some(_) | None => NodeScope::AllNodes,
        }
    }

    /// What a workload on this node requires to use this volume, or why it cannot.
    fn requirement(&self, workload: &Workload, node: &str) -> Result<MountRequirement, VolumeRefusal> {
        let publish = |cause| VolumeRefusal::Publish { cause };
        let attribute = |key: &str| self.attributes.get(key).map(String::as_str).filter(|it| !it.is_empty());

        let volume_id: VolumeId = self.handle.parse().map_err(|_| publish(InvalidPublish::VolumeIdMissing))?;
        let bucket: BucketReference = attribute(context::BUCKET_NAME)
            .ok_or(publish(InvalidPublish::BucketNameMissing))?
            .parse()
            .map_err(|cause| publish(InvalidPublish::BucketName { cause }))?;
        let mode_access = parse_access_mode(self.access_mode.as_ref()).map_err(publish)?;
        let arguments = MountArguments::parse(&self.mount_options)
            .map_err(|cause| publish(InvalidPublish::MountOptions { cause }))?;
        refuse_root_as_owner(&arguments).map_err(publish)?;
        let option_access = take_read_only(&mut arguments.clone()).map_err(publish)?;
        policy::apply(arguments.clone(), "").map_err(|cause| VolumeRefusal::MountOptions { cause })?;
        let prefix = parse_prefix(attribute(context::PREFIX), &arguments).map_err(publish)?;
        let authentication_source = parse_source(attribute(context::AUTHENTICATION_SOURCE)).map_err(publish)?;
        if self.lifecycle == VolumeLifecycle::Inline {
            restrict_inline(&self.attributes, authentication_source, &arguments)
                .map_err(|cause| publish(InvalidPublish::Inline { cause }))?;
        }
        let connection = parse_connection(&self.attributes, &arguments, &bucket).map_err(publish)?;
        require_own_keys(&connection, authentication_source).map_err(publish)?;
        let endpoint = parse_endpoint(attribute(context::ENDPOINT_URL), authentication_source).map_err(publish)?;
        let is_workload_s = authentication_source == AuthenticationSource::Pod;
        let role = parse_role(attribute(context::ROLE_ARN).filter(|_| is_workload_s)).map_err(publish)?;
        let fs_group = parse_fs_group(workload.fs_group).map_err(publish)?;
        if let Some(problem) = &self.pod_problem {
            return Err(VolumeRefusal::MountpointPod { problem: problem.clone() });
        }

        let key = SharingKey {
            node: node.to_owned(),
            persistent_volume: self.name.as_str().to_owned(),
            volume_id: volume_id.as_str().to_owned(),
            bucket: bucket.as_str().to_owned(),
            prefix,
            endpoint,
            connection,
            mount_options: arguments.normalised().join("\n"),
            fs_group,
            authentication_source,
            secret: self.secret.clone().filter(|_| authentication_source == AuthenticationSource::Secret),
            volume_access: mode_access.and(option_access),
            // Other identities belong to the volume: the driver's, or that of the Secret that the PV names.
            workload_namespace: is_workload_s.then(|| workload.namespace.clone()),
            service_account: is_workload_s.then(|| workload.service_account.clone()),
            role,
        };
        Ok(MountRequirement::new(key, self.name.clone(), &self.mount_options, self.scope()))
    }
}

impl MountRequirement {
    /// The fields of an attachment for this key.
    pub fn new(key: SharingKey, persistent_volume: PvName, mount_options: &[String], scope: NodeScope) -> Self {
        let fields = AttachmentFields {
            node: key.node.clone(),
            persistent_volume,
            volume_id: key.volume_id.clone(),
            mount_options: mount_options.join(","),
            fs_group: key.fs_group.clone().unwrap_or_default(),
            authentication_source: Some(key.authentication_source.as_str().to_owned()),
            workload_namespace: key.workload_namespace.clone(),
            service_account: key.service_account.clone(),
        };
        Self { key, fields, scope }
    }
}

fn find_volume(
    workload: &Workload,
    reference: &ClaimSource,
    name: &str,
    catalog: &impl VolumeLister,
) -> Result<VolumeFacts, UnresolvedClaim> {
    let claim = catalog.claim(&workload.namespace, name).ok_or(UnresolvedClaim::ClaimMissing)?;
    // A claim that happens to have the name of an ephemeral one must not be mounted in its place.
    if matches!(reference, ClaimSource::Ephemeral { .. }) && claim.owner.as_ref() != Some(&workload.uid) {
        return Err(UnresolvedClaim::ClaimOfAnother);
    }
    let volume = claim.volume.as_deref().filter(|it| claim.is_bound && !it.is_empty());
    let volume = catalog.volume(volume.ok_or(UnresolvedClaim::ClaimNotBound)?).ok_or(UnresolvedClaim::VolumeMissing)?;
    let is_bound_back = volume.claim.as_ref().is_some_and(|it| {
        it.namespace == claim.namespace && it.name == claim.name && it.uid.as_ref().is_none_or(|uid| *uid == claim.uid)
    });
    if is_bound_back { Ok(volume) } else { Err(UnresolvedClaim::VolumeOfAnother) }
}

fn parse_fs_group(fs_group: Option<i64>) -> Result<Option<String>, InvalidPublish> {
    let Some(value) = fs_group else {
        return Ok(None);
    };
    match u32::try_from(value) {
        Ok(group) => Ok(Some(group.to_string())),
        Err(_) => Err(InvalidPublish::FsGroup { value: value.to_string() }),
    }
}
