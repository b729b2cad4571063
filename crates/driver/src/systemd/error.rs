//! Errors of calls to systemd.

use std::io;
use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub enum SystemdError {
    #[error(
        "systemd does not answer at {socket:?}; check that systemd is the init of this node and that its directory is mounted into the node plugin"
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

    #[error("systemd sent an unexpected reply to {call}")]
    InvalidAnswer {
        call: &'static str,
        #[source]
        cause: zbus::Error,
    },

    #[error("failed to open a pseudoterminal at {ptmx:?}; PTMX_PATH must be the host's, for example /host/dev/ptmx")]
    Terminal {
        ptmx: PathBuf,
        #[source]
        cause: io::Error,
    },

    #[error("failed to create the link {path:?}; check that HOST_PLUGIN_DIR is writable")]
    OutputLink {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
}

/// Why a call over one connection failed.
#[derive(Debug)]
pub(super) enum BusCallError {
    /// The connection was lost; whether systemd carried out the call is unknown.
    Lost,
    /// systemd returned an error.
    Refused(zbus::Error),
}

impl BusCallError {
    pub(super) fn new(error: zbus::Error) -> Self {
        match error {
            zbus::Error::MethodError(..) => Self::Refused(error),
            zbus::Error::FDO(ref fdo) if !matches!(**fdo, zbus::fdo::Error::ZBus(_)) => Self::Refused(error),
            _ => Self::Lost,
        }
    }
}

/// Whether the D-Bus error has this name.
pub(super) fn is_named(error: &zbus::Error, name: &str) -> bool {
    matches!(error, zbus::Error::MethodError(found, ..) if found.as_str() == name)
}
