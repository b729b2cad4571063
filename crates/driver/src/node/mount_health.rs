//! The health of all mounts of this driver on the node. Nothing is repaired here, and no check takes long.
//!
//! A file system that does not answer is probed only once: the probe stays open until it is answered or the mount is gone, so
//! frequent checks do not accumulate blocked threads.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use s3csi_core::attachment::is_mountpoint_pod_name;
use s3csi_core::chain::Chain;

use super::deadlines;
use super::held_mounts::HeldMounts;
use crate::host::{Device, Host, Mount, Probe};
use crate::metrics::NodeMetrics;

/// An open probe ends with its connection, long before this.
const OPEN_FOR: Duration = Duration::from_hours(24);

/// The thread only blocks in a system call.
const STACK_BYTES: usize = 64 * 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MountState {
    Alive,
    /// Its server is gone.
    Dead,
    /// No answer yet.
    Hung,
    /// Its mounter is gone, and it waits for another one.
    Unserved,
    /// It could not be probed.
    Unknown,
}

pub struct MountHealth {
    pub host: Arc<dyn Host>,
    pub held_mounts: HeldMounts,
    /// Kubelet's root directory, as the mount table spells it.
    pub kubelet: PathBuf,
    /// The directory in which sources are mounted.
    pub sources: PathBuf,
    /// The strategy of this plugin.
    pub strategy: &'static str,
    open: Mutex<HashMap<Device, mpsc::Receiver<MountState>>>,
}

/// One FUSE file system of ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountStatus {
    /// Where it is mounted: at its source, if it has one.
    pub at: PathBuf,
    pub strategy: &'static str,
    pub state: MountState,
}

impl MountHealth {
    pub fn new(
        host: Arc<dyn Host>,
        held_mounts: HeldMounts,
        kubelet: PathBuf,
        sources: PathBuf,
        strategy: &'static str,
    ) -> Self {
        Self { host, held_mounts, kubelet, sources, strategy, open: Mutex::default() }
    }

    /// The status of every file system of ours, and the number of targets. `None` if the mount table cannot be read.
    pub fn check(&self) -> Option<(Vec<MountStatus>, usize)> {
        let table = match self.host.mount_table() {
            Ok(table) => table,
            Err(error) => {
                tracing::warn!(error = %Chain(&error), "mount health not checked: failed to read the mount table");
                return None;
            }
        };
        let mut found: BTreeMap<Device, PathBuf> = BTreeMap::new();
        let mut targets = 0;
        // Dead mounts that are covered by new ones are no longer in use.
        let covering: BTreeSet<_> = table.beneath(&self.kubelet).map(|it| (it.parent, it.at.as_path())).collect();
        let is_covered = |it: &Mount| covering.contains(&(it.id, it.at.as_path()));
        for mount in table.beneath(&self.kubelet).filter(|it| it.is_ours() && !is_covered(it)) {
            let is_source = self.is_source(mount);
            targets += usize::from(!is_source);
            let at = found.entry(mount.device).or_insert_with(|| mount.at.clone());
            if is_source {
                at.clone_from(&mount.at);
            }
        }
        let states = self.probe(&found);
        let counted = found.into_iter().map(|(device, at)| {
            // Only strategy systemd mounts engines at targets. A source may be of a strategy that is drained.
            let strategy = match at.file_name().and_then(|it| it.to_str()) {
                _ if !at.starts_with(&self.sources) => "systemd",
                Some(name) if is_mountpoint_pod_name(name) => "pod",
                _ => "daemon",
            };
            MountStatus { state: states[&device], at, strategy }
        });
        Some((counted.collect(), targets))
    }

    /// Updates the metrics.
    pub fn measure(&self, metrics: &NodeMetrics) {
        let Some((counted, targets)) = self.check() else { return };
        // Alerts need a zero to start from.
        let mut mounts = BTreeMap::from(
            [MountState::Alive, MountState::Dead, MountState::Hung, MountState::Unserved]
                .map(|it| ((self.strategy, it.label()), 0)),
        );
        for MountStatus { strategy, state, .. } in counted {
            *mounts.entry((strategy, state.label())).or_default() += 1;
        }
        metrics.counted_mounts(&mounts, i64::try_from(targets).unwrap_or(i64::MAX));
    }

    fn is_source(&self, mount: &Mount) -> bool {
        mount.at.parent() == Some(&self.sources)
    }

    fn probe(&self, mounts: &BTreeMap<Device, PathBuf>) -> BTreeMap<Device, MountState> {
        let mut open = self.open.lock();
        open.retain(|device, _| mounts.contains_key(device));
        for (device, at) in mounts {
            if !open.contains_key(device)
                && let Some(answer) = self.start_probe(*device, at)
            {
                open.insert(*device, answer);
            }
        }
        let deadline = Instant::now() + deadlines::CHECK;
        let mut states = BTreeMap::new();
        for device in mounts.keys() {
            let Some(answer) = open.get(device) else {
                states.insert(*device, MountState::Unknown);
                continue;
            };
            let state = match answer.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(state) => state,
                Err(mpsc::RecvTimeoutError::Timeout) => MountState::Hung,
                Err(mpsc::RecvTimeoutError::Disconnected) => MountState::Unknown,
            };
            if state != MountState::Hung {
                open.remove(device);
            }
            let is_unserved = state == MountState::Hung && self.held_mounts.outage(*device).is_some();
            states.insert(*device, if is_unserved { MountState::Unserved } else { state });
        }
        states
    }

    fn start_probe(&self, device: Device, at: &Path) -> Option<mpsc::Receiver<MountState>> {
        let (sender, answer) = mpsc::sync_channel(1);
        let (host, at) = (self.host.clone(), at.to_owned());
        let probe = move || {
            let state = match host.probe(&at, Instant::now() + OPEN_FOR) {
                Probe::Alive { device: seen } if seen == device => MountState::Alive,
                // Another mount answered: the table changed meanwhile.
                Probe::Alive { .. } | Probe::Missing | Probe::Unknown(_) => MountState::Unknown,
                Probe::Dead(_) => MountState::Dead,
                Probe::Hung => MountState::Hung,
            };
            // The receiver is dropped when the mount is gone.
            let _ = sender.send(state);
        };
        thread::Builder::new().name("mount-health".to_owned()).stack_size(STACK_BYTES).spawn(probe).ok()?;
        Some(answer)
    }
}

impl MountState {
    pub const fn label(self) -> &'static str {
        match self {
            Self::Alive => "alive",
            Self::Dead => "dead",
            Self::Hung => "hung",
            Self::Unserved => "unserved",
            Self::Unknown => "unknown",
        }
    }
}
