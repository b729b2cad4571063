//! The benchmark of strategy `pod` on the node: what kubelet waits for when a Mountpoint Pod runs already, against the engine's own
//! start. Mounters and engines are real, and so is the API server; its objects are written by us.

use std::collections::BTreeMap;
use std::fs;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use s3csi_core::names::mountpoint_pod_name;
use s3csi_driver::host::Kernel;
use serde_json::json;
use tokio::runtime::Runtime;

use crate::latency::{BareEngine, LIMIT};
use crate::publisher::{Publisher, latency_table, milliseconds, volume};
use crate::report::{MarkdownTable, Section};
use crate::rounds::{self, RoundPart};
use crate::run::{Options, Progress, Thoroughness};
use crate::scratch::Scratch;
use crate::statistics::{Samples, figure, figure_or_dash, mebibytes};
use crate::verdicts::Verdicts;
use crate::{footprint, machine};
use s3csi_testbed::cluster::{Administrator, AttachmentTemplate, ControlPlane};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::plugin::{DRIVER_NAME, Plugin, PluginStrategy};
use s3csi_testbed::process::Process;
use s3csi_testbed::wait::wait_until;

const NODE: &str = "node-1";
const NAMESPACE: &str = "mount-s3";

/// Shared publishes are quick and their p99 has a target, so there are more of them.
const SHARED_PER_ROUND: usize = 5;

/// Of all processes that many idle mounts need, and of those of one mount.
const IDLE_LIMIT_MEBIBYTES: f64 = 700.0;
const IDLE_MOUNT_LIMIT_MEBIBYTES: f64 = 12.0;

const EXPLANATION: &str = "\
How long kubelet waits where each source has a Mountpoint Pod, in milliseconds. The node plugin and the mounters are processes
beside a real API server, and the Mountpoint Pod runs and is assigned before kubelet asks. *Engine start* is `mount-s3` on a
bare FUSE mount, as above; *first publish* is `NodePublishVolume` for the first workload of a Mountpoint Pod, *shared publish* that
of another one; *end* is from the controller's annotation `needs-unmount` until the mounter has ended. All of them in turns,
in one run.";

const IDLE_EXPLANATION: &str = "\
Memory of one node with mounts that do nothing, each with a Mountpoint Pod of its own: PSS in MiB. *One mount* is the engine and the
mounter that supervises it.";

pub fn measure(fixture: &Fixture, options: &Options, progress: &Progress) -> anyhow::Result<Section> {
    let programs = [
        machine::product_version("s3csi")?,
        machine::product_version("mount-s3")?,
        machine::tool_version("versitygw")?,
        machine::kubernetes_version()?,
    ];
    let head = machine::describe(options, &programs);
    progress.say("starting versitygw, the API server and the node plugin");
    let runtime = Runtime::new().context("failed to start the async runtime")?;
    // Connections are made in the background of this runtime.
    let _entered = runtime.enter();
    let scratch = Scratch::prepare(fixture)?;
    let control_plane = ControlPlane::start("bench-pod")?;
    let administrator = runtime.block_on(Administrator::of(&control_plane))?;
    runtime.block_on(administrator.prepare_for_nodes(DRIVER_NAME, NAMESPACE))?;
    let mut plugin = Plugin::new(fixture, scratch.store())?;
    plugin.set_strategy(PluginStrategy::Pod { kubeconfig: control_plane.kubeconfig() });
    plugin.set_node_name(NODE);
    let node = plugin.start_node()?;
    let engine = BareEngine::prepare(fixture, &plugin, scratch.store())?;
    let publisher = Publisher { runtime: &runtime, kubelet: plugin.kubelet(), host: Kernel::default() };
    let bench = Bench { fixture, plugin: &plugin, node, publisher, engine, administrator };

    let idle = bench.measure_idle(options, progress)?;
    let latencies = bench.rounds(rounds::count(options), progress)?;
    rounds::stop(&bench.node)?;
    let (table, verdicts, idle) = (latencies.table(), latencies.verdicts(), idle.text());
    Ok(Section {
        text: format!("## Publish by Mountpoint Pods\n\n{head}\n{EXPLANATION}\n\n{table}\n{verdicts}\n{idle}"),
        failures: Vec::new(),
    })
}

struct Bench<'a> {
    fixture: &'a Fixture,
    plugin: &'a Plugin<'a>,
    node: Process,
    publisher: Publisher<'a>,
    engine: BareEngine<'a>,
    administrator: Administrator,
}

/// A Mountpoint Pod for the workloads of one volume.
struct RunningPod {
    volume: String,
    name: String,
    uid: String,
    mounter: Process,
}

#[derive(Default)]
struct Latencies {
    engine: Samples,
    first: Samples,
    shared: Samples,
    unpublish: Samples,
    end: Samples,
}

impl Bench<'_> {
    fn rounds(&self, rounds: usize, progress: &Progress) -> anyhow::Result<Latencies> {
        let mut latencies = Latencies::default();
        // Each is ready one round ahead, so that the node's watches have told of it when kubelet asks.
        let mut next = self.run_pod("round-1")?;
        rounds::alternate(rounds, progress, |round, part| match part {
            RoundPart::Publish => {
                let pod = std::mem::replace(&mut next, self.run_pod(&format!("round-{}", round + 1))?);
                self.publish_in_turns(pod, &mut latencies)
            }
            RoundPart::Reference => self.start_engine(round, &mut latencies),
        })?;
        self.retire(next)?;
        Ok(latencies)
    }

    /// A Mountpoint Pod that runs, and the controller's word whom it serves.
    fn run_pod(&self, pv: &str) -> anyhow::Result<RunningPod> {
        let volumes: Vec<_> = (0..=SHARED_PER_ROUND).map(|it| volume(pv, it)).collect();
        let persistent_volume = &volumes[0].pv;
        let name = mountpoint_pod_name(&volumes[0].pod_uid.parse()?, &persistent_volume.parse()?);
        let runtime = self.publisher.runtime;
        let uid = runtime.block_on(self.administrator.create_mountpoint_pod(NAMESPACE, &name, Some(NODE)))?;
        self.plugin.make_communication_directory(&uid)?;
        let mounter = self.plugin.start_mounter_of_pod(&uid, &[])?;
        runtime.block_on(self.administrator.set_pod_status(NAMESPACE, &name, json!({ "phase": "Running" })))?;
        let entries = BTreeMap::from([(name.clone(), volumes.iter().map(|it| it.pod_uid.clone()).collect())]);
        let order = AttachmentTemplate { driver: DRIVER_NAME, node: NODE, persistent_volume, entries: &entries };
        runtime.block_on(self.administrator.attach(order))?;
        Ok(RunningPod { volume: pv.to_owned(), name, uid, mounter })
    }

    /// Mounts of many volumes at once that have done nothing but answer.
    fn measure_idle(&self, options: &Options, progress: &Progress) -> anyhow::Result<IdleMounts> {
        let count = match options.thoroughness {
            Thoroughness::Quick => 10,
            Thoroughness::Full => 100,
        };
        progress.say(&format!("{count} idle mounts"));
        let pods: Vec<RunningPod> =
            (0..count).map(|it| self.run_pod(&format!("idle-{it}"))).collect::<anyhow::Result<_>>()?;
        for pod in &pods {
            self.publisher.publish(&volume(&pod.volume, 0))?;
        }
        let proportional = |pid| Ok(mebibytes(footprint::memory(pid)?.proportional_kib << 10));
        let mut idle = IdleMounts { node: proportional(self.node.pid())?, ..IdleMounts::default() };
        for pod in &pods {
            let processes = footprint::tree(pod.mounter.pid());
            let memory: Vec<f64> = processes.into_iter().map(proportional).collect::<anyhow::Result<_>>()?;
            let [mounter, engine] = memory[..] else {
                anyhow::bail!("{} processes serve a mount, not a mounter and an engine", memory.len());
            };
            idle.mounter.add(mounter);
            idle.engine.add(engine);
            idle.mount.add(mounter + engine);
            idle.mounts += mounter + engine;
        }
        for pod in pods {
            self.publisher.unpublish(&volume(&pod.volume, 0))?;
            self.retire(pod)?;
        }
        Ok(idle)
    }

    fn start_engine(&self, round: usize, latencies: &mut Latencies) -> anyhow::Result<()> {
        let at = rounds::mount_point(self.fixture, "engine", round)?;
        let took = self.engine.start(&self.publisher.host, &format!("bare-engine-{round}"), &at)?;
        latencies.engine.add(milliseconds(took));
        Ok(())
    }

    /// All workloads of a Mountpoint Pod, all of them away again, and then the Pod, too.
    fn publish_in_turns(&self, pod: RunningPod, latencies: &mut Latencies) -> anyhow::Result<()> {
        let volumes: Vec<_> = (0..=SHARED_PER_ROUND).map(|it| volume(&pod.volume, it)).collect();
        latencies.first.add(milliseconds(self.publisher.publish(&volumes[0])?));
        for volume in &volumes[1..] {
            latencies.shared.add(milliseconds(self.publisher.publish(volume)?));
        }
        for volume in &volumes {
            latencies.unpublish.add(milliseconds(self.publisher.unpublish(volume)?));
        }
        latencies.end.add(self.retire(pod)?);
        Ok(())
    }

    /// What the controller and kubelet do after the last workload. In milliseconds.
    fn retire(&self, RunningPod { volume: pv, name, uid, mounter }: RunningPod) -> anyhow::Result<f64> {
        let Bench { administrator, publisher: Publisher { runtime, .. }, .. } = self;
        let needs_unmount = format!("{DRIVER_NAME}/needs-unmount");
        let start = Instant::now();
        runtime.block_on(administrator.annotate_pod(NAMESPACE, &name, &needs_unmount, "true"))?;
        let status = mounter.wait_precisely(LIMIT).with_context(|| format!("{name} does not end"))?;
        let took = milliseconds(start.elapsed());
        ensure!(status.success(), "{name} ended with {status}: {mounter}");
        let sources = self.plugin.sources();
        // Looked up in the directory above: a look at the source itself would ask its engine.
        let is_there = || fs::read_dir(&sources).into_iter().flatten().flatten().any(|it| *it.file_name() == *name);
        ensure!(wait_until(Instant::now() + LIMIT, || !is_there()), "the source of {name} is still there");
        runtime.block_on(administrator.remove_pod(NAMESPACE, &name))?;
        runtime.block_on(administrator.detach(DRIVER_NAME, NODE, &volume(&pv, 0).pv))?;
        let directory = self.plugin.kubelet_root().join("pods").join(uid);
        fs::remove_dir_all(directory).context("failed to remove the directory of a Mountpoint Pod")?;
        Ok(took)
    }
}

/// PSS in MiB.
#[derive(Default)]
struct IdleMounts {
    node: f64,
    mounter: Samples,
    engine: Samples,
    /// Mounter and engine of each.
    mount: Samples,
    /// Of all of them together.
    mounts: f64,
}

impl IdleMounts {
    fn text(&self) -> String {
        let Self { node, mounter, engine, mount, mounts } = self;
        let (count, all) = (mount.count(), node + mounts);
        let mut table = MarkdownTable::new(["MiB", "n", "p50", "max", "all"]);
        table.add(["node plugin", "1", "–", "–", &figure(*node)]);
        for (name, samples) in [("mounter", mounter), ("engine", engine), ("one mount", mount)] {
            let figures = [samples.median(), samples.maximum()].map(figure_or_dash);
            let all = if name == "one mount" { figure(*mounts) } else { "–".to_owned() };
            table.add([name.to_owned(), samples.count().to_string()].into_iter().chain(figures).chain([all]));
        }
        let mut verdicts = Verdicts::new(["measured"]);
        let target = format!("{count} idle mounts: all processes of the node, PSS below {IDLE_LIMIT_MEBIBYTES} MiB");
        verdicts.add(&target, [Some(all)], |it| it < IDLE_LIMIT_MEBIBYTES);
        let target = format!("one idle mount of {count}: PSS at most {IDLE_MOUNT_LIMIT_MEBIBYTES} MiB");
        verdicts.add(&target, [mount.maximum()], |it| it <= IDLE_MOUNT_LIMIT_MEBIBYTES);
        format!("{IDLE_EXPLANATION}\n\n{table}\n{verdicts}")
    }
}

impl Latencies {
    fn table(&self) -> MarkdownTable {
        let rows = [
            ("engine start", &self.engine),
            ("first publish", &self.first),
            ("shared publish", &self.shared),
            ("unpublish", &self.unpublish),
            ("end", &self.end),
        ];
        latency_table(&rows, &[("engine start", &self.engine)])
    }

    fn verdicts(&self) -> Verdicts {
        rounds::verdicts(("first publish", &self.first), &self.shared, &self.engine)
    }
}
