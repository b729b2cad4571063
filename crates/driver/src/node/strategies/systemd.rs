//! Strategy `systemd`: one transient unit per target. The engine mounts itself at the target; systemd keeps it alive whatever becomes
//! of us. Which unit works for which target is asked of systemd, what is mounted of the kernel.

mod error;
mod predecessor;
mod sweep;
mod units;
mod unmount;
mod watch;

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use s3csi_core::credentials::Keys;
use s3csi_core::names::mountpoint_pod_name;
use s3csi_core::publish::{Access, Publish};
use s3csi_core::target::TargetPath;

pub use self::error::UnitError;
use self::predecessor::Origin;
pub use self::sweep::REASONS as SWEEP_REASONS;
pub use self::units::Known;
pub use self::watch::{Deaths, Heal, NoHeal};
use crate::credentials;
use crate::host::{Beneath, FilesError, Host, Probe};
use crate::node::error::PublishError;
use crate::node::locks::Locks;
use crate::node::orders::Orders;
use crate::node::phases::{Phase, Phases};
use crate::node::repairs::Repairs;
use crate::node::steps::{Step, Steps};
use crate::node::strategies::Done;
use crate::node::teller::{Mounted, Teller};
use crate::systemd::{Kind, Limits, Outcome, Service, Systemd, UnitCommand};

/// The engine gives up after 30 seconds by itself; so did drivers before us.
const STARTS_WITHIN: Duration = Duration::from_secs(30);

/// A healthy engine answers for its root at once and without S3; only a frozen one, or a node without CPU, takes longer.
const ALIVE_WITHIN: Duration = Duration::from_secs(20);

/// For questions to systemd and the kernel on the way out of a failure, whatever the caller's deadline was.
const TIDIED_WITHIN: Duration = Duration::from_secs(20);

/// Asks our engine to outlive its own death. A variable, because any other engine must work as well.
const KEEP_ALIVE: &str = "S3CSI_ENGINE_KEEP_ALIVE=1";

/// As drivers before us made it.
const TARGET_MODE: u32 = 0o755;

/// Engines run as root here; others need not see even the names.
const PLACE_MODE: u32 = 0o700;

/// The engine's words in an error message: enough for the cause, not for a log.
const LONGEST_WORDS: usize = 4 << 10;

pub struct SystemdUnits {
    pub host: Arc<dyn Host>,
    pub systemd: Systemd,
    /// The engine's path on the host.
    pub engine: PathBuf,
    /// Kubelet's directory, as the mount table spells it. Units and mounts elsewhere are none of our business.
    pub kubelet: PathBuf,
    /// The directory with one directory of credentials per target.
    pub places: PathBuf,
    /// The same directory as the host sees it.
    pub places_view: PathBuf,
    pub orders: Orders,
    /// What every engine may use, unless its volume says otherwise.
    pub limits: Limits,
    pub keeping: Keeping,
    /// One change per target at a time.
    pub locks: Locks,
    pub steps: Steps,
    pub known: Known,
    pub repairs: Repairs,
    pub teller: Arc<Teller>,
    pub deaths: Deaths,
    pub heal: Arc<dyn Heal>,
}

/// One publish, understood.
struct Work<'a> {
    publish: &'a Publish,
    keys: &'a Keys,
    /// Name of the directory of its credentials.
    place: &'a str,
    deadline: Instant,
}

/// What becomes of a mount whose engine dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keeping {
    /// Its unit starts another one on the same mount: a pause, and open files live on.
    InUnit,
    /// It dies with the engine, and the target is mounted anew.
    Nobody,
}

/// What a failed publish must take away again.
#[derive(Default)]
struct Made {
    directory: bool,
    credentials: bool,
}

impl SystemdUnits {
    pub fn publish(
        &self,
        publish: &Publish,
        limits: Limits,
        deadline: Instant,
        phases: &Phases,
    ) -> Result<Done, PublishError> {
        let bucket = || publish.bucket.to_string();
        let keys = self.orders.keys(publish)?;
        let place = place_name(&publish.target);
        // Wrong options are refused before anything is made for them.
        let command = self.command(publish, &place, limits)?;
        let busy = || PublishError::SourceBusy { bucket: bucket() };
        let _held = self.locks.lock(&place, deadline).ok_or_else(busy)?;
        self.steps.done(Step::Locked);
        let mut made = Made::default();
        let work = Work { publish, keys, place: &place, deadline };
        let outcome = self.ensure(&work, command, &mut made, phases);
        match &outcome {
            Ok(_) => self.steps.done(Step::Bound),
            Err(_) => self.undo(publish.target.path(), &place, &made),
        }
        outcome.map(|mounted| Done { mounted, source: None })
    }

    /// Directory, credentials and unit, each looked at first. The caller holds the target's lock and undoes what was made.
    fn ensure(
        &self,
        work: &Work<'_>,
        mut command: UnitCommand,
        made: &mut Made,
        phases: &Phases,
    ) -> Result<Mounted, PublishError> {
        let Work { publish, keys, place, deadline } = *work;
        let host = self.host.as_ref();
        let bucket = || publish.bucket.to_string();
        let target = publish.target.path();
        let failed = |cause| PublishError::Unit { bucket: bucket(), target: target.to_owned(), cause };
        let unusable = |cause| PublishError::Target { target: target.to_owned(), cause };

        let found = host.probe(target, deadline.min(Instant::now() + ALIVE_WITHIN));
        if matches!(found, Probe::Missing) {
            host.create_directory(target, TARGET_MODE).map_err(unusable)?;
            made.directory = true;
            self.steps.done(Step::PlaceMade);
        }
        let resolved = host.resolve(target).map_err(unusable)?;
        let is_dead = matches!(found, Probe::Dead(_) | Probe::Hung);
        if is_dead {
            tracing::info!(?target, %found, "replacing a mount that is not served");
            self.clear(&resolved, deadline).map_err(failed)?;
        }
        let table = host.mount_table().map_err(|cause| PublishError::Look { cause })?;
        let is_mounted = match table.at(&resolved) {
            Some(mount) if mount.is_ours() => true,
            Some(mount) => {
                let (kind, device) = (mount.kind.clone(), mount.source.clone());
                return Err(PublishError::ForeignMount { target: target.to_owned(), kind, device });
            }
            None => false,
        };

        // On every call, mounted or not: this is how a rotated key gets to a running engine.
        let not_written = |cause| PublishError::Credentials { bucket: bucket(), cause };
        made.credentials = !self.places.join(place).exists();
        if is_mounted && made.credentials {
            let origin = self.predecessor(&resolved, place, deadline);
            match origin.map_err(|cause| failed(UnitError::Systemd { cause }))? {
                Some(Origin::Files(profile)) => {
                    return self.refresh(&profile, keys).map(|()| Mounted::Before).map_err(not_written);
                }
                Some(Origin::Fixed) => return Ok(Mounted::Before),
                None => {}
            }
        }
        phases.time(Phase::Credentials, || self.ensure_credentials(place, keys)).map_err(not_written)?;
        self.steps.done(Step::CredentialsWritten);
        if is_mounted {
            made.credentials = false;
            return Ok(Mounted::Before);
        }

        if let Some(last) = command.command.last_mut() {
            *last = resolved.to_string_lossy().into_owned();
        }
        phases.time(Phase::Source, || self.start(&bucket(), &resolved, &command, deadline)).map_err(failed)?;
        Ok(if is_dead { Mounted::Anew } else { Mounted::Now })
    }

    /// Starts a unit for a target where nothing is mounted, and waits until the mount answers. After an error neither is left.
    fn start(&self, bucket: &str, target: &Path, command: &UnitCommand, deadline: Instant) -> Result<(), UnitError> {
        let systemd = |cause| UnitError::Systemd { cause };
        // A publish that was cut short may have left one that is just about to mount; two would mount over each other.
        self.end_units(target, Duration::ZERO, deadline).map_err(systemd)?;
        self.clear(target, deadline)?;
        let service = Service {
            name: units::mount_unit_name().map_err(systemd)?,
            description: format!("Mountpoint for Amazon S3 CSI driver FUSE daemon: {bucket}"),
            kind: Kind::Forking,
            command: command.command.clone(),
            environment: command.environment.clone(),
            limits: command.limits,
            starts_within: STARTS_WITHIN.min(deadline.saturating_duration_since(Instant::now())),
        };
        // Known before it runs, so that its end is understood however early it comes.
        self.known.insert(&service.name, UnitCommand { started: monotonic_microseconds(), ..command.clone() });
        let outcome = self.systemd.start(&service, deadline);
        self.steps.done(Step::HandedOver);
        let unit = service.name.clone();
        let failure = match outcome {
            Ok(started) => match started.outcome {
                Outcome::Done if self.answers(target, deadline) => {
                    match self.systemd.has_its_arguments(&service, deadline) {
                        Ok(true) => {
                            self.steps.done(Step::Served);
                            return Ok(());
                        }
                        Ok(false) => UnitError::Reloaded { unit: unit.clone() },
                        Err(cause) => UnitError::Systemd { cause },
                    }
                }
                Outcome::Done => UnitError::NoAnswer { unit: unit.clone() },
                Outcome::Failed(ended) => {
                    UnitError::Engine { unit: unit.clone(), words: words(&started.output, NO_WORD), ended }
                }
            },
            Err(cause) => UnitError::Systemd { cause },
        };
        self.known.forget(&unit);
        let soon = Instant::now() + TIDIED_WITHIN;
        // Unmount before stop: an engine that is stopped before it listens to signals leaves its mount behind.
        log_if_failed("failed mount not removed", self.clear(target, soon));
        log_if_failed("failed unit not stopped", self.systemd.stop(&unit, soon));
        log_if_failed("failed unit not forgotten", self.systemd.reset_failed(&unit, soon));
        Err(failure)
    }

    /// What kubelet will show to the workload is an engine's file system, and it is alive.
    fn answers(&self, target: &Path, deadline: Instant) -> bool {
        let Ok(table) = self.host.mount_table() else { return false };
        let Some(mount) = table.at(target).filter(|it| it.is_ours()) else { return false };
        let found = self.host.probe(target, deadline.min(Instant::now() + ALIVE_WITHIN));
        matches!(found, Probe::Alive { device } if device == mount.device)
    }

    fn ensure_credentials(&self, place: &str, keys: &Keys) -> Result<(), FilesError> {
        let directory = Beneath::open(&self.places)?.make_directory(place, PLACE_MODE, Some(0))?;
        credentials::ensure(&directory, keys, 0)
    }

    /// What systemd is told to run; its last word is the target.
    fn command(&self, publish: &Publish, place: &str, limits: Limits) -> Result<UnitCommand, PublishError> {
        let mut order = self.orders.order(publish, &self.places_view.join(place))?;
        let mut command = vec![self.engine.to_string_lossy().into_owned()];
        command.extend(order.arguments);
        // There is no bind that could be read-only: the mount is this workload's own.
        if publish.access == Access::ReadOnly {
            command.push("--read-only".to_owned());
        }
        command.push(publish.bucket.to_string());
        command.push(publish.target.path().to_string_lossy().into_owned());
        if self.keeping == Keeping::InUnit {
            order.environment.push(KEEP_ALIVE.to_owned());
        }
        let limits = Limits {
            memory_bytes: limits.memory_bytes.or(self.limits.memory_bytes),
            cpu_millis: limits.cpu_millis.or(self.limits.cpu_millis),
            tasks: limits.tasks.or(self.limits.tasks),
        };
        Ok(UnitCommand { command, environment: order.environment, limits, started: 0 })
    }

    /// After a failed publish: only what it made itself goes away again.
    fn undo(&self, target: &Path, place: &str, made: &Made) {
        if made.directory {
            log_if_failed("target directory not removed", self.host.remove_directory(target));
        }
        if made.credentials {
            log_if_failed("credentials not removed", self.remove_credentials(place));
        }
    }

    fn remove_credentials(&self, place: &str) -> Result<(), FilesError> {
        Beneath::open(&self.places)?.remove_tree(place)
    }
}

/// The clock that systemd's time stamps of units are of.
fn monotonic_microseconds() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    u64::try_from(now.tv_sec * 1_000_000 + now.tv_nsec / 1000).unwrap_or_default()
}

/// The directory of a target's credentials; also the name of its lock.
fn place_name(target: &TargetPath) -> String {
    mountpoint_pod_name(target.workload(), target.volume())
}

/// The same for a path that was not checked: of a unit, of the mount table, of an unpublish.
fn place_name_of_path(target: &Path) -> Option<String> {
    Some(place_name(&target.to_str()?.parse().ok()?))
}

/// An engine that runs always says why it fails. So it did not run, or nobody heard it.
const NO_WORD: &str = "it ended without a word; MOUNT_S3_PATH must be an engine on the host, PTMX_PATH the host's ptmx";

/// One line, bounded; or what is known when nothing was said.
fn words(output: &str, silence: &str) -> String {
    let line = output.lines().map(str::trim).filter(|it| !it.is_empty()).collect::<Vec<_>>().join("; ");
    if line.is_empty() { silence.to_owned() } else { line.chars().take(LONGEST_WORDS).collect() }
}

/// For work after a failure, when the first error is the one to tell.
fn log_if_failed<T, E: Display>(what: &str, outcome: Result<T, E>) {
    if let Err(error) = outcome {
        tracing::warn!(%error, "{what}; the next sweep tries again");
    }
}
