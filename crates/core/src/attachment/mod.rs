//! Which workload is served by which Mountpoint Pod: the controller's rules, without Kubernetes, clock or network.
//!
//! Every decision is about one PV on one node. All workloads that use it there, all attachments that name it
//! and all Mountpoint Pods that were created for it are observed together, so that an edited PV, a duplicate and a
//! leftover are handled by the same rules.
//!
//! Three invariants:
//! - The attachment is the desired state, Mountpoint Pods follow it. An entry names a source by its first Mountpoint Pod; that Pod
//!   may fail, be evicted or deleted, and the next one gets the same name. One that takes over while another one still serves
//!   has a name of its own and says which source it is for. Workloads never move from one source to another.
//! - An entry that was removed never comes back: only the workload after which a Mountpoint Pod is named can bring its name
//!   into an attachment, and it has finished by then. Removing the entry by compare-and-swap is therefore the fence after
//!   which the Pod may be retired.
//! - A controller with stale facts loses a compare-and-swap, or does something that the next decision repairs.

mod attach;
mod decide;
mod decision;
mod facts;
mod identity;
mod plan;
mod pods;
mod requirements;

pub use decide::{AttachedElsewhere, ObservedState, PodOnNode, VolumeState, decide, may_retire};
pub use decision::{
    AttachmentChange, AttachmentWrite, CreatorState, Decision, Deletion, DetachReason, Notice, Placement, PodAction,
    PodLoss, Precondition, WaitReason,
};
pub use facts::{
    Activity, Attachment, AttachmentFields, Entries, Entry, HeadroomGate, MountpointPod, PodPhase, Timestamp, Workload,
};
pub use identity::{
    Assignment, PodIdentity, assignment, attachment_name, is_mountpoint_pod_name, newest_first, successor_name,
};
pub use requirements::{
    Claim, ClaimRef, ClaimSource, InlineVolume, MountRequirement, NodeScope, RequiredVolumes, UnresolvedClaim,
    VolumeFacts, VolumeLifecycle, VolumeLister, VolumeRefusal, required_volumes, unscheduled_volumes,
};

#[cfg(test)]
mod tests;
