//! Which reconcile keys a change of an object affects.

use std::collections::BTreeSet;

use s3csi_core::attachment::Workload;
use s3csi_core::{PvName, WorkloadUid};

use super::inline::inline_names;
use super::{Cache, ClaimName};
use crate::controller::facts::MountpointPodFacts;

/// One PV on one node: every decision is about one of these.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReconcileKey {
    pub node: String,
    pub persistent_volume: PvName,
}

/// Keys to reconcile.
pub type ReconcileKeys = BTreeSet<ReconcileKey>;

impl Cache {
    pub(super) fn keys_of_workload(&self, workload: &Workload) -> ReconcileKeys {
        let Some(node) = &workload.node else {
            return ReconcileKeys::new();
        };
        let claims = workload.claims.iter().map(|it| (workload.namespace.clone(), it.claim_name(workload)));
        let volumes = claims.filter_map(|it| self.claims.get(&it)?.volume.as_ref()?.parse().ok());
        let ours = volumes.filter(|it| self.volume(it).is_some()).chain(inline_names(workload));
        let mut keys: ReconcileKeys =
            ours.map(|persistent_volume| ReconcileKey { node: node.clone(), persistent_volume }).collect();
        keys.extend(self.keys_of_attached(&workload.uid));
        keys
    }

    pub(super) fn keys_of_attached(&self, workload: &WorkloadUid) -> ReconcileKeys {
        let attachments = self.attachments_by_workload.get(workload).filter_map(|it| self.attachments.get(it));
        attachments
            .map(|it| key_of_attachment(&it.attachment.fields.node, &it.attachment.fields.persistent_volume))
            .collect()
    }

    pub(super) fn keys_of_claim(&self, name: &ClaimName) -> ReconcileKeys {
        let workloads = self.workloads_by_claim.get(name).filter_map(|it| self.workloads.get(it));
        workloads.flat_map(|it| self.keys_of_workload(it)).collect()
    }

    pub(super) fn keys_of_single_node_volume(&self, volume: &PvName) -> ReconcileKeys {
        if self.is_single_node(volume) { self.keys_of_volume(volume.as_str()) } else { ReconcileKeys::new() }
    }

    pub(super) fn keys_of_volume(&self, name: &str) -> ReconcileKeys {
        let mut keys: ReconcileKeys = self.claims_by_volume.get(name).flat_map(|it| self.keys_of_claim(it)).collect();
        let attachments = self.attachments_by_volume.get(name).filter_map(|it| self.attachments.get(it));
        keys.extend(
            attachments
                .map(|it| key_of_attachment(&it.attachment.fields.node, &it.attachment.fields.persistent_volume)),
        );
        keys
    }
}

pub(super) fn key_of_attachment(node: &str, persistent_volume: &PvName) -> ReconcileKey {
    ReconcileKey { node: node.to_owned(), persistent_volume: persistent_volume.clone() }
}

pub(super) fn key_of_pod(pod: MountpointPodFacts) -> Option<ReconcileKey> {
    Some(ReconcileKey { node: pod.node?, persistent_volume: pod.persistent_volume? })
}
