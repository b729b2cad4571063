//! What to do, as data. The shape says in which order: attachments, then Pods, then deletions.

use std::fmt;
use std::time::Duration;

use crate::chain::Chain;
use crate::identifiers::WorkloadUid;

use super::facts::{Entries, Fields};
use super::needs::Refused;

/// What to do next for one PV on one node. Without steps once everything is as it should be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decision {
    /// First. Each is one call that fails if somebody else was faster; then nothing else of this decision is done, and
    /// the next look decides anew.
    pub specs: Vec<SpecWrite>,
    /// Second, once all of `specs` succeeded. From here on every step stands on its own: one that fails stops no other.
    pub pods: Vec<PodStep>,
    /// Third, each with its precondition.
    pub deletions: Vec<Deletion>,
    /// For people, at any time.
    pub notices: Vec<Notice>,
    /// When time alone changes the answer.
    pub look_again_in: Option<Duration>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SpecWrite {
    /// A name that exists already is a lost race like any other.
    CreateAttachment { name: String, fields: Fields, entries: Entries, changes: Vec<Change> },
    /// Replaces all entries, if the object still has this version.
    EditAttachment { name: String, resource_version: String, entries: Entries, changes: Vec<Change> },
}

/// What a write changes, for logs and Events: the entries it carries say the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    Attach { workload: WorkloadUid, mountpoint_pod: String, seat: Seat },
    Detach { workload: WorkloadUid, mountpoint_pod: String, reason: DetachReason },
    RemoveEntry { mountpoint_pod: String },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seat {
    /// The Mountpoint Pod that is named after this workload. See [`SpecWrite::creators`].
    Own,
    /// One that serves others already, or is about to.
    Shared,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DetachReason {
    /// Its Pod has ended, or is deleted before it ran.
    Over,
    /// The watch reported its deletion.
    Gone,
    /// Nobody has seen its Pod since it was attached. See [`SpecWrite::stale_workloads`].
    Stale,
    /// It is attached elsewhere, and was first there.
    Duplicate,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodStep {
    /// Create the Mountpoint Pod under this name. That it exists already is success.
    Start {
        name: String,
        attachment: String,
        /// The workload it is started for; it may serve more.
        workload: WorkloadUid,
    },
    /// Annotate `needs-unmount`, if the Pod still has this UID and [`super::may_retire`] says so of attachments that were
    /// read without a cache after `specs` were written.
    Retire { name: String, uid: String, creator: Creator },
}

/// What is known of the workload after which a Mountpoint Pod is named: the only one that could bring it back into use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Creator {
    /// Seen to be over. The cached workloads are proof enough.
    Ended,
    /// Not in the cache: the node's workloads must be read without one, too, before the Pod is retired.
    Unseen,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Deletion {
    /// With both as preconditions: a Pod that changed meanwhile is looked at again first.
    MountpointPod {
        name: String,
        uid: String,
        resource_version: String,
    },
    Attachment {
        name: String,
        precondition: Precondition,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Precondition {
    ResourceVersion(String),
    /// The version that this decision's own write returned.
    AsWritten,
}

/// What people should know. The same notice comes with every look until it is no longer true.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    Assigned {
        workload: WorkloadUid,
        attachment: String,
        mountpoint_pod: String,
    },
    Waits {
        workload: WorkloadUid,
        reason: WaitReason,
    },
    /// A workload that is using its mount lost the Mountpoint Pod.
    Replaces {
        workload: WorkloadUid,
        mountpoint_pod: String,
        loss: Loss,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WaitReason {
    Refused(Refused),
    /// No new Mountpoint Pod can be built without it.
    VolumeMissing,
    /// No new Mountpoint Pod can be built from it.
    VolumeRefused {
        problem: String,
    },
    AttachmentEnding {
        attachment: String,
    },
    /// The Pod under that name must go before the next one can have it.
    PredecessorEnding {
        mountpoint_pod: String,
    },
    PredecessorLost {
        mountpoint_pod: String,
        loss: Loss,
    },
    NotRunning {
        mountpoint_pod: String,
        trouble: Option<String>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    Missing,
    Failed,
    Succeeded,
}

impl Decision {
    /// Whether there is nothing to do but wait.
    pub fn is_settled(&self) -> bool {
        self.specs.is_empty() && self.pods.is_empty() && self.deletions.is_empty()
    }

    pub(super) fn look_again_in(&mut self, delay: Duration) {
        self.look_again_in = Some(self.look_again_in.map_or(delay, |it| it.min(delay)));
    }
}

impl SpecWrite {
    pub fn name(&self) -> &str {
        match self {
            Self::CreateAttachment { name, .. } | Self::EditAttachment { name, .. } => name,
        }
    }

    pub fn entries(&self) -> &Entries {
        match self {
            Self::CreateAttachment { entries, .. } | Self::EditAttachment { entries, .. } => entries,
        }
    }

    pub fn changes(&self) -> &[Change] {
        match self {
            Self::CreateAttachment { changes, .. } | Self::EditAttachment { changes, .. } => changes,
        }
    }

    /// Workloads that are detached only because the cache does not know them. Whoever writes this reads the node's Pods
    /// without a cache first, and does not write if one of them lives.
    pub fn stale_workloads(&self) -> impl Iterator<Item = &WorkloadUid> {
        self.changes().iter().filter_map(|it| match it {
            Change::Detach { workload, reason: DetachReason::Stale, .. } => Some(workload),
            Change::Detach { .. } | Change::Attach { .. } | Change::RemoveEntry { .. } => None,
        })
    }

    /// Workloads whose own Mountpoint Pod this write brings into use. They must still live when it is made: a name that was
    /// in use before may belong to a Pod that somebody else has just retired. Whoever writes this knows it from a read
    /// without a cache, or has a cache that is no older than its own leadership. If it is wrong all the same, the
    /// workloads wait until the retired Pod has ended and the next one has taken its name.
    pub fn creators(&self) -> impl Iterator<Item = &WorkloadUid> {
        self.changes().iter().filter_map(|it| match it {
            Change::Attach { workload, seat: Seat::Own, .. } => Some(workload),
            Change::Detach { .. } | Change::Attach { .. } | Change::RemoveEntry { .. } => None,
        })
    }
}

impl Notice {
    pub const fn workload(&self) -> &WorkloadUid {
        match self {
            Self::Assigned { workload, .. } | Self::Waits { workload, .. } | Self::Replaces { workload, .. } => {
                workload
            }
        }
    }
}

impl fmt::Display for Notice {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Assigned { attachment, mountpoint_pod, .. } => {
                write!(formatter, "served by Mountpoint Pod {mountpoint_pod} (kubectl describe s3pa {attachment})")
            }
            Self::Waits { reason, .. } => write!(formatter, "{reason}"),
            Self::Replaces { mountpoint_pod, loss, .. } => {
                write!(formatter, "Mountpoint Pod {mountpoint_pod} {loss} while it was in use and is replaced")
            }
        }
    }
}

impl WaitReason {
    /// Whether waiting will help. Otherwise somebody must change something.
    pub const fn passes_by_itself(&self) -> bool {
        match self {
            Self::AttachmentEnding { .. }
            | Self::PredecessorEnding { .. }
            | Self::PredecessorLost { .. }
            | Self::NotRunning { trouble: None, .. } => true,
            Self::Refused(_)
            | Self::VolumeMissing
            | Self::VolumeRefused { .. }
            | Self::NotRunning { trouble: Some(_), .. } => false,
        }
    }
}

impl fmt::Display for WaitReason {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(refused) => write!(formatter, "{}", Chain(refused)),
            Self::VolumeMissing => {
                write!(formatter, "the PersistentVolume is missing, no Mountpoint Pod can be made without it")
            }
            Self::VolumeRefused { problem } => {
                write!(formatter, "no Mountpoint Pod can be made for the volume: {problem}")
            }
            Self::AttachmentEnding { attachment } => {
                write!(formatter, "attachment {attachment} is being deleted, the next one follows when it is gone")
            }
            Self::PredecessorEnding { mountpoint_pod } => {
                write!(formatter, "Mountpoint Pod {mountpoint_pod} is ending, the next one follows when it is gone")
            }
            Self::PredecessorLost { mountpoint_pod, loss } => {
                write!(formatter, "Mountpoint Pod {mountpoint_pod} {loss} and is replaced")
            }
            Self::NotRunning { mountpoint_pod, trouble: None } => {
                write!(formatter, "Mountpoint Pod {mountpoint_pod} is not running yet")
            }
            Self::NotRunning { mountpoint_pod, trouble: Some(trouble) } => {
                write!(formatter, "Mountpoint Pod {mountpoint_pod} is not running: {trouble}")
            }
        }
    }
}

impl fmt::Display for Loss {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Missing => "disappeared",
            Self::Failed => "failed",
            Self::Succeeded => "ended",
        })
    }
}
