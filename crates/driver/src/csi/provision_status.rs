//! Errors of provisioning to gRPC codes, without `_`: a new error does not compile until someone chose its code.
//!
//! The external-provisioner takes some codes for "perhaps it is still being made" and goes on asking even after the claim was
//! deleted; all others are final for it. So whatever does not pass by itself gets one of the others.

use s3csi_core::chain::Chain;
use s3csi_core::credentials::InvalidKeys;
use s3csi_core::provision::{ForeignId, InvalidCreate};
use tonic::{Code, Status};

use crate::provision::error::{CreateError, DeleteError, FindError, Kind, S3Error};

pub fn of_invalid(error: &InvalidCreate) -> Status {
    let code = match error {
        InvalidCreate::Secret { .. } => Code::Unauthenticated,
        InvalidCreate::NameMissing
        | InvalidCreate::CapabilitiesMissing
        | InvalidCreate::AccessModeMissing
        | InvalidCreate::AccessMode { .. }
        | InvalidCreate::Block
        | InvalidCreate::MountOptions { .. }
        | InvalidCreate::UnusableOptions { .. }
        | InvalidCreate::Conflict { .. }
        | InvalidCreate::PrefixTwice
        | InvalidCreate::ContentSource
        | InvalidCreate::MutableParameters
        | InvalidCreate::Parameters { .. }
        | InvalidCreate::Template { .. }
        | InvalidCreate::BucketName { .. }
        | InvalidCreate::EndpointWithoutSecret
        | InvalidCreate::EndpointWithDriver
        | InvalidCreate::Id { .. } => Code::InvalidArgument,
        InvalidCreate::Capacity { .. } => Code::OutOfRange,
    };
    Status::new(code, Chain(error).to_string())
}

pub fn of_create(error: &CreateError) -> Status {
    let code = match error {
        CreateError::Busy => Code::Aborted,
        CreateError::NoKeys => Code::Unauthenticated,
        CreateError::Late => Code::DeadlineExceeded,
        CreateError::ForeignBucket { .. }
        | CreateError::NotMarked { .. }
        | CreateError::Different { .. }
        | CreateError::Unreadable { .. }
        | CreateError::Overlap { .. } => Code::AlreadyExists,
        CreateError::PrefixNotEmpty { .. } | CreateError::NoSharedBucket { .. } => Code::FailedPrecondition,
        CreateError::Bucket { cause }
        | CreateError::Look { cause }
        | CreateError::Note { cause, .. }
        | CreateError::SharedNote { cause } => of_s3(cause),
    };
    Status::new(code, Chain(error).to_string())
}

pub fn of_delete(error: &DeleteError) -> Status {
    let code = match error {
        DeleteError::Busy => Code::Aborted,
        DeleteError::NoKeys => Code::Unauthenticated,
        DeleteError::Late => Code::DeadlineExceeded,
        DeleteError::Foreign { .. } | DeleteError::NotEmpty { .. } | DeleteError::Unreadable { .. } => {
            Code::FailedPrecondition
        }
        DeleteError::Look { cause }
        | DeleteError::Empty { cause }
        | DeleteError::Note { cause }
        | DeleteError::Bucket { cause } => of_s3(cause),
    };
    Status::new(code, Chain(error).to_string())
}

pub fn of_find(error: &FindError) -> Status {
    let code = match error {
        FindError::NoKeys => Code::Unauthenticated,
        FindError::Late => Code::DeadlineExceeded,
        FindError::Look { cause } => of_s3(cause),
        FindError::Unreadable { .. } => Code::FailedPrecondition,
    };
    Status::new(code, Chain(error).to_string())
}

fn of_s3(error: &S3Error) -> Code {
    match error.kind {
        Kind::UnknownKeys => Code::Unauthenticated,
        Kind::Denied => Code::PermissionDenied,
        Kind::NoSuchBucket | Kind::NoSuchKey => Code::NotFound,
        Kind::Foreign | Kind::OwnedBefore | Kind::Taken => Code::AlreadyExists,
        Kind::NotEmpty | Kind::NotSupported => Code::FailedPrecondition,
        Kind::Invalid => Code::InvalidArgument,
        Kind::TooMany => Code::ResourceExhausted,
        Kind::Busy | Kind::Unreachable => Code::Unavailable,
        Kind::Late => Code::DeadlineExceeded,
        Kind::Other => Code::Internal,
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

pub fn not_found(error: &ForeignId) -> Status {
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
        /// It asks again until it hears a final answer, also if the claim was deleted meanwhile.
        InBackground,
        /// Nothing exists, as far as it is concerned. It asks again only while the claim is there, ever more rarely.
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

    fn s3(kind: Kind) -> S3Error {
        S3Error { operation: "CreateBucket", bucket: "b".to_owned(), kind, said: "no".to_owned(), code: None }
    }

    const KINDS: [Kind; 15] = [
        Kind::UnknownKeys,
        Kind::Denied,
        Kind::NoSuchBucket,
        Kind::NoSuchKey,
        Kind::Foreign,
        Kind::OwnedBefore,
        Kind::NotEmpty,
        Kind::Taken,
        Kind::NotSupported,
        Kind::Invalid,
        Kind::TooMany,
        Kind::Busy,
        Kind::Unreachable,
        Kind::Late,
        Kind::Other,
    ];

    #[test]
    fn every_code_has_a_fate() {
        let fates: Vec<Fate> = (0..17).map(|it| fate(Code::from(it))).collect();
        let count = |wanted| fates.iter().filter(|it| **it == wanted).count();
        assert_eq!((count(Fate::Success), count(Fate::InBackground), count(Fate::Final)), (1, 4, 12));
    }

    #[test]
    fn only_what_passes_by_itself_is_asked_for_again_and_again() {
        for kind in KINDS {
            let status = of_create(&CreateError::Bucket { cause: s3(kind) });
            let expected = if kind.passes() { Fate::InBackground } else { Fate::Final };
            assert_eq!(fate(status.code()), expected, "{kind:?} is {:?}", status.code());
            assert_eq!(of_delete(&DeleteError::Bucket { cause: s3(kind) }).code(), status.code());
            assert_eq!(of_find(&FindError::Look { cause: s3(kind) }).code(), status.code());
        }
        for passing in [CreateError::Busy, CreateError::Late] {
            assert_eq!(fate(of_create(&passing).code()), Fate::InBackground, "{passing}");
        }
        let bucket = || "b".to_owned();
        for useless in [
            CreateError::NoKeys,
            CreateError::ForeignBucket { bucket: bucket(), cause: s3(Kind::Foreign) },
            CreateError::NotMarked { bucket: bucket() },
            CreateError::PrefixNotEmpty { bucket: bucket(), prefix: "a/".to_owned() },
            CreateError::NoSharedBucket { cause: s3(Kind::NoSuchBucket) },
            CreateError::Overlap { bucket: bucket(), prefix: "a/".to_owned(), other: "other".to_owned() },
        ] {
            assert_eq!(fate(of_create(&useless).code()), Fate::Final, "{useless}");
        }
        for useless in [
            DeleteError::NoKeys,
            DeleteError::Foreign { bucket: bucket() },
            DeleteError::NotEmpty { place: bucket(), what: "x".to_owned() },
        ] {
            assert_eq!(fate(of_delete(&useless).code()), Fate::Final, "{useless}");
        }
    }
}
