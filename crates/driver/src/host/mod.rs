//! The privileged module: the only one that calls mount(2) and related system calls, and the only one that opens files in
//! directories that others may write to. It knows nothing about volumes, workloads or CSI.
//!
//! Nothing in here may block forever. A FUSE file system answers only when its server does, so a call either never reaches
//! the file system (each says why) or goes through [`Host::probe`], which has a deadline.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

pub use s3csi_core::mountinfo::{Device, InvalidLine, Mount, MountTable};
pub use s3csi_core::publish::Access;

pub use self::holders::holders;
pub use self::kernel::Kernel;
pub use self::safe_dir::{SafeDir, SafeDirError};

#[doc(hidden)]
pub mod fake;
mod holders;
mod kernel;
mod probe;
mod safe_dir;

/// What the node needs from the machine: [`Kernel`] in production, [`fake::FakeHost`] for failures that a kernel does not
/// produce on demand.
///
/// All calls block briefly; only `probe` waits for another process, and it has a deadline.
pub trait Host: Send + Sync + 'static {
    /// Every mount of our mount namespace, read consistently.
    fn mount_table(&self) -> Result<Arc<MountTable>, HostError>;

    /// The file system of the topmost mount at exactly this path, `None` if there is no mount or no such path. The server of a FUSE
    /// mount is not involved. One question to the kernel, however many mounts there are.
    fn mounted_at(&self, path: &Path) -> Result<Option<Device>, HostError> {
        Ok(self.mount_table()?.at(path).map(|it| it.device))
    }

    /// The path as the mount table spells it: absolute, with the links in the directories before its last component
    /// resolved. The last component may be missing, and is not followed when it is a link.
    fn resolve(&self, path: &Path) -> Result<PathBuf, HostError>;

    /// Mount a new FUSE connection at an existing directory where nothing is mounted yet. The process that reads the
    /// returned descriptor serves it; until then every access to the directory blocks. When the last copy of the
    /// descriptor is closed, the mount stays and is [`Probe::Dead`].
    fn mount_fuse(&self, at: &Path, options: &FuseOptions) -> Result<OwnedFd, HostError>;

    /// Bind-mount `source` to `target`, an existing directory where nothing is mounted yet. A read-only bind is
    /// read-only from the start, also in the mount namespaces that it propagates to.
    fn bind(&self, source: &Path, target: &Path, access: Access) -> Result<(), HostError>;

    /// Bind-mount `source` beneath the topmost mount at `target`, which stays. When that one is detached, the new one appears in
    /// its place without a moment in which the bare directory is visible. Needs Linux 6.5.
    fn bind_beneath(&self, source: &Path, target: &Path, access: Access) -> Result<(), HostError>;

    /// Bind-mount `source` over the topmost mount at `target`, which stays and is covered. The new mount appears wherever that one
    /// propagates to: also in containers that have it as a volume with `HostToContainer`.
    fn bind_over(&self, source: &Path, target: &Path, access: Access) -> Result<(), HostError>;

    /// Remove the topmost mount at a path. Nothing mounted or no such path is success. A mount with open files is
    /// [`HostError::Busy`] and stays; one that cannot be reached by its path is [`HostError::Hidden`].
    fn unmount(&self, at: &Path) -> Result<(), HostError>;

    /// Remove the topmost mount at a path from the tree even if it is in use. Open files go on working for as long
    /// as the file system itself does.
    fn detach(&self, at: &Path) -> Result<(), HostError>;

    /// Abort a FUSE connection: pending requests fail now. Its mounts stay in the table, dead. A connection that is no
    /// longer mounted anywhere is success.
    ///
    /// Processes with failed requests use the mount for a moment longer, so call `detach` next and not `unmount`.
    fn abort(&self, device: Device) -> Result<(), HostError>;

    /// Raise the read-ahead of this FUSE file system, which must already be served.
    fn set_read_ahead(&self, device: Device) -> Result<(), HostError>;

    /// Request the attributes of the root of the file system at a path, waiting until `deadline` at most.
    fn probe(&self, at: &Path, deadline: Instant) -> Probe;

    /// Create a directory with exactly this mode, and missing parents. An existing directory (also a mount point, alive
    /// or not) is left unchanged.
    fn create_directory(&self, path: &Path, mode: u32) -> Result<(), HostError>;

    /// Remove an empty directory; a missing one is success. A mount point is [`HostError::Busy`].
    fn remove_directory(&self, path: &Path) -> Result<(), HostError>;
}

/// How many mounts at one path are removed by one call. Crashes leave two or three; more are a loop of somebody else's, or a mount
/// that does not go away.
pub const MOST_STACKED: usize = 32;

/// How a FUSE connection is mounted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FuseOptions {
    pub access: Access,
    /// Whether users other than root may use it, subject to file permissions.
    pub allow_other: bool,
}

/// The result of a probe.
#[derive(Debug)]
pub enum Probe {
    /// The file system answered. `device` tells whether the answer is from the expected mount or from the directory below it.
    Alive { device: Device },
    /// The mount exists, but the kernel says that its server is gone.
    Dead(io::Error),
    /// The path does not exist.
    Missing,
    /// No answer before the deadline. The server may be slow or stuck; the kernel does not say that it is gone.
    Hung,
    /// The probe could not run, which says nothing about the health of the mount.
    Unknown(io::Error),
}

#[derive(Debug, thiserror::Error)]
pub enum HostError {
    #[error("failed to read the mount table")]
    ReadTable {
        #[source]
        cause: io::Error,
    },

    #[error("the mount table has a malformed line")]
    InvalidTable {
        #[source]
        cause: InvalidLine,
    },

    #[error("failed to resolve path {path:?}")]
    Resolve {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },

    #[error("failed to open directory {path:?}")]
    OpenDirectory {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },

    #[error("something is mounted at {at:?} already")]
    Occupied { at: PathBuf },

    #[error("failed to open /dev/fuse")]
    OpenFuse {
        #[source]
        cause: io::Error,
    },

    #[error("failed to mount a FUSE file system at {at:?}")]
    MountFuse {
        at: PathBuf,
        #[source]
        cause: io::Error,
    },

    #[error("failed to bind {source_path:?} to {target:?}")]
    Bind {
        source_path: PathBuf,
        target: PathBuf,
        #[source]
        cause: io::Error,
    },

    #[error("{at:?} is in use")]
    Busy { at: PathBuf },

    #[error(
        "the mount at {at:?} (device {device}) is hidden below another mount; unmount that one first: findmnt {at:?}"
    )]
    Hidden { at: PathBuf, device: Device },

    #[error("more than {MOST_STACKED} mounts are stacked at {at:?}; see: findmnt {at:?}")]
    TooManyMounts { at: PathBuf },

    #[error("failed to unmount {at:?}")]
    Unmount {
        at: PathBuf,
        #[source]
        cause: io::Error,
    },

    #[error("failed to set the read-ahead of FUSE file system {device}")]
    ReadAhead {
        device: Device,
        #[source]
        cause: io::Error,
    },

    #[error("failed to abort FUSE connection {device}")]
    Abort {
        device: Device,
        #[source]
        cause: io::Error,
    },

    #[error("failed to abort FUSE connection {device}: its mounts are hidden below others")]
    AbortHidden { device: Device },

    #[error("failed to create directory {path:?}")]
    CreateDirectory {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },

    #[error("failed to remove directory {path:?}")]
    RemoveDirectory {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
}

impl fmt::Display for Probe {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Alive { device } => write!(formatter, "alive as device {device}"),
            Self::Dead(cause) => write!(formatter, "dead ({cause})"),
            Self::Missing => formatter.write_str("missing"),
            Self::Hung => formatter.write_str("hung"),
            Self::Unknown(cause) => write!(formatter, "unknown ({cause})"),
        }
    }
}
