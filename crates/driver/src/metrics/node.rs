//! The metrics of the node plugin.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::{ApiMetrics, catalog, durations, register, render};

type One = [(&'static str, &'static str); 1];
type Two = [(&'static str, &'static str); 2];

pub struct NodeMetrics {
    registry: Registry,
    api: ApiMetrics,
    publish: Family<Two, Histogram, fn() -> Histogram>,
    unpublish: Family<Two, Histogram, fn() -> Histogram>,
    mounts: Family<Two, Gauge>,
    targets: Gauge,
    repairs: Family<One, Counter>,
    engine_deaths: Counter,
    engine_stalls: Histogram,
    credentials_age: Gauge<f64, AtomicU64>,
    credentials_expiry: Gauge,
    workload_credentials_expiry: Gauge,
    registered: Gauge,
    taints_removed: Counter,
    events: Family<One, Counter>,
}

/// The outcome of an Event on a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventOutcome {
    Written,
    Dropped,
    Failed,
}

impl NodeMetrics {
    pub fn new() -> Self {
        let mut registry = Registry::default();
        let histograms = || Family::new_with_constructor(durations as fn() -> Histogram);
        let metrics = Self {
            api: ApiMetrics::new(&mut registry),
            publish: register(&mut registry, &catalog::PUBLISH_DURATION, histograms()),
            unpublish: register(&mut registry, &catalog::UNPUBLISH_DURATION, histograms()),
            mounts: register(&mut registry, &catalog::MOUNTS, Family::default()),
            targets: register(&mut registry, &catalog::TARGETS, Gauge::default()),
            repairs: register(&mut registry, &catalog::REPAIRS, Family::default()),
            engine_deaths: register(&mut registry, &catalog::ENGINE_DEATHS, Counter::default()),
            engine_stalls: register(&mut registry, &catalog::ENGINE_STALLS, durations()),
            credentials_age: register(&mut registry, &catalog::CREDENTIALS_AGE, Gauge::default()),
            credentials_expiry: register(&mut registry, &catalog::CREDENTIALS_EXPIRY, Gauge::default()),
            workload_credentials_expiry: register(
                &mut registry,
                &catalog::WORKLOAD_CREDENTIALS_EXPIRY,
                Gauge::default(),
            ),
            registered: register(&mut registry, &catalog::REGISTERED, Gauge::default()),
            taints_removed: register(&mut registry, &catalog::TAINTS_REMOVED, Counter::default()),
            events: register(&mut registry, &catalog::EVENTS, Family::default()),
            registry,
        };
        for outcome in [EventOutcome::Written, EventOutcome::Dropped, EventOutcome::Failed] {
            drop(metrics.events.get_or_create(&[("outcome", outcome.label())]));
        }
        metrics
    }

    pub fn api(&self) -> &ApiMetrics {
        &self.api
    }

    /// Records a call: its phases and the total.
    pub fn published(&self, phases: &[(&'static str, Duration)], code: &'static str) {
        observe(&self.publish, phases, code);
    }

    pub fn unpublished(&self, phases: &[(&'static str, Duration)], code: &'static str) {
        observe(&self.unpublish, phases, code);
    }

    /// Replaces the number of mounts by strategy and state.
    pub fn counted_mounts(&self, mounts: &BTreeMap<(&'static str, &'static str), i64>, targets: i64) {
        self.mounts.clear();
        for ((strategy, state), count) in mounts {
            self.mounts.get_or_create(&[("strategy", *strategy), ("state", *state)]).set(*count);
        }
        self.targets.set(targets);
    }

    /// Serves these reasons with value 0: an alert on an increase needs a value to start from.
    pub fn expect_remediations(&self, reasons: &[&'static str]) {
        for reason in reasons {
            drop(self.repairs.get_or_create(&[("reason", reason)]));
        }
    }

    /// Counts one remediation and returns the total for this reason.
    pub fn remediated(&self, reason: &'static str) -> u64 {
        self.repairs.get_or_create(&[("reason", reason)]).inc() + 1
    }

    pub fn engine_died(&self) {
        self.engine_deaths.inc();
    }

    pub fn engine_resumed(&self, stall: Duration) {
        self.engine_stalls.observe(stall.as_secs_f64());
    }

    pub fn credentials_aged(&self, longest: Duration) {
        self.credentials_age.set(longest.as_secs_f64());
    }

    pub fn credentials_expire(&self, at: SystemTime) {
        self.credentials_expiry.set(unix_seconds(at));
    }

    /// The first of them; `None` if no workload has keys of its own.
    pub fn workload_credentials_expire(&self, at: Option<SystemTime>) {
        self.workload_credentials_expiry.set(at.map_or(0, unix_seconds));
    }

    pub fn registered(&self, is_registered: bool) {
        self.registered.set(is_registered.into());
    }

    pub fn taint_removed(&self) {
        self.taints_removed.inc();
    }

    pub fn event(&self, outcome: EventOutcome) {
        self.events.get_or_create(&[("outcome", outcome.label())]).inc();
    }

    pub fn render(&self) -> Result<String, fmt::Error> {
        render(&self.registry)
    }
}

impl Default for NodeMetrics {
    fn default() -> Self {
        Self::new()
    }
}

impl EventOutcome {
    const fn label(self) -> &'static str {
        match self {
            Self::Written => "written",
            Self::Dropped => "dropped",
            Self::Failed => "failed",
        }
    }
}

fn unix_seconds(time: SystemTime) -> i64 {
    let seconds = time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    seconds.try_into().unwrap_or(i64::MAX)
}

fn observe(
    family: &Family<Two, Histogram, fn() -> Histogram>,
    phases: &[(&'static str, Duration)],
    code: &'static str,
) {
    for (phase, took) in phases {
        family.get_or_create(&[("phase", *phase), ("code", code)]).observe(took.as_secs_f64());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recorded_values_are_rendered() {
        let metrics = NodeMetrics::new();
        metrics.expect_remediations(&["NeverSeen"]);
        assert_eq!(metrics.remediated("Seen"), 1);
        assert_eq!(metrics.remediated("Seen"), 2);
        metrics.engine_died();
        metrics.api().asked("get", "nodes", Some(200));
        metrics.api().asked("get", "nodes", None);
        metrics.published(&[("total", Duration::from_millis(30))], "OK");
        metrics.counted_mounts(&BTreeMap::from([(("pod", "alive"), 3)]), 7);
        metrics.counted_mounts(&BTreeMap::from([(("pod", "dead"), 1)]), 0);
        let text = metrics.render().unwrap();
        for line in [
            "# TYPE s3csi_repairs counter",
            "s3csi_repairs_total{reason=\"Seen\"} 2",
            "s3csi_repairs_total{reason=\"NeverSeen\"} 0",
            "s3csi_engine_deaths_total 1",
            "s3csi_api_requests_total{verb=\"get\",resource=\"nodes\",code=\"200\"} 1",
            "s3csi_api_requests_total{verb=\"get\",resource=\"nodes\",code=\"error\"} 1",
            "s3csi_publish_duration_seconds_bucket{le=\"0.025\",phase=\"total\",code=\"OK\"} 0",
            "s3csi_publish_duration_seconds_bucket{le=\"0.05\",phase=\"total\",code=\"OK\"} 1",
            "s3csi_mounts{strategy=\"pod\",state=\"dead\"} 1",
            "s3csi_targets 0",
            "# EOF",
        ] {
            assert!(text.lines().any(|it| it == line), "{line:?} is missing in:\n{text}");
        }
        assert!(!text.contains("alive\"}"), "a removed state is still rendered:\n{text}");
    }
}
