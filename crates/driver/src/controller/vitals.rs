//! Whether the controller is alive and does its work, for kubelet's probes.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::cache::{Tally, Unit};
use super::queue::Queue;
use super::watch::Pulse;
use crate::health::Question;
use crate::metrics::ControllerMetrics;

/// A watch hears something at least once a minute; what is silent for longer does not know the cluster any more.
const LONGEST_SILENCE: Duration = Duration::from_secs(100);

/// Nothing waits this long on purpose: whatever does is stuck, and a restart will help.
const LONGEST_STALL: Duration = Duration::from_mins(5);

pub struct Vitals {
    metrics: Arc<ControllerMetrics>,
    /// Whoever works knows how many of what there are.
    tally: Mutex<Option<Count>>,
    pub(super) election: Pulse,
    pub(super) attachments: Pulse,
    pub(super) claims: Pulse,
    pub(super) pods: Pulse,
    pub(super) volumes: Pulse,
    pub(super) workloads: Pulse,
    duty: Mutex<Duty>,
}

type Count = Arc<dyn Fn() -> Tally + Send + Sync>;

enum Duty {
    /// Waits to be elected.
    StandsBy,
    Works(Arc<Queue<Unit>>),
}

impl Default for Vitals {
    fn default() -> Self {
        Self::new(Arc::default())
    }
}

impl Vitals {
    pub fn new(metrics: Arc<ControllerMetrics>) -> Self {
        Self {
            metrics,
            tally: Mutex::default(),
            election: Pulse::new("the election"),
            attachments: Pulse::new("attachments"),
            claims: Pulse::new("PersistentVolumeClaims"),
            pods: Pulse::new("Mountpoint Pods"),
            volumes: Pulse::new("PersistentVolumes"),
            workloads: Pulse::new("workloads"),
            duty: Mutex::new(Duty::StandsBy),
        }
    }

    pub fn metrics(&self) -> &ControllerMetrics {
        &self.metrics
    }

    /// Writes down what is asked for when somebody looks.
    pub fn measure(&self, now: Instant) {
        let metrics = &self.metrics;
        let queue = match &*self.duty() {
            Duty::StandsBy => {
                metrics.leads(false);
                metrics.forget_the_cluster();
                return;
            }
            Duty::Works(queue) => queue.clone(),
        };
        metrics.leads(true);
        metrics.queued(queue.depth(now));
        for pulse in self.watches() {
            metrics.watched(pulse.name(), pulse.heard_ago(now), pulse.has_listed());
        }
        // Before everything is listed, counts would be lies.
        let has_listed = self.watches().into_iter().all(Pulse::has_listed);
        let tally = self.tally.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(count) = tally.filter(|_| has_listed) {
            let Tally { ready, waiting, workloads, pods } = count();
            metrics.attached(ready, waiting, workloads);
            metrics.counted_pods(&pods);
        }
    }

    /// Nothing, or what is wrong.
    pub fn check(&self, question: Question, now: Instant) -> Result<(), String> {
        match (question, &*self.duty()) {
            (Question::Alive, Duty::StandsBy) => is_moving(&self.election, now),
            (Question::Alive, Duty::Works(queue)) => {
                self.watches().into_iter().try_for_each(|it| is_moving(it, now))?;
                match queue.longest_running_since() {
                    Some(since) if LONGEST_STALL < now.saturating_duration_since(since) => {
                        let seconds = now.saturating_duration_since(since).as_secs();
                        Err(format!("a worker has been busy with one volume for {seconds} s"))
                    }
                    Some(_) | None => Ok(()),
                }
            }
            (Question::Ready, Duty::StandsBy) => is_heard(&self.election, now),
            (Question::Ready, Duty::Works(_)) => self.watches().into_iter().try_for_each(|it| {
                if it.has_listed() { is_heard(it, now) } else { Err(format!("{} are not known yet", it.name())) }
            }),
        }
    }

    pub(super) fn count_with(&self, count: impl Fn() -> Tally + Send + Sync + 'static) {
        *self.tally.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(count));
    }

    pub(super) fn begin(&self, queue: &Arc<Queue<Unit>>) {
        for pulse in self.watches() {
            pulse.reset();
        }
        *self.duty() = Duty::Works(queue.clone());
    }

    pub(super) fn rest(&self) {
        *self.duty() = Duty::StandsBy;
        *self.tally.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    pub(super) async fn wait_until_listed(&self) {
        for pulse in self.watches() {
            pulse.wait_until_listed().await;
        }
    }

    fn watches(&self) -> [&Pulse; 5] {
        let Self { election: _, attachments, claims, pods, volumes, workloads, duty: _, metrics: _, tally: _ } = self;
        [attachments, claims, pods, volumes, workloads]
    }

    fn duty(&self) -> MutexGuard<'_, Duty> {
        self.duty.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_moving(pulse: &Pulse, now: Instant) -> Result<(), String> {
    let stuck = pulse.stuck_for(now);
    if stuck <= LONGEST_STALL {
        return Ok(());
    }
    Err(format!("stuck: nothing was asked about {} for {} s", pulse.name(), stuck.as_secs()))
}

fn is_heard(pulse: &Pulse, now: Instant) -> Result<(), String> {
    match pulse.heard_ago(now) {
        Some(ago) if ago <= LONGEST_SILENCE => Ok(()),
        Some(ago) => Err(format!("the API server has said nothing about {} for {} s", pulse.name(), ago.as_secs())),
        None => Err(format!("the API server has said nothing about {} yet", pulse.name())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(vitals: &Vitals, question: Question, now: Instant, expected: Result<(), &str>) {
        assert_eq!(vitals.check(question, now), expected.map_err(str::to_owned));
    }

    #[test]
    fn whoever_stands_by_is_ready_while_it_sees_the_lease() {
        let vitals = Vitals::default();
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        check(&vitals, Question::Alive, start, Ok(()));
        check(&vitals, Question::Ready, start, Err("the API server has said nothing about the election yet"));
        vitals.election.beat(start);
        check(&vitals, Question::Ready, start, Ok(()));
        check(&vitals, Question::Ready, at(101), Err("the API server has said nothing about the election for 101 s"));
        check(&vitals, Question::Alive, at(101), Ok(()));
        check(&vitals, Question::Alive, at(301), Err("stuck: nothing was asked about the election for 301 s"));
    }

    #[test]
    fn a_watch_that_is_stuck_is_noticed() {
        let vitals = Vitals::default();
        vitals.begin(&Arc::new(Queue::default()));
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        check(&vitals, Question::Alive, start, Ok(()));
        check(&vitals, Question::Ready, start, Err("attachments are not known yet"));
        for pulse in vitals.watches() {
            pulse.beat(start);
            pulse.listed();
        }
        check(&vitals, Question::Ready, start, Ok(()));
        for pulse in [&vitals.attachments, &vitals.claims, &vitals.pods, &vitals.volumes] {
            pulse.beat(at(301));
        }
        check(&vitals, Question::Ready, at(101), Err("the API server has said nothing about workloads for 101 s"));
        check(&vitals, Question::Alive, at(101), Ok(()));
        check(&vitals, Question::Alive, at(301), Err("stuck: nothing was asked about workloads for 301 s"));
    }

    #[tokio::test]
    async fn a_worker_that_is_stuck_is_noticed() {
        let vitals = Vitals::default();
        let queue = Arc::new(Queue::default());
        vitals.begin(&queue);
        let unit = Unit { node: "node".to_owned(), persistent_volume: "pv".parse().unwrap() };
        queue.add(unit, Duration::ZERO);
        queue.next().await;
        let later = queue.longest_running_since().unwrap() + Duration::from_secs(301);
        for pulse in vitals.watches() {
            pulse.beat(later);
        }
        check(&vitals, Question::Alive, later, Err("a worker has been busy with one volume for 301 s"));
    }
}
