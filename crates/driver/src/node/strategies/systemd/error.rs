//! Errors of units; their messages say what to do next.

use s3csi_handoff::EngineFailure;

use crate::host::HostError;
use crate::systemd::{Ended, SystemdError};

#[derive(Debug, thiserror::Error)]
pub enum UnitError {
    #[error("systemd cannot be used")]
    Systemd {
        #[source]
        cause: SystemdError,
    },

    #[error("the engine failed: {} (unit {unit}: {ended}); see: journalctl -u {unit}", .failure.message)]
    Engine { unit: String, failure: EngineFailure, ended: Ended },

    #[error("unit {unit} runs, but its mount does not answer; see: systemctl status {unit}")]
    NoAnswer { unit: String },

    #[error(
        "systemd was reloaded while unit {unit} started and may have changed its arguments; it will be started again"
    )]
    Reloaded { unit: String },

    #[error("the mount is in use by {holders}; see who holds it with: fuser -vm")]
    InUse { holders: String },

    #[error("umount failed: {error}")]
    Umount { error: String },

    #[error("failed to read the state of the host")]
    Host {
        #[source]
        cause: HostError,
    },
}
