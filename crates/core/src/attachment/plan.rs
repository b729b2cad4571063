//! The facts while they are being changed: what the attachments will say, and the steps that are due so far.
//! The rules that change them are in `attach` and `pods`.

use std::collections::{BTreeMap, BTreeSet};

use crate::identifiers::WorkloadUid;
use crate::names::mountpoint_pod_name;

use super::decide::{Observed, Resident};
use super::decision::{Change, Decision, Deletion, Precondition, Seat, SpecWrite};
use super::facts::{Activity, Attachment, Entries, Entry, Fields, MountpointPod, Timestamp};

pub(super) struct Plan<'a> {
    pub observed: &'a Observed,
    pub now: Timestamp,
    pub residents: BTreeMap<&'a WorkloadUid, &'a Resident>,
    pub pods: BTreeMap<&'a str, &'a MountpointPod>,
    pub drafts: Vec<Draft<'a>>,
    /// Mountpoint Pods whose entry this decision removes.
    pub released: BTreeSet<String>,
    pub decision: Decision,
}

/// What one attachment will say.
pub(super) struct Draft<'a> {
    /// `None` if it will be created.
    pub observed: Option<&'a Attachment>,
    pub name: String,
    pub fields: Fields,
    pub entries: Entries,
    pub changes: Vec<Change>,
}

impl<'a> Plan<'a> {
    pub fn new(observed: &'a Observed, now: Timestamp) -> Self {
        let draft = |it: &'a Attachment| Draft {
            observed: Some(it),
            name: it.name.clone(),
            fields: it.fields.clone(),
            entries: it.entries.clone(),
            changes: Vec::new(),
        };
        let mut drafts: Vec<Draft<'a>> = observed.attachments.iter().map(draft).collect();
        // In whatever order they were listed, the decision is the same.
        drafts.sort_by(|one, other| one.name.cmp(&other.name));
        Self {
            observed,
            now,
            residents: observed.workloads.iter().map(|it| (&it.uid, it)).collect(),
            pods: observed.mountpoint_pods.iter().map(|it| (it.name.as_str(), it)).collect(),
            drafts,
            released: BTreeSet::new(),
            decision: Decision::default(),
        }
    }

    pub fn own_pod_name(&self, workload: &WorkloadUid) -> String {
        mountpoint_pod_name(workload, &self.observed.persistent_volume)
    }

    /// `None` for workloads nobody has seen.
    pub fn activity(&self, workload: &WorkloadUid) -> Option<Activity> {
        match self.residents.get(workload) {
            Some(resident) => Some(resident.activity),
            None => self.observed.gone.contains(workload).then_some(Activity::Over),
        }
    }

    /// Whether the Mountpoint Pod is named by an attachment, as things will be.
    pub fn is_named(&self, mountpoint_pod: &str) -> bool {
        self.drafts.iter().any(|it| it.entries.contains_key(mountpoint_pod))
    }

    pub fn finish(self) -> Decision {
        let Self { drafts, mut decision, .. } = self;
        for Draft { observed, name, fields, entries, changes } in drafts {
            let is_empty = entries.is_empty();
            let is_changed = !changes.is_empty();
            match observed {
                None => {
                    decision.specs.push(SpecWrite::CreateAttachment { name: name.clone(), fields, entries, changes });
                }
                Some(Attachment { resource_version, .. }) if is_changed => {
                    let resource_version = resource_version.clone();
                    let name = name.clone();
                    decision.specs.push(SpecWrite::EditAttachment { name, resource_version, entries, changes });
                }
                Some(_) => {}
            }
            if let Some(attachment) = observed
                && is_empty
                && !attachment.is_terminating
            {
                let precondition = if is_changed {
                    Precondition::AsWritten
                } else {
                    Precondition::ResourceVersion(attachment.resource_version.clone())
                };
                decision.deletions.push(Deletion::Attachment { name, precondition });
            }
        }
        decision
    }
}

impl Draft<'_> {
    pub fn is_terminating(&self) -> bool {
        self.observed.is_some_and(|it| it.is_terminating)
    }

    pub fn attach(&mut self, workload: &WorkloadUid, mountpoint_pod: &str, seat: Seat, now: Timestamp) {
        let entry = Entry { workload: workload.clone(), attached_at: now };
        self.entries.entry(mountpoint_pod.to_owned()).or_default().push(entry);
        let mountpoint_pod = mountpoint_pod.to_owned();
        self.changes.push(Change::Attach { workload: workload.clone(), mountpoint_pod, seat });
    }
}
