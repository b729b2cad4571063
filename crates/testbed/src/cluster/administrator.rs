//! Makes the objects that users make, and those that other parts of Kubernetes would write where a control plane runs alone:
//! scheduler, kubelet, controller manager. Tests and benchmarks play these, call by call.

use std::collections::BTreeMap;

use anyhow::Context as _;
use k8s_openapi::api::core::v1::{Namespace, PersistentVolume, PersistentVolumeClaim, Pod, ServiceAccount};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::wait::{await_condition, conditions};
use kube::{Api, Client, Config, ResourceExt as _};
use s3csi_driver::api::{attachment_definition, attachments};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::ControlPlane;
use crate::wait::SOON;

/// May do everything.
#[derive(Clone)]
pub struct Administrator {
    client: Client,
}

/// A workload Pod that is to be made.
#[derive(Clone, Debug, Default)]
pub struct WorkloadTemplate {
    /// `None`: the scheduler has not chosen yet.
    pub node: Option<String>,
    pub claims: Vec<String>,
    /// Volumes of other kinds, as they are written in a Pod.
    pub volumes: Vec<Value>,
    pub fs_group: Option<i64>,
    pub service_account: Option<String>,
    pub grace_seconds: Option<i64>,
}

/// What may be said of a PV beyond its name.
#[derive(Clone, Debug)]
pub struct VolumeTemplate {
    pub driver: String,
    pub mount_options: Vec<String>,
    pub attributes: BTreeMap<String, String>,
    pub handle: String,
    /// The Secret in namespace `default` whose content kubelet sends with it.
    pub secret: Option<String>,
    /// The claim that it is meant for: namespace and name.
    pub claim: (String, String),
}

/// Who is served by which Mountpoint Pod, for one PV on one node.
pub struct AttachmentTemplate<'a> {
    pub driver: &'a str,
    pub node: &'a str,
    pub persistent_volume: &'a str,
    /// By Mountpoint Pod: UIDs of workloads.
    pub entries: &'a BTreeMap<String, Vec<String>>,
}

impl Administrator {
    pub async fn of(control_plane: &ControlPlane) -> anyhow::Result<Self> {
        let kubeconfig = Kubeconfig::read_from(control_plane.kubeconfig())?;
        let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
        Ok(Self { client: Client::try_from(config)? })
    }

    pub fn client(&self) -> &Client {
        &self.client
    }

    pub fn pods(&self, namespace: &str) -> Api<Pod> {
        Api::namespaced(self.client.clone(), namespace)
    }

    fn claims(&self, namespace: &str) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.client.clone(), namespace)
    }

    fn volumes(&self) -> Api<PersistentVolume> {
        Api::all(self.client.clone())
    }

    pub async fn create_namespace(&self, name: &str) -> kube::Result<()> {
        let namespace: Namespace = object(json!({ "metadata": { "name": name } }))?;
        Api::all(self.client.clone()).create(&PostParams::default(), &namespace).await.map(drop)
    }

    /// What a node plugin finds in every cluster: attachments, and a namespace of Mountpoint Pods. Unlike the real one it takes any Pod.
    pub async fn prepare_for_nodes(&self, driver: &str, namespace: &str) -> anyhow::Result<()> {
        self.create_namespace(namespace).await?;
        let create = PostParams::default();
        // Kubernetes' own controllers, which are not there, would make it.
        let account: ServiceAccount = object(json!({ "metadata": { "name": "default" } }))?;
        Api::namespaced(self.client.clone(), namespace).create(&create, &account).await?;
        let definitions: Api<CustomResourceDefinition> = Api::all(self.client.clone());
        let definition = definitions.create(&create, &attachment_definition(driver)).await?;
        let name = definition.name_any();
        let established = await_condition(definitions, &name, conditions::is_crd_established());
        tokio::time::timeout(SOON, established).await.context("attachments are never served")??;
        Ok(())
    }

    pub async fn create_volume(&self, name: &str, order: VolumeTemplate) -> kube::Result<()> {
        let VolumeTemplate { driver, mount_options, attributes, handle, secret, claim: (namespace, claim) } = order;
        let mut csi = json!({ "driver": driver, "volumeHandle": handle, "volumeAttributes": attributes });
        if let Some(secret) = secret {
            csi["nodePublishSecretRef"] = json!({ "namespace": "default", "name": secret });
        }
        let volume = object(json!({
            "metadata": { "name": name },
            "spec": {
                "accessModes": ["ReadWriteMany"],
                "capacity": { "storage": "1Gi" },
                "claimRef": { "namespace": namespace, "name": claim },
                "mountOptions": mount_options,
                "storageClassName": "",
                "csi": csi,
            },
        }))?;
        self.volumes().create(&PostParams::default(), &volume).await.map(drop)
    }

    /// The metadata may hold owner references, for instance.
    pub async fn create_claim(&self, namespace: &str, name: &str, metadata: Value) -> kube::Result<()> {
        let mut claim = json!({
            "metadata": metadata,
            "spec": {
                "accessModes": ["ReadWriteMany"],
                "resources": { "requests": { "storage": "1Gi" } },
                "storageClassName": "",
            },
        });
        claim["metadata"]["name"] = json!(name);
        self.claims(namespace).create(&PostParams::default(), &object(claim)?).await.map(drop)
    }

    /// What the controller manager does with a claim and a PV.
    pub async fn bind(&self, namespace: &str, claim: &str, volume: &str) -> kube::Result<()> {
        let (claims, volumes, parameters) = (self.claims(namespace), self.volumes(), PatchParams::default());
        let spec = Patch::Merge(json!({ "spec": { "volumeName": volume } }));
        let status = Patch::Merge(json!({ "status": { "phase": "Bound" } }));
        let bound = claims.patch(claim, &parameters, &spec).await?;
        let uid = Patch::Merge(json!({ "spec": { "claimRef": { "uid": bound.metadata.uid } } }));
        volumes.patch(volume, &parameters, &uid).await?;
        volumes.patch_status(volume, &parameters, &status).await?;
        claims.patch_status(claim, &parameters, &status).await.map(drop)
    }

    pub async fn create_workload(&self, namespace: &str, name: &str, order: WorkloadTemplate) -> kube::Result<Pod> {
        let WorkloadTemplate { node, claims, volumes, fs_group, service_account, grace_seconds } = order;
        let claims = claims.iter().enumerate().map(|(number, claim)| {
            json!({ "name": format!("volume-{number}"), "persistentVolumeClaim": { "claimName": claim } })
        });
        let mut pod = json!({
            "metadata": { "name": name },
            "spec": {
                "containers": [{ "name": "main", "image": "none" }],
                "serviceAccountName": service_account.unwrap_or_else(|| "default".to_owned()),
                "terminationGracePeriodSeconds": grace_seconds.unwrap_or(30),
                "volumes": claims.chain(volumes).collect::<Vec<_>>(),
            },
        });
        if let Some(node) = node {
            pod["spec"]["nodeName"] = json!(node);
        }
        if let Some(group) = fs_group {
            pod["spec"]["securityContext"] = json!({ "fsGroup": group });
        }
        self.pods(namespace).create(&PostParams::default(), &object(pod)?).await
    }

    /// Answers the UID of a Pod that stands for a Mountpoint Pod: the node looks at its name, its state and its directory. Without a
    /// node it is not scheduled.
    pub async fn create_mountpoint_pod(&self, namespace: &str, name: &str, node: Option<&str>) -> kube::Result<String> {
        self.create_mountpoint_pod_with(namespace, name, node, json!({})).await
    }

    pub async fn create_mountpoint_pod_with(
        &self,
        namespace: &str,
        name: &str,
        node: Option<&str>,
        labels: Value,
    ) -> kube::Result<String> {
        let pod = object(json!({
            "metadata": { "name": name, "labels": labels },
            "spec": {
                "nodeName": node,
                "containers": [{ "name": "mountpoint", "image": "localhost/s3csi:test" }],
                "automountServiceAccountToken": false,
            },
        }))?;
        let pod = self.pods(namespace).create(&PostParams::default(), &pod).await?;
        Ok(pod.metadata.uid.unwrap_or_default())
    }

    /// As kubelet reports it.
    pub async fn set_pod_status(&self, namespace: &str, name: &str, status: Value) -> kube::Result<()> {
        let patch = Patch::Merge(json!({ "status": status }));
        self.pods(namespace).patch_status(name, &PatchParams::default(), &patch).await.map(drop)
    }

    pub async fn annotate_pod(&self, namespace: &str, name: &str, key: &str, value: &str) -> kube::Result<()> {
        let patch = Patch::Merge(json!({ "metadata": { "annotations": { key: value } } }));
        self.pods(namespace).patch(name, &PatchParams::default(), &patch).await.map(drop)
    }

    /// At once, as if its containers had ended.
    pub async fn remove_pod(&self, namespace: &str, name: &str) -> kube::Result<()> {
        self.pods(namespace).delete(name, &DeleteParams::default().grace_period(0)).await.map(drop)
    }

    /// Makes the attachment of one PV on one node, or changes who is served by whom; what our controller would do for volumes of
    /// [`crate::kubelet::CsiVolume::new`].
    pub async fn attach(&self, order: AttachmentTemplate<'_>) -> kube::Result<()> {
        let AttachmentTemplate { driver, node, persistent_volume, entries } = order;
        let entries: BTreeMap<&String, Vec<Value>> = entries
            .iter()
            .map(|(pod, workloads)| {
                let entry = |uid: &String| json!({ "workloadPodUID": uid, "attachmentTime": "2026-01-02T03:04:05Z" });
                (pod, workloads.iter().map(entry).collect())
            })
            .collect();
        let name = attachment_name(node, persistent_volume);
        let attachment = json!({
            "apiVersion": format!("{driver}/v2"),
            "kind": "MountpointS3PodAttachment",
            "metadata": { "name": name },
            "spec": {
                "nodeName": node,
                "persistentVolumeName": persistent_volume,
                "volumeID": format!("{persistent_volume}-handle"),
                "mountOptions": "allow-delete,allow-overwrite",
                "workloadFSGroup": "",
                "mountpointS3PodAttachments": entries,
            },
        });
        let apply = PatchParams::apply("controller").force();
        attachments(self.client.clone(), driver).patch(&name, &apply, &Patch::Apply(attachment)).await.map(drop)
    }

    pub async fn detach(&self, driver: &str, node: &str, persistent_volume: &str) -> kube::Result<()> {
        let name = attachment_name(node, persistent_volume);
        attachments(self.client.clone(), driver).delete(&name, &DeleteParams::default()).await.map(drop)
    }
}

pub fn attachment_name(node: &str, persistent_volume: &str) -> String {
    format!("s3pa-{node}-{persistent_volume}")
}

fn object<T: DeserializeOwned>(value: Value) -> kube::Result<T> {
    serde_json::from_value(value).map_err(kube::Error::SerdeError)
}
