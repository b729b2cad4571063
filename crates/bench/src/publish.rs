//! The publish benchmark: what kubelet waits for, against what the engine and the kernel need by themselves; and what the
//! node's two processes weigh.

use std::time::Instant;

use anyhow::{Context as _, ensure};
use s3csi_driver::host::Kernel;
use tokio::runtime::Runtime;

use crate::latency::{BareEngine, LIMIT};
use crate::publisher::{Publisher, latency_table, milliseconds, ratio, volume};
use crate::report::{MarkdownTable, Section};
use crate::rounds::{self, RoundPart};
use crate::run::{Options, Progress, Thoroughness};
use crate::scratch::Scratch;
use crate::statistics::{Samples, figure, figure_or_dash, mebibytes};
use crate::verdicts::Verdicts;
use crate::{floor, footprint, machine};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::kubelet::CsiVolume;
use s3csi_testbed::plugin::Plugin;
use s3csi_testbed::process::Process;
use s3csi_testbed::wait::wait_until;

/// Shared publishes are quick and their p99 has a target, so there are more of them.
const SHARED_PER_ROUND: usize = 5;

/// An engine that has served nothing takes less; there must be something left for the machine.
const ENGINE_KIB: u64 = 48 << 10;
const RESERVE_KIB: u64 = 2 << 20;

/// The first and the last publishes of many are compared.
const COMPARED: usize = 100;

/// What a publish may cost more among many volumes than with none.
const MANY_LIMIT: f64 = 1.5;
const MANY_REPUBLISH_LIMIT_MILLISECONDS: f64 = 20.0;
const MANY_MEMORY_LIMIT_MEBIBYTES: f64 = 64.0;

struct Plan {
    rounds: usize,
    /// Engines, and targets per engine.
    crowds: [(usize, usize); 2],
    /// Volumes at once, each with its engine.
    many: usize,
}

impl Plan {
    fn of(options: &Options) -> Self {
        let (crowds, many) = match options.thoroughness {
            Thoroughness::Quick => ([(2, 5), (10, 1)], 20),
            Thoroughness::Full => ([(10, 10), (100, 1)], 1000),
        };
        Self { rounds: rounds::count(options), crowds, many }
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
    let publisher = Publisher { runtime: &runtime, kubelet: plugin.kubelet(), host: Kernel::default() };
    let bench = Bench { fixture, plugin: &plugin, publisher, mounter, node };

    let memory = bench.measure_memory(&plan, progress)?;
    let latencies = bench.measure_latencies(&plan, &scratch, progress)?;
    // Last: ext4 looks for a new inode among all that were deleted in the last seconds.
    let many = bench.measure_many(plan.many, progress)?;
    for process in [&bench.node, &bench.mounter] {
        rounds::stop(process)?;
    }

    let text = format!(
        "## Publish\n\n{head}\n{EXPLANATION}\n\n{}\n{}\n{MEMORY_EXPLANATION}\n\n{memory}\n{}",
        latencies.table(),
        latencies.verdicts(),
        many.text(),
    );
    Ok(Section { text, failures: Vec::new() })
}

const EXPLANATION: &str = "\
How long kubelet waits, in milliseconds. *Floor* is the bare FUSE mount with a server that answers INIT and GETATTR;
*engine start* is `mount-s3` on such a mount, with the flags, the environment and the user of a publish, until the mount
answers; *cold publish* is `NodePublishVolume` for a new volume, *shared publish* one more target of a volume that is served
already. All of them in turns, in one run.";

const MANY_EXPLANATION: &str = "\
Many volumes on one node, each with an engine of its own: the first publishes against the last ones, which find a mount table with two
mounts for each of the others; and the call that kubelet repeats for every volume.";

const MEMORY_EXPLANATION: &str = "\
Memory in MiB (RSS, PSS) and threads of the node's two processes, and what an engine that has done nothing yet adds.";

struct Bench<'a> {
    fixture: &'a Fixture,
    plugin: &'a Plugin<'a>,
    publisher: Publisher<'a>,
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
        let host = &self.publisher.host;
        let engine = BareEngine::prepare(self.fixture, self.plugin, scratch.store())?;
        let mut latencies = Latencies::default();
        rounds::alternate(plan.rounds, progress, |round, part| match part {
            RoundPart::Publish => self.publish_in_turns(round, &mut latencies),
            RoundPart::Reference => {
                let at = |kind| rounds::mount_point(self.fixture, kind, round);
                latencies.floor.add(milliseconds(floor::measure(host, &at("floor")?)?));
                let name = format!("bare-engine-{round}");
                latencies.engine.add(milliseconds(engine.start(host, &name, &at("engine")?)?));
                Ok(())
            }
        })?;
        Ok(latencies)
    }

    /// A new volume, more targets of it, and all of them away again.
    fn publish_in_turns(&self, round: usize, latencies: &mut Latencies) -> anyhow::Result<()> {
        let volume = |pod| volume(&format!("round-{round}"), pod);
        latencies.cold.add(milliseconds(self.publisher.publish(&volume(0))?));
        for pod in 1..=SHARED_PER_ROUND {
            latencies.shared.add(milliseconds(self.publisher.publish(&volume(pod))?));
        }
        for pod in 1..=SHARED_PER_ROUND {
            latencies.unpublish_shared.add(milliseconds(self.publisher.unpublish(&volume(pod))?));
        }
        latencies.unpublish_last.add(milliseconds(self.publisher.unpublish(&volume(0))?));
        // The engine's end must not be part of the next measurement.
        self.wait_for_engines(0)
    }

    fn measure_memory(&self, plan: &Plan, progress: &Progress) -> anyhow::Result<MarkdownTable> {
        let mut table = MarkdownTable::new([
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
            let volumes: Vec<CsiVolume> = (0..engines * targets)
                .map(|it| volume(&format!("crowd-{engines}-{}", it / targets), it % targets))
                .collect();
            for volume in &volumes {
                self.publisher.publish(volume)?;
            }
            self.wait_for_engines(engines)?;
            table.add(self.weigh(&state)?);
            for volume in &volumes {
                self.publisher.unpublish(volume)?;
            }
            self.wait_for_engines(0)?;
        }
        table.add(self.weigh("idle again")?);
        Ok(table)
    }

    fn measure_many(&self, count: usize, progress: &Progress) -> anyhow::Result<ManyVolumes> {
        progress.say(&format!("{count} volumes at once"));
        let mut many = ManyVolumes { count, compared: COMPARED.min(count / 2), ..ManyVolumes::default() };
        let volumes: Vec<CsiVolume> = (0..count).map(|it| volume(&format!("many-{it}"), 0)).collect();
        for (number, volume) in volumes.iter().enumerate() {
            let took = milliseconds(self.publisher.publish(volume)?);
            if number < many.compared {
                many.first.add(took);
            } else if count - many.compared <= number {
                many.last.add(took);
            }
        }
        for volume in &volumes {
            many.republish.add(milliseconds(self.publisher.publish(volume)?));
        }
        many.node_mebibytes = Some(mebibytes(footprint::memory(self.node.pid())?.resident_kib << 10));
        for volume in &volumes {
            many.unpublish.add(milliseconds(self.publisher.unpublish(volume)?));
        }
        self.wait_for_engines(0)?;
        Ok(many)
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

    fn engines(&self) -> Vec<rustix::process::Pid> {
        footprint::descendants_named(self.mounter.pid(), "mount-s3")
    }

    fn wait_for_engines(&self, count: usize) -> anyhow::Result<()> {
        let is_reached = wait_until(Instant::now() + LIMIT, || self.engines().len() == count);
        ensure!(is_reached, "{} engines run instead of {count}", self.engines().len());
        Ok(())
    }
}

/// What many volumes on one node cost.
#[derive(Default)]
struct ManyVolumes {
    count: usize,
    compared: usize,
    first: Samples,
    last: Samples,
    republish: Samples,
    unpublish: Samples,
    node_mebibytes: Option<f64>,
}

impl ManyVolumes {
    fn text(&self) -> String {
        let Self { count, compared, first, last, republish, unpublish, node_mebibytes } = self;
        let names = [format!("the first {compared}"), format!("the last {compared} of {count}")];
        let [first_name, last_name] = names.each_ref().map(String::as_str);
        let rows = [(first_name, first), (last_name, last), ("republish", republish), ("unpublish", unpublish)];
        let table = latency_table(&rows, &[(first_name, first)]);
        let mut verdicts = Verdicts::new(["measured"]);
        let target = format!("{count} volumes: the last publishes, p50 at most {MANY_LIMIT} × the first ones");
        verdicts.add(&target, [ratio(last, first)], |it| it <= MANY_LIMIT);
        let target = format!("{count} volumes: republish, p99 below {MANY_REPUBLISH_LIMIT_MILLISECONDS} ms");
        verdicts.add(&target, [republish.percentile(99)], |it| it < MANY_REPUBLISH_LIMIT_MILLISECONDS);
        let target = format!("{count} volumes: node plugin, RSS below {MANY_MEMORY_LIMIT_MEBIBYTES} MiB");
        verdicts.add(&target, [*node_mebibytes], |it| it < MANY_MEMORY_LIMIT_MEBIBYTES);
        format!("{MANY_EXPLANATION}\n\n{table}\n{verdicts}")
    }
}

impl Latencies {
    fn table(&self) -> MarkdownTable {
        let rows = [
            ("floor", &self.floor),
            ("engine start", &self.engine),
            ("cold publish", &self.cold),
            ("shared publish", &self.shared),
            ("unpublish, others remain", &self.unpublish_shared),
            ("unpublish, the last one", &self.unpublish_last),
        ];
        latency_table(&rows, &[("engine start", &self.engine), ("floor", &self.floor)])
    }

    fn verdicts(&self) -> Verdicts {
        rounds::verdicts(("cold publish", &self.cold), &self.shared, &self.engine)
    }
}
