//! An engine as a process: starts it with its descriptors, reads its output, signals and reaps it. Does not interpret output.

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

use crate::control::{CHECK_CREDENTIALS_VARIABLE, DESCRIPTORS_VARIABLE, OOM_SCORE_VARIABLE};
use crate::launch::{EngineDirectories, Launch, MountPointPassing};
use crate::output::{Lines, Tail};

/// A running engine. Its output must be read and its process reaped.
#[must_use]
#[derive(Debug)]
pub struct Engine {
    child: Child,
    stdout: Output,
    stderr: Output,
    /// The end of its stderr.
    tail: Tail,
    /// Readable when the process has exited. Kernels before 5.3 have none; then the end of its output is the sign.
    pidfd: Option<Arc<OwnedFd>>,
    /// Only engines with a state have one.
    control: Option<UnixStream>,
}

/// The descriptors an engine inherits, and what it does first.
#[derive(Clone, Copy, Debug)]
pub struct Inherited<'a> {
    pub fuse: BorrowedFd<'a>,
    /// The memory file with what earlier engines knew, in which it stores what it knows.
    pub state: Option<BorrowedFd<'a>>,
    pub credential_check: CredentialCheck,
    pub oom_score: Option<i32>,
}

/// Whether an engine verifies its credentials before it takes over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CredentialCheck {
    /// Callers may be waiting for this engine.
    Skip,
    /// Another engine serves the mount with credentials that work.
    Require,
}

#[derive(Clone, Copy, Debug)]
pub struct OutputLine<'a> {
    pub stream: Stream,
    pub line: &'a [u8],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Liveness {
    Running,
    Exited,
}

/// How an engine exited, with the end of its stderr.
#[derive(Debug)]
pub struct EngineExit {
    /// Fails only if the process was reaped elsewhere.
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

    #[error("failed to pass the descriptors to the engine")]
    Inherit {
        #[source]
        cause: io::Error,
    },

    #[error("this mounter does not keep mounts alive, so it cannot resume one")]
    Unsupervised,

    #[error("failed to read the output of the engine")]
    Watch {
        #[source]
        cause: io::Error,
    },
}

/// Held while descriptors are inheritable, so that no other engine gets them: a copy in another process would make the mount hang
/// after its own engine died.
static SPAWN: Mutex<()> = Mutex::new(());

/// How often a process is polled until it has stopped.
const SUSPEND_INTERVAL: Duration = Duration::from_millis(1);

/// The size of one read; also bounds how long one noisy stream delays the others.
const CHUNK_BYTES: usize = 16 * 1024;

/// What is read at most after the exit: a grandchild may go on writing into the pipe.
const MAX_DRAIN_BYTES: usize = 1024 * 1024;

impl Engine {
    /// Starts an engine with copies of the descriptors.
    pub fn start(
        program: &Path,
        launch: &Launch,
        directories: EngineDirectories<'_>,
        inherited: Inherited<'_>,
    ) -> Result<Self, StartError> {
        let guard = SPAWN.lock().unwrap_or_else(PoisonError::into_inner);
        let inherit = |cause: io::Error| StartError::Inherit { cause };
        // The copies are inheritable, unlike the originals, and are closed before the next engine starts.
        let fuse = rustix::io::dup(inherited.fuse).map_err(|cause| inherit(cause.into()))?;
        let state = inherited.state.map(rustix::io::dup).transpose().map_err(|cause| inherit(cause.into()))?;
        let control = state.is_some().then(UnixStream::pair).transpose().map_err(inherit)?;
        let (ours, theirs) = control.unzip();
        let theirs = theirs.map(rustix::io::dup).transpose().map_err(|cause| inherit(cause.into()))?;

        let mount_point = format!("/dev/fd/{}", fuse.as_raw_fd());
        let mut command = Command::new(program);
        launch.prepare(&mut command, &mount_point, directories);
        command
            // Its error output is shown to users.
            .env("RUST_BACKTRACE", "0")
            .env_remove(DESCRIPTORS_VARIABLE)
            .env_remove(CHECK_CREDENTIALS_VARIABLE)
            .env_remove(OOM_SCORE_VARIABLE)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Ctrl-C in a terminal is for the supervisor; the engine runs until its mount is gone.
            .process_group(0);
        if let (Some(state), Some(control)) = (&state, &theirs) {
            let mut numbers = format!("{},{}", state.as_raw_fd(), control.as_raw_fd());
            if launch.mount_point_passing() == MountPointPassing::Variable {
                let _ = write!(numbers, ",{}", fuse.as_raw_fd());
            }
            command.env(DESCRIPTORS_VARIABLE, numbers);
        }
        if inherited.credential_check == CredentialCheck::Require {
            command.env(CHECK_CREDENTIALS_VARIABLE, "1");
        }
        if let Some(score) = inherited.oom_score {
            command.env(OOM_SCORE_VARIABLE, score.to_string());
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
        // The process is not reaped yet, so its pid cannot belong to another one.
        let pidfd = rustix::process::pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).ok().map(Arc::new);
        let stdout = Output { pipe: Some(stdout), stream: Stream::Stdout, lines: Lines::default() };
        let stderr = Output { pipe: Some(stderr), stream: Stream::Stderr, lines: Lines::default() };
        Ok(Self { child, stdout, stderr, tail: Tail::default(), pidfd, control })
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The process, if the kernel has pidfds.
    pub fn pidfd(&self) -> Option<Arc<OwnedFd>> {
        self.pidfd.clone()
    }

    /// Reads what the engine has written since the last call.
    pub fn read_output(&mut self, emit: &mut dyn FnMut(OutputLine<'_>)) -> Liveness {
        // Checked first, so that everything written before the exit is read below.
        let has_exited = self.pidfd.as_ref().is_some_and(|it| is_readable(it.as_fd()));
        let limit = if has_exited { MAX_DRAIN_BYTES } else { CHUNK_BYTES };
        self.stdout.read(limit, emit, &mut Tail::default());
        self.stderr.read(limit, emit, &mut self.tail);
        let is_silent = self.stdout.pipe.is_none() && self.stderr.pipe.is_none();
        let is_over = has_exited || (is_silent && self.pidfd.is_none());
        if is_over {
            self.stdout.finish(emit);
            self.stderr.finish(emit);
        }
        if is_over { Liveness::Exited } else { Liveness::Running }
    }

    /// Reaps the process, which must have exited or be about to.
    pub fn reap(mut self) -> EngineExit {
        EngineExit { status: self.child.wait(), stderr: self.tail.into_text() }
    }

    /// Sends a byte over the control channel.
    pub fn send(&self, message: u8) {
        if let Some(control) = &self.control {
            // An engine that does not receive it has died, which is noticed elsewhere.
            let _ = rustix::net::send(control, &[message], SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
        }
    }

    pub fn kill(&self) {
        self.signal(Signal::KILL);
    }

    /// Stops all threads of the process. Returns whether they stopped in time; if not, the process continues.
    pub fn suspend(&self, time: Duration) -> bool {
        let Some(process) = &self.pidfd else { return false };
        let deadline = Instant::now() + time;
        self.signal(Signal::STOP);
        loop {
            let options = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG;
            match rustix::process::waitid(WaitId::PidFd(process.as_fd()), options) {
                Ok(Some(status)) if status.stopped() => return true,
                Ok(_) if Instant::now() < deadline => std::thread::sleep(SUSPEND_INTERVAL),
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
        if let Some(process) = &self.pidfd {
            // ESRCH: it has just exited.
            let _ = rustix::process::pidfd_send_signal(process, signal);
        }
    }

    /// The bytes received over the control channel since the last call.
    pub fn receive(&mut self) -> Vec<u8> {
        let Some(control) = &self.control else { return Vec::new() };
        let mut messages = [0; 16];
        match rustix::net::recv(control, &mut messages[..], RecvFlags::DONTWAIT) {
            Ok((length, _)) if length > 0 => messages[..length].to_vec(),
            Err(Errno::AGAIN | Errno::INTR) => Vec::new(),
            Ok(_) | Err(_) => {
                self.control = None;
                Vec::new()
            }
        }
    }

    fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let pipes = [&self.stdout.pipe, &self.stderr.pipe].into_iter().flatten().map(AsFd::as_fd);
        let pidfd = self.pidfd.as_ref().map(|it| it.as_fd());
        let control = self.control.as_ref().map(AsFd::as_fd);
        pipes.chain(pidfd).chain(control)
    }
}

/// Waits until one of the engines has written or sent something or exited, or `wake` is readable, at most for `time`.
pub fn wait_for_activity<'a>(engines: impl Iterator<Item = &'a Engine>, wake: BorrowedFd<'a>, time: Option<Duration>) {
    let descriptors = engines.flat_map(Engine::descriptors).chain(std::iter::once(wake));
    let mut watched: Vec<PollFd<'_>> = descriptors.map(readable).collect();
    let time = time.and_then(|it| Timespec::try_from(it).ok());
    // The result does not matter: the caller checks all engines.
    let _ = rustix::event::poll(&mut watched, time.as_ref());
}

/// One output stream of the engine.
#[derive(Debug)]
struct Output {
    /// `None` once the engine has closed its end.
    pipe: Option<OwnedFd>,
    stream: Stream,
    lines: Lines,
}

impl Output {
    /// Reads what is available, up to a limit.
    fn read(&mut self, limit: usize, emit: &mut dyn FnMut(OutputLine<'_>), tail: &mut Tail) {
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
                    self.lines.push(&chunk[..length], &mut |line| emit(OutputLine { stream: self.stream, line }));
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(_) => self.pipe = None,
            }
        }
    }

    fn finish(&mut self, emit: &mut dyn FnMut(OutputLine<'_>)) {
        let stream = self.stream;
        self.lines.finish(&mut |line| emit(OutputLine { stream, line }));
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
    // This concerns our ends only: those of the engine are other open file descriptions.
    rustix::io::ioctl_fionbio(&stdout, true)?;
    rustix::io::ioctl_fionbio(&stderr, true)?;
    Ok((stdout, stderr))
}
