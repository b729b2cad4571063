//! The controller's liveness and readiness, for kubelet's probes, and its gauges.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;

use super::cache::{ClusterCounts, ReconcileKey};
use super::queue::Queue;
use crate::api::watch::Heartbeat;
use crate::health::Question;
use crate::metrics::ControllerMetrics;

/// A watch gets an answer at least once a minute; after a longer silence the cache is out of date.
const LONGEST_SILENCE: Duration = Duration::from_secs(100);

/// Nothing takes this long by design: a task that does is stuck, and a restart helps.
const LONGEST_STALL: Duration = Duration::from_mins(5);

pub struct Health {
    metrics: Arc<ControllerMetrics>,
    /// Set while leading.
    counts: Mutex<Option<CountFunction>>,
    pub(super) election: Heartbeat,
    pub(super) attachments: Heartbeat,
    pub(super) claims: Heartbeat,
    pub(super) pods: Heartbeat,
    pub(super) volumes: Heartbeat,
    pub(super) workloads: Heartbeat,
    pub(super) nodes: Heartbeat,
    /// Nodes are watched only if they get warm Pods.
    watches_nodes: AtomicBool,
    leader_state: Mutex<LeaderState>,
}

type CountFunction = Arc<dyn Fn() -> ClusterCounts + Send + Sync>;

enum LeaderState {
    Standby,
    Leading(Arc<Queue<ReconcileKey>>),
}

impl Default for Health {
    fn default() -> Self {
        Self::new(Arc::default())
    }
}

impl Health {
    pub fn new(metrics: Arc<ControllerMetrics>) -> Self {
        Self {
            metrics,
            counts: Mutex::default(),
            election: Heartbeat::new("the election"),
            attachments: Heartbeat::new("attachments"),
            claims: Heartbeat::new("PersistentVolumeClaims"),
            pods: Heartbeat::new("Mountpoint Pods"),
            volumes: Heartbeat::new("PersistentVolumes"),
            workloads: Heartbeat::new("workloads"),
            nodes: Heartbeat::new("CSINodes"),
            watches_nodes: AtomicBool::new(false),
            leader_state: Mutex::new(LeaderState::Standby),
        }
    }

    pub fn metrics(&self) -> &ControllerMetrics {
        &self.metrics
    }

    /// Updates the gauges before they are scraped.
    pub fn measure(&self, now: Instant) {
        let metrics = &self.metrics;
        let queue = match &*self.leader_state() {
            LeaderState::Standby => {
                metrics.leads(false);
                metrics.forget_the_cluster();
                return;
            }
            LeaderState::Leading(queue) => queue.clone(),
        };
        metrics.leads(true);
        metrics.queued(queue.depth(now));
        for heartbeat in self.watches() {
            metrics.watched(heartbeat.name(), heartbeat.since_answer(now), heartbeat.has_listed());
        }
        // Counts are wrong until everything is listed.
        let has_listed = self.watches().into_iter().all(Heartbeat::has_listed);
        let counts = self.counts.lock().clone();
        if let Some(count) = counts.filter(|_| has_listed) {
            let ClusterCounts { ready, waiting, workloads, pods } = count();
            metrics.attached(ready, waiting, workloads);
            metrics.counted_pods(&pods);
        }
    }

    /// An error says what is wrong.
    pub fn check(&self, question: Question, now: Instant) -> Result<(), String> {
        match (question, &*self.leader_state()) {
            (Question::Alive, LeaderState::Standby) => check_activity(&self.election, now),
            (Question::Alive, LeaderState::Leading(queue)) => {
                self.watches().into_iter().try_for_each(|it| check_activity(it, now))?;
                match queue.longest_running_since() {
                    Some(since) if LONGEST_STALL < now.saturating_duration_since(since) => {
                        let seconds = now.saturating_duration_since(since).as_secs();
                        Err(format!("a worker has been reconciling one volume for {seconds} s"))
                    }
                    Some(_) | None => Ok(()),
                }
            }
            (Question::Ready, LeaderState::Standby) => check_answers(&self.election, now),
            (Question::Ready, LeaderState::Leading(_)) => self.watches().into_iter().try_for_each(|it| {
                if it.has_listed() { check_answers(it, now) } else { Err(format!("{} are not listed yet", it.name())) }
            }),
        }
    }

    pub(super) fn count_with(&self, count: impl Fn() -> ClusterCounts + Send + Sync + 'static) {
        *self.counts.lock() = Some(Arc::new(count));
    }

    /// To be called before it leads.
    pub(super) fn expect_nodes(&self, are_watched: bool) {
        self.watches_nodes.store(are_watched, Ordering::Relaxed);
    }

    pub(super) fn start_leading(&self, queue: &Arc<Queue<ReconcileKey>>) {
        for heartbeat in self.watches() {
            heartbeat.reset();
        }
        *self.leader_state() = LeaderState::Leading(queue.clone());
    }

    pub(super) fn stop_leading(&self) {
        *self.leader_state() = LeaderState::Standby;
        *self.counts.lock() = None;
    }

    pub(super) async fn wait_until_listed(&self) {
        for heartbeat in self.watches() {
            heartbeat.wait_until_listed().await;
        }
    }

    fn watches(&self) -> Vec<&Heartbeat> {
        let Self { attachments, claims, pods, volumes, workloads, nodes, .. } = self;
        let nodes = Some(nodes).filter(|_| self.watches_nodes.load(Ordering::Relaxed));
        [attachments, claims, pods, volumes, workloads].into_iter().chain(nodes).collect()
    }

    fn leader_state(&self) -> MutexGuard<'_, LeaderState> {
        self.leader_state.lock()
    }
}

fn check_activity(heartbeat: &Heartbeat, now: Instant) -> Result<(), String> {
    let stuck = heartbeat.since_activity(now);
    if stuck <= LONGEST_STALL {
        return Ok(());
    }
    Err(format!("stuck: no request about {} for {} s", heartbeat.name(), stuck.as_secs()))
}

fn check_answers(heartbeat: &Heartbeat, now: Instant) -> Result<(), String> {
    match heartbeat.since_answer(now) {
        Some(ago) if ago <= LONGEST_SILENCE => Ok(()),
        Some(ago) => Err(format!("no answer of the API server about {} for {} s", heartbeat.name(), ago.as_secs())),
        None => Err(format!("no answer of the API server about {} yet", heartbeat.name())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::queue::Priority;

    #[track_caller]
    fn check(health: &Health, question: Question, now: Instant, expected: Result<(), &str>) {
        assert_eq!(health.check(question, now), expected.map_err(str::to_owned));
    }

    #[test]
    fn a_standby_is_ready_while_it_sees_the_lease() {
        let health = Health::default();
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        check(&health, Question::Alive, start, Ok(()));
        check(&health, Question::Ready, start, Err("no answer of the API server about the election yet"));
        health.election.beat(start);
        check(&health, Question::Ready, start, Ok(()));
        check(&health, Question::Ready, at(101), Err("no answer of the API server about the election for 101 s"));
        check(&health, Question::Alive, at(101), Ok(()));
        check(&health, Question::Alive, at(301), Err("stuck: no request about the election for 301 s"));
    }

    #[test]
    fn a_watch_that_is_stuck_is_noticed() {
        let health = Health::default();
        health.start_leading(&Arc::new(Queue::default()));
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        check(&health, Question::Alive, start, Ok(()));
        check(&health, Question::Ready, start, Err("attachments are not listed yet"));
        for heartbeat in health.watches() {
            heartbeat.beat(start);
            heartbeat.set_listed();
        }
        check(&health, Question::Ready, start, Ok(()));
        for heartbeat in [&health.attachments, &health.claims, &health.pods, &health.volumes] {
            heartbeat.beat(at(301));
        }
        check(&health, Question::Ready, at(101), Err("no answer of the API server about workloads for 101 s"));
        check(&health, Question::Alive, at(101), Ok(()));
        check(&health, Question::Alive, at(301), Err("stuck: no request about workloads for 301 s"));
    }

    #[tokio::test]
    async fn a_worker_that_is_stuck_is_noticed() {
        let health = Health::default();
        let queue = Arc::new(Queue::default());
        health.start_leading(&queue);
        let key = ReconcileKey { node: "node".to_owned(), persistent_volume: "pv".parse().unwrap() };
        queue.add(key, Duration::ZERO, Priority::Normal);
        queue.next().await;
        let later = queue.longest_running_since().unwrap() + Duration::from_secs(301);
        for heartbeat in health.watches() {
            heartbeat.beat(later);
        }
        check(&health, Question::Alive, later, Err("a worker has been reconciling one volume for 301 s"));
    }
}
