//! Retires the source of a Mountpoint Pod: writes the exit file for its mounter, then removes mount, directory and keys. A
//! source in use is left unchanged, and the caller retries later.

use std::path::{Path, PathBuf};

use s3csi_core::chain::Chain;

use super::failpoints::{Failpoint, Failpoints};
use super::held_mounts::HeldMounts;
use super::source;
use crate::credentials;
use crate::host::{Host, HostError, Mount, SafeDir};

/// The mounter only checks whether it exists.
pub const EXIT_FILE_MODE: u32 = 0o640;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetireOutcome {
    Unmounted,
    /// Nothing was mounted.
    NotMounted,
    /// It is in use, or the mount is not ours.
    InUse,
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

/// The caller holds the source's lock. `communication` is the directory shared with the Mountpoint Pod, if it still exists.
pub fn retire(
    host: &dyn Host,
    held_mounts: &HeldMounts,
    path: &Path,
    communication: Option<&SafeDir>,
    failpoints: Failpoints,
) -> Result<RetireOutcome, RetireError> {
    let table = host.mount_table().map_err(|cause| RetireError::Look { cause })?;
    let mount = table.at(path);
    let is_free = |it: &Mount| it.is_ours() && source::is_unused(&table, path, it.device);
    if !mount.is_none_or(is_free) {
        return Ok(RetireOutcome::InUse);
    }
    if let Some(communication) = communication {
        // Not earlier: the mounter does not restart an engine that dies after the exit file was written.
        if let Err(error) = communication.create_empty(s3csi_handoff::EXIT_FILE, EXIT_FILE_MODE) {
            tracing::warn!(source = ?path, error = %Chain(&error), "failed to write the exit file of the mounter");
        }
        failpoints.hit(Failpoint::ExitAsked);
    }
    if mount.is_some() {
        source::unmount(host, held_mounts, path)
            .map_err(|cause| RetireError::Unmount { path: path.to_owned(), cause })?;
        failpoints.hit(Failpoint::SourceUnmounted);
    }
    host.remove_directory(path).map_err(|cause| RetireError::Remove { path: path.to_owned(), cause })?;
    failpoints.hit(Failpoint::SourceRemoved);
    if let Some(communication) = communication {
        // After the unmount: the engine needs them to upload what is still buffered.
        if let Err(error) = communication.remove_tree(credentials::DIRECTORY) {
            tracing::warn!(source = ?path, error = %Chain(&error), "credentials not removed; they are deleted with the Mountpoint Pod");
        }
        failpoints.hit(Failpoint::CredentialsRemoved);
    }
    Ok(if mount.is_some() { RetireOutcome::Unmounted } else { RetireOutcome::NotMounted })
}
