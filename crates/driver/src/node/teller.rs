//! What people should hear of mounts on this node that no answer to kubelet tells: Events on workloads, figures, and the last turn of
//! each source for whoever writes conditions. Telling never waits and never fails a call; what cannot be told is dropped.
//!
//! Who was published what is remembered for this only. Nothing is decided by it: after a restart it fills again with kubelet's calls.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use k8s_openapi::api::events::v1::Event;
use kube::api::PostParams;
use kube::{Api, Client};
use s3csi_core::chain::Chain;
use tokio::sync::{Notify, mpsc};

use crate::api::call::call;
use crate::api::event::{Kind, Listener, Speaker, Telling, event};
use crate::metrics::{EventOutcome, NodeMetrics};

/// The same is not told to the same workload more often.
const TOLD_EVERY: Duration = Duration::from_mins(1);

/// Events that wait to be written: enough for a crowded node whose Pods start all at once.
const MOST_WAITING: usize = 256;

/// Between two Events of one node: the API server has many nodes to listen to.
const PAUSE: Duration = Duration::from_millis(100);

pub struct Teller {
    metrics: Arc<NodeMetrics>,
    /// Without an API server there is nobody to tell.
    letters: Option<mpsc::Sender<Letter>>,
    published: Mutex<BTreeMap<PathBuf, Published>>,
    /// The last thing that happened to each source while it was mounted.
    turns: Mutex<HashMap<String, Turn>>,
    turned: Notify,
}

/// A volume of a workload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Published {
    /// Unknown if kubelet was not told to bring it (`podInfoOnMount`).
    pub workload: Option<Listener>,
    pub bucket: String,
    /// Who serves it: a Mountpoint Pod, a source of the node's mounter, or nothing (a unit of its own).
    pub source: Option<String>,
    /// When kubelet last brought the keys.
    pub refreshed: Instant,
}

/// What a publish found and did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mounted {
    /// It was there and answered.
    Before,
    Now,
    /// A dead mount of ours was in its place.
    Anew,
}

/// What happened to a source between two calls of kubelet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Its engine died or froze, and another one serves the same mount.
    Resumed { cause: String, stall: Duration },
    /// Its engine was well and was replaced, and another one serves the same mount.
    Replaced { reason: String, stall: Duration },
    /// Its engine ended and is not replaced.
    Died { words: String },
}

/// An Event to be written.
struct Letter {
    listener: Listener,
    telling: Telling,
}

impl Teller {
    /// Tells nobody but Prometheus.
    pub fn mute(metrics: Arc<NodeMetrics>) -> Self {
        Self::with(metrics, None)
    }

    /// The second part is to be run.
    pub fn new(
        metrics: Arc<NodeMetrics>,
        client: Client,
        driver_name: &str,
        node: &str,
    ) -> (Self, impl Future<Output = ()> + Send + use<>) {
        let (letters, waiting) = mpsc::channel(MOST_WAITING);
        let speaker = Speaker { component: format!("{driver_name}/node"), instance: node.to_owned() };
        let post = deliver(client, speaker, metrics.clone(), waiting);
        (Self::with(metrics, Some(letters)), post)
    }

    fn with(metrics: Arc<NodeMetrics>, letters: Option<mpsc::Sender<Letter>>) -> Self {
        Self { metrics, letters, published: Mutex::default(), turns: Mutex::default(), turned: Notify::new() }
    }

    /// A publish succeeded.
    pub fn published(&self, target: &Path, published: Published, mounted: Mounted, served_by: &str) {
        let bucket = &published.bucket;
        let telling = match mounted {
            Mounted::Before => None,
            Mounted::Now => Some(Telling {
                kind: Kind::Normal,
                reason: "VolumeMounted",
                text: format!("bucket {bucket:?} is mounted, served by {served_by}"),
            }),
            Mounted::Anew => Some(Telling {
                kind: Kind::Warning,
                reason: "VolumeRemounted",
                text: format!(
                    "the mount of bucket {bucket:?} was dead and is made anew, served by {served_by}; a container that has run since \
                     before still has the old one until it is restarted"
                ),
            }),
        };
        if let (Some(workload), Some(telling)) = (&published.workload, telling) {
            self.send(workload, telling);
        }
        if let (Some(source), Mounted::Now | Mounted::Anew) = (&published.source, mounted) {
            // It is served again.
            lock(&self.turns).retain(|it, turn| it != source || !matches!(turn, Turn::Died { .. }));
        }
        if mounted != Mounted::Before {
            self.turned.notify_one();
        }
        lock(&self.published).insert(target.to_owned(), published);
    }

    pub fn unpublished(&self, target: &Path) {
        lock(&self.published).remove(target);
    }

    /// Something happened to a source that workloads use.
    pub fn turned(&self, source: &str, turn: Turn) {
        let users: Vec<Published> =
            lock(&self.published).values().filter(|it| it.source.as_deref() == Some(source)).cloned().collect();
        self.count(&turn);
        for user in users {
            self.tell_turn(user, &turn);
        }
        if !matches!(turn, Turn::Replaced { .. }) {
            lock(&self.turns).insert(source.to_owned(), turn);
            self.turned.notify_one();
        }
    }

    /// The same of a target that has an engine of its own.
    pub fn target_turned(&self, target: &Path, turn: &Turn) {
        self.count(turn);
        if let Some(user) = lock(&self.published).get(target).cloned() {
            self.tell_turn(user, turn);
        }
    }

    fn count(&self, turn: &Turn) {
        match turn {
            Turn::Resumed { stall, .. } => self.metrics.engine_resumed(*stall),
            Turn::Died { .. } => self.metrics.engine_died(),
            // Nothing was wrong.
            Turn::Replaced { .. } => {}
        }
    }

    fn tell_turn(&self, Published { workload, bucket, .. }: Published, turn: &Turn) {
        if let Some(workload) = workload {
            self.send(&workload, Telling { kind: turn.kind(), reason: turn.reason(), text: turn.text(&bucket) });
        }
    }

    /// Something happened to a target that has an engine of its own.
    pub fn tell(&self, target: &Path, kind: Kind, reason: &'static str, text: &str) {
        let known = lock(&self.published).get(target).cloned();
        let Some(Published { workload: Some(workload), bucket, .. }) = known else { return };
        self.send(&workload, Telling { kind, reason, text: format!("bucket {bucket:?}: {text}") });
    }

    /// What last happened to a source, if it is still mounted.
    pub fn last_turn(&self, source: &str) -> Option<Turn> {
        lock(&self.turns).get(source).cloned()
    }

    /// The source is not mounted any more.
    pub fn forget(&self, source: &str) {
        lock(&self.turns).remove(source);
    }

    /// Completes when there may be something new to write down.
    pub async fn something_turned(&self) {
        self.turned.notified().await;
    }

    /// The longest time since kubelet brought the keys of a volume.
    pub fn measure(&self) {
        let oldest = lock(&self.published).values().map(|it| it.refreshed).min();
        self.metrics.credentials_aged(oldest.map_or(Duration::ZERO, |it| it.elapsed()));
    }

    fn send(&self, listener: &Listener, telling: Telling) {
        let Some(letters) = &self.letters else { return };
        if letters.try_send(Letter { listener: listener.clone(), telling }).is_err() {
            self.metrics.event(EventOutcome::Dropped);
        }
    }
}

impl Turn {
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Resumed { .. } => "EngineResumed",
            Self::Replaced { .. } => "EngineReplaced",
            Self::Died { .. } => "EngineDied",
        }
    }

    const fn kind(&self) -> Kind {
        match self {
            Self::Replaced { .. } => Kind::Normal,
            Self::Resumed { .. } | Self::Died { .. } => Kind::Warning,
        }
    }

    fn text(&self, bucket: &str) -> String {
        match self {
            Self::Resumed { cause, stall } => format!(
                "the engine of bucket {bucket:?} died ({cause}); another one has taken its place after {} ms, and open files live on",
                stall.as_millis()
            ),
            Self::Replaced { reason, stall } => format!(
                "the engine of bucket {bucket:?} was replaced {reason}; applications waited {} ms, and open files live on",
                stall.as_millis()
            ),
            Self::Died { words } => format!(
                "the engine of bucket {bucket:?} died and was not replaced: {words}; kubelet's next call mounts the volume anew"
            ),
        }
    }
}

/// Writes Events, one after the other, until the teller is gone.
async fn deliver(client: Client, speaker: Speaker, metrics: Arc<NodeMetrics>, mut waiting: mpsc::Receiver<Letter>) {
    let mut told: HashMap<(Listener, &'static str), Instant> = HashMap::new();
    while let Some(Letter { listener, telling }) = waiting.recv().await {
        told.retain(|_, at| at.elapsed() < TOLD_EVERY);
        if told.contains_key(&(listener.clone(), telling.reason)) {
            metrics.event(EventOutcome::Dropped);
            continue;
        }
        told.insert((listener.clone(), telling.reason), Instant::now());
        let events: Api<Event> = Api::namespaced(client.clone(), &listener.namespace);
        match call(events.create(&PostParams::default(), &event(&speaker, &listener, &telling))).await {
            Ok(_) => metrics.event(EventOutcome::Written),
            Err(error) => {
                metrics.event(EventOutcome::Failed);
                let Listener { namespace, name, .. } = &listener;
                tracing::warn!(namespace, pod = name, reason = telling.reason, error = %Chain(&error), "Event not written");
            }
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Maps are changed by single calls, so a panic elsewhere cannot have left one half changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
