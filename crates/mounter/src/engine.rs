//! One engine as a process: started with a FUSE descriptor, attended to until its end. What its words mean is not known here.

use std::fmt::Write as _;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions};

use crate::launch::{Launch, MountPoint};
use crate::output::{Lines, Tail};

/// A running engine. It must be attended to, else nobody reads what it writes and nobody collects it.
#[must_use]
#[derive(Debug)]
pub struct Engine {
    child: Child,
    stdout: Output,
    stderr: Output,
    /// What it wrote to stderr last.
    tail: Tail,
    /// Readable when the process has ended. Kernels before 5.3 have none; then the end of its output must do.
    end: Option<Arc<OwnedFd>>,
    /// Only an engine with a state has one.
    control: Option<UnixStream>,
}

/// What an engine inherits.
#[derive(Clone, Copy, Debug)]
pub struct Inheritance<'a> {
    /// Its mount point.
    pub fuse: BorrowedFd<'a>,
    /// Memory in which it finds what engines before it knew, and leaves what it knows.
    pub state: Option<BorrowedFd<'a>>,
    pub haste: Haste,
}

/// Whether an engine may take its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Haste {
    /// Somebody may be waiting for it.
    AtOnce,
    /// Another one serves the mount: it shall find out first whether its keys work.
    WhenSure,
}

/// A line that an engine wrote.
#[derive(Clone, Copy, Debug)]
pub struct News<'a> {
    pub stream: Stream,
    pub line: &'a [u8],
}

/// Whether an engine is still there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    Goes,
    Over,
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

/// Tells an engine the numbers of its state and control descriptors, and of its mount if its arguments do not. An engine that does not know the variable works without.
const KEEPER: &str = "S3CSI_ENGINE_KEEPER";

/// Set if the engine shall ask the server before it takes a mount over.
const WHEN_SURE: &str = "S3CSI_ENGINE_WHEN_SURE";

/// How often a process that shall stand still is looked at.
const PAUSE_STEP: Duration = Duration::from_millis(1);

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
        launch.prepare(&mut command, &mount_point, cache);
        command
            // Its errors are shown to users.
            .env("RUST_BACKTRACE", "0")
            .env_remove(KEEPER)
            .env_remove(WHEN_SURE)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // An interrupt from the terminal is for us; the engine goes on until its mount is gone.
            .process_group(0);
        if let (Some(state), Some(control)) = (&state, &theirs) {
            let mut numbers = format!("{},{}", state.as_raw_fd(), control.as_raw_fd());
            if launch.mount_point() == MountPoint::Variable {
                let _ = write!(numbers, ",{}", fuse.as_raw_fd());
            }
            command.env(KEEPER, numbers);
        }
        if inheritance.haste == Haste::WhenSure {
            command.env(WHEN_SURE, "1");
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
        let stdout = Output { pipe: Some(stdout), kind: Stream::Stdout, lines: Lines::default() };
        let stderr = Output { pipe: Some(stderr), kind: Stream::Stderr, lines: Lines::default() };
        Ok(Self { child, stdout, stderr, tail: Tail::default(), end, control })
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The process itself, as something that can be signalled without meaning another one. Old kernels have no such thing.
    pub fn process(&self) -> Option<Arc<OwnedFd>> {
        self.end.clone()
    }

    /// Takes what the engine has written since the last time.
    pub fn attend(&mut self, hear: &mut dyn FnMut(News<'_>)) -> Life {
        // Looked at first: what it has left behind is read below then.
        let has_ended = self.end.as_ref().is_some_and(|it| is_readable(it.as_fd()));
        let limit = if has_ended { MAX_DRAIN_BYTES } else { CHUNK_BYTES };
        self.stdout.read(limit, hear, &mut Tail::default());
        self.stderr.read(limit, hear, &mut self.tail);
        let is_silent = self.stdout.pipe.is_none() && self.stderr.pipe.is_none();
        let is_over = has_ended || (is_silent && self.end.is_none());
        if is_over {
            self.stdout.finish(hear);
            self.stderr.finish(hear);
        }
        if is_over { Life::Over } else { Life::Goes }
    }

    /// Waits for the end of the process, which must be near.
    pub fn collect(mut self) -> Ended {
        Ended { status: self.child.wait(), stderr: self.tail.into_text() }
    }

    pub fn say(&self, letter: u8) {
        if let Some(control) = &self.control {
            // An engine that does not listen has died, which is noticed elsewhere.
            let _ = rustix::net::send(control, &[letter], SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
        }
    }

    pub fn kill(&self) {
        self.signal(Signal::KILL);
    }

    /// Makes it stand still, with all its threads. Answers whether it does before the time is over; if not, it goes on.
    pub fn pause(&self, time: Duration) -> bool {
        let Some(process) = &self.end else { return false };
        let deadline = Instant::now() + time;
        self.signal(Signal::STOP);
        loop {
            let options = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG;
            match rustix::process::waitid(WaitId::PidFd(process.as_fd()), options) {
                Ok(Some(status)) if status.stopped() => return true,
                Ok(_) if Instant::now() < deadline => std::thread::sleep(PAUSE_STEP),
                Ok(_) | Err(_) => {
                    self.resume();
                    return false;
                }
            }
        }
    }

    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        if let Some(process) = &self.end {
            // It may have ended just now, which is as well.
            let _ = rustix::process::pidfd_send_signal(process, signal);
        }
    }

    /// What the engine has said to us since the last time.
    pub fn letters(&mut self) -> Vec<u8> {
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

    fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let pipes = [&self.stdout.pipe, &self.stderr.pipe].into_iter().flatten().map(AsFd::as_fd);
        let end = self.end.as_ref().map(|it| it.as_fd());
        let control = self.control.as_ref().map(AsFd::as_fd);
        pipes.chain(end).chain(control)
    }
}

/// Waits until one of the engines wrote or said something or ended, or until the time is over.
pub fn wait_for_news<'a>(engines: impl Iterator<Item = &'a Engine>, time: Option<Duration>) {
    let mut watched: Vec<PollFd<'_>> = engines.flat_map(Engine::descriptors).map(readable).collect();
    let time = time.and_then(|it| Timespec::try_from(it).ok());
    // Whatever it says, everybody is looked at next.
    let _ = rustix::event::poll(&mut watched, time.as_ref());
}

/// One of the engine's streams.
#[derive(Debug)]
struct Output {
    /// Gone once the engine has closed its end.
    pipe: Option<OwnedFd>,
    kind: Stream,
    lines: Lines,
}

impl Output {
    /// Takes what is there, up to a limit.
    fn read(&mut self, limit: usize, hear: &mut dyn FnMut(News<'_>), tail: &mut Tail) {
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
                    self.lines.push(&chunk[..length], &mut |line| hear(News { stream: self.kind, line }));
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(_) => self.pipe = None,
            }
        }
    }

    fn finish(&mut self, hear: &mut dyn FnMut(News<'_>)) {
        let kind = self.kind;
        self.lines.finish(&mut |line| hear(News { stream: kind, line }));
    }
}

fn is_readable(descriptor: BorrowedFd<'_>) -> bool {
    let mut watched = [readable(descriptor)];
    rustix::event::poll(&mut watched, Some(&Timespec::default())).is_ok() && !watched[0].revents().is_empty()
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
