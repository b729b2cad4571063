//! The privileged room: the only place that calls mount(2) and its relatives, and the one that opens files in
//! directories we do not trust. It knows nothing about volumes, workloads or CSI.
//!
//! Nothing in here may hang. A FUSE file system answers only when its server does, so every call either never reaches
//! the file system (each says why) or goes through [`Host::probe`], which has a deadline.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Instant;

pub use s3csi_core::publish::Access;

pub use self::files::{Beneath, FilesError};
pub use self::holders::holders;
pub use self::kernel::Kernel;
pub use self::table::{Device, Mount, MountTable, OddLine};

pub mod files;
mod holders;
mod kernel;
mod probe;
mod table;
#[doc(hidden)]
pub mod twin;

/// What the node needs from the machine below it: [`Kernel`] in the product, [`twin::Scripted`] for failures which a
/// kernel does not produce on demand.
///
/// All calls block, but not for long; only `probe` waits for somebody else, and it has a deadline.
pub trait Host: Send + Sync + 'static {
    /// Every mount of our mount namespace, read consistently.
    fn mount_table(&self) -> Result<MountTable, HostError>;

    /// The path as the mount table spells it: absolute, with the links in the directories before its last component
    /// resolved. The last component may be missing, and is not followed when it is a link.
    fn resolve(&self, path: &Path) -> Result<PathBuf, HostError>;

    /// Mount a new FUSE connection at an existing directory where nothing is mounted yet. Whoever reads the returned
    /// descriptor serves it; until somebody does, every access to the directory blocks. When the last copy of it is
    /// closed, the mount stays and is [`Probe::Dead`].
    fn mount_fuse(&self, at: &Path, options: &FuseOptions) -> Result<OwnedFd, HostError>;

    /// Show `source` at `target`, an existing directory where nothing is mounted yet. A read-only bind appears
    /// read-only at once, also in the mount namespaces that receive it by propagation.
    fn bind(&self, source: &Path, target: &Path, access: Access) -> Result<(), HostError>;

    /// Remove the topmost mount at a path. Nothing mounted or no such path: there is nothing to do. A mount with open
    /// files is [`HostError::Busy`] and stays as it was.
    fn unmount(&self, at: &Path) -> Result<(), HostError>;

    /// Remove the topmost mount at a path from the tree even if it is in use. Open files go on working for as long
    /// as the file system itself does.
    fn detach(&self, at: &Path) -> Result<(), HostError>;

    /// End a FUSE connection: whoever waits for it gets an error now. Its mounts stay in the table, dead.
    /// A connection that is mounted nowhere any more needs no end.
    ///
    /// Who waited uses the mount for a moment longer, so `detach` comes next and not `unmount`.
    fn abort(&self, device: Device) -> Result<(), HostError>;

    /// Let the kernel read far ahead of those who read a file of this FUSE file system in order. Somebody must serve it already.
    fn read_far_ahead(&self, device: Device) -> Result<(), HostError>;

    /// Ask the file system at a path for the attributes of its root, waiting until `deadline` at most.
    fn probe(&self, at: &Path, deadline: Instant) -> Probe;

    /// Make a directory with exactly this mode, and the missing ones above it. A directory that exists (also as a
    /// mount point, alive or not) is left as it is.
    fn create_directory(&self, path: &Path, mode: u32) -> Result<(), HostError>;

    /// Remove an empty directory; a missing one is fine. One with a mount on it is [`HostError::Busy`].
    fn remove_directory(&self, path: &Path) -> Result<(), HostError>;
}

/// How a FUSE connection is mounted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FuseOptions {
    pub access: Access,
    /// Whether other users than root may use it, within the permissions of its files.
    pub allow_other: bool,
}

/// What a file system answered.
#[derive(Debug)]
pub enum Probe {
    /// It answered. The device says whose answer it is: the one of a mount in the table, or of the directory below.
    Alive { device: Device },
    /// The mount is there, but nobody serves it any more.
    Dead(io::Error),
    /// There is no such path.
    Missing,
    /// No answer until the deadline. Abort the connection, or the thread which still waits does so for ever.
    Hung,
    /// It could not be asked at all, which says nothing about its health: no reason to abort or detach anything.
    Unknown(io::Error),
}

#[derive(Debug, thiserror::Error)]
pub enum HostError {
    #[error("failed to read the mount table")]
    ReadTable {
        #[source]
        cause: io::Error,
    },

    #[error("the mount table has a line that cannot be understood")]
    OddTable {
        #[source]
        cause: OddLine,
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
