//! The rules for Mountpoint Pods: they follow the attachments. Entries are not changed here.

use std::collections::BTreeMap;

use crate::identifiers::WorkloadUid;

use super::decide::{REPLACEMENT_PAUSE, STALE_AFTER, UPGRADE_PAUSE, VolumeState};
use super::decision::{CreatorState, Deletion, Notice, PodAction, PodLoss, WaitReason};
use super::facts::{Activity, MountpointPod, PodPhase};
use super::identity::successor_name;
use super::plan::Plan;

/// A Mountpoint Pod that known, living workloads are attached to.
struct PodInUse {
    attachment: String,
    /// In the order of their attachment.
    workloads: Vec<WorkloadUid>,
}

/// Every source that a living workload is attached to has a Mountpoint Pod, or will as soon as the name is free.
///
/// The name stays: the node finds the source by it, and the next Pod takes over where the last one ended.
pub(super) fn ensure_pods_in_use(plan: &mut Plan<'_>) {
    for (source, PodInUse { attachment, workloads }) in pods_in_use(plan) {
        let Some(pod) = plan.newest_pod(&source) else {
            start(plan, source, attachment, &workloads);
            continue;
        };
        match pod.phase {
            PodPhase::Failed | PodPhase::Succeeded => replace(plan, pod, &workloads),
            PodPhase::Running if is_to_be_replaced(plan, pod) => start_successor(plan, pod, attachment, &workloads),
            // Others serve until it does, or go on if it never will.
            PodPhase::Pending | PodPhase::Running | PodPhase::Unknown if 1 < plan.pods[source.as_str()].len() => {
                let is_served = plan.pods[source.as_str()].iter().any(|it| it.is_mounted);
                if pod.is_retired && !pod.is_mounted && is_served {
                    delete(plan, pod);
                }
            }
            PodPhase::Pending | PodPhase::Running | PodPhase::Unknown if pod.is_terminating || pod.is_retired => {
                let mountpoint_pod = pod.name.clone();
                notify_starting(plan, &workloads, &WaitReason::PodEnding { mountpoint_pod });
            }
            PodPhase::Pending | PodPhase::Unknown => {
                let (mountpoint_pod, problem) = (pod.name.clone(), pod.problem.clone());
                notify_starting(plan, &workloads, &WaitReason::NotRunning { mountpoint_pod, problem });
            }
            PodPhase::Running => {}
        }
    }
}

/// A Mountpoint Pod that another one has taken over from is deleted, and one that has ended beside a newer one.
pub(super) fn end_replaced_pods(plan: &mut Plan<'_>) {
    let in_use = pods_in_use(plan);
    let mut replaced: Vec<&MountpointPod> = Vec::new();
    for (_, pods) in plan.pods.iter().filter(|(source, _)| in_use.contains_key(**source)) {
        // The condition of a Pod that has ended is what its node said before.
        let is_served = pods.first().is_some_and(|it| it.is_mounted && !it.phase.is_finished());
        let is_replaced = |it: &&&MountpointPod| !it.is_mounted && (is_served || it.phase.is_finished());
        replaced.extend(pods.iter().skip(1).filter(is_replaced));
    }
    for pod in replaced {
        delete(plan, pod);
    }
}

/// A Mountpoint Pod whose source no living workload is attached to is retired, and deleted when it has ended.
pub(super) fn end_unused_pods(plan: &mut Plan<'_>) {
    let in_use = pods_in_use(plan);
    let pods: Vec<&MountpointPod> = plan.pods.values().flatten().copied().collect();
    for pod in pods {
        if in_use.contains_key(&pod.source) {
            continue;
        }
        // A retired Pod that never ran has no mounter that could end it. If it starts meanwhile, the precondition fails.
        let never_ran = pod.is_retired && pod.phase == PodPhase::Pending;
        let is_named = plan.is_named(&pod.source);
        if pod.phase.is_finished() || (never_ran && !is_named) {
            delete(plan, pod);
        } else if !is_named && !pod.is_retired {
            retire(plan, pod);
        }
    }
}

/// Whether another Pod is to take over from the only one of a source: it is about to end, or of another version of the driver.
fn is_to_be_replaced(plan: &mut Plan<'_>, pod: &MountpointPod) -> bool {
    let is_serving = pod.is_mounted && pod.is_movable && !pod.is_retired;
    let is_usable = plan.observed.volume == VolumeState::Usable;
    if !is_serving || !is_usable || 1 < plan.pods[pod.source.as_str()].len() {
        return false;
    }
    if pod.is_terminating {
        return true;
    }
    let is_outdated = pod.driver_version.as_deref() != Some(plan.observed.driver_version.as_str());
    // Somebody drains it.
    if !is_outdated || pod.refuses_new_workloads {
        return false;
    }
    if !plan.observed.may_upgrade {
        plan.decision.requeue_after(UPGRADE_PAUSE);
    }
    plan.observed.may_upgrade
}

fn start_successor(plan: &mut Plan<'_>, pod: &MountpointPod, attachment: String, workloads: &[WorkloadUid]) {
    let (name, source) = (successor_name(&pod.source, &pod.uid), pod.source.clone());
    if let Some(workload) = workloads.first().cloned() {
        plan.decision.pods.push(PodAction::Start { name, source, attachment, workload });
    }
}

fn pods_in_use(plan: &Plan<'_>) -> BTreeMap<String, PodInUse> {
    let mut in_use: BTreeMap<String, Vec<(_, &WorkloadUid, &str)>> = BTreeMap::new();
    for draft in &plan.drafts {
        for (mountpoint_pod, entries) in &draft.entries {
            for entry in entries {
                if plan.activity(&entry.workload).is_some_and(Activity::is_live) {
                    let user = (entry.attached_at, &entry.workload, draft.name.as_str());
                    in_use.entry(mountpoint_pod.clone()).or_default().push(user);
                }
            }
        }
    }
    let in_order = |mut users: Vec<(_, &WorkloadUid, &str)>| {
        users.sort();
        PodInUse {
            attachment: users.first().map_or_else(String::new, |(_, _, it)| (*it).to_owned()),
            workloads: users.into_iter().map(|(_, workload, _)| workload.clone()).collect(),
        }
    };
    in_use.into_iter().map(|(name, users)| (name, in_order(users))).collect()
}

fn start(plan: &mut Plan<'_>, name: String, attachment: String, workloads: &[WorkloadUid]) {
    let obstacle = match &plan.observed.volume {
        VolumeState::Usable => None,
        VolumeState::Missing => Some(WaitReason::VolumeMissing),
        VolumeState::Refused { problem } => Some(WaitReason::VolumeRefused { problem: problem.clone() }),
    };
    if let Some(reason) = obstacle {
        return notify_starting(plan, workloads, &reason);
    }
    notify_using(plan, workloads, &name, PodLoss::Missing);
    let Some(workload) = workloads.first().cloned() else { return };
    match plan.warm_pods.pop() {
        Some(warm) => adopt(plan, warm, name, workload),
        None => plan.decision.pods.push(PodAction::Start { source: name.clone(), name, attachment, workload }),
    }
}

fn adopt(plan: &mut Plan<'_>, warm: &MountpointPod, source: String, workload: WorkloadUid) {
    let MountpointPod { name, uid, resource_version, .. } = warm.clone();
    for notice in &mut plan.decision.notices {
        if let Notice::Assigned { mountpoint_pod, .. } = notice
            && *mountpoint_pod == source
        {
            mountpoint_pod.clone_from(&name);
        }
    }
    plan.decision.pods.push(PodAction::Adopt { name, uid, resource_version, source, workload });
}

/// Frees the name for the next Pod.
fn replace(plan: &mut Plan<'_>, pod: &MountpointPod, workloads: &[WorkloadUid]) {
    let loss = if pod.phase == PodPhase::Failed { PodLoss::Failed } else { PodLoss::Succeeded };
    let mountpoint_pod = pod.name.clone();
    let is_only_one = plan.pods[pod.source.as_str()].len() == 1;
    if is_only_one {
        notify_starting(plan, workloads, &WaitReason::PodLost { mountpoint_pod, loss });
        notify_using(plan, workloads, &pod.name, loss);
    }
    let pause = REPLACEMENT_PAUSE.saturating_sub(pod.created_at.age(plan.now));
    if pause.is_zero() {
        delete(plan, pod);
    } else {
        plan.decision.requeue_after(pause);
    }
}

fn delete(plan: &mut Plan<'_>, pod: &MountpointPod) {
    if pod.is_terminating {
        return;
    }
    let MountpointPod { name, uid, resource_version, .. } = pod.clone();
    plan.decision.deletions.push(Deletion::MountpointPod { name, uid, resource_version });
}

/// Asks the node to end a Pod, unless the workload it is named after may still come to use it.
fn retire(plan: &mut Plan<'_>, pod: &MountpointPod) {
    let is_named_after = |it: &WorkloadUid| plan.own_pod_name(it) == pod.source;
    let known = plan.workloads.keys().copied().chain(&plan.observed.gone);
    let creator = known.into_iter().find(|it| is_named_after(it)).and_then(|it| plan.activity(it));
    let creator = match creator {
        Some(Activity::Starting | Activity::Using) => return,
        Some(Activity::Finished) => CreatorState::Ended,
        None if plan.released.contains(&pod.source) => CreatorState::Unseen,
        None => {
            // Earlier drivers start the Pod first and write the attachment later.
            let left = STALE_AFTER.saturating_sub(pod.created_at.age(plan.now));
            if !left.is_zero() {
                return plan.decision.requeue_after(left);
            }
            CreatorState::Unseen
        }
    };
    let MountpointPod { name, uid, source, .. } = pod.clone();
    plan.decision.pods.push(PodAction::Retire { name, uid, source, creator });
}

fn notify_starting(plan: &mut Plan<'_>, workloads: &[WorkloadUid], reason: &WaitReason) {
    for workload in workloads {
        if plan.activity(workload) == Some(Activity::Starting) {
            plan.wait(workload, reason.clone());
        }
    }
}

fn notify_using(plan: &mut Plan<'_>, workloads: &[WorkloadUid], mountpoint_pod: &str, loss: PodLoss) {
    for workload in workloads {
        if plan.activity(workload) == Some(Activity::Using) {
            let (workload, mountpoint_pod) = (workload.clone(), mountpoint_pod.to_owned());
            plan.decision.notices.push(Notice::Replaces { workload, mountpoint_pod, loss });
        }
    }
}
