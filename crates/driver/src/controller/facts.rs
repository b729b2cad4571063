//! Converts objects of the Kubernetes API to facts of core. What no rule needs is dropped here, so that a cache of many
//! thousands of objects stays small.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod, PodSpec, PodStatus, SecretReference};
use k8s_openapi::api::storage::v1::CSINode;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use s3csi_core::attachment::{
    Attachment, Claim, ClaimRef, ClaimSource, HeadroomGate, InlineVolume, MountpointPod, PodPhase, Timestamp,
    VolumeFacts, VolumeLifecycle, Workload, is_mountpoint_pod_name,
};
use s3csi_core::headroom::{HeadroomPod, is_headroom_pod_name};
use s3csi_core::mountpoint_pod::{PodShape, PodTemplate};
use s3csi_core::{AccessMode, PvName};

use crate::api::MetadataKeys;
use crate::api::{self, MountpointS3PodAttachment, MountpointS3PodAttachmentStatus, PodCondition};

/// A Mountpoint Pod, and what it was created for as far as its metadata say so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountpointPodFacts {
    pub pod: MountpointPod,
    pub node: Option<String>,
    pub persistent_volume: Option<PvName>,
    /// The condition that its node writes.
    pub mounted: Option<PodCondition>,
}

/// A Pod that a controller has created in the namespace of Mountpoint Pods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OwnPod {
    Mountpoint(MountpointPodFacts),
    Headroom(HeadroomPod),
}

/// An attachment and its status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttachmentWithStatus {
    pub attachment: Attachment,
    pub status: Option<MountpointS3PodAttachmentStatus>,
}

/// A node, and whether its kubelet knows the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeRegistration {
    pub node: String,
    pub is_registered: bool,
}

pub fn node_registration(driver: &str, node: &CSINode) -> Option<NodeRegistration> {
    let is_registered = node.spec.drivers.iter().any(|it| it.name == driver);
    Some(NodeRegistration { node: node.metadata.name.clone()?, is_registered })
}

/// `None` for Pods on nodes that mount neither a claim nor an inline volume of ours: most Pods of a cluster. Those without a node may
/// have a scheduling gate.
pub fn workload(driver: &str, pod: &Pod) -> Option<Workload> {
    let Pod { metadata, spec, status } = pod;
    let mounted = PodCondition::read(pod, &PodCondition::mounted(driver));
    let spec = spec.as_ref()?;
    let claims: Vec<ClaimSource> = spec
        .volumes
        .iter()
        .flatten()
        .filter_map(|volume| match (&volume.persistent_volume_claim, &volume.ephemeral, &volume.csi) {
            (Some(claim), _, _) => Some(ClaimSource::Claim(claim.claim_name.clone())),
            (None, Some(_), _) => Some(ClaimSource::Ephemeral { volume: volume.name.clone() }),
            (None, None, Some(csi)) if csi.driver == driver => Some(ClaimSource::Inline(InlineVolume {
                name: volume.name.clone(),
                attributes: csi.volume_attributes.clone().unwrap_or_default(),
                secret: csi.node_publish_secret_ref.as_ref().map(|it| it.name.clone()).filter(|it| !it.is_empty()),
            })),
            (None, None, _) => None,
        })
        .collect();
    let node = spec.node_name.clone().filter(|it| !it.is_empty());
    if claims.is_empty() && node.is_some() {
        return None;
    }
    Some(Workload {
        uid: metadata.uid.as_deref()?.parse().ok()?,
        namespace: metadata.namespace.clone()?,
        name: metadata.name.clone()?,
        service_account: spec.service_account_name.clone().unwrap_or_else(|| "default".to_owned()),
        node,
        phase: phase(status.as_ref()),
        is_terminating: metadata.deletion_timestamp.is_some(),
        is_unready: status.as_ref().is_some_and(is_unready),
        has_dead_mount: mounted.is_some_and(|it| it.status == "False"),
        fs_group: spec.security_context.as_ref().and_then(|it| it.fs_group),
        claims,
        headroom_gate: headroom_gate(driver, metadata, spec),
    })
}

fn headroom_gate(driver: &str, metadata: &ObjectMeta, spec: &PodSpec) -> HeadroomGate {
    let keys = MetadataKeys::new(driver);
    let ours = keys.headroom_gate();
    if spec.scheduling_gates.iter().flatten().any(|it| it.name == ours) {
        return HeadroomGate::Present;
    }
    let label = metadata.labels.as_ref().and_then(|it| it.get(&keys.headroom_for_workload()));
    // A label that was copied from another Pod says nothing.
    let is_own = label.is_some_and(|it| Some(it) == metadata.uid.as_ref());
    if is_own { HeadroomGate::Removed } else { HeadroomGate::Absent }
}

/// `None` for other Pods in the namespace.
pub fn own_pod(keys: &MetadataKeys, pod: &Pod) -> Option<OwnPod> {
    mountpoint_pod_facts(keys, pod).map(OwnPod::Mountpoint).or_else(|| headroom_pod(keys, pod).map(OwnPod::Headroom))
}

pub fn headroom_pod(keys: &MetadataKeys, pod: &Pod) -> Option<HeadroomPod> {
    let Pod { metadata, status, .. } = pod;
    let label = metadata.labels.as_ref()?.get(&keys.headroom_for_pod())?;
    let volume = metadata.annotations.as_ref()?.get(&keys.headroom_for_volume())?;
    Some(HeadroomPod {
        name: metadata.name.clone().filter(|it| is_headroom_pod_name(it))?,
        uid: metadata.uid.clone()?,
        workload: label.parse().ok()?,
        persistent_volume: volume.parse().ok()?,
        phase: phase(status.as_ref()),
        is_terminating: metadata.deletion_timestamp.is_some(),
    })
}

/// `None` for other Pods in the namespace.
pub fn mountpoint_pod_facts(keys: &MetadataKeys, pod: &Pod) -> Option<MountpointPodFacts> {
    let Pod { metadata, spec, status } = pod;
    let name = metadata.name.clone().filter(|it| is_mountpoint_pod_name(it))?;
    let label = |key: &str| metadata.labels.as_ref().and_then(|it| it.get(key)).cloned();
    let annotation = |key: &str| metadata.annotations.as_ref().and_then(|it| it.get(key)).cloned();
    let is_annotated = |key: &str| annotation(key).as_deref() == Some("true");
    let volume = annotation(&keys.volume_name()).or_else(|| label(&keys.volume_name()));
    let mounted = PodCondition::read(pod, &PodCondition::mounted(keys.driver()));
    let movable = PodCondition::read(pod, &PodCondition::movable(keys.driver()));
    Some(MountpointPodFacts {
        node: spec.as_ref().and_then(chosen_node),
        persistent_volume: volume.and_then(|it| it.parse().ok()),
        pod: MountpointPod {
            source: label(&keys.source()).filter(|it| is_mountpoint_pod_name(it)).unwrap_or_else(|| name.clone()),
            name,
            uid: metadata.uid.clone()?,
            resource_version: metadata.resource_version.clone().unwrap_or_default(),
            phase: phase(status.as_ref()),
            is_terminating: metadata.deletion_timestamp.is_some(),
            is_retired: is_annotated(&keys.needs_unmount()),
            refuses_new_workloads: is_annotated(&keys.no_new_workload()),
            driver_version: label(&keys.driver_version()),
            is_mounted: mounted.as_ref().is_some_and(PodCondition::is_true),
            is_movable: movable.is_some_and(|it| it.is_true()),
            created_at: created_at(metadata),
            problem: status.as_ref().and_then(api::pod_problem),
            warm: label(&keys.warm()).map(PodTemplate::from_label),
        },
        mounted,
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

/// Of volumes of other drivers only the driver's name is kept.
pub fn volume(driver: &str, volume: &PersistentVolume) -> Option<VolumeFacts> {
    let name: PvName = volume.metadata.name.as_deref()?.parse().ok()?;
    let spec = volume.spec.as_ref()?;
    let csi = spec.csi.as_ref();
    let claim = spec.claim_ref.as_ref().map(|it| ClaimRef {
        namespace: it.namespace.clone().unwrap_or_default(),
        name: it.name.clone().unwrap_or_default(),
        uid: it.uid.clone().filter(|it| !it.is_empty()),
    });
    let Some(ours) = csi.filter(|it| it.driver == driver) else {
        return Some(VolumeFacts {
            name,
            driver: csi.map(|it| it.driver.clone()),
            handle: String::new(),
            claim,
            secret: None,
            mount_options: Vec::new(),
            attributes: std::collections::BTreeMap::new(),
            access_mode: None,
            pod_problem: None,
            lifecycle: VolumeLifecycle::Persistent,
        });
    };
    let attributes = ours.volume_attributes.clone().unwrap_or_default();
    let mount_options = spec.mount_options.clone().unwrap_or_default();
    Some(VolumeFacts {
        name,
        driver: Some(ours.driver.clone()),
        handle: ours.volume_handle.clone(),
        claim,
        secret: ours.node_publish_secret_ref.as_ref().map(secret_name),
        access_mode: spec.access_modes.iter().flatten().next().map(|it| access_mode(it)),
        pod_problem: PodShape::parse(&attributes, &mount_options).err().map(|it| it.to_string()),
        mount_options,
        attributes,
        lifecycle: VolumeLifecycle::Persistent,
    })
}

pub fn attachment(object: &MountpointS3PodAttachment) -> Option<AttachmentWithStatus> {
    Some(AttachmentWithStatus { attachment: api::attachment_facts(object)?, status: object.status.clone() })
}

fn phase(status: Option<&PodStatus>) -> PodPhase {
    PodPhase::from_text(status.and_then(|it| it.phase.as_deref()))
}

fn is_unready(status: &PodStatus) -> bool {
    status.conditions.iter().flatten().any(|it| it.type_ == "ContainersReady" && it.status == "False")
}

fn created_at(metadata: &ObjectMeta) -> Timestamp {
    metadata.creation_timestamp.as_ref().map_or(Timestamp::from_unix_seconds(0), api::timestamp)
}

/// The node that a Mountpoint Pod is for; known before it is scheduled.
fn chosen_node(spec: &PodSpec) -> Option<String> {
    let affinity = spec.affinity.as_ref().and_then(|it| it.node_affinity.as_ref());
    let required = affinity.and_then(|it| it.required_during_scheduling_ignored_during_execution.as_ref());
    let fields =
        required.into_iter().flat_map(|it| &it.node_selector_terms).flat_map(|it| it.match_fields.iter().flatten());
    let mut names = fields.filter(|it| it.key == "metadata.name").filter_map(|it| it.values.as_ref()?.first().cloned());
    spec.node_name.clone().filter(|it| !it.is_empty()).or_else(|| names.next())
}

fn secret_name(secret: &SecretReference) -> String {
    let text = |it: &Option<String>| it.clone().unwrap_or_default();
    format!("{}/{}", text(&secret.namespace), text(&secret.name))
}

/// The CSI access mode that kubelet derives from a PV's.
fn access_mode(text: &str) -> AccessMode {
    match text {
        "ReadWriteMany" => AccessMode::MultiNodeMultiWriter,
        "ReadOnlyMany" => AccessMode::MultiNodeReaderOnly,
        "ReadWriteOnce" => AccessMode::SingleNodeMultiWriter,
        "ReadWriteOncePod" => AccessMode::SingleNodeSingleWriter,
        other => AccessMode::Other(other.to_owned()),
    }
}
