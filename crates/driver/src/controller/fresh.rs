//! Reads without a cache, for the few writes that an old fact could make harmful.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, Client};
use s3csi_core::WorkloadUid;
use s3csi_core::attachment::{Attachment, Creator, Observed, Resident, Workload};

use super::cache::Unit;
use super::facts;
use crate::api::call::{CallError, call};
use crate::api::{self, MountpointS3PodAttachment};

pub struct Fresh {
    attachments: Api<MountpointS3PodAttachment>,
    pods: Api<Pod>,
    mountpoint_namespace: String,
}

#[derive(Debug, thiserror::Error)]
pub enum FreshError {
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

impl Fresh {
    pub fn new(client: &Client, driver: &str, mountpoint_namespace: &str) -> Self {
        Self {
            attachments: api::attachments(client.clone(), driver),
            pods: Api::all(client.clone()),
            mountpoint_namespace: mountpoint_namespace.to_owned(),
        }
    }

    /// The facts that [`s3csi_core::attachment::may_retire`] asks for, read anew where the cache is no proof.
    pub async fn read(&self, unit: &Unit, observed: Observed, creator: Creator) -> Result<Observed, FreshError> {
        let attachments = self.attachments(unit).await?;
        let workloads = match creator {
            Creator::Ended => observed.workloads,
            Creator::Unseen => {
                let resident = |it: Workload| Resident { activity: it.activity(), uid: it.uid, wish: None };
                self.workloads(&unit.node).await?.into_iter().map(resident).collect()
            }
        };
        Ok(Observed { attachments, workloads, ..observed })
    }

    /// UIDs of the node's workloads that use their volumes, or will.
    pub async fn living_workloads(&self, node: &str) -> Result<BTreeSet<WorkloadUid>, FreshError> {
        let workloads = self.workloads(node).await?;
        Ok(workloads.into_iter().filter(|it| it.activity().is_live()).map(|it| it.uid).collect())
    }

    async fn workloads(&self, node: &str) -> Result<Vec<Workload>, FreshError> {
        let parameters = ListParams::default().fields(&format!("spec.nodeName={node}"));
        let pods = call(self.pods.list(&parameters))
            .await
            .map_err(|cause| FreshError::Pods { node: node.to_owned(), cause })?;
        let is_workload = |it: &&Pod| it.metadata.namespace.as_ref() != Some(&self.mountpoint_namespace);
        Ok(pods.items.iter().filter(is_workload).filter_map(facts::workload).collect())
    }

    async fn attachments(&self, unit: &Unit) -> Result<Vec<Attachment>, FreshError> {
        let Unit { node, persistent_volume } = unit;
        let selector = format!("spec.nodeName={node},spec.persistentVolumeName={persistent_volume}");
        let objects = match call(self.attachments.list(&ListParams::default().fields(&selector))).await {
            // Where a definition has no selectable fields, everything is read.
            Err(cause) if cause.is_not_understood() => call(self.attachments.list(&ListParams::default())).await,
            outcome => outcome,
        };
        let objects = objects.map_err(|cause| FreshError::Attachments { cause })?;
        let is_of_unit = |it: &Attachment| it.fields.node == *node && it.fields.persistent_volume == *persistent_volume;
        Ok(objects.items.iter().filter_map(api::attachment_facts).filter(is_of_unit).collect())
    }
}
