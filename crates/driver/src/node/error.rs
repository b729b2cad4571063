//! Errors of publish and unpublish; their messages say what to do next. gRPC codes are chosen in `csi::status`.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use s3csi_core::limits::InvalidLimit;
use s3csi_core::mountpoint_pod::InvalidPodShape;
use s3csi_core::policy::PolicyError;
use s3csi_core::publish::InvalidPublish;

use super::assignment::AssignmentError;
use super::source::SourceError;
use super::strategies::systemd::UnitError;
use crate::credentials::CaBundleError;
use crate::credentials::driver::DriverCredentialsError;
use crate::credentials::workload::WorkloadCredentialsError;
use crate::host::{HostError, Probe, SafeDirError};

/// The error output of an engine in one of our messages: enough for the cause, too short for a log.
pub const MAX_ERROR_BYTES: usize = 4 << 10;

#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    #[error(transparent)]
    Invalid(InvalidPublish),

    #[error("another call for target {target:?} is still running; kubelet will retry")]
    TargetBusy { target: PathBuf },

    #[error("the mount options of bucket {bucket:?} cannot be used")]
    Options {
        bucket: String,
        #[source]
        cause: PolicyError,
    },

    #[error(
        "Could not mount {bucket:?}: the driver has no credentials; create its Secret (chart value s3CredentialSecret) with \
         access_key_id and secret_access_key, or use `authenticationSource: secret` with a nodePublishSecretRef"
    )]
    NoDriverKeys { bucket: String },

    #[error("Could not mount {bucket:?}: the driver's credentials cannot be used")]
    DriverKeys {
        bucket: String,
        #[source]
        cause: DriverCredentialsError,
    },

    #[error("Could not mount {bucket:?}: the CA certificates for engines cannot be used")]
    CaBundle {
        bucket: String,
        #[source]
        cause: CaBundleError,
    },

    #[error("Could not mount {bucket:?}: the Pod's own identity gives no credentials")]
    WorkloadKeys {
        bucket: String,
        #[source]
        cause: Arc<WorkloadCredentialsError>,
    },

    #[error(
        "Could not mount {bucket:?}: the mounter's directory {directory:?} cannot be used; is the mounter running on this node?"
    )]
    MounterDirectory {
        bucket: String,
        directory: PathBuf,
        #[source]
        cause: SafeDirError,
    },

    #[error("failed to write the credentials of bucket {bucket:?} for the mounter")]
    Credentials {
        bucket: String,
        #[source]
        cause: SafeDirError,
    },

    #[error("failed to create the cache or staging directory of bucket {bucket:?}")]
    EngineDirectory {
        bucket: String,
        #[source]
        cause: io::Error,
    },

    #[error("another call for the same source of bucket {bucket:?} did not end in time; kubelet will retry")]
    SourceBusy { bucket: String },

    #[error("Could not mount {bucket:?} at {target:?} (more in: {hint})")]
    Source {
        bucket: String,
        target: PathBuf,
        /// The command that shows more.
        hint: String,
        #[source]
        cause: SourceError,
    },

    #[error("Could not mount {bucket:?} at {target:?}")]
    Unit {
        bucket: String,
        target: PathBuf,
        #[source]
        cause: UnitError,
    },

    #[error("Could not mount {bucket:?} at {target:?}")]
    Assignment {
        bucket: String,
        target: PathBuf,
        #[source]
        cause: AssignmentError,
    },

    #[error("the volume attributes for Mountpoint Pods cannot be used")]
    Shape {
        #[source]
        cause: InvalidPodShape,
    },

    #[error("the resource limits of the volume cannot be used")]
    Limits {
        #[source]
        cause: InvalidLimit,
    },

    #[error("failed to read the mount table")]
    Look {
        #[source]
        cause: HostError,
    },

    #[error("{kind} ({device}) is mounted at {target:?} and it is not ours; unmount it first: umount {target:?}")]
    ForeignMount { target: PathBuf, kind: String, device: String },

    #[error("failed to prepare the target directory {target:?}")]
    Target {
        target: PathBuf,
        #[source]
        cause: HostError,
    },

    #[error("failed to bind {source_path:?} to {target:?}")]
    Bind {
        source_path: PathBuf,
        target: PathBuf,
        #[source]
        cause: HostError,
    },

    #[error(
        "the engine of the volume at {target:?} has not answered for {silence:?}: its S3 store may be slow or away. The mount is \
         kept and its credentials are refreshed; kubelet will retry"
    )]
    Silent { target: PathBuf, silence: Duration },

    #[error("the volume at {target:?} is {found} although it was just mounted; kubelet will retry")]
    NotServed { target: PathBuf, found: Probe },
}

#[derive(Debug, thiserror::Error)]
pub enum UnpublishError {
    #[error("Volume ID not provided")]
    VolumeIdMissing,

    #[error("Target path not provided")]
    TargetMissing,

    #[error("target path {target:?} is not absolute")]
    TargetRelative { target: PathBuf },

    #[error("another call for target {target:?} is still running; kubelet will retry")]
    TargetBusy { target: PathBuf },

    #[error("another call for the source of {target:?} did not end in time; kubelet will retry")]
    SourceBusy { target: PathBuf },

    #[error("failed to read the mount table")]
    Look {
        #[source]
        cause: HostError,
    },

    #[error("Could not unmount {target:?}: {kind} is mounted there and it is not ours")]
    ForeignMount { target: PathBuf, kind: String },

    #[error("Could not unmount {target:?}: it is in use; see who holds it with: fuser -vm {target:?}")]
    InUse {
        target: PathBuf,
        #[source]
        cause: HostError,
    },

    #[error("Could not unmount {target:?}")]
    Unmount {
        target: PathBuf,
        #[source]
        cause: HostError,
    },

    #[error("Could not unmount {target:?}")]
    Unit {
        target: PathBuf,
        #[source]
        cause: UnitError,
    },

    #[error("failed to remove {path:?}")]
    Remove {
        path: PathBuf,
        #[source]
        cause: HostError,
    },

    #[error("failed to remove the credentials of source {source_name}")]
    Forget {
        source_name: String,
        #[source]
        cause: SafeDirError,
    },
}
