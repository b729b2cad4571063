//! The work queue. Each key is in it at most once and is never processed by two workers at a time.
//!
//! kube's `scheduler` has no back-off per key, no depth or age for metrics and does not tell how long a key has been running.

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::metrics::QueueDepth;

/// The first retry; each further one waits twice as long.
const FIRST_RETRY: Duration = Duration::from_millis(250);

/// The longest wait between two retries.
const LONGEST_RETRY: Duration = Duration::from_secs(30);

/// While keys of normal priority are due, one of low priority is treated as if it had become due this much later.
const LOW_PRIORITY_DELAY: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub struct Queue<Key> {
    state: Mutex<State<Key>>,
    changed: Notify,
}

/// Which of the keys that are due is processed first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Priority {
    /// Nothing waits for it: reports, and the periodic reconciliation of everything.
    Low,
    Normal,
}

#[derive(Debug)]
struct State<Key> {
    normal: BTreeSet<(Instant, Key)>,
    low: BTreeSet<(Instant, Key)>,
    waiting: HashMap<Key, Requeue>,
    running: HashMap<Key, Instant>,
    /// Added again while they ran.
    again: HashMap<Key, Requeue>,
    failures: HashMap<Key, u32>,
}

/// When a key is due, and how urgent it is then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Requeue {
    at: Instant,
    priority: Priority,
}

impl Requeue {
    fn merge(self, other: Self) -> Self {
        Self { at: self.at.min(other.at), priority: self.priority.max(other.priority) }
    }
}

impl<Key> Default for Queue<Key> {
    fn default() -> Self {
        Self {
            state: Mutex::new(State {
                normal: BTreeSet::new(),
                low: BTreeSet::new(),
                waiting: HashMap::new(),
                running: HashMap::new(),
                again: HashMap::new(),
                failures: HashMap::new(),
            }),
            changed: Notify::new(),
        }
    }
}

impl<Key: Clone + Eq + Ord + std::hash::Hash> Queue<Key> {
    /// Adds a key that is due after the delay. The earliest time and the highest priority apply.
    pub fn add(&self, key: Key, delay: Duration, priority: Priority) {
        self.lock().add(key, Requeue { at: Instant::now() + delay, priority });
        self.changed.notify_one();
    }

    /// Waits for the next key that is due. The worker calls `done` or `failed` for it.
    pub async fn next(&self) -> Key {
        loop {
            let wait = match self.lock().take(Instant::now()) {
                Ok(key) => {
                    // There may be more for the other workers.
                    self.changed.notify_one();
                    return key;
                }
                Err(wait) => wait,
            };
            let changed = self.changed.notified();
            match wait {
                Some(until) => {
                    let _ = tokio::time::timeout_at(until, changed).await;
                }
                None => changed.await,
            }
        }
    }

    /// The key was processed.
    pub fn done(&self, key: &Key, requeue_after: Option<(Duration, Priority)>) {
        let mut state = self.lock();
        state.failures.remove(key);
        state.finish(key, requeue_after.map(|(delay, priority)| Requeue { at: Instant::now() + delay, priority }));
        drop(state);
        self.changed.notify_one();
    }

    /// The key is retried, with exponential back-off and jitter.
    pub fn failed(&self, key: &Key) -> Duration {
        let mut state = self.lock();
        let failures = state.failures.entry(key.clone()).or_default();
        *failures = failures.saturating_add(1);
        let pause = pause(*failures, random());
        state.finish(key, Some(Requeue { at: Instant::now() + pause, priority: Priority::Normal }));
        drop(state);
        self.changed.notify_one();
        pause
    }

    /// When the key that has been running longest was taken.
    pub fn longest_running_since(&self) -> Option<Instant> {
        self.lock().running.values().min().copied()
    }

    pub fn depth(&self, now: Instant) -> QueueDepth {
        let state = self.lock();
        let due = |keys: &BTreeSet<(Instant, Key)>| keys.iter().take_while(|(at, _)| *at <= now).count();
        let due = due(&state.normal) + due(&state.low);
        QueueDepth {
            due,
            later: state.waiting.len() - due,
            running: state.running.len(),
            age: state.earliest().map_or(Duration::ZERO, |at| now.saturating_duration_since(at)),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<Key>> {
        self.state.lock()
    }
}

impl<Key: Clone + Eq + Ord + std::hash::Hash> State<Key> {
    fn add(&mut self, key: Key, requeue: Requeue) {
        if self.running.contains_key(&key) {
            let again = self.again.entry(key).or_insert(requeue);
            *again = again.merge(requeue);
            return;
        }
        let mut merged = requeue;
        if let Some(known) = self.waiting.get(&key).copied() {
            merged = merged.merge(known);
            if merged == known {
                return;
            }
            self.of(known.priority).remove(&(known.at, key.clone()));
        }
        self.waiting.insert(key.clone(), merged);
        self.of(merged.priority).insert((merged.at, key));
    }

    fn of(&mut self, priority: Priority) -> &mut BTreeSet<(Instant, Key)> {
        match priority {
            Priority::Normal => &mut self.normal,
            Priority::Low => &mut self.low,
        }
    }

    /// When the first key is due.
    fn earliest(&self) -> Option<Instant> {
        [self.normal.first(), self.low.first()].into_iter().flatten().map(|(at, _)| *at).min()
    }

    /// A key that is due, or when the next one will be.
    fn take(&mut self, now: Instant) -> Result<Key, Option<Instant>> {
        let due = |keys: &BTreeSet<(Instant, Key)>| keys.first().map(|(at, _)| *at).filter(|at| *at <= now);
        let priority = match (due(&self.normal), due(&self.low)) {
            (Some(normal), Some(low)) if low + LOW_PRIORITY_DELAY < normal => Priority::Low,
            (Some(_), _) => Priority::Normal,
            (None, Some(_)) => Priority::Low,
            (None, None) => return Err(self.earliest()),
        };
        let Some((_, key)) = self.of(priority).pop_first() else {
            return Err(None);
        };
        self.waiting.remove(&key);
        self.running.insert(key.clone(), now);
        Ok(key)
    }

    fn finish(&mut self, key: &Key, requeue: Option<Requeue>) {
        self.running.remove(key);
        let again = self.again.remove(key);
        if let Some(requeue) = [requeue, again].into_iter().flatten().reduce(Requeue::merge) {
            self.add(key.clone(), requeue);
        }
    }
}

/// Doubles with every failure; between half and all of it, by chance.
fn pause(failures: u32, random: u64) -> Duration {
    let doubled = FIRST_RETRY.saturating_mul(1_u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX));
    let longest = doubled.min(LONGEST_RETRY);
    let thousandths = u32::try_from(random % 1000).unwrap_or_default();
    longest / 2 + (longest / 2) * thousandths / 1000
}

/// Different for each call; the standard library's hashers are seeded by the system.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::ZERO;

    /// What is due right now, in order.
    fn due(queue: &Queue<&'static str>) -> Vec<&'static str> {
        std::iter::from_fn(|| queue.lock().take(Instant::now()).ok()).collect()
    }

    #[test]
    fn each_key_waits_once() {
        let queue = Queue::default();
        for key in ["b", "a", "b"] {
            queue.add(key, NOW, Priority::Normal);
        }
        assert_eq!(due(&queue), ["b", "a"]);
        assert_eq!(due(&queue), [""; 0]);
    }

    #[test]
    fn the_earliest_time_applies() {
        let queue = Queue::default();
        queue.add("a", Duration::from_mins(1), Priority::Normal);
        assert_eq!(due(&queue), [""; 0]);
        queue.add("a", NOW, Priority::Normal);
        queue.add("a", Duration::from_mins(1), Priority::Normal);
        assert_eq!(due(&queue), ["a"]);
    }

    #[test]
    fn keys_of_low_priority_wait_for_the_others_but_not_for_ever() {
        let (queue, start) = (Queue::default(), Instant::now());
        for (key, priority) in [("low", Priority::Low), ("raised", Priority::Low), ("normal", Priority::Normal)] {
            queue.add(key, NOW, priority);
        }
        queue.add("raised", Duration::from_mins(1), Priority::Normal);
        queue.add("normal", NOW, Priority::Low);
        assert_eq!(due(&queue), ["raised", "normal", "low"]);

        let at = |seconds| start + Duration::from_secs(seconds);
        let take = |at| queue.lock().take(at);
        queue.lock().add("old", Requeue { at: at(0), priority: Priority::Low });
        queue.lock().add("young", Requeue { at: at(LOW_PRIORITY_DELAY.as_secs() + 1), priority: Priority::Normal });
        assert_eq!(take(at(100)), Ok("old"));
        assert_eq!(take(at(0)), Err(Some(at(LOW_PRIORITY_DELAY.as_secs() + 1))));
        assert_eq!(take(at(100)), Ok("young"));
    }

    #[test]
    fn a_key_that_runs_is_not_taken_again_until_it_is_done() {
        let queue = Queue::default();
        queue.add("a", NOW, Priority::Normal);
        assert_eq!(due(&queue), ["a"]);
        assert!(queue.longest_running_since().is_some());
        queue.add("b", Duration::from_mins(1), Priority::Normal);
        let depth = queue.depth(Instant::now());
        assert_eq!(depth, QueueDepth { due: 0, later: 1, running: 1, age: Duration::ZERO });
        queue.add("a", NOW, Priority::Normal);
        assert_eq!(due(&queue), [""; 0]);
        queue.done(&"a", None);
        assert_eq!(due(&queue), ["a"]);
        queue.done(&"a", None);
        assert_eq!(due(&queue), [""; 0]);
        assert_eq!(queue.longest_running_since(), None);
    }

    #[test]
    fn a_failed_key_is_retried_after_its_pause() {
        let queue = Queue::default();
        queue.add("a", NOW, Priority::Normal);
        assert_eq!(due(&queue), ["a"]);
        let before = Instant::now();
        let pause = queue.failed(&"a");
        assert!(FIRST_RETRY / 2 <= pause && pause <= FIRST_RETRY, "{pause:?}");
        assert_eq!(queue.depth(before).later, 1);
        assert_eq!(queue.lock().take(before + FIRST_RETRY * 100), Ok("a"));
    }

    #[test]
    fn the_key_that_has_been_running_longest_counts() {
        let (queue, start) = (Queue::default(), Instant::now());
        for (key, seconds) in [("a", 10), ("b", 20)] {
            queue.add(key, NOW, Priority::Normal);
            assert_eq!(queue.lock().take(start + Duration::from_secs(seconds)), Ok(key));
        }
        assert_eq!(queue.longest_running_since(), Some(start + Duration::from_secs(10)));
    }

    #[test]
    fn pauses_grow_to_thirty_seconds_and_differ() {
        assert_eq!(pause(1, 0), Duration::from_millis(125));
        assert_eq!(pause(1, 500), Duration::from_micros(187_500));
        assert_eq!(pause(3, 0), Duration::from_millis(500));
        assert_eq!(pause(100, 0), Duration::from_secs(15));
        assert!(pause(100, 999) <= LONGEST_RETRY);
    }

    #[tokio::test]
    async fn a_waiting_worker_is_woken() {
        let queue = std::sync::Arc::new(Queue::default());
        let waiting = {
            let queue = queue.clone();
            tokio::spawn(async move { queue.next().await })
        };
        tokio::task::yield_now().await;
        queue.add("a", Duration::from_millis(5), Priority::Normal);
        assert_eq!(waiting.await.unwrap(), "a");
    }

    #[tokio::test]
    async fn a_waiting_worker_is_woken_when_a_key_that_was_added_meanwhile_is_done() {
        let queue = std::sync::Arc::new(Queue::default());
        queue.add("a", NOW, Priority::Normal);
        assert_eq!(queue.next().await, "a");
        queue.add("a", NOW, Priority::Normal);
        let waiting = {
            let queue = queue.clone();
            tokio::spawn(async move { queue.next().await })
        };
        // It finds nothing that is due, however often it was woken before.
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
        queue.done(&"a", None);
        assert_eq!(tokio::time::timeout(Duration::from_secs(30), waiting).await.unwrap().unwrap(), "a");
    }
}
