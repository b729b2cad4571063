//! Builds the Mountpoint Pod as an object of the Kubernetes API.
//!
//! It meets the Pod security standard `restricted`: no privileges, no service-account token, a read-only root file system.
//! The node mounts; this Pod only receives the FUSE descriptor.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Affinity, Capabilities, ConfigMapVolumeSource, Container, EmptyDirVolumeSource, EphemeralVolumeSource, KeyToPath,
    LocalObjectReference, NodeAffinity, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm,
    PersistentVolumeClaimSpec, PersistentVolumeClaimTemplate, Pod, PodSecurityContext, PodSpec, ResourceRequirements,
    SeccompProfile, SecurityContext, Toleration, Volume, VolumeMount, VolumeResourceRequirements,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use s3csi_core::mountpoint_pod::{
    CACHE_DIRECTORY, CacheVolume, DefaultResources, Medium, PodShape, PodTemplate, Resources, STAGE_DIRECTORY,
};
use s3csi_core::stage::StageLimit;
use s3csi_core::{PvName, WorkloadUid};
use s3csi_handoff::{COMMUNICATION_DIRECTORY, COMMUNICATION_VOLUME};
use serde_json::{Value, json};

use super::headroom_pod::HeadroomSettings;
use crate::api::{MetadataKeys, is_label_value};

/// What all Mountpoint Pods have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodSettings {
    pub keys: MetadataKeys,
    pub namespace: String,
    pub image: String,
    pub image_pull_policy: Option<String>,
    pub image_pull_secrets: Vec<String>,
    /// The mounter in the image.
    pub command: String,
    /// Arguments of every mounter.
    pub mounter_arguments: Vec<String>,
    pub priority_class: Option<String>,
    pub driver_version: String,
    pub mountpoint_version: String,
    /// A ConfigMap in the same namespace with the CA certificates that engines trust, as `ca-bundle.crt`.
    pub ca_config_map: Option<String>,
    /// For volumes that set none.
    pub default_resources: DefaultResources,
    /// The limit of the staging volume, unless the volume sets another.
    pub stage: StageLimit,
    pub platform: Platform,
    /// `None`: no room is reserved for Mountpoint Pods.
    pub headroom: Option<HeadroomSettings>,
}

/// What assigns the user and group of a Pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Platform {
    /// The Pod's own security context.
    Kubernetes,
    /// Security context constraints, which reject Pods that set their own.
    OpenShift,
}

/// One Mountpoint Pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodParameters<'a> {
    pub name: &'a str,
    /// The source it serves. Another name than its own if it takes over from a Pod that still serves.
    pub source: &'a str,
    /// The UID of its node, if it is known.
    pub node_uid: Option<&'a str>,
    pub node: &'a str,
    pub workload: &'a WorkloadUid,
    pub persistent_volume: &'a PvName,
    pub volume_id: &'a str,
    pub shape: &'a PodShape,
    pub room: Room,
}

/// Whether the workload of a Mountpoint Pod waits for it and got headroom Pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    NotReserved,
    /// It may preempt Pods of lower priority; headroom Pods have the lowest.
    Reserved,
}

const CONTAINER: &str = "mountpoint";

/// Credentials and a socket; in memory, so that no key ever touches a disk.
const COMM_SIZE: &str = "10Mi";

const CACHE: &str = "local-cache";
const STAGE: &str = "local-stage";
const CA: &str = "custom-ca-cert";
const CA_DIRECTORY: &str = "/custom-ca";
const CA_FILE: &str = "ca-bundle.crt";

/// Not root. The node writes files for the group of this number, which `fsGroup` adds. The primary group stays that of the image, 0: files
/// of volumes that set no group have it, as with earlier drivers.
const USER: i64 = 1000;

/// A drained node ends Mountpoint Pods together with workloads; the mounter goes on serving until they are gone.
const GRACE_SECONDS: i64 = 600;

/// Without it the cluster autoscaler would not remove a node with a Pod that has no controller.
const AUTOSCALER_ANNOTATION: &str = "cluster-autoscaler.kubernetes.io/daemonset-pod";

pub fn mountpoint_pod(settings: &PodSettings, parameters: &PodParameters<'_>) -> Pod {
    let PodParameters { name, source: _, node_uid, node, workload: _, persistent_volume: _, volume_id: _, shape, room } =
        *parameters;
    let SourceMetadata { labels, annotations } = source_metadata(&settings.keys, parameters);
    let mut spec = pod_spec(settings, node, shape);
    if room == Room::Reserved
        && let Some(class) = settings.headroom.as_ref().and_then(|it| it.preempting_priority_class.clone())
    {
        spec.priority_class_name = Some(class);
    }
    Pod {
        metadata: metadata(settings, PodOwner { name, node, node_uid }, labels, annotations),
        spec: Some(spec),
        status: None,
    }
}

/// A Mountpoint Pod that serves no source until one adopts it.
pub fn warm_pod(settings: &PodSettings, owner: PodOwner<'_>) -> Pod {
    let shape = PodShape::default();
    let label = (settings.keys.warm(), template(settings, &shape).as_str().to_owned());
    Pod {
        metadata: metadata(settings, owner, BTreeMap::from([label]), BTreeMap::new()),
        spec: Some(pod_spec(settings, owner.node, &shape)),
        status: None,
    }
}

/// What Mountpoint Pods of this shape have in common, on whatever node they are.
pub fn template(settings: &PodSettings, shape: &PodShape) -> PodTemplate {
    PodTemplate::of_spec(&json!(pod_spec(settings, "", shape)).to_string())
}

/// Gives a warm Pod to a source, if it still has this UID and version.
pub fn adoption(settings: &PodSettings, parameters: &PodParameters<'_>, uid: &str, resource_version: &str) -> Value {
    let SourceMetadata { labels, annotations } = source_metadata(&settings.keys, parameters);
    let mut labels = json!(labels);
    // A merge patch removes it.
    labels[settings.keys.warm()] = Value::Null;
    json!({
        "metadata": { "uid": uid, "resourceVersion": resource_version, "labels": labels, "annotations": annotations },
    })
}

/// A Mountpoint Pod and the node it belongs to.
#[derive(Clone, Copy, Debug)]
pub struct PodOwner<'a> {
    pub name: &'a str,
    pub node: &'a str,
    /// Its UID, if it is known.
    pub node_uid: Option<&'a str>,
}

pub(super) fn pod_spec(settings: &PodSettings, node: &str, shape: &PodShape) -> PodSpec {
    let mut volumes = vec![Volume {
        name: COMMUNICATION_VOLUME.to_owned(),
        empty_dir: Some(EmptyDirVolumeSource {
            medium: Some("Memory".to_owned()),
            size_limit: Some(Quantity(COMM_SIZE.to_owned())),
        }),
        ..Volume::default()
    }];
    let mut mounts = vec![mount(COMMUNICATION_VOLUME, COMMUNICATION_DIRECTORY)];
    let mut arguments = settings.mounter_arguments.clone();
    if let Some(cache) = &shape.cache {
        volumes.push(cache_volume(&settings.keys, cache));
        mounts.push(mount(CACHE, CACHE_DIRECTORY));
        arguments.push(format!("--cache-dir={CACHE_DIRECTORY}"));
    }
    if let Some(limit) = shape.stage.as_ref().unwrap_or(&settings.stage).size() {
        volumes.push(Volume {
            name: STAGE.to_owned(),
            empty_dir: Some(EmptyDirVolumeSource { medium: None, size_limit: Some(Quantity(limit.to_string())) }),
            ..Volume::default()
        });
        mounts.push(mount(STAGE, STAGE_DIRECTORY));
        arguments.push(format!("--stage-dir={STAGE_DIRECTORY}"));
        arguments.push(format!("--stage-size-limit={limit}"));
    }
    if let Some(config_map) = &settings.ca_config_map {
        volumes.push(ca_volume(config_map));
        mounts.push(VolumeMount { read_only: Some(true), ..mount(CA, CA_DIRECTORY) });
        arguments.push(format!("--ca-bundle={CA_DIRECTORY}/{CA_FILE}"));
    }
    let user = match settings.platform {
        Platform::Kubernetes => Some(USER),
        Platform::OpenShift => None,
    };
    let seccomp_profile = Some(SeccompProfile { type_: "RuntimeDefault".to_owned(), ..SeccompProfile::default() });
    let container = Container {
        name: CONTAINER.to_owned(),
        image: Some(settings.image.clone()),
        image_pull_policy: settings.image_pull_policy.clone(),
        command: Some(vec![settings.command.clone()]),
        args: (!arguments.is_empty()).then_some(arguments),
        resources: resources(&settings.default_resources.apply(shape)),
        security_context: Some(SecurityContext {
            allow_privilege_escalation: Some(false),
            capabilities: Some(Capabilities { drop: Some(vec!["ALL".to_owned()]), ..Capabilities::default() }),
            read_only_root_filesystem: Some(true),
            run_as_non_root: Some(true),
            run_as_user: user,
            seccomp_profile: seccomp_profile.clone(),
            ..SecurityContext::default()
        }),
        volume_mounts: Some(mounts),
        ..Container::default()
    };
    let pull_secrets = settings.image_pull_secrets.iter().map(|it| LocalObjectReference { name: it.clone() });
    PodSpec {
        affinity: Some(on_node(node)),
        automount_service_account_token: Some(false),
        containers: vec![container],
        enable_service_links: Some(false),
        image_pull_secrets: Some(pull_secrets.collect()).filter(|it: &Vec<_>| !it.is_empty()),
        node_selector: Some(BTreeMap::from([("kubernetes.io/os".to_owned(), "linux".to_owned())])),
        priority_class_name: settings.priority_class.clone(),
        // A mounter that failed is restarted; one that was asked to exit is not.
        restart_policy: Some("OnFailure".to_owned()),
        security_context: Some(PodSecurityContext {
            fs_group: user,
            run_as_non_root: Some(true),
            run_as_user: user,
            seccomp_profile,
            ..PodSecurityContext::default()
        }),
        service_account_name: shape.service_account.clone(),
        termination_grace_period_seconds: Some(GRACE_SECONDS),
        // A mounter may run wherever a workload may.
        tolerations: Some(vec![Toleration { operator: Some("Exists".to_owned()), ..Toleration::default() }]),
        volumes: Some(volumes),
        ..PodSpec::default()
    }
}

/// Labels and annotations that say which source a Mountpoint Pod serves.
struct SourceMetadata {
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
}

fn source_metadata(keys: &MetadataKeys, parameters: &PodParameters<'_>) -> SourceMetadata {
    let labels =
        [(keys.pod_uid(), parameters.workload.as_str()), (keys.volume_name(), parameters.persistent_volume.as_str())];
    let annotations =
        [(keys.volume_name(), parameters.persistent_volume.as_str()), (keys.volume_id(), parameters.volume_id)];
    let source = Some((keys.source(), parameters.source)).filter(|_| parameters.source != parameters.name);
    SourceMetadata {
        labels: labels.into_iter().chain(source).filter(|(_, value)| is_label_value(value)).map(owned).collect(),
        annotations: annotations.into_iter().map(owned).collect(),
    }
}

fn metadata(
    settings: &PodSettings,
    PodOwner { name, node, node_uid }: PodOwner<'_>,
    mut labels: BTreeMap<String, String>,
    mut annotations: BTreeMap<String, String>,
) -> ObjectMeta {
    let keys = &settings.keys;
    let versions = [
        (keys.driver_version(), settings.driver_version.as_str()),
        (keys.mountpoint_version(), settings.mountpoint_version.as_str()),
    ];
    labels.extend(versions.into_iter().filter(|(_, value)| is_label_value(value)).map(owned));
    annotations.insert(AUTOSCALER_ANNOTATION.to_owned(), "true".to_owned());
    let owner = |uid: &str| OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name: node.to_owned(),
        uid: uid.to_owned(),
        controller: Some(true),
        block_owner_deletion: None,
    };
    ObjectMeta {
        name: Some(name.to_owned()),
        namespace: Some(settings.namespace.clone()),
        labels: Some(labels),
        annotations: Some(annotations),
        // `kubectl drain` evicts Pods that have a controller; others only with --force.
        owner_references: node_uid.map(|it| vec![owner(it)]),
        ..ObjectMeta::default()
    }
}

fn owned((key, value): (String, &str)) -> (String, String) {
    (key, value.to_owned())
}

/// Scheduled, instead of setting `nodeName`: the scheduler accounts for resources and honours priorities.
fn on_node(node: &str) -> Affinity {
    let this_node = NodeSelectorRequirement {
        key: "metadata.name".to_owned(),
        operator: "In".to_owned(),
        values: Some(vec![node.to_owned()]),
    };
    Affinity {
        node_affinity: Some(NodeAffinity {
            required_during_scheduling_ignored_during_execution: Some(NodeSelector {
                node_selector_terms: vec![NodeSelectorTerm {
                    match_fields: Some(vec![this_node]),
                    ..NodeSelectorTerm::default()
                }],
            }),
            ..NodeAffinity::default()
        }),
        ..Affinity::default()
    }
}

fn resources((requests, limits): &(Resources, Resources)) -> Option<ResourceRequirements> {
    let list = |Resources { cpu, memory }: &Resources| {
        let pairs = [("cpu", cpu), ("memory", memory)];
        let list: BTreeMap<String, Quantity> = pairs
            .into_iter()
            .filter_map(|(name, it)| it.as_ref().map(|it| (name.to_owned(), Quantity(it.to_string()))))
            .collect();
        (!list.is_empty()).then_some(list)
    };
    let (requests, limits) = (list(requests), list(limits));
    let is_empty = requests.is_none() && limits.is_none();
    (!is_empty).then(|| ResourceRequirements { requests, limits, ..ResourceRequirements::default() })
}

fn cache_volume(keys: &MetadataKeys, cache: &CacheVolume) -> Volume {
    let name = CACHE.to_owned();
    match cache {
        CacheVolume::EmptyDir { size_limit, medium } => Volume {
            name,
            empty_dir: Some(EmptyDirVolumeSource {
                medium: match medium {
                    Medium::Disk => None,
                    Medium::Memory => Some("Memory".to_owned()),
                },
                size_limit: size_limit.as_ref().map(|it| Quantity(it.to_string())),
            }),
            ..Volume::default()
        },
        CacheVolume::Ephemeral { storage_class, request } => Volume {
            name,
            ephemeral: Some(EphemeralVolumeSource {
                volume_claim_template: Some(PersistentVolumeClaimTemplate {
                    metadata: Some(ObjectMeta {
                        labels: Some(BTreeMap::from([(keys.cache_type(), "local-ephemeral-cache".to_owned())])),
                        ..ObjectMeta::default()
                    }),
                    spec: PersistentVolumeClaimSpec {
                        access_modes: Some(vec!["ReadWriteOnce".to_owned()]),
                        resources: Some(VolumeResourceRequirements {
                            requests: Some(BTreeMap::from([("storage".to_owned(), Quantity(request.to_string()))])),
                            ..VolumeResourceRequirements::default()
                        }),
                        storage_class_name: Some(storage_class.clone()),
                        volume_mode: Some("Filesystem".to_owned()),
                        ..PersistentVolumeClaimSpec::default()
                    },
                }),
            }),
            ..Volume::default()
        },
    }
}

fn ca_volume(config_map: &str) -> Volume {
    Volume {
        name: CA.to_owned(),
        config_map: Some(ConfigMapVolumeSource {
            name: config_map.to_owned(),
            items: Some(vec![KeyToPath { key: CA_FILE.to_owned(), path: CA_FILE.to_owned(), mode: None }]),
            ..ConfigMapVolumeSource::default()
        }),
        ..Volume::default()
    }
}

fn mount(volume: &str, path: &str) -> VolumeMount {
    VolumeMount { name: volume.to_owned(), mount_path: path.to_owned(), ..VolumeMount::default() }
}
