//! Objects of the Kubernetes API in the words of core. Whatever no rule asks for is dropped here, so that a cache of many
//! thousands of objects stays small.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod, PodSpec, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use s3csi_core::attachment::{
    Attachment, Claim, ClaimOf, ClaimReference, MountpointPod, Phase, Timestamp, Volume, Workload,
    is_mountpoint_pod_name,
};
use s3csi_core::mountpoint_pod::PodShape;
use s3csi_core::{AccessMode, PvName};

use super::names::Names;
use crate::api::{self, MountpointS3PodAttachment, MountpointS3PodAttachmentStatus, PodCondition};

/// A Mountpoint Pod and for whom it was started, as far as it says so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartedPod {
    pub pod: MountpointPod,
    pub node: Option<String>,
    pub persistent_volume: Option<PvName>,
    /// What its node says of the source.
    pub mounted: Option<PodCondition>,
}

/// An attachment and what people were told about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReportedAttachment {
    pub attachment: Attachment,
    pub status: Option<MountpointS3PodAttachmentStatus>,
}

/// `None` for Pods that mount no claim: most Pods of a cluster.
pub fn workload(pod: &Pod) -> Option<Workload> {
    let Pod { metadata, spec, status } = pod;
    let spec = spec.as_ref()?;
    let claims: Vec<ClaimReference> = spec
        .volumes
        .iter()
        .flatten()
        .filter_map(|volume| match (&volume.persistent_volume_claim, &volume.ephemeral) {
            (Some(claim), _) => Some(ClaimReference::Claim(claim.claim_name.clone())),
            (None, Some(_)) => Some(ClaimReference::Ephemeral { volume: volume.name.clone() }),
            (None, None) => None,
        })
        .collect();
    if claims.is_empty() {
        return None;
    }
    Some(Workload {
        uid: metadata.uid.as_deref()?.parse().ok()?,
        namespace: metadata.namespace.clone()?,
        name: metadata.name.clone()?,
        service_account: spec.service_account_name.clone().unwrap_or_else(|| "default".to_owned()),
        node: spec.node_name.clone().filter(|it| !it.is_empty()),
        phase: phase(status.as_ref()),
        is_terminating: metadata.deletion_timestamp.is_some(),
        fs_group: spec.security_context.as_ref().and_then(|it| it.fs_group),
        claims,
    })
}

/// `None` for Pods that somebody else put into the namespace.
pub fn started_pod(names: &Names, pod: &Pod) -> Option<StartedPod> {
    let Pod { metadata, spec, status } = pod;
    let name = metadata.name.clone().filter(|it| is_mountpoint_pod_name(it))?;
    let label = |key: &str| metadata.labels.as_ref().and_then(|it| it.get(key)).cloned();
    let annotation = |key: &str| metadata.annotations.as_ref().and_then(|it| it.get(key)).cloned();
    let is_annotated = |key: &str| annotation(key).as_deref() == Some("true");
    let volume = annotation(&names.volume_name()).or_else(|| label(&names.volume_name()));
    Some(StartedPod {
        node: spec.as_ref().and_then(chosen_node),
        persistent_volume: volume.and_then(|it| it.parse().ok()),
        mounted: PodCondition::read(pod, names.driver()),
        pod: MountpointPod {
            name,
            uid: metadata.uid.clone()?,
            resource_version: metadata.resource_version.clone().unwrap_or_default(),
            phase: phase(status.as_ref()),
            is_terminating: metadata.deletion_timestamp.is_some(),
            is_retired: is_annotated(&names.needs_unmount()),
            refuses_new_workloads: is_annotated(&names.no_new_workload()),
            driver_version: label(&names.driver_version()),
            created_at: created_at(metadata),
            trouble: status.as_ref().and_then(trouble),
        },
    })
}

pub fn claim(claim: &PersistentVolumeClaim) -> Option<Claim> {
    let PersistentVolumeClaim { metadata, spec, status } = claim;
    let owner = metadata.owner_references.iter().flatten().find(|it| it.controller == Some(true) && it.kind == "Pod");
    Some(Claim {
        namespace: metadata.namespace.clone()?,
        name: metadata.name.clone()?,
        uid: metadata.uid.clone().unwrap_or_default(),
        is_bound: status.as_ref().and_then(|it| it.phase.as_deref()) == Some("Bound"),
        volume: spec.as_ref().and_then(|it| it.volume_name.clone()).filter(|it| !it.is_empty()),
        owner: owner.and_then(|it| it.uid.parse().ok()),
    })
}

/// Of other drivers' volumes only that they are theirs.
pub fn volume(driver: &str, volume: &PersistentVolume) -> Option<Volume> {
    let name: PvName = volume.metadata.name.as_deref()?.parse().ok()?;
    let spec = volume.spec.as_ref()?;
    let csi = spec.csi.as_ref();
    let claim = spec.claim_ref.as_ref().map(|it| ClaimOf {
        namespace: it.namespace.clone().unwrap_or_default(),
        name: it.name.clone().unwrap_or_default(),
        uid: it.uid.clone().filter(|it| !it.is_empty()),
    });
    let Some(ours) = csi.filter(|it| it.driver == driver) else {
        return Some(Volume {
            name,
            driver: csi.map(|it| it.driver.clone()),
            handle: String::new(),
            claim,
            mount_options: Vec::new(),
            attributes: std::collections::BTreeMap::new(),
            access_mode: None,
            pod_problem: None,
        });
    };
    let attributes = ours.volume_attributes.clone().unwrap_or_default();
    let mount_options = spec.mount_options.clone().unwrap_or_default();
    Some(Volume {
        name,
        driver: Some(ours.driver.clone()),
        handle: ours.volume_handle.clone(),
        claim,
        access_mode: spec.access_modes.iter().flatten().next().map(|it| access_mode(it)),
        pod_problem: PodShape::parse(&attributes, &mount_options).err().map(|it| it.to_string()),
        mount_options,
        attributes,
    })
}

pub fn attachment(object: &MountpointS3PodAttachment) -> Option<ReportedAttachment> {
    Some(ReportedAttachment { attachment: api::attachment_facts(object)?, status: object.status.clone() })
}

fn phase(status: Option<&PodStatus>) -> Phase {
    Phase::from_text(status.and_then(|it| it.phase.as_deref()))
}

fn created_at(metadata: &ObjectMeta) -> Timestamp {
    metadata.creation_timestamp.as_ref().map_or(Timestamp::from_unix_seconds(0), api::timestamp)
}

/// The node that a Mountpoint Pod is for: known before the scheduler has confirmed it.
fn chosen_node(spec: &PodSpec) -> Option<String> {
    let affinity = spec.affinity.as_ref().and_then(|it| it.node_affinity.as_ref());
    let required = affinity.and_then(|it| it.required_during_scheduling_ignored_during_execution.as_ref());
    let fields =
        required.into_iter().flat_map(|it| &it.node_selector_terms).flat_map(|it| it.match_fields.iter().flatten());
    let mut names = fields.filter(|it| it.key == "metadata.name").filter_map(|it| it.values.as_ref()?.first().cloned());
    spec.node_name.clone().filter(|it| !it.is_empty()).or_else(|| names.next())
}

/// What keeps a Pod from running: of its containers, of the scheduler, of kubelet.
fn trouble(status: &PodStatus) -> Option<String> {
    let waiting = status.container_statuses.iter().flatten().filter_map(|it| it.state.as_ref()?.waiting.as_ref());
    let mut container = waiting.filter_map(|it| match (it.reason.as_deref(), it.message.as_deref()) {
        // Every Pod passes through these.
        (None | Some("ContainerCreating" | "PodInitializing"), None) => None,
        (reason, message) => Some([reason, message].into_iter().flatten().collect::<Vec<_>>().join(": ")),
    });
    let conditions = status.conditions.iter().flatten();
    let mut unscheduled = conditions
        .filter(|it| it.type_ == "PodScheduled" && it.status == "False")
        .filter_map(|it| it.message.clone().or_else(|| it.reason.clone()));
    container.next().or_else(|| unscheduled.next()).or_else(|| status.message.clone()).filter(|it| !it.is_empty())
}

/// What kubelet makes of a PV's access mode.
fn access_mode(text: &str) -> AccessMode {
    match text {
        "ReadWriteMany" => AccessMode::MultiNodeMultiWriter,
        "ReadOnlyMany" => AccessMode::MultiNodeReaderOnly,
        "ReadWriteOnce" => AccessMode::Other("SINGLE_NODE_WRITER".to_owned()),
        "ReadWriteOncePod" => AccessMode::Other("SINGLE_NODE_SINGLE_WRITER".to_owned()),
        other => AccessMode::Other(other.to_owned()),
    }
}
