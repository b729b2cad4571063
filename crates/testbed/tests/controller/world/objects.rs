//! Objects that users and the rest of Kubernetes make: Pods, claims, PVs.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use s3csi_core::WorkloadUid;
use s3csi_testbed::cluster;
use serde_json::{Value, json};

use super::World;

/// A workload Pod that was made.
#[derive(Clone, Debug)]
pub struct Workload {
    pub name: String,
    pub namespace: String,
    pub uid: WorkloadUid,
}

/// A workload Pod that is to be made.
#[derive(Clone, Debug, Default)]
pub struct WorkloadOptions {
    /// `None`: the scheduler has not chosen yet.
    pub node: Option<String>,
    pub claims: Vec<String>,
    /// Volumes of other kinds, as they are written in a Pod.
    pub volumes: Vec<Value>,
    pub fs_group: Option<i64>,
    pub namespace: Option<String>,
    pub service_account: Option<String>,
    pub grace_seconds: Option<i64>,
}

/// A Pod that mounts claims, on a node.
pub fn on(node: &str, claims: &[&str]) -> WorkloadOptions {
    WorkloadOptions {
        node: Some(node.to_owned()),
        claims: claims.iter().map(|it| (*it).to_owned()).collect(),
        ..WorkloadOptions::default()
    }
}

/// What may be said of a PV beyond its name.
#[derive(Clone, Debug)]
pub struct VolumeOrder {
    pub driver: String,
    pub mount_options: Vec<String>,
    pub attributes: BTreeMap<String, String>,
    pub handle: Option<String>,
    pub secret: Option<String>,
}

impl World {
    pub fn pod_api(&self, namespace: &str) -> Api<Pod> {
        Api::namespaced(self.client.clone(), namespace)
    }

    pub fn claim_api(&self) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.client.clone(), &self.name)
    }

    pub fn volume_api(&self) -> Api<PersistentVolume> {
        Api::all(self.client.clone())
    }

    /// A plain PV of ours and the claim of the same name, bound to each other.
    pub async fn volume(&self, name: &str) {
        self.volume_with(name, &[], &[]).await;
    }

    pub async fn volume_with(&self, name: &str, options: &[&str], attributes: &[(&str, &str)]) {
        self.create_volume(name, self.order(options, attributes)).await;
        self.create_claim(name).await;
        self.bind(name).await;
    }

    pub fn order(&self, options: &[&str], attributes: &[(&str, &str)]) -> VolumeOrder {
        let mut all = BTreeMap::from([("bucketName".to_owned(), "bucket".to_owned())]);
        all.extend(attributes.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())));
        VolumeOrder {
            driver: self.driver.clone(),
            mount_options: options.iter().map(|it| (*it).to_owned()).collect(),
            attributes: all,
            handle: None,
            secret: None,
        }
    }

    pub async fn create_volume(&self, name: &str, order: VolumeOrder) {
        let VolumeOrder { driver, mount_options, attributes, handle, secret } = order;
        let unique = self.unique(name);
        let handle = handle.unwrap_or_else(|| format!("handle-{unique}"));
        let claim = (self.name.clone(), name.to_owned());
        let order = cluster::VolumeTemplate { driver, mount_options, attributes, handle, secret, claim };
        self.administrator.create_volume(&unique, order).await.unwrap();
    }

    pub async fn create_claim(&self, name: &str) {
        self.create_claim_of(name, json!({})).await;
    }

    /// With owner references, for instance.
    pub async fn create_claim_of(&self, name: &str, metadata: Value) {
        self.administrator.create_claim(&self.name, name, metadata).await.unwrap();
    }

    /// What the controller-manager does with a claim and the PV of the same name.
    pub async fn bind(&self, name: &str) {
        self.bind_to(name, name).await;
    }

    pub async fn bind_to(&self, claim: &str, volume: &str) {
        self.administrator.bind(&self.name, claim, &self.unique(volume)).await.unwrap();
    }

    pub async fn edit_volume(&self, name: &str, change: Value) {
        let patch = Patch::Merge(change);
        self.volume_api().patch(&self.unique(name), &PatchParams::default(), &patch).await.unwrap();
    }

    pub async fn workload(&self, name: &str, order: WorkloadOptions) -> Workload {
        let WorkloadOptions { node, claims, volumes, fs_group, namespace, service_account, grace_seconds } = order;
        let namespace = namespace.unwrap_or_else(|| self.name.clone());
        let node = node.map(|it| self.unique(&it));
        let order = cluster::WorkloadTemplate { node, claims, volumes, fs_group, service_account, grace_seconds };
        let pod = self.administrator.create_workload(&namespace, name, order).await.unwrap();
        Workload { name: name.to_owned(), namespace, uid: pod.metadata.uid.unwrap().parse().unwrap() }
    }

    /// What the scheduler does.
    pub async fn schedule(&self, workload: &Workload, node: &str) {
        let binding = json!({
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": { "name": workload.name },
            "target": { "apiVersion": "v1", "kind": "Node", "name": self.unique(node) },
        });
        let pods = self.pod_api(&workload.namespace);
        let _: Value =
            pods.create_subresource("binding", &workload.name, &PostParams::default(), &binding).await.unwrap();
    }

    /// What kubelet does.
    pub async fn set_phase(&self, workload: &Workload, phase: &str) {
        self.set_phase_of(&workload.namespace, &workload.name, phase).await;
    }

    pub async fn set_phase_of(&self, namespace: &str, pod: &str, phase: &str) {
        let patch = Patch::Merge(json!({ "status": { "phase": phase } }));
        self.pod_api(namespace).patch_status(pod, &PatchParams::default(), &patch).await.unwrap();
    }

    /// What a user does; kubelet has not noticed yet.
    pub async fn delete(&self, workload: &Workload) {
        self.pod_api(&workload.namespace).delete(&workload.name, &DeleteParams::default()).await.unwrap();
    }

    /// Kubelet has ended it.
    pub async fn remove(&self, workload: &Workload) {
        let parameters = DeleteParams::default().grace_period(0);
        self.pod_api(&workload.namespace).delete(&workload.name, &parameters).await.unwrap();
    }
}
