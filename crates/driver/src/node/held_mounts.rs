//! Holds copies of the FUSE descriptor and of the engine state of every source, so that a mount outlives its mounter.
//!
//! While a copy is open, requests for a mount without an engine wait instead of failing. So [`HeldMount`] is the only owner of the
//! copies, and closes them as `s3csi_core::hold` decides. The state belongs to a process that is not trusted: it is never mapped.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::FileType;
use s3csi_core::WorkloadUid;
use s3csi_core::credentials::Keys;
use s3csi_core::hold::{Action, Event, Hold, Observation, Phase};
use s3csi_handoff::{self as handoff, MountRequest, SendError};

use crate::host::{Device, Host, SafeDir};

/// `/dev/fuse`.
const FUSE_DEVICE: (u32, u32) = (10, 229);

/// How long after a failed attempt a mount is tried to be moved again, at first and at most.
const FIRST_BACKOFF: Duration = Duration::from_secs(2);
const LONGEST_BACKOFF: Duration = Duration::from_mins(2);

/// How often a plugin that is about to end looks at mounts without an engine.
const SERVED_INTERVAL: Duration = Duration::from_millis(100);

/// How long a plugin that is about to end distrusts an engine whose mounter is gone: killed with it, the engine ends a moment later.
const LONGEST_EXIT: Duration = Duration::from_secs(3);

/// All held mounts of the node, by the path of their source.
#[derive(Clone, Debug, Default)]
pub struct HeldMounts {
    mounts: Arc<Mutex<BTreeMap<PathBuf, Arc<HeldMount>>>>,
    /// How long a mount may wait for a mounter. Zero: nothing is held.
    longest_outage: Duration,
}

/// The descriptors of one mount and how long they are held.
#[derive(Debug)]
pub struct HeldMount {
    device: Device,
    begun: Instant,
    /// How the mount was requested. Another mounter gets the same, whatever the volume says now.
    request: MountRequest,
    inner: Mutex<Inner>,
    /// The keys of the last publish, for a mounter with another directory.
    keys: Mutex<Option<Keys>>,
    moves: MoveAttempts,
}

/// A mounter that serves a mount, or is to do so.
#[derive(Debug)]
pub struct MounterAddress {
    /// The directory of its socket.
    pub directory: SafeDir,
    /// The Mountpoint Pod it runs in; none with strategy `daemon`.
    pub pod: Option<WorkloadUid>,
}

/// Identifies a monitor of the mount. Only the events of one monitor count at a time: that of the mounter that serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MonitorId(u64);

/// Attempts to move the mount to another mounter, one at a time.
#[derive(Debug, Default)]
struct MoveAttempts {
    is_running: AtomicBool,
    failures: AtomicU32,
}

#[derive(Debug)]
struct Inner {
    hold: Hold,
    descriptors: Option<Descriptors>,
    mounter: MounterAddress,
    monitor: MonitorId,
    /// The mounter that prepares to take over, and its monitor.
    next: Option<(MonitorId, MounterAddress)>,
    last_monitor: u64,
}

#[derive(Debug)]
struct Descriptors {
    fuse: OwnedFd,
    /// Missing until the mounter has sent it.
    state: Option<OwnedFd>,
}

/// When a mounter that gets a mount of another one takes over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResumeMode {
    Immediate,
    /// The other mounter still serves the mount.
    OnCommand,
}

/// Why descriptors of a mounter are not those of the mount.
#[derive(Debug, thiserror::Error)]
pub enum InvalidDescriptors {
    #[error("the mounter sent {count} descriptors instead of {expected}")]
    Count { count: usize, expected: usize },

    #[error("the mounter sent a descriptor that is not of this FUSE mount")]
    Fuse,

    #[error("the mounter sent an engine state that is not a memory file")]
    State,

    #[error("failed to check the descriptors of the mounter")]
    Check {
        #[source]
        cause: io::Error,
    },
}

impl MonitorId {
    /// Of the connection on which the mount was requested.
    pub const FIRST: Self = Self(0);
}

impl HeldMounts {
    pub fn new(longest_outage: Duration) -> Self {
        Self { mounts: Arc::default(), longest_outage }
    }

    pub fn is_enabled(&self) -> bool {
        !self.longest_outage.is_zero()
    }

    pub fn longest_outage(&self) -> Duration {
        self.longest_outage
    }

    /// Holds the descriptor of a new mount, until its mounter has sent the state or proves not to.
    pub fn begin(
        &self,
        path: &Path,
        device: Device,
        fuse: OwnedFd,
        request: MountRequest,
        mounter: MounterAddress,
    ) -> Arc<HeldMount> {
        let hold = Hold::new(self.longest_outage);
        self.insert(path, HeldMount::new(device, request, hold, Descriptors { fuse, state: None }, mounter))
    }

    /// Holds the descriptors that the mounter of a served mount has sent, after this plugin was restarted.
    pub fn adopt(
        &self,
        path: &Path,
        device: Device,
        sent: Vec<OwnedFd>,
        request: MountRequest,
        mounter: MounterAddress,
    ) -> Result<Arc<HeldMount>, InvalidDescriptors> {
        let [fuse, state] = <[OwnedFd; 2]>::try_from(sent)
            .map_err(|sent| InvalidDescriptors::Count { count: sent.len(), expected: 2 })?;
        check_fuse(&fuse, device)?;
        check_state(&state)?;
        let hold = Hold::served(self.longest_outage);
        let descriptors = Descriptors { fuse, state: Some(state) };
        Ok(self.insert(path, HeldMount::new(device, request, hold, descriptors, mounter)))
    }

    fn insert(&self, path: &Path, mount: HeldMount) -> Arc<HeldMount> {
        let mount = Arc::new(mount);
        // Of an earlier mount at the same path nothing may be left.
        if let Some(earlier) = self.lock().insert(path.to_owned(), Arc::clone(&mount)) {
            earlier.end();
        }
        mount
    }

    /// Waits until every mount has an engine again, or for the longest outage: the last copies of a mount without an engine would
    /// end with this process, and the mount with them.
    pub async fn wait_until_served(&self) {
        let begun = Instant::now();
        let deadline = begun + self.longest_outage;
        let is_unserved = || {
            let is_ending = begun.elapsed() < LONGEST_EXIT;
            self.lock().values().any(|it| it.outage().is_some() || is_ending && it.has_lost_its_mounter())
        };
        if is_unserved() {
            tracing::info!(limit = ?self.longest_outage, "mounts wait for a mounter, ending when they are served");
        }
        while is_unserved() && Instant::now() < deadline {
            tokio::time::sleep(SERVED_INTERVAL).await;
        }
    }

    /// How long no engine has served the mount with this device, if none does.
    pub fn outage(&self, device: Device) -> Option<Duration> {
        self.lock().values().find(|it| it.device == device)?.outage()
    }

    pub fn find(&self, path: &Path) -> Option<Arc<HeldMount>> {
        self.lock().get(path).filter(|it| it.phase() != Phase::Closed).cloned()
    }

    /// Closes the copies of a mount that is about to be unmounted or aborted.
    pub fn end(&self, path: &Path) {
        if let Some(mount) = self.lock().remove(path) {
            mount.end();
        }
    }

    /// Forgets a mount whose copies are closed.
    pub fn forget(&self, path: &Path, mount: &Arc<HeldMount>) {
        let mut mounts = self.lock();
        if mounts.get(path).is_some_and(|it| Arc::ptr_eq(it, mount)) {
            mounts.remove(path);
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<PathBuf, Arc<HeldMount>>> {
        self.mounts.lock()
    }
}

impl HeldMount {
    fn new(
        device: Device,
        request: MountRequest,
        hold: Hold,
        descriptors: Descriptors,
        mounter: MounterAddress,
    ) -> Self {
        let (descriptors, monitor) = (Some(descriptors), MonitorId::FIRST);
        let inner = Inner { hold, descriptors, mounter, monitor, next: None, last_monitor: monitor.0 };
        Self {
            device,
            begun: Instant::now(),
            request,
            inner: Mutex::new(inner),
            keys: Mutex::default(),
            moves: MoveAttempts::default(),
        }
    }

    pub fn keys(&self) -> Option<Keys> {
        self.keys.lock().clone()
    }

    pub fn set_keys(&self, keys: &Keys) {
        *self.keys.lock() = Some(keys.clone());
    }

    /// This mounter is to resume the mount, if none serves it.
    pub fn set_mounter(&self, mounter: MounterAddress) {
        let mut inner = self.lock();
        if let Phase::Unserved { .. } | Phase::Resuming { .. } = inner.hold.phase() {
            inner.mounter = mounter;
        }
    }

    /// Connects to the mounter that serves the mount or is to resume it, if it listens.
    pub fn connect(&self) -> Option<UnixStream> {
        self.lock().mounter.directory.connect(handoff::SOCKET).ok()
    }

    pub fn directory(&self) -> io::Result<SafeDir> {
        self.lock().mounter.directory.try_clone()
    }

    /// The Mountpoint Pod whose mounter serves the mount or is to resume it.
    pub fn pod(&self) -> Option<WorkloadUid> {
        self.lock().mounter.pod.clone()
    }

    /// Whether another mounter could take over from the one that serves the mount.
    pub fn is_movable(&self) -> bool {
        let inner = self.lock();
        matches!(inner.hold.phase(), Phase::Served | Phase::Preparing)
            && inner.mounter.directory.exists(handoff::COMMANDS_FILE)
    }

    /// Whether the caller is to move the mount now: no other attempt is running.
    pub fn claim_move(&self) -> bool {
        self.phase() == Phase::Served && !self.moves.is_running.swap(true, Ordering::AcqRel)
    }

    /// Another attempt may follow. Returns how long it should wait.
    pub fn end_move(&self, has_moved: bool) -> Duration {
        let failures = if has_moved { 0 } else { self.moves.failures.load(Ordering::Relaxed).saturating_add(1) };
        self.moves.failures.store(failures, Ordering::Relaxed);
        self.moves.is_running.store(false, Ordering::Release);
        FIRST_BACKOFF.saturating_mul(1 << failures.saturating_sub(1).min(6)).min(LONGEST_BACKOFF)
    }

    /// Another mounter prepares to take over. Its monitor is heard from then on. `None` if the mount is not served.
    pub fn begin_move(&self, mounter: MounterAddress) -> Option<MonitorId> {
        let mut inner = self.lock();
        if inner.hold.phase() != Phase::Served {
            return None;
        }
        inner.hold.on(Event::MoveStarted, self.now());
        inner.last_monitor += 1;
        let id = MonitorId(inner.last_monitor);
        inner.next = Some((id, mounter));
        Some(id)
    }

    /// Whether this is the monitor of the mounter that serves the mount.
    pub fn is_monitored_by(&self, monitor: MonitorId) -> bool {
        self.lock().monitor == monitor
    }

    pub fn phase(&self) -> Phase {
        self.lock().hold.phase()
    }

    fn has_lost_its_mounter(&self) -> bool {
        matches!(self.phase(), Phase::Unserved { .. } | Phase::Resuming { .. } | Phase::Moving { .. })
    }

    /// How long no engine has served it, if none does.
    pub fn outage(&self) -> Option<Duration> {
        match self.phase() {
            Phase::Unserved { .. } if self.observe().has_engine => None,
            Phase::Unserved { since } | Phase::Resuming { since } | Phase::Moving { since } => {
                Some(self.now().saturating_sub(since))
            }
            Phase::Starting | Phase::Served | Phase::Preparing | Phase::Closed => None,
        }
    }

    /// Applies an event that a monitor has seen and carries out its action, except for the resume, which the caller does.
    pub fn on(&self, monitor: MonitorId, event: Event, host: &dyn Host) -> Action {
        let mut inner = self.lock();
        let is_next = inner.next.as_ref().is_some_and(|(it, _)| *it == monitor);
        if inner.monitor != monitor && !is_next {
            return Action::Nothing;
        }
        let before = inner.hold.phase();
        let action = inner.hold.on(event, self.now());
        match (before, inner.hold.phase()) {
            (Phase::Preparing, Phase::Preparing) => {}
            (Phase::Preparing, Phase::Moving { .. }) => {
                if let Some((monitor, mounter)) = inner.next.take() {
                    (inner.monitor, inner.mounter) = (monitor, mounter);
                }
            }
            _ => inner.next = None,
        }
        match action {
            Action::Nothing | Action::Resume => {}
            Action::Close => inner.descriptors = None,
            Action::AbortAndClose => {
                // The number of the device may belong to another mount once this one is gone.
                let is_connected = inner.descriptors.as_ref().is_some_and(|it| is_connected(&it.fuse));
                if is_connected && let Err(error) = host.abort(self.device) {
                    tracing::warn!(%error, "connection not aborted");
                }
                inner.descriptors = None;
            }
        }
        action
    }

    fn end(&self) {
        let mut inner = self.lock();
        inner.hold.on(Event::Ending, self.now());
        inner.descriptors = None;
    }

    /// Takes the state that the mounter has sent.
    pub fn keep_state(&self, mut sent: Vec<OwnedFd>) -> Result<(), InvalidDescriptors> {
        let count = sent.len();
        let state = sent.pop().filter(|_| count == 1).ok_or(InvalidDescriptors::Count { count, expected: 1 })?;
        check_state(&state)?;
        if let Some(descriptors) = &mut self.lock().descriptors {
            descriptors.state = Some(state);
        }
        Ok(())
    }

    /// What the kernel says of the mount; whether a mounter listens is the caller's to add.
    pub fn observe(&self) -> Observation {
        let inner = self.lock();
        let Some(Descriptors { fuse, state }) = &inner.descriptors else {
            return Observation { is_connected: false, has_engine: false, has_mounter: false };
        };
        let has_engine = state.as_ref().is_some_and(|it| has_lock(it).unwrap_or(false));
        Observation { is_connected: is_connected(fuse), has_engine, has_mounter: false }
    }

    /// Sends the descriptors to a mounter that is to resume the mount: at once, or at its `go`.
    pub fn send(&self, connection: &UnixStream, mode: ResumeMode) -> Result<(), SendError> {
        let inner = self.lock();
        let Some(Descriptors { fuse, state: Some(state) }) = &inner.descriptors else {
            return Err(SendError::Send { cause: io::ErrorKind::BrokenPipe.into() });
        };
        let wait = mode == ResumeMode::OnCommand;
        let request = MountRequest { resume: true, hold: true, wait, ..self.request.clone() };
        handoff::send_resume(connection, &request, fuse.as_fd(), state.as_fd())
    }

    fn now(&self) -> Duration {
        self.begun.elapsed()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }
}

/// The kernel reports POLLERR once the connection is unmounted or aborted.
fn is_connected(fuse: &OwnedFd) -> bool {
    let mut watched = [PollFd::new(fuse, PollFlags::IN)];
    let polled = rustix::event::poll(&mut watched, Some(&Timespec::default()));
    polled.is_ok() && !watched[0].revents().contains(PollFlags::ERR)
}

/// Whether an engine has the record lock on its state. The lock ends with the last thread of the process, unlike its sockets.
fn has_lock(state: &OwnedFd) -> io::Result<bool> {
    let query = rustix::process::Flock::from(rustix::process::FlockType::WriteLock);
    Ok(rustix::process::fcntl_getlk(state, &query)?.is_some())
}

fn check_fuse(fuse: &OwnedFd, device: Device) -> Result<(), InvalidDescriptors> {
    let status = rustix::fs::fstat(fuse).map_err(|cause| InvalidDescriptors::Check { cause: cause.into() })?;
    let number = (rustix::fs::major(status.st_rdev), rustix::fs::minor(status.st_rdev));
    let is_fuse = FileType::from_raw_mode(status.st_mode) == FileType::CharacterDevice && number == FUSE_DEVICE;
    let of_another = connection_of(fuse).is_some_and(|it| it != device.minor);
    if is_fuse && !of_another && is_connected(fuse) { Ok(()) } else { Err(InvalidDescriptors::Fuse) }
}

/// The connection of a FUSE descriptor, which is the minor number of its mount. Kernels before 6.18 do not report it.
fn connection_of(fuse: &OwnedFd) -> Option<u32> {
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fuse.as_raw_fd())).ok()?;
    info.lines().find_map(|it| it.strip_prefix("fuse_connection:"))?.trim().parse().ok()
}

fn check_state(state: &OwnedFd) -> Result<(), InvalidDescriptors> {
    let status = rustix::fs::fstat(state).map_err(|cause| InvalidDescriptors::Check { cause: cause.into() })?;
    let is_memory = FileType::from_raw_mode(status.st_mode) == FileType::RegularFile && status.st_nlink == 0;
    if is_memory { Ok(()) } else { Err(InvalidDescriptors::State) }
}
