//! How long a mount takes to answer when neither node plugin nor mounter is involved: the engine's own start.

use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use s3csi_core::credentials::Keys;
use s3csi_core::environment::{DriverSettings, ProfilePaths, engine_environment};
use s3csi_driver::host::{Access, FuseOptions, Host as _, Kernel, Probe};

use crate::scratch::BUCKET;
use s3csi_s3_server::store::Store;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::plugin::{MOUNTER_USER, Plugin};
use s3csi_testbed::process::command;
use s3csi_testbed::processes::running;
use s3csi_testbed::wait::{SOON, wait_until};

/// What has not answered by then is broken, not slow.
pub const LIMIT: Duration = SOON;

/// What every publish of these benchmarks asks for.
const FLAGS: [&str; 3] = ["--allow-delete", "--allow-overwrite", "--force-path-style"];

/// The engine with the flags, the environment and the user that a publish gives it.
pub struct BareEngine<'a> {
    fixture: &'a Fixture,
    program: PathBuf,
    environment: Vec<String>,
}

impl<'a> BareEngine<'a> {
    pub fn prepare(fixture: &'a Fixture, plugin: &Plugin<'_>, store: &dyn Store) -> anyhow::Result<Self> {
        let program = plugin.for_the_mounter("mount-s3")?;
        let account = store.account();
        let files = Keys::driver(&account.access_key, &account.secret_key, None)?.profile_files();
        let (config, credentials) = (fixture.path("config"), fixture.path("credentials"));
        fs::write(&config, files.config).context("failed to write the engine's profile")?;
        fs::write(&credentials, files.credentials.expose()).context("failed to write the engine's profile")?;
        let (config, credentials) = (config.to_string_lossy(), credentials.to_string_lossy());
        let profile = ProfilePaths { config: &config, credentials: &credentials, ca_bundle: None };
        let settings = DriverSettings {
            endpoint_url: Some(store.endpoint()),
            region: Some(store.region().to_owned()),
            ..DriverSettings::default()
        };
        let environment = engine_environment(&settings, profile, &[].into());
        Ok(Self { fixture, program, environment })
    }

    /// Until a mount that was made for it answers; it is gone again afterwards. `name` must be a new one each
    /// time: to look for a free name for its logs would take part of the time.
    pub fn start(&self, host: &Kernel, name: &str, at: &Path) -> anyhow::Result<Duration> {
        let mut command = self.command();
        let start = Instant::now();
        let fuse = host.mount_fuse(at, &FuseOptions { access: Access::ReadWrite, allow_other: true })?;
        command.stdin(Stdio::from(fuse));
        let process = self.fixture.start(name, &mut command)?;
        // With our copy of the descriptor open, an engine that dies would look like one that hangs.
        drop(command);
        let answer = host.probe(at, start + LIMIT);
        let took = start.elapsed();
        remove(host, at)?;
        ensure_alive(&answer).with_context(|| format!("the engine said: {process}"))?;
        let status = process.wait(LIMIT).context("the engine does not end")?;
        ensure!(status.success(), "the engine ended with {status}: {process}");
        Ok(took)
    }

    /// As an administrator starts it: as root, mounting by itself, going on in the background and outliving its own death, as in a
    /// unit. Until the mount answers; it is gone again afterwards.
    pub fn start_in_background(&self, host: &Kernel, name: &str, at: &Path) -> anyhow::Result<Duration> {
        let mut command = self.engine();
        command.args(FLAGS).arg("--keep-alive").arg(BUCKET).arg(at);
        let start = Instant::now();
        let process = self.fixture.start(name, &mut command)?;
        let status = process.wait_precisely(LIMIT).context("the engine does not come up")?;
        ensure!(status.success(), "the engine ended with {status}: {process}");
        let answer = host.probe(at, start + LIMIT);
        let took = start.elapsed();
        ensure_alive(&answer).with_context(|| format!("the engine said: {process}"))?;
        remove(host, at)?;
        let is_gone = wait_until(Instant::now() + LIMIT, || running("mount-s3", self.fixture.directory()).is_empty());
        ensure!(is_gone, "the engine does not end with its mount");
        Ok(took)
    }

    fn command(&self) -> Command {
        let mut command = self.engine();
        command.args([BUCKET, "/dev/fd/0"]).args(FLAGS).args(["--allow-root", "--foreground"]);
        command.uid(MOUNTER_USER).gid(MOUNTER_USER);
        command
    }

    fn engine(&self) -> Command {
        let mut command = command(&self.program);
        command.env_clear().envs(self.environment.iter().filter_map(|it| it.split_once('=')));
        command
    }
}

pub fn ensure_alive(answer: &Probe) -> anyhow::Result<()> {
    match answer {
        Probe::Alive { .. } => Ok(()),
        other => bail!("the mount is {other}"),
    }
}

/// Takes a mount away; the thread that asked it may not be quite gone yet.
pub fn remove(host: &Kernel, at: &Path) -> anyhow::Result<()> {
    if wait_until(Instant::now() + LIMIT, || host.unmount(at).is_ok()) {
        return Ok(());
    }
    host.detach(at)?;
    bail!("{} is in use", at.display())
}
