//! What can go wrong with a unit, in words that say what to do next.

use crate::host::HostError;
use crate::systemd::{Ended, SystemdError};

#[derive(Debug, thiserror::Error)]
pub enum UnitError {
    #[error("systemd cannot be used")]
    Systemd {
        #[source]
        cause: SystemdError,
    },

    #[error("the engine failed: {words} (unit {unit}: {ended}); see: journalctl -u {unit}")]
    Engine { unit: String, words: String, ended: Ended },

    #[error("unit {unit} runs, but its mount does not answer; see: systemctl status {unit}")]
    NoAnswer { unit: String },

    #[error("systemd was reloaded while unit {unit} started and may have changed its arguments; it is started again")]
    Reloaded { unit: String },

    #[error("the mount is in use by {holders}; see who holds it with: fuser -vm")]
    InUse { holders: String },

    #[error("umount failed: {words}")]
    Umount { words: String },

    #[error("the host cannot be looked at")]
    Host {
        #[source]
        cause: HostError,
    },
}
