//! The mount of a target and the units that serve it: started, unmounted and stopped by systemd, so that the node plugin itself
//! needs no privileges for it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use s3csi_core::text::shortened;
use s3csi_handoff::{EngineFailure, KEEP_ALIVE_VARIABLE};

use super::units::{Unit, UnitCache, mount_unit_name, umount_unit_name};
use super::{CredentialDirs, UnitError, log_if_failed};
use crate::host::{Host, HostError, MOST_STACKED, Probe, holders};
use crate::node::deadlines;
use crate::node::error::{MAX_ERROR_BYTES, UnpublishError};
use crate::node::failpoints::{Failpoint, Failpoints};
use crate::systemd::{
    Limits, Restart, Service, ServiceOutcome, ServiceType, Started, Systemd, SystemdError, UnitCommand,
};

const UMOUNT: &str = "/usr/bin/umount";

/// The engine gives up after 30 seconds, as earlier versions did.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// For calls to systemd and the kernel that clean up after a failure, even if the caller's deadline has passed.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(20);

/// umount(8) waits for an engine that has just frozen; this is long for one that has not.
const UMOUNT_TIMEOUT: Duration = Duration::from_secs(10);

/// A process may look into the target for a moment (`ls`, a monitoring agent).
const BUSY_ATTEMPTS: u32 = 10;
const BUSY_PAUSE: Duration = Duration::from_millis(100);

/// An engine that runs always prints why it fails. So it did not run, or its output was not read.
const NO_OUTPUT: &str =
    "it exited without output; MOUNT_S3_PATH must be an engine on the host, PTMX_PATH the host's ptmx";

/// In the credentials directory of a target; see [`Restart::output`].
const OUTPUT_LINK: &str = "output";

pub struct UnitMounts {
    pub host: Arc<dyn Host>,
    pub systemd: Systemd,
    /// Kubelet's root directory, as the mount table spells it. Units and mounts elsewhere are ignored.
    pub kubelet: PathBuf,
    pub units: UnitCache,
    pub credentials: CredentialDirs,
    pub failpoints: Failpoints,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum UmountMode {
    Plain,
    /// Open files stay usable.
    Lazy,
}

impl UnitMounts {
    /// Starts a unit for a target without a mount, and waits until the mount answers. After an error neither is left.
    pub fn start(
        &self,
        bucket: &str,
        target: &Path,
        command: &UnitCommand,
        deadline: Instant,
    ) -> Result<(), UnitError> {
        let systemd = |cause| UnitError::Systemd { cause };
        // An interrupted publish may have left a unit that is about to mount; two would mount over each other.
        self.end_units(target, Duration::ZERO, deadline).map_err(systemd)?;
        self.clear(target, deadline)?;
        let service = Service {
            name: mount_unit_name(),
            description: format!("Mountpoint for Amazon S3 CSI driver FUSE daemon: {bucket}"),
            service_type: ServiceType::Forking,
            command: command.command.clone(),
            environment: command.environment.clone(),
            limits: command.limits,
            start_timeout: START_TIMEOUT.min(deadline.saturating_duration_since(Instant::now())),
            restart: self.restart(command),
        };
        // Cached before it runs, so that its end is recognised however early it comes.
        self.units.insert(&service.name, UnitCommand { started: monotonic_microseconds(), ..command.clone() });
        let started = self.systemd.start(&service, deadline);
        self.failpoints.hit(Failpoint::HandedOver);
        let Err(error) = started.map_err(systemd).and_then(|it| self.check_started(&service, target, &it, deadline))
        else {
            self.failpoints.hit(Failpoint::Served);
            return Ok(());
        };
        self.clean_up(target, &service.name);
        Err(error)
    }

    /// How a unit is started again that was killed: if it supervises its engine and its directory is ours.
    fn restart(&self, command: &UnitCommand) -> Option<Restart> {
        let keeps_alive = |it: &String| it.split_once('=').is_some_and(|(name, _)| name == KEEP_ALIVE_VARIABLE);
        if !command.environment.iter().any(keeps_alive) {
            return None;
        }
        let name = self.credentials.named_in(&command.environment)?;
        let [output, output_on_host] =
            [&self.credentials.path, &self.credentials.host_view].map(|it| it.join(name).join(OUTPUT_LINK));
        Some(Restart { output, output_on_host })
    }

    /// Whether a started unit serves its mount with the arguments it was given.
    fn check_started(
        &self,
        service: &Service,
        target: &Path,
        started: &Started,
        deadline: Instant,
    ) -> Result<(), UnitError> {
        let unit = || service.name.clone();
        if let ServiceOutcome::Failed(ended) = &started.outcome {
            let output = if started.output.trim().is_empty() { NO_OUTPUT } else { &started.output };
            let EngineFailure { code, message } = EngineFailure::from_error_output(output);
            let failure = EngineFailure { code, message: shortened(&message, MAX_ERROR_BYTES) };
            return Err(UnitError::Engine { unit: unit(), failure, ended: ended.clone() });
        }
        if !self.is_serving(target, deadline) {
            return Err(UnitError::NoAnswer { unit: unit() });
        }
        let is_unchanged = self.systemd.has_its_arguments(service, deadline);
        if is_unchanged.map_err(|cause| UnitError::Systemd { cause })? {
            Ok(())
        } else {
            Err(UnitError::Reloaded { unit: unit() })
        }
    }

    fn clean_up(&self, target: &Path, unit: &str) {
        self.units.forget(unit);
        let deadline = Instant::now() + CLEANUP_TIMEOUT;
        // Unmount before stop: an engine that is stopped before it handles signals leaves its mount behind.
        log_if_failed("failed mount not removed", self.clear(target, deadline));
        log_if_failed("failed unit not stopped", self.systemd.stop(unit, deadline));
        log_if_failed("failed unit not reset", self.systemd.reset_failed(unit, deadline));
    }

    /// Whether the target is the mount of an engine and answers.
    fn is_serving(&self, target: &Path, deadline: Instant) -> bool {
        let Ok(table) = self.host.mount_table() else { return false };
        let Some(mount) = table.at(target).filter(|it| it.is_ours()) else { return false };
        let found = self.host.probe(target, deadlines::within(deadlines::PUBLISH, deadline));
        matches!(found, Probe::Alive { device } if device == mount.device)
    }

    /// Removes every mount of ours at a target, for an unpublish. One in use is an error; a dead one is detached.
    pub fn unmount(&self, target: &Path, resolved: &Path, deadline: Instant) -> Result<(), UnpublishError> {
        let failed = |cause| UnpublishError::Unit { target: target.to_owned(), cause };
        for _ in 0..MOST_STACKED {
            let table = self.host.mount_table().map_err(|cause| UnpublishError::Look { cause })?;
            let Some(mount) = table.at(resolved) else { return Ok(()) };
            if !mount.is_ours() {
                return Err(UnpublishError::ForeignMount { target: target.to_owned(), kind: mount.kind.clone() });
            }
            match self.host.probe(resolved, deadlines::within(deadlines::CHECK, deadline)) {
                Probe::Alive { .. } | Probe::Unknown(_) => match self.umount_unless_busy(resolved, deadline) {
                    // It froze or died meanwhile: the next probe tells.
                    Err(UnitError::Umount { .. }) if Instant::now() < deadline && self.is_lost(resolved, deadline) => {}
                    outcome => outcome.map_err(failed)?,
                },
                Probe::Dead(_) | Probe::Missing | Probe::Hung => self.clear(resolved, deadline).map_err(failed)?,
            }
        }
        Err(failed(too_many_mounts(resolved)))
    }

    fn is_lost(&self, target: &Path, deadline: Instant) -> bool {
        let found = self.host.probe(target, deadlines::within(deadlines::CHECK, deadline));
        matches!(found, Probe::Dead(_) | Probe::Hung)
    }

    /// Removes every mount of ours at a target, even if it is in use or does not answer. For mounts that are lost.
    pub fn clear(&self, target: &Path, deadline: Instant) -> Result<(), UnitError> {
        let host = self.host.as_ref();
        for _ in 0..MOST_STACKED {
            let table = host.mount_table().map_err(|cause| UnitError::Host { cause })?;
            let Some(mount) = table.at(target).filter(|it| it.is_ours()) else { return Ok(()) };
            if let Probe::Hung = host.probe(target, deadlines::within(deadlines::CHECK, deadline)) {
                // The connection ends with its engine, and blocked processes get an error.
                let engines = self.units_at(target, deadline).map_err(|cause| UnitError::Systemd { cause })?;
                for unit in &engines {
                    self.systemd.kill(unit, deadline).map_err(|cause| UnitError::Systemd { cause })?;
                }
                if engines.is_empty()
                    && let Err(error) = host.abort(mount.device)
                {
                    tracing::warn!(?target, %error, "unresponsive connection not aborted");
                }
            }
            match self.umount(target, UmountMode::Plain, deadline) {
                Err(UnitError::Umount { .. }) => self.umount(target, UmountMode::Lazy, deadline)?,
                outcome => outcome?,
            }
        }
        Err(too_many_mounts(target))
    }

    /// Removes dead mounts that cover a mount which may be alive.
    pub fn uncover(&self, target: &Path, deadline: Instant) -> Result<(), UnitError> {
        for _ in 0..MOST_STACKED {
            let table = self.host.mount_table().map_err(|cause| UnitError::Host { cause })?;
            let is_covering = table.all_at(target).filter(|it| it.is_ours()).count() > 1;
            let found = self.host.probe(target, deadlines::within(deadlines::CHECK, deadline));
            if !is_covering || !matches!(found, Probe::Dead(_)) {
                return Ok(());
            }
            self.umount(target, UmountMode::Lazy, deadline)?;
        }
        Err(too_many_mounts(target))
    }

    /// Unmounts a mount that answers, unless it is in use.
    fn umount_unless_busy(&self, target: &Path, deadline: Instant) -> Result<(), UnitError> {
        let mut attempt = 1;
        loop {
            match self.umount(target, UmountMode::Plain, deadline) {
                Err(UnitError::Umount { error }) if error.contains("busy") => {
                    if attempt == BUSY_ATTEMPTS || deadline <= Instant::now() {
                        let found = holders(target, Instant::now() + deadlines::CHECK).join(", ");
                        let holders =
                            if found.is_empty() { "a process in another container".to_owned() } else { found };
                        return Err(UnitError::InUse { holders });
                    }
                    attempt += 1;
                    thread::sleep(BUSY_PAUSE);
                }
                outcome => return outcome,
            }
        }
    }

    /// Runs umount(8) on the host. The mount table decides about success, not the exit status.
    fn umount(&self, target: &Path, mode: UmountMode, deadline: Instant) -> Result<(), UnitError> {
        let count = || -> Result<usize, UnitError> {
            let table = self.host.mount_table().map_err(|cause| UnitError::Host { cause })?;
            Ok(table.all_at(target).count())
        };
        let before = count()?;
        let mut command = vec![UMOUNT.to_owned()];
        if mode == UmountMode::Lazy {
            command.push("--lazy".to_owned());
        }
        command.push(target.to_string_lossy().into_owned());
        let service = Service {
            name: umount_unit_name(),
            description: "Mountpoint for Amazon S3 CSI driver unmount".to_owned(),
            service_type: ServiceType::Oneshot,
            command,
            environment: Vec::new(),
            limits: Limits::default(),
            start_timeout: UMOUNT_TIMEOUT,
            restart: None,
        };
        let deadline = deadline.max(Instant::now() + deadlines::CHECK);
        let started = self.systemd.start(&service, deadline).map_err(|cause| UnitError::Systemd { cause })?;
        match started.outcome {
            // An engine that ends unmounts its target itself, so there may be nothing left to unmount.
            ServiceOutcome::Failed(ended) if count()? >= before.max(1) => {
                let output = shortened(&started.output, MAX_ERROR_BYTES);
                let output = if output.is_empty() { "no output".to_owned() } else { output };
                Err(UnitError::Umount { error: format!("{output} ({ended})") })
            }
            ServiceOutcome::Done | ServiceOutcome::Failed(_) => Ok(()),
        }
    }

    /// Ends every unit of a target without a mount.
    pub fn end_units(&self, target: &Path, patience: Duration, deadline: Instant) -> Result<(), SystemdError> {
        for unit in self.units_at(target, deadline)? {
            // From now on its end is expected.
            self.units.forget(&unit);
            if patience.is_zero() || !self.systemd.wait_for_end(&unit, deadlines::within(patience, deadline))? {
                tracing::info!(?target, unit, "stopping a unit that did not end with its mount");
                self.systemd.stop(&unit, deadline.max(Instant::now() + CLEANUP_TIMEOUT))?;
            }
            self.systemd.reset_failed(&unit, deadline.max(Instant::now() + deadlines::CHECK))?;
        }
        Ok(())
    }

    /// Every unit whose target is in kubelet's directory.
    pub fn list(&self, deadline: Instant) -> Result<Vec<Unit>, SystemdError> {
        self.units.list(&self.systemd, |it| it.starts_with(&self.kubelet), deadline)
    }

    /// The units of a target, running or failed.
    fn units_at(&self, target: &Path, deadline: Instant) -> Result<Vec<String>, SystemdError> {
        let is_wanted = |it: &Path| it == target && it.starts_with(&self.kubelet);
        Ok(self.units.list(&self.systemd, is_wanted, deadline)?.into_iter().map(|it| it.name).collect())
    }
}

fn too_many_mounts(at: &Path) -> UnitError {
    UnitError::Host { cause: HostError::TooManyMounts { at: at.to_owned() } }
}

/// The clock of systemd's unit timestamps.
fn monotonic_microseconds() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    u64::try_from(now.tv_sec * 1_000_000 + now.tv_nsec / 1000).unwrap_or_default()
}
