//! Publishing with a stop watch: the calls kubelet makes, each checked, and the table of how long they took.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::ensure;
use s3csi_driver::host::{Host as _, Kernel};
use tokio::runtime::Runtime;

use crate::latency::{LIMIT, ensure_alive};
use crate::report::MarkdownTable;
use crate::scratch::BUCKET;
use crate::statistics::{Samples, figure_or_dash};
use s3csi_testbed::kubelet::{CsiVolume, Kubelet};

pub struct Publisher<'a> {
    pub runtime: &'a Runtime,
    pub kubelet: Kubelet,
    pub host: Kernel,
}

impl Publisher<'_> {
    pub fn publish(&self, volume: &CsiVolume) -> anyhow::Result<Duration> {
        let start = Instant::now();
        let target = self.runtime.block_on(self.kubelet.publish(volume)).map_err(|it| refused(&it))?;
        let took = start.elapsed();
        // An answer that comes before the mount works would look fast.
        ensure_alive(&self.host.probe(&target, Instant::now() + LIMIT))?;
        let is_mount_point = self.host.mount_table()?.at(&target).is_some();
        ensure!(is_mount_point, "{} was published and is no mount", target.display());
        Ok(took)
    }

    pub fn unpublish(&self, volume: &CsiVolume) -> anyhow::Result<Duration> {
        let start = Instant::now();
        self.runtime.block_on(self.kubelet.unpublish(volume)).map_err(|it| refused(&it))?;
        let took = start.elapsed();
        let target: PathBuf = self.kubelet.target(volume);
        ensure!(!target.exists(), "{} was unpublished and is still there", target.display());
        Ok(took)
    }
}

pub fn volume(pv: &str, pod: usize) -> CsiVolume {
    CsiVolume::new(BUCKET, &format!("bench-{pv}"), &format!("{pod:08x}-0000-4000-8000-000000000000"))
}

/// One row for each; the last columns are ratios to the medians of `bases`.
pub fn latency_table(rows: &[(&str, &Samples)], bases: &[(&str, &Samples)]) -> MarkdownTable {
    let headers = ["ms", "n", "min", "p50", "p90", "p99", "max"].map(str::to_owned);
    let mut table =
        MarkdownTable::new(headers.into_iter().chain(bases.iter().map(|(name, _)| format!("p50 ÷ {name}"))));
    for (name, samples) in rows {
        let mut cells = vec![(*name).to_owned(), samples.count().to_string()];
        let percentiles = [50, 90, 99].map(|it| samples.percentile(it));
        let ratios = bases.iter().map(|(_, base)| ratio(samples, base));
        let figures = [samples.minimum()].into_iter().chain(percentiles).chain([samples.maximum()]).chain(ratios);
        cells.extend(figures.map(figure_or_dash));
        table.add(cells);
    }
    table
}

pub fn ratio(samples: &Samples, base: &Samples) -> Option<f64> {
    Some(samples.median()? / base.median()?)
}

pub fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

pub fn refused(status: &tonic::Status) -> anyhow::Error {
    anyhow::anyhow!("{:?}: {}", status.code(), status.message())
}
