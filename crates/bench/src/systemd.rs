//! The systemd benchmark: what kubelet waits for when systemd runs the engines, against the engine's own start in the background.

use anyhow::{Context as _, ensure};
use s3csi_driver::host::Kernel;
use tokio::runtime::Runtime;

use crate::latency::BareEngine;
use crate::publisher::{Publisher, latency_table, milliseconds, volume};
use crate::report::{MarkdownTable, Section};
use crate::rounds::{self, RoundPart};
use crate::run::{Options, Progress};
use crate::scratch::Scratch;
use crate::statistics::Samples;
use crate::verdicts::Verdicts;
use crate::{at_once, machine};
use s3csi_testbed::environment;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::plugin::{Plugin, PluginStrategy};

/// What a publish may cost above the engine's own start.
const EXTRA_MILLISECONDS: f64 = 10.0;

const EXPLANATION: &str = "\
How long kubelet waits where systemd runs the engines, in milliseconds. *Engine start* is `mount-s3 --keep-alive` started by hand in the
background, as root, with the flags and the environment of a publish, until it has returned and the mount answers; *publish* is
`NodePublishVolume` for a new volume: a transient unit, its terminal, its signals and a look at the mount come on top;
*republish* is the same call again, which kubelet makes every minute. All of them in turns, in one run.";

pub fn measure(fixture: &Fixture, options: &Options, progress: &Progress) -> anyhow::Result<Section> {
    ensure!(environment::is_beside_systemd(), "there is no systemd here; run it with: scripts/with-systemd.sh");
    let programs = [
        machine::product_version("s3csi")?,
        machine::product_version("mount-s3")?,
        machine::tool_version("versitygw")?,
        machine::systemd_version(),
    ];
    let head = machine::describe(options, &programs);
    progress.say("starting versitygw and node plugin");
    let runtime = Runtime::new().context("failed to start the async runtime")?;
    // Connections are made in the background of this runtime.
    let _entered = runtime.enter();
    let scratch = Scratch::prepare(fixture)?;
    let mut plugin = Plugin::new(fixture, scratch.store())?;
    plugin.set_strategy(PluginStrategy::Systemd);
    let node = plugin.start_node()?;
    let engine = BareEngine::prepare(fixture, &plugin, scratch.store())?;
    let publisher = Publisher { runtime: &runtime, kubelet: plugin.kubelet(), host: Kernel::default() };
    let bench = Bench { fixture, publisher, engine };

    let mut latencies = Latencies::default();
    rounds::alternate(rounds::count(options), progress, |round, part| match part {
        RoundPart::Publish => bench.publish_in_turns(round, &mut latencies),
        RoundPart::Reference => bench.start_engine(round, &mut latencies),
    })?;
    progress.say("volumes at once");
    let memory = at_once::measure(&bench.publisher, &node, options)?;
    rounds::stop(&node)?;
    let (table, verdicts) = (latencies.table(), latencies.verdicts());
    Ok(Section {
        text: format!(
            "## Publish by systemd\n\n{head}\n{EXPLANATION}\n\n{table}\n{verdicts}\n{}\n\n{memory}",
            at_once::EXPLANATION
        ),
        failures: Vec::new(),
    })
}

struct Bench<'a> {
    fixture: &'a Fixture,
    publisher: Publisher<'a>,
    engine: BareEngine<'a>,
}

#[derive(Default)]
struct Latencies {
    engine: Samples,
    publish: Samples,
    republish: Samples,
    unpublish: Samples,
}

impl Bench<'_> {
    fn start_engine(&self, round: usize, latencies: &mut Latencies) -> anyhow::Result<()> {
        let at = rounds::mount_point(self.fixture, "engine", round)?;
        let took = self.engine.start_in_background(&self.publisher.host, &format!("bare-engine-{round}"), &at)?;
        latencies.engine.add(milliseconds(took));
        Ok(())
    }

    fn publish_in_turns(&self, round: usize, latencies: &mut Latencies) -> anyhow::Result<()> {
        let volume = volume(&format!("round-{round}"), 0);
        latencies.publish.add(milliseconds(self.publisher.publish(&volume)?));
        latencies.republish.add(milliseconds(self.publisher.publish(&volume)?));
        latencies.unpublish.add(milliseconds(self.publisher.unpublish(&volume)?));
        Ok(())
    }
}

impl Latencies {
    fn table(&self) -> MarkdownTable {
        let rows = [
            ("engine start", &self.engine),
            ("publish", &self.publish),
            ("republish", &self.republish),
            ("unpublish", &self.unpublish),
        ];
        latency_table(&rows, &[("engine start", &self.engine)])
    }

    fn verdicts(&self) -> Verdicts {
        let extra = self.publish.median().zip(self.engine.median()).map(|(publish, engine)| publish - engine);
        let mut verdicts = Verdicts::new(["measured"]);
        let target = format!("publish, p50 less than {EXTRA_MILLISECONDS} ms above engine start");
        verdicts.add(&target, [extra], |it| it < EXTRA_MILLISECONDS);
        verdicts
    }
}
