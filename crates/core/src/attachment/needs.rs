//! Which of a workload's volumes are ours, and what each of them needs. Claims and PVs may appear in any order: whatever
//! is missing is waited for, and the next look decides anew.

use std::collections::BTreeMap;

use crate::arguments::Arguments;
use crate::bucket::BucketName;
use crate::identifiers::{PvName, VolumeId, WorkloadUid};
use crate::policy::{self, PolicyError};
use crate::publish::{
    AccessMode, AuthenticationSource, InvalidPublish, context, parse_access_mode, parse_endpoint, parse_prefix,
    refuse_root_as_owner, take_read_only,
};
use crate::sharing::SharingKey;

use super::facts::{Fields, Workload};

/// How a workload names a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClaimReference {
    Claim(String),
    /// A generic ephemeral volume: its claim is made for this workload alone and named after both.
    Ephemeral {
        volume: String,
    },
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
pub struct Volume {
    pub name: PvName,
    /// `None` if it is no CSI volume.
    pub driver: Option<String>,
    pub handle: String,
    pub claim: Option<ClaimOf>,
    pub mount_options: Vec<String>,
    pub attributes: BTreeMap<String, String>,
    /// The first of its access modes: the one that kubelet sends.
    pub access_mode: Option<AccessMode>,
    /// Why no Mountpoint Pod can be built from its attributes, in the words of whoever builds it.
    pub pod_problem: Option<String>,
}

/// Whom a PV is bound to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimOf {
    pub namespace: String,
    pub name: String,
    /// Missing in a PV that an administrator reserved and nobody claimed yet.
    pub uid: Option<String>,
}

/// Where claims and PVs are looked up.
pub trait Catalog {
    fn claim(&self, namespace: &str, name: &str) -> Option<Claim>;
    fn volume(&self, name: &str) -> Option<Volume>;
}

/// A volume that somebody needs on a node, with everything that must be equal to share its source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Need {
    pub key: SharingKey,
    pub fields: Fields,
}

/// What a workload uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Uses {
    /// Each of our volumes once, however often the workload mounts it.
    pub ours: BTreeMap<PvName, Result<Need, Refused>>,
    /// Claims of which nobody can say yet whose they are.
    pub waiting: BTreeMap<String, Waiting>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Waiting {
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

/// Why a volume is not served, in the same words as the node would say it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
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

    #[error("no Mountpoint Pod can be made for the volume: {problem}")]
    MountpointPod { problem: String },
}

/// What this workload uses, as far as it can be known now. A workload without a node uses nothing yet.
pub fn uses(workload: &Workload, driver: &str, catalog: &impl Catalog) -> Uses {
    let mut uses = Uses::default();
    let Some(node) = &workload.node else {
        return uses;
    };
    for reference in &workload.claims {
        let name = reference.claim_name(workload);
        match find_volume(workload, reference, &name, catalog) {
            Ok(volume) if volume.driver.as_deref() == Some(driver) => {
                let need = volume.need(workload, node);
                uses.ours.insert(volume.name, need);
            }
            Ok(_) => {}
            Err(waiting) => {
                uses.waiting.insert(name, waiting);
            }
        }
    }
    uses
}

impl ClaimReference {
    /// The name of the claim that is meant.
    pub fn claim_name(&self, workload: &Workload) -> String {
        match self {
            Self::Claim(name) => name.clone(),
            Self::Ephemeral { volume } => format!("{}-{volume}", workload.name),
        }
    }
}

impl Volume {
    /// What a workload on this node needs in order to use this volume, or why it cannot.
    fn need(&self, workload: &Workload, node: &str) -> Result<Need, Refused> {
        let publish = |cause| Refused::Publish { cause };
        let attribute = |key: &str| self.attributes.get(key).map(String::as_str).filter(|it| !it.is_empty());

        let volume_id: VolumeId = self.handle.parse().map_err(|_| publish(InvalidPublish::VolumeIdMissing))?;
        let bucket: BucketName = attribute(context::BUCKET_NAME)
            .ok_or(publish(InvalidPublish::BucketNameMissing))?
            .parse()
            .map_err(|cause| publish(InvalidPublish::BucketName { cause }))?;
        let mode_access = parse_access_mode(self.access_mode.as_ref()).map_err(publish)?;
        let arguments =
            Arguments::parse(&self.mount_options).map_err(|cause| publish(InvalidPublish::MountOptions { cause }))?;
        refuse_root_as_owner(&arguments).map_err(publish)?;
        let option_access = take_read_only(&mut arguments.clone()).map_err(publish)?;
        policy::apply(arguments.clone(), "").map_err(|cause| Refused::MountOptions { cause })?;
        let prefix = parse_prefix(attribute(context::PREFIX), &arguments).map_err(publish)?;
        let authentication_source = parse_source(attribute(context::AUTHENTICATION_SOURCE)).map_err(publish)?;
        let endpoint = parse_endpoint(attribute(context::ENDPOINT_URL), authentication_source).map_err(publish)?;
        let fs_group = parse_fs_group(workload.fs_group).map_err(publish)?;
        if let Some(problem) = &self.pod_problem {
            return Err(Refused::MountpointPod { problem: problem.clone() });
        }

        let key = SharingKey {
            node: node.to_owned(),
            persistent_volume: self.name.as_str().to_owned(),
            volume_id: volume_id.as_str().to_owned(),
            bucket: bucket.as_str().to_owned(),
            prefix,
            endpoint,
            mount_options: arguments.normalised().join("\n"),
            fs_group,
            authentication_source,
            volume_access: mode_access.and(option_access),
            // Both identities belong to the volume: the driver's, or that of the Secret the PV names.
            workload_namespace: None,
            service_account: None,
        };
        Ok(Need::new(key, self.name.clone(), &self.mount_options))
    }
}

impl Need {
    /// The fields of an attachment for this key.
    pub fn new(key: SharingKey, persistent_volume: PvName, mount_options: &[String]) -> Self {
        let fields = Fields {
            node: key.node.clone(),
            persistent_volume,
            volume_id: key.volume_id.clone(),
            mount_options: mount_options.join(","),
            fs_group: key.fs_group.clone().unwrap_or_default(),
            authentication_source: Some(key.authentication_source.as_str().to_owned()),
            workload_namespace: key.workload_namespace.clone(),
            service_account: key.service_account.clone(),
        };
        Self { key, fields }
    }
}

fn find_volume(
    workload: &Workload,
    reference: &ClaimReference,
    name: &str,
    catalog: &impl Catalog,
) -> Result<Volume, Waiting> {
    let claim = catalog.claim(&workload.namespace, name).ok_or(Waiting::ClaimMissing)?;
    // A claim that happens to have the name of an ephemeral one must not be mounted in its place.
    if matches!(reference, ClaimReference::Ephemeral { .. }) && claim.owner.as_ref() != Some(&workload.uid) {
        return Err(Waiting::ClaimOfAnother);
    }
    let volume = claim.volume.as_deref().filter(|it| claim.is_bound && !it.is_empty());
    let volume = catalog.volume(volume.ok_or(Waiting::ClaimNotBound)?).ok_or(Waiting::VolumeMissing)?;
    let is_bound_back = volume.claim.as_ref().is_some_and(|it| {
        it.namespace == claim.namespace && it.name == claim.name && it.uid.as_ref().is_none_or(|uid| *uid == claim.uid)
    });
    if is_bound_back { Ok(volume) } else { Err(Waiting::VolumeOfAnother) }
}

fn parse_source(text: Option<&str>) -> Result<AuthenticationSource, InvalidPublish> {
    match text {
        None | Some("driver") => Ok(AuthenticationSource::Driver),
        Some("secret") => Ok(AuthenticationSource::Secret),
        Some(other) => Err(InvalidPublish::AuthenticationSource { value: other.to_owned() }),
    }
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
