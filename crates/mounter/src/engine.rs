//! One engine as a process: started with a FUSE descriptor, watched until its end. What its words mean is not known here.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::{PollFd, PollFlags};
use rustix::io::{Errno, FdFlags};
use rustix::process::{Pid, PidfdFlags};

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

/// What is read at once; also bounds the time one noisy stream can keep the others waiting.
const CHUNK_BYTES: usize = 16 * 1024;

/// What an ended engine can have left in its pipes. A grandchild that goes on writing must not keep us here.
const MAX_DRAIN_BYTES: usize = 1024 * 1024;

impl Engine {
    /// Starts the engine with the descriptor as its mount point. Our copy is closed on every way out.
    pub fn start(program: &Path, launch: &Launch, cache: Option<&Path>, fuse: OwnedFd) -> Result<Self, StartError> {
        let mount_point = format!("/dev/fd/{}", fuse.as_raw_fd());
        let mut command = Command::new(program);
        command
            .args(launch.arguments(&mount_point, cache))
            .env_clear()
            .envs(launch.environment())
            // Its errors are shown to users.
            .env("RUST_BACKTRACE", "0")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // An interrupt from the terminal is for us; the engine goes on until its mount is gone.
            .process_group(0);

        let guard = SPAWN.lock().unwrap_or_else(PoisonError::into_inner);
        rustix::io::fcntl_setfd(&fuse, FdFlags::empty())
            .map_err(|cause| StartError::Inherit { cause: cause.into() })?;
        let spawned = command.spawn();
        drop(fuse);
        drop(guard);

        let child = spawned.map_err(|cause| StartError::Spawn { program: program.to_owned(), cause })?;
        Self::attach(child)
    }

    fn attach(mut child: Child) -> Result<Self, StartError> {
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
        Ok(Self { child, stdout, stderr, end })
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The process itself, as something that can be signalled without meaning another one. Old kernels have no such thing.
    pub fn process(&self) -> Option<Arc<OwnedFd>> {
        self.end.clone()
    }

    /// Calls `emit` for each line until the engine has ended.
    pub fn watch(self, emit: &mut dyn FnMut(Stream, &[u8])) -> Ended {
        let Self { mut child, stdout, stderr, end } = self;
        let mut stdout = Output { pipe: Some(stdout), kind: Stream::Stdout, lines: Lines::default() };
        let mut stderr = Output { pipe: Some(stderr), kind: Stream::Stderr, lines: Lines::default() };
        let mut tail = Tail::default();
        loop {
            let is_ended = wait_for_news(&stdout, &stderr, end.as_deref());
            let limit = if is_ended { MAX_DRAIN_BYTES } else { CHUNK_BYTES };
            stdout.read(limit, emit, &mut Tail::default());
            stderr.read(limit, emit, &mut tail);
            let is_silent = stdout.pipe.is_none() && stderr.pipe.is_none();
            if is_ended || (is_silent && end.is_none()) {
                break;
            }
        }
        stdout.finish(emit);
        stderr.finish(emit);
        Ended { status: child.wait(), stderr: tail.into_text() }
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
    fn read(&mut self, limit: usize, emit: &mut dyn FnMut(Stream, &[u8]), tail: &mut Tail) {
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
                    self.lines.push(&chunk[..length], &mut |line| emit(self.kind, line));
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(_) => self.pipe = None,
            }
        }
    }

    fn finish(&mut self, emit: &mut dyn FnMut(Stream, &[u8])) {
        let kind = self.kind;
        self.lines.finish(&mut |line| emit(kind, line));
    }
}

/// Waits until the engine wrote something or ended; the answer says whether it ended.
fn wait_for_news(stdout: &Output, stderr: &Output, end: Option<&OwnedFd>) -> bool {
    let pipes = [&stdout.pipe, &stderr.pipe].into_iter().flatten();
    let mut watched: Vec<PollFd<'_>> = end.into_iter().chain(pipes).map(|it| readable(it.as_fd())).collect();
    if rustix::event::poll(&mut watched, None).is_err() {
        return false;
    }
    end.is_some() && watched.first().is_some_and(|it| !it.revents().is_empty())
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
