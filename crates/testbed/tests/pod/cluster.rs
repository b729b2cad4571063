//! One control plane for all tests of this program, and the objects that a controller and a kubelet would write.

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Namespace, Node, Pod, ServiceAccount, Taint};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::storage::v1::CSINode;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::wait::{await_condition, conditions};
use kube::{Api, Client, Config, ResourceExt as _};
use s3csi_driver::api::{attachment_definition, attachments};
use s3csi_testbed::cluster::ControlPlane;
use s3csi_testbed::plugin::DRIVER_NAME;
use serde_json::json;

pub const NAMESPACE: &str = "mount-s3";

/// Started with the first test; it ends with this process.
pub fn control_plane() -> &'static ControlPlane {
    static SHARED: OnceLock<ControlPlane> = OnceLock::new();
    SHARED.get_or_init(|| {
        let control_plane = ControlPlane::start("pod-node").unwrap_or_else(|error| {
            panic!("{}", s3csi_core::chain::Chain(&error));
        });
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(async { prepare(&Cluster::connect(&control_plane).await).await });
        control_plane
    })
}

/// What every cluster with the driver has.
async fn prepare(cluster: &Cluster) {
    let client = &cluster.client;
    let create = PostParams::default();
    let namespace: Namespace = object(json!({ "metadata": { "name": NAMESPACE } }));
    Api::all(client.clone()).create(&create, &namespace).await.unwrap();
    // Kubernetes' own controllers, which are not there, would make it.
    let account: ServiceAccount = object(json!({ "metadata": { "name": "default" } }));
    Api::namespaced(client.clone(), NAMESPACE).create(&create, &account).await.unwrap();
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    let definition = definitions.create(&create, &attachment_definition(DRIVER_NAME)).await.unwrap();
    let name = definition.name_any();
    let established = await_condition(definitions, &name, conditions::is_crd_established());
    tokio::time::timeout(Duration::from_mins(1), established).await.unwrap().unwrap();
}

/// A client of the control plane.
#[derive(Clone)]
pub struct Cluster {
    client: Client,
}

impl Cluster {
    pub async fn connect(control_plane: &ControlPlane) -> Self {
        let kubeconfig = Kubeconfig::read_from(control_plane.kubeconfig()).unwrap();
        let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.unwrap();
        Self { client: Client::try_from(config).unwrap() }
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    /// Answers the UID. Without a node it is not scheduled.
    pub async fn create_pod(&self, name: &str, node: Option<&str>) -> String {
        let pod: Pod = object(json!({
            "metadata": { "name": name },
            "spec": {
                "nodeName": node,
                "containers": [{ "name": "mountpoint", "image": "localhost/s3csi:test" }],
                "automountServiceAccountToken": false,
            },
        }));
        self.pods().create(&PostParams::default(), &pod).await.unwrap().metadata.uid.unwrap()
    }

    /// As kubelet reports it.
    pub async fn set_status(&self, name: &str, status: serde_json::Value) {
        let patch = Patch::Merge(json!({ "status": status }));
        self.pods().patch_status(name, &PatchParams::default(), &patch).await.unwrap();
    }

    /// One condition of a Mountpoint Pod: `status reason: message`.
    pub async fn condition(&self, name: &str, kind: &str) -> Option<String> {
        let status = self.pods().get(name).await.unwrap().status?;
        let found = status.conditions?.into_iter().find(|it| it.type_ == kind)?;
        let (reason, message) = (found.reason.unwrap_or_default(), found.message.unwrap_or_default());
        Some(format!("{} {reason}: {message}", found.status))
    }

    /// What a workload was told: `type reason: note` each.
    pub async fn events(&self, workload: &str) -> Vec<String> {
        let events: Api<Event> = Api::namespaced(self.client.clone(), "default");
        let all = events.list(&ListParams::default()).await.unwrap().items;
        let is_about = |it: &Event| it.regarding.as_ref().and_then(|it| it.uid.as_deref()) == Some(workload);
        let text = |it: &Event| {
            let part = |it: &Option<String>| it.clone().unwrap_or_default();
            format!("{} {}: {}", part(&it.type_), part(&it.reason), part(&it.note))
        };
        all.iter().filter(|it| is_about(it)).map(text).collect()
    }

    pub async fn annotate(&self, name: &str, key: &str, value: &str) {
        let patch = Patch::Merge(json!({ "metadata": { "annotations": { key: value } } }));
        self.pods().patch(name, &PatchParams::default(), &patch).await.unwrap();
    }

    /// At once, as if its containers had ended.
    pub async fn delete_pod(&self, name: &str) {
        self.pods().delete(name, &DeleteParams::default().grace_period(0)).await.unwrap();
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
        let csi_nodes: Api<CSINode> = Api::all(self.client.clone());
        csi_nodes.patch(name, &PatchParams::apply("kubelet").force(), &Patch::Apply(csi_node)).await.unwrap();
    }

    fn nodes(&self) -> Api<Node> {
        Api::all(self.client.clone())
    }

    /// Makes the attachment of one PV on one node, or changes who is served by whom.
    pub async fn attach(&self, node: &str, pv: &str, entries: &BTreeMap<String, Vec<String>>) {
        let attachments = attachments(self.client.clone(), DRIVER_NAME);
        let entries: BTreeMap<&String, Vec<serde_json::Value>> = entries
            .iter()
            .map(|(pod, workloads)| {
                let entry = |uid: &String| json!({ "workloadPodUID": uid, "attachmentTime": "2026-01-02T03:04:05Z" });
                (pod, workloads.iter().map(entry).collect())
            })
            .collect();
        let attachment = json!({
            "apiVersion": "s3.csi.scality.com/v2",
            "kind": "MountpointS3PodAttachment",
            "metadata": { "name": attachment_name(node, pv) },
            "spec": {
                "nodeName": node,
                "persistentVolumeName": pv,
                "volumeID": format!("{pv}-handle"),
                "mountOptions": "allow-delete,allow-overwrite",
                "workloadFSGroup": "",
                "mountpointS3PodAttachments": entries,
            },
        });
        let apply = PatchParams::apply("controller").force();
        attachments.patch(&attachment_name(node, pv), &apply, &Patch::Apply(attachment)).await.unwrap();
    }
}

pub fn attachment_name(node: &str, pv: &str) -> String {
    format!("s3pa-{node}-{pv}")
}

fn tainted(keys: &[&str]) -> Vec<serde_json::Value> {
    keys.iter().map(|it| json!({ "key": it, "effect": "NoExecute" })).collect()
}

fn object<T: serde::de::DeserializeOwned>(value: serde_json::Value) -> T {
    serde_json::from_value(value).unwrap()
}
