//! The metrics of the controller.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::{ApiMetrics, catalog, durations, register, render};

type One = [(&'static str, &'static str); 1];

pub struct ControllerMetrics {
    registry: Registry,
    api: ApiMetrics,
    leader: Gauge,
    reconcile: Family<One, Histogram, fn() -> Histogram>,
    queue_depth: Family<One, Gauge>,
    queue_age: Gauge<f64, AtomicU64>,
    attachments: Family<One, Gauge>,
    attached_workloads: Gauge,
    mountpoint_pods: Family<One, Gauge>,
    watch_age: Family<One, Gauge<f64, AtomicU64>>,
    watch_listed: Family<One, Gauge>,
}

/// What waits to be looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueDepth {
    pub due: usize,
    pub later: usize,
    pub running: usize,
    /// Since when the one that waits longest has been due.
    pub age: Duration,
}

impl ControllerMetrics {
    pub fn new() -> Self {
        let mut registry = Registry::default();
        let metrics = Self {
            api: ApiMetrics::new(&mut registry),
            leader: register(&mut registry, &catalog::LEADER, Gauge::default()),
            reconcile: register(
                &mut registry,
                &catalog::RECONCILE_DURATION,
                Family::new_with_constructor(durations as fn() -> Histogram),
            ),
            queue_depth: register(&mut registry, &catalog::QUEUE_DEPTH, Family::default()),
            queue_age: register(&mut registry, &catalog::QUEUE_AGE, Gauge::default()),
            attachments: register(&mut registry, &catalog::ATTACHMENTS, Family::default()),
            attached_workloads: register(&mut registry, &catalog::ATTACHED_WORKLOADS, Gauge::default()),
            mountpoint_pods: register(&mut registry, &catalog::MOUNTPOINT_PODS, Family::default()),
            watch_age: register(&mut registry, &catalog::WATCH_AGE, Family::default()),
            watch_listed: register(&mut registry, &catalog::WATCH_LISTED, Family::default()),
            registry,
        };
        metrics.queued(QueueDepth::default());
        metrics
    }

    pub fn api(&self) -> &ApiMetrics {
        &self.api
    }

    pub fn leads(&self, is_leader: bool) {
        self.leader.set(is_leader.into());
    }

    pub fn reconciled(&self, outcome: &'static str, took: Duration) {
        self.reconcile.get_or_create(&[("outcome", outcome)]).observe(took.as_secs_f64());
    }

    pub fn queued(&self, depth: QueueDepth) {
        let QueueDepth { due, later, running, age } = depth;
        for (state, count) in [("due", due), ("later", later), ("running", running)] {
            self.queue_depth.get_or_create(&[("state", state)]).set(number(count));
        }
        self.queue_age.set(age.as_secs_f64());
    }

    pub fn attached(&self, ready: usize, waiting: usize, workloads: usize) {
        for (state, count) in [("ready", ready), ("waiting", waiting)] {
            self.attachments.get_or_create(&[("state", state)]).set(number(count));
        }
        self.attached_workloads.set(number(workloads));
    }

    /// All of them, by state.
    pub fn counted_pods(&self, pods: &BTreeMap<&'static str, usize>) {
        for (state, count) in pods {
            self.mountpoint_pods.get_or_create(&[("state", *state)]).set(number(*count));
        }
    }

    pub fn watched(&self, kind: &'static str, age: Option<Duration>, has_listed: bool) {
        if let Some(age) = age {
            self.watch_age.get_or_create(&[("kind", kind)]).set(age.as_secs_f64());
        }
        self.watch_listed.get_or_create(&[("kind", kind)]).set(has_listed.into());
    }

    /// A standby replica watches nothing, so it exports no metrics about the cluster.
    pub fn forget_the_cluster(&self) {
        self.queued(QueueDepth::default());
        self.attachments.clear();
        self.attached_workloads.set(0);
        self.mountpoint_pods.clear();
        self.watch_age.clear();
        self.watch_listed.clear();
    }

    pub fn render(&self) -> Result<String, fmt::Error> {
        render(&self.registry)
    }
}

impl Default for ControllerMetrics {
    fn default() -> Self {
        Self::new()
    }
}

fn number(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
