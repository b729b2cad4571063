//! Events on Pods, for node and controller: recording never waits and never fails a call. A bounded queue, one task that writes.
//!
//! kube's own `Recorder` is not used: it folds all Events of one Pod and reason into a series that keeps the first note, so the second
//! volume of a Pod would never be named, and it needs the right to patch Events in every namespace.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, Client};
use parking_lot::{Mutex, MutexGuard};
use s3csi_core::Chain;
use s3csi_core::text::shortened;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::call::call;
use crate::metrics::EventOutcome;

/// The API server rejects longer notes.
const MAX_NOTE_BYTES: usize = 1024;

/// The API server rejects longer names of a reporting instance; names of nodes may be longer.
const MAX_INSTANCE_CHARACTERS: usize = 128;

/// An occurrence that repeats is recorded once in this time.
const OCCURRENCE_INTERVAL: Duration = Duration::from_mins(1);

/// A condition whose note keeps changing is recorded this often at once, and then once in [`CONDITION_REFILL`].
const CONDITION_BURST: u32 = 10;
const CONDITION_REFILL: Duration = Duration::from_mins(1);

/// Observers look at everything every two minutes. A condition that was not reported for longer has ended; the next one is new.
const CONDITION_ENDS: Duration = Duration::from_mins(5);

/// The API server keeps Events for an hour by default: a condition that still holds then is recorded again.
const EVENT_TTL: Duration = Duration::from_hours(1);

/// Records Events on Pods.
pub struct EventRecorder {
    /// `None` without an API server.
    queue: Option<mpsc::Sender<QueuedEvent>>,
    recorded: Arc<Recorded>,
    on_outcome: Arc<OnOutcome>,
}

type OnOutcome = dyn Fn(EventOutcome) + Send + Sync;

/// One Event to record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventDetails {
    pub severity: EventType,
    pub reason: &'static str,
    /// What of the Pod the Event is about: its volume, or the volume and one of its mount options. Events of one Pod with the same
    /// reason and subject repeat each other; those with different subjects never do.
    pub subject: String,
    pub note: String,
}

/// `type` of an Event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventType {
    Normal,
    Warning,
}

/// The Pod that an Event is about.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodReference {
    pub namespace: String,
    pub name: String,
    pub uid: String,
}

/// The component that records.
#[derive(Clone, Debug)]
pub struct ReportingController {
    /// `<driver>/controller` or `<driver>/node`.
    pub name: String,
    /// Which replica, or which node.
    pub instance: String,
    pub limits: EventLimits,
}

/// How much one component may record.
#[derive(Clone, Copy, Debug)]
pub struct EventLimits {
    /// Events that wait to be written; more are dropped.
    pub queue: usize,
    /// Between two Events.
    pub pause: Duration,
}

impl EventLimits {
    /// A crowded node whose Pods start all at once; and an API server that many nodes write to.
    pub const NODE: Self = Self { queue: 256, pause: Duration::from_millis(100) };

    /// One for the whole cluster: a thousand Pods that are created at once get their Events within ten seconds.
    pub const CONTROLLER: Self = Self { queue: 4096, pause: Duration::from_millis(10) };
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Repetition {
    Occurrence,
    Condition,
}

struct QueuedEvent {
    regarding: PodReference,
    details: EventDetails,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct EventKey {
    pod_uid: String,
    reason: &'static str,
    subject: String,
}

#[derive(Default)]
struct Recorded(Mutex<Records>);

#[derive(Default)]
struct Records {
    by_key: HashMap<EventKey, LastRecord>,
    /// When those that have expired were last removed.
    cleaned: Option<Instant>,
}

struct LastRecord {
    /// A hash of the note: there may be one record for each Pod of a cluster.
    note: u64,
    recorded: Instant,
    /// When it was last reported, recorded or not.
    reported: Instant,
    /// How many changes of the note may still be recorded at once.
    changes_left: u32,
}

impl EventRecorder {
    /// Records nothing.
    pub fn disabled() -> Self {
        Self { queue: None, recorded: Arc::default(), on_outcome: Arc::new(|_| {}) }
    }

    /// The second part writes the Events; it must be run, and ends when the recorder is dropped.
    pub fn new(
        client: Client,
        reporter: ReportingController,
        on_outcome: impl Fn(EventOutcome) + Send + Sync + 'static,
    ) -> (Self, impl Future<Output = ()> + Send) {
        let (queue, waiting) = mpsc::channel(reporter.limits.queue);
        let recorder = Self { queue: Some(queue), recorded: Arc::default(), on_outcome: Arc::new(on_outcome) };
        let writer = write_events(client, reporter, recorder.recorded.clone(), recorder.on_outcome.clone(), waiting);
        (recorder, writer)
    }

    /// Something happened. If it happens again, that is recorded once a minute at most.
    pub fn record(&self, regarding: &PodReference, details: EventDetails) {
        self.enqueue(regarding, details, Repetition::Occurrence);
    }

    /// Something is the case. Level-triggered: may be called at every look, and is recorded when the note changes.
    pub fn record_condition(&self, regarding: &PodReference, details: EventDetails) {
        self.enqueue(regarding, details, Repetition::Condition);
    }

    /// Forgets what was recorded for Pods that are gone.
    pub fn forget_pods(&self, is_gone: impl Fn(&str) -> bool) {
        self.recorded.lock().by_key.retain(|key, _| !is_gone(&key.pod_uid));
    }

    fn enqueue(&self, regarding: &PodReference, details: EventDetails, repetition: Repetition) {
        let Some(queue) = &self.queue else { return };
        if !self.recorded.admit(regarding, &details, repetition, Instant::now()) {
            // A condition that still holds is no Event that was lost.
            if repetition == Repetition::Occurrence {
                (self.on_outcome)(EventOutcome::Dropped);
            }
            return;
        }
        let regarding = regarding.clone();
        if let Err(error) = queue.try_send(QueuedEvent { regarding, details }) {
            let (mpsc::error::TrySendError::Full(QueuedEvent { regarding, details })
            | mpsc::error::TrySendError::Closed(QueuedEvent { regarding, details })) = error;
            self.recorded.forget(&regarding, &details);
            (self.on_outcome)(EventOutcome::Dropped);
        }
    }
}

impl Recorded {
    /// Whether this Event says something new; then it counts as recorded.
    fn admit(&self, regarding: &PodReference, details: &EventDetails, repetition: Repetition, now: Instant) -> bool {
        let mut recorded = self.lock();
        recorded.remove_expired(now);
        let key = EventKey::new(regarding, details);
        let note = hash(&details.note);
        let mut changes_left = CONDITION_BURST;
        if let Some(last) = recorded.by_key.get_mut(&key).filter(|it| !it.has_expired(now)) {
            let is_new = match repetition {
                Repetition::Occurrence => OCCURRENCE_INTERVAL <= now.saturating_duration_since(last.recorded),
                Repetition::Condition => {
                    changes_left = last.changes_left(now);
                    let has_ended = CONDITION_ENDS <= now.saturating_duration_since(last.reported);
                    (has_ended || last.note != note) && 0 < changes_left
                }
            };
            last.reported = now;
            if !is_new {
                return false;
            }
        }
        changes_left = changes_left.saturating_sub(1);
        recorded.by_key.insert(key, LastRecord { note, recorded: now, reported: now, changes_left });
        true
    }

    /// It was not written after all: the next one like it is.
    fn forget(&self, regarding: &PodReference, details: &EventDetails) {
        self.lock().by_key.remove(&EventKey::new(regarding, details));
    }

    /// Entries are changed by single calls, so a panic elsewhere cannot have left the map half changed.
    fn lock(&self) -> MutexGuard<'_, Records> {
        self.0.lock()
    }
}

impl Records {
    /// Looks at all of them, therefore not for every Event.
    fn remove_expired(&mut self, now: Instant) {
        if self.cleaned.is_none_or(|it| OCCURRENCE_INTERVAL <= now.saturating_duration_since(it)) {
            self.by_key.retain(|_, it| !it.has_expired(now));
            self.cleaned = Some(now);
        }
    }
}

impl LastRecord {
    fn has_expired(&self, now: Instant) -> bool {
        EVENT_TTL <= now.saturating_duration_since(self.recorded)
    }

    fn changes_left(&self, now: Instant) -> u32 {
        let refilled = now.saturating_duration_since(self.recorded).as_secs() / CONDITION_REFILL.as_secs();
        CONDITION_BURST.min(self.changes_left.saturating_add(u32::try_from(refilled).unwrap_or(u32::MAX)))
    }
}

impl EventKey {
    fn new(regarding: &PodReference, EventDetails { reason, subject, .. }: &EventDetails) -> Self {
        Self { pod_uid: regarding.uid.clone(), reason, subject: subject.clone() }
    }
}

fn hash(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}

async fn write_events(
    client: Client,
    reporter: ReportingController,
    recorded: Arc<Recorded>,
    on_outcome: Arc<OnOutcome>,
    mut waiting: mpsc::Receiver<QueuedEvent>,
) {
    while let Some(QueuedEvent { regarding, details }) = waiting.recv().await {
        let events: Api<Event> = Api::namespaced(client.clone(), &regarding.namespace);
        match call(events.create(&PostParams::default(), &event(&reporter, &regarding, &details))).await {
            Ok(_) => on_outcome(EventOutcome::Written),
            // The namespace is being deleted, and the Pod with it.
            Err(error) if error.is_not_found() || error.is_namespace_terminating() => on_outcome(EventOutcome::Dropped),
            Err(error) => {
                on_outcome(EventOutcome::Failed);
                recorded.forget(&regarding, &details);
                let PodReference { namespace, name, .. } = &regarding;
                tracing::warn!(namespace, pod = name, reason = details.reason, error = %Chain(&error), "failed to record Event");
            }
        }
        tokio::time::sleep(reporter.limits.pause).await;
    }
}

fn event(reporter: &ReportingController, regarding: &PodReference, details: &EventDetails) -> Event {
    let EventDetails { severity, reason, subject: _, note } = details;
    Event {
        metadata: ObjectMeta {
            generate_name: Some("s3csi-".to_owned()),
            namespace: Some(regarding.namespace.clone()),
            ..ObjectMeta::default()
        },
        action: Some("Mount".to_owned()),
        event_time: Some(MicroTime(Timestamp::now())),
        note: Some(shortened(note, MAX_NOTE_BYTES)),
        reason: Some((*reason).to_owned()),
        regarding: Some(ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            name: Some(regarding.name.clone()),
            namespace: Some(regarding.namespace.clone()),
            uid: Some(regarding.uid.clone()),
            ..ObjectReference::default()
        }),
        reporting_controller: Some(reporter.name.clone()),
        reporting_instance: Some(reporter.instance.chars().take(MAX_INSTANCE_CHARACTERS).collect()),
        type_: Some(format!("{severity:?}")),
        ..Event::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(uid: &str) -> PodReference {
        PodReference { namespace: "team".to_owned(), name: "web".to_owned(), uid: uid.to_owned() }
    }

    fn details(reason: &'static str, subject: &str, note: &str) -> EventDetails {
        EventDetails { severity: EventType::Warning, reason, subject: subject.to_owned(), note: note.to_owned() }
    }

    /// Which of these are written, in order: seconds, Pod, reason, subject, note.
    #[track_caller]
    fn check(repetition: Repetition, events: &[(u64, &str, &'static str, &str, &str)], expected: &[bool]) {
        let (recorded, start) = (Recorded::default(), Instant::now());
        let admitted: Vec<bool> = events
            .iter()
            .map(|(seconds, uid, reason, subject, note)| {
                let now = start + Duration::from_secs(*seconds);
                recorded.admit(&pod(uid), &details(reason, subject, note), repetition, now)
            })
            .collect();
        assert_eq!(admitted, expected);
    }

    #[test]
    fn every_volume_of_a_pod_gets_its_own_event() {
        let events = [
            (0, "a", "VolumeMounted", "pv-1", "one"),
            (0, "a", "VolumeMounted", "pv-2", "two"),
            (0, "b", "VolumeMounted", "pv-1", "one"),
        ];
        check(Repetition::Occurrence, &events, &[true, true, true]);
    }

    #[test]
    fn an_occurrence_is_recorded_once_a_minute_whatever_its_note_says() {
        let events = [
            (0, "a", "EngineResumed", "pv", "after 90 ms"),
            (1, "a", "EngineResumed", "pv", "after 91 ms"),
            (1, "a", "EngineDied", "pv", "killed"),
            (61, "a", "EngineResumed", "pv", "after 90 ms"),
        ];
        check(Repetition::Occurrence, &events, &[true, false, true, true]);
    }

    #[test]
    fn a_condition_is_recorded_when_its_note_changes() {
        let waits = |seconds, subject, note| (seconds, "a", "WaitingForMountpointPod", subject, note);
        let events = [
            waits(0, "pv-1", "pulling"),
            waits(0, "pv-2", "pending"),
            waits(120, "pv-1", "pulling"),
            waits(120, "pv-2", "pending"),
            waits(121, "pv-1", "no such image"),
            waits(122, "pv-1", "pulling"),
            waits(123, "pv-1", "pulling"),
            // It ended meanwhile and began again.
            waits(500, "pv-2", "pending"),
        ];
        check(Repetition::Condition, &events, &[true, true, false, false, true, true, false, true]);
    }

    #[test]
    fn a_condition_that_holds_is_recorded_again_when_its_event_has_expired() {
        let events: Vec<_> = (0..=30).map(|it| (it * 120, "a", "VolumeNotServed", "pv", "refused")).collect();
        let mut expected = [false; 31];
        expected[0] = true;
        expected[30] = true;
        check(Repetition::Condition, &events, &expected);
    }

    #[test]
    fn a_condition_that_flaps_is_recorded_once_a_minute_in_the_end() {
        let notes = ["pulling", "no such image"];
        let events: Vec<_> =
            (0..135).map(|it| (it, "a", "VolumeNotServed", "pv", notes[usize::try_from(it % 2).unwrap()])).collect();
        let (recorded, start) = (Recorded::default(), Instant::now());
        let written = events.iter().filter(|(seconds, uid, reason, subject, note)| {
            let now = start + Duration::from_secs(*seconds);
            recorded.admit(&pod(uid), &details(reason, subject, note), Repetition::Condition, now)
        });
        assert_eq!(written.count(), 12);
    }

    #[test]
    fn what_was_not_written_is_recorded_again() {
        let recorded = Recorded::default();
        let (pod, details, now) = (pod("a"), details("VolumeMounted", "pv", "one"), Instant::now());
        assert!(recorded.admit(&pod, &details, Repetition::Condition, now));
        recorded.forget(&pod, &details);
        assert!(recorded.admit(&pod, &details, Repetition::Condition, now));
    }

    #[test]
    fn events_fit_what_the_api_server_takes() {
        let limits = EventLimits::NODE;
        let reporter = ReportingController { name: "driver/node".to_owned(), instance: "n".repeat(200), limits };
        let event = event(&reporter, &pod("a"), &details("VolumeMounted", "pv", &"ä".repeat(2000)));
        let note = event.note.unwrap();
        assert!(note.len() <= MAX_NOTE_BYTES && note.ends_with('…'), "{note}");
        assert_eq!(event.reporting_instance.unwrap().len(), MAX_INSTANCE_CHARACTERS);
        assert_eq!(event.type_.as_deref(), Some("Warning"));
        assert_eq!(event.regarding.and_then(|it| it.uid).as_deref(), Some("a"));
    }
}
