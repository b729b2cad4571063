//! Errors of provisioning.

use s3csi_core::provision::{RecordDifference, UnreadableRecord};

use crate::credentials::driver::DriverCredentialsError;

/// A failed request to S3, with the store's message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{operation} for bucket {bucket:?} failed: {message}")]
pub struct S3Error {
    pub operation: &'static str,
    pub bucket: String,
    pub kind: S3ErrorKind,
    pub message: String,
    pub code: Option<String>,
}

/// The cause of a failed request, as far as callers act on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum S3ErrorKind {
    /// The keys are unknown or wrong.
    UnknownKeys,
    /// The keys are valid but not allowed to do this.
    Denied,
    NoSuchBucket,
    NoSuchKey,
    OwnedByAnotherAccount,
    AlreadyOwned,
    NotEmpty,
    KeyExists,
    /// The store does not support this operation.
    NotSupported,
    /// The store rejects an argument, for example the region.
    Invalid,
    /// The account has reached its limit of buckets.
    TooManyBuckets,
    /// The store is overloaded or failed: a retry may succeed.
    Busy,
    Unreachable,
    Timeout,
    Other,
}

impl S3Error {
    pub fn code(&self) -> Option<&str> {
        self.code.as_deref()
    }
}

impl S3ErrorKind {
    /// By S3's error code; if there is none (responses to HEAD) or an unknown one, by the HTTP status.
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
            "BucketAlreadyExists" => Self::OwnedByAnotherAccount,
            "BucketAlreadyOwnedByYou" => Self::AlreadyOwned,
            "BucketNotEmpty" => Self::NotEmpty,
            "ConditionalRequestConflict" | "PreconditionFailed" => Self::KeyExists,
            "MethodNotAllowed" | "NotImplemented" | "XNotImplemented" => Self::NotSupported,
            "IllegalLocationConstraintException" | "InvalidBucketName" | "InvalidLocationConstraint" | "InvalidTag" => {
                Self::Invalid
            }
            "TooManyBuckets" => Self::TooManyBuckets,
            "InternalError" | "OperationAborted" | "RequestTimeout" | "ServiceUnavailable" | "SlowDown" => Self::Busy,
            _ => return None,
        })
    }

    /// Whether a retry may succeed.
    pub const fn is_transient(self) -> bool {
        matches!(self, Self::Busy | Self::Unreachable | Self::Timeout)
    }
}

/// Why a request must not be sent with the driver's keys.
#[derive(Debug, thiserror::Error)]
pub enum CredentialsError {
    #[error(
        "the request has no provisioner secret and the driver has no keys: name a secret in the StorageClass, or create the driver's Secret (chart value s3CredentialSecret)"
    )]
    Missing,

    #[error("the driver's credentials cannot be used")]
    Unusable {
        #[source]
        cause: DriverCredentialsError,
    },

    #[error(
        "the volume is in the store {endpoint}, and the request has no provisioner secret; the driver's keys are never sent to another store: restore the secret that the volume was created with"
    )]
    ForeignEndpoint { endpoint: String },

    #[error(
        "the volume was created with a provisioner secret, and the request has none; the driver's keys are never used instead: restore the secret that the volume was created with"
    )]
    SecretRequired,
}

#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    #[error("another call is in progress for this volume")]
    Busy,

    #[error(transparent)]
    Credentials(CredentialsError),

    #[error("the volume was not created in time; the next call continues")]
    DeadlineExceeded,

    #[error("failed to create the bucket")]
    Bucket {
        #[source]
        cause: S3Error,
    },

    #[error("bucket {bucket:?} exists and belongs to another account; it is not used")]
    ForeignBucket {
        bucket: String,
        #[source]
        cause: S3Error,
    },

    #[error("bucket {bucket:?} exists, contains objects and has no metadata of ours; it is not used")]
    NoMetadata { bucket: String },

    #[error(
        "the volume's bucket would be {bucket:?}, but it has bucket {other:?} already: restore parameter bucketNamePrefix of the StorageClass, or delete that bucket"
    )]
    OtherBucket { bucket: String, other: String },

    #[error("failed to read what exists")]
    Read {
        #[source]
        cause: S3Error,
    },

    #[error("failed to write the volume's metadata to bucket {bucket:?}")]
    Metadata {
        bucket: String,
        #[source]
        cause: S3Error,
    },

    #[error("failed to write the volume's metadata to the shared bucket")]
    SharedMetadata {
        #[source]
        cause: S3Error,
    },

    #[error("a volume of this name exists with other parameters")]
    Different {
        #[source]
        cause: RecordDifference,
    },

    #[error("a volume of this name exists")]
    Unreadable {
        #[source]
        cause: UnreadableRecord,
    },

    #[error("the shared bucket does not exist: create it, or correct parameter bucket of the StorageClass")]
    NoSharedBucket {
        #[source]
        cause: S3Error,
    },

    #[error("prefix {prefix:?} of bucket {bucket:?} overlaps with that of volume {other}: change prefixTemplate")]
    Overlap { bucket: String, prefix: String, other: String },

    #[error(
        "prefix {prefix:?} of bucket {bucket:?} contains objects that belong to no volume; with onDelete delete-all they would be deleted with the volume: choose another prefixTemplate or policy"
    )]
    PrefixNotEmpty { bucket: String, prefix: String },
}

#[derive(Debug, thiserror::Error)]
pub enum DeleteError {
    #[error("another call is in progress for this volume")]
    Busy,

    #[error(transparent)]
    Credentials(CredentialsError),

    #[error("the volume was not deleted in time; the next call continues")]
    DeadlineExceeded,

    #[error("bucket {bucket:?} was not created by this driver; it is not deleted")]
    Foreign { bucket: String },

    #[error(
        "{place} is not empty ({what}), and the volume's onDelete is delete-if-empty: remove what is in it, or the PersistentVolume by hand"
    )]
    NotEmpty { place: String, what: String },

    #[error("failed to read what exists")]
    Read {
        #[source]
        cause: S3Error,
    },

    #[error("nothing is deleted")]
    Unreadable {
        #[source]
        cause: UnreadableRecord,
    },

    #[error("failed to delete the volume's data")]
    Empty {
        #[source]
        cause: S3Error,
    },

    #[error("failed to delete the volume's metadata")]
    Metadata {
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
pub enum LookupError {
    #[error(transparent)]
    Credentials(CredentialsError),

    #[error("the store did not answer in time")]
    DeadlineExceeded,

    #[error("failed to read what exists")]
    Read {
        #[source]
        cause: S3Error,
    },

    #[error("the volume's metadata cannot be used")]
    Unreadable {
        #[source]
        cause: UnreadableRecord,
    },
}
