//! What can go wrong between us and systemd.

use std::io;
use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub enum SystemdError {
    #[error(
        "systemd does not answer at {socket:?}; is systemd this node's init, and is its directory mounted into the node plugin?"
    )]
    Unreachable {
        socket: PathBuf,
        #[source]
        cause: Option<zbus::Error>,
    },

    #[error("systemd did not answer {call} in time")]
    NoAnswer { call: &'static str },

    #[error("systemd refused {call} of {unit}")]
    Refused {
        call: &'static str,
        unit: String,
        #[source]
        cause: zbus::Error,
    },

    #[error("systemd answered {call} with something else than expected")]
    OddAnswer {
        call: &'static str,
        #[source]
        cause: zbus::Error,
    },

    #[error("no pseudoterminal could be opened at {ptmx:?}; PTMX_PATH must be the host's, for example /host/dev/ptmx")]
    Terminal {
        ptmx: PathBuf,
        #[source]
        cause: io::Error,
    },

    #[error("failed to make up a name for a unit")]
    Random {
        #[source]
        cause: io::Error,
    },
}

/// How one call over one connection failed.
#[derive(Debug)]
pub(super) enum CallError {
    /// The connection is gone. Whether systemd has done what was asked is not known.
    Lost,
    /// systemd said no.
    Refused(zbus::Error),
}

impl CallError {
    pub(super) fn new(error: zbus::Error) -> Self {
        match error {
            zbus::Error::MethodError(..) => Self::Refused(error),
            zbus::Error::FDO(ref fdo) if !matches!(**fdo, zbus::fdo::Error::ZBus(_)) => Self::Refused(error),
            _ => Self::Lost,
        }
    }
}

/// Whether systemd's answer has this error name.
pub(super) fn is_named(error: &zbus::Error, name: &str) -> bool {
    matches!(error, zbus::Error::MethodError(found, ..) if found.as_str() == name)
}
