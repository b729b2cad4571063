//! The Mountpoint Pod as an object of the Kubernetes API: settings and facts in, object out.
//!
//! It meets the Pod security standard `restricted`: no privileges, no service-account token, a root file system that
//! nobody writes to. The node mounts; this Pod only holds the descriptor it is given.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Affinity, Capabilities, ConfigMapVolumeSource, Container, EmptyDirVolumeSource, EphemeralVolumeSource, KeyToPath,
    LocalObjectReference, NodeAffinity, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm,
    PersistentVolumeClaimSpec, PersistentVolumeClaimTemplate, Pod, PodSecurityContext, PodSpec, ResourceRequirements,
    SeccompProfile, SecurityContext, Toleration, Volume, VolumeMount, VolumeResourceRequirements,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use s3csi_core::mountpoint_pod::{CACHE_DIRECTORY, Cache, Medium, PodShape, Resources};
use s3csi_core::{PvName, WorkloadUid};

use super::names::{Names, is_label_value};

/// What all Mountpoint Pods have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodSettings {
    pub names: Names,
    pub namespace: String,
    pub image: String,
    pub image_pull_policy: Option<String>,
    pub image_pull_secrets: Vec<String>,
    /// The mounter in the image.
    pub command: String,
    pub priority_class: Option<String>,
    pub driver_version: String,
    pub mountpoint_version: String,
    /// A ConfigMap in the same namespace whose `ca-bundle.crt` says whom engines trust.
    pub ca_config_map: Option<String>,
    pub platform: Platform,
}

/// Who chooses the user and group of a Pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Platform {
    /// We do.
    Kubernetes,
    /// Its security context constraints do, and refuse Pods that choose themselves.
    OpenShift,
}

/// One Mountpoint Pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodOrder<'a> {
    pub name: &'a str,
    pub node: &'a str,
    pub workload: &'a WorkloadUid,
    pub persistent_volume: &'a PvName,
    pub volume_id: &'a str,
    pub shape: &'a PodShape,
}

const CONTAINER: &str = "mountpoint";

/// The directory that mounter and node share; drivers before us use the same names.
const COMM: &str = "comm";
const COMM_DIRECTORY: &str = "/comm";

/// Credentials and a socket; in memory, so that no key ever touches a disk.
const COMM_SIZE: &str = "10Mi";

const CACHE: &str = "local-cache";
const CA: &str = "custom-ca-cert";
const CA_DIRECTORY: &str = "/custom-ca";
const CA_FILE: &str = "ca-bundle.crt";

/// Anybody but root. The node writes files that this group may read.
const USER: i64 = 1000;

/// A drained node ends Mountpoint Pods together with workloads; the mounter goes on serving until they are gone.
const GRACE_SECONDS: i64 = 600;

/// Without it the cluster autoscaler would keep a node alive for a Pod that nobody else controls.
const AUTOSCALER_ANNOTATION: &str = "cluster-autoscaler.kubernetes.io/daemonset-pod";

pub fn mountpoint_pod(settings: &PodSettings, order: &PodOrder<'_>) -> Pod {
    let shape = order.shape;
    let mut volumes = vec![Volume {
        name: COMM.to_owned(),
        empty_dir: Some(EmptyDirVolumeSource {
            medium: Some("Memory".to_owned()),
            size_limit: Some(Quantity(COMM_SIZE.to_owned())),
        }),
        ..Volume::default()
    }];
    let mut mounts = vec![mount(COMM, COMM_DIRECTORY)];
    let mut arguments = Vec::new();
    if let Some(cache) = &shape.cache {
        volumes.push(cache_volume(&settings.names, cache));
        mounts.push(mount(CACHE, CACHE_DIRECTORY));
        arguments.push(format!("--cache-dir={CACHE_DIRECTORY}"));
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
        resources: resources(shape),
        security_context: Some(SecurityContext {
            allow_privilege_escalation: Some(false),
            capabilities: Some(Capabilities { drop: Some(vec!["ALL".to_owned()]), ..Capabilities::default() }),
            read_only_root_filesystem: Some(true),
            run_as_group: user,
            run_as_non_root: Some(true),
            run_as_user: user,
            seccomp_profile: seccomp_profile.clone(),
            ..SecurityContext::default()
        }),
        volume_mounts: Some(mounts),
        ..Container::default()
    };
    let pull_secrets = settings.image_pull_secrets.iter().map(|it| LocalObjectReference { name: it.clone() });
    Pod {
        metadata: metadata(settings, order),
        spec: Some(PodSpec {
            affinity: Some(on_node(order.node)),
            automount_service_account_token: Some(false),
            containers: vec![container],
            enable_service_links: Some(false),
            image_pull_secrets: Some(pull_secrets.collect()).filter(|it: &Vec<_>| !it.is_empty()),
            node_selector: Some(BTreeMap::from([("kubernetes.io/os".to_owned(), "linux".to_owned())])),
            priority_class_name: settings.priority_class.clone(),
            // A mounter that ended with an error is started again; one that was asked to end is not.
            restart_policy: Some("OnFailure".to_owned()),
            security_context: Some(PodSecurityContext {
                fs_group: user,
                run_as_group: user,
                run_as_non_root: Some(true),
                run_as_user: user,
                seccomp_profile,
                ..PodSecurityContext::default()
            }),
            service_account_name: shape.service_account.clone(),
            termination_grace_period_seconds: Some(GRACE_SECONDS),
            // Where a workload was allowed to run, its mounter is.
            tolerations: Some(vec![Toleration { operator: Some("Exists".to_owned()), ..Toleration::default() }]),
            volumes: Some(volumes),
            ..PodSpec::default()
        }),
        status: None,
    }
}

fn metadata(settings: &PodSettings, order: &PodOrder<'_>) -> ObjectMeta {
    let names = &settings.names;
    let labels = [
        (names.driver_version(), settings.driver_version.as_str()),
        (names.mountpoint_version(), settings.mountpoint_version.as_str()),
        (names.pod_uid(), order.workload.as_str()),
        (names.volume_name(), order.persistent_volume.as_str()),
    ];
    let annotations = [
        (names.volume_name(), order.persistent_volume.as_str()),
        (names.volume_id(), order.volume_id),
        (AUTOSCALER_ANNOTATION.to_owned(), "true"),
    ];
    let owned = |(key, value): (String, &str)| (key, value.to_owned());
    ObjectMeta {
        name: Some(order.name.to_owned()),
        namespace: Some(settings.namespace.clone()),
        labels: Some(labels.into_iter().filter(|(_, value)| is_label_value(value)).map(owned).collect()),
        annotations: Some(annotations.into_iter().map(owned).collect()),
        ..ObjectMeta::default()
    }
}

/// By the scheduler, and not by naming the node ourselves: it counts resources and honours priorities.
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

fn resources(PodShape { requests, limits, .. }: &PodShape) -> Option<ResourceRequirements> {
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

fn cache_volume(names: &Names, cache: &Cache) -> Volume {
    let name = CACHE.to_owned();
    match cache {
        Cache::EmptyDir { size_limit, medium } => Volume {
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
        Cache::Ephemeral { storage_class, request } => Volume {
            name,
            ephemeral: Some(EphemeralVolumeSource {
                volume_claim_template: Some(PersistentVolumeClaimTemplate {
                    metadata: Some(ObjectMeta {
                        labels: Some(BTreeMap::from([(names.cache_type(), "local-ephemeral-cache".to_owned())])),
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
