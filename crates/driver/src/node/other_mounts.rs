//! Targets that another strategy of ours or an earlier version mounted. They are used until their workloads end: their keys are
//! refreshed where their engines read them, and removed with the mounts.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use s3csi_core::chain::Chain;
use s3csi_core::credentials::Keys;
use s3csi_core::mountinfo::Mount;
use s3csi_core::names::mountpoint_pod_name;
use s3csi_core::publish::{Access, Publish};
use s3csi_core::target::TargetPath;

use super::deadlines;
use super::error::PublishError;
use super::legacy_v1::LegacyProfiles;
use super::remediation::{CREDENTIALS_REMOVED, ORPHANED_SOURCE_REMOVED, Remediations};
use super::retire::{RetireOutcome, retire};
use super::source::SourceManager;
use crate::credentials;
use crate::host::{Device, Host, MountTable, Probe, SafeDir, SafeDirError};

/// A publish writes the keys of a unit before its mount exists.
const GRACE_PERIOD: Duration = Duration::from_mins(10);

/// Where keys of mounts that are not of the running strategy are.
pub struct OtherMounts {
    pub legacy: LegacyProfiles,
    /// The credentials directories of strategy `systemd`.
    pub unit_credentials: PathBuf,
    /// Its caches.
    pub unit_caches: PathBuf,
}

/// A target that is mounted as requested.
#[derive(Debug, PartialEq, Eq)]
pub struct ServedTarget {
    pub by: ServedBy,
    /// The time that the engine has not answered for.
    pub silence: Option<Duration>,
}

#[derive(Debug, PartialEq, Eq)]
pub enum ServedBy {
    /// A source in our directory of sources, by name.
    Source(String),
    /// A mount of its own, of strategy `systemd` or of version 1.
    OwnMount,
}

/// What serves the target; `None` if it is not mounted, not as requested, dead, or by a source that the caller checks itself.
pub fn served_by(
    host: &dyn Host,
    sources: &Path,
    is_own_source: impl Fn(&str) -> bool,
    publish: &Publish,
    deadline: Instant,
) -> Result<Option<ServedTarget>, PublishError> {
    let Ok(target) = host.resolve(publish.target.path()) else { return Ok(None) };
    let failed = |cause| PublishError::Look { cause };
    if host.mounted_at(&target).map_err(failed)?.is_none() {
        return Ok(None);
    }
    let table = host.mount_table().map_err(failed)?;
    // Earlier drivers made the file system read-only and not the bind mount.
    let is_wanted = |read_only: bool| read_only == (publish.access == Access::ReadOnly);
    let is_served = |it: &&Mount| it.is_ours() && is_wanted(it.read_only || it.super_read_only);
    let Some(mount) = table.at(&target).filter(is_served) else { return Ok(None) };
    let name = source_of(&table, mount.device, sources);
    if name.is_some_and(is_own_source) {
        return Ok(None);
    }
    let start = Instant::now();
    let silence = match host.probe(&target, deadlines::within(deadlines::REPUBLISH, deadline)) {
        Probe::Alive { device } if device == mount.device => None,
        Probe::Hung => Some(start.elapsed()),
        Probe::Alive { .. } | Probe::Dead(_) | Probe::Missing | Probe::Unknown(_) => return Ok(None),
    };
    let by = name.map_or(ServedBy::OwnMount, |it| ServedBy::Source(it.to_owned()));
    Ok(Some(ServedTarget { by, silence }))
}

/// Whether the target has a mount of version 1 or of strategy `systemd` whose engine is dead.
pub fn has_dead_unit(host: &dyn Host, sources: &Path, target: &TargetPath, deadline: Instant) -> bool {
    let Ok(target) = host.resolve(target.path()) else { return false };
    let Ok(table) = host.mount_table() else { return false };
    let Some(mount) = table.at(&target).filter(|it| it.is_ours()) else { return false };
    let is_dead = || matches!(host.probe(&target, deadlines::within(deadlines::REPUBLISH, deadline)), Probe::Dead(_));
    source_of(&table, mount.device, sources).is_none() && is_dead()
}

/// The name of the source with this device.
pub fn source_of<'a>(table: &'a MountTable, device: Device, sources: &Path) -> Option<&'a str> {
    let mut of_sources = table.of_device(device).filter(|it| it.at.parent() == Some(sources));
    of_sources.find_map(|it| it.at.file_name()?.to_str())
}

impl OtherMounts {
    /// Whether an engine of version 1 or of strategy `systemd` has keys for this target.
    pub fn has_keys(&self, publish: &Publish) -> bool {
        let is_of_unit = self.unit_credentials.join(directory_name(&publish.target)).is_dir();
        is_of_unit || self.legacy.of_workload(publish.target.workload(), publish.volume_id.as_str()).is_some()
    }

    /// Writes the keys for an engine of version 1 or of strategy `systemd`.
    pub fn refresh(&self, publish: &Publish, keys: &Keys) -> Result<(), SafeDirError> {
        if let Some(profile) = self.legacy.of_workload(publish.target.workload(), publish.volume_id.as_str()) {
            self.legacy.refresh(&profile, keys)?;
        }
        let directory = self.unit_credentials.join(directory_name(&publish.target));
        if directory.is_dir() {
            credentials::ensure(&SafeDir::open(&directory)?, keys, 0)?;
        }
        Ok(())
    }

    /// Removes the keys of a target that was unmounted. A failure does not fail the unpublish: the next sweep retries.
    pub fn forget(&self, target: &Path, volume_id: &str) {
        let Some(target) = target.to_str().and_then(|it| it.parse::<TargetPath>().ok()) else { return };
        let remove = || {
            if let Some(profile) = self.legacy.of_workload(target.workload(), volume_id) {
                self.legacy.remove(&profile)?;
            }
            self.remove_unit_credentials(&directory_name(&target))
        };
        if let Err(error) = remove() {
            tracing::warn!(%error, target = %target.path().display(), "keys not removed; the next sweep retries");
        }
    }

    /// Removes keys of workloads without a mount, and sources without a user that `is_left` by another strategy.
    pub fn sweep(&self, manager: &SourceManager, sources: &Path, is_left: impl Fn(&str) -> bool) {
        self.remove_keys(manager.host.as_ref(), &manager.remediations);
        for name in left_sources(sources, is_left) {
            retire_source(manager, &sources.join(&name), &name);
        }
    }

    fn remove_keys(&self, host: &dyn Host, remediations: &Remediations) {
        let Ok(table) = host.mount_table() else { return };
        let targets: Vec<TargetPath> =
            table.entries().iter().filter(|it| it.is_ours()).filter_map(|it| it.at.to_str()?.parse().ok()).collect();
        self.legacy.remove_unused(|profile| targets.iter().any(|it| profile.is_of(it.workload())), remediations);
        let used: Vec<String> = targets.iter().map(directory_name).collect();
        for name in self.old_unit_credentials().into_iter().filter(|it| !used.contains(it)) {
            match self.remove_unit_credentials(&name) {
                Ok(()) => remediations.record(CREDENTIALS_REMOVED, Path::new(&name), ""),
                Err(error) => tracing::warn!(%error, "credentials not removed; the next sweep retries"),
            }
        }
    }

    /// Removes the credentials of a unit, and its cache.
    fn remove_unit_credentials(&self, name: &str) -> Result<(), SafeDirError> {
        for directory in [&self.unit_caches, &self.unit_credentials].into_iter().filter(|it| it.is_dir()) {
            SafeDir::open(directory)?.remove_tree(name)?;
        }
        Ok(())
    }

    fn old_unit_credentials(&self) -> Vec<String> {
        let Ok(entries) = fs::read_dir(&self.unit_credentials) else { return Vec::new() };
        let is_old = |it: &fs::DirEntry| {
            let age = it.metadata().and_then(|it| it.modified()).ok().and_then(|it| it.elapsed().ok());
            age.is_some_and(|it| it > GRACE_PERIOD)
        };
        entries.flatten().filter(is_old).filter_map(|it| it.file_name().into_string().ok()).collect()
    }
}

/// Names of sources that another strategy left.
pub fn left_sources(sources: &Path, is_left: impl Fn(&str) -> bool) -> Vec<String> {
    let Ok(entries) = fs::read_dir(sources) else { return Vec::new() };
    entries.flatten().filter_map(|it| it.file_name().into_string().ok()).filter(|it| is_left(it)).collect()
}

/// Unmounts a source that another strategy left, unless it is in use. Nothing mounts such a source while this strategy runs.
fn retire_source(
    SourceManager { host, held_mounts, failpoints, remediations, .. }: &SourceManager,
    path: &Path,
    name: &str,
) {
    match retire(host.as_ref(), held_mounts, path, None, *failpoints) {
        Ok(RetireOutcome::Unmounted) => remediations.record(ORPHANED_SOURCE_REMOVED, path, name),
        Ok(RetireOutcome::NotMounted | RetireOutcome::InUse) => {}
        Err(error) => {
            tracing::warn!(source = name, error = %Chain(&error), "source not unmounted; the next sweep retries");
        }
    }
}

/// The name of a target's credentials directory in strategy `systemd`, and of its lock.
pub fn directory_name(target: &TargetPath) -> String {
    mountpoint_pod_name(target.workload(), target.volume())
}
