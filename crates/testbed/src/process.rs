//! A child process of a fixture: its output goes to files, and it does not outlive the test.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

use crate::wait::{SOON, wait_for_some, wait_until};

/// A running, or ended, program. Dropping it kills it.
pub struct Process {
    name: String,
    pid: Pid,
    child: Mutex<Child>,
    output: PathBuf,
    errors: PathBuf,
}

#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    #[error("failed to open the log {path:?}")]
    Log {
        path: PathBuf,
        #[source]
        cause: std::io::Error,
    },
    #[error("failed to start {program:?}")]
    Start {
        program: String,
        #[source]
        cause: std::io::Error,
    },
}

impl Process {
    /// `logs` is the directory for `<name>.out.log` and `<name>.err.log`; several processes may have one name.
    pub(crate) fn start(logs: &Path, name: &str, command: &mut Command) -> Result<Self, ProcessError> {
        let (output, output_file) = open_log(logs, name, "out")?;
        let (errors, errors_file) = open_log(logs, name, "err")?;
        command.stdout(output_file).stderr(errors_file);
        let program = command.get_program().to_string_lossy().into_owned();
        let child = command.spawn().map_err(|cause| ProcessError::Start { program, cause })?;
        let pid = Pid::from_child(&child);
        Ok(Self { name: name.to_owned(), pid, child: Mutex::new(child), output, errors })
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// What it wrote to standard output so far.
    pub fn output(&self) -> String {
        read(&self.output)
    }

    /// What it wrote to standard error so far.
    pub fn errors(&self) -> String {
        read(&self.errors)
    }

    pub fn log_contains(&self, text: &str) -> bool {
        self.output().contains(text) || self.errors().contains(text)
    }

    /// Panics when the text does not appear soon, or the process ends before.
    #[track_caller]
    pub fn wait_for_log(&self, text: &str) {
        let is_there = wait_until(Instant::now() + SOON, || self.log_contains(text) || !self.is_running());
        assert!(
            is_there && self.log_contains(text),
            "{} never said {text:?}; its end: {:?}; it said: {self}",
            self.name,
            self.exited()
        );
    }

    pub fn is_running(&self) -> bool {
        self.exited().is_none()
    }

    /// How it ended, if it has.
    pub fn exited(&self) -> Option<ExitStatus> {
        self.child().try_wait().ok().flatten()
    }

    pub fn wait(&self, limit: Duration) -> Option<ExitStatus> {
        wait_for_some(Instant::now() + limit, || self.exited())
    }

    /// The same for those who measure how long it takes: without a pause that would be measured too.
    pub fn wait_precisely(&self, limit: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + limit;
        let pidfd = pidfd_open(self.pid, PidfdFlags::empty()).ok()?;
        let limit = Timespec::try_from(limit).ok()?;
        poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&limit)).ok()?;
        wait_for_some(deadline, || self.exited())
    }

    /// Panics when it is still running after a while.
    #[track_caller]
    pub fn wait_for_end(&self) -> ExitStatus {
        match self.wait(SOON) {
            Some(status) => status,
            None => panic!("{} does not end; it said: {self}", self.name),
        }
    }

    /// A process that has ended is none: its number may belong to another one by now.
    pub fn signal(&self, signal: Signal) {
        let mut child = self.child();
        if let Ok(None) = child.try_wait() {
            let _ = kill_process(self.pid, signal);
        }
    }

    /// Ends it with SIGKILL and waits until it is gone.
    pub fn kill(&self) {
        let mut child = self.child();
        let _ = child.kill();
        let _ = child.wait();
    }

    /// Asks it to end with SIGTERM and waits. Panics when it does not.
    #[track_caller]
    pub fn terminate(&self) -> ExitStatus {
        self.signal(Signal::TERM);
        self.wait_for_end()
    }

    fn child(&self) -> MutexGuard<'_, Child> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Display for Process {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "\n{}{}", self.output(), self.errors())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // A stopped process obeys SIGKILL too.
        self.kill();
        if std::thread::panicking() {
            // The log may be gone with the fixture's directory when a person comes to look.
            let text = format!("---- log of {} ----{self}\n", self.name);
            let _ = std::io::stderr().write_all(text.as_bytes());
        }
    }
}

/// The environment of a child: nothing of ours but the search path, so that a test means the same everywhere.
/// The back trace is asked for on purpose: it must not appear in anything a user reads.
#[must_use]
pub fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.env_clear().env("PATH", crate::environment::search_path()).env("RUST_BACKTRACE", "1").stdin(Stdio::null());
    command
}

fn open_log(logs: &Path, name: &str, stream: &str) -> Result<(PathBuf, File), ProcessError> {
    let mut number = 1;
    loop {
        let suffix = if number == 1 { String::new() } else { format!("-{number}") };
        let path = logs.join(format!("{name}{suffix}.{stream}.log"));
        match File::options().append(true).create_new(true).open(&path) {
            Ok(file) => return Ok((path, file)),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => number += 1,
            Err(cause) => return Err(ProcessError::Log { path, cause }),
        }
    }
}

fn read(path: &Path) -> String {
    fs::read(path).map(|it| String::from_utf8_lossy(&it).into_owned()).unwrap_or_default()
}
