//! Metrics: a catalogue of every metric with its name, unit, labels and meaning, and one registry per program, served at `/metrics`.
//! docs/reference/metrics.md is generated from the catalogue.

mod api;
mod catalog;
mod controller;
mod node;

use std::fmt::{self, Write as _};

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Metric, Registry, Unit};

pub use self::api::ApiMetrics;
pub use self::catalog::ALL;
pub use self::controller::{ControllerMetrics, QueueDepth};
pub use self::node::{EventOutcome, NodeMetrics};

/// The media type of what [`render`] writes.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The description of a metric.
#[derive(Debug)]
pub struct Description {
    /// Without the unit and the suffix of its type.
    pub name: &'static str,
    pub metric_type: MetricType,
    pub unit: Option<Unit>,
    pub labels: &'static [&'static str],
    pub of: Program,
    pub help: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricType {
    Counter,
    Gauge,
    Histogram,
}

/// The program that serves a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    Node,
    Controller,
    Both,
}

impl Description {
    /// The name in the `# TYPE` line.
    pub fn family(&self) -> String {
        match &self.unit {
            Some(unit) => format!("{}_{}", self.name, unit.as_str()),
            None => self.name.to_owned(),
        }
    }

    /// The names of its time series.
    pub fn series(&self) -> Vec<String> {
        let endings: &[&str] = match self.metric_type {
            MetricType::Counter => &["_total"],
            MetricType::Gauge => &[""],
            MetricType::Histogram => &["_bucket", "_sum", "_count"],
        };
        endings.iter().map(|it| format!("{}{it}", self.family())).collect()
    }
}

/// All metrics of a registry in the `OpenMetrics` text format.
pub fn render(registry: &Registry) -> Result<String, fmt::Error> {
    let mut text = String::new();
    encode(&mut text, registry)?;
    Ok(text)
}

/// The catalogue as a page of the documentation.
pub fn reference() -> Result<String, fmt::Error> {
    let mut page = String::from(INTRODUCTION);
    for (program, title) in [
        (Program::Both, "Node plugin and controller"),
        (Program::Node, "Node plugin"),
        (Program::Controller, "Controller"),
    ] {
        write!(page, "\n## {title}\n\n| name | type | labels | meaning |\n|---|---|---|---|\n")?;
        for it in ALL.iter().filter(|it| it.of == program) {
            let metric_type = match it.metric_type {
                MetricType::Counter => "counter",
                MetricType::Gauge => "gauge",
                MetricType::Histogram => "histogram",
            };
            let name =
                if it.metric_type == MetricType::Counter { format!("{}_total", it.family()) } else { it.family() };
            let labels: Vec<String> = it.labels.iter().map(|it| format!("`{it}`")).collect();
            writeln!(page, "| `{name}` | {metric_type} | {} | {} |", labels.join(", "), it.help)?;
        }
    }
    Ok(page)
}

const INTRODUCTION: &str = "\
# Metrics

Written by `make update-generated`; `crates/driver/src/metrics/catalog.rs` is the source.
[operations.md](../operations.md#metrics) says where they are served and how to use them. Names end in the unit; a
histogram has `_bucket`, `_sum` and `_count`.
";

/// Registers a metric; the registry shares its value.
fn register<T: Metric + Clone>(registry: &mut Registry, description: &Description, metric: T) -> T {
    let Description { name, unit, help, metric_type: _, labels: _, of: _ } = description;
    match unit {
        Some(unit) => registry.register_with_unit(*name, *help, unit.clone(), metric.clone()),
        None => registry.register(*name, *help, metric.clone()),
    }
    metric
}

/// Buckets from a call that finds everything done to kubelet's deadline.
fn durations() -> Histogram {
    Histogram::new([0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0])
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::time::Duration;

    use super::*;

    /// The metric families in a response, each as `name type`.
    fn served(text: &str) -> BTreeSet<String> {
        text.lines().filter_map(|it| it.strip_prefix("# TYPE ")).map(str::to_owned).collect()
    }

    fn listed(program: Program) -> BTreeSet<String> {
        let ours = ALL.iter().filter(|it| it.of == program || it.of == Program::Both);
        ours.map(|it| format!("{} {}", it.family(), format!("{:?}", it.metric_type).to_lowercase())).collect()
    }

    /// A metric without a label value is not rendered, so each is touched once.
    #[test]
    fn each_program_serves_the_metrics_of_the_catalogue() {
        let took = Duration::from_millis(1);
        let node = NodeMetrics::new();
        node.api().asked("get", "pods", Some(200));
        node.published(&[("total", took)], "OK");
        node.unpublished(&[("total", took)], "OK");
        node.counted_mounts(&BTreeMap::from([(("pod", "alive"), 1)]), 1);
        node.expect_remediations(&["Reason"]);
        assert_eq!(served(&node.render().unwrap()), listed(Program::Node));

        let controller = ControllerMetrics::new();
        controller.api().asked("get", "pods", Some(200));
        controller.reconciled("done", took);
        controller.attached(1, 2, 3);
        controller.counted_pods(&BTreeMap::from([("running", 1)]));
        controller.watched("pods", Some(took), true);
        assert_eq!(served(&controller.render().unwrap()), listed(Program::Controller));
        controller.forget_the_cluster();
        assert!(!controller.render().unwrap().contains("s3csi_attachments{"));
    }

    #[test]
    fn names_are_unique_and_end_in_their_unit() {
        let names: BTreeSet<String> = ALL.iter().map(|it| it.family()).collect();
        assert_eq!(names.len(), ALL.len());
        for it in ALL {
            assert!(it.name.starts_with("s3csi_"), "{}", it.name);
            assert!(it.metric_type != MetricType::Histogram || it.unit.is_some(), "{} has no unit", it.name);
            assert!(!it.help.ends_with('.'), "{}", it.name);
        }
    }
}
