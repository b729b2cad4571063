//! The changes in the store by name.

use clap::ValueEnum;

/// What has just been done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Step {
    BucketCreated,
    BucketMarked,
    VolumeNoted,
    PrefixTaken,
    DataDeleted,
    PrefixReleased,
    NoteRemoved,
    BucketDeleted,
}

pub type Steps = crate::steps::Steps<Step>;
