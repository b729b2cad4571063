//! The benchmark of strategy `pod` in a whole cluster: how long a Pod takes to run with a volume and without one.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::ensure;
use s3csi_testbed::cluster::Cluster;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::image;
use s3csi_testbed::plugin::DRIVER_NAME;
use s3csi_testbed::wait::wait_patiently_until;
use serde_json::Value;

use crate::machine;
use crate::pod_start::{ClusterVolume, LIMIT, PodStartSamples, create_volumes, start_pod, start_table};
use crate::publisher::milliseconds;
use crate::report::{MarkdownTable, Section};
use crate::run::{Options, Progress, Thoroughness};
use crate::statistics::{Samples, figure_or_dash};
use crate::verdicts::Verdicts;

/// Where the release is.
const DRIVER_NAMESPACE: &str = "kube-system";
const MOUNTPOINT_PODS: &str = "/api/v1/namespaces/mount-s3/pods";

/// A second driver, with a warm Mountpoint Pod.
const WARM_DRIVER: &str = "warm.s3csi.test";
const WARM_NAMESPACE: &str = "s3-warm";
const WARM_MOUNTPOINT_PODS: &str = "/api/v1/namespaces/mount-s3-warm/pods";
const WARM_SETTINGS: [&str; 6] = [
    "--set",
    "mountpointPod.warm=1",
    "--set",
    "mountpointPod.namespace=mount-s3-warm",
    "--set",
    "mountpointPod.priorityClassName=mount-s3-warm",
];

const FIRST_LIMIT_MILLISECONDS: f64 = 600.0;
const SECOND_LIMIT_MILLISECONDS: f64 = 100.0;
const WARM_LIMIT_MILLISECONDS: f64 = 100.0;

const EXPLANATION: &str = "\
From the creation of a Pod until its container runs, in milliseconds, in a cluster with kubelet, containerd and scheduler. The container
itself says when it runs, by the kernel's clock, which counts in steps of 10 ms. The API server shows it later (*reported*), because
kubelet looks for changes of containers once a second. *First Pod* uses a volume that no other Pod of the node uses, so its Mountpoint Pod
is created and started before it; *second Pod* uses the same volume while the first one runs; *first Pod, warm pool* adopts a Mountpoint
Pod of a second driver with `mountpointPod.warm: 1`. All of them in turns, in one run. The second table says when the Mountpoint Pod of a
first Pod was created, scheduled and reported as running.";

pub fn measure(fixture: &Fixture, options: &Options, progress: &Progress) -> anyhow::Result<Section> {
    let programs = [
        machine::product_version("s3csi")?,
        machine::product_version("mount-s3")?,
        machine::tool_version("versitygw")?,
        machine::kubernetes_version()?,
    ];
    let head = machine::describe(options, &programs);
    let rounds = options.repetitions.unwrap_or(match options.thoroughness {
        Thoroughness::Quick => 2,
        Thoroughness::Full => 20,
    });
    progress.say("starting a cluster");
    let archive = fixture.path("s3csi.tar");
    image::write(&archive)?;
    let cluster = Cluster::start("bench-start", 1)?;
    cluster.load(&archive)?;
    progress.say("installing the driver");
    cluster.install_driver(DRIVER_NAMESPACE, DRIVER_NAME, &[])?;
    cluster.install_driver(WARM_NAMESPACE, WARM_DRIVER, &WARM_SETTINGS)?;

    let bench = Bench { cluster: &cluster };
    // Fills the caches of all parts.
    bench.round(0, &mut Latencies::default())?;
    let mut latencies = Latencies::default();
    for round in 1..=rounds {
        bench.round(round, &mut latencies)?;
        progress.say(&format!("round {round} of {rounds}"));
    }
    let (table, phases, verdicts) = (latencies.table(), latencies.phases(), latencies.verdicts());
    Ok(Section {
        text: format!("## Pods that start\n\n{head}\n{EXPLANATION}\n\n{table}\n{phases}\n{verdicts}"),
        failures: Vec::new(),
    })
}

struct Bench<'a> {
    cluster: &'a Cluster,
}

#[derive(Default)]
struct Latencies {
    plain: PodStartSamples,
    first: PodStartSamples,
    second: PodStartSamples,
    warm: PodStartSamples,
    /// When something was first seen of the Mountpoint Pod of a first Pod.
    phases: BTreeMap<Phase, Samples>,
}

/// What the API server shows of a Mountpoint Pod, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    Created,
    Scheduled,
    Running,
}

impl Bench<'_> {
    fn round(&self, round: usize, latencies: &mut Latencies) -> anyhow::Result<()> {
        let (volume, warm_volume) = (format!("start-{round}"), format!("warm-{round}"));
        let volumes = [(&volume, DRIVER_NAME), (&warm_volume, WARM_DRIVER)];
        create_volumes(
            self.cluster,
            &volumes.map(|(name, driver)| ClusterVolume { name, driver, mount_options: &[] }),
        )?;
        let names = ["plain", "first", "second", "warm"].map(|it| format!("{it}-{round}"));
        let [plain, first, second, warm] = &names;
        self.wait_until_quiet()?;
        let start = |name: &str, claim: Option<&str>| start_pod(self.cluster, name, claim, |_| {});
        latencies.plain.add(&start(plain, None)?);
        let mut phases = BTreeMap::new();
        latencies.first.add(&start_pod(self.cluster, first, Some(&volume), |since| self.look(since, &mut phases))?);
        for (phase, at) in phases {
            latencies.phases.entry(phase).or_default().add(at);
        }
        latencies.second.add(&start(second, Some(&volume))?);
        latencies.warm.add(&start(warm, Some(&warm_volume))?);
        self.cluster.kubectl(&["delete", "pods", plain, first, second, warm, "--timeout=300s"])?;
        Ok(())
    }

    /// The end of a round must not be part of the next one, which needs a warm Mountpoint Pod that runs.
    fn wait_until_quiet(&self) -> anyhow::Result<()> {
        let is_warm = |it: &Value| {
            it["metadata"]["labels"][format!("{WARM_DRIVER}/warm")].is_string() && it["status"]["phase"] == "Running"
        };
        let is_quiet = || {
            let warm = self.pods(WARM_MOUNTPOINT_PODS).unwrap_or_default();
            self.pods(MOUNTPOINT_PODS).is_some_and(|it| it.is_empty()) && warm.len() == 1 && warm.iter().all(is_warm)
        };
        ensure!(wait_patiently_until(Instant::now() + LIMIT, is_quiet), "Mountpoint Pods do not end, or none is warm");
        Ok(())
    }

    /// Notes what is new about the only Mountpoint Pod.
    fn look(&self, since: Duration, phases: &mut BTreeMap<Phase, f64>) {
        let pods = self.pods(MOUNTPOINT_PODS).unwrap_or_default();
        let Some(pod) = pods.first() else { return };
        let at = milliseconds(since);
        let seen = [
            (Phase::Created, true),
            (Phase::Scheduled, pod["spec"]["nodeName"].is_string()),
            (Phase::Running, pod["status"]["phase"] == "Running"),
        ];
        for (phase, _) in seen.into_iter().filter(|(_, is_seen)| *is_seen) {
            phases.entry(phase).or_insert(at);
        }
    }

    fn pods(&self, list: &str) -> Option<Vec<Value>> {
        self.cluster.get(list)?["items"].as_array().cloned()
    }
}

impl Latencies {
    fn table(&self) -> MarkdownTable {
        let rows = [
            ("Pod without a volume", &self.plain),
            ("first Pod", &self.first),
            ("second Pod", &self.second),
            ("first Pod, warm pool", &self.warm),
        ];
        start_table(&rows, &self.plain)
    }

    fn phases(&self) -> MarkdownTable {
        let mut table = MarkdownTable::new(["Mountpoint Pod, ms after the workload", "n", "p50", "p90"]);
        for (phase, samples) in &self.phases {
            let cells = [format!("{phase:?}").to_lowercase(), samples.count().to_string()];
            let figures = [samples.median(), samples.percentile(90)];
            table.add(cells.into_iter().chain(figures.map(figure_or_dash)));
        }
        table
    }

    fn verdicts(&self) -> Verdicts {
        let mut verdicts = Verdicts::new(["measured"]);
        let rows = [
            ("first Pod", &self.first, FIRST_LIMIT_MILLISECONDS),
            ("second Pod", &self.second, SECOND_LIMIT_MILLISECONDS),
            ("first Pod, warm pool", &self.warm, WARM_LIMIT_MILLISECONDS),
        ];
        for (name, samples, limit) in rows {
            let target = format!("{name}: p50 at most {limit} ms above a Pod without a volume");
            verdicts.add(&target, [samples.above(&self.plain)], |it| it <= limit);
        }
        verdicts
    }
}
