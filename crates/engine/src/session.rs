//! The FUSE session: a connection to the kernel, its start and its end.

mod descriptor;
mod init;
mod keeper;
mod mount;
mod stop;

use std::path::PathBuf;

use fuser::{Filesystem, SessionACL};
use mountpoint_s3_fs::fuse::session::FuseSession;

use crate::cli::{self, Arguments};
use crate::state::State;

pub use keeper::{Keeper, KeeperError};
pub use mount::{MountError, MountPoint};
pub use stop::Stop;

/// Who may use the mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Owner,
    OwnerAndRoot,
    Everybody,
}

impl Access {
    pub fn of(arguments: &Arguments) -> Self {
        match (arguments.allow_other, arguments.allow_root) {
            (true, _) => Self::Everybody,
            (false, true) => Self::OwnerAndRoot,
            (false, false) => Self::Owner,
        }
    }
}

/// How the mount point is to be mounted, if it is a directory.
#[derive(Clone, Debug)]
pub struct MountOptions {
    pub access: Access,
    pub is_read_only: bool,
    pub unmounts_itself: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    #[error("cannot mount")]
    Mount(#[source] MountError),

    #[error("the kernel and the engine do not agree on how to talk")]
    Init(#[source] init::InitError),

    #[error("cannot start serving")]
    Serve {
        #[source]
        cause: anyhow::Error,
    },

    #[error("cannot wait for signals")]
    Signals {
        #[source]
        cause: std::io::Error,
    },

    #[error(transparent)]
    Keeper(KeeperError),
}

/// Who else has to do with the mount.
pub struct Succession<'a> {
    pub state: &'a State,
    pub keeper: Option<&'a Keeper>,
}

/// Mounts (if the mount point is a directory), answers the kernel's first question and starts the threads that serve.
/// When it returns, the mount works. Calls `take_over` at the moment from which no other engine serves the mount.
pub fn start(
    files: impl Filesystem + Send + Sync + 'static,
    mount_point: MountPoint,
    options: &MountOptions,
    most_threads: usize,
    succession: &Succession<'_>,
    take_over: impl FnOnce(),
) -> Result<(FuseSession, Stop), SessionError> {
    let access = match options.access {
        // The kernel lets everybody in whom the mount options let in; a descriptor was mounted with options we do not see.
        Access::Everybody => SessionACL::All,
        Access::OwnerAndRoot => SessionACL::RootAndOwner,
        Access::Owner => SessionACL::Owner,
    };
    let connection = mount_point.connect(options).map_err(SessionError::Mount)?;
    let prepared = init::prepare(files, &connection.device, access, succession.state).map_err(SessionError::Init)?;
    // Everything that is slow or can fail is behind us.
    if let Some(keeper) = succession.keeper {
        keeper.wait_for_turn().map_err(SessionError::Keeper)?;
    }
    take_over();
    let session = prepared.attach(&connection.device).map_err(SessionError::Init)?;
    // Every thread reads from the same descriptor: a cloned one would die with this process, and with it the requests that
    // were read through it, even if another engine took over.
    let session =
        FuseSession::from_session(session, most_threads, false).map_err(|cause| SessionError::Serve { cause })?;
    if let Some(keeper) = succession.keeper {
        keeper.report_serving(succession.state).map_err(SessionError::Keeper)?;
    }
    let stop = Stop::on_signals(&session, connection.unmount).map_err(|cause| SessionError::Signals { cause })?;
    Ok((session, stop))
}

/// The mount point that the user asked for, checked as far as possible without mounting.
pub fn mount_point(arguments: &Arguments) -> Result<MountPoint, MountError> {
    match cli::descriptor_of(&arguments.mount_point) {
        Some(number) => MountPoint::from_descriptor(number),
        None => MountPoint::from_directory(PathBuf::from(&arguments.mount_point)),
    }
}
