//! What each rule starts with: a server, a mounter as its own process, and one mount that it keeps.

use std::io::{BufRead as _, BufReader};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use s3csi_core::chain::Chain;
use s3csi_driver::host::{Access, FuseOptions, Host as _, Kernel};
use s3csi_handoff::{self as handoff, Answer, MountRequest};
use s3csi_s3_server::store::Store as _;
use s3csi_s3_server::{Config, S3Server, Transport};
use s3csi_testbed::environment::product;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::process::{Process, command};
use s3csi_testbed::processes;
use s3csi_testbed::wait::{SOON, wait_for, wait_for_some, wait_for_start, wait_until};

pub use s3csi_testbed::noise::noise;

pub const BUCKET: &str = "kept";

/// Declare it after its fixture.
pub struct World<'a> {
    pub store: S3Server,
    fixture: &'a Fixture,
}

/// A mount whose engines are replaced. Must be ended with [`SupervisedMount::unmount`] or [`SupervisedMount::expect_lost`].
pub struct SupervisedMount<'a> {
    pub directory: PathBuf,
    mounter: Process,
    answers: Mutex<BufReader<UnixStream>>,
    fixture: &'a Fixture,
    is_done: bool,
}

/// How a mount differs from the usual one.
#[derive(Default)]
pub struct Options<'a> {
    pub mounter: &'a [&'a str],
    pub engine: &'a [&'a str],
    /// Arguments that the usual mount has and this one has not.
    pub without: &'a [&'a str],
    /// What the engine finds in its environment, too.
    pub environment: &'a [&'a str],
    pub program: Option<&'a Path>,
}

impl<'a> World<'a> {
    pub fn new(fixture: &'a Fixture) -> Self {
        Self::with(fixture, Transport::Plain)
    }

    pub fn with(fixture: &'a Fixture, transport: Transport) -> Self {
        let config = Config { buckets: vec![BUCKET.to_owned()], transport, ..Config::default() };
        let store = S3Server::start_blocking(config).unwrap_or_else(|error| panic!("{}", Chain(&error)));
        Self { store, fixture }
    }

    pub fn put(&self, key: &str, content: &[u8]) {
        self.store.put_object(BUCKET, key, content).unwrap();
    }

    pub fn mount(&self) -> SupervisedMount<'a> {
        self.mount_with(&Options::default())
    }

    pub fn mount_with(&self, options: &Options<'_>) -> SupervisedMount<'a> {
        let place = self.fixture.create_directory("mounter");
        let directory = self.fixture.create_directory("mount");
        let engine = options.program.map_or_else(|| product("mount-s3").unwrap(), Path::to_owned);
        let mut command = command(&product("s3csi-mounter").unwrap());
        command.arg("--directory").arg(&place).arg("--engine").arg(engine).args(options.mounter);
        command.arg("--cache-dir").arg(self.fixture.create_directory("cache"));
        let mounter = self.fixture.start("mounter", &mut command).unwrap();
        let socket = place.join("mount.sock");
        wait_for_start("the mounter listens", || UnixStream::connect(&socket).is_ok());

        let fuse = Kernel::default()
            .mount_fuse(&directory, &FuseOptions { access: Access::ReadWrite, allow_other: true })
            .unwrap_or_else(|error| panic!("{}", Chain(&error)));
        let connection = handoff::connect(&socket, SOON).unwrap();
        handoff::send(&connection, &self.request(options), fuse.as_fd()).unwrap();
        drop(fuse);
        connection.set_read_timeout(Some(SOON)).unwrap();
        let answers = Mutex::new(BufReader::new(connection));
        let mount = SupervisedMount { directory, mounter, answers, fixture: self.fixture, is_done: false };
        assert_eq!(mount.answer(), Answer::Ready, "{}", mount.mounter);
        mount
    }

    pub fn request(&self, options: &Options<'_>) -> MountRequest {
        let account = self.store.account();
        let mut args: Vec<String> =
            ["--allow-delete", "--allow-overwrite", "--force-path-style"].map(Into::into).into();
        args.push(format!("--endpoint-url={}", self.store.endpoint()));
        args.push(format!("--region={}", self.store.region()));
        args.extend(options.engine.iter().map(ToString::to_string));
        args.retain(|it| !options.without.contains(&it.as_str()));
        if let Some(authority) = self.store.authority_pem() {
            let bundle = self.fixture.path("ca.pem");
            std::fs::write(&bundle, authority).unwrap();
            args.push(format!("--ca-bundle={}", bundle.display()));
        }
        let mut env = vec![
            format!("AWS_ACCESS_KEY_ID={}", account.access_key),
            format!("AWS_SECRET_ACCESS_KEY={}", account.secret_key),
            "AWS_EC2_METADATA_DISABLED=true".to_owned(),
            // This distinguishes the engines of a test from those of others.
            format!("HOME={}", self.fixture.directory().display()),
        ];
        env.extend(options.environment.iter().map(ToString::to_string));
        MountRequest { bucket_name: BUCKET.to_owned(), args, env, ..MountRequest::default() }
    }
}

impl SupervisedMount<'_> {
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    pub fn mounter(&self) -> &Process {
        &self.mounter
    }

    /// The next answer of the mounter.
    #[track_caller]
    pub fn answer(&self) -> Answer {
        let mut line = String::new();
        self.answers.lock().unwrap().read_line(&mut line).unwrap_or_else(|error| panic!("{error}: {}", self.mounter));
        Answer::from_line(&line).unwrap_or_else(|_| panic!("{line:?} is no answer: {}", self.mounter))
    }

    /// All engines, the one that serves first.
    pub fn engines(&self) -> Vec<Pid> {
        processes::running("mount-s3", self.fixture.directory())
    }

    /// The process that serves now.
    #[track_caller]
    pub fn engine(&self) -> Pid {
        let find = || self.engines().into_iter().next();
        wait_for_some(Instant::now() + SOON, find).unwrap_or_else(|| panic!("no engine runs: {}", self.mounter))
    }

    pub fn signal_engine(&self, signal: Signal) {
        kill_process(self.engine(), signal).unwrap();
    }

    /// Kills the engine and waits for the report of its successor. Answers what was reported as the cause, and the stall.
    #[track_caller]
    pub fn kill_engine(&self) -> (String, Duration) {
        self.signal_engine(Signal::KILL);
        self.resumed()
    }

    #[track_caller]
    pub fn resumed(&self) -> (String, Duration) {
        match self.answer() {
            Answer::Resumed { cause, stall_milliseconds } => (cause, Duration::from_millis(stall_milliseconds)),
            Answer::Replaced { reason, stall_milliseconds } => {
                (format!("replaced: {reason}"), Duration::from_millis(stall_milliseconds))
            }
            other => panic!("{other:?}: {}", self.mounter),
        }
    }

    /// Unmounts; the engine then exits by itself and is not replaced.
    #[track_caller]
    pub fn unmount(mut self) {
        self.is_done = true;
        let host = Kernel::default();
        let is_gone = wait_until(Instant::now() + SOON, || host.unmount(&self.directory).is_ok());
        assert!(is_gone, "{} is busy", self.directory.display());
        assert_eq!(self.answer(), Answer::Exited { code: Some(0), signal: None, error: String::new() });
        assert!(self.mounter.terminate().success(), "{}", self.mounter);
    }

    /// Takes the mount away after the mounter was killed.
    #[track_caller]
    pub fn abandon(mut self) {
        self.is_done = true;
        let host = Kernel::default();
        assert!(wait_until(Instant::now() + SOON, || host.unmount(&self.directory).is_ok()));
        wait_for("the engine ends", || processes::running("mount-s3", self.fixture.directory()).is_empty());
        std::fs::remove_file(self.fixture.path("mounter/mount.sock")).unwrap();
    }

    /// The mount was given up.
    #[track_caller]
    pub fn expect_lost(self) {
        match self.answer() {
            Answer::Exited { .. } => self.end(),
            other => panic!("{other:?}: {}", self.mounter),
        }
    }

    /// Takes away a mount that was given up.
    #[track_caller]
    pub fn end(mut self) {
        self.is_done = true;
        let host = Kernel::default();
        assert!(wait_until(Instant::now() + SOON, || host.unmount(&self.directory).is_ok()));
        assert!(self.mounter.terminate().success(), "{}", self.mounter);
    }
}

impl Drop for SupervisedMount<'_> {
    fn drop(&mut self) {
        if !self.is_done {
            // A test that panicked.
            let _ = Kernel::default().detach(&self.directory);
        }
    }
}

/// Expects a system call to fail with this error number.
#[track_caller]
pub fn check_errno<T>(result: std::io::Result<T>, expected: rustix::io::Errno) {
    match result {
        Ok(_) => panic!("this should have failed with {expected:?}"),
        Err(error) => assert_eq!(error.raw_os_error(), Some(expected.raw_os_error()), "{error}"),
    }
}
