//! The accepting loop: takes connections, and decides when the mounter has nothing left to do.

use std::io;
use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};

use crate::cache::Caches;
use crate::connection::{House, Life, attend};
use crate::directory::Directory;
use crate::keeper::Keeping;
use crate::log::{self, Chain};
use crate::slots::{Attendance, Slots};
use crate::socket::{ListenError, Socket};
use crate::wake::Wake;
use crate::{EXIT_FILE, SOCKET};

/// What a mounter is told at its start.
#[derive(Debug)]
pub struct Settings {
    pub directory: PathBuf,
    pub engine: PathBuf,
    pub limit: NonZeroUsize,
    pub receive_timeout: Duration,
    pub cache_root: PathBuf,
    /// Certificates of those whom engines trust. Without it, the system's.
    pub ca_bundle: Option<PathBuf>,
    /// Without it, an engine that dies takes its mount with it.
    pub keeping: Option<Keeping>,
}

#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("failed to open the mounter's directory {path:?}")]
    Directory {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },

    #[error("failed to make the mounter's socket")]
    Listen {
        #[source]
        cause: ListenError,
    },

    #[error("failed to look at the mounter's directory {path:?}")]
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

/// How soon an idle mounter notices that its end was asked for. While an engine runs, its end is the moment to look.
const EXIT_FILE_INTERVAL: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// Without descriptors or memory for one more connection nothing helps but time.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Last answers and caches; a huge cache that takes longer is left to the next start.
const TIDY_TIME: Duration = Duration::from_secs(10);

/// A thread has small buffers only.
const STACK_BYTES: usize = 512 * 1024;

/// Serves until the end was asked for and no engine runs any more.
pub fn serve(settings: Settings, wake: &Arc<Wake>) -> Result<(), ServeError> {
    // No `..`: a setting nobody uses does not compile.
    let Settings { directory: path, engine, limit, receive_timeout, cache_root, ca_bundle, keeping } = settings;
    let directory = Directory::open(&path).map_err(|cause| ServeError::Directory { path: path.clone(), cause })?;
    let directory = Arc::new(directory);
    // Holds the lock on the directory from here on.
    let socket = Socket::listen(Arc::clone(&directory)).map_err(|cause| ServeError::Listen { cause })?;
    let caches =
        Caches::open(&cache_root, &directory).map_err(|cause| ServeError::Caches { path: path.clone(), cause })?;
    let slots = Slots::new(limit, Arc::clone(wake));
    let life = if limit.get() == 1 { Life::OneSource } else { Life::ManySources };
    let house = Arc::new(House { directory, engine, caches, ca_bundle, slots, receive_timeout, life, keeping });
    log::info(
        "mounter listens",
        &[("socket", &path.join(SOCKET).display()), ("engine", &house.engine.display()), ("limit", &limit)],
    );

    let mut is_stop_noted = false;
    while !is_done(&house, wake, &mut is_stop_noted) {
        wait(&house, wake, &socket).map_err(|cause| ServeError::Wait { cause })?;
        wake.clear();
        if wake.take_upgrade() {
            log::info("asked for other engines", &[("engines", &house.slots.running())]);
            house.slots.upgrade();
        }
        accept_waiting(&house, &socket);
    }
    drop(socket);
    tidy(&house, wake);
    log::info("mounter ends", &[]);
    Ok(())
}

fn is_done(house: &House, wake: &Wake, is_stop_noted: &mut bool) -> bool {
    if house.slots.is_ending() {
        return true;
    }
    let is_stop_asked = wake.is_asked_to_stop();
    let is_exit_asked = house.life == Life::OneSource && house.directory.has(EXIT_FILE);
    if (is_stop_asked || is_exit_asked) && house.slots.end_if_idle() {
        return true;
    }
    if is_stop_asked && !*is_stop_noted {
        *is_stop_noted = true;
        // Ending an engine now would lose what workloads are writing.
        log::info("asked to stop, but serving; ends with the last engine", &[("engines", &house.slots.running())]);
    }
    false
}

fn wait(house: &House, wake: &Wake, socket: &Socket) -> io::Result<()> {
    let mut watched = vec![PollFd::from_borrowed_fd(wake.as_fd(), PollFlags::IN)];
    if house.slots.has_room_for_handshake() {
        watched.push(PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN));
    }
    let timeout = match house.life {
        Life::OneSource => Some(&EXIT_FILE_INTERVAL),
        Life::ManySources => None,
    };
    match rustix::event::poll(&mut watched, timeout) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(cause) => Err(cause.into()),
    }
}

fn accept_waiting(house: &Arc<House>, socket: &Socket) {
    while house.slots.has_room_for_handshake() {
        match socket.accept() {
            Ok(Some(stream)) => start_attending(house, stream, house.slots.attend()),
            Ok(None) => return,
            Err(cause) => {
                log::error("connection not accepted", &[("error", &Chain(&cause))]);
                std::thread::sleep(ACCEPT_PAUSE);
                return;
            }
        }
    }
}

fn start_attending(house: &Arc<House>, stream: UnixStream, attendance: Attendance) {
    let house = Arc::clone(house);
    let thread = std::thread::Builder::new().name("connection".to_owned()).stack_size(STACK_BYTES);
    // Without a thread the connection is closed, which a node takes for a mounter that is gone.
    if let Err(cause) = thread.spawn(move || attend(&house, &stream, attendance)) {
        log::error("connection not attended to", &[("error", &Chain(&cause))]);
    }
}

/// Waits until ended engines have been answered for and their caches are gone.
fn tidy(house: &House, wake: &Wake) {
    let deadline = Instant::now() + TIDY_TIME;
    while !house.slots.is_tidy() {
        let left = deadline.saturating_duration_since(Instant::now());
        let Ok(timeout) = Timespec::try_from(left) else { return };
        if left.is_zero() {
            return log::warn("some caches are left to the next start", &[]);
        }
        let mut watched = [PollFd::from_borrowed_fd(wake.as_fd(), PollFlags::IN)];
        let _ = rustix::event::poll(&mut watched, Some(&timeout));
        wake.clear();
    }
    house.caches.close();
}
