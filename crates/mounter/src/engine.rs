//! One engine as a process: started with a FUSE descriptor, watched until its end. What its words mean is not known here.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use rustix::process::{Pid, PidfdFlags, Signal};

use crate::launch::Launch;
use crate::output::{Lines, Tail};

/// A running engine. It must be watched, else nobody reads what it writes and nobody collects it.
#[must_use]
#[derive(Debug)]
pub struct Engine {
    child: Child,
    stdout: OwnedFd,
    stderr: OwnedFd,
    /// Readable when the process has ended. Kernels before 5.3 have none; then the end of its output must do.
    end: Option<Arc<OwnedFd>>,
    leash: Leash,
}

/// What an engine inherits.
#[derive(Clone, Copy, Debug)]
pub struct Inheritance<'a> {
    /// Its mount point.
    pub fuse: BorrowedFd<'a>,
    /// Memory in which it finds what engines before it knew, and leaves what it knows.
    pub state: Option<BorrowedFd<'a>>,
}

/// How a running engine is talked to: by single letters, and as a last resort by a signal.
#[derive(Debug)]
pub struct Leash {
    /// Only an engine with a state has one.
    control: Option<UnixStream>,
    end: Option<Arc<OwnedFd>>,
}

/// Who is told what a running engine does.
pub trait Watcher {
    fn hear_line(&mut self, stream: Stream, line: &[u8]);
    fn hear_letter(&mut self, letter: u8, leash: &Leash);
    /// Called again and again after about this time; never without one.
    fn interval(&self) -> Option<Duration>;
    fn tick(&mut self, leash: &Leash);
}

/// How an engine has ended, with its last words on stderr.
#[derive(Debug)]
pub struct Ended {
    /// Fails only if somebody else collected the process.
    pub status: io::Result<ExitStatus>,
    pub stderr: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    Stdout,
    Stderr,
}

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("failed to start the engine {program:?}")]
    Spawn {
        program: PathBuf,
        #[source]
        cause: io::Error,
    },

    #[error("failed to hand the descriptor to the engine")]
    Inherit {
        #[source]
        cause: io::Error,
    },

    #[error("failed to watch the engine")]
    Watch {
        #[source]
        cause: io::Error,
    },
}

/// Held while a descriptor can be inherited, so that no other engine gets it. A copy in a foreign process would keep the mount
/// hanging after its own engine has died.
static SPAWN: Mutex<()> = Mutex::new(());

/// Tells an engine the numbers of its state and control descriptors. An engine that does not know the variable works without.
const KEEPER: &str = "S3CSI_ENGINE_KEEPER";

/// What is read at once; also bounds the time one noisy stream can keep the others waiting.
const CHUNK_BYTES: usize = 16 * 1024;

/// What an ended engine can have left in its pipes. A grandchild that goes on writing must not keep us here.
const MAX_DRAIN_BYTES: usize = 1024 * 1024;

impl Engine {
    /// Starts the engine. It gets copies of what it inherits.
    pub fn start(
        program: &Path,
        launch: &Launch,
        cache: Option<&Path>,
        inheritance: Inheritance<'_>,
    ) -> Result<Self, StartError> {
        let guard = SPAWN.lock().unwrap_or_else(PoisonError::into_inner);
        let inherit = |cause: io::Error| StartError::Inherit { cause };
        // Copies can be inherited, unlike the originals, and are closed before the next engine starts.
        let fuse = rustix::io::dup(inheritance.fuse).map_err(|cause| inherit(cause.into()))?;
        let state = inheritance.state.map(rustix::io::dup).transpose().map_err(|cause| inherit(cause.into()))?;
        let control = state.is_some().then(UnixStream::pair).transpose().map_err(inherit)?;
        let (ours, theirs) = control.unzip();
        let theirs = theirs.map(rustix::io::dup).transpose().map_err(|cause| inherit(cause.into()))?;

        let mount_point = format!("/dev/fd/{}", fuse.as_raw_fd());
        let mut command = Command::new(program);
        command
            .args(launch.arguments(&mount_point, cache))
            .env_clear()
            .envs(launch.environment())
            // Its errors are shown to users.
            .env("RUST_BACKTRACE", "0")
            .env_remove(KEEPER)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // An interrupt from the terminal is for us; the engine goes on until its mount is gone.
            .process_group(0);
        if let (Some(state), Some(control)) = (&state, &theirs) {
            command.env(KEEPER, format!("{},{}", state.as_raw_fd(), control.as_raw_fd()));
        }
        let spawned = command.spawn();
        drop((fuse, state, theirs));
        drop(guard);

        let child = spawned.map_err(|cause| StartError::Spawn { program: program.to_owned(), cause })?;
        Self::attach(child, ours)
    }

    fn attach(mut child: Child, control: Option<UnixStream>) -> Result<Self, StartError> {
        let pipes = take_pipes(&mut child);
        let (stdout, stderr) = match pipes {
            Ok(pipes) => pipes,
            Err(cause) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(StartError::Watch { cause });
            }
        };
        // The process is not collected yet, so its number cannot belong to another one.
        let end = rustix::process::pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).ok().map(Arc::new);
        let leash = Leash { control, end: end.clone() };
        Ok(Self { child, stdout, stderr, end, leash })
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The process itself, as something that can be signalled without meaning another one. Old kernels have no such thing.
    pub fn process(&self) -> Option<Arc<OwnedFd>> {
        self.end.clone()
    }

    /// Watches the engine until it has ended.
    pub fn watch(self, watcher: &mut dyn Watcher) -> Ended {
        let Self { mut child, stdout, stderr, end, mut leash } = self;
        let mut stdout = Output { pipe: Some(stdout), kind: Stream::Stdout, lines: Lines::default() };
        let mut stderr = Output { pipe: Some(stderr), kind: Stream::Stderr, lines: Lines::default() };
        let mut tail = Tail::default();
        loop {
            let is_ended = wait_for_news(&stdout, &stderr, &leash, watcher.interval());
            for letter in leash.letters() {
                watcher.hear_letter(letter, &leash);
            }
            let limit = if is_ended { MAX_DRAIN_BYTES } else { CHUNK_BYTES };
            stdout.read(limit, watcher, &mut Tail::default());
            stderr.read(limit, watcher, &mut tail);
            let is_silent = stdout.pipe.is_none() && stderr.pipe.is_none();
            if is_ended || (is_silent && end.is_none()) {
                break;
            }
            watcher.tick(&leash);
        }
        stdout.finish(watcher);
        stderr.finish(watcher);
        Ended { status: child.wait(), stderr: tail.into_text() }
    }
}

impl Leash {
    pub fn say(&self, letter: u8) {
        if let Some(control) = &self.control {
            // An engine that does not listen has died, which is noticed elsewhere.
            let _ = rustix::net::send(control, &[letter], SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
        }
    }

    pub fn kill(&self) {
        if let Some(process) = &self.end {
            // It may have ended just now, which is as well.
            let _ = rustix::process::pidfd_send_signal(process, Signal::KILL);
        }
    }

    /// What the engine has said since the last time.
    fn letters(&mut self) -> Vec<u8> {
        let Some(control) = &self.control else { return Vec::new() };
        let mut letters = [0; 16];
        match rustix::net::recv(control, &mut letters[..], RecvFlags::DONTWAIT) {
            Ok((length, _)) if length > 0 => letters[..length].to_vec(),
            Err(Errno::AGAIN | Errno::INTR) => Vec::new(),
            Ok(_) | Err(_) => {
                self.control = None;
                Vec::new()
            }
        }
    }
}

/// One of the engine's streams.
struct Output {
    /// Gone once the engine has closed its end.
    pipe: Option<OwnedFd>,
    kind: Stream,
    lines: Lines,
}

impl Output {
    /// Takes what is there, up to a limit.
    fn read(&mut self, limit: usize, watcher: &mut dyn Watcher, tail: &mut Tail) {
        let mut chunk = [0; CHUNK_BYTES];
        let mut taken = 0;
        while let Some(pipe) = &self.pipe
            && taken < limit
        {
            match rustix::io::read(pipe, &mut chunk) {
                Ok(0) => self.pipe = None,
                Ok(length) => {
                    taken += length;
                    tail.push(&chunk[..length]);
                    self.lines.push(&chunk[..length], &mut |line| watcher.hear_line(self.kind, line));
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(_) => self.pipe = None,
            }
        }
    }

    fn finish(&mut self, watcher: &mut dyn Watcher) {
        let kind = self.kind;
        self.lines.finish(&mut |line| watcher.hear_line(kind, line));
    }
}

/// Waits until the engine wrote or said something or ended, or until the time is over; the answer says whether it ended.
fn wait_for_news(stdout: &Output, stderr: &Output, leash: &Leash, time: Option<Duration>) -> bool {
    let pipes = [&stdout.pipe, &stderr.pipe].into_iter().flatten().map(AsFd::as_fd);
    let end = leash.end.as_ref().map(|it| it.as_fd());
    let control = leash.control.as_ref().map(AsFd::as_fd);
    let mut watched: Vec<PollFd<'_>> = end.into_iter().chain(control).chain(pipes).map(readable).collect();
    let time = time.and_then(|it| Timespec::try_from(it).ok());
    if rustix::event::poll(&mut watched, time.as_ref()).is_err() {
        return false;
    }
    leash.end.is_some() && watched.first().is_some_and(|it| !it.revents().is_empty())
}

fn readable(descriptor: BorrowedFd<'_>) -> PollFd<'_> {
    PollFd::from_borrowed_fd(descriptor, PollFlags::IN)
}

fn take_pipes(child: &mut Child) -> io::Result<(OwnedFd, OwnedFd)> {
    let missing = || io::Error::other("the engine has no output");
    let stdout = OwnedFd::from(child.stdout.take().ok_or_else(missing)?);
    let stderr = OwnedFd::from(child.stderr.take().ok_or_else(missing)?);
    // Only our ends: the engine's own ones are other open files.
    rustix::io::ioctl_fionbio(&stdout, true)?;
    rustix::io::ioctl_fionbio(&stderr, true)?;
    Ok((stdout, stderr))
}
