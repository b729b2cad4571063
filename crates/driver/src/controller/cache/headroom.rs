//! Headroom Pods, and the workloads that they hold room for.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use s3csi_core::attachment::{HeadroomGate, PodPhase, Workload, assignment, unscheduled_volumes};
use s3csi_core::headroom::{HeadroomPod, HeadroomWorkload, ObservedHeadroom, Reservation};
use s3csi_core::{PvName, WorkloadUid, mountpoint_pod_name};

use super::index::Index;
use super::{Cache, ReconcileKey, ReconcileKeys};
use crate::api::watch::WatchUpdate;
use crate::controller::facts::OwnPod;
use crate::controller::queue::{Priority, Queue};

#[derive(Debug, Default)]
pub(super) struct Headroom {
    reservation: Reservation,
    pods: HashMap<String, HeadroomPod>,
    by_workload: Index<WorkloadUid, String>,
    changed: Arc<Queue<WorkloadUid>>,
}

impl Cache {
    /// The queue gets the workloads whose headroom Pods may have to change.
    pub fn with_headroom(mut self, reservation: Reservation, changed: Arc<Queue<WorkloadUid>>) -> Self {
        self.headroom = Headroom { reservation, changed, ..Headroom::default() };
        self
    }

    pub fn update_own_pods(&mut self, update: WatchUpdate<OwnPod>) -> ReconcileKeys {
        match update {
            WatchUpdate::Listed(pods) => {
                let (mut mountpoint_pods, mut headroom_pods) = (Vec::new(), Vec::new());
                for pod in pods {
                    match pod {
                        OwnPod::Mountpoint(pod) => mountpoint_pods.push(pod),
                        OwnPod::Headroom(pod) => headroom_pods.push(pod),
                    }
                }
                self.update_headroom_pods(WatchUpdate::Listed(headroom_pods));
                self.update_pods(WatchUpdate::Listed(mountpoint_pods))
            }
            WatchUpdate::Changed(OwnPod::Mountpoint(pod)) => self.update_pods(WatchUpdate::Changed(pod)),
            WatchUpdate::Deleted(OwnPod::Mountpoint(pod)) => self.update_pods(WatchUpdate::Deleted(pod)),
            WatchUpdate::Changed(OwnPod::Headroom(pod)) => {
                self.update_headroom_pods(WatchUpdate::Changed(pod));
                ReconcileKeys::new()
            }
            WatchUpdate::Deleted(OwnPod::Headroom(pod)) => {
                self.update_headroom_pods(WatchUpdate::Deleted(pod));
                ReconcileKeys::new()
            }
        }
    }

    pub fn update_headroom_pods(&mut self, update: WatchUpdate<HeadroomPod>) {
        match update {
            WatchUpdate::Listed(pods) => {
                let kept: BTreeSet<&str> = pods.iter().map(|it| it.name.as_str()).collect();
                let lost: Vec<String> =
                    self.headroom.pods.keys().filter(|it| !kept.contains(it.as_str())).cloned().collect();
                for name in lost {
                    self.set_headroom_pod(&name, None);
                }
                for pod in pods {
                    self.set_headroom_pod(&pod.name.clone(), Some(pod));
                }
            }
            WatchUpdate::Changed(pod) => self.set_headroom_pod(&pod.name.clone(), Some(pod)),
            WatchUpdate::Deleted(pod) => self.forget_headroom_pod(&pod.name, &pod.uid),
        }
    }

    /// The Pod does not exist. The next Pod of this name may be known already.
    pub fn forget_headroom_pod(&mut self, name: &str, uid: &str) {
        if self.headroom.pods.get(name).is_some_and(|known| known.uid == uid) {
            self.set_headroom_pod(name, None);
        }
    }

    pub fn observe_headroom(&self, uid: &WorkloadUid) -> ObservedHeadroom {
        ObservedHeadroom {
            reservation: self.headroom.reservation,
            workload: self.workloads.get(uid).map(|it| self.headroom_workload(it)),
            pods: self.headroom_pods(uid).cloned().collect(),
        }
    }

    /// Whether the Mountpoint Pods of this workload may preempt. Its headroom Pods do not count: when one was preempted or evicted, the
    /// Mountpoint Pod has to make room on a full node.
    pub fn has_headroom(&self, workload: &WorkloadUid) -> bool {
        let is_waiting = |it: &Workload| it.headroom_gate == HeadroomGate::Removed && it.phase == PodPhase::Pending;
        self.headroom.reservation == Reservation::On && self.workloads.get(workload).is_some_and(is_waiting)
    }

    /// Every workload that has headroom Pods or may get some.
    pub fn headroom_workloads(&self) -> BTreeSet<WorkloadUid> {
        let gated = self.workloads.values().filter(|it| it.headroom_gate == HeadroomGate::Present).map(|it| &it.uid);
        gated.chain(self.headroom.by_workload.keys()).cloned().collect()
    }

    /// A workload, or something that it depends on, has changed.
    pub(super) fn enqueue_headroom(&self, uid: &WorkloadUid) {
        let is_gated = self.workloads.get(uid).is_some_and(|it| it.headroom_gate == HeadroomGate::Present);
        if is_gated || self.headroom_pods(uid).next().is_some() {
            self.headroom.changed.add(uid.clone(), Duration::ZERO, Priority::Normal);
        }
    }

    /// A Mountpoint Pod of this source has changed.
    pub(super) fn enqueue_headroom_of_source(&self, source: &str) {
        if self.headroom.pods.is_empty() {
            return;
        }
        let attachments = self.attachments_by_pod.get(source).filter_map(|it| self.attachments.get(it));
        let entries = attachments.filter_map(|it| it.attachment.entries.get(source)).flatten();
        entries.for_each(|it| self.enqueue_headroom(&it.workload));
    }

    /// Without volumes and without our gate there is nothing to do for a Pod. It is not reported again once it has a node.
    pub(super) fn is_ungated_without_volumes(workload: &Workload) -> bool {
        workload.claims.is_empty() && workload.node.is_none() && workload.headroom_gate != HeadroomGate::Present
    }

    fn headroom_pods(&self, uid: &WorkloadUid) -> impl Iterator<Item = &HeadroomPod> {
        self.headroom.by_workload.get(uid).filter_map(|it| self.headroom.pods.get(it))
    }

    fn headroom_workload(&self, workload: &Workload) -> HeadroomWorkload {
        let required = unscheduled_volumes(workload, &self.driver, self);
        let served = self.headroom_pods(&workload.uid).map(|it| &it.persistent_volume);
        HeadroomWorkload {
            uid: workload.uid.clone(),
            gate: workload.headroom_gate,
            phase: workload.phase,
            is_terminating: workload.is_terminating,
            volumes: required.ours.into_iter().filter(|(_, it)| it.is_ok()).map(|(volume, _)| volume).collect(),
            unresolved: required.unresolved,
            served: served.filter(|it| self.is_served(workload, it)).cloned().collect(),
        }
    }

    /// Whether the volume needs no room any more: the workload's Mountpoint Pod runs, or it was started for another workload, whose room
    /// the headroom Pod would take.
    fn is_served(&self, workload: &Workload, volume: &PvName) -> bool {
        let Some(node) = &workload.node else { return false };
        let key = ReconcileKey { node: node.clone(), persistent_volume: volume.clone() };
        let attachments = self.attachments_of(&key).map(|it| &it.attachment);
        let Some(assigned) = assignment(attachments, &workload.uid) else { return false };
        let source = assigned.mountpoint_pod;
        let of_key = self.pods_by_key.get(&key).map(String::as_str).chain(std::iter::once(source));
        let mut pods = of_key.filter_map(|it| self.pods.get(it)).map(|it| &it.pod).filter(|it| it.source == source);
        source != mountpoint_pod_name(&workload.uid, volume) || pods.any(|it| it.phase == PodPhase::Running)
    }

    fn set_headroom_pod(&mut self, name: &str, pod: Option<HeadroomPod>) {
        if self.headroom.pods.get(name) == pod.as_ref() {
            return;
        }
        if let Some(old) = self.headroom.pods.remove(name) {
            // The gate stays until the name is free for the next one.
            self.enqueue_headroom(&old.workload);
            self.headroom.by_workload.remove(&old.workload, name);
        }
        if let Some(pod) = pod {
            let workload = pod.workload.clone();
            self.headroom.by_workload.insert(workload.clone(), name.to_owned());
            self.headroom.pods.insert(name.to_owned(), pod);
            self.enqueue_headroom(&workload);
        }
    }
}
