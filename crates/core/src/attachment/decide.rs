//! The decision for one PV on one node. What the rules are is written beside them, in `attach` and `pods`.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::identifiers::{PvName, WorkloadUid};
use crate::names::mountpoint_pod_name;

use super::decision::Decision;
use super::facts::{Activity, Attachment, MountpointPod, Timestamp, Workload};
use super::needs::{Need, Refused, Uses, Volume};
use super::plan::Plan;

/// A cache that does not know a workload may simply be late; after this long, it is not.
pub(super) const STALE_AFTER: Duration = Duration::from_mins(2);

/// A Pod that fails as soon as it exists is not made anew faster than this.
pub(super) const REPLACEMENT_PAUSE: Duration = Duration::from_secs(10);

/// Everything that is known about one PV on one node.
#[derive(Clone, Debug)]
pub struct Observed {
    pub persistent_volume: PvName,
    /// Our own: new workloads are not served by Mountpoint Pods of another driver version.
    pub driver_version: String,
    pub volume: VolumeState,
    /// Every workload of the node that uses this volume or that one of `attachments` names.
    pub workloads: Vec<Resident>,
    /// UIDs whose deletion a watch has reported. To forget one costs time only.
    pub gone: BTreeSet<WorkloadUid>,
    /// Every attachment whose fields name this node and PV.
    pub attachments: Vec<Attachment>,
    /// Every Mountpoint Pod that was started for this node and PV or that one of `attachments` names.
    pub mountpoint_pods: Vec<MountpointPod>,
}

/// A workload on the node and what it has to do with this volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resident {
    pub uid: WorkloadUid,
    pub activity: Activity,
    /// `None` if it cannot be said any more, for instance because the PV is gone.
    pub wish: Option<Result<Need, Refused>>,
}

/// Whether a Mountpoint Pod can be built now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VolumeState {
    Usable,
    Refused { problem: String },
    Missing,
}

/// What to do next. Equal facts make equal decisions, whoever decides.
pub fn decide(observed: &Observed, now: Timestamp) -> Decision {
    let mut plan = Plan::new(observed, now);
    plan.release_ended_workloads();
    plan.release_duplicates();
    plan.place_workloads();
    plan.remove_empty_entries();
    plan.tend_pods_in_use();
    plan.tend_other_pods();
    plan.finish()
}

/// Whether a Mountpoint Pod may be retired, by facts that were read after the attachments were written.
///
/// No attachment names it, and the workload that could bring its name back is not there: nobody will be attached to it
/// any more, however old the facts of others are.
pub fn may_retire(fresh: &Observed, name: &str) -> bool {
    let is_named = fresh.attachments.iter().any(|it| it.entries.contains_key(name));
    let has_live_creator = fresh
        .workloads
        .iter()
        .any(|it| it.activity.is_live() && mountpoint_pod_name(&it.uid, &fresh.persistent_volume) == name);
    !is_named && !has_live_creator
}

impl Resident {
    /// A workload as this volume sees it.
    pub fn new(workload: &Workload, uses: &Uses, persistent_volume: &PvName) -> Self {
        Self {
            uid: workload.uid.clone(),
            activity: workload.activity(),
            wish: uses.ours.get(persistent_volume).cloned(),
        }
    }
}

impl VolumeState {
    pub fn of(volume: Option<&Volume>) -> Self {
        match volume {
            None => Self::Missing,
            Some(Volume { pod_problem: Some(problem), .. }) => Self::Refused { problem: problem.clone() },
            Some(Volume { pod_problem: None, .. }) => Self::Usable,
        }
    }
}
