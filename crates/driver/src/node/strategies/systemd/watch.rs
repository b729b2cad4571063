//! What happens between calls of kubelet: engines that die are replaced at once, and now and then everything is looked at.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use s3csi_core::chain::Chain;
use s3csi_mounter::report::Report;
use tokio::sync::broadcast::error::RecvError;

use super::sweep::{Repair, decide};
use super::units::{Unit, is_mount_unit, target_of};
use super::{SystemdUnits, UnitError, log_if_failed, place_name_of_path};
use crate::api::event::Kind;
use crate::host::Probe;
use crate::node::repairs::{CREDENTIALS_REMOVED, NOT_REMOUNTED, REMOUNTED};
use crate::node::source::shortened;
use crate::node::teller::Turn;
use crate::systemd::{Change, UnitCommand};

/// Enough for one repair: an unmount, a start and their waits.
const REPAIRED_WITHIN: Duration = Duration::from_mins(1);

/// An engine that dies this often in a minute is not helped by a next one; kubelet's next publish tries again and says why.
const MOST_DEATHS_A_MINUTE: usize = 5;

/// The reason of the Event that says so.
const GIVEN_UP: &str = "EngineGivenUp";

/// What killed an engine (memory, mostly) may still be busy; a moment later it is not.
const ATTEMPTS: u32 = 3;
const PAUSE: Duration = Duration::from_secs(1);

/// Whether a mount is dead is known at once; a frozen one is not touched here.
const ANSWERS_WITHIN: Duration = Duration::from_secs(2);

/// Told about a target that was mounted anew under running workloads: their containers still have the dead mount.
pub trait Heal: Send + Sync {
    fn remounted(&self, target: &Path);
}

/// Leaves containers as they are.
pub struct NoHeal;

impl Heal for NoHeal {
    fn remounted(&self, _target: &Path) {}
}

/// When engines died, by target.
#[derive(Debug, Default)]
pub struct Deaths(Mutex<HashMap<PathBuf, Vec<Instant>>>);

impl Deaths {
    /// Counts one; whether there were not too many lately.
    fn is_rare(&self, target: &Path) -> bool {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let recent = |it: &Instant| it.elapsed() < Duration::from_mins(1);
        all.retain(|_, deaths| deaths.iter().any(recent));
        let deaths = all.entry(target.to_owned()).or_default();
        deaths.retain(recent);
        deaths.push(Instant::now());
        deaths.len() <= MOST_DEATHS_A_MINUTE
    }
}

impl SystemdUnits {
    /// Listens to what systemd says about our units, for ever.
    pub async fn watch_forever(self: Arc<Self>) {
        let mut changes = self.systemd.changes();
        loop {
            match changes.recv().await {
                Ok(Change::MayHaveEnded { unit }) if is_mount_unit(&unit) => {
                    let strategy = self.clone();
                    // Each on its own: one slow repair must not keep the others waiting.
                    tokio::task::spawn_blocking(move || strategy.may_have_ended(&unit));
                }
                Ok(Change::Says { unit, words }) if is_mount_unit(&unit) => self.listen(&unit, &words),
                Ok(Change::MayHaveEnded { .. } | Change::Says { .. }) => {}
                Ok(Change::LookAtAll) | Err(RecvError::Lagged(_)) => {
                    for unit in self.known.names() {
                        let strategy = self.clone();
                        tokio::task::spawn_blocking(move || strategy.may_have_ended(&unit));
                    }
                }
                Err(RecvError::Closed) => return,
            }
        }
    }

    /// A unit of ours says how it is.
    fn listen(&self, unit: &str, words: &str) {
        let Ok(report) = words.parse::<Report>() else { return };
        let Some(command) = self.known.get(unit) else { return };
        let Some(target) = target_of(&command).filter(|_| self.known.is_news(unit, report.engines)) else { return };
        let Report { engines: _, cause, stall_milliseconds, is_planned } = report;
        let stall = Duration::from_millis(stall_milliseconds);
        let cause = shortened(&cause);
        let turn = if is_planned {
            tracing::info!(
                ?target,
                unit,
                reason = cause,
                stall_milliseconds,
                "engine was replaced and its mount lives on"
            );
            Turn::Replaced { reason: cause, stall }
        } else {
            tracing::warn!(
                ?target,
                unit,
                cause,
                stall_milliseconds,
                "engine died; another one has taken its place and its mount lives on"
            );
            Turn::Resumed { cause, stall }
        };
        self.teller.target_turned(target, &turn);
    }

    /// A unit of ours failed, or is forgotten, or systemd was reloaded.
    fn may_have_ended(&self, unit: &str) {
        let Some(command) = self.known.get(unit) else { return };
        let Some(target) = target_of(&command) else { return };
        let deadline = Instant::now() + REPAIRED_WITHIN;
        let Some(place) = place_name_of_path(target) else { return };
        // Publish and unpublish of the same target come first; what they leave is looked at.
        let Some(_held) = self.locks.lock(&place, deadline) else { return };
        if self.known.get(unit).is_none() {
            return;
        }
        match self.known.list(&self.systemd, &self.kubelet, deadline) {
            Ok(units) if units.iter().any(|it| it.name == unit && it.active.is_running()) => return,
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(unit, error = %Chain(&error), "not known whether a unit has ended");
                return;
            }
        }
        self.known.forget(unit);
        log_if_failed("ended unit not forgotten", self.systemd.reset_failed(unit, deadline));
        self.replace(unit, target, &command, deadline);
    }

    /// Mounts a target anew whose engine died. One that was unmounted needs nothing.
    fn replace(&self, unit: &str, target: &Path, command: &UnitCommand, deadline: Instant) {
        let is_mounted = self.host.mount_table().is_ok_and(|it| it.at(target).is_some_and(crate::host::Mount::is_ours));
        if !is_mounted {
            return;
        }
        // Somebody else serves it: a second unit, or another strategy.
        if let Probe::Alive { .. } | Probe::Unknown(_) = self.host.probe(target, Instant::now() + ANSWERS_WITHIN) {
            return;
        }
        self.repairs.engine_died();
        if !self.deaths.is_rare(target) {
            tracing::error!(
                ?target,
                unit,
                "engine died again and again; the next publish of its volume tries once more"
            );
            let text = "its engine died again and again and is given up; kubelet's next call tries once more";
            self.teller.tell(target, Kind::Warning, GIVEN_UP, text);
            return;
        }
        tracing::warn!(?target, unit, "engine died; mounting its target anew");
        let bucket = command.command.iter().rev().nth(1).map_or("", String::as_str);
        let attempt = || self.clear(target, deadline).and_then(|()| self.start(bucket, target, command, deadline));
        let mut outcome = attempt();
        for _ in 1..ATTEMPTS {
            if outcome.is_ok() || deadline <= Instant::now() {
                break;
            }
            thread::sleep(PAUSE);
            outcome = attempt();
        }
        match outcome {
            Ok(()) => {
                self.repairs.done(REMOUNTED, target, unit);
                self.heal.remounted(target);
                let text = "its engine died and the volume was mounted anew; a container that has run since before still has the dead \
                            mount until it is restarted";
                self.teller.tell(target, Kind::Warning, REMOUNTED, text);
            }
            Err(error) => {
                tracing::error!(?target, error = %Chain(&error), "target not mounted anew; the next publish tries again");
                self.repairs.done(NOT_REMOUNTED, target, unit);
                let text = format!(
                    "its engine died and could not be replaced: {}; kubelet's next call tries again",
                    Chain(&error)
                );
                self.teller.tell(target, Kind::Warning, NOT_REMOUNTED, &text);
            }
        }
    }

    /// Looks at everything and puts right what a crash, or somebody's hands, left.
    pub fn sweep(&self) {
        let deadline = Instant::now() + REPAIRED_WITHIN;
        let Some((units, mounted)) = self.look(deadline) else { return };
        tracing::debug!(units = units.len(), mounts = mounted.len(), "looked at all units");
        for repair in decide(&units, &mounted, |target| self.is_stale(target)) {
            match self.repair(&repair, deadline) {
                Ok(Some((target, unit))) => self.repairs.done(repair.reason(), &target, &unit),
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(?repair, error = %Chain(&error), "not repaired; the next sweep tries again");
                }
            }
        }
        // Once more: the repairs may have left credentials without a user.
        if let Some((units, mounted)) = self.look(deadline) {
            self.sweep_credentials(&units, &mounted);
            self.sweep_profiles(&units);
        }
    }

    fn look(&self, deadline: Instant) -> Option<(Vec<Unit>, BTreeSet<PathBuf>)> {
        match self.known.list(&self.systemd, &self.kubelet, deadline) {
            Ok(units) => Some((units, self.mounted()?)),
            Err(error) => {
                tracing::warn!(error = %Chain(&error), "units not looked at; the next sweep tries again");
                None
            }
        }
    }

    /// Does one repair if it is still one. Answers the target and the unit, for the record.
    fn repair(&self, repair: &Repair, deadline: Instant) -> Result<Option<(PathBuf, String)>, UnitError> {
        let systemd = |cause| UnitError::Systemd { cause };
        // Somebody is working on it: then it is not a leftover.
        let lock = |target: &Path| place_name_of_path(target).and_then(|it| self.locks.try_lock(&it));
        let is_mounted = |target: &Path| self.mounted().is_none_or(|it| it.contains(target));
        match repair {
            Repair::StopOrphan { unit, target } => {
                let Some(_held) = lock(target) else { return Ok(None) };
                if is_mounted(target) {
                    return Ok(None);
                }
                self.known.forget(unit);
                self.systemd.stop(unit, deadline).map_err(systemd)?;
                Ok(Some((target.clone(), unit.clone())))
            }
            Repair::StopDuplicate { unit, target } => {
                let Some(_held) = lock(target) else { return Ok(None) };
                self.known.forget(unit);
                // Killed, not stopped: on a polite word it would unmount its target, where the other one's mount is on top.
                self.systemd.kill(unit, deadline).map_err(systemd)?;
                self.systemd.wait_for_end(unit, deadline).map_err(systemd)?;
                self.systemd.reset_failed(unit, deadline).map_err(systemd)?;
                // Mostly the newest mounted last; if not, the dead mount hides the one that serves.
                self.uncover(target, deadline)?;
                Ok(Some((target.clone(), unit.clone())))
            }
            Repair::ForgetFailed { unit } => {
                self.systemd.reset_failed(unit, deadline).map_err(systemd)?;
                Ok(Some((PathBuf::new(), unit.clone())))
            }
            Repair::CleanStaleMount { target } => {
                let Some(_held) = lock(target) else { return Ok(None) };
                if !self.is_stale(target) {
                    return Ok(None);
                }
                self.clear(target, deadline)?;
                log_if_failed("directory of a stale mount not removed", self.host.remove_directory(target));
                Ok(Some((target.clone(), String::new())))
            }
        }
    }

    /// Targets with a mount of ours.
    fn mounted(&self) -> Option<BTreeSet<PathBuf>> {
        let table = match self.host.mount_table() {
            Ok(table) => table,
            Err(error) => {
                tracing::warn!(error = %Chain(&error), "mounts not looked at; the next sweep tries again");
                return None;
            }
        };
        let ours = table.beneath(&self.kubelet).filter(|it| it.is_ours());
        Some(ours.filter(|it| place_name_of_path(&it.at).is_some()).map(|it| it.at.clone()).collect())
    }

    /// A mount that is dead, and whose volume kubelet has forgotten: it keeps a file beside the target for as long as the Pod
    /// has the volume, and publishes such a volume again.
    fn is_stale(&self, target: &Path) -> bool {
        let is_known_to_kubelet = target.parent().is_none_or(|it| it.join("vol_data.json").exists());
        !is_known_to_kubelet && matches!(self.host.probe(target, Instant::now() + ANSWERS_WITHIN), Probe::Dead(_))
    }

    /// Credentials whose target has neither a unit nor a mount.
    fn sweep_credentials(&self, units: &[Unit], mounted: &BTreeSet<PathBuf>) {
        let targets = units.iter().map(|it| &it.target).chain(mounted);
        let used: BTreeSet<String> = targets.filter_map(|it| place_name_of_path(it)).collect();
        let Ok(entries) = fs::read_dir(&self.places) else { return };
        for place in entries.filter_map(|it| it.ok()?.file_name().into_string().ok()) {
            if used.contains(&place) || !place.starts_with("mp-") {
                continue;
            }
            let Some(_held) = self.locks.try_lock(&place) else { continue };
            // A publish may have ended between the look at the units and the lock.
            let is_used = self
                .known
                .names()
                .iter()
                .filter_map(|it| self.known.get(it))
                .any(|it| target_of(&it).and_then(place_name_of_path).is_some_and(|it| it == place));
            if is_used {
                continue;
            }
            let removed = self.remove_credentials(&place);
            if removed.is_ok() {
                self.repairs.done(CREDENTIALS_REMOVED, Path::new(&place), "");
            }
            log_if_failed("leftover credentials not removed", removed);
        }
    }
}
