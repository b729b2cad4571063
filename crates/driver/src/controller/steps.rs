//! The calls of `apply` and `report` by name.

use clap::ValueEnum;

/// What the API server has just been told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Step {
    AttachmentCreated,
    AttachmentEdited,
    PodStarted,
    PodRetired,
    PodDeleted,
    AttachmentDeleted,
    StatusWritten,
    EventWritten,
}

pub type Steps = crate::steps::Steps<Step>;
