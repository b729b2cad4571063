//! The FUSE session: a connection to the kernel, its start and its end.

mod descriptor;
mod init;
mod mount;
mod request_buffers;
mod shutdown;
mod supervisor;

use std::path::PathBuf;

use fuser::{Filesystem, SessionACL};
use mountpoint_s3_fs::fuse::session::FuseSession;
use s3csi_supervisor::MountResources;

use crate::cli::{self, Arguments, Environment, StoredDescriptors};
use crate::state::{InFlight, RequestClass, Start, State};

use init::Unanswered;

pub use mount::{MountError, MountPoint, Unmount};
pub use shutdown::Shutdown;
pub use supervisor::{Supervisor, SupervisorError};

/// Who may use the mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AllowedUsers {
    Owner,
    OwnerAndRoot,
    Everybody,
}

impl AllowedUsers {
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
    pub access: AllowedUsers,
    pub is_read_only: bool,
    pub unmounts_itself: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    #[error("cannot mount")]
    Mount(#[source] MountError),

    #[error("FUSE_INIT failed")]
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
    Supervisor(SupervisorError),

    #[error("cannot lock the state of the mount")]
    Lock {
        #[source]
        cause: std::io::Error,
    },
}

/// What a start as a successor needs.
pub struct Takeover<'a> {
    pub state: &'a State,
    pub supervisor: Option<&'a Supervisor>,
    pub resumable: &'a dyn Resumable,
    pub resending: Resending,
}

/// A file system that can resume the mount of a previous engine.
pub trait Resumable {
    /// Loads the state of the previous engine, which is dead.
    fn resume(&self);

    /// The kernel does not resend these requests. Called before they are answered with an error.
    fn fail_lost_requests(&self, lost: &[InFlight]);
}

/// No state to resume.
impl Resumable for () {
    fn resume(&self) {}

    fn fail_lost_requests(&self, _: &[InFlight]) {}
}

/// Whether the kernel is asked to send requests again that the previous engine had read.
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
    takeover: &Takeover<'_>,
) -> Result<(FuseSession, Shutdown), SessionError> {
    let access = match options.access {
        // The kernel lets everybody in whom the mount options let in; a descriptor was mounted with options we do not see.
        AllowedUsers::Everybody => SessionACL::All,
        AllowedUsers::OwnerAndRoot => SessionACL::RootAndOwner,
        AllowedUsers::Owner => SessionACL::Owner,
    };
    let connection = mount_point.connect(options).map_err(SessionError::Mount)?;
    let prepared = init::prepare(files, &connection.device, access, takeover.state).map_err(SessionError::Init)?;
    // Everything that is slow or can fail is behind us.
    if let Some(supervisor) = takeover.supervisor {
        supervisor.wait_for_turn().map_err(SessionError::Supervisor)?;
    }
    takeover.state.lock().map_err(|cause| SessionError::Lock { cause })?;
    if takeover.state.start() == Start::Resumed {
        request_buffers::touch_new_buffers();
    }
    takeover.resumable.resume();
    let noted = takeover.state.take_in_flight();
    let (session, unanswered) = prepared.attach(&connection.device, takeover.resending).map_err(SessionError::Init)?;
    if unanswered == Unanswered::Lost {
        takeover.resumable.fail_lost_requests(&noted);
        for InFlight { unique, class, .. } in noted {
            init::answer(&connection.device, unique, errno_of(class));
        }
    }
    // Every thread reads from the same descriptor: a cloned one would die with this process, and with it the requests that
    // were read through it, even if another engine took over.
    let session =
        FuseSession::from_session(session, most_threads, false).map_err(|cause| SessionError::Serve { cause })?;
    if let Some(unmount) = &connection.unmount {
        unmount.read_far_ahead();
    }
    if let Some(supervisor) = takeover.supervisor {
        let can_resend = takeover.state.question().is_some_and(|it| init::has_resend(&it));
        let resending = if can_resend { takeover.resending } else { Resending::Never };
        supervisor.report_serving(takeover.state, resending).map_err(SessionError::Supervisor)?;
    }
    let stop = Shutdown::on_signals(&session, connection.unmount).map_err(|cause| SessionError::Signals { cause })?;
    Ok((session, stop))
}

/// The error for the caller of a lost request.
fn errno_of(class: RequestClass) -> i32 {
    match class {
        RequestClass::Retryable => libc::ESTALE,
        RequestClass::Failing | RequestClass::Write => libc::EIO,
        RequestClass::Release => 0,
    }
}

/// The mount point that the user asked for, checked as far as possible without mounting.
pub fn mount_point(arguments: &Arguments, environment: &Environment) -> Result<MountPoint, MountError> {
    let kept = environment.supervisor.and_then(|it| it.fuse);
    match kept.or_else(|| cli::descriptor_of(&arguments.mount_point)) {
        Some(number) => MountPoint::from_descriptor(number),
        None => MountPoint::from_directory(PathBuf::from(&arguments.mount_point)),
    }
}

/// The mount that an earlier process of this service served, from descriptors that the service manager stored. `None` if it was
/// unmounted, or was about to be: then only the state is stored.
pub fn stored_mount(stored: StoredDescriptors) -> Result<Option<MountResources>, MountError> {
    let inherited = |number| descriptor::inherited(number).map_err(|cause| MountError::NotOpen { number, cause });
    let Some(fuse) = stored.fuse else { return Ok(None) };
    let MountPoint::Device(fuse) = MountPoint::from_descriptor(fuse)? else { return Ok(None) };
    let state = stored.state.ok_or(MountError::NoState).and_then(inherited)?;
    Ok(Some(MountResources { fuse: fuse.into(), state }).filter(MountResources::is_connected))
}
