//! The frame of one test with real mounts and processes: owns a directory, and proves at its end that nothing is left.
//! What runs in it (servers, engines, the node plugin) is started by other modules.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::Pid;

use crate::environment;
use crate::leftovers::Leftovers;
use crate::process::{Process, ProcessError};
use crate::wait::wait_patiently_until;

/// Engines end some milliseconds after their mount is gone; a busy machine takes its time.
const GONE_DEADLINE: Duration = Duration::from_secs(10);

/// Declare it before everything that lives in it: it must be dropped last.
pub struct Fixture {
    directory: PathBuf,
    logs: PathBuf,
    started: Mutex<Vec<(Pid, String)>>,
    is_finished: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum FixtureError {
    #[error("tests with real mounts need root")]
    NotRoot,
    #[error("there is no /dev/fuse; load the kernel module: modprobe fuse")]
    NoFuse,
    #[error(
        "tests with real mounts need a mount namespace of their own; \
         run: make test-node, or: unshare -m --propagation private cargo test …"
    )]
    SharedNamespace,
    #[error("failed to make {path:?}")]
    Directory {
        path: PathBuf,
        #[source]
        cause: std::io::Error,
    },
    #[error("this was left behind by the test:\n{0}")]
    Left(Leftovers),
}

impl Fixture {
    /// For tests. Panics with the reason when this machine cannot run them.
    #[track_caller]
    pub fn new(name: &str) -> Self {
        match Self::prepare(name) {
            Ok(fixture) => fixture,
            Err(error) => panic!("{error}"),
        }
    }

    /// `name` is for humans who look for the logs.
    pub fn prepare(name: &str) -> Result<Self, FixtureError> {
        if !rustix::process::geteuid().is_root() {
            return Err(FixtureError::NotRoot);
        }
        if !Path::new("/dev/fuse").exists() {
            return Err(FixtureError::NoFuse);
        }
        // Mounts of a shared namespace would be copied into containers, which then keep the engines alive.
        let namespace = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/mnt")).ok();
        // Beside a systemd of our own the first process is that systemd, and its namespace is not the machine's.
        if namespace("self") == namespace("1") && !environment::is_beside_systemd() {
            return Err(FixtureError::SharedNamespace);
        }
        let directory = temporary_directory()?;
        let logs = match environment::log_directory() {
            Some(logs) => logs.join(format!("{name}-{}", file_name(&directory))),
            None => directory.join("logs"),
        };
        fs::create_dir_all(&logs).map_err(|cause| FixtureError::Directory { path: logs.clone(), cause })?;
        Ok(Self { directory, logs, started: Mutex::default(), is_finished: false })
    }

    /// A short path, so that sockets beneath it fit into 107 bytes.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Makes a directory in the fixture's, with those above it.
    #[track_caller]
    pub fn create_directory(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(&path).unwrap_or_else(|error| panic!("failed to make {}: {error}", path.display()));
        path
    }

    pub fn logs(&self) -> &Path {
        &self.logs
    }

    pub fn start(&self, name: &str, command: &mut Command) -> Result<Process, ProcessError> {
        let process = Process::start(&self.logs, name, command)?;
        self.started.lock().unwrap_or_else(PoisonError::into_inner).push((process.pid(), name.to_owned()));
        Ok(process)
    }

    /// What is there right now. Processes that the test still uses count too.
    pub fn leftovers(&self) -> Leftovers {
        let started = self.started.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Leftovers::of(&self.directory, &started)
    }

    /// Ends the fixture and says what it left, after removing that by force.
    pub fn finish(self) -> Result<(), FixtureError> {
        self.finish_within(GONE_DEADLINE)
    }

    /// The same, with another idea of how long things may take to vanish.
    pub fn finish_within(mut self, limit: Duration) -> Result<(), FixtureError> {
        self.end(limit)
    }

    fn end(&mut self, limit: Duration) -> Result<(), FixtureError> {
        self.is_finished = true;
        let mut leftovers = self.leftovers();
        let is_clean = wait_patiently_until(Instant::now() + limit, || {
            leftovers = self.leftovers();
            leftovers.is_empty() || std::thread::panicking()
        });
        leftovers.clean();
        if !leftovers.is_empty() {
            // Killed processes need a moment until they hold nothing in the directory any more.
            let _ = wait_patiently_until(Instant::now() + GONE_DEADLINE, || {
                let rest = self.leftovers();
                rest.clean();
                rest.is_empty() || std::thread::panicking()
            });
        }
        let removed = fs::remove_dir_all(&self.directory);
        match (is_clean, removed) {
            (false, _) => Err(FixtureError::Left(leftovers)),
            (true, Err(cause)) => Err(FixtureError::Directory { path: self.directory.clone(), cause }),
            (true, Ok(())) => Ok(()),
        }
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        if self.is_finished {
            return;
        }
        match self.end(GONE_DEADLINE) {
            Err(error) if !std::thread::panicking() => panic!("{error}"),
            _ => {}
        }
    }
}

fn temporary_directory() -> Result<PathBuf, FixtureError> {
    let failed = |cause| FixtureError::Directory { path: "/tmp/s3csi-…".into(), cause };
    let directory = tempfile::Builder::new().prefix("s3csi-").rand_bytes(6).tempdir_in("/tmp").map_err(failed)?.keep();
    // Mounters may run as another user, who must come through.
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o755)).map_err(failed)?;
    Ok(directory)
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}
