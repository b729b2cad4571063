//! What can go wrong in publish and unpublish, in words that say what to do next. Codes are chosen in `csi::status`.

use std::path::PathBuf;

use s3csi_core::limits::InvalidLimit;
use s3csi_core::mountpoint_pod::InvalidPodShape;
use s3csi_core::policy::PolicyError;
use s3csi_core::publish::InvalidPublish;

use super::assignment::AssignmentError;
use super::source::SourceError;
use super::strategies::systemd::UnitError;
use crate::host::{FilesError, HostError, Probe};

#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    #[error(transparent)]
    Invalid(InvalidPublish),

    #[error("another call for target {target:?} is still running; kubelet will try again")]
    TargetBusy { target: PathBuf },

    #[error("the mount options of bucket {bucket:?} cannot be used")]
    Options {
        bucket: String,
        #[source]
        cause: PolicyError,
    },

    #[error(
        "Could not mount {bucket:?}: the driver has no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of the \
         node plugin (chart value s3CredentialSecret) or use `authenticationSource: secret` with a nodePublishSecretRef"
    )]
    NoDriverKeys { bucket: String },

    #[error(
        "Could not mount {bucket:?}: the mounter's directory {directory:?} cannot be used; is the mounter running on this node?"
    )]
    MounterDirectory {
        bucket: String,
        directory: PathBuf,
        #[source]
        cause: FilesError,
    },

    #[error("failed to write the credentials of bucket {bucket:?} for the mounter")]
    Credentials {
        bucket: String,
        #[source]
        cause: FilesError,
    },

    #[error("another call for the same source of bucket {bucket:?} did not end in time; kubelet will try again")]
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

    #[error("the volume at {target:?} is {found} although it was just mounted; kubelet will try again")]
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

    #[error("another call for target {target:?} is still running; kubelet will try again")]
    TargetBusy { target: PathBuf },

    #[error("another call for the source of {target:?} did not end in time; kubelet will try again")]
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
        cause: FilesError,
    },
}
