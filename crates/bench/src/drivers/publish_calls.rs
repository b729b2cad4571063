//! `NodePublishVolume` as kubelet counts it, for each driver of its node.

use std::time::Duration;

use anyhow::Context as _;
use s3csi_testbed::cluster::Cluster;

use super::installed::{InstalledDriver, NODE};
use crate::publisher::milliseconds;
use crate::report::MarkdownTable;
use crate::statistics::{Samples, figure_or_dash};

const METHOD: &str = "method_name=\"/csi.v1.Node/NodePublishVolume\"";

/// Calls that have been answered, however.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PublishCalls {
    count: f64,
    took: Duration,
}

impl PublishCalls {
    pub fn since(&self, before: &Self) -> Self {
        Self { count: self.count - before.count, took: self.took.saturating_sub(before.took) }
    }
}

/// Since kubelet was started.
pub fn publish_calls(cluster: &Cluster, driver: &InstalledDriver) -> anyhow::Result<PublishCalls> {
    let path = format!("/api/v1/nodes/{}/proxy/metrics", NODE.name());
    let metrics = cluster.get_text(&path).context("kubelet does not show its metrics")?;
    Ok(parse(&metrics, driver.name))
}

/// Adds up what was answered well and what was not.
fn parse(metrics: &str, driver: &str) -> PublishCalls {
    let driver = format!("driver_name=\"{driver}\"");
    let mut calls = PublishCalls::default();
    for line in metrics.lines().filter(|it| it.contains(METHOD) && it.contains(&driver)) {
        let Some((name, value)) = line.rsplit_once(' ') else { continue };
        let Ok(value) = value.parse::<f64>() else { continue };
        if name.starts_with("csi_operations_seconds_count{") {
            calls.count += value;
        } else if name.starts_with("csi_operations_seconds_sum{") {
            calls.took += Duration::try_from_secs_f64(value).unwrap_or_default();
        }
    }
    calls
}

/// One sample for each Pod.
#[derive(Default)]
pub struct PublishCallSamples {
    took: Samples,
    count: Samples,
}

impl PublishCallSamples {
    pub fn add(&mut self, calls: &PublishCalls) {
        self.took.add(milliseconds(calls.took));
        self.count.add(calls.count);
    }
}

pub fn table(rows: &[(&str, &PublishCallSamples)]) -> MarkdownTable {
    let mut table = MarkdownTable::new(["ms", "n", "min", "p50", "p90", "max", "calls, p50", "max"]);
    for (name, PublishCallSamples { took, count }) in rows {
        let figures =
            [took.minimum(), took.median(), took.percentile(90), took.maximum(), count.median(), count.maximum()];
        let cells = [(*name).to_owned(), took.count().to_string()];
        table.add(cells.into_iter().chain(figures.map(figure_or_dash)));
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_of_one_driver_are_added_up_whatever_their_outcome() {
        let line = |metric: &str, driver: &str, code: &str, method: &str, value: &str| {
            let labels =
                format!("driver_name=\"{driver}\",grpc_status_code=\"{code}\",method_name=\"/csi.v1.Node/{method}\"");
            format!("csi_operations_seconds_{metric}{{{labels},migrated=\"false\"}} {value}\n")
        };
        let metrics = [
            "# TYPE csi_operations_seconds histogram\n".to_owned(),
            line("sum", "a", "OK", "NodePublishVolume", "0.5"),
            line("count", "a", "OK", "NodePublishVolume", "2"),
            line("sum", "a", "Unavailable", "NodePublishVolume", "1e-01"),
            line("count", "a", "Unavailable", "NodePublishVolume", "1"),
            line("sum", "a", "OK", "NodeUnpublishVolume", "7"),
            line("sum", "b", "OK", "NodePublishVolume", "7"),
        ];
        let expected = PublishCalls { count: 3.0, took: Duration::from_millis(600) };
        assert_eq!(parse(&metrics.concat(), "a"), expected);
    }
}
