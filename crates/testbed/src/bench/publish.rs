//! The publish benchmark: what kubelet waits for, against what the engine and the kernel need by themselves; and what the
//! node's two processes weigh.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use s3csi_driver::host::{Host as _, Kernel};
use tokio::runtime::Runtime;

use super::latency::{BareEngine, LIMIT, ensure_alive};
use super::report::{Section, Table};
use super::scratch::{BUCKET, Scratch};
use super::statistics::{Samples, figure, figure_or_dash, mebibytes};
use super::verdicts::Verdicts;
use super::{Options, Progress, Thoroughness, floor, footprint, machine};
use crate::fixture::Fixture;
use crate::kubelet::{Kubelet, Volume};
use crate::plugin::Plugin;
use crate::process::Process;
use crate::wait::{SOON, wait_until};

/// Shared publishes are quick and their p99 has a target, so there are more of them.
const SHARED_PER_ROUND: usize = 5;

/// An engine that has served nothing takes less; there must be something left for the machine.
const ENGINE_KIB: u64 = 48 << 10;
const RESERVE_KIB: u64 = 2 << 20;

const SHARED_LIMIT_MILLISECONDS: f64 = 20.0;
const COLD_LIMIT: f64 = 1.2;

struct Plan {
    rounds: usize,
    /// Engines, and targets per engine.
    crowds: [(usize, usize); 2],
}

impl Plan {
    fn of(options: &Options) -> Self {
        let (rounds, crowds) = match options.thoroughness {
            Thoroughness::Quick => (8, [(2, 5), (10, 1)]),
            Thoroughness::Full => (200, [(10, 10), (100, 1)]),
        };
        Self { rounds: options.repetitions.unwrap_or(rounds), crowds }
    }
}

pub fn measure(fixture: &Fixture, options: &Options, progress: &Progress) -> anyhow::Result<Section> {
    let plan = Plan::of(options);
    let programs = [
        machine::product_version("s3csi")?,
        machine::product_version("mount-s3")?,
        machine::tool_version("versitygw")?,
    ];
    let head = machine::describe(options, &programs);
    progress.say("starting versitygw, mounter and node plugin");
    let runtime = Runtime::new().context("failed to start the async runtime")?;
    // Connections are made in the background of this runtime.
    let _entered = runtime.enter();
    let scratch = Scratch::prepare(fixture)?;
    let plugin = Plugin::new(fixture, scratch.store())?;
    let mounter = plugin.start_mounter()?;
    let node = plugin.start_node()?;
    let bench = Bench { fixture, plugin: &plugin, runtime: &runtime, kubelet: plugin.kubelet(), mounter, node };

    let memory = bench.measure_memory(&plan, progress)?;
    let latencies = bench.measure_latencies(&plan, &scratch, progress)?;
    for process in [&bench.node, &bench.mounter] {
        process.signal(rustix::process::Signal::TERM);
        let status = process.wait(SOON).with_context(|| format!("{} does not end", process.name()))?;
        ensure!(status.success(), "{} ended with {status}", process.name());
    }

    let text = format!(
        "## Publish\n\n{head}\n{EXPLANATION}\n\n{}\n{}\n{MEMORY_EXPLANATION}\n\n{memory}",
        latencies.table(),
        latencies.verdicts(),
    );
    Ok(Section { text, failures: Vec::new() })
}

const EXPLANATION: &str = "\
How long kubelet waits, in milliseconds. *Floor* is the bare FUSE mount with a server that answers INIT and GETATTR;
*engine start* is `mount-s3` on such a mount, with the flags, the environment and the user of a publish, until the mount
answers; *cold publish* is `NodePublishVolume` for a new volume, *shared publish* one more target of a volume that is served
already. All of them in turns, in one run.";

const MEMORY_EXPLANATION: &str = "\
Memory in MiB (RSS, PSS) and threads of the node's two processes, and what an engine that has done nothing yet adds.";

struct Bench<'a> {
    fixture: &'a Fixture,
    plugin: &'a Plugin<'a>,
    runtime: &'a Runtime,
    kubelet: Kubelet,
    mounter: Process,
    node: Process,
}

#[derive(Default)]
struct Latencies {
    floor: Samples,
    engine: Samples,
    cold: Samples,
    shared: Samples,
    unpublish_shared: Samples,
    unpublish_last: Samples,
}

impl Bench<'_> {
    fn measure_latencies(&self, plan: &Plan, scratch: &Scratch, progress: &Progress) -> anyhow::Result<Latencies> {
        let host = Kernel::default();
        let engine = BareEngine::prepare(self.fixture, self.plugin, scratch.store())?;
        let mut latencies = Latencies::default();
        for round in 1..=plan.rounds {
            // Nobody always runs in the wake of the same one.
            if round.is_multiple_of(2) {
                self.publish_in_turns(&host, round, &mut latencies)?;
            }
            latencies.floor.add(milliseconds(floor::measure(&host, &self.mount_point("floor", round)?)?));
            let name = format!("bare-engine-{round}");
            latencies.engine.add(milliseconds(engine.start(&host, &name, &self.mount_point("engine", round)?)?));
            if !round.is_multiple_of(2) {
                self.publish_in_turns(&host, round, &mut latencies)?;
            }
            if round.is_multiple_of((plan.rounds / 10).max(1)) {
                progress.say(&format!("round {round} of {}", plan.rounds));
            }
        }
        Ok(latencies)
    }

    /// A new volume, more targets of it, and all of them away again.
    fn publish_in_turns(&self, host: &Kernel, round: usize, latencies: &mut Latencies) -> anyhow::Result<()> {
        let volume = |pod| volume(&format!("round-{round}"), pod);
        latencies.cold.add(milliseconds(self.publish(host, &volume(0))?));
        for pod in 1..=SHARED_PER_ROUND {
            latencies.shared.add(milliseconds(self.publish(host, &volume(pod))?));
        }
        for pod in 1..=SHARED_PER_ROUND {
            latencies.unpublish_shared.add(milliseconds(self.unpublish(&volume(pod))?));
        }
        latencies.unpublish_last.add(milliseconds(self.unpublish(&volume(0))?));
        // The engine's end must not be part of the next measurement.
        self.wait_for_engines(0)
    }

    fn measure_memory(&self, plan: &Plan, progress: &Progress) -> anyhow::Result<Table> {
        let host = Kernel::default();
        let mut table = Table::new([
            "state",
            "node RSS",
            "PSS",
            "threads",
            "mounter RSS",
            "PSS",
            "threads",
            "engines",
            "PSS of one engine",
        ]);
        table.add(self.weigh("idle, just started")?);
        for (engines, targets) in plan.crowds {
            let state = format!("{} volumes: {engines} engines × {targets} targets", engines * targets);
            let needed = RESERVE_KIB + ENGINE_KIB * engines as u64;
            if machine::memory_kib("MemAvailable:") < needed {
                progress.say(&format!("left out, there is not enough memory: {state}"));
                continue;
            }
            progress.say(&state);
            let volumes: Vec<Volume> = (0..engines * targets)
                .map(|it| volume(&format!("crowd-{engines}-{}", it / targets), it % targets))
                .collect();
            for volume in &volumes {
                self.publish(&host, volume)?;
            }
            self.wait_for_engines(engines)?;
            table.add(self.weigh(&state)?);
            for volume in &volumes {
                self.unpublish(volume)?;
            }
            self.wait_for_engines(0)?;
        }
        table.add(self.weigh("idle again")?);
        Ok(table)
    }

    /// One row of the table of memory.
    fn weigh(&self, state: &str) -> anyhow::Result<Vec<String>> {
        let mut cells = vec![state.to_owned()];
        for process in [&self.node, &self.mounter] {
            let memory = footprint::memory(process.pid())?;
            cells.push(figure(mebibytes(memory.resident_kib << 10)));
            cells.push(figure(mebibytes(memory.proportional_kib << 10)));
            cells.push(memory.threads.to_string());
        }
        let mut engines = Samples::default();
        for pid in self.engines() {
            engines.add(mebibytes(footprint::memory(pid)?.proportional_kib << 10));
        }
        cells.push(engines.count().to_string());
        cells.push(figure_or_dash(engines.median()));
        Ok(cells)
    }

    fn publish(&self, host: &Kernel, volume: &Volume) -> anyhow::Result<Duration> {
        let start = Instant::now();
        let target = self.runtime.block_on(self.kubelet.publish(volume)).map_err(|it| refused(&it))?;
        let took = start.elapsed();
        // An answer that comes before the mount works would look fast.
        ensure_alive(&host.probe(&target, Instant::now() + LIMIT))?;
        ensure!(is_mount_point(host, &target)?, "{} was published and is no mount", target.display());
        Ok(took)
    }

    fn unpublish(&self, volume: &Volume) -> anyhow::Result<Duration> {
        let start = Instant::now();
        self.runtime.block_on(self.kubelet.unpublish(volume)).map_err(|it| refused(&it))?;
        let took = start.elapsed();
        let target = self.kubelet.target(volume);
        ensure!(!target.exists(), "{} was unpublished and is still there", target.display());
        Ok(took)
    }

    fn engines(&self) -> Vec<rustix::process::Pid> {
        footprint::descendants_named(self.mounter.pid(), "mount-s3")
    }

    fn wait_for_engines(&self, count: usize) -> anyhow::Result<()> {
        let is_reached = wait_until(Instant::now() + LIMIT, || self.engines().len() == count);
        ensure!(is_reached, "{} engines run instead of {count}", self.engines().len());
        Ok(())
    }

    /// A new one each time: nothing of an earlier mount is known to the kernel.
    fn mount_point(&self, kind: &str, round: usize) -> anyhow::Result<PathBuf> {
        let path = self.fixture.path("mounts").join(format!("{kind}-{round}"));
        fs::create_dir_all(&path).with_context(|| format!("failed to make {}", path.display()))?;
        Ok(path)
    }
}

impl Latencies {
    fn table(&self) -> Table {
        let mut table = Table::new(["ms", "n", "min", "p50", "p90", "p99", "max", "p50 ÷ engine start", "p50 ÷ floor"]);
        for (name, samples) in [
            ("floor", &self.floor),
            ("engine start", &self.engine),
            ("cold publish", &self.cold),
            ("shared publish", &self.shared),
            ("unpublish, others remain", &self.unpublish_shared),
            ("unpublish, the last one", &self.unpublish_last),
        ] {
            let mut cells = vec![name.to_owned(), samples.count().to_string()];
            let figures = [samples.minimum()].into_iter().chain([50, 90, 99].map(|it| samples.percentile(it))).chain([
                samples.maximum(),
                ratio(samples, &self.engine),
                ratio(samples, &self.floor),
            ]);
            cells.extend(figures.map(figure_or_dash));
            table.add(cells);
        }
        table
    }

    fn verdicts(&self) -> Verdicts {
        let mut verdicts = Verdicts::new(["measured"]);
        verdicts.add(
            &format!("shared publish, p99 below {SHARED_LIMIT_MILLISECONDS} ms"),
            [self.shared.percentile(99)],
            |it| it < SHARED_LIMIT_MILLISECONDS,
        );
        verdicts.add(
            &format!("cold publish, p50 at most {COLD_LIMIT} × engine start"),
            [ratio(&self.cold, &self.engine)],
            |it| it <= COLD_LIMIT,
        );
        verdicts
    }
}

pub fn volume(pv: &str, pod: usize) -> Volume {
    Volume::new(BUCKET, &format!("bench-{pv}"), &format!("{pod:08x}-0000-4000-8000-000000000000"))
}

pub fn ratio(samples: &Samples, base: &Samples) -> Option<f64> {
    Some(samples.median()? / base.median()?)
}

pub fn is_mount_point(host: &Kernel, path: &Path) -> anyhow::Result<bool> {
    Ok(host.mount_table()?.at(path).is_some())
}

pub fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

pub fn refused(status: &tonic::Status) -> anyhow::Error {
    anyhow::anyhow!("{:?}: {}", status.code(), status.message())
}
