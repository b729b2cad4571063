//! What to do, as data. The fields are in the order of execution: attachments, then Pods, then deletions.

use std::fmt;
use std::time::Duration;

use crate::chain::Chain;
use crate::identifiers::WorkloadUid;

use super::facts::{AttachmentFields, Entries};
use super::requirements::VolumeRefusal;

/// What to do next for one PV on one node. Without actions once the desired state is reached.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decision {
    /// First. Each is one compare-and-swap; if it loses, nothing else of this decision is done and the key is reconciled
    /// again.
    pub attachment_writes: Vec<AttachmentWrite>,
    /// Second, once all of `attachment_writes` succeeded. From here on the actions are independent: one that fails stops no
    /// other.
    pub pods: Vec<PodAction>,
    /// Third, each with its precondition.
    pub deletions: Vec<Deletion>,
    /// For Events, at any time.
    pub notices: Vec<Notice>,
    /// When time alone changes the decision.
    pub requeue_after: Option<Duration>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AttachmentWrite {
    /// An object of this name that exists already is a lost race.
    CreateAttachment { name: String, fields: AttachmentFields, entries: Entries, changes: Vec<AttachmentChange> },
    /// Replaces all entries if the object still has this version.
    EditAttachment { name: String, resource_version: String, entries: Entries, changes: Vec<AttachmentChange> },
}

/// What a write changes, for the log. The entries that are written contain the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AttachmentChange {
    Attach { workload: WorkloadUid, mountpoint_pod: String, placement: Placement },
    Detach { workload: WorkloadUid, mountpoint_pod: String, reason: DetachReason },
    RemoveEntry { mountpoint_pod: String },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// The Mountpoint Pod that is named after this workload. See [`AttachmentWrite::creators`].
    Dedicated,
    /// One that serves other workloads already, or is about to.
    Shared,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DetachReason {
    /// Its Pod has ended, or was deleted before it ran.
    Finished,
    /// The watch reported its deletion.
    Gone,
    /// The cache has not seen its Pod since it was attached. See [`AttachmentWrite::stale_workloads`].
    Stale,
    /// Another entry for it is older.
    Duplicate,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodAction {
    /// Create the Mountpoint Pod under this name. That it exists already is success.
    Start {
        name: String,
        /// The source it serves. Another name than its own if it takes over from a Pod that still serves.
        source: String,
        attachment: String,
        /// The workload it is started for; it may serve more.
        workload: WorkloadUid,
    },
    /// Give a warm Mountpoint Pod to a source, instead of starting one: a compare-and-swap against its version. If it is lost,
    /// the next decision takes another one or starts one.
    Adopt {
        name: String,
        uid: String,
        resource_version: String,
        source: String,
        /// The workload it is adopted for; it may serve more.
        workload: WorkloadUid,
    },
    /// Annotate `needs-unmount`, if the Pod still has this UID and [`super::may_retire`] allows it for attachments that were
    /// read without a cache after `attachment_writes`.
    Retire { name: String, uid: String, source: String, creator: CreatorState },
}

/// What is known of the workload after which a Mountpoint Pod is named: only that one could bring it back into use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CreatorState {
    /// The cache has seen it end. That is proof enough.
    Ended,
    /// Not in the cache: the node's workloads must be read without one, too, before the Pod is retired.
    Unseen,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Deletion {
    /// With both as preconditions: a Pod that changed meanwhile is observed again first.
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

/// What the user of a workload should know. The same notice is repeated at every reconciliation while it is true.
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
        loss: PodLoss,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WaitReason {
    Refused(VolumeRefusal),
    /// A volume for one node only is attached on another one.
    InUseElsewhere {
        node: String,
        workload: String,
    },
    /// No Mountpoint Pod can be created without it.
    VolumeMissing,
    /// No Mountpoint Pod can be created from it.
    VolumeRefused {
        problem: String,
    },
    AttachmentEnding {
        attachment: String,
    },
    /// The Pod of that name must be gone before the next one can be created.
    PodEnding {
        mountpoint_pod: String,
    },
    PodLost {
        mountpoint_pod: String,
        loss: PodLoss,
    },
    NotRunning {
        mountpoint_pod: String,
        problem: Option<String>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodLoss {
    Missing,
    Failed,
    Succeeded,
}

impl Decision {
    /// Whether there is nothing to do.
    pub fn is_settled(&self) -> bool {
        self.attachment_writes.is_empty() && self.pods.is_empty() && self.deletions.is_empty()
    }

    /// Whether a Pod is started that takes over from one that still serves.
    pub fn replaces_ahead(&self) -> bool {
        self.pods.iter().any(|it| matches!(it, PodAction::Start { name, source, .. } if name != source))
    }

    /// The warm Mountpoint Pods that this decision takes.
    pub fn adopted(&self) -> impl Iterator<Item = &str> {
        self.pods.iter().filter_map(|it| match it {
            PodAction::Adopt { name, .. } => Some(name.as_str()),
            PodAction::Start { .. } | PodAction::Retire { .. } => None,
        })
    }

    pub(super) fn requeue_after(&mut self, delay: Duration) {
        self.requeue_after = Some(self.requeue_after.map_or(delay, |it| it.min(delay)));
    }
}

impl AttachmentWrite {
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

    pub fn changes(&self) -> &[AttachmentChange] {
        match self {
            Self::CreateAttachment { changes, .. } | Self::EditAttachment { changes, .. } => changes,
        }
    }

    /// Workloads that are detached only because the cache does not know them. Before this is written, the node's Pods are
    /// read without a cache; if one of these workloads lives, nothing is written.
    pub fn stale_workloads(&self) -> impl Iterator<Item = &WorkloadUid> {
        self.changes().iter().filter_map(|it| match it {
            AttachmentChange::Detach { workload, reason: DetachReason::Stale, .. } => Some(workload),
            AttachmentChange::Detach { .. }
            | AttachmentChange::Attach { .. }
            | AttachmentChange::RemoveEntry { .. } => None,
        })
    }

    /// Workloads whose own Mountpoint Pod this write brings into use. They must still live when it is written: a name that
    /// was in use before may belong to a Pod that another controller has just retired. The writer knows it from a read
    /// without a cache, or from a cache that is no older than its leadership. If it is wrong all the same, the
    /// workloads wait until the retired Pod has ended and the next one has its name.
    pub fn creators(&self) -> impl Iterator<Item = &WorkloadUid> {
        self.changes().iter().filter_map(|it| match it {
            AttachmentChange::Attach { workload, placement: Placement::Dedicated, .. } => Some(workload),
            AttachmentChange::Detach { .. }
            | AttachmentChange::Attach { .. }
            | AttachmentChange::RemoveEntry { .. } => None,
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
    /// Whether it resolves without a change by a user or an administrator.
    pub const fn passes_by_itself(&self) -> bool {
        match self {
            Self::AttachmentEnding { .. }
            | Self::PodEnding { .. }
            | Self::PodLost { .. }
            | Self::NotRunning { problem: None, .. } => true,
            Self::Refused(_)
            | Self::InUseElsewhere { .. }
            | Self::VolumeMissing
            | Self::VolumeRefused { .. }
            | Self::NotRunning { problem: Some(_), .. } => false,
        }
    }
}

impl fmt::Display for WaitReason {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(refused) => write!(formatter, "{}", Chain(refused)),
            Self::InUseElsewhere { node, workload } => write!(
                formatter,
                "the volume is ReadWriteOnce and in use on node {node} by Pod {workload}; it can be used here when that Pod is gone"
            ),
            Self::VolumeMissing => {
                write!(formatter, "the PersistentVolume does not exist, no Mountpoint Pod can be created without it")
            }
            Self::VolumeRefused { problem } => {
                write!(formatter, "no Mountpoint Pod can be created for the volume: {problem}")
            }
            Self::AttachmentEnding { attachment } => {
                write!(formatter, "attachment {attachment} is being deleted; the next one is created when it is gone")
            }
            Self::PodEnding { mountpoint_pod } => {
                write!(
                    formatter,
                    "Mountpoint Pod {mountpoint_pod} is terminating; the next one is created when it is gone"
                )
            }
            Self::PodLost { mountpoint_pod, loss } => {
                write!(formatter, "Mountpoint Pod {mountpoint_pod} {loss} and is replaced")
            }
            Self::NotRunning { mountpoint_pod, problem: None } => {
                write!(formatter, "Mountpoint Pod {mountpoint_pod} is not running yet")
            }
            Self::NotRunning { mountpoint_pod, problem: Some(problem) } => {
                write!(formatter, "Mountpoint Pod {mountpoint_pod} is not running: {problem}")
            }
        }
    }
}

impl fmt::Display for PodLoss {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Missing => "disappeared",
            Self::Failed => "failed",
            Self::Succeeded => "ended",
        })
    }
}
