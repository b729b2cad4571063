//! Dynamic provisioning: what a request means, where the data of a volume goes, its ID, and the metadata that are stored with
//! it. Nothing here talks to the store.

mod create;
mod id;
mod parameters;
mod record;
mod template;
#[cfg(test)]
mod tests;

pub use create::{
    CapacityRange, CreateRequest, InvalidCreateRequest, RawCreateRequest, StoreIdentity, check_capability,
    is_signing_region,
};
pub use id::{ProvisionedId, ProvisionedVolume, UnknownVolumeId, VolumeIdTooLong, VolumeKey};
pub use parameters::{BucketMode, InvalidParameters, OnDelete, Parameters, UnknownOnDelete, parameter};
pub use record::{RecordDifference, UnreadableRecord, VolumeRecord};
pub use template::{InvalidPrefixTemplate, PrefixTemplate, TemplateVariable};

use crate::bucket::BucketName;
use crate::prefix::Prefix;

/// Where a volume's data is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VolumeLocation {
    /// A bucket of its own.
    Bucket(BucketName),
    /// A prefix of a shared bucket.
    Prefix { bucket: BucketName, prefix: Prefix },
}

impl VolumeLocation {
    pub const fn bucket(&self) -> &BucketName {
        match self {
            Self::Bucket(bucket) | Self::Prefix { bucket, .. } => bucket,
        }
    }

    pub const fn prefix(&self) -> Option<&Prefix> {
        match self {
            Self::Bucket(_) => None,
            Self::Prefix { prefix, .. } => Some(prefix),
        }
    }
}

/// Keys of the volume context, besides those of `publish::context`.
pub mod context {
    /// As in Scality's driver; informational.
    pub const DYNAMIC_PROVISIONING: &str = "dynamicProvisioning";
}
