//! Which workload is attached to which Mountpoint Pod: the rules for entries of attachments.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::identifiers::WorkloadUid;

use super::decide::{PodOnNode, STALE_AFTER};
use super::decision::{AttachmentChange, DetachReason, Notice, Placement, WaitReason};
use super::facts::{Activity, MountpointPod, Timestamp};
use super::identity::{attachment_name, is_for, rank};
use super::plan::{AttachmentDraft, Plan};
use super::requirements::{MountRequirement, NodeScope};

/// An entry: the index of its draft, and its Mountpoint Pod.
struct EntryPosition {
    draft: usize,
    mountpoint_pod: String,
}

/// Workloads that have finished lose their entry at once. Those that the cache does not know lose it after a while, because a
/// cache may lag. A workload that is terminating but still runs keeps its entry until it is gone.
pub(super) fn release_finished_workloads(plan: &mut Plan<'_>) {
    let mut drafts = std::mem::take(&mut plan.drafts);
    for draft in &mut drafts {
        for (mountpoint_pod, entries) in &mut draft.entries {
            entries.retain(|entry| {
                let Some(reason) = detach_reason(plan, &entry.workload, entry.attached_at) else {
                    return true;
                };
                let (workload, mountpoint_pod) = (entry.workload.clone(), mountpoint_pod.clone());
                draft.changes.push(AttachmentChange::Detach { workload, mountpoint_pod, reason });
                false
            });
        }
    }
    plan.drafts = drafts;
}

/// A workload that two controllers attached concurrently keeps its first entry.
pub(super) fn release_duplicates(plan: &mut Plan<'_>) {
    let mut first: BTreeMap<WorkloadUid, (Timestamp, String, String)> = BTreeMap::new();
    for draft in &plan.drafts {
        for (mountpoint_pod, entries) in &draft.entries {
            for entry in entries {
                let here = rank(entry.attached_at, &draft.name, mountpoint_pod);
                let is_earlier =
                    first.get(&entry.workload).is_none_or(|(at, attachment, pod)| here < rank(*at, attachment, pod));
                if is_earlier {
                    let position = (entry.attached_at, draft.name.clone(), mountpoint_pod.clone());
                    first.insert(entry.workload.clone(), position);
                }
            }
        }
    }
    for draft in &mut plan.drafts {
        for (mountpoint_pod, entries) in &mut draft.entries {
            entries.retain(|entry| {
                let here = rank(entry.attached_at, &draft.name, mountpoint_pod);
                // Removing it from `first` makes a second, equal entry in the same list a duplicate, too.
                if first.get(&entry.workload).is_some_and(|(at, name, pod)| here == rank(*at, name, pod)) {
                    first.remove(&entry.workload);
                    return true;
                }
                draft.changes.push(AttachmentChange::Detach {
                    workload: entry.workload.clone(),
                    mountpoint_pod: mountpoint_pod.clone(),
                    reason: DetachReason::Duplicate,
                });
                false
            });
        }
    }
}

/// Every workload that waits for a mount is attached, once.
///
/// A workload that runs without an entry uses a mount of another strategy or of version 1 and is left alone until its Pod is
/// recreated; unless its own Mountpoint Pod exists, for then only the attachment was lost; or that mount is dead or, if the
/// workload is not ready, may be ([`Workload::activity`](super::Workload::activity)).
pub(super) fn place_workloads(plan: &mut Plan<'_>) {
    let workloads: Vec<&PodOnNode> = plan.workloads.values().copied().collect();
    for workload in workloads {
        let is_attached =
            plan.drafts.iter().flat_map(|it| it.entries.values()).flatten().any(|it| it.workload == workload.uid);
        if is_attached {
            continue;
        }
        match (workload.activity, &workload.requirement) {
            (Activity::Starting, Some(Ok(requirement))) => match in_use_elsewhere(plan, requirement) {
                Some(reason) => plan.wait(&workload.uid, reason),
                None => place(plan, &workload.uid, requirement),
            },
            (Activity::Starting, Some(Err(refusal))) => {
                plan.wait(&workload.uid, WaitReason::Refused(refusal.clone()));
            }
            (Activity::Using, Some(Ok(requirement))) if has_own_pod(plan, &workload.uid) => {
                place(plan, &workload.uid, requirement);
            }
            (Activity::Starting | Activity::Using | Activity::Finished, _) => {}
        }
    }
}

/// Kubernetes does not enforce `ReadWriteOnce` for drivers without an attach operation.
fn in_use_elsewhere(plan: &Plan<'_>, requirement: &MountRequirement) -> Option<WaitReason> {
    let other = plan.observed.elsewhere.iter().min().filter(|_| requirement.scope == NodeScope::SingleNode)?;
    Some(WaitReason::InUseElsewhere { node: other.node.clone(), workload: other.workload.clone() })
}

pub(super) fn remove_empty_entries(plan: &mut Plan<'_>) {
    for draft in &mut plan.drafts {
        for (mountpoint_pod, _) in draft.entries.extract_if(.., |_, entries| entries.is_empty()) {
            plan.released.insert(mountpoint_pod.clone());
            draft.changes.push(AttachmentChange::RemoveEntry { mountpoint_pod });
        }
    }
}

/// Why a workload loses its entry, if it does.
fn detach_reason(plan: &mut Plan<'_>, workload: &WorkloadUid, attached_at: Timestamp) -> Option<DetachReason> {
    match plan.workloads.get(workload).map(|it| it.activity) {
        Some(Activity::Starting | Activity::Using) => None,
        Some(Activity::Finished) => Some(DetachReason::Finished),
        None if plan.observed.gone.contains(workload) => Some(DetachReason::Gone),
        None => match STALE_AFTER.checked_sub(attached_at.age(plan.now)) {
            Some(left) if !left.is_zero() => {
                plan.decision.requeue_after(left);
                None
            }
            Some(_) | None => Some(DetachReason::Stale),
        },
    }
}

fn has_own_pod(plan: &Plan<'_>, workload: &WorkloadUid) -> bool {
    plan.newest_pod(&plan.own_pod_name(workload)).is_some_and(MountpointPod::accepts_its_creator)
}

/// Attaches a workload: to the Pod that was started for it, if there is one; else to one that serves others with the
/// same key; else to one of its own, which is yet to be started.
fn place(plan: &mut Plan<'_>, workload: &WorkloadUid, requirement: &MountRequirement) {
    let shared = if has_own_pod(plan, workload) { None } else { find_shared(plan, requirement) };
    let placement = if shared.is_some() { Placement::Shared } else { Placement::Dedicated };
    let Some(EntryPosition { draft, mountpoint_pod }) = shared.or_else(|| new_entry(plan, workload, requirement))
    else {
        return;
    };
    let draft = &mut plan.drafts[draft];
    draft.attach(workload, &mountpoint_pod, placement, plan.now);
    let (workload, attachment) = (workload.clone(), draft.name.clone());
    // People look for the Pod, which may have another name than its source.
    let mountpoint_pod = plan.newest_pod(&mountpoint_pod).map_or(mountpoint_pod, |it| it.name.clone());
    plan.decision.notices.push(Notice::Assigned { workload, attachment, mountpoint_pod });
}

/// The entry that a workload with this requirement joins: of several suitable ones one whose Pod exists already, and of those
/// the busiest, so that the others drain.
fn find_shared(plan: &Plan<'_>, requirement: &MountRequirement) -> Option<EntryPosition> {
    let mut candidates = Vec::new();
    for (draft_index, draft) in plan.drafts.iter().enumerate() {
        if draft.is_terminating() || !is_for(&draft.name, &draft.fields, requirement) {
            continue;
        }
        for (mountpoint_pod, entries) in &draft.entries {
            let pod = plan.newest_pod(mountpoint_pod);
            let is_suitable = match pod {
                Some(pod) => pod.is_suitable(&plan.observed.driver_version),
                // It is about to be started, by us or by the controller that wrote this entry.
                None => !entries.is_empty(),
            };
            if is_suitable {
                candidates.push((pod.is_none(), Reverse(entries.len()), &draft.name, mountpoint_pod, draft_index));
            }
        }
    }
    let (_, _, _, mountpoint_pod, draft) = candidates.into_iter().min()?;
    Some(EntryPosition { draft, mountpoint_pod: mountpoint_pod.clone() })
}

fn new_entry(plan: &mut Plan<'_>, workload: &WorkloadUid, requirement: &MountRequirement) -> Option<EntryPosition> {
    let draft = choose_draft(plan, workload, requirement)?;
    Some(EntryPosition { draft, mountpoint_pod: plan.own_pod_name(workload) })
}

/// The attachment that gets an entry for a new Mountpoint Pod: the one named after the key; or one that an earlier driver
/// created, as long as it is in use; or a new one.
fn choose_draft(plan: &mut Plan<'_>, workload: &WorkloadUid, requirement: &MountRequirement) -> Option<usize> {
    let name = attachment_name(&requirement.key);
    if let Some(index) = plan.drafts.iter().position(|it| it.name == name) {
        if plan.drafts[index].is_terminating() {
            plan.wait(workload, WaitReason::AttachmentEnding { attachment: name });
            return None;
        }
        return Some(index);
    }
    let is_in_use =
        |it: &AttachmentDraft<'_>| !it.is_terminating() && it.entries.values().any(|entries| !entries.is_empty());
    let legacy = plan.drafts.iter().position(|it| is_in_use(it) && is_for(&it.name, &it.fields, requirement));
    if legacy.is_some() {
        return legacy;
    }
    plan.drafts.push(AttachmentDraft {
        observed: None,
        name,
        fields: requirement.fields.clone(),
        entries: BTreeMap::new(),
        changes: Vec::new(),
    });
    Some(plan.drafts.len() - 1)
}
