//! The decision for one PV on one node. The rules are in `attach` (entries) and `pods` (Mountpoint Pods).

use std::collections::BTreeSet;
use std::time::Duration;

use crate::identifiers::{PvName, WorkloadUid};
use crate::mountpoint_pod::PodTemplate;
use crate::names::mountpoint_pod_name;

use super::attach;
use super::decision::Decision;
use super::facts::{Activity, Attachment, MountpointPod, Timestamp, Workload};
use super::plan::Plan;
use super::pods;
use super::requirements::{MountRequirement, RequiredVolumes, VolumeFacts, VolumeRefusal};

/// A cache that does not know a workload may lag; after this long, it does not.
pub(super) const STALE_AFTER: Duration = Duration::from_mins(2);

/// A Pod that fails as soon as it exists is not recreated faster than this.
pub(super) const REPLACEMENT_PAUSE: Duration = Duration::from_secs(10);

/// How long a replacement that is not urgent waits for others of its node.
pub(super) const UPGRADE_PAUSE: Duration = Duration::from_secs(20);

/// Everything that is known about one PV on one node.
#[derive(Clone, Debug)]
pub struct ObservedState {
    pub persistent_volume: PvName,
    /// Our own: new workloads are not served by Mountpoint Pods of another driver version.
    pub driver_version: String,
    pub volume: VolumeState,
    /// Every workload of the node that uses this volume or that one of `attachments` names.
    pub workloads: Vec<PodOnNode>,
    /// UIDs whose deletion a watch has reported. One that is missing here only delays the decision.
    pub gone: BTreeSet<WorkloadUid>,
    /// Every attachment whose fields name this node and PV.
    pub attachments: Vec<Attachment>,
    /// Live workloads that are attached to this PV on other nodes.
    pub elsewhere: Vec<AttachedElsewhere>,
    /// Every Mountpoint Pod that was started for this node and PV or that one of `attachments` names.
    pub mountpoint_pods: Vec<MountpointPod>,
    /// Whether the node may have one more source with two Mountpoint Pods, only to run the current version of the driver.
    pub may_upgrade: bool,
    /// Warm Mountpoint Pods of the node that no other decision is about to adopt.
    pub warm_pods: Vec<MountpointPod>,
    /// What Mountpoint Pods for this volume are created from. Needed only if there are warm ones.
    pub template: Option<PodTemplate>,
}

/// A workload on the node and what it requires of this volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodOnNode {
    pub uid: WorkloadUid,
    pub activity: Activity,
    /// `None` if it is no longer known, for instance because the PV is gone.
    pub requirement: Option<Result<MountRequirement, VolumeRefusal>>,
}

/// A workload on another node that this volume is attached for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct AttachedElsewhere {
    pub node: String,
    /// `namespace/name` of the Pod, or its UID if the cache does not know it.
    pub workload: String,
}

/// Whether a Mountpoint Pod can be created now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VolumeState {
    Usable,
    Refused { problem: String },
    Missing,
}

/// What to do next. Equal facts lead to equal decisions in every controller.
pub fn decide(observed: &ObservedState, now: Timestamp) -> Decision {
    let mut plan = Plan::new(observed, now);
    attach::release_finished_workloads(&mut plan);
    attach::release_duplicates(&mut plan);
    attach::place_workloads(&mut plan);
    attach::remove_empty_entries(&mut plan);
    pods::ensure_pods_in_use(&mut plan);
    pods::end_replaced_pods(&mut plan);
    pods::end_unused_pods(&mut plan);
    plan.finish()
}

/// Whether the Mountpoint Pods of a source may be retired, given facts that were read after the attachments were written.
///
/// No attachment names it, and the workload that could bring its name back is gone: no workload can be attached to it
/// any more, however stale the cache of another controller is.
pub fn may_retire(fresh: &ObservedState, source: &str) -> bool {
    let is_named = fresh.attachments.iter().any(|it| it.entries.contains_key(source));
    let has_live_creator = fresh
        .workloads
        .iter()
        .any(|it| it.activity.is_live() && mountpoint_pod_name(&it.uid, &fresh.persistent_volume) == source);
    !is_named && !has_live_creator
}

impl PodOnNode {
    pub fn new(workload: &Workload, required: &RequiredVolumes, persistent_volume: &PvName) -> Self {
        Self {
            uid: workload.uid.clone(),
            activity: workload.activity(),
            requirement: required.ours.get(persistent_volume).cloned(),
        }
    }
}

impl VolumeState {
    pub fn of(volume: Option<&VolumeFacts>) -> Self {
        match volume {
            None => Self::Missing,
            Some(VolumeFacts { pod_problem: Some(problem), .. }) => Self::Refused { problem: problem.clone() },
            Some(VolumeFacts { pod_problem: None, .. }) => Self::Usable,
        }
    }
}
