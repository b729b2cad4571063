//! The FUSE session: a connection to the kernel, its start and its end.

mod descriptor;
mod init;
mod keeper;
mod mount;
mod stop;

use std::path::PathBuf;

use fuser::{Filesystem, SessionACL};
use mountpoint_s3_fs::fuse::session::FuseSession;

use crate::cli::{self, Arguments, Environment};
use crate::state::{Loss, Noted, State};

use init::Unanswered;

pub use keeper::{Keeper, KeeperError};
pub use mount::{MountError, MountPoint, Unmount};
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
    pub heir: &'a dyn Heir,
    pub resending: Resending,
}

/// Whoever goes on where the engine before stopped.
pub trait Heir {
    /// From now on no other engine serves the mount.
    fn take_over(&self);

    /// Nobody will hear of these requests again. Called before they are answered.
    fn write_off(&self, lost: &[Noted]);
}

/// Somebody who knows of no engine before.
impl Heir for () {
    fn take_over(&self) {}

    fn write_off(&self, _: &[Noted]) {}
}

/// Whether the kernel is asked to send requests again that the engine before had read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resending {
    IfPossible,
    /// As on kernels that cannot.
    Never,
}

/// Mounts (if the mount point is a directory), answers the kernel's first question and starts the threads that serve.
/// When it returns, the mount works.
pub fn start(
    files: impl Filesystem + Send + Sync + 'static,
    mount_point: MountPoint,
    options: &MountOptions,
    most_threads: usize,
    succession: &Succession<'_>,
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
    succession.heir.take_over();
    let noted = succession.state.take_noted();
    let (session, unanswered) =
        prepared.attach(&connection.device, succession.resending).map_err(SessionError::Init)?;
    if unanswered == Unanswered::Lost {
        succession.heir.write_off(&noted);
        for Noted { unique, loss, .. } in noted {
            init::answer(&connection.device, unique, errno_of(loss));
        }
    }
    // Every thread reads from the same descriptor: a cloned one would die with this process, and with it the requests that
    // were read through it, even if another engine took over.
    let session =
        FuseSession::from_session(session, most_threads, false).map_err(|cause| SessionError::Serve { cause })?;
    if let Some(unmount) = &connection.unmount {
        unmount.read_far_ahead();
    }
    if let Some(keeper) = succession.keeper {
        keeper.report_serving(succession.state).map_err(SessionError::Keeper)?;
    }
    let stop = Stop::on_signals(&session, connection.unmount).map_err(|cause| SessionError::Signals { cause })?;
    Ok((session, stop))
}

/// What whoever waits for a lost request is told.
fn errno_of(loss: Loss) -> i32 {
    match loss {
        Loss::AskAgain => libc::ESTALE,
        Loss::Fail | Loss::Write => libc::EIO,
        Loss::Release => 0,
    }
}

/// The mount point that the user asked for, checked as far as possible without mounting.
pub fn mount_point(arguments: &Arguments, environment: &Environment) -> Result<MountPoint, MountError> {
    let kept = environment.keeper.and_then(|it| it.fuse);
    match kept.or_else(|| cli::descriptor_of(&arguments.mount_point)) {
        Some(number) => MountPoint::from_descriptor(number),
        None => MountPoint::from_directory(PathBuf::from(&arguments.mount_point)),
    }
}
