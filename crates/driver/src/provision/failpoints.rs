//! The changes in the store by name.

use clap::ValueEnum;

/// What has just been done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Failpoint {
    BucketCreated,
    BucketMarked,
    MetadataWritten,
    PrefixTaken,
    DataDeleted,
    PrefixReleased,
    MetadataDeleted,
    BucketDeleted,
}

pub type Failpoints = crate::failpoints::Failpoints<Failpoint>;
