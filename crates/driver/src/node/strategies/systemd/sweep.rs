//! What a look at all units and mounts says should be repaired. Pure: facts in, repairs out.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::units::Unit;
use crate::systemd::ActiveState;

/// One thing to put right. Whoever does it looks again first.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Repair {
    /// It runs, but nothing is mounted where it should serve.
    StopOrphan { unit: String, target: PathBuf },
    /// Another, newer one serves the same target.
    StopDuplicate { unit: String, target: PathBuf },
    /// It failed, and an earlier driver did not ask systemd to forget such units.
    ForgetFailed { unit: String },
    /// A mount that no unit serves any more.
    CleanStaleMount { target: PathBuf },
}

/// What [`Repair::reason`] answers.
pub const REASONS: [&str; 4] = [ORPHAN_STOPPED, DUPLICATE_STOPPED, FAILED_FORGOTTEN, STALE_REMOVED];
const ORPHAN_STOPPED: &str = "OrphanedUnitStopped";
const DUPLICATE_STOPPED: &str = "DuplicateUnitStopped";
const FAILED_FORGOTTEN: &str = "FailedUnitForgotten";
const STALE_REMOVED: &str = "StaleMountRemoved";

impl Repair {
    /// For Events, logs and counters: never changes.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::StopOrphan { .. } => ORPHAN_STOPPED,
            Self::StopDuplicate { .. } => DUPLICATE_STOPPED,
            Self::ForgetFailed { .. } => FAILED_FORGOTTEN,
            Self::CleanStaleMount { .. } => STALE_REMOVED,
        }
    }
}

/// `mounted` are the targets with a mount of ours, `is_stale` says of one without a unit that it is dead and nobody wants it.
pub fn decide(units: &[Unit], mounted: &BTreeSet<PathBuf>, is_stale: impl Fn(&Path) -> bool) -> Vec<Repair> {
    let mut repairs = Vec::new();
    let mut by_target: BTreeMap<&Path, Vec<&Unit>> = BTreeMap::new();
    for unit in units {
        if unit.active == ActiveState::Failed {
            repairs.push(Repair::ForgetFailed { unit: unit.name.clone() });
        } else if unit.active.is_running() {
            by_target.entry(&unit.target).or_default().push(unit);
        }
    }
    for (target, units) in &mut by_target {
        // Somebody starts or stops one of them right now: look again next time.
        if units.iter().any(|it| it.has_job || it.active != ActiveState::Active) {
            continue;
        }
        let named = |unit: &&Unit| (unit.name.clone(), target.to_path_buf());
        if !mounted.contains(*target) {
            repairs.extend(units.iter().map(named).map(|(unit, target)| Repair::StopOrphan { unit, target }));
            continue;
        }
        // The newest mounted last, so its mount is mostly the one on top: the one that workloads see.
        units.sort_by_key(|it| std::cmp::Reverse(it.command.started));
        repairs.extend(units.iter().skip(1).map(named).map(|(unit, target)| Repair::StopDuplicate { unit, target }));
    }
    let is_served = |target: &Path| by_target.contains_key(target);
    let stale = mounted.iter().filter(|it| !is_served(it) && is_stale(it));
    repairs.extend(stale.map(|it| Repair::CleanStaleMount { target: it.clone() }));
    repairs
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
        let repairs = decide(units, &mounted, |it| stale.iter().any(|stale| it == Path::new(stale)));
        let found: Vec<String> = repairs
            .iter()
            .map(|it| match it {
                Repair::StopOrphan { unit, .. }
                | Repair::StopDuplicate { unit, .. }
                | Repair::ForgetFailed { unit } => {
                    format!("{} {unit}", it.reason())
                }
                Repair::CleanStaleMount { target } => format!("{} {}", it.reason(), target.display()),
            })
            .collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn what_is_as_it_should_be_is_left_alone() {
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
    fn of_two_units_the_newest_stays() {
        let two = [unit("old", "/t", ActiveState::Active, 1), unit("new", "/t", ActiveState::Active, 2)];
        check(&two, &["/t"], &[], &["DuplicateUnitStopped old"]);
    }

    #[test]
    fn a_failed_unit_is_forgotten_and_its_stale_mount_removed() {
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
