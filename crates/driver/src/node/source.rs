//! One source: looked at, repaired, mounted and handed to a mounter; or taken away. Every step may be repeated.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use s3csi_core::chain::Chain;
use s3csi_mounter::handoff::{self, Answer, MountRequest, SendError};

use super::life_line::{self, News};
use super::repairs::{DEAD_SOURCE_REPLACED, Repairs};
use super::steps::{Step, Steps};
use super::teller::Teller;
use crate::host::{Beneath, Device, FilesError, FuseOptions, Host, HostError, Mount, MountTable, Probe};

/// A healthy engine answers for its root at once and without S3; only a frozen one, or a node without CPU, takes longer.
const ALIVE_WITHIN: Duration = Duration::from_secs(20);

/// A mounter that is just starting (its Pod is new, or it was restarted) appears within this time.
const MOUNTER_APPEARS_WITHIN: Duration = Duration::from_secs(20);

/// How often a mounter's socket is tried; there is nothing to wait on for "somebody listens now".
const CONNECT_EVERY: Duration = Duration::from_millis(10);

/// After the mount died at its start, the engine's last words arrive within this time or never.
const LAST_WORDS_WITHIN: Duration = Duration::from_secs(2);

/// The engine's words in an error message: enough for the cause, not for a log.
const LONGEST_WORDS_BYTES: usize = 4 << 10;

/// What a source must be. `ensure` makes it so.
pub struct Source {
    pub name: String,
    /// Where it is mounted.
    pub path: PathBuf,
    pub options: FuseOptions,
    pub request: MountRequest,
    pub mounter: Mounter,
    /// Directory in which the mounter leaves `mount.err`.
    pub words: Beneath,
    pub steps: Steps,
    pub repairs: Repairs,
    pub teller: Arc<Teller>,
}

/// Who serves it, known by the directory of its socket.
pub enum Mounter {
    /// One for all sources of the node, which ends engines when it is asked to.
    OfTheNode { directory: Beneath },
    /// A Mountpoint Pod's, which has one engine. It is sent nothing but mount requests: one of an earlier driver ends at the
    /// first message that is none. Ours ends an engine that still runs when it gets the next request.
    OfItsOwn { directory: Beneath },
}

#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    #[error("failed to read the mount table")]
    Look {
        #[source]
        cause: HostError,
    },

    #[error("{kind} is mounted at {path:?} and it is not ours; unmount it first: umount {path:?}")]
    ForeignMount { path: PathBuf, kind: String },

    #[error("failed to remove the dead mount at {path:?}")]
    Clear {
        path: PathBuf,
        #[source]
        cause: HostError,
    },

    #[error("failed to create {path:?}")]
    Directory {
        path: PathBuf,
        #[source]
        cause: HostError,
    },

    #[error("no mounter listens at {socket:?} on this node")]
    Unreachable {
        socket: PathBuf,
        #[source]
        cause: FilesError,
    },

    #[error("failed to mount FUSE at {path:?}")]
    Mount {
        path: PathBuf,
        #[source]
        cause: HostError,
    },

    #[error("the mount at {path:?} disappeared while it was being served; kubelet will try again")]
    Vanished { path: PathBuf },

    #[error("failed to hand the mount over to the mounter")]
    HandOver {
        #[source]
        cause: SendError,
    },

    #[error("the source at {path:?} cannot be looked at; kubelet will try again")]
    Unknown {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },

    #[error("the mounter ended while the engine was starting")]
    MounterGone,

    #[error("the engine failed: {words}")]
    Engine { words: String },

    #[error("the engine did not answer in time")]
    NoAnswer,
}

/// The source is mounted and its engine answers, or an error; in that case nothing of it is left.
pub fn ensure(host: &Arc<dyn Host>, source: &Source, deadline: Instant) -> Result<Device, SourceError> {
    if let Some(device) = serving(host.as_ref(), source, deadline)? {
        return Ok(device);
    }
    host.create_directory(&source.path, 0o755)
        .map_err(|cause| SourceError::Directory { path: source.path.clone(), cause })?;
    // Connected before mounted: a FUSE mount that nobody serves blocks whoever looks at it.
    let connection = connect(source, deadline)?;
    source.steps.done(Step::Connected);
    if let Mounter::OfTheNode { directory } = &source.mounter {
        // One may be left of a mount that is gone: frozen, or of a source that somebody unmounted while it was in use.
        life_line::end(directory, &source.name, deadline);
    }
    let fuse = host
        .mount_fuse(&source.path, &source.options)
        .map_err(|cause| SourceError::Mount { path: source.path.clone(), cause })?;
    source.steps.done(Step::FuseMounted);
    let outcome = serve(host, source, connection, fuse, deadline);
    if outcome.is_err()
        && let Err(error) = clear(host.as_ref(), &source.path)
    {
        tracing::warn!(source = %source.name, %error, "failed mount not removed; the next call tries again");
    }
    outcome
}

/// The device of a source that answers. A dead, hung or foreign one is cleared away or an error.
fn serving(host: &dyn Host, source: &Source, deadline: Instant) -> Result<Option<Device>, SourceError> {
    let path = &source.path;
    let table = host.mount_table().map_err(|cause| SourceError::Look { cause })?;
    let Some(mount) = table.at(path) else { return Ok(None) };
    if !mount.is_ours() {
        return Err(SourceError::ForeignMount { path: path.clone(), kind: mount.kind.clone() });
    }
    let problem = match host.probe(path, deadline.min(Instant::now() + ALIVE_WITHIN)) {
        Probe::Alive { device } if device == mount.device => return Ok(Some(device)),
        Probe::Alive { .. } | Probe::Missing => "it changed while we looked".to_owned(),
        Probe::Dead(error) => error.to_string(),
        Probe::Hung => format!("its engine did not answer within {ALIVE_WITHIN:?}"),
        // Says nothing about the engine, so nothing may be taken away for it.
        Probe::Unknown(cause) => return Err(SourceError::Unknown { path: path.clone(), cause }),
    };
    tracing::warn!(?path, problem, "source is dead, mounting it anew");
    clear(host, path)?;
    source.repairs.done(DEAD_SOURCE_REPLACED, path, &source.name);
    Ok(None)
}

/// Ends the connection, so that nobody can hang on it, and takes every mount at `path` away.
pub fn clear(host: &dyn Host, path: &Path) -> Result<(), SourceError> {
    let failed = |cause| SourceError::Clear { path: path.to_owned(), cause };
    loop {
        let table = host.mount_table().map_err(|cause| SourceError::Look { cause })?;
        let Some(mount) = table.at(path).filter(|it| it.is_ours()) else { return Ok(()) };
        if let Err(error) = host.abort(mount.device) {
            tracing::debug!(?path, %error, "connection not aborted");
        }
        host.detach(path).map_err(failed)?;
    }
}

fn connect(source: &Source, deadline: Instant) -> Result<UnixStream, SourceError> {
    let deadline = deadline.min(Instant::now() + MOUNTER_APPEARS_WITHIN);
    let (Mounter::OfTheNode { directory } | Mounter::OfItsOwn { directory }) = &source.mounter;
    loop {
        match directory.connect(s3csi_mounter::SOCKET) {
            Ok(connection) => return Ok(connection),
            Err(error) if error.is_nobody_listening() && Instant::now() < deadline => thread::sleep(CONNECT_EVERY),
            Err(cause) => {
                return Err(SourceError::Unreachable { socket: directory.path().join(s3csi_mounter::SOCKET), cause });
            }
        }
    }
}

enum Event {
    Probed(Probe),
    News(News),
}

/// Hands the descriptor over and waits for the first of: the engine answers, the mounter reports an error, the deadline.
fn serve(
    host: &Arc<dyn Host>,
    source: &Source,
    connection: UnixStream,
    fuse: OwnedFd,
    deadline: Instant,
) -> Result<Device, SourceError> {
    let table = host.mount_table().map_err(|cause| SourceError::Look { cause })?;
    let vanished = || SourceError::Vanished { path: source.path.clone() };
    let device = table.at(&source.path).ok_or_else(vanished)?.device;
    if let Err(error) = source.words.remove_file(s3csi_mounter::ERROR_FILE) {
        tracing::debug!(source = %source.name, %error, "old error file not removed");
    }
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    connection
        .set_write_timeout(Some(left))
        .map_err(|cause| SendError::Send { cause })
        .and_then(|()| handoff::send(&connection, &source.request, fuse.as_fd()))
        .map_err(|cause| SourceError::HandOver { cause })?;
    // Our copy must go: with it the connection would outlive a dead engine, and whoever uses it would hang.
    drop(fuse);
    source.steps.done(Step::HandedOver);

    let (events, received) = mpsc::channel();
    let spawned = life_line::watch(source.name.clone(), connection, source.teller.clone(), events.clone(), Event::News)
        .and_then(|()| {
            let (host, path) = (host.clone(), source.path.clone());
            // This look blocks in the kernel until the engine has answered FUSE_INIT: the one sign of life that cannot lie.
            let look = move || drop(events.send(Event::Probed(host.probe(&path, deadline))));
            thread::Builder::new().name("first-look".to_owned()).spawn(look).map(drop)
        });
    spawned.map_err(|cause| SourceError::HandOver { cause: SendError::Send { cause } })?;

    let mut until = deadline;
    let mut is_mounter_gone = false;
    loop {
        match received.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(Event::Probed(Probe::Alive { device: seen })) if seen == device => {
                if let Err(error) = host.read_far_ahead(device) {
                    tracing::debug!(source = %source.name, error = %Chain(&error), "big files will be read a bit slower");
                }
                return Ok(device);
            }
            Ok(Event::Probed(Probe::Unknown(cause))) => {
                return Err(SourceError::Unknown { path: source.path.clone(), cause });
            }
            // The engine is dead; the mounter's answer says why and is on its way.
            Ok(Event::Probed(Probe::Alive { .. } | Probe::Dead(_) | Probe::Missing)) => {
                until = deadline.min(Instant::now() + LAST_WORDS_WITHIN);
            }
            Ok(Event::News(News::Answered(Answer::Ready | Answer::Resumed { .. } | Answer::Replaced { .. }))) => {}
            Ok(Event::News(News::Answered(Answer::Failed { error } | Answer::Exited { error, .. }))) => {
                return Err(SourceError::Engine { words: shortened(&error) });
            }
            Ok(Event::News(News::Gone)) => match source.mounter {
                Mounter::OfTheNode { .. } => return Err(death(source, SourceError::MounterGone)),
                // One of an earlier driver never answers and closes when it likes; the mount itself tells how it goes on.
                Mounter::OfItsOwn { .. } => is_mounter_gone = true,
            },
            Err(_) if until < deadline && is_mounter_gone => return Err(death(source, SourceError::MounterGone)),
            Err(_) if until < deadline => return Err(death(source, silent_death())),
            Ok(Event::Probed(Probe::Hung)) | Err(_) => return Err(SourceError::NoAnswer),
        }
    }
}

/// The engine's own words, or else what we know without them.
fn death(source: &Source, otherwise: SourceError) -> SourceError {
    last_words(source).map_or(otherwise, |words| SourceError::Engine { words })
}

fn silent_death() -> SourceError {
    SourceError::Engine { words: "it ended without a word".to_owned() }
}

/// What a mounter of the old protocol left in its error file.
fn last_words(source: &Source) -> Option<String> {
    let bytes = source.words.read_bounded(s3csi_mounter::ERROR_FILE, LONGEST_WORDS_BYTES).ok().flatten()?;
    let words = shortened(&String::from_utf8_lossy(&bytes));
    (!words.is_empty()).then_some(words)
}

/// One line, bounded, and nothing in it that a terminal would obey.
pub fn shortened(words: &str) -> String {
    let line = words.lines().map(str::trim).filter(|it| !it.is_empty()).collect::<Vec<_>>().join("; ");
    line.chars().filter(|it| !it.is_control()).take(LONGEST_WORDS_BYTES).collect()
}

/// Whether nothing but the source itself shows this device any more.
pub fn is_unused(table: &MountTable, path: &Path, device: Device) -> bool {
    table.of_device(device).all(|it| it.at == path)
}

/// Takes an unused source away: plainly if nobody has a file open in it, else as soon as the last one is closed.
pub fn unmount(host: &dyn Host, path: &Path) -> Result<(), HostError> {
    loop {
        let table = host.mount_table()?;
        if !table.at(path).is_some_and(Mount::is_ours) {
            return Ok(());
        }
        match host.unmount(path) {
            Err(HostError::Busy { .. }) => host.detach(path)?,
            outcome => outcome?,
        }
    }
}
