//! One control plane for all tests of this program, and the objects that a controller and a kubelet would write.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use k8s_openapi::api::core::v1::{Node, Taint};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::storage::v1::CSINode;
use kube::Api;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use s3csi_testbed::cluster::{Administrator, AttachmentTemplate, ControlPlane};
use s3csi_testbed::plugin::DRIVER_NAME;
use serde_json::json;

pub use s3csi_testbed::cluster::attachment_name;

pub const NAMESPACE: &str = "mount-s3";

/// Started with the first test; it ends with this process.
pub fn control_plane() -> &'static ControlPlane {
    static SHARED: OnceLock<ControlPlane> = OnceLock::new();
    SHARED.get_or_init(|| {
        let control_plane = ControlPlane::start("pod-node").unwrap_or_else(|error| {
            panic!("{}", s3csi_core::chain::Chain(&error));
        });
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(async {
            let administrator = Administrator::of(&control_plane).await.unwrap();
            administrator.prepare_for_nodes(DRIVER_NAME, NAMESPACE).await.unwrap();
        });
        control_plane
    })
}

/// A client of the control plane.
#[derive(Clone)]
pub struct Cluster(Administrator);

impl Cluster {
    pub async fn connect(control_plane: &ControlPlane) -> Self {
        Self(Administrator::of(control_plane).await.unwrap())
    }

    /// Answers the UID. Without a node it is not scheduled.
    pub async fn create_pod(&self, name: &str, node: Option<&str>) -> String {
        self.0.create_mountpoint_pod(NAMESPACE, name, node).await.unwrap()
    }

    /// A user's Pod. Answers the UID.
    pub async fn create_workload(&self, name: &str, node: &str) -> String {
        self.0.create_mountpoint_pod("default", name, Some(node)).await.unwrap()
    }

    /// One that takes over from another one of the same source.
    pub async fn create_successor(&self, name: &str, node: &str, source: &str) -> String {
        let labels = json!({ format!("{DRIVER_NAME}/source"): source });
        self.0.create_mountpoint_pod_with(NAMESPACE, name, Some(node), labels).await.unwrap()
    }

    /// Its containers have a minute to end.
    pub async fn begin_deletion(&self, name: &str) {
        self.0.pods(NAMESPACE).delete(name, &DeleteParams::default().grace_period(60)).await.unwrap();
    }

    /// As kubelet reports it.
    pub async fn set_status(&self, name: &str, status: serde_json::Value) {
        self.0.set_pod_status(NAMESPACE, name, status).await.unwrap();
    }

    /// One condition of a Mountpoint Pod: `status reason: message`.
    pub async fn condition(&self, name: &str, kind: &str) -> Option<String> {
        self.condition_in(NAMESPACE, name, kind).await
    }

    /// The same of any Pod.
    pub async fn condition_in(&self, namespace: &str, name: &str, kind: &str) -> Option<String> {
        let status = self.0.pods(namespace).get(name).await.unwrap().status?;
        let found = status.conditions?.into_iter().find(|it| it.type_ == kind)?;
        let (reason, message) = (found.reason.unwrap_or_default(), found.message.unwrap_or_default());
        Some(format!("{} {reason}: {message}", found.status))
    }

    /// What a workload was told: `type reason: note` each.
    pub async fn events(&self, workload: &str) -> Vec<String> {
        let events: Api<Event> = Api::namespaced(self.0.client().clone(), "default");
        let all = events.list(&ListParams::default()).await.unwrap().items;
        let is_about = |it: &Event| it.regarding.as_ref().and_then(|it| it.uid.as_deref()) == Some(workload);
        let text = |it: &Event| {
            let part = |it: &Option<String>| it.clone().unwrap_or_default();
            format!("{} {}: {}", part(&it.type_), part(&it.reason), part(&it.note))
        };
        all.iter().filter(|it| is_about(it)).map(text).collect()
    }

    pub async fn annotate(&self, name: &str, key: &str, value: &str) {
        self.0.annotate_pod(NAMESPACE, name, key, value).await.unwrap();
    }

    /// At once, as if its containers had ended.
    pub async fn delete_pod(&self, name: &str) {
        self.0.remove_pod(NAMESPACE, name).await.unwrap();
    }

    /// A node, as a cloud provider makes it: with taints, here by their keys.
    pub async fn create_node(&self, name: &str, taints: &[&str]) {
        let node: Node = object(json!({ "metadata": { "name": name }, "spec": { "taints": tainted(taints) } }));
        self.nodes().create(&PostParams::default(), &node).await.unwrap();
        let patch = Patch::Merge(json!({ "spec": { "taints": tainted(taints) } }));
        // The API server adds `not-ready` to new nodes, which Kubernetes' own controllers, not there, would remove.
        self.nodes().patch(name, &PatchParams::default(), &patch).await.unwrap();
    }

    /// Adds a taint and leaves all others; kubelets and controllers do that at any time.
    pub async fn add_taint(&self, name: &str, taint: &str) {
        loop {
            let node = self.nodes().get(name).await.unwrap();
            let mut taints = node.spec.and_then(|it| it.taints).unwrap_or_default();
            taints.extend(tainted(&[taint]).into_iter().map(object::<Taint>));
            let version = node.metadata.resource_version;
            let patch = json!({ "metadata": { "resourceVersion": version }, "spec": { "taints": taints } });
            match self.nodes().patch(name, &PatchParams::default(), &Patch::Merge(patch)).await {
                Ok(_) => return,
                Err(kube::Error::Api(status)) if status.code == 409 => {}
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// The keys of a node's taints, sorted.
    pub async fn taints(&self, name: &str) -> Vec<String> {
        let node = self.nodes().get(name).await.unwrap();
        let taints = node.spec.and_then(|it| it.taints).unwrap_or_default();
        let mut keys: Vec<String> = taints.into_iter().map(|it| it.key).collect();
        keys.sort();
        keys
    }

    /// What kubelet writes when it has registered these drivers.
    pub async fn write_csi_node(&self, name: &str, drivers: &[&str]) {
        let drivers: Vec<_> = drivers.iter().map(|it| json!({ "name": it, "nodeID": name })).collect();
        let csi_node = json!({
            "apiVersion": "storage.k8s.io/v1",
            "kind": "CSINode",
            "metadata": { "name": name },
            "spec": { "drivers": drivers },
        });
        let csi_nodes: Api<CSINode> = Api::all(self.0.client().clone());
        csi_nodes.patch(name, &PatchParams::apply("kubelet").force(), &Patch::Apply(csi_node)).await.unwrap();
    }

    fn nodes(&self) -> Api<Node> {
        Api::all(self.0.client().clone())
    }

    /// Makes the attachment of one PV on one node, or changes who is served by whom.
    pub async fn attach(&self, node: &str, pv: &str, entries: &BTreeMap<String, Vec<String>>) {
        let order = AttachmentTemplate { driver: DRIVER_NAME, node, persistent_volume: pv, entries };
        self.0.attach(order).await.unwrap();
    }
}

fn tainted(keys: &[&str]) -> Vec<serde_json::Value> {
    keys.iter().map(|it| json!({ "key": it, "effect": "NoExecute" })).collect()
}

fn object<T: serde::de::DeserializeOwned>(value: serde_json::Value) -> T {
    serde_json::from_value(value).unwrap()
}
