//! Errors of provisioning to gRPC codes, without `_`: a new error does not compile until someone chose its code.
//!
//! The external-provisioner treats some codes as "may still be in progress" and retries even after the claim was deleted; all
//! others are final for it. Errors that do not resolve by themselves get one of the others.

use s3csi_core::chain::Chain;
use s3csi_core::credentials::InvalidKeys;
use s3csi_core::provision::{InvalidCreateRequest, UnknownVolumeId};
use tonic::{Code, Status};

use super::status::of_driver_credentials;
use crate::provision::error::{CreateError, CredentialsError, DeleteError, LookupError, S3Error, S3ErrorKind};

pub fn of_invalid(error: &InvalidCreateRequest) -> Status {
    let code = match error {
        InvalidCreateRequest::Secret { .. } => Code::Unauthenticated,
        InvalidCreateRequest::NameMissing
        | InvalidCreateRequest::CapabilitiesMissing
        | InvalidCreateRequest::AccessModeMissing
        | InvalidCreateRequest::AccessMode { .. }
        | InvalidCreateRequest::Block
        | InvalidCreateRequest::MountOptions { .. }
        | InvalidCreateRequest::UnusableOptions { .. }
        | InvalidCreateRequest::Conflict { .. }
        | InvalidCreateRequest::PrefixTwice
        | InvalidCreateRequest::ContentSource
        | InvalidCreateRequest::MutableParameters
        | InvalidCreateRequest::Parameters { .. }
        | InvalidCreateRequest::Template { .. }
        | InvalidCreateRequest::BucketName { .. }
        | InvalidCreateRequest::EndpointWithoutSecret
        | InvalidCreateRequest::EndpointWithDriver
        | InvalidCreateRequest::Id { .. } => Code::InvalidArgument,
        InvalidCreateRequest::Capacity { .. } => Code::OutOfRange,
    };
    Status::new(code, Chain(error).to_string())
}

pub fn of_create(error: &CreateError) -> Status {
    let code = match error {
        CreateError::Busy => Code::Aborted,
        CreateError::Credentials(cause) => of_credentials(cause),
        CreateError::DeadlineExceeded => Code::DeadlineExceeded,
        CreateError::ForeignBucket { .. }
        | CreateError::NoMetadata { .. }
        | CreateError::OtherBucket { .. }
        | CreateError::Different { .. }
        | CreateError::Unreadable { .. }
        | CreateError::Overlap { .. } => Code::AlreadyExists,
        CreateError::PrefixNotEmpty { .. } | CreateError::NoSharedBucket { .. } => Code::FailedPrecondition,
        CreateError::Bucket { cause }
        | CreateError::Read { cause }
        | CreateError::Metadata { cause, .. }
        | CreateError::SharedMetadata { cause } => of_s3(cause),
    };
    Status::new(code, Chain(error).to_string())
}

pub fn of_delete(error: &DeleteError) -> Status {
    let code = match error {
        DeleteError::Busy => Code::Aborted,
        DeleteError::Credentials(cause) => of_credentials(cause),
        DeleteError::DeadlineExceeded => Code::DeadlineExceeded,
        DeleteError::Foreign { .. } | DeleteError::NotEmpty { .. } | DeleteError::Unreadable { .. } => {
            Code::FailedPrecondition
        }
        DeleteError::Read { cause }
        | DeleteError::Empty { cause }
        | DeleteError::Metadata { cause }
        | DeleteError::Bucket { cause } => of_s3(cause),
    };
    Status::new(code, Chain(error).to_string())
}

fn of_credentials(error: &CredentialsError) -> Code {
    match error {
        CredentialsError::Missing | CredentialsError::ForeignEndpoint { .. } | CredentialsError::SecretRequired => {
            Code::Unauthenticated
        }
        CredentialsError::Unusable { cause } => of_driver_credentials(cause),
    }
}

pub fn of_lookup(error: &LookupError) -> Status {
    let code = match error {
        LookupError::Credentials(cause) => of_credentials(cause),
        LookupError::DeadlineExceeded => Code::DeadlineExceeded,
        LookupError::Read { cause } => of_s3(cause),
        LookupError::Unreadable { .. } => Code::FailedPrecondition,
    };
    Status::new(code, Chain(error).to_string())
}

fn of_s3(error: &S3Error) -> Code {
    match error.kind {
        S3ErrorKind::UnknownKeys => Code::Unauthenticated,
        S3ErrorKind::Denied => Code::PermissionDenied,
        S3ErrorKind::NoSuchBucket | S3ErrorKind::NoSuchKey => Code::NotFound,
        S3ErrorKind::OwnedByAnotherAccount | S3ErrorKind::AlreadyOwned | S3ErrorKind::KeyExists => Code::AlreadyExists,
        S3ErrorKind::NotEmpty | S3ErrorKind::NotSupported => Code::FailedPrecondition,
        S3ErrorKind::Invalid => Code::InvalidArgument,
        S3ErrorKind::TooManyBuckets => Code::ResourceExhausted,
        S3ErrorKind::Busy | S3ErrorKind::Unreachable => Code::Unavailable,
        S3ErrorKind::Timeout => Code::DeadlineExceeded,
        S3ErrorKind::Other => Code::Internal,
    }
}

pub fn of_secret(cause: &InvalidKeys) -> Status {
    Status::unauthenticated(format!("the secret that came with the request is not usable: {}", Chain(cause)))
}

pub fn volume_id_missing() -> Status {
    Status::invalid_argument("volume ID is required")
}

pub fn capabilities_missing() -> Status {
    Status::invalid_argument("volume capabilities are required")
}

pub fn not_found(error: &UnknownVolumeId) -> Status {
    Status::not_found(Chain(error).to_string())
}

pub fn no_such_volume(id: &str) -> Status {
    Status::not_found(format!("there is no volume {id:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What external-provisioner v5.1.0 does after `CreateVolume` failed (`checkError` in pkg/controller/controller.go).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Fate {
        Success,
        /// Retried until there is a final answer, also if the claim was deleted meanwhile.
        InBackground,
        /// Nothing exists. Retried with back-off while the claim exists.
        Final,
    }

    /// All seventeen.
    const fn fate(code: Code) -> Fate {
        match code {
            Code::Ok => Fate::Success,
            Code::Cancelled | Code::DeadlineExceeded | Code::Unavailable | Code::Aborted => Fate::InBackground,
            Code::Unknown
            | Code::InvalidArgument
            | Code::NotFound
            | Code::AlreadyExists
            | Code::PermissionDenied
            // Only with topology, which we do not announce, would it choose another node.
            | Code::ResourceExhausted
            | Code::FailedPrecondition
            | Code::OutOfRange
            | Code::Unimplemented
            | Code::Internal
            | Code::DataLoss
            | Code::Unauthenticated => Fate::Final,
        }
    }

    fn s3(kind: S3ErrorKind) -> S3Error {
        S3Error { operation: "CreateBucket", bucket: "b".to_owned(), kind, message: "no".to_owned(), code: None }
    }

    const KINDS: [S3ErrorKind; 15] = [
        S3ErrorKind::UnknownKeys,
        S3ErrorKind::Denied,
        S3ErrorKind::NoSuchBucket,
        S3ErrorKind::NoSuchKey,
        S3ErrorKind::OwnedByAnotherAccount,
        S3ErrorKind::AlreadyOwned,
        S3ErrorKind::NotEmpty,
        S3ErrorKind::KeyExists,
        S3ErrorKind::NotSupported,
        S3ErrorKind::Invalid,
        S3ErrorKind::TooManyBuckets,
        S3ErrorKind::Busy,
        S3ErrorKind::Unreachable,
        S3ErrorKind::Timeout,
        S3ErrorKind::Other,
    ];

    #[test]
    fn every_code_has_a_fate() {
        let fates: Vec<Fate> = (0..17).map(|it| fate(Code::from(it))).collect();
        let count = |wanted| fates.iter().filter(|it| **it == wanted).count();
        assert_eq!((count(Fate::Success), count(Fate::InBackground), count(Fate::Final)), (1, 4, 12));
    }

    #[test]
    fn only_transient_errors_are_retried_in_the_background() {
        for kind in KINDS {
            let status = of_create(&CreateError::Bucket { cause: s3(kind) });
            let expected = if kind.is_transient() { Fate::InBackground } else { Fate::Final };
            assert_eq!(fate(status.code()), expected, "{kind:?} is {:?}", status.code());
            assert_eq!(of_delete(&DeleteError::Bucket { cause: s3(kind) }).code(), status.code());
            assert_eq!(of_lookup(&LookupError::Read { cause: s3(kind) }).code(), status.code());
        }
        for passing in [CreateError::Busy, CreateError::DeadlineExceeded] {
            assert_eq!(fate(of_create(&passing).code()), Fate::InBackground, "{passing}");
        }
        let bucket = || "b".to_owned();
        for useless in [
            CreateError::Credentials(CredentialsError::Missing),
            CreateError::OtherBucket { bucket: bucket(), other: bucket() },
            CreateError::ForeignBucket { bucket: bucket(), cause: s3(S3ErrorKind::OwnedByAnotherAccount) },
            CreateError::NoMetadata { bucket: bucket() },
            CreateError::PrefixNotEmpty { bucket: bucket(), prefix: "a/".to_owned() },
            CreateError::NoSharedBucket { cause: s3(S3ErrorKind::NoSuchBucket) },
            CreateError::Overlap { bucket: bucket(), prefix: "a/".to_owned(), other: "other".to_owned() },
        ] {
            assert_eq!(fate(of_create(&useless).code()), Fate::Final, "{useless}");
        }
        for useless in [
            DeleteError::Credentials(CredentialsError::SecretRequired),
            DeleteError::Credentials(CredentialsError::ForeignEndpoint { endpoint: bucket() }),
            DeleteError::Foreign { bucket: bucket() },
            DeleteError::NotEmpty { place: bucket(), what: "x".to_owned() },
        ] {
            assert_eq!(fate(of_delete(&useless).code()), Fate::Final, "{useless}");
        }
    }
}
