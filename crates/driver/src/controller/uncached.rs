//! Reads that bypass the cache, before the few writes that a stale fact could make harmful.

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::ListParams;
use kube::{Api, Client};
use parking_lot::Mutex;
use s3csi_core::attachment::{Attachment, CreatorState, ObservedState, PodOnNode, Workload};
use s3csi_core::{Chain, WorkloadUid};

use super::cache::ReconcileKey;
use super::facts;
use crate::api::call::{CallError, call};
use crate::api::{self, MountpointS3PodAttachment};

/// How long the UID of a node is remembered: many workloads come to a node at once. A node that was replaced by one of the same name
/// meanwhile has another UID; the garbage collector then removes the Mountpoint Pod, and it is created again.
const NODE_UID_REMEMBERED: Duration = Duration::from_secs(10);

pub struct UncachedReader {
    driver: String,
    attachments: Api<MountpointS3PodAttachment>,
    pods: Api<Pod>,
    nodes: Api<Node>,
    /// By name: when it was read. `None` for nodes that do not exist.
    node_uids: Mutex<HashMap<String, (Instant, Option<String>)>>,
    mountpoint_namespace: String,
}

/// What concerns the Mountpoint Pods of a node.
pub struct NodeFacts {
    pub uid: String,
    /// Marked as unschedulable, which is the first step of a drain.
    pub is_cordoned: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum UncachedReadError {
    #[error("failed to list the attachments of the volume")]
    Attachments {
        #[source]
        cause: CallError,
    },

    #[error("failed to list the Pods of node {node}")]
    Pods {
        node: String,
        #[source]
        cause: CallError,
    },
}

impl UncachedReader {
    pub fn new(client: &Client, driver: &str, mountpoint_namespace: &str) -> Self {
        Self {
            driver: driver.to_owned(),
            attachments: api::attachments(client.clone(), driver),
            pods: Api::all(client.clone()),
            nodes: Api::all(client.clone()),
            node_uids: Mutex::default(),
            mountpoint_namespace: mountpoint_namespace.to_owned(),
        }
    }

    /// The facts that [`s3csi_core::attachment::may_retire`] asks for, read again where the cache is no proof.
    pub async fn read(
        &self,
        key: &ReconcileKey,
        observed: ObservedState,
        creator: CreatorState,
    ) -> Result<ObservedState, UncachedReadError> {
        let attachments = self.attachments(key).await?;
        let workloads = match creator {
            CreatorState::Ended => observed.workloads,
            CreatorState::Unseen => {
                let on_node = |it: Workload| PodOnNode { activity: it.activity(), uid: it.uid, requirement: None };
                self.workloads(&key.node).await?.into_iter().map(on_node).collect()
            }
        };
        Ok(ObservedState { attachments, workloads, ..observed })
    }

    /// As it is or was a few seconds ago. `None` if it cannot be read.
    pub async fn node_uid(&self, name: &str) -> Option<String> {
        let is_recent = |at: &Instant| at.elapsed() < NODE_UID_REMEMBERED;
        if let Some((_, uid)) = self.node_uids.lock().get(name).filter(|(at, _)| is_recent(at)) {
            return uid.clone();
        }
        self.node(name).await.map(|it| it.uid)
    }

    /// `None` if it cannot be read, for example because the role of an earlier version does not allow it.
    pub async fn node(&self, name: &str) -> Option<NodeFacts> {
        let remember = |uid: Option<String>| {
            let mut uids = self.node_uids.lock();
            uids.retain(|_, (at, _)| at.elapsed() < NODE_UID_REMEMBERED);
            uids.insert(name.to_owned(), (Instant::now(), uid));
        };
        match call(self.nodes.get(name)).await {
            Ok(node) => {
                remember(node.metadata.uid.clone());
                Some(NodeFacts {
                    uid: node.metadata.uid?,
                    is_cordoned: node.spec.and_then(|it| it.unschedulable).unwrap_or(false),
                })
            }
            Err(error) if error.is_not_found() => {
                remember(None);
                None
            }
            Err(error) => {
                tracing::debug!(node = name, error = %Chain(&error), "failed to read the node");
                None
            }
        }
    }

    /// UIDs of the node's workloads that use their volumes, or will.
    pub async fn living_workloads(&self, node: &str) -> Result<BTreeSet<WorkloadUid>, UncachedReadError> {
        let workloads = self.workloads(node).await?;
        Ok(workloads.into_iter().filter(|it| it.activity().is_live()).map(|it| it.uid).collect())
    }

    async fn workloads(&self, node: &str) -> Result<Vec<Workload>, UncachedReadError> {
        let parameters = ListParams::default().fields(&format!("spec.nodeName={node}"));
        let pods = call(self.pods.list(&parameters))
            .await
            .map_err(|cause| UncachedReadError::Pods { node: node.to_owned(), cause })?;
        let is_workload = |it: &&Pod| it.metadata.namespace.as_ref() != Some(&self.mountpoint_namespace);
        Ok(pods.items.iter().filter(is_workload).filter_map(|it| facts::workload(&self.driver, it)).collect())
    }

    async fn attachments(&self, key: &ReconcileKey) -> Result<Vec<Attachment>, UncachedReadError> {
        let ReconcileKey { node, persistent_volume } = key;
        let selector = format!("spec.nodeName={node},spec.persistentVolumeName={persistent_volume}");
        let objects = match call(self.attachments.list(&ListParams::default().fields(&selector))).await {
            // A CRD without selectable fields: read all.
            Err(cause) if cause.is_bad_request() => call(self.attachments.list(&ListParams::default())).await,
            outcome => outcome,
        };
        let objects = objects.map_err(|cause| UncachedReadError::Attachments { cause })?;
        let is_of_key = |it: &Attachment| it.fields.node == *node && it.fields.persistent_volume == *persistent_volume;
        Ok(objects.items.iter().filter_map(api::attachment_facts).filter(is_of_key).collect())
    }
}
