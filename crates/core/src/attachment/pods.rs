//! What happens to Mountpoint Pods: they follow the attachments. Entries are not touched here.

use std::collections::BTreeMap;

use crate::identifiers::WorkloadUid;

use super::decide::{REPLACEMENT_PAUSE, STALE_AFTER, VolumeState};
use super::decision::{Creator, Deletion, Loss, Notice, PodStep, WaitReason};
use super::facts::{Activity, MountpointPod, Phase};
use super::plan::Plan;

/// A Mountpoint Pod that seen, living workloads are attached to.
struct InUse {
    attachment: String,
    /// In the order of their attachment.
    workloads: Vec<WorkloadUid>,
}

impl Plan<'_> {
    /// Every Mountpoint Pod that a living workload is attached to exists, or will as soon as its name is free.
    ///
    /// The name stays: it is how the node finds the source, and the next Pod takes over where the last one ended.
    pub fn tend_pods_in_use(&mut self) {
        for (name, InUse { attachment, workloads }) in self.pods_in_use() {
            let Some(pod) = self.pods.get(name.as_str()).copied() else {
                self.start(name, attachment, &workloads);
                continue;
            };
            match pod.phase {
                Phase::Failed | Phase::Succeeded => self.replace(pod, &workloads),
                Phase::Pending | Phase::Running | Phase::Unknown if pod.is_terminating || pod.is_retired => {
                    self.tell_starting(&workloads, &WaitReason::PredecessorEnding { mountpoint_pod: name });
                }
                Phase::Pending | Phase::Unknown => {
                    let trouble = pod.trouble.clone();
                    self.tell_starting(&workloads, &WaitReason::NotRunning { mountpoint_pod: name, trouble });
                }
                Phase::Running => {}
            }
        }
    }

    /// A Mountpoint Pod that no living workload is attached to is ended, and deleted when it has.
    pub fn tend_other_pods(&mut self) {
        let in_use = self.pods_in_use();
        let pods: Vec<&MountpointPod> = self.pods.values().copied().collect();
        for pod in pods {
            if in_use.contains_key(&pod.name) {
                continue;
            }
            // A retired Pod that never ran has no mounter that could end it. If it starts meanwhile, the precondition fails.
            let never_ran = pod.is_retired && pod.phase == Phase::Pending;
            let is_named = self.is_named(&pod.name);
            if pod.phase.is_finished() || (never_ran && !is_named) {
                self.delete(pod);
            } else if !is_named && !pod.is_retired {
                self.retire(pod);
            }
        }
    }

    fn pods_in_use(&self) -> BTreeMap<String, InUse> {
        let mut in_use: BTreeMap<String, Vec<(_, &WorkloadUid, &str)>> = BTreeMap::new();
        for draft in &self.drafts {
            for (mountpoint_pod, entries) in &draft.entries {
                for entry in entries {
                    if self.activity(&entry.workload).is_some_and(Activity::is_live) {
                        let user = (entry.attached_at, &entry.workload, draft.name.as_str());
                        in_use.entry(mountpoint_pod.clone()).or_default().push(user);
                    }
                }
            }
        }
        let first_come = |mut users: Vec<(_, &WorkloadUid, &str)>| {
            users.sort();
            InUse {
                attachment: users.first().map_or_else(String::new, |(_, _, it)| (*it).to_owned()),
                workloads: users.into_iter().map(|(_, workload, _)| workload.clone()).collect(),
            }
        };
        in_use.into_iter().map(|(name, users)| (name, first_come(users))).collect()
    }

    fn start(&mut self, name: String, attachment: String, workloads: &[WorkloadUid]) {
        let obstacle = match &self.observed.volume {
            VolumeState::Usable => None,
            VolumeState::Missing => Some(WaitReason::VolumeMissing),
            VolumeState::Refused { problem } => Some(WaitReason::VolumeRefused { problem: problem.clone() }),
        };
        if let Some(reason) = obstacle {
            return self.tell_starting(workloads, &reason);
        }
        self.tell_using(workloads, &name, Loss::Missing);
        if let Some(workload) = workloads.first().cloned() {
            self.decision.pods.push(PodStep::Start { name, attachment, workload });
        }
    }

    /// Makes the name free for the next Pod.
    fn replace(&mut self, pod: &MountpointPod, workloads: &[WorkloadUid]) {
        let loss = if pod.phase == Phase::Failed { Loss::Failed } else { Loss::Succeeded };
        let mountpoint_pod = pod.name.clone();
        self.tell_starting(workloads, &WaitReason::PredecessorLost { mountpoint_pod, loss });
        self.tell_using(workloads, &pod.name, loss);
        let pause = REPLACEMENT_PAUSE.saturating_sub(pod.created_at.age(self.now));
        if pause.is_zero() {
            self.delete(pod);
        } else {
            self.decision.look_again_in(pause);
        }
    }

    fn delete(&mut self, pod: &MountpointPod) {
        if pod.is_terminating {
            return;
        }
        let MountpointPod { name, uid, resource_version, .. } = pod.clone();
        self.decision.deletions.push(Deletion::MountpointPod { name, uid, resource_version });
    }

    /// Asks the node to end a Pod, unless the workload it is named after may still come to use it.
    fn retire(&mut self, pod: &MountpointPod) {
        let is_named_after = |it: &WorkloadUid| self.own_pod_name(it) == pod.name;
        let known = self.residents.keys().copied().chain(&self.observed.gone);
        let creator = known.into_iter().find(|it| is_named_after(it)).and_then(|it| self.activity(it));
        let creator = match creator {
            Some(Activity::Starting | Activity::Using) => return,
            Some(Activity::Over) => Creator::Ended,
            None if self.released.contains(&pod.name) => Creator::Unseen,
            None => {
                // Drivers before us start the Pod first and write the attachment later.
                let left = STALE_AFTER.saturating_sub(pod.created_at.age(self.now));
                if !left.is_zero() {
                    return self.decision.look_again_in(left);
                }
                Creator::Unseen
            }
        };
        self.decision.pods.push(PodStep::Retire { name: pod.name.clone(), uid: pod.uid.clone(), creator });
    }

    fn tell_starting(&mut self, workloads: &[WorkloadUid], reason: &WaitReason) {
        for workload in workloads {
            if self.activity(workload) == Some(Activity::Starting) {
                self.wait(workload, reason.clone());
            }
        }
    }

    fn tell_using(&mut self, workloads: &[WorkloadUid], mountpoint_pod: &str, loss: Loss) {
        for workload in workloads {
            if self.activity(workload) == Some(Activity::Using) {
                let (workload, mountpoint_pod) = (workload.clone(), mountpoint_pod.to_owned());
                self.decision.notices.push(Notice::Replaces { workload, mountpoint_pod, loss });
            }
        }
    }
}
