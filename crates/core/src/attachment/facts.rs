//! What the controller observes, as plain data: workloads, Mountpoint Pods, attachments. Nothing is decided here.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::identifiers::{PvName, WorkloadUid};
use crate::mountpoint_pod::PodTemplate;

use super::identity::PodIdentity;
use super::requirements::ClaimSource;

/// A user's Pod, reduced to what concerns its volumes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workload {
    pub uid: WorkloadUid,
    pub namespace: String,
    pub name: String,
    pub service_account: String,
    /// `None` until the scheduler has chosen.
    pub node: Option<String>,
    pub phase: PodPhase,
    pub is_terminating: bool,
    /// kubelet says that not all of its containers work.
    pub is_unready: bool,
    /// Its node says that the engine of one of its mounts is dead and cannot be replaced on that mount.
    pub has_dead_mount: bool,
    pub fs_group: Option<i64>,
    pub claims: Vec<ClaimSource>,
    pub headroom_gate: HeadroomGate,
}

/// The scheduling gate with which a workload asks for room for its Mountpoint Pods. The scheduler ignores Pods with gates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadroomGate {
    Present,
    /// It was removed when headroom Pods had been created, as a label says that stays for the life of the workload.
    Removed,
    /// There was none, or it was removed because the workload has no volume of ours.
    Absent,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PodPhase {
    Pending,
    Running,
    Succeeded,
    Failed,
    /// Its node no longer reports.
    Unknown,
}

/// Whether a workload uses its volumes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Activity {
    /// It waits for its volumes; those that are not mounted yet get mounted.
    Starting,
    /// Its containers may be using the mount. It keeps what it has, and gets no new mount.
    Using,
    /// It does not use its volumes any more and never will again.
    Finished,
}

/// The Pod that contains a mounter.
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a fact of its own, as labels, annotations and conditions say it"
)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountpointPod {
    pub name: String,
    /// What entries name: the name of the first Pod that served the source.
    pub source: String,
    /// Distinguishes Pods that had this name one after the other.
    pub uid: String,
    pub resource_version: String,
    pub phase: PodPhase,
    pub is_terminating: bool,
    /// Annotated `needs-unmount`: the node ends it as soon as no bind mount refers to its source.
    pub is_retired: bool,
    /// Annotated `no-new-workload` by an operator who drains it.
    pub refuses_new_workloads: bool,
    /// Of the driver that created it.
    pub driver_version: Option<String>,
    /// Its node says that it serves the source.
    pub is_mounted: bool,
    /// Its node says that another Pod can take over while it serves.
    pub is_movable: bool,
    pub created_at: Timestamp,
    /// Why a pending one does not run, as reported by the scheduler or by kubelet.
    pub problem: Option<String>,
    /// Only of a warm Pod, which runs an idle mounter and serves no source until one adopts it: what it was created from.
    pub warm: Option<PodTemplate>,
}

/// A `MountpointS3PodAttachment`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attachment {
    pub name: String,
    /// Opaque; every write is a compare-and-swap against it.
    pub resource_version: String,
    pub is_terminating: bool,
    pub fields: AttachmentFields,
    pub entries: Entries,
}

/// Mountpoint Pods by name, and the workloads that each of them serves.
///
/// Keys that are no UID are dropped when the object is read; the next write removes them.
pub type Entries = BTreeMap<String, Vec<Entry>>;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    pub workload: WorkloadUid,
    pub attached_at: Timestamp,
}

/// The fields that identify an attachment. Earlier drivers wrote the first five.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct AttachmentFields {
    pub node: String,
    pub persistent_volume: PvName,
    pub volume_id: String,
    /// The PV's options verbatim, joined by commas: earlier drivers find our objects by this text.
    pub mount_options: String,
    /// Empty if there is none.
    pub fs_group: String,
    pub authentication_source: Option<String>,
    pub workload_namespace: Option<String>,
    pub service_account: Option<String>,
}

/// A point in time, in whole seconds as Kubernetes writes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(i64);

impl Workload {
    /// A running one may wait for a volume whose engine of another strategy has died: its node says so, or it is not ready, because
    /// its containers cannot be started with a dead mount.
    pub const fn activity(&self) -> Activity {
        let may_wait = self.is_unready || self.has_dead_mount;
        match self.phase {
            PodPhase::Running if may_wait && !self.is_terminating => Activity::Starting,
            phase => Activity::of(phase, self.is_terminating),
        }
    }
}

impl Activity {
    pub const fn of(phase: PodPhase, is_terminating: bool) -> Self {
        match (phase, is_terminating) {
            (PodPhase::Pending, false) => Self::Starting,
            // A node that is not ready may still run the containers: their mount stays until their end is known.
            (PodPhase::Running | PodPhase::Unknown, _) => Self::Using,
            (PodPhase::Pending, true) | (PodPhase::Succeeded | PodPhase::Failed, _) => Self::Finished,
        }
    }

    pub const fn is_live(self) -> bool {
        matches!(self, Self::Starting | Self::Using)
    }
}

impl PodPhase {
    /// As the API writes it; a Pod without a status has no phase.
    pub fn from_text(text: Option<&str>) -> Self {
        match text {
            None | Some("" | "Pending") => Self::Pending,
            Some("Running") => Self::Running,
            Some("Succeeded") => Self::Succeeded,
            Some("Failed") => Self::Failed,
            Some(_) => Self::Unknown,
        }
    }

    pub const fn is_finished(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed)
    }
}

impl MountpointPod {
    /// Whether a workload that is not mounted yet may be served by it.
    pub fn is_suitable(&self, driver_version: &str) -> bool {
        matches!(self.phase, PodPhase::Pending | PodPhase::Running)
            && !self.is_terminating
            && !self.is_retired
            && !self.refuses_new_workloads
            && self.driver_version.as_deref() == Some(driver_version)
    }

    /// Whether it is warm and a source may adopt it whose own Mountpoint Pod would be created from this template.
    ///
    /// A pending one is nearer to running than one that is yet to be created, unless something keeps it from running.
    pub fn is_ready_for(&self, template: &PodTemplate, driver_version: &str) -> bool {
        self.warm.as_ref() == Some(template) && self.problem.is_none() && self.is_suitable(driver_version)
    }

    pub fn identity(&self) -> PodIdentity<'_> {
        PodIdentity { source: &self.source, name: &self.name, uid: &self.uid, created_at: self.created_at }
    }

    /// Whether the workload for which it was created may use it, even if it accepts no others.
    pub const fn accepts_its_creator(&self) -> bool {
        matches!(self.phase, PodPhase::Pending | PodPhase::Running) && !self.is_terminating && !self.is_retired
    }
}

impl Timestamp {
    pub const fn from_unix_seconds(seconds: i64) -> Self {
        Self(seconds)
    }

    pub const fn unix_seconds(self) -> i64 {
        self.0
    }

    /// How long ago this was; zero for a time in the future, since clocks differ.
    pub fn age(self, now: Self) -> Duration {
        Duration::from_secs(u64::try_from(now.0.saturating_sub(self.0)).unwrap_or(0))
    }
}
