//! What the node plugin weighs before, while and after many volumes are published at once, each with an engine of its own.

use std::time::Instant;

use anyhow::{Context as _, ensure};
use futures::future::try_join_all;
use s3csi_testbed::process::Process;
use s3csi_testbed::wait::wait_patiently_until;

use crate::footprint::{self, MemoryUsage};
use crate::latency::{LIMIT, ensure_alive};
use crate::publisher::{Publisher, refused, volume};
use crate::report::MarkdownTable;
use crate::run::{Options, Thoroughness};
use crate::statistics::{figure, mebibytes};
use s3csi_driver::host::Host as _;

pub const EXPLANATION: &str = "\
Memory of the node plugin in MiB, and its threads: before volumes are published at once, with them, and after all were unpublished at once.";

pub fn measure(publisher: &Publisher<'_>, node: &Process, options: &Options) -> anyhow::Result<MarkdownTable> {
    let count = match options.thoroughness {
        Thoroughness::Quick => 10,
        Thoroughness::Full => 100,
    };
    let volumes: Vec<_> = (0..count).map(|it| volume(&format!("at-once-{it}"), 0)).collect();
    let Publisher { runtime, kubelet, host } = publisher;
    let memory = || footprint::memory(node.pid());
    let before = memory()?;
    let targets = runtime
        .block_on(try_join_all(volumes.iter().map(|it| kubelet.publish(it))))
        .map_err(|it| refused(&it))
        .context("failed to publish")?;
    for target in &targets {
        ensure_alive(&host.probe(target, Instant::now() + LIMIT))?;
    }
    wait_for_calls(node, before.threads)?;
    let during = memory()?;
    runtime
        .block_on(try_join_all(volumes.iter().map(|it| kubelet.unpublish(it))))
        .map_err(|it| refused(&it))
        .context("failed to unpublish")?;
    wait_for_calls(node, before.threads)?;
    let after = memory()?;

    let mut table = MarkdownTable::new(["state", "RSS", "PSS", "threads"]);
    let with_all = format!("{count} volumes");
    for (state, memory) in [("before", before), (with_all.as_str(), during), ("after", after)] {
        table.add(row(state, &memory));
    }
    Ok(table)
}

/// Waits until the threads of the calls have ended.
fn wait_for_calls(node: &Process, threads: u64) -> anyhow::Result<()> {
    let is_resting = || footprint::memory(node.pid()).is_ok_and(|it| it.threads <= threads);
    ensure!(wait_patiently_until(Instant::now() + LIMIT, is_resting), "the node plugin does not come to rest");
    Ok(())
}

fn row(state: &str, memory: &MemoryUsage) -> [String; 4] {
    let size = |kib: u64| figure(mebibytes(kib << 10));
    [state.to_owned(), size(memory.resident_kib), size(memory.proportional_kib), memory.threads.to_string()]
}
