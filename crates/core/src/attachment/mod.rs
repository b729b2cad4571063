//! Who is served by which Mountpoint Pod: the rules of the controller, without Kubernetes, clock or network.
//!
//! The unit of every decision is one PV on one node. All workloads that use it there, all attachments that speak of it
//! and all Mountpoint Pods that were started for it are looked at together, so that an edited PV, a duplicate and a
//! leftover are seen from the same place.
//!
//! Three ideas carry the rest:
//! - The attachment is what should be, Mountpoint Pods follow it. An entry names a Mountpoint Pod; Pods under that name may
//!   fail, be evicted or deleted, and the next one takes the name. Workloads are never moved from one name to another.
//! - An entry that was removed never comes back: only the workload after which a Mountpoint Pod is named can bring its name
//!   into an attachment, and it is over by then. Removing the entry by compare-and-swap is therefore the fence after
//!   which the Pod may be retired.
//! - Whoever looks at old facts loses a compare-and-swap or does something that the next decision repairs.

mod attach;
mod decide;
mod decision;
mod facts;
mod identity;
mod needs;
mod plan;
mod pods;

pub use decide::{Observed, Resident, VolumeState, decide, may_retire};
pub use decision::{
    Change, Creator, Decision, Deletion, DetachReason, Loss, Notice, PodStep, Precondition, Seat, SpecWrite, WaitReason,
};
pub use facts::{Activity, Attachment, Entries, Entry, Fields, MountpointPod, Phase, Timestamp, Workload};
pub use identity::{Assignment, assignment, attachment_name, is_mountpoint_pod_name};
pub use needs::{Catalog, Claim, ClaimOf, ClaimReference, Need, Refused, Uses, Volume, Waiting, uses};

#[cfg(test)]
mod tests;
