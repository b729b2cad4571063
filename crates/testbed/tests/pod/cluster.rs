//! One control plane for all tests of this program, and the objects that a controller and a kubelet would write.

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Namespace, Pod, ServiceAccount};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
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

    pub async fn annotate(&self, name: &str, key: &str, value: &str) {
        let patch = Patch::Merge(json!({ "metadata": { "annotations": { key: value } } }));
        self.pods().patch(name, &PatchParams::default(), &patch).await.unwrap();
    }

    /// At once, as if its containers had ended.
    pub async fn delete_pod(&self, name: &str) {
        self.pods().delete(name, &DeleteParams::default().grace_period(0)).await.unwrap();
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

fn object<T: serde::de::DeserializeOwned>(value: serde_json::Value) -> T {
    serde_json::from_value(value).unwrap()
}
