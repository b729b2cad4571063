//! The benchmark of the controller: how soon a workload has its attachment and its Mountpoint Pod, what the API server is asked for it,
//! and what the controller weighs. Beside a real API server; there are no nodes, so every Pod stays Pending.

mod observations;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use futures::{StreamExt as _, TryStreamExt as _};
use serde_json::json;
use tokio::runtime::Runtime;

use crate::publisher::milliseconds;
use crate::report::{MarkdownTable, Section};
use crate::run::{Options, Progress, Thoroughness};
use crate::statistics::{Samples, figure, figure_or_dash, mebibytes};
use crate::verdicts::Verdicts;
use crate::{footprint, machine};
use observations::{Observations, ObservedTimes};
use s3csi_testbed::cluster::{
    Administrator, AuditEvent, CONTROLLER_ACCOUNT, ControlPlane, ControllerOptions, VolumeTemplate, WorkloadTemplate,
};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::plugin::DRIVER_NAME;
use s3csi_testbed::process::Process;
use s3csi_testbed::wait::wait_until;

/// Of workloads.
const NAMESPACE: &str = "bench";
const MOUNTPOINT_NAMESPACE: &str = "mount-s3";

/// On every node there is at most one source of each.
const VOLUMES: usize = 50;

/// As quick as Kubernetes' own controllers would create Pods, and quicker.
const CREATED_AT_ONCE: usize = 16;

/// Many times what the slowest machine needs: something is stuck.
const LIMIT: Duration = Duration::from_mins(20);

/// When no call was made for this long, none will come.
const QUIET: Duration = Duration::from_secs(3);

const ALONE_LIMIT: f64 = 5.0;
/// One each for attachment, Mountpoint Pod, Event and status, and a tenth for what was written twice.
const CALLS_LIMIT: f64 = 4.4;
/// Until all are served, against until all are created.
const SERVED_LIMIT: f64 = 1.5;
const MEMORY_LIMIT_MEBIBYTES: f64 = 64.0;

const EXPLANATION: &str = "\
A workload is created bound to a node, so it is scheduled when the API server has answered; from then on, in milliseconds, until a watch
shows the attachment that names it, and until it shows the Mountpoint Pod. *Create* is that first call itself, which says what one call
costs. One workload: one after the other, each when the one before is served. More: as quickly as sixteen connections create them.
There are no nodes: nothing is pulled, started or mounted. The API server, etcd, the controller and the benchmark share one machine.";

const CALLS_EXPLANATION: &str = "\
What the API server was asked by the controller, per workload, from its audit log; lists, watches and the Lease are left out.";

const MEMORY_EXPLANATION: &str = "\
Memory in MiB (RSS, PSS) and threads of the controller.";

/// Workloads that come at once.
struct Crowd {
    workloads: usize,
    per_mountpoint_pod: usize,
    /// One after the other instead.
    is_one_by_one: bool,
}

impl Crowd {
    fn all(options: &Options) -> Vec<Self> {
        let (alone, some, many) = match options.thoroughness {
            Thoroughness::Quick => (3, 10, 40),
            Thoroughness::Full => (20, 100, 5000),
        };
        let alone = options.repetitions.unwrap_or(alone);
        [(alone, 1, true), (some, 1, false), (many, 1, false), (many, 10, false)]
            .map(|(workloads, per_mountpoint_pod, is_one_by_one)| Self { workloads, per_mountpoint_pod, is_one_by_one })
            .into()
    }

    fn title(&self) -> String {
        let Self { workloads, per_mountpoint_pod, is_one_by_one } = self;
        match per_mountpoint_pod {
            _ if *is_one_by_one => format!("1 ({workloads} times)"),
            1 => format!("{workloads}"),
            many => format!("{workloads}, {many} per Mountpoint Pod"),
        }
    }

    fn mountpoint_pods(&self) -> usize {
        self.workloads / self.per_mountpoint_pod
    }
}

pub fn measure(_: &Fixture, options: &Options, progress: &Progress) -> anyhow::Result<Section> {
    let head = machine::describe(options, &[machine::product_version("s3csi")?, machine::kubernetes_version()?]);
    progress.say("starting the API server and the controller");
    let runtime = Runtime::new().context("failed to start the async runtime")?;
    let control_plane = ControlPlane::start("bench-controller")?;
    let kubeconfig = control_plane.install_controller()?;
    let flags = ["--lease-namespace=kube-system", "--mountpoint-priority-class-name=mount-s3-critical"];
    let controller = control_plane.start_controller(&ControllerOptions {
        name: "controller",
        kubeconfig: &kubeconfig,
        driver: DRIVER_NAME,
        namespace: MOUNTPOINT_NAMESPACE,
        flags: &flags,
    })?;
    let bench = runtime.block_on(Bench::prepare(&control_plane, controller))?;

    let mut results = Vec::new();
    let mut memory = MarkdownTable::new(["state", "RSS", "PSS", "threads"]);
    let idle = bench.memory()?;
    memory.add(row("idle, just started", &idle));
    for (number, crowd) in Crowd::all(options).into_iter().enumerate() {
        progress.say(&format!("workloads: {}", crowd.title()));
        let result = runtime.block_on(bench.run(number, crowd))?;
        let total: usize =
            results.iter().map(|it: &Outcome| it.crowd.workloads).sum::<usize>() + result.crowd.workloads;
        memory.add(row(&format!("{total} workloads"), &result.memory));
        results.push(result);
    }
    let (latencies, calls, verdicts) = (latencies(&results), calls(&results), verdicts(&results));
    Ok(Section {
        text: format!(
            "## Controller\n\n{head}\n{EXPLANATION}\n\n{latencies}\n{CALLS_EXPLANATION}\n\n{calls}\n{MEMORY_EXPLANATION}\n\n{memory}\n{verdicts}"
        ),
        failures: Vec::new(),
    })
}

struct Bench<'a> {
    control_plane: &'a ControlPlane,
    controller: Process,
    administrator: Administrator,
    observations: Observations,
}

/// What became of a crowd.
struct Outcome {
    crowd: Crowd,
    create: Samples,
    attachment: Samples,
    mountpoint_pod: Samples,
    created_after: Duration,
    served_after: Duration,
    /// By verb and resource.
    calls: BTreeMap<String, usize>,
    memory: footprint::MemoryUsage,
}

impl<'a> Bench<'a> {
    /// With volumes, each bound to its claim, and a controller that works.
    async fn prepare(control_plane: &'a ControlPlane, controller: Process) -> anyhow::Result<Self> {
        let administrator = Administrator::of(control_plane).await?;
        administrator.create_namespace(NAMESPACE).await?;
        for number in 0..VOLUMES {
            let name = volume(number);
            let order = VolumeTemplate {
                driver: DRIVER_NAME.to_owned(),
                mount_options: vec!["allow-delete".to_owned()],
                attributes: BTreeMap::from([("bucketName".to_owned(), "bucket".to_owned())]),
                handle: format!("{name}-handle"),
                secret: None,
                claim: (NAMESPACE.to_owned(), name.clone()),
            };
            administrator.create_volume(&name, order).await?;
            administrator.create_claim(NAMESPACE, &name, json!({})).await?;
            administrator.bind(NAMESPACE, &name, &name).await?;
        }
        let observations = Observations::watch(&administrator, DRIVER_NAME, MOUNTPOINT_NAMESPACE);
        let bench = Self { control_plane, controller, administrator, observations };
        // The first one shows that everybody works; the calls of its beginning are not counted.
        bench.create("warm-up", "warm-up", 0).await?;
        bench.wait_for(1)?;
        bench.quiet_calls().await?;
        Ok(bench)
    }

    async fn run(&self, number: usize, crowd: Crowd) -> anyhow::Result<Outcome> {
        let before = self.calls();
        let known = self.observations.served();
        let units = crowd.mountpoint_pods();
        let create = async |workload: usize| {
            // Workloads that share a Mountpoint Pod do not come together, so attachments have to be edited.
            let unit = workload % units;
            let node = format!("crowd-{number}-node-{}", unit / VOLUMES);
            self.create(&format!("crowd-{number}-{workload}"), &node, unit % VOLUMES).await
        };
        let start = Instant::now();
        let mut created = Vec::with_capacity(crowd.workloads);
        if crowd.is_one_by_one {
            for workload in 0..crowd.workloads {
                created.push(create(workload).await?);
                self.wait_for(known + workload + 1)?;
            }
        } else {
            let all = futures::stream::iter(0..crowd.workloads).map(create).buffer_unordered(CREATED_AT_ONCE);
            created = all.try_collect().await?;
        }
        let created_after = start.elapsed();
        self.wait_for(known + crowd.workloads)?;
        let served_after = start.elapsed();

        let (mut create, mut attachment, mut mountpoint_pod) =
            (Samples::default(), Samples::default(), Samples::default());
        for Created { uid, took, answered } in created {
            let ObservedTimes { attached, started } = self.observations.of(&uid).context("a workload is lost")?;
            create.add(milliseconds(took));
            // A watch may tell before the answer is read.
            attachment.add(milliseconds(attached.saturating_duration_since(answered)));
            mountpoint_pod.add(milliseconds(started.saturating_duration_since(answered)));
        }
        let mut calls = self.quiet_calls().await?;
        calls.retain(|name, count| {
            *count -= before.get(name).copied().unwrap_or_default();
            *count > 0
        });
        let memory = self.memory()?;
        Ok(Outcome { crowd, create, attachment, mountpoint_pod, created_after, served_after, calls, memory })
    }

    async fn create(&self, name: &str, node: &str, number: usize) -> anyhow::Result<Created> {
        let order = WorkloadTemplate {
            node: Some(node.to_owned()),
            claims: vec![volume(number)],
            ..WorkloadTemplate::default()
        };
        let start = Instant::now();
        let pod = self.administrator.create_workload(NAMESPACE, name, order).await?;
        let answered = Instant::now();
        Ok(Created { uid: pod.metadata.uid.unwrap_or_default(), took: answered - start, answered })
    }

    fn wait_for(&self, served: usize) -> anyhow::Result<()> {
        let is_done = || served <= self.observations.served() || !self.controller.is_running();
        let is_done = tokio::task::block_in_place(|| wait_until(Instant::now() + LIMIT, is_done));
        ensure!(self.controller.is_running(), "the controller has ended; it said: {}", self.controller);
        ensure!(is_done, "{} workloads are served instead of {served}", self.observations.served());
        Ok(())
    }

    fn memory(&self) -> anyhow::Result<footprint::MemoryUsage> {
        footprint::memory(self.controller.pid())
    }

    /// All calls of the controller so far, once it makes no more of them.
    async fn quiet_calls(&self) -> anyhow::Result<BTreeMap<String, usize>> {
        let deadline = Instant::now() + LIMIT;
        let mut calls = self.calls();
        loop {
            tokio::time::sleep(QUIET).await;
            let now = self.calls();
            if now == calls {
                return Ok(calls);
            }
            ensure!(Instant::now() < deadline, "the controller does not come to rest");
            calls = now;
        }
    }

    fn calls(&self) -> BTreeMap<String, usize> {
        let mut calls = BTreeMap::new();
        for event in self.control_plane.audit().iter().filter(|it| it.user.username == CONTROLLER_ACCOUNT) {
            if let Some(call) = call(event) {
                *calls.entry(call).or_default() += 1;
            }
        }
        calls
    }
}

struct Created {
    uid: String,
    took: Duration,
    answered: Instant,
}

fn volume(number: usize) -> String {
    format!("volume-{number}")
}

/// The name of a call that is made for a workload.
fn call(event: &AuditEvent) -> Option<String> {
    let about = event.object_ref.as_ref()?;
    // Lists for one node are made before something is taken away.
    let is_for_all = event.verb == "list" && !event.request_uri.contains("fieldSelector=spec.nodeName%3D");
    if is_for_all || event.verb == "watch" || about.resource == "leases" {
        return None;
    }
    let resource = match about.resource.as_str() {
        "mountpoints3podattachments" => "attachment",
        other => other.trim_end_matches('s'),
    };
    let subresource = if about.subresource.is_empty() { String::new() } else { format!("/{}", about.subresource) };
    let failed = event.response_status.as_ref().filter(|it| 400 <= it.code).map(|it| format!(", answer {}", it.code));
    Some(format!("{} {resource}{subresource}{}", event.verb, failed.unwrap_or_default()))
}

fn row(state: &str, memory: &footprint::MemoryUsage) -> [String; 4] {
    let size = |kib: u64| figure(mebibytes(kib << 10));
    [state.to_owned(), size(memory.resident_kib), size(memory.proportional_kib), memory.threads.to_string()]
}

fn latencies(results: &[Outcome]) -> MarkdownTable {
    let mut table = MarkdownTable::new([
        "workloads",
        "create p50",
        "attachment p50",
        "p99",
        "max",
        "Mountpoint Pod p50",
        "p99",
        "max",
        "p50 ÷ create",
        "all created, s",
        "all served, s",
    ]);
    for it in results {
        let Outcome { crowd, create, attachment, mountpoint_pod, created_after, served_after, .. } = it;
        let figures = [
            create.median(),
            attachment.median(),
            attachment.percentile(99),
            attachment.maximum(),
            mountpoint_pod.median(),
            mountpoint_pod.percentile(99),
            mountpoint_pod.maximum(),
            crate::publisher::ratio(mountpoint_pod, create),
            Some(created_after.as_secs_f64()),
            Some(served_after.as_secs_f64()),
        ];
        table.add([crowd.title()].into_iter().chain(figures.map(figure_or_dash)));
    }
    table
}

#[expect(clippy::cast_precision_loss, reason = "a figure for people")]
fn per_workload(outcome: &Outcome, count: usize) -> f64 {
    count as f64 / outcome.crowd.workloads as f64
}

fn calls(results: &[Outcome]) -> MarkdownTable {
    let mut names: Vec<&String> = results.iter().flat_map(|it| it.calls.keys()).collect();
    names.sort();
    names.dedup();
    let headers = ["workloads".to_owned()].into_iter().chain(names.iter().map(|it| (*it).clone()));
    let mut table = MarkdownTable::new(headers.chain(["all".to_owned()]));
    for it in results {
        let counts = names.iter().map(|name| it.calls.get(*name).copied().unwrap_or_default());
        let counts = counts.chain([it.calls.values().sum()]);
        table.add([it.crowd.title()].into_iter().chain(counts.map(|count| figure(per_workload(it, count)))));
    }
    table
}

fn verdicts(results: &[Outcome]) -> Verdicts {
    let mut verdicts = Verdicts::new(["measured"]);
    let alone = results.iter().find(|it| it.crowd.is_one_by_one);
    verdicts.add(
        &format!("one workload: Mountpoint Pod created, p50 at most {ALONE_LIMIT} × one call"),
        [alone.and_then(|it| crate::publisher::ratio(&it.mountpoint_pod, &it.create))],
        |it| it <= ALONE_LIMIT,
    );
    for it in results.iter().filter(|it| !it.crowd.is_one_by_one) {
        verdicts.add(
            &format!("{}: at most {CALLS_LIMIT} calls per workload", it.crowd.title()),
            [Some(per_workload(it, it.calls.values().sum()))],
            |it| it <= CALLS_LIMIT,
        );
    }
    // Few are created before the first calls for them are answered.
    let most = results.iter().map(|it| it.crowd.workloads).max();
    for it in results.iter().filter(|it| Some(it.crowd.workloads) == most) {
        verdicts.add(
            &format!("{}: all served, at most {SERVED_LIMIT} × all created", it.crowd.title()),
            [Some(it.served_after.as_secs_f64() / it.created_after.as_secs_f64())],
            |it| it <= SERVED_LIMIT,
        );
    }
    let heaviest = results
        .iter()
        .map(|it| mebibytes(it.memory.resident_kib << 10))
        .fold(None, |most: Option<f64>, it| Some(most.map_or(it, |most| most.max(it))));
    verdicts.add(&format!("controller with all of them, RSS below {MEMORY_LIMIT_MEBIBYTES} MiB"), [heaviest], |it| {
        it < MEMORY_LIMIT_MEBIBYTES
    });
    verdicts
}
