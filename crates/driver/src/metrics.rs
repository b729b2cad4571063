//! What a node plugin counts: one registry per process, made by `cli`, given to those who count, shown by `csi` at `/metrics`.
//! Every figure is described here, so that this file is the list of all of them.

use std::fmt;

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::{Metric, Registry, Unit};

/// The media type of what [`Metrics::render`] writes.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// What a figure is called, what it is measured in, and what it says. Counters get `_total` after their name.
struct Description {
    name: &'static str,
    unit: Option<Unit>,
    help: &'static str,
}

const REPAIRS: Description = Description {
    name: "s3csi_repairs",
    unit: None,
    help: "What the node plugin put right without being asked, by the reason that is also in its log",
};

const ENGINE_DEATHS: Description = Description {
    name: "s3csi_engine_deaths",
    unit: None,
    help: "Engines that ended while their volume was published",
};

type Reason = [(&'static str, &'static str); 1];

pub struct Metrics {
    registry: Registry,
    repairs: Family<Reason, Counter>,
    engine_deaths: Counter,
}

impl Metrics {
    pub fn new() -> Self {
        let mut registry = Registry::default();
        Self {
            repairs: register(&mut registry, REPAIRS),
            engine_deaths: register(&mut registry, ENGINE_DEATHS),
            registry,
        }
    }

    /// Shows these reasons from now on, even before the first repair: an alert on an increase needs a zero to begin with.
    pub fn expect_repairs(&self, reasons: &[&'static str]) {
        for reason in reasons {
            drop(self.repairs.get_or_create(&[("reason", reason)]));
        }
    }

    /// Counts one repair and answers how many there were for this reason.
    pub fn repaired(&self, reason: &'static str) -> u64 {
        self.repairs.get_or_create(&[("reason", reason)]).inc() + 1
    }

    pub fn engine_died(&self) {
        self.engine_deaths.inc();
    }

    /// All figures as text, for Prometheus.
    pub fn render(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

/// A new figure; the registry keeps a copy that counts the same.
fn register<T: Metric + Clone + Default>(registry: &mut Registry, description: Description) -> T {
    let Description { name, unit, help } = description;
    let metric = T::default();
    match unit {
        Some(unit) => registry.register_with_unit(name, help, unit, metric.clone()),
        None => registry.register(name, help, metric.clone()),
    }
    metric
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_counted_is_shown_with_its_meaning() {
        let metrics = Metrics::new();
        metrics.expect_repairs(&["NeverSeen"]);
        assert_eq!(metrics.repaired("Seen"), 1);
        assert_eq!(metrics.repaired("Seen"), 2);
        metrics.engine_died();
        let text = metrics.render().unwrap();
        for line in [
            "# TYPE s3csi_repairs counter",
            "s3csi_repairs_total{reason=\"Seen\"} 2",
            "s3csi_repairs_total{reason=\"NeverSeen\"} 0",
            "s3csi_engine_deaths_total 1",
            "# EOF",
        ] {
            assert!(text.lines().any(|it| it == line), "{line:?} is missing in:\n{text}");
        }
    }
}
