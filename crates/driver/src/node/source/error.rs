//! Why a source could not be mounted or served.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use s3csi_core::FailureCode;
use s3csi_core::text::shortened;
use s3csi_handoff::{EngineFailure, SendError};

use crate::host::{HostError, SafeDirError};
use crate::node::error::MAX_ERROR_BYTES;

#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    #[error("failed to read the mount table")]
    Look {
        #[source]
        cause: HostError,
    },

    #[error("{kind} is mounted at {path:?} and it is not ours; unmount it first: umount {path:?}")]
    ForeignMount { path: PathBuf, kind: String },

    #[error("failed to remove the dead mount at {path:?}")]
    Clear {
        path: PathBuf,
        #[source]
        cause: HostError,
    },

    #[error("failed to create {path:?}")]
    Directory {
        path: PathBuf,
        #[source]
        cause: HostError,
    },

    #[error("no mounter listens at {socket:?} on this node")]
    Unreachable {
        socket: PathBuf,
        #[source]
        cause: SafeDirError,
    },

    #[error("failed to mount FUSE at {path:?}")]
    Mount {
        path: PathBuf,
        #[source]
        cause: HostError,
    },

    #[error("the mount at {path:?} disappeared while it was being handed over; kubelet will retry")]
    Vanished { path: PathBuf },

    #[error("failed to hand the mount over to the mounter")]
    HandOver {
        #[source]
        cause: SendError,
    },

    #[error("the source at {path:?} could not be probed; kubelet will retry")]
    Unknown {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },

    #[error(
        "the engine of the source at {path:?} has not answered for {silence:?}: its S3 store may be slow or away. The mount is \
         kept, its supervisor replaces an engine that is stuck, and kubelet will retry"
    )]
    Silent { path: PathBuf, silence: Duration },

    #[error("the mounter ended while the engine was starting")]
    MounterGone,

    #[error("the engine failed: {}", .failure.message)]
    Engine { failure: EngineFailure },

    #[error("the engine did not answer in time")]
    NoAnswer,

    #[error(
        "the mounter of the source has been gone for {outage:?}; the mount waits for another one for at most {limit:?}"
    )]
    Unserved { outage: Duration, limit: Duration },
}

impl SourceError {
    /// The engine failed. A mounter of an earlier version sends no code; then the message decides.
    pub fn of_engine(message: &str, code: Option<FailureCode>) -> Self {
        let code = code.unwrap_or_else(|| FailureCode::of_message(message));
        Self::Engine { failure: EngineFailure { code, message: shortened(message, MAX_ERROR_BYTES) } }
    }
}
