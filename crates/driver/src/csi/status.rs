//! Errors to gRPC codes, without `_`: a new error does not compile until someone chose its code.

use s3csi_core::FailureCode;
use s3csi_core::chain::Chain;
use s3csi_core::publish::InvalidPublish;
use tonic::{Code, Status};

use crate::credentials::driver::DriverCredentialsError;
use crate::credentials::workload::WorkloadCredentialsError;
use crate::node::assignment::AssignmentError;
use crate::node::error::{PublishError, UnpublishError};
use crate::node::health::HealthError;
use crate::node::source::SourceError;
use crate::node::strategies::systemd::UnitError;
use crate::systemd::SystemdError;

pub fn of_publish(error: &PublishError) -> Status {
    let code = match error {
        PublishError::Invalid(cause) => of_invalid(cause),
        PublishError::TargetBusy { .. } => Code::Aborted,
        PublishError::Options { .. } | PublishError::Limits { .. } | PublishError::Shape { .. } => {
            Code::InvalidArgument
        }
        PublishError::NoDriverKeys { .. } => Code::Unauthenticated,
        PublishError::DriverKeys { cause, .. } => of_driver_credentials(cause),
        PublishError::WorkloadKeys { cause, .. } => of_workload_credentials(cause),
        PublishError::Credentials { .. }
        | PublishError::EngineDirectory { .. }
        | PublishError::Look { .. }
        | PublishError::Bind { .. }
        | PublishError::Target { .. } => Code::Internal,
        PublishError::MounterDirectory { .. } | PublishError::NotServed { .. } | PublishError::Silent { .. } => {
            Code::Unavailable
        }
        PublishError::Assignment { cause, .. } => of_assignment(cause),
        PublishError::SourceBusy { .. } => Code::DeadlineExceeded,
        PublishError::ForeignMount { .. } | PublishError::CaBundle { .. } => Code::FailedPrecondition,
        PublishError::Source { cause, .. } => of_source(cause),
        PublishError::Unit { cause, .. } => of_unit(cause),
    };
    Status::new(code, Chain(error).to_string())
}

pub fn of_driver_credentials(error: &DriverCredentialsError) -> Code {
    match error {
        DriverCredentialsError::Issuer { cause, .. } if cause.is_transient() => Code::Unavailable,
        DriverCredentialsError::Issuer { .. }
        | DriverCredentialsError::Read { .. }
        | DriverCredentialsError::Invalid { .. }
        | DriverCredentialsError::Profile { .. } => Code::Unauthenticated,
    }
}

fn of_workload_credentials(error: &WorkloadCredentialsError) -> Code {
    match error {
        WorkloadCredentialsError::Issuer { cause, .. } if cause.is_transient() => Code::Unavailable,
        WorkloadCredentialsError::ServiceAccount { .. } => Code::Unavailable,
        WorkloadCredentialsError::Issuer { .. }
        | WorkloadCredentialsError::Disabled
        | WorkloadCredentialsError::Malformed
        | WorkloadCredentialsError::NoToken { .. }
        | WorkloadCredentialsError::OtherSubject { .. }
        | WorkloadCredentialsError::Annotation { .. }
        | WorkloadCredentialsError::NoRole { .. } => Code::Unauthenticated,
    }
}

fn of_invalid(invalid: &InvalidPublish) -> Code {
    match invalid {
        InvalidPublish::Credentials { .. } | InvalidPublish::Token { .. } => Code::Unauthenticated,
        InvalidPublish::VolumeIdMissing
        | InvalidPublish::BucketNameMissing
        | InvalidPublish::BucketName { .. }
        | InvalidPublish::TargetPathMissing
        | InvalidPublish::TargetPath { .. }
        | InvalidPublish::CapabilityMissing
        | InvalidPublish::AccessMode { .. }
        | InvalidPublish::Block
        | InvalidPublish::MountOptions { .. }
        | InvalidPublish::ReadOnlyWithValue { .. }
        | InvalidPublish::OwnedByRoot { .. }
        | InvalidPublish::Prefix { .. }
        | InvalidPublish::ReservedPrefix { .. }
        | InvalidPublish::PrefixTwice
        | InvalidPublish::Endpoint { .. }
        | InvalidPublish::EndpointWithoutSecret
        | InvalidPublish::Connection { .. }
        | InvalidPublish::WithoutOwnKeys { .. }
        | InvalidPublish::SecretCertificates { .. }
        | InvalidPublish::PathStyleWithArn
        | InvalidPublish::Inline { .. }
        | InvalidPublish::FsGroup { .. }
        | InvalidPublish::RoleArn { .. }
        | InvalidPublish::AuthenticationSource { .. } => Code::InvalidArgument,
    }
}

/// All of these resolve when another component has done its part, so kubelet retries.
fn of_assignment(error: &AssignmentError) -> Code {
    match error {
        AssignmentError::NotSynced { .. }
        | AssignmentError::NotAssigned { .. }
        | AssignmentError::Gone { .. }
        | AssignmentError::NotScheduled { .. }
        | AssignmentError::Elsewhere { .. }
        | AssignmentError::NotRunning { .. }
        | AssignmentError::Ended { .. }
        | AssignmentError::Leaving { .. } => Code::Unavailable,
    }
}

fn of_source(error: &SourceError) -> Code {
    match error {
        SourceError::Unreachable { .. }
        | SourceError::MounterGone
        | SourceError::HandOver { .. }
        | SourceError::Vanished { .. }
        | SourceError::Silent { .. }
        | SourceError::Unserved { .. }
        | SourceError::Unknown { .. } => Code::Unavailable,
        SourceError::Engine { failure } => of_engine(failure.code),
        SourceError::NoAnswer => Code::DeadlineExceeded,
        SourceError::ForeignMount { .. } => Code::FailedPrecondition,
        SourceError::Look { .. }
        | SourceError::Mount { .. }
        | SourceError::Directory { .. }
        | SourceError::Clear { .. } => Code::Internal,
    }
}

fn of_engine(code: FailureCode) -> Code {
    match code {
        FailureCode::UnknownKey | FailureCode::NoCredentials => Code::Unauthenticated,
        FailureCode::Forbidden => Code::PermissionDenied,
        FailureCode::NoSuchBucket => Code::NotFound,
        FailureCode::Unreachable | FailureCode::Certificate => Code::Unavailable,
        FailureCode::InvalidResponse => Code::FailedPrecondition,
        FailureCode::BadArguments => Code::InvalidArgument,
        FailureCode::Other => Code::Internal,
    }
}

fn of_unit(error: &UnitError) -> Code {
    match error {
        UnitError::Systemd { cause } => match cause {
            SystemdError::Unreachable { .. } => Code::Unavailable,
            SystemdError::NoAnswer { .. } => Code::DeadlineExceeded,
            SystemdError::Refused { .. }
            | SystemdError::InvalidAnswer { .. }
            | SystemdError::Terminal { .. }
            | SystemdError::OutputLink { .. } => Code::Internal,
        },
        // systemd ended a start that took too long; the engine may not have said a word.
        UnitError::Engine { ended, .. } if ended.result.as_deref() == Some("timeout") => Code::DeadlineExceeded,
        UnitError::Engine { failure, .. } => of_engine(failure.code),
        UnitError::NoAnswer { .. } | UnitError::Reloaded { .. } => Code::Unavailable,
        UnitError::InUse { .. } => Code::FailedPrecondition,
        UnitError::Umount { .. } | UnitError::Host { .. } => Code::Internal,
    }
}

pub fn of_unpublish(error: &UnpublishError) -> Status {
    let code = match error {
        UnpublishError::VolumeIdMissing | UnpublishError::TargetMissing | UnpublishError::TargetRelative { .. } => {
            Code::InvalidArgument
        }
        UnpublishError::TargetBusy { .. } => Code::Aborted,
        UnpublishError::SourceBusy { .. } => Code::DeadlineExceeded,
        UnpublishError::Unit { cause, .. } => of_unit(cause),
        UnpublishError::ForeignMount { .. } | UnpublishError::InUse { .. } => Code::FailedPrecondition,
        UnpublishError::Look { .. }
        | UnpublishError::Unmount { .. }
        | UnpublishError::Remove { .. }
        | UnpublishError::Forget { .. } => Code::Internal,
    };
    Status::new(code, Chain(error).to_string())
}

pub fn of_health(error: &HealthError) -> Status {
    let code = match error {
        HealthError::VolumeIdMissing | HealthError::PathMissing => Code::InvalidArgument,
        HealthError::NotMounted { .. } => Code::NotFound,
        HealthError::Look { .. } => Code::Internal,
    };
    Status::new(code, Chain(error).to_string())
}

/// The code of an outcome as the gRPC specification writes it.
pub fn name(error: Option<&Status>) -> &'static str {
    match error.map_or(Code::Ok, Status::code) {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}

pub fn unimplemented(method: &str) -> Status {
    Status::unimplemented(format!("{method} is not part of this driver's announced capabilities"))
}
