//! Starts the engine `mount-s3` by itself, without mounter and node plugin, as a user in a terminal would.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use s3csi_core::chain::Chain;
use s3csi_driver::host::{Access, FuseOptions, Host as _, Kernel};

use crate::environment::product;
use crate::fixture::Fixture;
use crate::leftovers::mounts_beneath;
use crate::process::{Process, command};
use crate::wait::{SOON, wait_for, wait_until};
use s3csi_s3_server::store::{Account, Store};

/// One mount to be made: bucket, keys, flags. Everything in it panics with the reason, since only tests use it.
pub struct EngineLauncher<'a> {
    fixture: &'a Fixture,
    store: &'a dyn Store,
    bucket: String,
    account: Option<Account>,
    endpoint: Option<String>,
    trust: Trust,
    arguments: Vec<OsString>,
    environment: Vec<(String, String)>,
    processes: ProcessVisibility,
}

/// Which processes the engine sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessVisibility {
    All,
    /// Its own and its children; as in a container.
    Own,
}

/// How the engine learns about the server's certificate authority.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trust {
    /// `--ca-bundle`
    Flag,
    /// `AWS_CA_BUNDLE`
    Environment,
    /// Not at all.
    Nothing,
}

/// A mount that is served.
pub struct EngineMount<'a> {
    fixture: &'a Fixture,
    directory: PathBuf,
    /// Absent in background mode: the engine is no child of ours then.
    process: Option<Process>,
    end: End,
}

/// Who takes the mount away.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Unmount,
    Done,
}

/// How an engine ended that could not start.
pub struct FailedStart {
    pub status: ExitStatus,
    pub output: String,
    pub errors: String,
    pub took: Duration,
}

impl<'a> EngineLauncher<'a> {
    pub fn new(fixture: &'a Fixture, store: &'a dyn Store, bucket: &str) -> Self {
        Self {
            fixture,
            store,
            bucket: bucket.to_owned(),
            account: Some(store.account().clone()),
            endpoint: None,
            trust: Trust::Flag,
            arguments: Vec::new(),
            environment: Vec::new(),
            processes: ProcessVisibility::All,
        }
    }

    /// In a pid namespace of its own, or not.
    #[must_use]
    pub fn processes(mut self, processes: ProcessVisibility) -> Self {
        self.processes = processes;
        self
    }

    /// With permission to delete and to overwrite, which the engine does not give by itself.
    #[must_use]
    pub fn writable(self) -> Self {
        self.argument("--allow-delete").argument("--allow-overwrite")
    }

    #[must_use]
    pub fn argument(mut self, argument: impl Into<OsString>) -> Self {
        self.arguments.push(argument.into());
        self
    }

    #[must_use]
    pub fn environment(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    #[must_use]
    pub fn account(mut self, account: &Account) -> Self {
        self.account = Some(account.clone());
        self
    }

    #[must_use]
    pub fn without_account(mut self) -> Self {
        self.account = None;
        self
    }

    #[must_use]
    pub fn endpoint(mut self, endpoint: &str) -> Self {
        self.endpoint = Some(endpoint.to_owned());
        self
    }

    #[must_use]
    pub fn trust(mut self, trust: Trust) -> Self {
        self.trust = trust;
        self
    }

    /// In the foreground, on a directory.
    #[track_caller]
    pub fn mount(&self) -> EngineMount<'a> {
        let directory = self.mount_point();
        let mut command = self.command(&directory);
        self.serve(directory, command.arg("--foreground"))
    }

    /// The same on a directory of the caller's, such as the target of a volume.
    #[track_caller]
    pub fn mount_at(&self, directory: &Path) -> EngineMount<'a> {
        let mut command = self.command(directory);
        self.serve(directory.to_owned(), command.arg("--foreground"))
    }

    /// In the foreground, on a FUSE connection that another process mounted: what a mounter does.
    #[track_caller]
    pub fn mount_by_descriptor(&self, access: Access) -> EngineMount<'a> {
        let directory = self.mount_point();
        let fuse = Kernel::default()
            .mount_fuse(&directory, &FuseOptions { access, allow_other: true })
            .unwrap_or_else(|error| panic!("{}", Chain(&error)));
        let mut command = self.command(Path::new("/dev/fd/0"));
        // As standard input it is inherited by this child and by no other one that starts at the same moment.
        command.arg("--foreground").stdin(Stdio::from(fuse));
        let process = self.start(&mut command);
        // Our own copy, kept by the command, would turn the engine's death into a hang.
        drop(command);
        self.ready(directory, process)
    }

    /// As a daemon: the program ends once the mount is there.
    #[track_caller]
    pub fn mount_in_background(&self) -> EngineMount<'a> {
        let directory = self.mount_point();
        let process = self.start(&mut self.command(&directory));
        let status = process.wait_for_end();
        assert!(status.success(), "the engine did not go to the background: {status}{process}");
        assert!(process.log_contains(" is mounted at "), "the engine did not say that it is mounted: {process}");
        EngineMount { fixture: self.fixture, directory, process: None, end: End::Unmount }
    }

    /// Expects the engine to refuse, within `limit`.
    #[track_caller]
    pub fn refusal(&self, limit: Duration) -> FailedStart {
        let directory = self.mount_point();
        let started = Instant::now();
        let process = self.start(self.command(&directory).arg("--foreground"));
        let Some(status) = process.wait(limit) else {
            panic!("the engine did not give up within {limit:?}: {process}");
        };
        let took = started.elapsed();
        assert_eq!(mounts_beneath(&directory), Vec::<PathBuf>::new(), "the engine ended and left its mount");
        FailedStart { status, output: process.output(), errors: process.errors(), took }
    }

    fn serve(&self, directory: PathBuf, command: &mut Command) -> EngineMount<'a> {
        let process = self.start(command);
        self.ready(directory, process)
    }

    fn ready(&self, directory: PathBuf, process: Process) -> EngineMount<'a> {
        process.wait_for_log(" is mounted at ");
        EngineMount { fixture: self.fixture, directory, process: Some(process), end: End::Unmount }
    }

    fn start(&self, command: &mut Command) -> Process {
        self.fixture.start("mount-s3", command).unwrap_or_else(|error| panic!("{}", Chain(&error)))
    }

    fn mount_point(&self) -> PathBuf {
        let number = fs::read_dir(self.fixture.create_directory("mounts")).map_or(0, Iterator::count);
        self.fixture.create_directory(&format!("mounts/{number}"))
    }

    fn command(&self, mount_point: &Path) -> Command {
        let program = product("mount-s3").unwrap_or_else(|error| panic!("{}", Chain(&error)));
        let mut command = match self.processes {
            ProcessVisibility::All => command(&program),
            ProcessVisibility::Own => {
                let mut command = command(Path::new("unshare"));
                command.args(["--pid", "--fork", "--kill-child", "--"]).arg(&program);
                command
            }
        };
        let endpoint = self.endpoint.clone().unwrap_or_else(|| self.store.endpoint());
        command.arg(&self.bucket).arg(mount_point).args(["--force-path-style", "--endpoint-url", &endpoint]);
        command.args(["--region", self.store.region()]).args(&self.arguments);
        command.env("AWS_EC2_METADATA_DISABLED", "true").env("HOME", self.fixture.directory());
        if let Some(account) = &self.account {
            command.env("AWS_ACCESS_KEY_ID", &account.access_key).env("AWS_SECRET_ACCESS_KEY", &account.secret_key);
        }
        if let Some(authority) = self.store.authority_pem() {
            let bundle = self.fixture.path("ca.pem");
            fs::write(&bundle, authority).expect("a file in the fixture's directory");
            match self.trust {
                Trust::Flag => command.arg("--ca-bundle").arg(bundle),
                Trust::Environment => command.env("AWS_CA_BUNDLE", bundle),
                Trust::Nothing => &mut command,
            };
        }
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
    }
}

impl EngineMount<'_> {
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// The engine, unless it went to the background.
    pub fn process(&self) -> Option<&Process> {
        self.process.as_ref()
    }

    /// Takes the mount away and expects the engine to end by itself, with success.
    #[track_caller]
    pub fn unmount(mut self) {
        self.end = End::Done;
        let host = Kernel::default();
        // Somebody may still be closing a file, this test's own program included when it starts another one.
        let is_gone = wait_until(Instant::now() + SOON, || host.unmount(&self.directory).is_ok());
        assert!(is_gone, "{} is busy", self.directory.display());
        match &self.process {
            Some(process) => {
                let status = process.wait_for_end();
                assert!(status.success(), "the engine ended with {status}: {process}");
            }
            None => wait_for("the engine in the background ends", || {
                let left = self.fixture.leftovers().to_string();
                !left.contains(&*self.directory.to_string_lossy())
            }),
        }
    }
}

impl Drop for EngineMount<'_> {
    fn drop(&mut self) {
        if self.end == End::Unmount {
            // A test that panicked: by force, and the engine with it.
            let _ = Kernel::default().detach(&self.directory);
        }
    }
}
