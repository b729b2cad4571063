//! What the watches have reported so far, as facts of core, and which keys a change affects.
//!
//! Nothing here calls the API server and nothing decides. Stale facts are harmless: an action based on them loses a
//! compare-and-swap, or the next reconciliation repairs it.

mod counts;
mod headroom;
mod index;
mod inline;
mod keys;
mod sources;
#[cfg(test)]
mod tests;
mod warm;

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

use s3csi_core::attachment::{
    AttachedElsewhere, Claim, MountpointPod, NodeScope, ObservedState, PodOnNode, RequiredVolumes, VolumeFacts,
    VolumeLister, VolumeState, Workload, required_volumes,
};
use s3csi_core::publish::InlineVolumes;
use s3csi_core::{PvName, WorkloadUid};

pub use self::counts::ClusterCounts;
use self::headroom::Headroom;
use self::index::Index;
use self::inline::InlineIndex;
pub use self::keys::{ReconcileKey, ReconcileKeys};
use self::keys::{key_of_attachment, key_of_pod};
use self::warm::WarmPods;
use super::NewWorkloads;
use super::facts::{AttachmentWithStatus, MountpointPodFacts};
use crate::api::watch::WatchUpdate;

/// How long a deleted workload is remembered; after this its entries are stale anyway.
const GONE_REMEMBERED: Duration = Duration::from_mins(5);

type ClaimName = (String, String);

#[derive(Debug)]
pub struct Cache {
    driver: String,
    driver_version: String,
    /// How many sources of a node may have two Mountpoint Pods only because of a new version of the driver.
    upgrades_per_node: usize,
    new_workloads: NewWorkloads,
    inline_volumes: InlineVolumes,
    inline: InlineIndex,
    workloads: HashMap<WorkloadUid, Workload>,
    workloads_by_claim: Index<ClaimName, WorkloadUid>,
    gone: HashMap<ReconcileKey, HashMap<WorkloadUid, Instant>>,
    /// Workloads that were attached before the current list of workloads was requested.
    expected: BTreeSet<WorkloadUid>,
    claims: HashMap<ClaimName, Claim>,
    claims_by_volume: Index<String, ClaimName>,
    volumes: HashMap<String, VolumeFacts>,
    attachments: HashMap<String, AttachmentWithStatus>,
    attachments_by_key: Index<ReconcileKey, String>,
    attachments_by_volume: Index<String, String>,
    attachments_by_workload: Index<WorkloadUid, String>,
    attachments_by_pod: Index<String, String>,
    pods: HashMap<String, MountpointPodFacts>,
    pods_by_key: Index<ReconcileKey, String>,
    warm: WarmPods,
    headroom: Headroom,
}

impl Cache {
    pub fn new(driver: &str, driver_version: &str, upgrades_per_node: usize) -> Self {
        Self {
            driver: driver.to_owned(),
            driver_version: driver_version.to_owned(),
            upgrades_per_node,
            new_workloads: NewWorkloads::Attached,
            inline_volumes: InlineVolumes::Refused,
            inline: InlineIndex::default(),
            workloads: HashMap::new(),
            workloads_by_claim: Index::default(),
            gone: HashMap::new(),
            expected: BTreeSet::new(),
            claims: HashMap::new(),
            claims_by_volume: Index::default(),
            volumes: HashMap::new(),
            attachments: HashMap::new(),
            attachments_by_key: Index::default(),
            attachments_by_volume: Index::default(),
            attachments_by_workload: Index::default(),
            attachments_by_pod: Index::default(),
            pods: HashMap::new(),
            pods_by_key: Index::default(),
            warm: WarmPods::default(),
            headroom: Headroom::default(),
        }
    }

    pub fn with_new_workloads(self, new_workloads: NewWorkloads) -> Self {
        Self { new_workloads, ..self }
    }

    /// Everything that is known about one key.
    pub fn observe(&self, key: &ReconcileKey) -> ObservedState {
        let ReconcileKey { node, persistent_volume } = key;
        let attachments: Vec<_> =
            self.attachments_of(key).map(|AttachmentWithStatus { attachment, .. }| attachment.clone()).collect();
        let users = self
            .claims_by_volume
            .get(persistent_volume.as_str())
            .flat_map(|claim| self.workloads_by_claim.get(claim))
            .chain(self.inline.workload(persistent_volume))
            .filter(|uid| self.workloads.get(*uid).is_some_and(|it| it.node.as_ref() == Some(node)));
        let attached = attachments.iter().flat_map(|it| it.entries.values().flatten()).map(|it| &it.workload);
        let workloads: BTreeSet<&WorkloadUid> = users.chain(attached).collect();
        let named = attachments.iter().flat_map(|it| it.entries.keys());
        let pods: BTreeSet<&String> = self.pods_by_key.get(key).chain(named).collect();
        let gone = self.gone.get(key);
        let mountpoint_pods: Vec<MountpointPod> =
            pods.into_iter().filter_map(|it| self.pods.get(it)).map(|it| it.pod.clone()).collect();
        // Counting looks at all Pods, and is needed for few decisions.
        let is_outdated = |it: &MountpointPod| it.driver_version.as_ref() != Some(&self.driver_version);
        let has_outdated = mountpoint_pods.iter().any(is_outdated);
        ObservedState {
            persistent_volume: persistent_volume.clone(),
            driver_version: self.driver_version.clone(),
            volume: VolumeState::of(self.volume(persistent_volume)),
            workloads: workloads
                .into_iter()
                .filter_map(|uid| self.workloads.get(uid))
                .map(|it| PodOnNode::new(it, &self.required_volumes(it), persistent_volume))
                .collect(),
            elsewhere: if self.is_single_node(persistent_volume) { self.attached_elsewhere(key) } else { Vec::new() },
            gone: gone.into_iter().flat_map(HashMap::keys).cloned().collect(),
            mountpoint_pods,
            attachments,
            may_upgrade: has_outdated && self.replacements(node) < self.upgrades_per_node,
            warm_pods: self.warm_pods(node),
            // Known to those who create Mountpoint Pods.
            template: None,
        }
    }

    /// What a workload requires of Mountpoint Pods.
    fn required_volumes(&self, workload: &Workload) -> RequiredVolumes {
        match self.new_workloads {
            NewWorkloads::Attached => required_volumes(workload, &self.driver, self),
            NewWorkloads::LeftAlone => RequiredVolumes::default(),
        }
    }

    fn attached_elsewhere(&self, ReconcileKey { node, persistent_volume }: &ReconcileKey) -> Vec<AttachedElsewhere> {
        let names = self.attachments_by_volume.get(persistent_volume.as_str());
        let attachments = names.filter_map(|it| self.attachments.get(it)).map(|it| &it.attachment);
        let others = attachments.filter(|it| it.fields.node != *node);
        let entries =
            others.flat_map(|it| it.entries.values().flatten().map(|entry| (&it.fields.node, &entry.workload)));
        entries
            .filter(|(_, uid)| self.workloads.get(*uid).is_none_or(|it| it.activity().is_live()))
            .map(|(node, uid)| AttachedElsewhere {
                node: node.clone(),
                workload: self
                    .workloads
                    .get(uid)
                    .map_or_else(|| uid.to_string(), |it| format!("{}/{}", it.namespace, it.name)),
            })
            .collect()
    }

    /// Whether the volume may be used on one node only.
    pub fn is_single_node(&self, volume: &PvName) -> bool {
        self.volume(volume).is_some_and(|it| it.scope() == NodeScope::SingleNode)
    }

    pub fn volume(&self, name: &PvName) -> Option<&VolumeFacts> {
        let persistent = self.volumes.get(name.as_str()).filter(|it| it.driver.as_ref() == Some(&self.driver));
        persistent.or_else(|| self.inline.volume(name))
    }

    pub fn workload(&self, uid: &WorkloadUid) -> Option<&Workload> {
        self.workloads.get(uid)
    }

    pub fn attachments_of(&self, key: &ReconcileKey) -> impl Iterator<Item = &AttachmentWithStatus> {
        self.attachments_by_key.get(key).filter_map(|it| self.attachments.get(it))
    }

    /// Every key that anything is known about.
    pub fn all_keys(&self) -> ReconcileKeys {
        let mut keys: ReconcileKeys = self.workloads.values().flat_map(|it| self.keys_of_workload(it)).collect();
        keys.extend(self.attachments_by_key.keys().cloned());
        keys.extend(self.pods_by_key.keys().cloned());
        keys
    }

    /// To be called before workloads are listed. A workload that is attached by now existed before the list: if the list does
    /// not contain it, it is gone.
    pub fn expect_attached_workloads(&mut self) {
        self.expected = self.attachments_by_workload.keys().cloned().collect();
    }

    pub fn update_workloads(&mut self, update: WatchUpdate<Workload>, now: Instant) -> ReconcileKeys {
        let mut affected = ReconcileKeys::new();
        match update {
            WatchUpdate::Listed(workloads) => {
                let kept: BTreeSet<WorkloadUid> = workloads.iter().map(|it| it.uid.clone()).collect();
                let lost: Vec<WorkloadUid> = self.workloads.keys().filter(|it| !kept.contains(it)).cloned().collect();
                for uid in lost {
                    affected.extend(self.remove_workload(&uid, now));
                }
                let expected = std::mem::take(&mut self.expected);
                for uid in expected.difference(&kept) {
                    affected.extend(self.remember_gone(uid, self.keys_of_attached(uid), now));
                }
                for workload in workloads {
                    affected.extend(self.set_workload(workload));
                }
            }
            WatchUpdate::Changed(workload) => affected.extend(self.set_workload(workload)),
            WatchUpdate::Deleted(workload) => affected.extend(self.remove_workload(&workload.uid, now)),
        }
        affected
    }

    pub fn update_claims(&mut self, update: WatchUpdate<Claim>) -> ReconcileKeys {
        let mut affected = ReconcileKeys::new();
        match update {
            WatchUpdate::Listed(claims) => {
                let kept: BTreeSet<ClaimName> = claims.iter().map(claim_name).collect();
                let lost: Vec<ClaimName> = self.claims.keys().filter(|it| !kept.contains(it)).cloned().collect();
                for name in lost {
                    affected.extend(self.set_claim(&name, None));
                }
                for claim in claims {
                    affected.extend(self.set_claim(&claim_name(&claim), Some(claim)));
                }
            }
            WatchUpdate::Changed(claim) => affected.extend(self.set_claim(&claim_name(&claim), Some(claim))),
            WatchUpdate::Deleted(claim) => affected.extend(self.set_claim(&claim_name(&claim), None)),
        }
        affected
    }

    pub fn update_volumes(&mut self, update: WatchUpdate<VolumeFacts>) -> ReconcileKeys {
        let mut affected = ReconcileKeys::new();
        match update {
            WatchUpdate::Listed(volumes) => {
                let kept: BTreeSet<&str> = volumes.iter().map(|it| it.name.as_str()).collect();
                let lost: Vec<String> = self.volumes.keys().filter(|it| !kept.contains(it.as_str())).cloned().collect();
                for name in lost {
                    affected.extend(self.set_volume(&name, None));
                }
                for volume in volumes {
                    let name = volume.name.clone();
                    affected.extend(self.set_volume(name.as_str(), Some(volume)));
                }
            }
            WatchUpdate::Changed(volume) => {
                let name = volume.name.clone();
                affected.extend(self.set_volume(name.as_str(), Some(volume)));
            }
            WatchUpdate::Deleted(volume) => affected.extend(self.set_volume(volume.name.as_str(), None)),
        }
        affected
    }

    pub fn update_attachments(&mut self, update: WatchUpdate<AttachmentWithStatus>) -> ReconcileKeys {
        let mut affected = ReconcileKeys::new();
        match update {
            WatchUpdate::Listed(attachments) => {
                let kept: BTreeSet<&str> = attachments.iter().map(|it| it.attachment.name.as_str()).collect();
                let lost: Vec<String> =
                    self.attachments.keys().filter(|it| !kept.contains(it.as_str())).cloned().collect();
                for name in lost {
                    affected.extend(self.set_attachment(&name, None));
                }
                for it in attachments {
                    affected.extend(self.set_attachment(&it.attachment.name.clone(), Some(it)));
                }
            }
            WatchUpdate::Changed(it) => {
                let known = self.attachments.get(&it.attachment.name).map(|it| &it.attachment.resource_version);
                if !known.is_some_and(|known| is_older(&it.attachment.resource_version, known)) {
                    affected.extend(self.set_attachment(&it.attachment.name.clone(), Some(it)));
                }
            }
            WatchUpdate::Deleted(it) => affected.extend(self.set_attachment(&it.attachment.name, None)),
        }
        affected
    }

    pub fn update_pods(&mut self, update: WatchUpdate<MountpointPodFacts>) -> ReconcileKeys {
        let mut affected = ReconcileKeys::new();
        match update {
            WatchUpdate::Listed(pods) => {
                let kept: BTreeSet<&str> = pods.iter().map(|it| it.pod.name.as_str()).collect();
                let lost: Vec<String> = self.pods.keys().filter(|it| !kept.contains(it.as_str())).cloned().collect();
                for name in lost {
                    affected.extend(self.set_pod(&name, None));
                }
                for it in pods {
                    affected.extend(self.set_pod(&it.pod.name.clone(), Some(it)));
                }
            }
            WatchUpdate::Changed(it) => {
                let known = self.pods.get(&it.pod.name).map(|it| &it.pod.resource_version);
                if !known.is_some_and(|known| is_older(&it.pod.resource_version, known)) {
                    affected.extend(self.set_pod(&it.pod.name.clone(), Some(it)));
                }
            }
            WatchUpdate::Deleted(it) => {
                // The next Pod of this name may have been reported already.
                if self.pods.get(&it.pod.name).is_some_and(|known| known.pod.uid == it.pod.uid) {
                    affected.extend(self.set_pod(&it.pod.name, None));
                }
            }
        }
        affected
    }

    fn set_workload(&mut self, workload: Workload) -> ReconcileKeys {
        let workload = self.without_refused(workload);
        let known = self.workloads.get(&workload.uid);
        if known == Some(&workload) {
            return ReconcileKeys::new();
        }
        if Self::is_ungated_without_volumes(&workload) {
            return self.remove_workload(&workload.uid, Instant::now());
        }
        let mut affected = known.map(|it| self.keys_of_workload(it)).unwrap_or_default();
        self.index_volumes(&workload);
        affected.extend(self.keys_of_workload(&workload));
        let uid = workload.uid.clone();
        self.workloads.insert(uid.clone(), workload);
        self.enqueue_headroom(&uid);
        affected
    }

    fn remove_workload(&mut self, uid: &WorkloadUid, now: Instant) -> ReconcileKeys {
        let Some(workload) = self.workloads.remove(uid) else {
            return ReconcileKeys::new();
        };
        let affected = self.keys_of_workload(&workload);
        self.unindex_volumes(&workload);
        self.enqueue_headroom(uid);
        self.remember_gone(uid, affected, now)
    }

    fn remember_gone(&mut self, uid: &WorkloadUid, keys: ReconcileKeys, now: Instant) -> ReconcileKeys {
        for key in &keys {
            self.gone.entry(key.clone()).or_default().insert(uid.clone(), now);
        }
        keys
    }

    /// Forgets workloads that were deleted long ago.
    pub fn expire_gone(&mut self, now: Instant) {
        for gone in self.gone.values_mut() {
            gone.retain(|_, at| now.saturating_duration_since(*at) < GONE_REMEMBERED);
        }
        self.gone.retain(|_, it| !it.is_empty());
    }

    fn set_claim(&mut self, name: &ClaimName, claim: Option<Claim>) -> ReconcileKeys {
        if self.claims.get(name) == claim.as_ref() {
            return ReconcileKeys::new();
        }
        let mut affected = self.keys_of_claim(name);
        if let Some(volume) = self.claims.remove(name).and_then(|it| it.volume) {
            self.claims_by_volume.remove(&volume, name);
        }
        if let Some(claim) = claim {
            if let Some(volume) = &claim.volume {
                self.claims_by_volume.insert(volume.clone(), name.clone());
            }
            self.claims.insert(name.clone(), claim);
        }
        affected.extend(self.keys_of_claim(name));
        self.workloads_by_claim.get(name).for_each(|it| self.enqueue_headroom(it));
        affected
    }

    fn set_volume(&mut self, name: &str, volume: Option<VolumeFacts>) -> ReconcileKeys {
        if self.volumes.get(name) == volume.as_ref() {
            return ReconcileKeys::new();
        }
        let mut affected = self.keys_of_volume(name);
        match volume {
            Some(volume) => self.volumes.insert(name.to_owned(), volume),
            None => self.volumes.remove(name),
        };
        affected.extend(self.keys_of_volume(name));
        let claims = self.claims_by_volume.get(name);
        claims.flat_map(|it| self.workloads_by_claim.get(it)).for_each(|it| self.enqueue_headroom(it));
        affected
    }

    fn set_attachment(&mut self, name: &str, attachment: Option<AttachmentWithStatus>) -> ReconcileKeys {
        let known = self.attachments.get(name);
        if known == attachment.as_ref() {
            return ReconcileKeys::new();
        }
        let mut affected = ReconcileKeys::new();
        if let Some(AttachmentWithStatus { attachment: old, .. }) = self.attachments.remove(name) {
            let key = key_of_attachment(&old.fields.node, &old.fields.persistent_volume);
            self.attachments_by_key.remove(&key, name);
            self.attachments_by_volume.remove(old.fields.persistent_volume.as_str(), name);
            // Workloads on other nodes may wait for this one.
            affected.extend(self.keys_of_single_node_volume(&old.fields.persistent_volume));
            for (pod, entries) in &old.entries {
                self.attachments_by_pod.remove(pod, name);
                for entry in entries {
                    self.attachments_by_workload.remove(&entry.workload, name);
                }
            }
            affected.insert(key);
        }
        if let Some(new) = attachment {
            let fields = &new.attachment.fields;
            let key = key_of_attachment(&fields.node, &fields.persistent_volume);
            self.attachments_by_key.insert(key.clone(), name.to_owned());
            self.attachments_by_volume.insert(fields.persistent_volume.to_string(), name.to_owned());
            for (pod, entries) in &new.attachment.entries {
                self.attachments_by_pod.insert(pod.clone(), name.to_owned());
                for entry in entries {
                    self.attachments_by_workload.insert(entry.workload.clone(), name.to_owned());
                    self.enqueue_headroom(&entry.workload);
                }
            }
            affected.insert(key);
            self.attachments.insert(name.to_owned(), new);
        }
        affected
    }

    fn set_pod(&mut self, name: &str, pod: Option<MountpointPodFacts>) -> ReconcileKeys {
        if self.pods.get(name) == pod.as_ref() {
            return ReconcileKeys::new();
        }
        self.warm.update(name, self.pods.get(name), pod.as_ref());
        let source = pod.as_ref().map(|it| it.pod.source.clone());
        let mut affected = ReconcileKeys::new();
        if let Some(key) = self.pods.remove(name).and_then(key_of_pod) {
            self.pods_by_key.remove(&key, name);
            affected.insert(key);
        }
        if let Some(pod) = pod {
            if let Some(key) = key_of_pod(pod.clone()) {
                self.pods_by_key.insert(key.clone(), name.to_owned());
                affected.insert(key);
            }
            self.pods.insert(name.to_owned(), pod);
        }
        if let Some(source) = source {
            self.enqueue_headroom_of_source(&source);
        }
        let named_by = self.attachments_by_pod.get(name).filter_map(|it| self.attachments.get(it));
        affected.extend(
            named_by.map(|it| key_of_attachment(&it.attachment.fields.node, &it.attachment.fields.persistent_volume)),
        );
        affected
    }
}

impl VolumeLister for Cache {
    fn claim(&self, namespace: &str, name: &str) -> Option<Claim> {
        self.claims.get(&(namespace.to_owned(), name.to_owned())).cloned()
    }

    fn volume(&self, name: &str) -> Option<VolumeFacts> {
        self.volumes.get(name).cloned()
    }
}

fn claim_name(claim: &Claim) -> ClaimName {
    (claim.namespace.clone(), claim.name.clone())
}

/// Whether a version of an object is older than another. Our own writes are in the cache before the watch reports them; older
/// versions that it reports meanwhile must not replace them. Versions are numbers in every known API server; if not, the newest
/// report applies.
fn is_older(version: &str, known: &str) -> bool {
    match (version.parse::<u64>(), known.parse::<u64>()) {
        (Ok(version), Ok(known)) => version < known,
        (Err(_), _) | (_, Err(_)) => false,
    }
}
