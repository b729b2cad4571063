//! The accept loop: takes connections, and decides when the mounter ends.

use std::io;
use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use s3csi_core::Chain;
use s3csi_core::quantity::Quantity;
use s3csi_handoff::{COMMANDS_FILE, EXIT_FILE, SOCKET};
use s3csi_supervisor::{CaBundle, SupervisorConfig, log};

use crate::cache::Caches;
use crate::connection::{Context, Mode, handle};
use crate::directory::Directory;
use crate::registry::{ConnectionGuard, EngineRegistry};
use crate::socket::{ListenError, Socket};
use crate::stage::Stages;
use crate::wake::Wake;

#[derive(Debug)]
pub struct MounterConfig {
    pub directory: PathBuf,
    pub engine: PathBuf,
    pub limit: NonZeroUsize,
    pub receive_timeout: Duration,
    pub cache_root: PathBuf,
    /// The directory for staged files, and its size for each source.
    pub stage: Option<(PathBuf, Quantity)>,
    /// Certificates that engines trust in addition to the system's.
    pub ca_bundle: Option<PathBuf>,
    /// Without it, a mount ends with its engine.
    pub supervisor: Option<SupervisorConfig>,
}

#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("failed to open the mounter's directory {path:?}")]
    Directory {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },

    #[error("failed to create the mounter's socket")]
    Listen {
        #[source]
        cause: ListenError,
    },

    #[error("failed to read the metadata of the mounter's directory {path:?}")]
    Caches {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },

    #[error("failed to wait for connections")]
    Wait {
        #[source]
        cause: io::Error,
    },
}

/// How often an idle mounter looks for `mount.exit`. While an engine runs, its exit is the moment to look.
const EXIT_FILE_INTERVAL: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// How often a mounter without access to its directory tries again.
const ACCESS_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 250_000_000 };

/// How often a mounter that was told to stop checks whether all files are stored.
const DRAIN_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// Without descriptors or memory for one more connection, waiting is all that helps.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);

/// For last answers and the removal of caches; a huge cache is left to the next start.
const CLEANUP_TIME: Duration = Duration::from_secs(10);

/// Threads have small buffers only.
const STACK_BYTES: usize = 512 * 1024;

/// Serves until shutdown was requested and no engine runs any more.
pub fn serve(config: MounterConfig, wake: &Arc<Wake>) -> Result<(), ServeError> {
    // No `..`: an unused setting does not compile.
    let MounterConfig { directory: path, engine, limit, receive_timeout, cache_root, stage, ca_bundle, supervisor } =
        config;
    let directory = Directory::open(&path).map_err(|cause| ServeError::Directory { path: path.clone(), cause })?;
    let directory = Arc::new(directory);
    let mode = if limit.get() == 1 { Mode::OneSource } else { Mode::ManySources };
    // Holds the lock on the directory from here on.
    let Some(socket) = listen(&directory, mode, wake)? else { return Ok(()) };
    if let Err(cause) = directory.write(COMMANDS_FILE, b"") {
        log::warn("node plugins will not send commands", &[("error", &cause)]);
    }
    let caches =
        Caches::open(&cache_root, &directory).map_err(|cause| ServeError::Caches { path: path.clone(), cause })?;
    let stages = stage.map(|(root, size)| Stages::open(root, &size, Arc::clone(&directory)));
    let ca_bundle = ca_bundle.map(|it| CaBundle::new(it, &path));
    let registry = EngineRegistry::new(limit, Arc::clone(wake));
    let context =
        Arc::new(Context { directory, engine, caches, stages, ca_bundle, registry, receive_timeout, mode, supervisor });
    log::info(
        "mounter is listening",
        &[("socket", &path.join(SOCKET).display()), ("engine", &context.engine.display()), ("limit", &limit)],
    );

    let mut stop = Stop::None;
    while !is_done(&context, wake, &mut stop) {
        wait(&context, wake, &socket, stop).map_err(|cause| ServeError::Wait { cause })?;
        wake.clear();
        if wake.take_upgrade() {
            log::info("upgrade requested", &[("engines", &context.registry.running())]);
            context.registry.upgrade_all();
        }
        accept_waiting(&context, &socket);
    }
    let _ = context.directory.remove(COMMANDS_FILE);
    drop(socket);
    clean_up(&context, wake);
    log::info("mounter exits", &[]);
    Ok(())
}

/// With many sources, the directory is one of the node that kubelet creates for root. The node plugin, which may start later,
/// gives it to the mounter, so a missing permission is waited for. Returns nothing if a stop is requested meanwhile.
fn listen(directory: &Arc<Directory>, mode: Mode, wake: &Wake) -> Result<Option<Socket>, ServeError> {
    let mut is_waiting = false;
    loop {
        match Socket::listen(Arc::clone(directory)) {
            Err(ListenError::Listen { cause, .. })
                if mode == Mode::ManySources && cause.kind() == io::ErrorKind::PermissionDenied =>
            {
                if !is_waiting {
                    is_waiting = true;
                    let path = directory.path().display();
                    log::info("waiting for the node plugin to grant access to the directory", &[("directory", &path)]);
                }
            }
            result => return result.map(Some).map_err(|cause| ServeError::Listen { cause }),
        }
        let woken = rustix::event::poll(&mut [PollFd::new(wake, PollFlags::IN)], Some(&ACCESS_INTERVAL));
        match woken {
            Ok(_) | Err(rustix::io::Errno::INTR) => wake.clear(),
            Err(cause) => return Err(ServeError::Wait { cause: cause.into() }),
        }
        if wake.is_stop_requested() {
            return Ok(None);
        }
    }
}

/// How far a requested stop has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    None,
    /// Mounts are served until all big files are stored.
    Draining,
    /// What other mounters can continue was released; the rest is waited for.
    Released,
}

fn is_done(context: &Context, wake: &Wake, stop: &mut Stop) -> bool {
    if context.registry.is_shutting_down() {
        return true;
    }
    let is_stop_requested = wake.is_stop_requested();
    let is_exit_requested = context.mode == Mode::OneSource && context.directory.has(EXIT_FILE);
    if (is_stop_requested || is_exit_requested) && context.registry.shut_down_if_idle() {
        return true;
    }
    if !is_stop_requested {
        return false;
    }
    if *stop == Stop::None {
        log::info("stop requested, waiting for the last engine to exit", &[("engines", &context.registry.running())]);
        // A Mountpoint Pod may be stopped together with its workloads, when the node shuts down. Then no other one would follow.
        *stop = if context.mode == Mode::ManySources { Stop::Draining } else { Stop::Released };
    }
    if *stop == Stop::Draining {
        context.registry.reject_mounts();
        if let Some(released) = context.registry.release_held() {
            log::info("mounts released for the next mounter", &[("mounts", &released)]);
            *stop = Stop::Released;
        }
    }
    false
}

fn wait(context: &Context, wake: &Wake, socket: &Socket, stop: Stop) -> io::Result<()> {
    let mut watched = vec![PollFd::from_borrowed_fd(wake.as_fd(), PollFlags::IN)];
    if context.registry.has_room_for_handshake() {
        watched.push(PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN));
    }
    let timeout = match context.mode {
        _ if stop == Stop::Draining => Some(&DRAIN_INTERVAL),
        Mode::OneSource => Some(&EXIT_FILE_INTERVAL),
        Mode::ManySources => None,
    };
    match rustix::event::poll(&mut watched, timeout) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(cause) => Err(cause.into()),
    }
}

fn accept_waiting(context: &Arc<Context>, socket: &Socket) {
    while context.registry.has_room_for_handshake() {
        match socket.accept() {
            Ok(Some(stream)) => start_handling(context, stream, context.registry.add_connection()),
            Ok(None) => return,
            Err(cause) => {
                log::error("connection not accepted", &[("error", &Chain(&cause))]);
                std::thread::sleep(ACCEPT_BACKOFF);
                return;
            }
        }
    }
}

fn start_handling(context: &Arc<Context>, stream: UnixStream, guard: ConnectionGuard) {
    let context = Arc::clone(context);
    let thread = std::thread::Builder::new().name("connection".to_owned()).stack_size(STACK_BYTES);
    // Without a thread the connection is closed, as if the mounter were gone.
    if let Err(cause) = thread.spawn(move || handle(&context, stream, guard)) {
        log::error("connection not handled", &[("error", &Chain(&cause))]);
    }
}

/// Waits until the exits of all engines are answered and their caches removed.
fn clean_up(context: &Context, wake: &Wake) {
    let deadline = Instant::now() + CLEANUP_TIME;
    while !context.registry.is_clean() {
        let left = deadline.saturating_duration_since(Instant::now());
        let Ok(timeout) = Timespec::try_from(left) else { return };
        if left.is_zero() {
            return log::warn("some caches not removed in time", &[]);
        }
        let mut watched = [PollFd::from_borrowed_fd(wake.as_fd(), PollFlags::IN)];
        let _ = rustix::event::poll(&mut watched, Some(&timeout));
        wake.clear();
    }
    context.caches.close();
}
