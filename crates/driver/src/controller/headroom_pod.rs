//! Builds the headroom Pod as an object of the Kubernetes API: it requests what the Mountpoint Pod will, runs on the node of its
//! workload, and does nothing.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Affinity, Pod, PodAffinity, PodAffinityTerm};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use s3csi_core::attachment::Workload;
use s3csi_core::mountpoint_pod::PodShape;
use s3csi_core::stage::StageLimit;
use s3csi_core::{PvName, WorkloadUid};
use serde_json::{Value, json};

use super::pod::{PodSettings, pod_spec};
use crate::api::{MetadataKeys, is_label_value};

/// What all headroom Pods have in common, beside what they have from Mountpoint Pods.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeadroomSettings {
    pub priority_class: Option<String>,
    /// Of Mountpoint Pods that room is reserved for.
    pub preempting_priority_class: Option<String>,
    /// An image that waits by itself. `None`: an idle mounter waits, so that no other image is pulled.
    pub image: Option<String>,
    pub image_pull_policy: Option<String>,
    pub labels: BTreeMap<String, String>,
}

/// One headroom Pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeadroomParameters<'a> {
    pub name: &'a str,
    pub workload: &'a WorkloadUid,
    /// Of the workload.
    pub namespace: &'a str,
    pub persistent_volume: &'a PvName,
    /// Of the Mountpoint Pod.
    pub shape: &'a PodShape,
}

const CONTAINER: &str = "headroom";

/// There is nothing to finish, and a Mountpoint Pod waits for the room.
const GRACE_SECONDS: i64 = 1;

/// The cluster autoscaler removes no node with a Pod that has no controller, unless this says that it may.
const AUTOSCALER_ANNOTATION: &str = "cluster-autoscaler.kubernetes.io/safe-to-evict";

pub fn headroom_pod(settings: &PodSettings, headroom: &HeadroomSettings, parameters: &HeadroomParameters<'_>) -> Pod {
    let HeadroomParameters { name, workload, namespace, persistent_volume, shape } = *parameters;
    let keys = &settings.keys;
    // Only resources count; other volumes than that of the mounter's socket would be created in vain.
    let shape = PodShape { cache: None, stage: Some(StageLimit::Off), service_account: None, ..shape.clone() };
    let settings_of_all = PodSettings { ca_config_map: None, mounter_arguments: Vec::new(), ..settings.clone() };
    let mut spec = pod_spec(&settings_of_all, "", &shape);
    spec.affinity = Some(beside(keys, workload, namespace));
    spec.priority_class_name.clone_from(&headroom.priority_class);
    spec.termination_grace_period_seconds = Some(GRACE_SECONDS);
    for container in &mut spec.containers {
        CONTAINER.clone_into(&mut container.name);
        if let Some(image) = &headroom.image {
            container.image = Some(image.clone());
            container.image_pull_policy.clone_from(&headroom.image_pull_policy);
            (container.command, container.volume_mounts) = (None, None);
        }
    }
    if headroom.image.is_some() {
        spec.volumes = None;
    }
    let mut labels = headroom.labels.clone();
    labels.insert(keys.headroom_for_pod(), workload.to_string());
    if is_label_value(persistent_volume.as_str()) {
        labels.insert(keys.headroom_for_volume(), persistent_volume.to_string());
    }
    let annotations =
        [(keys.headroom_for_volume(), persistent_volume.as_str()), (AUTOSCALER_ANNOTATION.to_owned(), "true")];
    Pod {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            namespace: Some(settings.namespace.clone()),
            labels: Some(labels),
            annotations: Some(annotations.into_iter().map(|(key, value)| (key, value.to_owned())).collect()),
            ..ObjectMeta::default()
        },
        spec: Some(spec),
        status: None,
    }
}

/// Whether a workload has headroom Pods that look for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadroomLabel {
    Set,
    Unneeded,
}

/// A strategic merge patch that lets the scheduler place a workload. Other gates stay, and a Pod with another UID is left alone.
pub fn gate_removal(keys: &MetadataKeys, workload: &Workload, label: HeadroomLabel) -> Value {
    let mut metadata = json!({ "uid": workload.uid.as_str() });
    if label == HeadroomLabel::Set {
        metadata["labels"] = json!({ keys.headroom_for_workload(): workload.uid.as_str() });
    }
    let gate = json!({ "name": keys.headroom_gate(), "$patch": "delete" });
    json!({ "metadata": metadata, "spec": { "schedulingGates": [gate] } })
}

/// On the node of the workload, once it has one.
fn beside(keys: &MetadataKeys, workload: &WorkloadUid, namespace: &str) -> Affinity {
    let label = (keys.headroom_for_workload(), workload.to_string());
    let term = PodAffinityTerm {
        label_selector: Some(LabelSelector { match_labels: Some(BTreeMap::from([label])), ..LabelSelector::default() }),
        namespaces: Some(vec![namespace.to_owned()]),
        topology_key: "kubernetes.io/hostname".to_owned(),
        ..PodAffinityTerm::default()
    };
    Affinity {
        pod_affinity: Some(PodAffinity {
            required_during_scheduling_ignored_during_execution: Some(vec![term]),
            ..PodAffinity::default()
        }),
        ..Affinity::default()
    }
}
