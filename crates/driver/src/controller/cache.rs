//! What the watches have told so far, as facts of core, and who must be looked at when one of them changes.
//!
//! Nothing here asks the API server and nothing decides. Old news are harmless: whoever acts on them loses a
//! compare-and-swap or does something that the next look repairs.

mod index;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

use s3csi_core::attachment::{
    Catalog, Claim, MountpointPod, Observed, Phase, Resident, Volume, VolumeState, Workload, uses,
};
use s3csi_core::{PvName, WorkloadUid};

use self::index::Index;
use super::facts::{ReportedAttachment, StartedPod};

/// One PV on one node: the unit of every decision.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Unit {
    pub node: String,
    pub persistent_volume: PvName,
}

/// How many of what there are, for Prometheus.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Attachments all of whose Mountpoint Pods run.
    pub ready: usize,
    pub waiting: usize,
    pub workloads: usize,
    pub pods: BTreeMap<&'static str, usize>,
}

/// Units that must be looked at again.
pub type Affected = BTreeSet<Unit>;

/// News of a watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum News<Fact> {
    /// Everything there is. What is not in it does not exist any more.
    All(Vec<Fact>),
    Changed(Fact),
    Gone(Fact),
}

/// That a workload is gone is remembered for as long as somebody may still ask; after this it is stale anyway.
const GONE_REMEMBERED: Duration = Duration::from_mins(5);

type ClaimName = (String, String);

#[derive(Debug)]
pub struct Cache {
    driver: String,
    driver_version: String,
    workloads: HashMap<WorkloadUid, Workload>,
    workloads_by_claim: Index<ClaimName, WorkloadUid>,
    gone: HashMap<Unit, HashMap<WorkloadUid, Instant>>,
    /// Attached before the list of workloads was asked for that has not been told yet.
    expected: BTreeSet<WorkloadUid>,
    claims: HashMap<ClaimName, Claim>,
    claims_by_volume: Index<String, ClaimName>,
    volumes: HashMap<String, Volume>,
    attachments: HashMap<String, ReportedAttachment>,
    attachments_by_unit: Index<Unit, String>,
    attachments_by_workload: Index<WorkloadUid, String>,
    attachments_by_pod: Index<String, String>,
    pods: HashMap<String, StartedPod>,
    pods_by_unit: Index<Unit, String>,
}

impl Cache {
    pub fn new(driver: &str, driver_version: &str) -> Self {
        Self {
            driver: driver.to_owned(),
            driver_version: driver_version.to_owned(),
            workloads: HashMap::new(),
            workloads_by_claim: Index::default(),
            gone: HashMap::new(),
            expected: BTreeSet::new(),
            claims: HashMap::new(),
            claims_by_volume: Index::default(),
            volumes: HashMap::new(),
            attachments: HashMap::new(),
            attachments_by_unit: Index::default(),
            attachments_by_workload: Index::default(),
            attachments_by_pod: Index::default(),
            pods: HashMap::new(),
            pods_by_unit: Index::default(),
        }
    }

    /// Everything that is known about one unit.
    pub fn observe(&self, unit: &Unit) -> Observed {
        let Unit { node, persistent_volume } = unit;
        let attachments: Vec<_> =
            self.attachments_of(unit).map(|ReportedAttachment { attachment, .. }| attachment.clone()).collect();
        let users = self
            .claims_by_volume
            .get(persistent_volume.as_str())
            .flat_map(|claim| self.workloads_by_claim.get(claim))
            .filter(|uid| self.workloads.get(*uid).is_some_and(|it| it.node.as_ref() == Some(node)));
        let attached = attachments.iter().flat_map(|it| it.entries.values().flatten()).map(|it| &it.workload);
        let workloads: BTreeSet<&WorkloadUid> = users.chain(attached).collect();
        let named = attachments.iter().flat_map(|it| it.entries.keys());
        let pods: BTreeSet<&String> = self.pods_by_unit.get(unit).chain(named).collect();
        let gone = self.gone.get(unit);
        Observed {
            persistent_volume: persistent_volume.clone(),
            driver_version: self.driver_version.clone(),
            volume: VolumeState::of(self.volume(persistent_volume)),
            workloads: workloads
                .into_iter()
                .filter_map(|uid| self.workloads.get(uid))
                .map(|it| Resident::new(it, &uses(it, &self.driver, self), persistent_volume))
                .collect(),
            gone: gone.into_iter().flat_map(HashMap::keys).cloned().collect(),
            mountpoint_pods: pods.into_iter().filter_map(|it| self.pods.get(it)).map(|it| it.pod.clone()).collect(),
            attachments,
        }
    }

    /// One of our volumes.
    pub fn volume(&self, name: &PvName) -> Option<&Volume> {
        self.volumes.get(name.as_str()).filter(|it| it.driver.as_ref() == Some(&self.driver))
    }

    pub fn workload(&self, uid: &WorkloadUid) -> Option<&Workload> {
        self.workloads.get(uid)
    }

    pub fn attachments_of(&self, unit: &Unit) -> impl Iterator<Item = &ReportedAttachment> {
        self.attachments_by_unit.get(unit).filter_map(|it| self.attachments.get(it))
    }

    /// The Pod, and what its node says of it.
    pub fn pod(&self, name: &str) -> Option<&StartedPod> {
        self.pods.get(name)
    }

    pub fn tally(&self) -> Tally {
        let mut pods: BTreeMap<&'static str, usize> =
            ["pending", "running", "ending"].into_iter().map(|it| (it, 0)).collect();
        for StartedPod { pod, .. } in self.pods.values() {
            *pods.entry(state_of(pod)).or_default() += 1;
        }
        let is_running = |name: &String| self.pods.get(name).is_some_and(|it| state_of(&it.pod) == "running");
        let attachments = || self.attachments.values().map(|it| &it.attachment);
        let ready = attachments().filter(|it| it.entries.keys().all(is_running)).count();
        Tally {
            ready,
            waiting: self.attachments.len() - ready,
            workloads: attachments().flat_map(|it| it.entries.values()).map(Vec::len).sum(),
            pods,
        }
    }

    /// Every unit that anything is known about.
    pub fn units(&self) -> Affected {
        let mut units: Affected = self.workloads.values().flat_map(|it| self.units_of_workload(it)).collect();
        units.extend(self.attachments_by_unit.keys().cloned());
        units.extend(self.pods_by_unit.keys().cloned());
        units
    }

    /// To be called before workloads are listed. Whoever is attached by now existed before the list, so if it is not in
    /// there, it is gone.
    pub fn expect_attached_workloads(&mut self) {
        self.expected = self.attachments_by_workload.keys().cloned().collect();
    }

    pub fn tell_workloads(&mut self, news: News<Workload>, now: Instant) -> Affected {
        let mut affected = Affected::new();
        match news {
            News::All(workloads) => {
                let kept: BTreeSet<WorkloadUid> = workloads.iter().map(|it| it.uid.clone()).collect();
                let lost: Vec<WorkloadUid> = self.workloads.keys().filter(|it| !kept.contains(it)).cloned().collect();
                for uid in lost {
                    affected.extend(self.remove_workload(&uid, now));
                }
                let expected = std::mem::take(&mut self.expected);
                for uid in expected.difference(&kept) {
                    affected.extend(self.note_gone(uid, self.units_of_attached(uid), now));
                }
                for workload in workloads {
                    affected.extend(self.set_workload(workload));
                }
            }
            News::Changed(workload) => affected.extend(self.set_workload(workload)),
            News::Gone(workload) => affected.extend(self.remove_workload(&workload.uid, now)),
        }
        affected
    }

    pub fn tell_claims(&mut self, news: News<Claim>) -> Affected {
        let mut affected = Affected::new();
        match news {
            News::All(claims) => {
                let kept: BTreeSet<ClaimName> = claims.iter().map(claim_name).collect();
                let lost: Vec<ClaimName> = self.claims.keys().filter(|it| !kept.contains(it)).cloned().collect();
                for name in lost {
                    affected.extend(self.set_claim(&name, None));
                }
                for claim in claims {
                    affected.extend(self.set_claim(&claim_name(&claim), Some(claim)));
                }
            }
            News::Changed(claim) => affected.extend(self.set_claim(&claim_name(&claim), Some(claim))),
            News::Gone(claim) => affected.extend(self.set_claim(&claim_name(&claim), None)),
        }
        affected
    }

    pub fn tell_volumes(&mut self, news: News<Volume>) -> Affected {
        let mut affected = Affected::new();
        match news {
            News::All(volumes) => {
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
            News::Changed(volume) => {
                let name = volume.name.clone();
                affected.extend(self.set_volume(name.as_str(), Some(volume)));
            }
            News::Gone(volume) => affected.extend(self.set_volume(volume.name.as_str(), None)),
        }
        affected
    }

    pub fn tell_attachments(&mut self, news: News<ReportedAttachment>) -> Affected {
        let mut affected = Affected::new();
        match news {
            News::All(attachments) => {
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
            News::Changed(it) => {
                let known = self.attachments.get(&it.attachment.name).map(|it| &it.attachment.resource_version);
                if !known.is_some_and(|known| is_older(&it.attachment.resource_version, known)) {
                    affected.extend(self.set_attachment(&it.attachment.name.clone(), Some(it)));
                }
            }
            News::Gone(it) => affected.extend(self.set_attachment(&it.attachment.name, None)),
        }
        affected
    }

    pub fn tell_pods(&mut self, news: News<StartedPod>) -> Affected {
        let mut affected = Affected::new();
        match news {
            News::All(pods) => {
                let kept: BTreeSet<&str> = pods.iter().map(|it| it.pod.name.as_str()).collect();
                let lost: Vec<String> = self.pods.keys().filter(|it| !kept.contains(it.as_str())).cloned().collect();
                for name in lost {
                    affected.extend(self.set_pod(&name, None));
                }
                for it in pods {
                    affected.extend(self.set_pod(&it.pod.name.clone(), Some(it)));
                }
            }
            News::Changed(it) => {
                let known = self.pods.get(&it.pod.name).map(|it| &it.pod.resource_version);
                if !known.is_some_and(|known| is_older(&it.pod.resource_version, known)) {
                    affected.extend(self.set_pod(&it.pod.name.clone(), Some(it)));
                }
            }
            News::Gone(it) => {
                // The next Pod under this name may have been told already.
                if self.pods.get(&it.pod.name).is_some_and(|known| known.pod.uid == it.pod.uid) {
                    affected.extend(self.set_pod(&it.pod.name, None));
                }
            }
        }
        affected
    }

    fn set_workload(&mut self, workload: Workload) -> Affected {
        let known = self.workloads.get(&workload.uid);
        if known == Some(&workload) {
            return Affected::new();
        }
        let mut affected = known.map(|it| self.units_of_workload(it)).unwrap_or_default();
        // The claims of a Pod never change.
        for reference in &workload.claims {
            let name = (workload.namespace.clone(), reference.claim_name(&workload));
            self.workloads_by_claim.insert(name, workload.uid.clone());
        }
        affected.extend(self.units_of_workload(&workload));
        self.workloads.insert(workload.uid.clone(), workload);
        affected
    }

    fn remove_workload(&mut self, uid: &WorkloadUid, now: Instant) -> Affected {
        let Some(workload) = self.workloads.remove(uid) else {
            return Affected::new();
        };
        let affected = self.units_of_workload(&workload);
        for reference in &workload.claims {
            let name = (workload.namespace.clone(), reference.claim_name(&workload));
            self.workloads_by_claim.remove(&name, uid);
        }
        self.note_gone(uid, affected, now)
    }

    fn note_gone(&mut self, uid: &WorkloadUid, units: Affected, now: Instant) -> Affected {
        for unit in &units {
            self.gone.entry(unit.clone()).or_default().insert(uid.clone(), now);
        }
        units
    }

    /// Forgets workloads that have been gone for long.
    pub fn forget_gone(&mut self, now: Instant) {
        for gone in self.gone.values_mut() {
            gone.retain(|_, at| now.saturating_duration_since(*at) < GONE_REMEMBERED);
        }
        self.gone.retain(|_, it| !it.is_empty());
    }

    fn set_claim(&mut self, name: &ClaimName, claim: Option<Claim>) -> Affected {
        if self.claims.get(name) == claim.as_ref() {
            return Affected::new();
        }
        let mut affected = self.units_of_claim(name);
        if let Some(volume) = self.claims.remove(name).and_then(|it| it.volume) {
            self.claims_by_volume.remove(&volume, name);
        }
        if let Some(claim) = claim {
            if let Some(volume) = &claim.volume {
                self.claims_by_volume.insert(volume.clone(), name.clone());
            }
            self.claims.insert(name.clone(), claim);
        }
        affected.extend(self.units_of_claim(name));
        affected
    }

    fn set_volume(&mut self, name: &str, volume: Option<Volume>) -> Affected {
        if self.volumes.get(name) == volume.as_ref() {
            return Affected::new();
        }
        let mut affected = self.units_of_volume(name);
        match volume {
            Some(volume) => self.volumes.insert(name.to_owned(), volume),
            None => self.volumes.remove(name),
        };
        affected.extend(self.units_of_volume(name));
        affected
    }

    fn set_attachment(&mut self, name: &str, attachment: Option<ReportedAttachment>) -> Affected {
        let known = self.attachments.get(name);
        if known == attachment.as_ref() {
            return Affected::new();
        }
        let mut affected = Affected::new();
        if let Some(ReportedAttachment { attachment: old, .. }) = self.attachments.remove(name) {
            let unit = unit_of_attachment(&old.fields.node, &old.fields.persistent_volume);
            self.attachments_by_unit.remove(&unit, name);
            for (pod, entries) in &old.entries {
                self.attachments_by_pod.remove(pod, name);
                for entry in entries {
                    self.attachments_by_workload.remove(&entry.workload, name);
                }
            }
            affected.insert(unit);
        }
        if let Some(new) = attachment {
            let fields = &new.attachment.fields;
            let unit = unit_of_attachment(&fields.node, &fields.persistent_volume);
            self.attachments_by_unit.insert(unit.clone(), name.to_owned());
            for (pod, entries) in &new.attachment.entries {
                self.attachments_by_pod.insert(pod.clone(), name.to_owned());
                for entry in entries {
                    self.attachments_by_workload.insert(entry.workload.clone(), name.to_owned());
                }
            }
            affected.insert(unit);
            self.attachments.insert(name.to_owned(), new);
        }
        affected
    }

    fn set_pod(&mut self, name: &str, pod: Option<StartedPod>) -> Affected {
        if self.pods.get(name) == pod.as_ref() {
            return Affected::new();
        }
        let mut affected = Affected::new();
        if let Some(unit) = self.pods.remove(name).and_then(unit_of_pod) {
            self.pods_by_unit.remove(&unit, name);
            affected.insert(unit);
        }
        if let Some(pod) = pod {
            if let Some(unit) = unit_of_pod(pod.clone()) {
                self.pods_by_unit.insert(unit.clone(), name.to_owned());
                affected.insert(unit);
            }
            self.pods.insert(name.to_owned(), pod);
        }
        let named_by = self.attachments_by_pod.get(name).filter_map(|it| self.attachments.get(it));
        affected.extend(
            named_by.map(|it| unit_of_attachment(&it.attachment.fields.node, &it.attachment.fields.persistent_volume)),
        );
        affected
    }

    fn units_of_workload(&self, workload: &Workload) -> Affected {
        let Some(node) = &workload.node else {
            return Affected::new();
        };
        let claims = workload.claims.iter().map(|it| (workload.namespace.clone(), it.claim_name(workload)));
        let volumes = claims.filter_map(|it| self.claims.get(&it)?.volume.as_ref()?.parse().ok());
        let ours = volumes.filter(|it| self.volume(it).is_some());
        let mut units: Affected =
            ours.map(|persistent_volume| Unit { node: node.clone(), persistent_volume }).collect();
        units.extend(self.units_of_attached(&workload.uid));
        units
    }

    fn units_of_attached(&self, workload: &WorkloadUid) -> Affected {
        let attachments = self.attachments_by_workload.get(workload).filter_map(|it| self.attachments.get(it));
        attachments
            .map(|it| unit_of_attachment(&it.attachment.fields.node, &it.attachment.fields.persistent_volume))
            .collect()
    }

    fn units_of_claim(&self, name: &ClaimName) -> Affected {
        let workloads = self.workloads_by_claim.get(name).filter_map(|it| self.workloads.get(it));
        workloads.flat_map(|it| self.units_of_workload(it)).collect()
    }

    fn units_of_volume(&self, name: &str) -> Affected {
        let mut units: Affected = self.claims_by_volume.get(name).flat_map(|it| self.units_of_claim(it)).collect();
        let is_of_volume = |it: &&Unit| it.persistent_volume.as_str() == name;
        units.extend(self.attachments_by_unit.keys().filter(is_of_volume).cloned());
        units
    }
}

impl Catalog for Cache {
    fn claim(&self, namespace: &str, name: &str) -> Option<Claim> {
        self.claims.get(&(namespace.to_owned(), name.to_owned())).cloned()
    }

    fn volume(&self, name: &str) -> Option<Volume> {
        self.volumes.get(name).cloned()
    }
}

fn state_of(pod: &MountpointPod) -> &'static str {
    match pod.phase {
        _ if pod.is_terminating || pod.is_retired => "ending",
        Phase::Pending => "pending",
        Phase::Running => "running",
        Phase::Succeeded => "succeeded",
        Phase::Failed => "failed",
        Phase::Unknown => "unknown",
    }
}

fn claim_name(claim: &Claim) -> ClaimName {
    (claim.namespace.clone(), claim.name.clone())
}

fn unit_of_attachment(node: &str, persistent_volume: &PvName) -> Unit {
    Unit { node: node.to_owned(), persistent_volume: persistent_volume.clone() }
}

fn unit_of_pod(pod: StartedPod) -> Option<Unit> {
    Some(Unit { node: pod.node?, persistent_volume: pod.persistent_volume? })
}

/// Whether a version of an object is older than another. Our own writes are known before the watch tells of them; what it
/// tells meanwhile must not take them back. Versions are numbers in every API server there is; if not, news are news.
fn is_older(version: &str, known: &str) -> bool {
    match (version.parse::<u64>(), known.parse::<u64>()) {
        (Ok(version), Ok(known)) => version < known,
        (Err(_), _) | (_, Err(_)) => false,
    }
}
