//! What can go wrong while volumes are made and ended, as far as callers should act differently.

use s3csi_core::provision::{Difference, UnreadableRecord};

/// A call to S3 that failed, with the store's own words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{operation} for bucket {bucket:?} failed: {said}")]
pub struct S3Error {
    pub operation: &'static str,
    pub bucket: String,
    pub kind: Kind,
    pub said: String,
    pub code: Option<String>,
}

/// What a failed call means for whoever asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The keys are not known, or not right.
    UnknownKeys,
    /// The keys are right, and may not do this.
    Denied,
    NoSuchBucket,
    NoSuchKey,
    /// The bucket belongs to somebody else.
    Foreign,
    /// The bucket belongs to us already.
    OwnedBefore,
    NotEmpty,
    /// There is an object of that name already.
    Taken,
    /// The store does not have this operation.
    NotSupported,
    /// What was asked for makes no sense to this store, for example its region.
    Invalid,
    /// The account has as many buckets as it may have.
    TooMany,
    /// The store has too much to do, or an accident: it says that it may work later.
    Busy,
    Unreachable,
    Late,
    Other,
}

impl S3Error {
    pub fn code(&self) -> Option<&str> {
        self.code.as_deref()
    }
}

impl Kind {
    /// The code is S3's; where there is none (answers to HEAD) or an unknown one, the status of HTTP has to do.
    pub fn of(code: Option<&str>, status: Option<u16>) -> Self {
        code.and_then(Self::of_code).unwrap_or(match status.unwrap_or_default() {
            401 | 403 => Self::Denied,
            404 => Self::NoSuchKey,
            405 | 501 => Self::NotSupported,
            500.. => Self::Busy,
            _ => Self::Other,
        })
    }

    fn of_code(code: &str) -> Option<Self> {
        Some(match code {
            "ExpiredToken"
            | "InvalidAccessKeyId"
            | "InvalidClientTokenId"
            | "InvalidToken"
            | "RequestTimeTooSkewed"
            | "SignatureDoesNotMatch"
            | "TokenRefreshRequired" => Self::UnknownKeys,
            "AccessDenied" | "AccountProblem" | "AllAccessDisabled" => Self::Denied,
            "NoSuchBucket" => Self::NoSuchBucket,
            "NoSuchKey" | "NotFound" => Self::NoSuchKey,
            "BucketAlreadyExists" => Self::Foreign,
            "BucketAlreadyOwnedByYou" => Self::OwnedBefore,
            "BucketNotEmpty" => Self::NotEmpty,
            "ConditionalRequestConflict" | "PreconditionFailed" => Self::Taken,
            "MethodNotAllowed" | "NotImplemented" | "XNotImplemented" => Self::NotSupported,
            "IllegalLocationConstraintException" | "InvalidBucketName" | "InvalidLocationConstraint" | "InvalidTag" => {
                Self::Invalid
            }
            "TooManyBuckets" => Self::TooMany,
            "InternalError" | "OperationAborted" | "RequestTimeout" | "ServiceUnavailable" | "SlowDown" => Self::Busy,
            _ => return None,
        })
    }

    /// Whether the same call may work later without anybody doing anything.
    pub const fn passes(self) -> bool {
        matches!(self, Self::Busy | Self::Unreachable | Self::Late)
    }
}

#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    #[error("another call works on this volume; it is answered when that one is")]
    Busy,

    #[error(
        "no provisioner secret came with the request and the driver has no keys of its own: name a secret in the StorageClass, or give the controller AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    )]
    NoKeys,

    #[error("the volume was not made in time; the next call goes on from here")]
    Late,

    #[error("failed to make the bucket")]
    Bucket {
        #[source]
        cause: S3Error,
    },

    #[error("bucket {bucket:?} exists and belongs to another account: it is not touched")]
    ForeignBucket {
        bucket: String,
        #[source]
        cause: S3Error,
    },

    #[error("bucket {bucket:?} exists, has objects in it and no note of ours: it is not touched")]
    NotMarked { bucket: String },

    #[error("failed to look at what is there")]
    Look {
        #[source]
        cause: S3Error,
    },

    #[error("failed to note in bucket {bucket:?} that it is a volume of ours")]
    Note {
        bucket: String,
        #[source]
        cause: S3Error,
    },

    #[error("failed to note the volume in the shared bucket")]
    SharedNote {
        #[source]
        cause: S3Error,
    },

    #[error("a volume of this name exists with other parameters")]
    Different {
        #[source]
        cause: Difference,
    },

    #[error("a volume of this name exists")]
    Unreadable {
        #[source]
        cause: UnreadableRecord,
    },

    #[error("the shared bucket does not exist: make it, or correct parameter bucket of the StorageClass")]
    NoSharedBucket {
        #[source]
        cause: S3Error,
    },

    #[error("prefix {prefix:?} of bucket {bucket:?} overlaps with that of volume {other}: change prefixTemplate")]
    Overlap { bucket: String, prefix: String, other: String },

    #[error(
        "prefix {prefix:?} of bucket {bucket:?} has objects in it that no volume put there: with onDelete delete-all they would be deleted with the volume; choose another prefixTemplate or policy"
    )]
    PrefixNotEmpty { bucket: String, prefix: String },
}

#[derive(Debug, thiserror::Error)]
pub enum DeleteError {
    #[error("another call works on this volume; it is answered when that one is")]
    Busy,

    #[error(
        "no provisioner secret came with the request and the driver has no keys of its own: give back the secret that the volume was made with, or the driver's keys"
    )]
    NoKeys,

    #[error("the volume was not deleted in time; the next call goes on from here")]
    Late,

    #[error("bucket {bucket:?} was not made by this driver: it is not deleted")]
    Foreign { bucket: String },

    #[error(
        "{place} is not empty ({what}), and the volume's onDelete is delete-if-empty: remove what is in it, or the PersistentVolume by hand"
    )]
    NotEmpty { place: String, what: String },

    #[error("failed to look at what is there")]
    Look {
        #[source]
        cause: S3Error,
    },

    #[error("nothing is deleted")]
    Unreadable {
        #[source]
        cause: UnreadableRecord,
    },

    #[error("failed to remove the volume's data")]
    Empty {
        #[source]
        cause: S3Error,
    },

    #[error("failed to remove the note about the volume")]
    Note {
        #[source]
        cause: S3Error,
    },

    #[error("failed to delete the bucket")]
    Bucket {
        #[source]
        cause: S3Error,
    },
}

#[derive(Debug, thiserror::Error)]
pub enum FindError {
    #[error("no secret came with the request and the driver has no keys of its own")]
    NoKeys,

    #[error("the store did not answer in time")]
    Late,

    #[error("failed to look at what is there")]
    Look {
        #[source]
        cause: S3Error,
    },

    #[error("the volume is not understood")]
    Unreadable {
        #[source]
        cause: UnreadableRecord,
    },
}
