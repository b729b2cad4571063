//! The periodic sweep: compares all units with all mounts, and repairs what a crash or manual changes left.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use s3csi_core::chain::Chain;

use super::units::{Unit, target_of};
use super::{SystemdUnits, UnitError, directory_name_of_path, log_if_failed};
use crate::host::Probe;
use crate::node::legacy_v1::Profile;
use crate::node::remediation::{CREDENTIALS_REMOVED, ORPHANED_SOURCE_REMOVED};
use crate::node::{deadlines, other_mounts, source};
use crate::systemd::ActiveState;

/// Enough for one repair: an unmount and its waits.
const TIMEOUT: Duration = Duration::from_mins(1);

/// kubelet keeps this file beside a target for as long as the Pod has the volume.
const KUBELET_VOLUME_FILE: &str = "vol_data.json";

/// One thing to repair. It is checked again before it is done.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Remediation {
    /// It runs, but nothing is mounted at its target.
    StopOrphan { unit: String, target: PathBuf },
    /// A newer unit serves the same target.
    StopDuplicate { unit: String, target: PathBuf },
    /// It failed, and the version that started it did not set `CollectMode`.
    ResetFailed { unit: String },
    /// A mount without a unit.
    RemoveStaleMount { target: PathBuf },
}

/// All values of [`Remediation::reason`].
pub const REASONS: [&str; 4] = [ORPHAN_STOPPED, DUPLICATE_STOPPED, FAILED_FORGOTTEN, STALE_REMOVED];
const ORPHAN_STOPPED: &str = "OrphanedUnitStopped";
const DUPLICATE_STOPPED: &str = "DuplicateUnitStopped";
const FAILED_FORGOTTEN: &str = "FailedUnitForgotten";
const STALE_REMOVED: &str = "StaleMountRemoved";

impl Remediation {
    /// The stable name in logs and metrics.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::StopOrphan { .. } => ORPHAN_STOPPED,
            Self::StopDuplicate { .. } => DUPLICATE_STOPPED,
            Self::ResetFailed { .. } => FAILED_FORGOTTEN,
            Self::RemoveStaleMount { .. } => STALE_REMOVED,
        }
    }
}

pub struct Sweeper<'a>(pub &'a SystemdUnits);

impl Sweeper<'_> {
    pub fn run(&self) {
        let deadline = Instant::now() + TIMEOUT;
        let Some((units, mounted)) = self.observe(deadline) else { return };
        tracing::debug!(units = units.len(), mounts = mounted.len(), "sweeping");
        for remediation in decide(&units, &mounted, |target| self.is_stale(target)) {
            match self.apply(&remediation, deadline) {
                Ok(Some((target, unit))) => self.0.remediations.record(remediation.reason(), &target, &unit),
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(?remediation, error = %Chain(&error), "remediation failed; the next sweep retries");
                }
            }
        }
        // Observed again: the repairs may have left unused credentials.
        if let Some((units, mounted)) = self.observe(deadline) {
            self.remove_unused_credentials(&units, &mounted);
            let used: BTreeSet<Profile> =
                units.iter().filter_map(|it| self.0.legacy.of_environment(&it.command.environment)).collect();
            self.0.legacy.remove_unused(|profile| used.contains(profile), &self.0.remediations);
        }
    }

    pub fn retire_sources(&self, sources: &Path, is_left: impl Fn(&str) -> bool) {
        let mounts = &self.0.mounts;
        for name in other_mounts::left_sources(sources, is_left) {
            let path = sources.join(&name);
            let Ok(table) = mounts.host.mount_table() else { return };
            let mount = table.at(&path).filter(|it| it.is_ours());
            if mount.is_some_and(|it| !source::is_unused(&table, &path, it.device)) {
                continue;
            }
            if mount.is_some() {
                match mounts.unmount(&path, &path, Instant::now() + TIMEOUT) {
                    Ok(()) => self.0.remediations.record(ORPHANED_SOURCE_REMOVED, &path, &name),
                    Err(error) => {
                        tracing::warn!(source = name, error = %Chain(&error), "source not unmounted; the next sweep retries");
                        continue;
                    }
                }
            }
            log_if_failed("directory of a source not removed", mounts.host.remove_directory(&path));
        }
    }

    fn observe(&self, deadline: Instant) -> Option<(Vec<Unit>, BTreeSet<PathBuf>)> {
        match self.0.mounts.list(deadline) {
            Ok(units) => Some((units, self.mounted()?)),
            Err(error) => {
                tracing::warn!(error = %Chain(&error), "failed to list units; the next sweep retries");
                None
            }
        }
    }

    /// Applies a remediation if it is still needed. Returns the target and the unit for the log.
    fn apply(&self, remediation: &Remediation, deadline: Instant) -> Result<Option<(PathBuf, String)>, UnitError> {
        let SystemdUnits { mounts, locks, .. } = self.0;
        let systemd = |cause| UnitError::Systemd { cause };
        // A locked target is being worked on and is no leftover.
        let lock = |target: &Path| directory_name_of_path(target).and_then(|it| locks.try_lock(&it));
        let is_mounted = |target: &Path| self.mounted().is_none_or(|it| it.contains(target));
        match remediation {
            Remediation::StopOrphan { unit, target } => {
                let Some(_held) = lock(target).filter(|_| !is_mounted(target)) else { return Ok(None) };
                mounts.units.forget(unit);
                mounts.systemd.stop(unit, deadline).map_err(systemd)?;
                Ok(Some((target.clone(), unit.clone())))
            }
            Remediation::StopDuplicate { unit, target } => {
                let Some(_held) = lock(target) else { return Ok(None) };
                mounts.units.forget(unit);
                // Killed, not stopped: on SIGTERM it would unmount its target, where the mount of the other unit is topmost.
                mounts.systemd.kill(unit, deadline).map_err(systemd)?;
                mounts.systemd.wait_for_end(unit, deadline).map_err(systemd)?;
                mounts.systemd.reset_failed(unit, deadline).map_err(systemd)?;
                // If the older unit mounted last, its dead mount hides the one that serves.
                mounts.uncover(target, deadline)?;
                Ok(Some((target.clone(), unit.clone())))
            }
            Remediation::ResetFailed { unit } => {
                mounts.systemd.reset_failed(unit, deadline).map_err(systemd)?;
                Ok(Some((PathBuf::new(), unit.clone())))
            }
            Remediation::RemoveStaleMount { target } => {
                let Some(_held) = lock(target).filter(|_| self.is_stale(target)) else { return Ok(None) };
                mounts.clear(target, deadline)?;
                log_if_failed("directory of a stale mount not removed", mounts.host.remove_directory(target));
                Ok(Some((target.clone(), String::new())))
            }
        }
    }

    /// Targets with a mount of ours.
    fn mounted(&self) -> Option<BTreeSet<PathBuf>> {
        let mounts = &self.0.mounts;
        let table = match mounts.host.mount_table() {
            Ok(table) => table,
            Err(error) => {
                tracing::warn!(error = %Chain(&error), "failed to read the mount table; the next sweep retries");
                return None;
            }
        };
        let ours = table.beneath(&mounts.kubelet).filter(|it| it.is_ours());
        Some(ours.filter(|it| directory_name_of_path(&it.at).is_some()).map(|it| it.at.clone()).collect())
    }

    /// A dead mount of a volume that kubelet no longer knows. A known one is published again.
    fn is_stale(&self, target: &Path) -> bool {
        let is_known_to_kubelet = target.parent().is_none_or(|it| it.join(KUBELET_VOLUME_FILE).exists());
        let is_dead = || matches!(self.0.mounts.host.probe(target, Instant::now() + deadlines::CHECK), Probe::Dead(_));
        !is_known_to_kubelet && is_dead()
    }

    /// Credentials of targets that have neither a unit nor a mount.
    fn remove_unused_credentials(&self, units: &[Unit], mounted: &BTreeSet<PathBuf>) {
        let targets = units.iter().map(|it| &it.target).chain(mounted);
        let used: BTreeSet<String> = targets.filter_map(|it| directory_name_of_path(it)).collect();
        let Ok(entries) = fs::read_dir(&self.0.mounts.credentials.path) else { return };
        for name in entries.filter_map(|it| it.ok()?.file_name().into_string().ok()) {
            if used.contains(&name) || !name.starts_with("mp-") {
                continue;
            }
            let Some(_held) = self.0.locks.try_lock(&name) else { continue };
            // A publish may have ended between the list of units and the lock.
            if self.has_unit(&name) {
                continue;
            }
            self.0.remove_directories(&name);
            let removed = self.0.mounts.credentials.remove(&name);
            if removed.is_ok() {
                self.0.remediations.record(CREDENTIALS_REMOVED, Path::new(&name), "");
            }
            log_if_failed("unused credentials not removed", removed);
        }
    }

    fn has_unit(&self, name: &str) -> bool {
        let units = &self.0.mounts.units;
        let mut commands = units.names().into_iter().filter_map(|it| units.get(&it));
        commands.any(|it| target_of(&it).and_then(directory_name_of_path).is_some_and(|it| it == name))
    }
}

/// Decides what to repair. `mounted` are the targets with a mount of ours; `is_stale` tells of one without a unit that it is dead
/// and unknown to kubelet.
pub fn decide(units: &[Unit], mounted: &BTreeSet<PathBuf>, is_stale: impl Fn(&Path) -> bool) -> Vec<Remediation> {
    let mut remediations = Vec::new();
    let mut by_target: BTreeMap<&Path, Vec<&Unit>> = BTreeMap::new();
    for unit in units {
        if unit.active == ActiveState::Failed {
            remediations.push(Remediation::ResetFailed { unit: unit.name.clone() });
        } else if unit.active.is_running() {
            by_target.entry(&unit.target).or_default().push(unit);
        }
    }
    for (target, units) in &mut by_target {
        // One of them is being started or stopped: the next sweep decides.
        if units.iter().any(|it| it.has_job || it.active != ActiveState::Active) {
            continue;
        }
        let named = |unit: &&Unit| (unit.name.clone(), target.to_path_buf());
        if !mounted.contains(*target) {
            remediations.extend(units.iter().map(named).map(|(unit, target)| Remediation::StopOrphan { unit, target }));
            continue;
        }
        // The newest mounted last, so its mount is mostly the topmost one, which workloads see.
        units.sort_by_key(|it| std::cmp::Reverse(it.command.started));
        remediations
            .extend(units.iter().skip(1).map(named).map(|(unit, target)| Remediation::StopDuplicate { unit, target }));
    }
    let is_served = |target: &Path| by_target.contains_key(target);
    let stale = mounted.iter().filter(|it| !is_served(it) && is_stale(it));
    remediations.extend(stale.map(|it| Remediation::RemoveStaleMount { target: it.clone() }));
    remediations
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::systemd::{Limits, UnitCommand};

    fn unit(name: &str, target: &str, active: ActiveState, started: u64) -> Unit {
        let command = UnitCommand { command: vec![], environment: vec![], limits: Limits::default(), started };
        Unit { name: name.to_owned(), active, has_job: false, target: target.into(), command }
    }

    #[track_caller]
    fn check(units: &[Unit], mounted: &[&str], stale: &[&str], expected: &[&str]) {
        let mounted = mounted.iter().map(PathBuf::from).collect();
        let remediations = decide(units, &mounted, |it| stale.iter().any(|stale| it == Path::new(stale)));
        let found: Vec<String> = remediations
            .iter()
            .map(|it| match it {
                Remediation::StopOrphan { unit, .. }
                | Remediation::StopDuplicate { unit, .. }
                | Remediation::ResetFailed { unit } => {
                    format!("{} {unit}", it.reason())
                }
                Remediation::RemoveStaleMount { target } => format!("{} {}", it.reason(), target.display()),
            })
            .collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn a_served_mount_is_left_alone() {
        check(&[], &[], &[], &[]);
        check(&[unit("a", "/t", ActiveState::Active, 1)], &["/t"], &[], &[]);
        // A mount of another strategy, alive.
        check(&[], &["/t"], &[], &[]);
    }

    #[test]
    fn a_unit_without_a_mount_is_stopped() {
        check(&[unit("a", "/t", ActiveState::Active, 1)], &["/u"], &[], &["OrphanedUnitStopped a"]);
    }

    #[test]
    fn a_unit_that_is_starting_or_stopping_is_left_alone() {
        check(&[unit("a", "/t", ActiveState::Activating, 1)], &[], &[], &[]);
        check(&[unit("a", "/t", ActiveState::Deactivating, 1)], &[], &[], &[]);
        let busy = Unit { has_job: true, ..unit("a", "/t", ActiveState::Active, 1) };
        check(&[busy], &[], &[], &[]);
    }

    #[test]
    fn of_two_units_the_newest_is_kept() {
        let two = [unit("old", "/t", ActiveState::Active, 1), unit("new", "/t", ActiveState::Active, 2)];
        check(&two, &["/t"], &[], &["DuplicateUnitStopped old"]);
    }

    #[test]
    fn a_failed_unit_is_reset_and_its_stale_mount_removed() {
        check(
            &[unit("a", "/t", ActiveState::Failed, 1)],
            &["/t"],
            &["/t"],
            &["FailedUnitForgotten a", "StaleMountRemoved /t"],
        );
    }

    #[test]
    fn a_served_mount_is_never_stale() {
        check(&[unit("a", "/t", ActiveState::Active, 1)], &["/t"], &["/t"], &[]);
    }
}
