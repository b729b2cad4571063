//! Sources: probed, repaired, mounted and handed over to a mounter, or unmounted. Every step may be repeated.

mod error;

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use s3csi_core::WorkloadUid;
use s3csi_core::chain::Chain;
use s3csi_handoff::{self as handoff, Answer, MountRequest, SendError};

pub use self::error::SourceError;
use super::deadlines;
use super::engine_monitor::{self, EngineMonitor, MonitorEvent, SentDescriptors, ServedSource, request_descriptors};
use super::failpoints::{Failpoint, Failpoints};
use super::held_mounts::{HeldMount, HeldMounts, MonitorId, MounterAddress};
use super::planned_move::MountMove;
use super::remediation::{DEAD_SOURCE_REPLACED, Remediations};
use super::reporter::Reporter;
use crate::host::{Device, FuseOptions, Host, HostError, MOST_STACKED, Mount, MountTable, Probe, SafeDir};

/// A mounter that is starting (its Pod is new, or its container was restarted) listens within this time.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);

/// How often a mounter's socket is tried; there is no notification for "a process listens now".
const CONNECT_RETRY: Duration = Duration::from_millis(10);

/// How often a mount that waits for a mounter is looked at.
const SERVED_RETRY: Duration = Duration::from_millis(100);

/// After a mount died at its start, the engine's error arrives within this time or never.
const ERROR_TIMEOUT: Duration = Duration::from_secs(2);

/// How much of a mounter's error file is read.
const ERROR_FILE_BYTES: usize = 4 << 10;

/// What a source must be.
pub struct SourceSpec {
    pub name: String,
    /// Where it is mounted.
    pub path: PathBuf,
    pub options: FuseOptions,
    pub request: MountRequest,
}

/// Who serves a source.
pub struct Mounter {
    pub kind: MounterKind,
    /// The directory of its socket.
    pub directory: SafeDir,
    /// The directory of its error file for this source.
    pub error_directory: SafeDir,
    /// The Mountpoint Pod it runs in; none with strategy `daemon`.
    pub pod: Option<WorkloadUid>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MounterKind {
    /// One mounter for all sources of the node. It stops engines on request.
    Shared,
    /// The mounter of a Mountpoint Pod, with one engine. It gets mount requests only: one of an earlier driver exits at the
    /// first message of another kind. Ours stops an engine that still runs when the next request arrives.
    Dedicated,
}

/// What was found of a mount of an earlier process of this plugin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Adoption {
    Held,
    /// The mounter waits for the command to take over from another one.
    Prepared,
    NotServed,
}

impl Mounter {
    fn address(&self) -> Option<MounterAddress> {
        Some(MounterAddress { directory: self.directory.try_clone().ok()?, pod: self.pod.clone() })
    }
}

/// Mounts and unmounts sources.
pub struct SourceManager {
    pub host: Arc<dyn Host>,
    pub failpoints: Failpoints,
    pub remediations: Remediations,
    pub reporter: Arc<Reporter>,
    pub held_mounts: HeldMounts,
}

enum ServeEvent {
    Probed(Probe),
    Monitor(MonitorEvent),
}

impl SourceManager {
    /// Ensures that the source is mounted and its engine answers. After an error nothing of it is left.
    pub fn ensure(&self, spec: &SourceSpec, mounter: &Mounter, deadline: Instant) -> Result<Device, SourceError> {
        if let Some(device) = self.find_serving(spec, mounter, deadline)? {
            return Ok(device);
        }
        self.host
            .create_directory(&spec.path, 0o755)
            .map_err(|cause| SourceError::Directory { path: spec.path.clone(), cause })?;
        // Connected before mounted: a FUSE mount without a server blocks every process that looks at it.
        let connection = connect(mounter, deadline)?;
        self.failpoints.hit(Failpoint::Connected);
        if mounter.kind == MounterKind::Shared {
            // An engine may be left of a mount that is gone: frozen, or of a source that was unmounted while in use.
            engine_monitor::stop_engine(&mounter.directory, &spec.name, deadline);
        }
        let fuse = self
            .host
            .mount_fuse(&spec.path, &spec.options)
            .map_err(|cause| SourceError::Mount { path: spec.path.clone(), cause })?;
        self.failpoints.hit(Failpoint::FuseMounted);
        let outcome = self.hand_over(spec, mounter, connection, fuse, deadline);
        if outcome.is_err()
            && let Err(error) = self.clear(&spec.path)
        {
            tracing::warn!(source = spec.name, %error, "failed mount not removed; the next call retries");
        }
        outcome
    }

    /// The device of a source that answers. Only a dead one is cleared, and the kernel decides what is dead. A silent engine may wait
    /// for a store that is away, and others use its mount; whether it is stuck is its supervisor's decision.
    fn find_serving(
        &self,
        spec: &SourceSpec,
        mounter: &Mounter,
        deadline: Instant,
    ) -> Result<Option<Device>, SourceError> {
        let path = &spec.path;
        let failed = |cause| SourceError::Look { cause };
        if self.host.mounted_at(path).map_err(failed)?.is_none() {
            return Ok(None);
        }
        let table = self.host.mount_table().map_err(failed)?;
        let Some(mount) = table.at(path) else { return Ok(None) };
        if !mount.is_ours() {
            return Err(SourceError::ForeignMount { path: path.clone(), kind: mount.kind.clone() });
        }
        self.wait_until_served(path, mounter, deadline)?;
        let start = Instant::now();
        let problem = match self.host.probe(path, deadlines::within(deadlines::PUBLISH, deadline)) {
            Probe::Alive { device } if device == mount.device => return Ok(Some(device)),
            Probe::Alive { .. } | Probe::Missing => return Err(SourceError::Vanished { path: path.clone() }),
            Probe::Dead(error) => error.to_string(),
            Probe::Hung => {
                // The mounter may have ended since.
                let outage = self.held_mounts.find(path).and_then(|it| it.outage());
                return Err(match outage {
                    Some(outage) => SourceError::Unserved { outage, limit: self.held_mounts.longest_outage() },
                    None => SourceError::Silent { path: path.clone(), silence: start.elapsed() },
                });
            }
            Probe::Unknown(cause) => return Err(SourceError::Unknown { path: path.clone(), cause }),
        };
        tracing::warn!(?path, problem, "source is dead, mounting it again");
        self.clear(path)?;
        self.remediations.record(DEAD_SOURCE_REPLACED, path, &spec.name);
        Ok(None)
    }

    /// A mount that waits for a mounter is not dead: clearing it would fail the requests of all its users.
    fn wait_until_served(&self, path: &Path, mounter: &Mounter, deadline: Instant) -> Result<(), SourceError> {
        let held = self.held_mounts.find(path).filter(|it| it.outage().is_some());
        if let Some(held) = held
            && let Some(address) = mounter.address()
        {
            // The Mountpoint Pod may have been created again, with another directory.
            held.set_mounter(address);
        }
        while let Some(outage) = self.held_mounts.find(path).and_then(|it| it.outage()) {
            if deadline <= Instant::now() {
                return Err(SourceError::Unserved { outage, limit: self.held_mounts.longest_outage() });
            }
            thread::sleep(SERVED_RETRY);
        }
        Ok(())
    }

    /// Holds copies of the descriptors of a mount that another process of this plugin handed over.
    pub fn adopt(&self, name: &str, path: &Path, mounter: MounterAddress, source: &str) -> Adoption {
        if self.held_mounts.find(path).is_some() {
            return Adoption::Held;
        }
        // A mounter of an earlier driver exits at the first message that is no mount request.
        let can_hold = self.held_mounts.is_enabled() && mounter.directory.exists(s3csi_handoff::COMMANDS_FILE);
        let Some(table) = self.host.mount_table().ok().filter(|_| can_hold) else { return Adoption::NotServed };
        let Some(mount) = table.at(path).filter(|it| it.is_ours()) else { return Adoption::NotServed };
        let SentDescriptors { descriptors, request, reader } = match request_descriptors(&mounter.directory, source) {
            Some(ServedSource::Served(sent)) => sent,
            Some(ServedSource::Prepared) => return Adoption::Prepared,
            None => return Adoption::NotServed,
        };
        let held = match self.held_mounts.adopt(path, mount.device, descriptors, request, mounter) {
            Ok(held) => held,
            Err(error) => {
                tracing::warn!(source = name, error = %Chain(&error), "failed to hold the mount");
                return Adoption::NotServed;
            }
        };
        tracing::info!(source = name, "mount of an earlier process is held");
        if self.monitor(name, path, Some(held)).spawn_for_served(reader).is_err() {
            self.held_mounts.end(path);
        }
        Adoption::Held
    }

    /// Lets another mounter, which has its credentials, take over from the one that serves the mount. `on_end` is called when it
    /// has, and when another attempt may be made.
    pub fn start_move(
        &self,
        name: &str,
        path: &Path,
        held: &Arc<HeldMount>,
        to: MounterAddress,
        source: &'static str,
        on_end: Box<dyn Fn() + Send>,
    ) {
        let monitor = self.monitor(name, path, Some(held.clone()));
        let started =
            MountMove { monitor, held: held.clone(), source, to, failpoints: self.failpoints, on_end }.spawn();
        if started.is_err() {
            held.end_move(false);
        }
    }

    fn monitor(&self, name: &str, path: &Path, held: Option<Arc<HeldMount>>) -> EngineMonitor {
        EngineMonitor {
            source: name.to_owned(),
            path: path.to_owned(),
            host: self.host.clone(),
            reporter: self.reporter.clone(),
            held_mounts: self.held_mounts.clone(),
            held,
            id: MonitorId::FIRST,
        }
    }

    /// Aborts the connection, so that no process blocks on it, and detaches every mount of ours at `path`.
    pub fn clear(&self, path: &Path) -> Result<(), SourceError> {
        let failed = |cause| SourceError::Clear { path: path.to_owned(), cause };
        for _ in 0..MOST_STACKED {
            let table = self.host.mount_table().map_err(|cause| SourceError::Look { cause })?;
            let Some(mount) = table.at(path).filter(|it| it.is_ours()) else { return Ok(()) };
            self.held_mounts.end(path);
            if let Err(error) = self.host.abort(mount.device) {
                tracing::debug!(?path, %error, "connection not aborted");
            }
            self.host.detach(path).map_err(failed)?;
        }
        Err(failed(HostError::TooManyMounts { at: path.to_owned() }))
    }

    /// Hands the descriptor over and waits for the first of: the engine answers, the mounter reports an error, the deadline.
    fn hand_over(
        &self,
        spec: &SourceSpec,
        mounter: &Mounter,
        connection: UnixStream,
        fuse: OwnedFd,
        deadline: Instant,
    ) -> Result<Device, SourceError> {
        let found = self.host.mounted_at(&spec.path).map_err(|cause| SourceError::Look { cause })?;
        let device = found.ok_or_else(|| SourceError::Vanished { path: spec.path.clone() })?;
        if let Err(error) = mounter.error_directory.remove_file(s3csi_handoff::ERROR_FILE) {
            tracing::debug!(source = spec.name, %error, "old error file not removed");
        }
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        connection
            .set_write_timeout(Some(left))
            .map_err(|cause| SendError::Send { cause })
            .and_then(|()| {
                let request = MountRequest { hold: self.held_mounts.is_enabled(), ..spec.request.clone() };
                handoff::send(&connection, &request, fuse.as_fd())
            })
            .map_err(|cause| SourceError::HandOver { cause })?;
        // Without the state of the engine, our copy would only make the users of a dead engine block.
        let address = mounter.address().filter(|_| self.held_mounts.is_enabled());
        let held = address.map(|it| self.held_mounts.begin(&spec.path, device, fuse, spec.request.clone(), it));
        self.failpoints.hit(Failpoint::HandedOver);
        let failed = |cause| SourceError::HandOver { cause: SendError::Send { cause } };
        let closing = connection.try_clone().map_err(failed)?;
        let events = self.watch_start(spec, held, connection, deadline).map_err(failed)?;
        let outcome = self.wait_for_start(spec, mounter, device, &events, deadline);
        if outcome.is_err() {
            // Ends the monitor, even if the mounter never closes its side.
            let _ = closing.shutdown(Shutdown::Both);
        }
        outcome
    }

    /// Starts the two threads that observe a start: the monitor of the connection, and the first probe of the mount.
    fn watch_start(
        &self,
        spec: &SourceSpec,
        held: Option<Arc<HeldMount>>,
        connection: UnixStream,
        deadline: Instant,
    ) -> io::Result<mpsc::Receiver<ServeEvent>> {
        let (events, received) = mpsc::channel();
        let monitor = self.monitor(&spec.name, &spec.path, held);
        monitor.spawn(connection, events.clone(), ServeEvent::Monitor)?;
        let (host, path) = (self.host.clone(), spec.path.clone());
        // Blocks in the kernel until the engine has answered FUSE_INIT: the only proof that it serves.
        let probe = move || drop(events.send(ServeEvent::Probed(host.probe(&path, deadline))));
        thread::Builder::new().name("first-probe".to_owned()).spawn(probe)?;
        Ok(received)
    }

    fn wait_for_start(
        &self,
        spec: &SourceSpec,
        mounter: &Mounter,
        device: Device,
        events: &mpsc::Receiver<ServeEvent>,
        deadline: Instant,
    ) -> Result<Device, SourceError> {
        let mut until = deadline;
        let mut is_disconnected = false;
        loop {
            match events.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(ServeEvent::Probed(Probe::Alive { device: seen })) if seen == device => {
                    if let Err(error) = self.host.set_read_ahead(device) {
                        tracing::debug!(source = spec.name, error = %Chain(&error), "read-ahead not set; large reads are slower");
                    }
                    return Ok(device);
                }
                Ok(ServeEvent::Probed(Probe::Unknown(cause))) => {
                    return Err(SourceError::Unknown { path: spec.path.clone(), cause });
                }
                // The engine is dead; the mounter's answer with the reason follows.
                Ok(ServeEvent::Probed(Probe::Alive { .. } | Probe::Dead(_) | Probe::Missing)) => {
                    until = deadline.min(Instant::now() + ERROR_TIMEOUT);
                }
                Ok(ServeEvent::Monitor(MonitorEvent::Answered(answer))) => match answer {
                    Answer::Ready
                    | Answer::Resumed { .. }
                    | Answer::Replaced { .. }
                    | Answer::Held { .. }
                    | Answer::Prepared
                    | Answer::Released => {}
                    Answer::Failed { error, code } => return Err(SourceError::of_engine(&error, code)),
                    Answer::Exited { error, .. } => return Err(SourceError::of_engine(&error, None)),
                },
                Ok(ServeEvent::Monitor(MonitorEvent::Disconnected)) => match mounter.kind {
                    MounterKind::Shared => return Err(start_error(mounter, SourceError::MounterGone)),
                    // One of an earlier driver never answers and may disconnect at any time; the probe decides.
                    MounterKind::Dedicated => is_disconnected = true,
                },
                Err(_) if until < deadline && is_disconnected => {
                    return Err(start_error(mounter, SourceError::MounterGone));
                }
                Err(_) if until < deadline => {
                    let unknown = SourceError::of_engine("it exited without an error message", None);
                    return Err(start_error(mounter, unknown));
                }
                Ok(ServeEvent::Probed(Probe::Hung)) | Err(_) => return Err(SourceError::NoAnswer),
            }
        }
    }
}

fn connect(mounter: &Mounter, deadline: Instant) -> Result<UnixStream, SourceError> {
    let deadline = deadlines::within(CONNECT_TIMEOUT, deadline);
    loop {
        match mounter.directory.connect(s3csi_handoff::SOCKET) {
            Ok(connection) => return Ok(connection),
            Err(error) if error.is_not_listening() && Instant::now() < deadline => thread::sleep(CONNECT_RETRY),
            Err(cause) => {
                let socket = mounter.directory.path().join(s3csi_handoff::SOCKET);
                return Err(SourceError::Unreachable { socket, cause });
            }
        }
    }
}

/// The engine's own error message from the mounter's error file, if there is one.
fn start_error(mounter: &Mounter, otherwise: SourceError) -> SourceError {
    let bytes = mounter.error_directory.read_bounded(s3csi_handoff::ERROR_FILE, ERROR_FILE_BYTES).ok().flatten();
    let error = String::from_utf8_lossy(&bytes.unwrap_or_default()).into_owned();
    if error.trim().is_empty() { otherwise } else { SourceError::of_engine(&error, None) }
}

/// Whether the device is mounted nowhere but at its source.
pub fn is_unused(table: &MountTable, path: &Path, device: Device) -> bool {
    table.of_device(device).all(|it| it.at == path)
}

/// Unmounts an unused source; if a process has files open in it, as soon as the last one is closed.
pub fn unmount(host: &dyn Host, held_mounts: &HeldMounts, path: &Path) -> Result<(), HostError> {
    // Files that stay open would wait for an engine instead of failing, as long as we have a copy.
    held_mounts.end(path);
    for attempt in 0..MOST_STACKED {
        // The table also has mounts that another one hides: those are not taken for removed.
        let is_removed = attempt > 0 && host.mounted_at(path)?.is_none();
        if is_removed || !host.mount_table()?.at(path).is_some_and(Mount::is_ours) {
            return Ok(());
        }
        match host.unmount(path) {
            Err(HostError::Busy { .. }) => host.detach(path)?,
            outcome => outcome?,
        }
    }
    Err(HostError::TooManyMounts { at: path.to_owned() })
}

#[cfg(test)]
mod tests;
