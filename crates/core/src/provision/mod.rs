//! Volumes that are made on demand: what a request for one means, where its data goes, what it is called, and what is
//! noted about it in the store. Who talks to the store is not here.

mod create;
mod id;
mod parameters;
mod record;
mod template;
#[cfg(test)]
mod tests;

pub use create::{CapacityRange, Create, InvalidCreate, Owner, RawCreate, check_capability};
pub use id::{Data, ForeignId, LongId, ProvisionedId, VolumeKey};
pub use parameters::{InvalidParameters, OnDelete, Parameters, Target, UnknownPolicy, parameter};
pub use record::{Difference, Record, UnreadableRecord};
pub use template::{InvalidTemplate, Template, Variable};

use crate::bucket::BucketName;
use crate::prefix::Prefix;

/// Where a volume's data is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A bucket of its own.
    Bucket(BucketName),
    /// A part of a bucket that others use as well.
    Prefix { bucket: BucketName, prefix: Prefix },
}

impl Place {
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

/// What the volume says to the node that mounts it, besides the keys of `publish::context`.
pub mod context {
    /// As in the driver before us; nobody reads it.
    pub const DYNAMIC_PROVISIONING: &str = "dynamicProvisioning";
}
