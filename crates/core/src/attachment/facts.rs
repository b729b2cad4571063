//! What the controller sees, as plain data: workloads, Mountpoint Pods, attachments. Nothing is decided here.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::identifiers::{PvName, WorkloadUid};

use super::needs::ClaimReference;

/// A user's Pod, as far as volumes are concerned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workload {
    pub uid: WorkloadUid,
    pub namespace: String,
    pub name: String,
    pub service_account: String,
    /// `None` until the scheduler has chosen.
    pub node: Option<String>,
    pub phase: Phase,
    pub is_terminating: bool,
    pub fs_group: Option<i64>,
    pub claims: Vec<ClaimReference>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    Pending,
    Running,
    Succeeded,
    Failed,
    /// Its node does not report any more.
    Unknown,
}

/// What a workload is to its volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Activity {
    /// It waits for its volumes: whoever has no mount yet gets one.
    Starting,
    /// Its containers may be using the mount. It keeps what it has, and gets nothing it did not have.
    Using,
    /// It does not use its volumes any more and never will again.
    Over,
}

/// The Pod that contains a mounter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountpointPod {
    pub name: String,
    /// Tells apart the Pods that had this name one after the other.
    pub uid: String,
    pub resource_version: String,
    pub phase: Phase,
    pub is_terminating: bool,
    /// Annotated `needs-unmount`: the node ends it as soon as no bind mount refers to its source.
    pub is_retired: bool,
    /// Annotated `no-new-workload`, which operators do to drain it.
    pub refuses_new_workloads: bool,
    /// Of the driver that started it.
    pub driver_version: Option<String>,
    pub created_at: Timestamp,
    /// What keeps a pending one from running, in the words of the scheduler or of kubelet.
    pub trouble: Option<String>,
}

/// A `MountpointS3PodAttachment`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attachment {
    pub name: String,
    /// Opaque; every write is a compare-and-swap against it.
    pub resource_version: String,
    pub is_terminating: bool,
    pub fields: Fields,
    pub entries: Entries,
}

/// Mountpoint Pods by name, and the workloads that each of them serves.
///
/// Text that is no UID is left out by whoever reads the object; the next write removes it.
pub type Entries = BTreeMap<String, Vec<Entry>>;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    pub workload: WorkloadUid,
    pub attached_at: Timestamp,
}

/// The fields of an attachment that say whom it is for. Drivers before us wrote the first five.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fields {
    pub node: String,
    pub persistent_volume: PvName,
    pub volume_id: String,
    /// The PV's options as they were written, joined by commas: a driver before us finds our objects by this text.
    pub mount_options: String,
    /// Empty without one.
    pub fs_group: String,
    pub authentication_source: Option<String>,
    pub workload_namespace: Option<String>,
    pub service_account: Option<String>,
}

/// A moment, in whole seconds as Kubernetes writes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(i64);

impl Workload {
    pub const fn activity(&self) -> Activity {
        Activity::of(self.phase, self.is_terminating)
    }
}

impl Activity {
    pub const fn of(phase: Phase, is_terminating: bool) -> Self {
        match (phase, is_terminating) {
            (Phase::Pending, false) => Self::Starting,
            // A node that is silent may still run the containers: their mount stays until somebody knows better.
            (Phase::Running | Phase::Unknown, _) => Self::Using,
            (Phase::Pending, true) | (Phase::Succeeded | Phase::Failed, _) => Self::Over,
        }
    }

    pub const fn is_live(self) -> bool {
        matches!(self, Self::Starting | Self::Using)
    }
}

impl Phase {
    /// As the API writes it; a Pod that nobody has reported on yet has no phase.
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
    /// Whether a workload that has no mount yet may be served by it.
    pub fn is_suitable(&self, driver_version: &str) -> bool {
        matches!(self.phase, Phase::Pending | Phase::Running)
            && !self.is_terminating
            && !self.is_retired
            && !self.refuses_new_workloads
            && self.driver_version.as_deref() == Some(driver_version)
    }

    /// Whether a workload for which it was started may have it, even if it is not open to others.
    pub const fn is_adoptable(&self) -> bool {
        matches!(self.phase, Phase::Pending | Phase::Running) && !self.is_terminating && !self.is_retired
    }
}

impl Timestamp {
    pub const fn from_unix_seconds(seconds: i64) -> Self {
        Self(seconds)
    }

    pub const fn unix_seconds(self) -> i64 {
        self.0
    }

    /// How long ago this was. A clock that runs ahead of ours makes no age.
    pub fn age(self, now: Self) -> Duration {
        Duration::from_secs(u64::try_from(now.0.saturating_sub(self.0)).unwrap_or(0))
    }
}
