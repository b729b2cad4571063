//! Strategy `systemd`: one transient unit per target. The engine mounts itself at the target, and systemd keeps it running when the
//! node plugin ends. Units are looked up in systemd, mounts in the kernel's mount table.

mod error;
mod mounts;
mod recovery;
mod sweep;
mod units;

use std::borrow::Cow;
use std::fmt::Display;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fs, io};

use s3csi_core::credentials::Keys;
use s3csi_core::publish::{Access, Publish};
use s3csi_handoff::KEEP_ALIVE_VARIABLE;

pub use self::error::UnitError;
pub use self::mounts::UnitMounts;
pub use self::recovery::{CrashLimiter, Recovery};
pub use self::sweep::REASONS as SWEEP_REASONS;
use self::sweep::Sweeper;
pub use self::units::UnitCache;
use crate::credentials;
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

/// The mount option whose path is replaced.
const CACHE_OPTION: &str = "--cache";

/// Engines run as root; no other user needs access.
const CREDENTIALS_MODE: u32 = 0o700;

/// Most engines end with their mount; one that finishes an upload gets this long before it is stopped.
const UPLOAD_TIMEOUT: Duration = Duration::from_secs(5);

pub struct SystemdUnits {
    pub mounts: UnitMounts,
    pub credentials: CredentialDirs,
    pub caches: CacheDirs,
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

/// One cache directory per target that asks for a cache. The path in the mount option is ignored: engines run as root, and two
/// tenants that name the same directory would read each other's blocks.
pub struct CacheDirs {
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
        let keys = self.engine_config.keys(publish)?;
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
        created.credentials = !self.credentials.exists(name);
        if is_mounted
            && created.credentials
            && let Some(outcome) = self.refresh_legacy(task, &resolved)?
        {
            return Ok(outcome);
        }
        // On every call, mounted or not: this is how rotated keys reach a running engine.
        timer
            .time(CallPhase::Credentials, || self.credentials.ensure(name, task.keys))
            .map_err(|cause| PublishError::Credentials { bucket: bucket.clone(), cause })?;
        self.failpoints.hit(Failpoint::CredentialsWritten);
        if is_mounted {
            created.credentials = false;
            let silent = |silence| PublishError::Silent { target: target.to_owned(), silence };
            return silence.map_or(Ok(MountOutcome::AlreadyMounted), |it| Err(silent(it)));
        }
        if publish.arguments.has(CACHE_OPTION) {
            let failed = |cause| PublishError::Cache { bucket: bucket.clone(), cause };
            self.caches.create_empty(name).map_err(failed)?;
        }
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
        let (_, ours) = credentials::paths(&self.credentials.host_view.join(name));
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
        let mut engine = self.engine_config.command(publish, &self.credentials.host_view.join(name))?;
        let mut command = vec![self.engine.to_string_lossy().into_owned()];
        command.extend(engine.arguments);
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
            log_if_failed("credentials not removed", self.credentials.remove(name));
            log_if_failed("cache not removed", self.caches.remove(name));
        }
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
            Some(name) if !self.credentials.exists(name) => self.origin(resolved, name, deadline).map_err(failed)?,
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
            self.credentials.remove(&name).map_err(forget)?;
            // Without its unit it is only disk space.
            log_if_failed("cache not removed", self.caches.remove(&name));
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
}

/// Where the engine of an earlier version reads its keys.
enum Origin {
    Files(Profile),
    /// In its environment: they cannot be refreshed.
    Fixed,
}

impl CredentialDirs {
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

impl CacheDirs {
    /// The same publish with a cache of its own in place of the path it names.
    fn redirect<'a>(&self, publish: &'a Publish, name: &str) -> Cow<'a, Publish> {
        if !publish.arguments.has(CACHE_OPTION) {
            return Cow::Borrowed(publish);
        }
        let mut publish = publish.clone();
        publish.arguments.set(CACHE_OPTION, Some(&self.host_view.join(name).to_string_lossy()));
        Cow::Owned(publish)
    }

    /// Only root reads what is cached, and nothing of an earlier mount is left.
    fn create_empty(&self, name: &str) -> io::Result<()> {
        self.remove(name)?;
        fs::DirBuilder::new().recursive(true).mode(CREDENTIALS_MODE).create(self.path.join(name))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        match fs::remove_dir_all(self.path.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::os::unix::fs::PermissionsExt as _;

    use s3csi_core::publish::{AccessMode, AccessType, RawCapability, RawPublish};

    use super::*;

    fn publish(mount_flags: &[&str]) -> Publish {
        let flags: Vec<String> = mount_flags.iter().map(|it| (*it).to_owned()).collect();
        let context = BTreeMap::from([("bucketName".to_owned(), "logs".to_owned())]);
        let uid = "46efe8aa-75d9-4b12-8fdd-0ce0c2cabd99";
        let target = format!("/var/lib/kubelet/pods/{uid}/volumes/kubernetes.io~csi/pv-1/mount");
        let access_type = AccessType::Mount { fs_type: "", mount_flags: &flags, volume_mount_group: "" };
        let raw = RawPublish {
            volume_id: "volume",
            target_path: &target,
            volume_context: &context,
            capability: Some(RawCapability { access_mode: Some(AccessMode::MultiNodeMultiWriter), access_type }),
            readonly: false,
            secrets: &BTreeMap::new(),
        };
        Publish::parse(&raw).unwrap()
    }

    #[test]
    fn a_cache_is_a_directory_of_our_own_whatever_path_the_volume_names() {
        let caches = CacheDirs { path: "/plugin/cache".into(), host_view: "/host/cache".into() };
        let redirected = |flags: &[&str]| caches.redirect(&publish(flags), "mp-1").arguments.render();
        for path in ["/etc", "/var/cache/shared", "/host/cache/mp-2"] {
            let arguments = redirected(&[&format!("cache {path}"), "allow-delete"]);
            assert!(arguments.contains(&"--cache=/host/cache/mp-1".to_owned()), "{arguments:?}");
            assert!(!arguments.iter().any(|it| it.contains(path)), "{arguments:?}");
        }
        assert!(!redirected(&["allow-delete"]).iter().any(|it| it.contains("cache")));
    }

    #[test]
    fn a_cache_begins_empty_and_is_for_root_only() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("cache");
        let caches = CacheDirs { path: path.clone(), host_view: path.clone() };
        caches.create_empty("mp-1").unwrap();
        fs::write(path.join("mp-1/block"), "of an earlier mount").unwrap();
        caches.create_empty("mp-1").unwrap();
        assert_eq!(fs::read_dir(path.join("mp-1")).unwrap().count(), 0);
        assert_eq!(fs::metadata(path.join("mp-1")).unwrap().permissions().mode() & 0o777, 0o700);
        caches.remove("mp-1").unwrap();
        caches.remove("mp-1").unwrap();
        assert!(!path.join("mp-1").exists());
    }
}
