//! Room on a node for the Mountpoint Pods of a workload: headroom Pods hold it until they take it.
//!
//! A workload asks for room with a scheduling gate. While it has the gate, a headroom Pod is created for each of its volumes, with a
//! priority below that of all workloads and an affinity to the node of the workload. Then the gate is removed, and scheduler and
//! autoscalers see the workload and its headroom Pods together. Mountpoint Pods preempt headroom Pods.
//!
//! Every decision is about one workload. Headroom Pods are created only while the gate is there, so that none replaces one that was
//! preempted; whatever was left behind is deleted as soon as it is seen.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::attachment::{Activity, HeadroomGate, PodPhase, UnresolvedClaim};
use crate::identifiers::{PvName, WorkloadUid};
use crate::names::{hex_sha224, is_derived};

const HEADROOM_POD_PREFIX: &str = "hr-";

/// Whether workloads may ask for room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reservation {
    On,
    #[default]
    Off,
}

/// Everything that is known about the headroom Pods of one workload.
#[derive(Clone, Debug)]
pub struct ObservedHeadroom {
    pub reservation: Reservation,
    /// `None` if it is gone or has ended.
    pub workload: Option<HeadroomWorkload>,
    pub pods: Vec<HeadroomPod>,
}

/// A workload, reduced to what concerns its headroom Pods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeadroomWorkload {
    pub uid: WorkloadUid,
    pub gate: HeadroomGate,
    pub phase: PodPhase,
    pub is_terminating: bool,
    /// Our volumes that Mountpoint Pods can be created for.
    pub volumes: BTreeSet<PvName>,
    /// Claims that do not lead to a volume yet.
    pub unresolved: BTreeMap<String, UnresolvedClaim>,
    /// Volumes that need no room any more: their Mountpoint Pod runs, or was started for another workload.
    pub served: BTreeSet<PvName>,
}

/// A Pod that does nothing and requests what a Mountpoint Pod will need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeadroomPod {
    pub name: String,
    pub uid: String,
    pub workload: WorkloadUid,
    pub persistent_volume: PvName,
    pub phase: PodPhase,
    pub is_terminating: bool,
}

/// What to do next for one workload, in this order: what follows a failed action is not done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeadroomDecision {
    pub actions: Vec<HeadroomAction>,
    pub notice: Option<HeadroomNotice>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HeadroomAction {
    /// Create a headroom Pod under this name. That it exists already is success.
    Reserve { name: String, persistent_volume: PvName },
    /// With the UID as precondition.
    Delete { name: String, uid: String },
    /// Give the workload the label that its headroom Pods look for, and let the scheduler place it; in one write.
    LabelAndRemoveGate,
    /// The workload has no volume of ours.
    RemoveGate,
}

/// What the user of a workload should know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HeadroomNotice {
    /// Which volumes are ours is known when all claims are bound.
    WaitsForClaim { claim: String, problem: UnresolvedClaim },
}

/// What to do next. Equal facts lead to equal decisions in every controller.
pub fn decide(observed: &ObservedHeadroom) -> HeadroomDecision {
    let ObservedHeadroom { reservation, workload, pods } = observed;
    let waits = |it: &&HeadroomWorkload| Activity::of(it.phase, it.is_terminating) == Activity::Starting;
    let waiting = workload.as_ref().filter(waits).filter(|_| *reservation == Reservation::On);
    let mut decision = HeadroomDecision::default();
    match waiting {
        Some(workload) if workload.gate == HeadroomGate::Present => reserve(&mut decision, workload, pods),
        Some(workload) => {
            pods.iter().filter(|it| workload.served.contains(&it.persistent_volume)).for_each(|it| decision.delete(it));
        }
        None => pods.iter().for_each(|it| decision.delete(it)),
    }
    decision
}

/// The name of the headroom Pod for this workload and PV. Derived, so that the API server lets only one exist.
pub fn headroom_pod_name(workload: &WorkloadUid, volume: &PvName) -> String {
    format!("{HEADROOM_POD_PREFIX}{}", hex_sha224([workload.as_str(), volume.as_str()]))
}

/// Whether a Pod in the namespace of Mountpoint Pods is a headroom Pod.
pub fn is_headroom_pod_name(name: &str) -> bool {
    is_derived(HEADROOM_POD_PREFIX, name)
}

fn reserve(decision: &mut HeadroomDecision, workload: &HeadroomWorkload, pods: &[HeadroomPod]) {
    if let Some((claim, problem)) = workload.unresolved.first_key_value() {
        decision.notice = Some(HeadroomNotice::WaitsForClaim { claim: claim.clone(), problem: *problem });
        return;
    }
    for pod in pods.iter().filter(|it| !workload.volumes.contains(&it.persistent_volume)) {
        decision.delete(pod);
    }
    let mut is_name_taken = false;
    for volume in &workload.volumes {
        let name = headroom_pod_name(&workload.uid, volume);
        match pods.iter().find(|it| it.name == name) {
            None => decision.actions.push(HeadroomAction::Reserve { name, persistent_volume: volume.clone() }),
            Some(pod) if pod.is_terminating || pod.phase.is_finished() => {
                decision.delete(pod);
                is_name_taken = true;
            }
            Some(_) => {}
        }
    }
    if is_name_taken {
        return;
    }
    let has_volumes = !workload.volumes.is_empty();
    let ungate = if has_volumes { HeadroomAction::LabelAndRemoveGate } else { HeadroomAction::RemoveGate };
    decision.actions.push(ungate);
}

impl HeadroomDecision {
    fn delete(&mut self, pod: &HeadroomPod) {
        if !pod.is_terminating {
            self.actions.push(HeadroomAction::Delete { name: pod.name.clone(), uid: pod.uid.clone() });
        }
    }
}

impl fmt::Display for HeadroomNotice {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WaitsForClaim { claim, problem } => write!(
                formatter,
                "room for Mountpoint Pods is reserved when every claim of the Pod is bound; claim {claim}: {problem}"
            ),
        }
    }
}

#[cfg(test)]
mod tests;
