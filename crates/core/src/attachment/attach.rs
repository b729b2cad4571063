//! Who is attached to which Mountpoint Pod: the rules about entries of attachments.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::identifiers::WorkloadUid;

use super::decide::{Resident, STALE_AFTER};
use super::decision::{Change, DetachReason, Notice, Seat, WaitReason};
use super::facts::{Activity, Timestamp};
use super::identity::{attachment_name, is_for, rank};
use super::needs::Need;
use super::plan::{Draft, Plan};

/// An entry: in which draft, for which Mountpoint Pod.
struct Place {
    draft: usize,
    mountpoint_pod: String,
}

impl Plan<'_> {
    /// Workloads that are over lose their entry at once; those nobody has seen only after a while, because a cache may be
    /// late. A workload that is terminating but still runs keeps its entry until it is gone.
    pub fn release_ended_workloads(&mut self) {
        let mut drafts = std::mem::take(&mut self.drafts);
        for draft in &mut drafts {
            for (mountpoint_pod, entries) in &mut draft.entries {
                entries.retain(|entry| {
                    let Some(reason) = self.ended(&entry.workload, entry.attached_at) else {
                        return true;
                    };
                    let (workload, mountpoint_pod) = (entry.workload.clone(), mountpoint_pod.clone());
                    draft.changes.push(Change::Detach { workload, mountpoint_pod, reason });
                    false
                });
            }
        }
        self.drafts = drafts;
    }

    /// A workload that is attached twice, by two controllers that did not see each other, stays where it was first.
    pub fn release_duplicates(&mut self) {
        let mut first: BTreeMap<WorkloadUid, (Timestamp, String, String)> = BTreeMap::new();
        for draft in &self.drafts {
            for (mountpoint_pod, entries) in &draft.entries {
                for entry in entries {
                    let here = rank(entry.attached_at, &draft.name, mountpoint_pod);
                    let is_earlier = first
                        .get(&entry.workload)
                        .is_none_or(|(at, attachment, pod)| here < rank(*at, attachment, pod));
                    if is_earlier {
                        let place = (entry.attached_at, draft.name.clone(), mountpoint_pod.clone());
                        first.insert(entry.workload.clone(), place);
                    }
                }
            }
        }
        for draft in &mut self.drafts {
            for (mountpoint_pod, entries) in &mut draft.entries {
                entries.retain(|entry| {
                    let here = rank(entry.attached_at, &draft.name, mountpoint_pod);
                    // Taking it out makes a second, equal entry in the same list a duplicate, too.
                    if first.get(&entry.workload).is_some_and(|(at, name, pod)| here == rank(*at, name, pod)) {
                        first.remove(&entry.workload);
                        return true;
                    }
                    draft.changes.push(Change::Detach {
                        workload: entry.workload.clone(),
                        mountpoint_pod: mountpoint_pod.clone(),
                        reason: DetachReason::Duplicate,
                    });
                    false
                });
            }
        }
    }

    /// Whoever waits for a mount is attached, once.
    ///
    /// A workload that runs without an entry uses a mount of strategy `systemd` and is left alone until it is made anew;
    /// unless its own Mountpoint Pod exists, for then only the attachment was lost.
    pub fn place_workloads(&mut self) {
        let residents: Vec<&Resident> = self.residents.values().copied().collect();
        for resident in residents {
            let is_attached =
                self.drafts.iter().flat_map(|it| it.entries.values()).flatten().any(|it| it.workload == resident.uid);
            if is_attached {
                continue;
            }
            match (resident.activity, &resident.wish) {
                (Activity::Starting, Some(Ok(need))) => self.place(&resident.uid, need),
                (Activity::Starting, Some(Err(refused))) => {
                    self.wait(&resident.uid, WaitReason::Refused(refused.clone()));
                }
                (Activity::Using, Some(Ok(need))) if self.has_own_pod(&resident.uid) => {
                    self.place(&resident.uid, need);
                }
                (Activity::Starting | Activity::Using | Activity::Over, _) => {}
            }
        }
    }

    pub fn remove_empty_entries(&mut self) {
        for draft in &mut self.drafts {
            for (mountpoint_pod, _) in draft.entries.extract_if(.., |_, entries| entries.is_empty()) {
                self.released.insert(mountpoint_pod.clone());
                draft.changes.push(Change::RemoveEntry { mountpoint_pod });
            }
        }
    }

    pub fn wait(&mut self, workload: &WorkloadUid, reason: WaitReason) {
        self.decision.notices.push(Notice::Waits { workload: workload.clone(), reason });
    }

    /// Why an entry ends, if it does.
    fn ended(&mut self, workload: &WorkloadUid, attached_at: Timestamp) -> Option<DetachReason> {
        match self.residents.get(workload).map(|it| it.activity) {
            Some(Activity::Starting | Activity::Using) => None,
            Some(Activity::Over) => Some(DetachReason::Over),
            None if self.observed.gone.contains(workload) => Some(DetachReason::Gone),
            None => match STALE_AFTER.checked_sub(attached_at.age(self.now)) {
                Some(left) if !left.is_zero() => {
                    self.decision.look_again_in(left);
                    None
                }
                Some(_) | None => Some(DetachReason::Stale),
            },
        }
    }

    fn has_own_pod(&self, workload: &WorkloadUid) -> bool {
        self.pods.get(self.own_pod_name(workload).as_str()).is_some_and(|it| it.is_adoptable())
    }

    /// Attaches a workload: to the Pod that was started for it, if there is one; else to one that serves others with the
    /// same key; else to one of its own, which is yet to be started.
    fn place(&mut self, workload: &WorkloadUid, need: &Need) {
        let shared = if self.has_own_pod(workload) { None } else { self.find_shared(need) };
        let seat = if shared.is_some() { Seat::Shared } else { Seat::Own };
        let Some(Place { draft, mountpoint_pod }) = shared.or_else(|| self.make_place(workload, need)) else {
            return;
        };
        let draft = &mut self.drafts[draft];
        draft.attach(workload, &mountpoint_pod, seat, self.now);
        let (workload, attachment) = (workload.clone(), draft.name.clone());
        self.decision.notices.push(Notice::Assigned { workload, attachment, mountpoint_pod });
    }

    /// The entry that a workload with this need joins: of several suitable ones one whose Pod is there already, and of those
    /// the busiest, so that the others drain.
    fn find_shared(&self, need: &Need) -> Option<Place> {
        let mut candidates = Vec::new();
        for (draft_index, draft) in self.drafts.iter().enumerate() {
            if draft.is_terminating() || !is_for(&draft.name, &draft.fields, need) {
                continue;
            }
            for (mountpoint_pod, entries) in &draft.entries {
                let pod = self.pods.get(mountpoint_pod.as_str());
                let is_suitable = match pod {
                    Some(pod) => pod.is_suitable(&self.observed.driver_version),
                    // It is about to be started, by us or by whoever wrote this entry.
                    None => !entries.is_empty(),
                };
                if is_suitable {
                    candidates.push((pod.is_none(), Reverse(entries.len()), &draft.name, mountpoint_pod, draft_index));
                }
            }
        }
        let (_, _, _, mountpoint_pod, draft) = candidates.into_iter().min()?;
        Some(Place { draft, mountpoint_pod: mountpoint_pod.clone() })
    }

    fn make_place(&mut self, workload: &WorkloadUid, need: &Need) -> Option<Place> {
        let draft = self.choose_draft(workload, need)?;
        Some(Place { draft, mountpoint_pod: self.own_pod_name(workload) })
    }

    /// The attachment that gets an entry for a new Mountpoint Pod: the one named after the key; or one that a driver before
    /// us made, as long as it is in use; or one that does not exist yet.
    fn choose_draft(&mut self, workload: &WorkloadUid, need: &Need) -> Option<usize> {
        let name = attachment_name(&need.key);
        if let Some(index) = self.drafts.iter().position(|it| it.name == name) {
            if self.drafts[index].is_terminating() {
                self.wait(workload, WaitReason::AttachmentEnding { attachment: name });
                return None;
            }
            return Some(index);
        }
        let is_in_use = |it: &Draft<'_>| !it.is_terminating() && it.entries.values().any(|entries| !entries.is_empty());
        let legacy = self.drafts.iter().position(|it| is_in_use(it) && is_for(&it.name, &it.fields, need));
        if legacy.is_some() {
            return legacy;
        }
        self.drafts.push(Draft {
            observed: None,
            name,
            fields: need.fields.clone(),
            entries: BTreeMap::new(),
            changes: Vec::new(),
        });
        Some(self.drafts.len() - 1)
    }
}
