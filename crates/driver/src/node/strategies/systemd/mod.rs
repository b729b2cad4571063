//! Strategy `systemd`: one transient unit per target. The engine mounts itself at the target, and systemd keeps it running when the
//! node plugin ends. Units are looked up in systemd, mounts in the kernel's mount table.

mod directories;
mod error;
mod mounts;
mod recovery;
mod sweep;
mod units;

use std::ffi::OsStr;
use std::fmt::Display;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use s3csi_core::credentials::Keys;
use s3csi_core::publish::{Access, Publish};
use s3csi_handoff::KEEP_ALIVE_VARIABLE;

pub use self::directories::{CacheDirs, StageDirs};
pub use self::error::UnitError;
pub use self::mounts::UnitMounts;
pub use self::recovery::{CrashLimiter, Recovery};
pub use self::sweep::REASONS as SWEEP_REASONS;
use self::sweep::Sweeper;
pub use self::units::UnitCache;
use crate::credentials::{self, EngineFiles};
use crate::host::{Probe, SafeDir, SafeDirError};
use crate::keyed_locks::KeyedLocks;
use crate::node::deadlines;
use crate::node::engine_config::EngineConfig;
use crate::node::error::{PublishError, UnpublishError};
use crate::node::failpoints::{Failpoint, Failpoints};
use crate::node::legacy_v1::{CREDENTIALS_VARIABLE, LegacyProfiles, Profile};
use crate::node::other_mounts::directory_name;
use crate::node::remediation::Remediations;
use crate::node::reporter::{MountOutcome, Reporter};
use crate::node::strategies::PublishOutcome;
use crate::node::timing::{CallPhase, CallTimer};
use crate::systemd::{Limits, UnitCommand};

/// As version 1 created it.
const TARGET_MODE: u32 = 0o755;

/// Engines run as root; no other user needs access.
const CREDENTIALS_MODE: u32 = 0o700;

/// Most engines end with their mount; one that finishes an upload gets this long before it is stopped.
const UPLOAD_TIMEOUT: Duration = Duration::from_secs(5);

pub struct SystemdUnits {
    pub mounts: UnitMounts,
    pub caches: CacheDirs,
    pub stages: StageDirs,
    pub legacy: LegacyProfiles,
    /// The engine's path on the host.
    pub engine: PathBuf,
    pub engine_config: EngineConfig,
    /// Limits of every engine, unless its volume sets others.
    pub limits: Limits,
    pub recovery: EngineRecovery,
    /// One change per target at a time.
    pub locks: KeyedLocks,
    pub failpoints: Failpoints,
    pub remediations: Remediations,
    pub reporter: Arc<Reporter>,
    pub crashes: CrashLimiter,
}

/// One credentials directory per target.
pub struct CredentialDirs {
    pub path: PathBuf,
    /// The same directory as the host sees it.
    pub host_view: PathBuf,
}

/// What happens to a mount whose engine dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineRecovery {
    /// Its unit starts a new engine on the same mount: a pause, and open files stay valid.
    InPlace,
    /// The mount dies with the engine, and the target is mounted again.
    Remount,
}

/// A parsed publish call.
struct PublishTask<'a> {
    publish: &'a Publish,
    keys: &'a Keys,
    /// Name of its credentials directory.
    name: &'a str,
    deadline: Instant,
}

/// What a failed publish must remove again.
#[derive(Default)]
struct Created {
    directory: bool,
    credentials: bool,
}

impl SystemdUnits {
    pub fn publish(
        &self,
        publish: &Publish,
        limits: Limits,
        deadline: Instant,
        timer: &CallTimer,
    ) -> Result<PublishOutcome, PublishError> {
        let keys = &self.engine_config.keys(publish)?;
        let name = directory_name(&publish.target);
        // Invalid options are refused before anything is created.
        let command = self.command(&self.caches.redirect(publish, &name), &name, limits)?;
        let busy = || PublishError::SourceBusy { bucket: publish.bucket.to_string() };
        let _held = self.locks.lock(&name, deadline).ok_or_else(busy)?;
        self.failpoints.hit(Failpoint::Locked);
        let mut created = Created::default();
        let task = PublishTask { publish, keys, name: &name, deadline };
        let outcome = self.ensure(&task, command, &mut created, timer);
        match &outcome {
            Ok(_) => self.failpoints.hit(Failpoint::Bound),
            Err(_) => self.undo(publish.target.path(), &name, &created),
        }
        outcome.map(|mounted| PublishOutcome { mounted, source: None })
    }

    /// Ensures directory, credentials and unit. The caller holds the target's lock and removes what was created after an error.
    fn ensure(
        &self,
        task: &PublishTask<'_>,
        mut command: UnitCommand,
        created: &mut Created,
        timer: &CallTimer,
    ) -> Result<MountOutcome, PublishError> {
        let PublishTask { publish, name, deadline, .. } = *task;
        let bucket = publish.bucket.to_string();
        let target = publish.target.path();
        let failed = |cause| PublishError::Unit { bucket: bucket.clone(), target: target.to_owned(), cause };
        let start = Instant::now();
        let (resolved, found) = self.prepare_target(target, created, deadline)?;
        // Only the kernel knows what is dead. A silent engine may wait for a store that is away.
        let is_dead = matches!(found, Probe::Dead(_));
        let silence = matches!(found, Probe::Hung).then(|| start.elapsed());
        if is_dead {
            tracing::info!(?target, %found, "removing a dead mount");
            self.mounts.clear(&resolved, deadline).map_err(failed)?;
        }
        let is_mounted = self.is_mounted(target, &resolved)?;
        created.credentials = !self.mounts.credentials.exists(name);
        if is_mounted
            && created.credentials
            && let Some(outcome) = self.refresh_legacy(task, &resolved)?
        {
            return Ok(outcome);
        }
        // On every call, mounted or not: this is how rotated keys reach a running engine.
        timer
            .time(CallPhase::Credentials, || self.mounts.credentials.ensure(name, task.keys))
            .map_err(|cause| PublishError::Credentials { bucket: bucket.clone(), cause })?;
        self.failpoints.hit(Failpoint::CredentialsWritten);
        if is_mounted {
            created.credentials = false;
            let silent = |silence| PublishError::Silent { target: target.to_owned(), silence };
            return silence.map_or(Ok(MountOutcome::AlreadyMounted), |it| Err(silent(it)));
        }
        let unusable = |cause| PublishError::EngineDirectory { bucket: bucket.clone(), cause };
        self.caches.prepare(publish, name).map_err(unusable)?;
        self.stages.prepare(name).map_err(unusable)?;
        if let Some(last) = command.command.last_mut() {
            *last = resolved.to_string_lossy().into_owned();
        }
        timer.time(CallPhase::Source, || self.mounts.start(&bucket, &resolved, &command, deadline)).map_err(failed)?;
        Ok(if is_dead { MountOutcome::Remounted } else { MountOutcome::Mounted })
    }

    /// Creates a missing target directory. Returns the path as the mount table spells it, and what is there.
    fn prepare_target(
        &self,
        target: &Path,
        created: &mut Created,
        deadline: Instant,
    ) -> Result<(PathBuf, Probe), PublishError> {
        let host = self.mounts.host.as_ref();
        let unusable = |cause| PublishError::Target { target: target.to_owned(), cause };
        let found = host.probe(target, deadlines::within(deadlines::PUBLISH, deadline));
        if matches!(found, Probe::Missing) {
            host.create_directory(target, TARGET_MODE).map_err(unusable)?;
            created.directory = true;
            self.failpoints.hit(Failpoint::DirectoryCreated);
        }
        Ok((host.resolve(target).map_err(unusable)?, found))
    }

    /// Whether a mount of ours is at the target. A foreign one is an error.
    fn is_mounted(&self, target: &Path, resolved: &Path) -> Result<bool, PublishError> {
        let table = self.mounts.host.mount_table().map_err(|cause| PublishError::Look { cause })?;
        match table.at(resolved) {
            Some(mount) if mount.is_ours() => Ok(true),
            Some(mount) => {
                let (kind, device) = (mount.kind.clone(), mount.source.clone());
                Err(PublishError::ForeignMount { target: target.to_owned(), kind, device })
            }
            None => Ok(false),
        }
    }

    /// Refreshes the keys of a target that version 1 mounted; `None` if it did not.
    fn refresh_legacy(&self, task: &PublishTask<'_>, resolved: &Path) -> Result<Option<MountOutcome>, PublishError> {
        let bucket = || task.publish.bucket.to_string();
        let origin = self.origin(resolved, task.name, task.deadline).map_err(|cause| PublishError::Unit {
            bucket: bucket(),
            target: task.publish.target.path().to_owned(),
            cause,
        })?;
        match origin {
            Some(Origin::Files(profile)) => self
                .legacy
                .refresh(&profile, task.keys)
                .map(|()| Some(MountOutcome::AlreadyMounted))
                .map_err(|cause| PublishError::Credentials { bucket: bucket(), cause }),
            Some(Origin::Fixed) => Ok(Some(MountOutcome::AlreadyMounted)),
            None => Ok(None),
        }
    }

    /// Where the engine of a mounted target reads its keys, if not in the credentials directory `name`.
    fn origin(&self, target: &Path, name: &str, deadline: Instant) -> Result<Option<Origin>, UnitError> {
        let EngineFiles { credentials: ours, .. } = credentials::paths(&self.mounts.credentials.host_view.join(name));
        let units = self.mounts.list(deadline).map_err(|cause| UnitError::Systemd { cause })?;
        let Some(serving) = units.iter().find(|it| it.target == target && it.active.is_running()) else {
            return Ok(None);
        };
        let environment = &serving.command.environment;
        if environment.contains(&format!("{CREDENTIALS_VARIABLE}={ours}")) {
            return Ok(None);
        }
        Ok(Some(self.legacy.of_environment(environment).map_or(Origin::Fixed, Origin::Files)))
    }

    /// The command of a unit; its last argument is the target.
    fn command(&self, publish: &Publish, name: &str, limits: Limits) -> Result<UnitCommand, PublishError> {
        let mut engine = self.engine_config.command(publish, &self.mounts.credentials.host_view.join(name))?;
        let mut command = vec![self.engine.to_string_lossy().into_owned()];
        command.extend(self.stages.with_stage(engine.arguments, name));
        // The mount belongs to this workload alone, so the mount itself is read-only and no bind mount is needed.
        if publish.access == Access::ReadOnly {
            command.push("--read-only".to_owned());
        }
        command.push(publish.bucket.to_string());
        command.push(publish.target.path().to_string_lossy().into_owned());
        if self.recovery == EngineRecovery::InPlace {
            // A variable and not a flag, because other engines must accept it.
            engine.environment.push(format!("{KEEP_ALIVE_VARIABLE}=1"));
        }
        let limits = Limits {
            memory_bytes: limits.memory_bytes.or(self.limits.memory_bytes),
            cpu_millis: limits.cpu_millis.or(self.limits.cpu_millis),
            tasks: limits.tasks.or(self.limits.tasks),
        };
        Ok(UnitCommand { command, environment: engine.environment, limits, started: 0 })
    }

    /// Removes what a failed publish created.
    fn undo(&self, target: &Path, name: &str, created: &Created) {
        if created.directory {
            log_if_failed("target directory not removed", self.mounts.host.remove_directory(target));
        }
        if created.credentials {
            log_if_failed("credentials not removed", self.mounts.credentials.remove(name));
            self.remove_directories(name);
        }
    }

    /// Without their unit, they only take disk space.
    fn remove_directories(&self, name: &str) {
        log_if_failed("cache not removed", self.caches.remove(name));
        log_if_failed("staging directory not removed", self.stages.remove(name));
    }

    /// Removes the mount, its unit, its directory and its credentials.
    pub fn unpublish(&self, target: &Path, deadline: Instant) -> Result<(), UnpublishError> {
        let host = self.mounts.host.as_ref();
        // A target without a parent directory has no mount either; then the plain path serves.
        let resolved = &host.resolve(target).unwrap_or_else(|_| target.to_owned());
        let name = directory_name_of_path(target);
        let lock = name.clone().unwrap_or_else(|| target.to_string_lossy().into_owned());
        let busy = || UnpublishError::SourceBusy { target: target.to_owned() };
        let _held = self.locks.lock(&lock, deadline).ok_or_else(busy)?;
        self.failpoints.hit(Failpoint::Locked);
        let failed = |cause| UnpublishError::Unit { target: target.to_owned(), cause };
        // Looked up first: the answer disappears with the unit.
        let origin = match &name {
            Some(name) if !self.mounts.credentials.exists(name) => {
                self.origin(resolved, name, deadline).map_err(failed)?
            }
            _ => None,
        };
        self.mounts.unmount(target, resolved, deadline)?;
        self.failpoints.hit(Failpoint::Unbound);
        self.mounts
            .end_units(resolved, UPLOAD_TIMEOUT, deadline)
            .map_err(|cause| failed(UnitError::Systemd { cause }))?;
        self.failpoints.hit(Failpoint::EngineEnded);
        host.remove_directory(target).map_err(|cause| UnpublishError::Remove { path: target.to_owned(), cause })?;
        self.failpoints.hit(Failpoint::TargetRemoved);
        if let Some(name) = name {
            let forget = |cause| UnpublishError::Forget { source_name: name.clone(), cause };
            self.mounts.credentials.remove(&name).map_err(forget)?;
            self.remove_directories(&name);
            if let Some(Origin::Files(profile)) = origin {
                self.legacy.remove(&profile).map_err(forget)?;
            }
        }
        self.failpoints.hit(Failpoint::CredentialsRemoved);
        Ok(())
    }

    /// Repairs what a crash or manual changes left.
    pub fn sweep(&self) {
        Sweeper(self).run();
    }

    /// Unmounts sources without a user that another strategy left.
    pub fn retire_sources(&self, sources: &Path, is_left: impl Fn(&str) -> bool) {
        Sweeper(self).retire_sources(sources, is_left);
    }
}

/// Where the engine of an earlier version reads its keys.
enum Origin {
    Files(Profile),
    /// In its environment: they cannot be refreshed.
    Fixed,
}

impl CredentialDirs {
    /// The name of the directory in which an engine with this environment reads its keys.
    fn named_in<'a>(&self, environment: &'a [String]) -> Option<&'a OsStr> {
        let mut variables = environment.iter().filter_map(|it| it.split_once('='));
        let (_, file) = variables.find(|(name, _)| *name == CREDENTIALS_VARIABLE)?;
        Path::new(file).strip_prefix(&self.host_view).ok()?.components().next().map(Component::as_os_str)
    }

    fn exists(&self, name: &str) -> bool {
        self.path.join(name).exists()
    }

    fn ensure(&self, name: &str, keys: &Keys) -> Result<(), SafeDirError> {
        let directory = SafeDir::open(&self.path)?.make_directory(name, CREDENTIALS_MODE, Some(0))?;
        credentials::ensure(&directory, keys, 0)
    }

    fn remove(&self, name: &str) -> Result<(), SafeDirError> {
        SafeDir::open(&self.path)?.remove_tree(name)
    }
}

/// The same for an unchecked path: of a unit, of the mount table, of an unpublish.
fn directory_name_of_path(target: &Path) -> Option<String> {
    Some(directory_name(&target.to_str()?.parse().ok()?))
}

/// For clean-up after a failure, when the first error is the one to return.
fn log_if_failed<T, E: Display>(what: &str, outcome: Result<T, E>) {
    if let Err(error) = outcome {
        tracing::warn!(%error, "{what}; the next sweep retries");
    }
}
