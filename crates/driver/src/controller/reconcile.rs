//! Reconciles one key: observe, decide, apply, report.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::time::Duration;

use parking_lot::Mutex;
use s3csi_core::attachment::{Decision, Notice, ObservedState, Timestamp, decide};
use s3csi_core::{Chain, PvName};

use super::apply::{Apply, ApplyError};
use super::cache::{Cache, ReconcileKey};
use super::facts;
use super::queue::Priority;
use super::status::StatusReporter;
use crate::api::PodCondition;
use crate::api::watch::WatchUpdate;

/// A Mountpoint Pod that starts changes several times within a second; not every change is written as a status.
const STATUS_DELAY: Duration = Duration::from_secs(1);

pub struct Reconciler {
    /// A panic in the middle of a change leaves at worst stale facts, which are harmless.
    pub cache: Mutex<Cache>,
    /// Held while a volume that may be used on one node only is reconciled: workers for two nodes must not both find it unused.
    pub single_node_volumes: VolumeLocks,
    /// Held while a Pod is started that takes over from another one: workers must not both find that their node may have one more.
    pub replacements: tokio::sync::Mutex<()>,
    pub apply: Apply,
    pub status: StatusReporter,
}

/// Few locks for many volumes: two of them may share one.
#[derive(Default)]
pub struct VolumeLocks([tokio::sync::Mutex<()>; 32]);

impl VolumeLocks {
    async fn lock(&self, volume: &PvName) -> tokio::sync::MutexGuard<'_, ()> {
        let mut hasher = DefaultHasher::new();
        volume.hash(&mut hasher);
        let index = usize::try_from(hasher.finish() % 32).unwrap_or_default();
        self.0[index].lock().await
    }
}

/// How a reconciliation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReconcileOutcome {
    /// Nothing more to do until something changes, or until this time has passed.
    Done { requeue_after: Option<(Duration, Priority)> },
    /// Something failed or lost a race, and was logged.
    Retry,
}

impl ReconcileOutcome {
    /// Label of the metric.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Done { .. } => "done",
            Self::Retry => "retry",
        }
    }
}

impl Reconciler {
    pub async fn reconcile(&self, key: &ReconcileKey, now: Timestamp) -> ReconcileOutcome {
        let is_single_node = self.cache.lock().is_single_node(&key.persistent_volume);
        let _held =
            if is_single_node { Some(self.single_node_volumes.lock(&key.persistent_volume).await) } else { None };
        let (mut observed, mut decision) = self.decide(key, now);
        let _replacing = if decision.replaces_ahead() {
            let held = self.replacements.lock().await;
            self.cache.lock().release(decision.adopted());
            (observed, decision) = self.decide(key, now);
            Some(held)
        } else {
            None
        };
        let errors = self.apply.run(&self.cache, key, &decision).await;
        self.cache.lock().release(decision.adopted());
        let mut has_succeeded = errors.is_empty();
        for error in &errors {
            self.log(key, error);
        }
        // An assignment whose write failed did not happen.
        let has_failed_write = errors.iter().any(ApplyError::is_attachment_write);
        for notice in decision.notices.iter().filter(|it| !has_failed_write || !matches!(it, Notice::Assigned { .. })) {
            if let Some(workload) = self.cache.lock().workload(notice.workload()) {
                self.status.notice(workload, &key.persistent_volume, notice);
            }
        }
        if decision.is_settled() {
            let known: Vec<_> = self.cache.lock().attachments_of(key).cloned().collect();
            for attachment in &known {
                let named = attachment.attachment.entries.keys();
                let mounted: BTreeMap<String, PodCondition> = {
                    let cache = self.cache.lock();
                    named.filter_map(|it| Some((it.clone(), cache.mounted(key, it)?.clone()))).collect()
                };
                match self.status.write(&observed, attachment, &mounted, now).await {
                    Ok(Some(object)) => {
                        if let Some(fact) = facts::attachment(&object) {
                            self.cache.lock().update_attachments(WatchUpdate::Changed(fact));
                        }
                    }
                    Ok(None) => {}
                    Err(error) => {
                        has_succeeded = false;
                        tracing::warn!(error = %Chain(&error), "failed to write status, retrying");
                    }
                }
            }
        }
        if !has_succeeded {
            return ReconcileOutcome::Retry;
        }
        // The cache has our own writes already, so the watch events for them do not enqueue the key again, and nothing else would
        // write the status.
        let status_in = (!decision.is_settled()).then_some((STATUS_DELAY, Priority::Low));
        let next_in = decision.requeue_after.map(|it| (it, Priority::Normal));
        ReconcileOutcome::Done { requeue_after: [next_in, status_in].into_iter().flatten().min() }
    }

    /// Under one lock, so that no other worker takes the same warm Pods.
    fn decide(&self, key: &ReconcileKey, now: Timestamp) -> (ObservedState, Decision) {
        let mut cache = self.cache.lock();
        let mut observed = cache.observe(key);
        if !observed.warm_pods.is_empty() {
            observed.template = cache.volume(&key.persistent_volume).and_then(|it| self.apply.template(it));
        }
        let decision = decide(&observed, now);
        cache.reserve(decision.adopted());
        (observed, decision)
    }

    fn log(&self, key: &ReconcileKey, error: &ApplyError) {
        let (node, volume) = (&key.node, &key.persistent_volume);
        match error {
            // Most often the other writer did what we wanted.
            ApplyError::LostRace { .. } | ApplyError::LostWarmPod { .. } => {
                tracing::debug!(node, %volume, error = %Chain(error), "lost a race, reconciling again");
            }
            // It may take as long as the drain of the node.
            ApplyError::Cordoned { .. } => {
                tracing::debug!(node, %volume, error = %Chain(error), "Mountpoint Pod not replaced, retrying");
            }
            error => tracing::warn!(node, %volume, error = %Chain(error), "reconciliation failed, retrying"),
        }
        let ApplyError::StartPod { workload, .. } = error else {
            return;
        };
        if let Some(workload) = self.cache.lock().workload(workload) {
            self.status.pod_not_created(workload, volume, Chain(error).to_string());
        }
    }
}
