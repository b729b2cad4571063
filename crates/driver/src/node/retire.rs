//! The end of a source that a Mountpoint Pod serves: its mounter is told that the end is meant, then mount, directory and
//! keys go. Never while a workload uses it; then everything stays as it is, and whoever asked comes back later.

use std::path::{Path, PathBuf};

use s3csi_core::chain::Chain;

use super::source;
use super::steps::{Step, Steps};
use crate::credentials;
use crate::host::{Beneath, Host, HostError, Mount};

/// The mounter looks only whether it is there.
const EXIT_FILE_MODE: u32 = 0o640;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retired {
    Now,
    /// There was nothing mounted.
    Before,
    /// Somebody uses it, or what is mounted there is not ours.
    NotYet,
}

#[derive(Debug, thiserror::Error)]
pub enum RetireError {
    #[error("failed to read the mount table")]
    Look {
        #[source]
        cause: HostError,
    },

    #[error("failed to unmount {path:?}")]
    Unmount {
        path: PathBuf,
        #[source]
        cause: HostError,
    },

    #[error("failed to remove {path:?}")]
    Remove {
        path: PathBuf,
        #[source]
        cause: HostError,
    },
}

/// Whoever calls this holds the source's lock. `communication` is the directory shared with the Mountpoint Pod, if that is
/// still there.
pub fn retire(
    host: &dyn Host,
    path: &Path,
    communication: Option<&Beneath>,
    steps: Steps,
) -> Result<Retired, RetireError> {
    let table = host.mount_table().map_err(|cause| RetireError::Look { cause })?;
    let mount = table.at(path);
    let is_free = |it: &Mount| it.is_ours() && source::is_unused(&table, path, it.device);
    if !mount.is_none_or(is_free) {
        return Ok(Retired::NotYet);
    }
    if let Some(communication) = communication {
        // Not before: an engine that dies while it is used is replaced only as long as nobody asked for its end.
        if let Err(error) = communication.create_empty(s3csi_mounter::EXIT_FILE, EXIT_FILE_MODE) {
            tracing::warn!(source = ?path, error = %Chain(&error), "the mounter cannot be told that its end is meant");
        }
        steps.done(Step::ExitAsked);
    }
    if mount.is_some() {
        source::unmount(host, path).map_err(|cause| RetireError::Unmount { path: path.to_owned(), cause })?;
        steps.done(Step::SourceUnmounted);
    }
    host.remove_directory(path).map_err(|cause| RetireError::Remove { path: path.to_owned(), cause })?;
    steps.done(Step::SourceRemoved);
    if let Some(communication) = communication {
        // After the unmount: what was still to be written needed them.
        if let Err(error) = communication.remove_tree(credentials::DIRECTORY) {
            tracing::warn!(source = ?path, error = %Chain(&error), "credentials not removed; they go with the Mountpoint Pod");
        }
        steps.done(Step::CredentialsRemoved);
    }
    Ok(if mount.is_some() { Retired::Now } else { Retired::Before })
}
