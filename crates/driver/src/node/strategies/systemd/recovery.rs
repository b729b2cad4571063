//! Watches systemd's signals about our units and replaces engines that die.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use s3csi_core::chain::Chain;
use s3csi_core::text::shortened;
use s3csi_handoff::StatusReport;
use tokio::sync::broadcast::error::RecvError;

use super::units::{is_mount_unit, target_of};
use super::{SystemdUnits, directory_name_of_path, log_if_failed};
use crate::api::recorder::EventType;
use crate::host::{Mount, Probe};
use crate::node::deadlines;
use crate::node::error::MAX_ERROR_BYTES;
use crate::node::remediation::{NOT_REMOUNTED, REMOUNTED};
use crate::node::reporter::EngineEvent;
use crate::systemd::{Change, UnitCommand};

/// Enough for one recovery: an unmount, a start and their waits.
const TIMEOUT: Duration = Duration::from_mins(1);

/// A crash loop: further engines do not help. kubelet's next publish tries again and returns the error.
const MOST_CRASHES_PER_MINUTE: usize = 5;

/// The reason of the Event about a crash loop.
const GIVEN_UP: &str = "EngineGivenUp";

/// What killed an engine (mostly lack of memory) may last a moment longer.
const ATTEMPTS: u32 = 3;
const PAUSE: Duration = Duration::from_secs(1);

/// Detects crash loops, by target.
#[derive(Debug, Default)]
pub struct CrashLimiter(Mutex<HashMap<PathBuf, Vec<Instant>>>);

impl CrashLimiter {
    /// Records a crash. Returns whether the target may be mounted again.
    fn allow(&self, target: &Path) -> bool {
        let mut all = self.0.lock();
        let is_recent = |it: &Instant| it.elapsed() < Duration::from_mins(1);
        all.retain(|_, crashes| crashes.iter().any(is_recent));
        let crashes = all.entry(target.to_owned()).or_default();
        crashes.retain(is_recent);
        crashes.push(Instant::now());
        crashes.len() <= MOST_CRASHES_PER_MINUTE
    }
}

#[derive(Clone)]
pub struct Recovery(pub Arc<SystemdUnits>);

impl Recovery {
    /// Handles the signals of systemd about our units until the connection is dropped.
    pub async fn run(self) {
        let mut changes = self.0.mounts.systemd.changes();
        loop {
            match changes.recv().await {
                Ok(Change::MayHaveEnded { unit }) if is_mount_unit(&unit) => self.spawn_check(unit),
                Ok(Change::Status { unit, text }) if is_mount_unit(&unit) => self.report_status(&unit, &text),
                Ok(Change::Restarting { unit }) if is_mount_unit(&unit) => self.note_restart(&unit),
                Ok(Change::MayHaveEnded { .. } | Change::Status { .. } | Change::Restarting { .. }) => {}
                Ok(Change::Resync) | Err(RecvError::Lagged(_)) => {
                    self.0.mounts.units.names().into_iter().for_each(|it| self.spawn_check(it));
                }
                Err(RecvError::Closed) => return,
            }
        }
    }

    /// Each unit on its own: a slow recovery must not delay the others.
    fn spawn_check(&self, unit: String) {
        let recovery = self.clone();
        tokio::task::spawn_blocking(move || recovery.check_ended(&unit));
    }

    /// All processes of a unit are gone; it resumes its mount when systemd has started it again.
    fn note_restart(&self, unit: &str) {
        if self.0.mounts.units.note_restart(unit) {
            tracing::warn!(unit, "unit was killed, systemd restarts it on the same mount");
        }
    }

    /// The status text of a unit tells that its engine was replaced on the same mount.
    fn report_status(&self, unit: &str, text: &str) {
        let units = &self.0.mounts.units;
        let Ok(report) = text.parse::<StatusReport>() else { return };
        let Some(command) = units.get(unit) else { return };
        let Some(target) = target_of(&command).filter(|_| units.is_new_engine(unit, report.engines)) else { return };
        let StatusReport { engines: _, cause, stall_milliseconds, is_planned } = report;
        // A restarted unit does not know since when its mount was not served.
        let outage = units.take_outage(unit).unwrap_or_default();
        let stall = Duration::from_millis(stall_milliseconds).max(outage);
        let stall_milliseconds = stall.as_millis();
        let cause = shortened(&cause, MAX_ERROR_BYTES);
        let event = if is_planned {
            tracing::info!(?target, unit, reason = cause, stall_milliseconds, "engine replaced on the same mount");
            EngineEvent::Replaced { reason: cause, stall }
        } else {
            tracing::warn!(?target, unit, cause, stall_milliseconds, "engine died, a new engine resumed its mount");
            EngineEvent::Resumed { cause, stall }
        };
        self.0.reporter.target_engine_event(target, &event);
    }

    /// A unit failed or was unloaded, or systemd was reloaded.
    fn check_ended(&self, unit: &str) {
        let SystemdUnits { mounts, locks, .. } = &*self.0;
        let Some(command) = mounts.units.get(unit) else { return };
        let Some(target) = target_of(&command) else { return };
        let deadline = Instant::now() + TIMEOUT;
        let Some(lock) = directory_name_of_path(target) else { return };
        // Waits for a publish or unpublish of the same target.
        let Some(_held) = locks.lock(&lock, deadline) else { return };
        if mounts.units.get(unit).is_none() {
            return;
        }
        match mounts.list(deadline) {
            Ok(units) if units.iter().any(|it| it.name == unit && it.is_running()) => return,
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(unit, error = %Chain(&error), "failed to find out whether a unit has ended");
                return;
            }
        }
        mounts.units.forget(unit);
        log_if_failed("ended unit not reset", mounts.systemd.reset_failed(unit, deadline));
        self.remount(unit, target, &command, deadline);
    }

    /// Mounts a target again whose engine died. One that was unmounted is left alone.
    fn remount(&self, unit: &str, target: &Path, command: &UnitCommand, deadline: Instant) {
        let SystemdUnits { mounts, remediations, reporter, crashes, .. } = &*self.0;
        if !mounts.host.mount_table().is_ok_and(|it| it.at(target).is_some_and(Mount::is_ours)) {
            return;
        }
        // Otherwise another unit or strategy serves it.
        if !matches!(mounts.host.probe(target, Instant::now() + deadlines::CHECK), Probe::Dead(_)) {
            return;
        }
        remediations.engine_died();
        if !crashes.allow(target) {
            tracing::error!(?target, unit, "engine is crash looping; the next publish of its volume tries again");
            let text = "its engine is crash looping and is not restarted; kubelet's next call tries again";
            reporter.report(target, EventType::Warning, GIVEN_UP, text);
            return;
        }
        tracing::warn!(?target, unit, "engine died, mounting its target again");
        match self.try_remount(target, command, deadline) {
            Ok(()) => {
                remediations.record(REMOUNTED, target, unit);
                let text = "its engine died and the volume was mounted again; running containers keep the dead mount until they \
                            are restarted";
                reporter.report(target, EventType::Warning, REMOUNTED, text);
            }
            Err(error) => {
                let error = Chain(&error).to_string();
                tracing::error!(?target, error, "target not mounted again; the next publish retries");
                remediations.record(NOT_REMOUNTED, target, unit);
                let text =
                    format!("its engine died and could not be replaced: {error}; kubelet's next call tries again");
                reporter.report(target, EventType::Warning, NOT_REMOUNTED, &text);
            }
        }
    }

    fn try_remount(&self, target: &Path, command: &UnitCommand, deadline: Instant) -> Result<(), super::UnitError> {
        let mounts = &self.0.mounts;
        let bucket = command.command.iter().rev().nth(1).map_or("", String::as_str);
        let attempt = || mounts.clear(target, deadline).and_then(|()| mounts.start(bucket, target, command, deadline));
        let mut outcome = attempt();
        for _ in 1..ATTEMPTS {
            if outcome.is_ok() || deadline <= Instant::now() {
                break;
            }
            thread::sleep(PAUSE);
            outcome = attempt();
        }
        outcome
    }
}
