//! Unmounting by a unit: the node plugin itself need not be privileged. And what goes with a mount: its unit, its directory, its
//! credentials.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use super::predecessor::Origin;
use super::{SystemdUnits, TIDIED_WITHIN, UnitError, place_name_of_path, units, words};
use crate::host::{Probe, holders};
use crate::node::error::UnpublishError;
use crate::node::steps::Step;
use crate::systemd::{Kind, Limits, Outcome, Service, SystemdError};

const UMOUNT: &str = "/usr/bin/umount";

/// Somebody may look into the target for a moment (`ls`, a monitoring agent): that is no reason to keep it.
const BUSY_ATTEMPTS: u32 = 10;
const BUSY_PAUSE: Duration = Duration::from_millis(100);

/// Most engines end with their mount; who finishes an upload gets this time before it is stopped.
const FINISHED_WITHIN: Duration = Duration::from_secs(5);

/// umount looks at what it unmounts, so it waits for an engine that froze just now; this is long for one that did not.
const UNMOUNTED_WITHIN: Duration = Duration::from_secs(10);

/// An engine that is not frozen answers in milliseconds.
const ANSWERS_WITHIN: Duration = Duration::from_secs(2);

/// Whether open files may go on being used for a while.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Plain,
    Lazy,
}

impl SystemdUnits {
    pub fn unpublish(&self, target: &Path, deadline: Instant) -> Result<(), UnpublishError> {
        let host = self.host.as_ref();
        // A target whose parent directory is gone has no mount either; the plain path then serves as well.
        let resolved = &host.resolve(target).unwrap_or_else(|_| target.to_owned());
        let place = place_name_of_path(target);
        let lock = place.clone().unwrap_or_else(|| target.to_string_lossy().into_owned());
        let busy = || UnpublishError::SourceBusy { target: target.to_owned() };
        let _held = self.locks.lock(&lock, deadline).ok_or_else(busy)?;
        self.steps.done(Step::Locked);
        let failed = |cause| UnpublishError::Unit { target: target.to_owned(), cause };
        // Asked before the unit is gone, with which the answer goes.
        let origin = match &place {
            Some(place) if !self.places.join(place).exists() => {
                self.predecessor(resolved, place, deadline).map_err(|cause| failed(UnitError::Systemd { cause }))?
            }
            _ => None,
        };

        loop {
            let table = host.mount_table().map_err(|cause| UnpublishError::Look { cause })?;
            let Some(mount) = table.at(resolved) else { break };
            if !mount.is_ours() {
                return Err(UnpublishError::ForeignMount { target: target.to_owned(), kind: mount.kind.clone() });
            }
            match host.probe(resolved, deadline.min(Instant::now() + ANSWERS_WITHIN)) {
                Probe::Alive { .. } | Probe::Unknown(_) => match self.umount_politely(resolved, deadline) {
                    // It froze, or died, between the look and the unmount: the next look knows.
                    Err(UnitError::Umount { .. }) if Instant::now() < deadline && self.is_lost(resolved, deadline) => {}
                    outcome => outcome.map_err(failed)?,
                },
                Probe::Dead(_) | Probe::Missing | Probe::Hung => self.clear(resolved, deadline).map_err(failed)?,
            }
        }
        self.steps.done(Step::Unbound);
        self.end_units(resolved, FINISHED_WITHIN, deadline).map_err(|cause| failed(UnitError::Systemd { cause }))?;
        self.steps.done(Step::EngineEnded);
        host.remove_directory(target).map_err(|cause| UnpublishError::Remove { path: target.to_owned(), cause })?;
        self.steps.done(Step::TargetRemoved);
        if let Some(place) = place {
            let forget = |cause| UnpublishError::Forget { source_name: place.clone(), cause };
            self.remove_credentials(&place).map_err(forget)?;
            if let Some(Origin::Files(profile)) = origin {
                self.remove_profile(&profile).map_err(forget)?;
            }
        }
        self.steps.done(Step::CredentialsRemoved);
        Ok(())
    }

    /// Nobody gets anything from the mount any more.
    fn is_lost(&self, target: &Path, deadline: Instant) -> bool {
        let found = self.host.probe(target, deadline.min(Instant::now() + ANSWERS_WITHIN));
        matches!(found, Probe::Dead(_) | Probe::Hung)
    }

    /// Takes away every mount of ours at a target, whoever uses it and whether or not it answers. For mounts that nobody
    /// gets anything from any more.
    pub(super) fn clear(&self, target: &Path, deadline: Instant) -> Result<(), UnitError> {
        let host = self.host.as_ref();
        loop {
            let table = host.mount_table().map_err(|cause| UnitError::Host { cause })?;
            let Some(mount) = table.at(target).filter(|it| it.is_ours()) else { return Ok(()) };
            if let Probe::Hung = host.probe(target, deadline.min(Instant::now() + ANSWERS_WITHIN)) {
                // With its engine the connection ends, and whoever waits for it gets an error.
                let engines = self.units_at(target, deadline).map_err(|cause| UnitError::Systemd { cause })?;
                for unit in &engines {
                    self.systemd.kill(unit, deadline).map_err(|cause| UnitError::Systemd { cause })?;
                }
                if engines.is_empty()
                    && let Err(error) = host.abort(mount.device)
                {
                    tracing::warn!(?target, %error, "hung connection not aborted");
                }
            }
            match self.umount(target, Way::Plain, deadline) {
                Err(UnitError::Umount { .. }) => self.umount(target, Way::Lazy, deadline)?,
                outcome => outcome?,
            }
        }
    }

    /// Takes away dead mounts that cover a mount which may be alive.
    pub(super) fn uncover(&self, target: &Path, deadline: Instant) -> Result<(), UnitError> {
        loop {
            let table = self.host.mount_table().map_err(|cause| UnitError::Host { cause })?;
            let is_covering = table.all_at(target).filter(|it| it.is_ours()).count() > 1;
            let found = self.host.probe(target, deadline.min(Instant::now() + ANSWERS_WITHIN));
            if !is_covering || !matches!(found, Probe::Dead(_)) {
                return Ok(());
            }
            self.umount(target, Way::Lazy, deadline)?;
        }
    }

    /// Unmounts what answers, and only if nobody uses it.
    fn umount_politely(&self, target: &Path, deadline: Instant) -> Result<(), UnitError> {
        let mut attempt = 1;
        loop {
            match self.umount(target, Way::Plain, deadline) {
                Err(UnitError::Umount { words }) if words.contains("busy") => {
                    if attempt == BUSY_ATTEMPTS || deadline <= Instant::now() {
                        let found = holders(target, Instant::now() + ANSWERS_WITHIN).join(", ");
                        let holders = if found.is_empty() { "somebody in another container".to_owned() } else { found };
                        return Err(UnitError::InUse { holders });
                    }
                    attempt += 1;
                    thread::sleep(BUSY_PAUSE);
                }
                outcome => return outcome,
            }
        }
    }

    /// Runs umount on the host. The mount table has the last word, not the program.
    fn umount(&self, target: &Path, way: Way, deadline: Instant) -> Result<(), UnitError> {
        let systemd = |cause| UnitError::Systemd { cause };
        let count = || -> Result<usize, UnitError> {
            let table = self.host.mount_table().map_err(|cause| UnitError::Host { cause })?;
            Ok(table.all_at(target).count())
        };
        let before = count()?;
        let mut command = vec![UMOUNT.to_owned()];
        if way == Way::Lazy {
            command.push("--lazy".to_owned());
        }
        command.push(target.to_string_lossy().into_owned());
        let service = Service {
            name: units::umount_unit_name().map_err(systemd)?,
            description: "Mountpoint for Amazon S3 CSI driver unmount".to_owned(),
            kind: Kind::Oneshot,
            command,
            environment: Vec::new(),
            limits: Limits::default(),
            starts_within: UNMOUNTED_WITHIN,
        };
        let started = self.systemd.start(&service, deadline.max(Instant::now() + ANSWERS_WITHIN)).map_err(systemd)?;
        match started.outcome {
            Outcome::Failed(ended) if count()? >= before => {
                let said = words(&started.output, "it said nothing");
                Err(UnitError::Umount { words: format!("{said} ({ended})") })
            }
            Outcome::Done | Outcome::Failed(_) => Ok(()),
        }
    }

    /// Ends every unit of a target where nothing is mounted.
    pub(super) fn end_units(&self, target: &Path, patience: Duration, deadline: Instant) -> Result<(), SystemdError> {
        for unit in self.units_at(target, deadline)? {
            // From here on its end is no death.
            self.known.forget(&unit);
            let by_itself = deadline.min(Instant::now() + patience);
            if patience.is_zero() || !self.systemd.wait_for_end(&unit, by_itself)? {
                tracing::info!(?target, unit, "stopping a unit that did not end with its mount");
                self.systemd.stop(&unit, deadline.max(Instant::now() + TIDIED_WITHIN))?;
            }
            self.systemd.reset_failed(&unit, deadline.max(Instant::now() + ANSWERS_WITHIN))?;
        }
        Ok(())
    }

    /// Units that work for a target, running or failed.
    fn units_at(&self, target: &Path, deadline: Instant) -> Result<Vec<String>, SystemdError> {
        let all = self.known.list(&self.systemd, &self.kubelet, deadline)?;
        Ok(all.into_iter().filter(|it| it.target == target).map(|it| it.name).collect())
    }
}
