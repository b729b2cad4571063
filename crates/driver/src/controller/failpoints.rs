//! The calls of `apply`, `headroom` and `status` by name.

use clap::ValueEnum;

/// A write that has just succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Failpoint {
    AttachmentCreated,
    AttachmentEdited,
    PodStarted,
    PodAdopted,
    PodRetired,
    PodDeleted,
    AttachmentDeleted,
    HeadroomPodCreated,
    HeadroomPodDeleted,
    GateRemoved,
    StatusWritten,
    EventWritten,
}

pub type Failpoints = crate::failpoints::Failpoints<Failpoint>;
