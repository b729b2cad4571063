//! Inline volumes: what a workload's spec says stands in for a PV.

use std::collections::HashMap;

use s3csi_core::attachment::{ClaimSource, VolumeFacts, Workload};
use s3csi_core::publish::InlineVolumes;
use s3csi_core::{PvName, WorkloadUid};

use super::Cache;

/// By the name that stands in for that of a PV: the workload that the volume belongs to, and the volume.
#[derive(Debug, Default)]
pub struct InlineIndex(HashMap<PvName, (WorkloadUid, VolumeFacts)>);

impl InlineIndex {
    pub fn volume(&self, name: &PvName) -> Option<&VolumeFacts> {
        self.0.get(name).map(|(_, volume)| volume)
    }

    pub fn workload(&self, name: &PvName) -> Option<&WorkloadUid> {
        self.0.get(name).map(|(workload, _)| workload)
    }
}

impl Cache {
    pub fn with_inline_volumes(self, inline_volumes: InlineVolumes) -> Self {
        Self { inline_volumes, ..self }
    }

    /// kubelet mounts no inline volume if they are refused: then they are as good as not there.
    pub(super) fn without_refused(&self, mut workload: Workload) -> Workload {
        if self.inline_volumes == InlineVolumes::Refused {
            workload.claims.retain(|it| !matches!(it, ClaimSource::Inline(_)));
        }
        workload
    }

    /// The volumes of a Pod never change.
    pub(super) fn index_volumes(&mut self, workload: &Workload) {
        for reference in &workload.claims {
            if let ClaimSource::Inline(inline) = reference {
                let volume = inline.facts(workload, &self.driver);
                self.inline.0.insert(volume.name.clone(), (workload.uid.clone(), volume));
            } else {
                let name = (workload.namespace.clone(), reference.claim_name(workload));
                self.workloads_by_claim.insert(name, workload.uid.clone());
            }
        }
    }

    pub(super) fn unindex_volumes(&mut self, workload: &Workload) {
        for reference in &workload.claims {
            if let ClaimSource::Inline(inline) = reference {
                self.inline.0.remove(&inline.volume_name(&workload.uid));
            } else {
                let name = (workload.namespace.clone(), reference.claim_name(workload));
                self.workloads_by_claim.remove(&name, &workload.uid);
            }
        }
    }
}

/// The names that stand in for those of PVs.
pub(super) fn inline_names(workload: &Workload) -> impl Iterator<Item = PvName> {
    workload.claims.iter().filter_map(|it| match it {
        ClaimSource::Inline(inline) => Some(inline.volume_name(&workload.uid)),
        ClaimSource::Claim(_) | ClaimSource::Ephemeral { .. } => None,
    })
}
