//! All mounts of this driver on the node, and which of them answer. Nothing is repaired and nobody is waited for long.
//!
//! A file system that does not answer is asked once: the question stays open until it is answered or the mount is gone, so that
//! somebody who looks every few seconds does not collect threads that wait.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use s3csi_core::chain::Chain;

use crate::host::{Device, Host, Mount, Probe};
use crate::metrics::NodeMetrics;

/// A healthy engine answers for its root at once and without S3.
const ANSWERS_WITHIN: Duration = Duration::from_secs(2);

/// An open question ends with its connection, long before this.
const OPEN_FOR: Duration = Duration::from_hours(24);

/// The thread only waits.
const STACK_BYTES: usize = 64 * 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    Alive,
    /// Nobody serves it any more.
    Dead,
    /// No answer yet.
    Hung,
    /// It could not be asked.
    Unknown,
}

pub struct Census {
    pub host: Arc<dyn Host>,
    /// Kubelet's directory, as the mount table spells it.
    pub kubelet: PathBuf,
    /// Where sources are mounted.
    pub sources: PathBuf,
    /// Of this plugin.
    pub strategy: &'static str,
    open: Mutex<HashMap<Device, mpsc::Receiver<State>>>,
}

/// One FUSE file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counted {
    /// A path at which it is mounted: the source's, if it has one.
    pub at: PathBuf,
    pub strategy: &'static str,
    pub state: State,
}

impl Census {
    pub fn new(host: Arc<dyn Host>, kubelet: PathBuf, sources: PathBuf, strategy: &'static str) -> Self {
        Self { host, kubelet, sources, strategy, open: Mutex::default() }
    }

    /// Every file system of ours, once, and the number of targets. `None` if the mount table cannot be read.
    pub fn take(&self) -> Option<(Vec<Counted>, usize)> {
        let table = match self.host.mount_table() {
            Ok(table) => table,
            Err(error) => {
                tracing::warn!(error = %Chain(&error), "mounts not counted");
                return None;
            }
        };
        let mut found: BTreeMap<Device, PathBuf> = BTreeMap::new();
        let mut targets = 0;
        for mount in table.beneath(&self.kubelet).filter(|it| it.is_ours()) {
            let is_source = self.is_source(mount);
            targets += usize::from(!is_source);
            let at = found.entry(mount.device).or_insert_with(|| mount.at.clone());
            if is_source {
                at.clone_from(&mount.at);
            }
        }
        let states = self.ask(&found);
        let counted = found.into_iter().map(|(device, at)| {
            // What is mounted at a target itself is what strategy systemd makes, of whichever driver.
            let strategy = if at.starts_with(&self.sources) { self.strategy } else { "systemd" };
            Counted { state: states[&device], at, strategy }
        });
        Some((counted.collect(), targets))
    }

    /// Counts for Prometheus.
    pub fn measure(&self, metrics: &NodeMetrics) {
        let Some((counted, targets)) = self.take() else { return };
        // States that are of interest are shown as zeros, too.
        let mut mounts =
            BTreeMap::from([State::Alive, State::Dead, State::Hung].map(|it| ((self.strategy, it.label()), 0)));
        for Counted { strategy, state, .. } in counted {
            *mounts.entry((strategy, state.label())).or_default() += 1;
        }
        metrics.counted_mounts(&mounts, i64::try_from(targets).unwrap_or(i64::MAX));
    }

    fn is_source(&self, mount: &Mount) -> bool {
        mount.at.parent() == Some(&self.sources)
    }

    fn ask(&self, mounts: &BTreeMap<Device, PathBuf>) -> BTreeMap<Device, State> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        // Of mounts that are gone nobody wants to know.
        open.retain(|device, _| mounts.contains_key(device));
        for (device, at) in mounts {
            if !open.contains_key(device)
                && let Some(answer) = self.question(*device, at)
            {
                open.insert(*device, answer);
            }
        }
        let deadline = Instant::now() + ANSWERS_WITHIN;
        let mut states = BTreeMap::new();
        for device in mounts.keys() {
            let Some(answer) = open.get(device) else {
                states.insert(*device, State::Unknown);
                continue;
            };
            let state = match answer.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(state) => state,
                Err(mpsc::RecvTimeoutError::Timeout) => State::Hung,
                Err(mpsc::RecvTimeoutError::Disconnected) => State::Unknown,
            };
            if state != State::Hung {
                open.remove(device);
            }
            states.insert(*device, state);
        }
        states
    }

    fn question(&self, device: Device, at: &Path) -> Option<mpsc::Receiver<State>> {
        let (sender, answer) = mpsc::sync_channel(1);
        let (host, at) = (self.host.clone(), at.to_owned());
        let ask = move || {
            let state = match host.probe(&at, Instant::now() + OPEN_FOR) {
                Probe::Alive { device: seen } if seen == device => State::Alive,
                // It changed while we asked, so this is no answer to the question.
                Probe::Alive { .. } | Probe::Missing | Probe::Unknown(_) => State::Unknown,
                Probe::Dead(_) => State::Dead,
                Probe::Hung => State::Hung,
            };
            // Nobody listens any more when the mount is gone.
            let _ = sender.send(state);
        };
        thread::Builder::new().name("census".to_owned()).stack_size(STACK_BYTES).spawn(ask).ok()?;
        Some(answer)
    }
}

impl State {
    pub const fn label(self) -> &'static str {
        match self {
            Self::Alive => "alive",
            Self::Dead => "dead",
            Self::Hung => "hung",
            Self::Unknown => "unknown",
        }
    }
}
