//! Our driver beside AWS's, both in one cluster with the same engine: how soon Pods run, what kubelet waits for, and what the node pays
//! in memory. Once for the strategy with units of systemd and once for that with Mountpoint Pods, because AWS's driver has one of them.

mod installed;
mod many_pods;
mod node_memory;
mod publish_calls;

use s3csi_testbed::cluster::{Cluster, STORE_ENDPOINT};
use s3csi_testbed::earlier_driver::EarlierMounter;
use s3csi_testbed::fixture::Fixture;

use crate::machine;
use crate::pod_start::{ClusterVolume, PodStartSamples, create_volumes, start_pod, start_table};
use crate::publisher::ratio;
use crate::report::{MarkdownTable, Section};
use crate::run::{Options, Progress, Thoroughness};
use crate::statistics::figure;
use crate::verdicts::Verdicts;
use installed::{InstalledDriver, OURS, THEIRS};
use many_pods::{PodCrowd, StartTimes};
use node_memory::{NodeState, memory_table};
use publish_calls::{PublishCallSamples, publish_calls};

/// Two runs of the same differ by this much.
const AS_QUICK: f64 = 1.1;

/// The node plugin against AWS's.
const MEMORY_LIMIT: f64 = 0.25;

const EXPLANATION: &str = "\
Our driver and AWS's, from which the Scality driver was forked, beside each other in one cluster, with the same engine program, the same
mount options and the same S3 server. *First Pod* uses a volume that no other Pod of the node uses, *further Pod* the same volume while
the first one runs; milliseconds from the creation of a Pod until its container runs, by the kernel's clock, which counts in steps of
10 ms; in turns, and each driver goes first in every second round. EC2's instance metadata, which AWS's driver lets its engines ask for
at each start and ours does not, refuses connections.";

const SYSTEMD_EXPLANATION: &str = "\
Units of systemd are what AWS's driver uses by default in this version; ours has strategy `systemd`. With both, every Pod has an engine
of its own, and ours one process more, which starts the next engine if one dies.";

const POD_EXPLANATION: &str = "\
Mountpoint Pods are experimental in this version of AWS's driver (`experimental.podMounter: true`) and the default of ours. With both,
Pods of one volume share a Mountpoint Pod.";

const CALLS_EXPLANATION: &str = "\
How long kubelet waited in `NodePublishVolume` until the Pod ran, in milliseconds, from its own metrics: all calls for the Pod, also
those that failed or only repeated another one.";

const MANY_EXPLANATION: &str = "\
Many Pods on one node that are created at once: seconds until the container of the last one runs, and of half of them. Measured once.";

const MEMORY_EXPLANATION: &str = "\
Memory of one node in MiB. *Driver* is the container of the node plugin; *anonymous* is the part of its PSS that is no page of the
program's file, which the kernel may drop and read again. *Sidecars* are node-driver-registrar and livenessprobe, which
our node plugin does not need; the module proxy does not have those of the CSI project, so a stand-in in Rust, of ours, runs in their
place: its memory is not theirs. *Mounts* are all engines, and what starts and supervises them; no container's pause and no containerd-shim.";

pub fn measure_systemd(fixture: &Fixture, options: &Options, progress: &Progress) -> anyhow::Result<Section> {
    measure(EarlierMounter::Systemd, fixture, options, progress)
}

pub fn measure_pod(fixture: &Fixture, options: &Options, progress: &Progress) -> anyhow::Result<Section> {
    measure(EarlierMounter::Pod, fixture, options, progress)
}

fn measure(
    mounter: EarlierMounter,
    fixture: &Fixture,
    options: &Options,
    progress: &Progress,
) -> anyhow::Result<Section> {
    let plan = Plan::of(options);
    let programs = [
        machine::product_version("s3csi")?,
        machine::tool_version("aws-s3-csi-driver-unchanged")?,
        machine::product_version("mount-s3")?,
        machine::tool_version("versitygw")?,
        machine::kubernetes_version()?,
    ];
    let head = machine::describe(options, &programs);
    let cluster = installed::start(fixture, mounter, progress)?;
    let bench = Bench { cluster: &cluster, progress };
    bench.create_volumes(&plan)?;
    let mut results = Results::default();
    bench.weigh("idle, just installed", &mut results)?;
    // Fills the caches of all parts.
    bench.round(0, &mut Results::default())?;
    for round in 1..=plan.rounds {
        bench.round(round, &mut results)?;
        progress.say(&format!("round {round} of {}", plan.rounds));
    }
    for crowd in &plan.crowds {
        bench.start_crowd(crowd, &mut results)?;
    }
    bench.weigh("idle again", &mut results)?;
    let (title, explanation) = match mounter {
        EarlierMounter::Systemd => ("units of systemd", SYSTEMD_EXPLANATION),
        EarlierMounter::Pod => ("Mountpoint Pods", POD_EXPLANATION),
    };
    let text = results.text(&plan);
    Ok(Section {
        text: format!("## Beside another driver: {title}\n\n{head}\n{EXPLANATION} {explanation}\n\n{text}"),
        failures: Vec::new(),
    })
}

struct Plan {
    rounds: usize,
    crowds: Vec<PodCrowd>,
}

impl Plan {
    fn of(options: &Options) -> Self {
        let (rounds, sizes) = match options.thoroughness {
            Thoroughness::Quick => (2, [(0, 4), (2, 2), (4, 1)]),
            Thoroughness::Full => (10, [(0, 100), (10, 10), (100, 1)]),
        };
        let crowds = sizes.map(|(volumes, pods)| PodCrowd { volumes, pods_each: pods });
        Self { rounds: options.repetitions.unwrap_or(rounds), crowds: crowds.into() }
    }

    /// The one that the targets are about.
    fn most_volumes(&self) -> usize {
        self.crowds.iter().map(|it| it.volumes).max().unwrap_or_default()
    }
}

struct Bench<'a> {
    cluster: &'a Cluster,
    progress: &'a Progress,
}

#[derive(Default)]
struct Results {
    plain: PodStartSamples,
    plain_crowd: Option<StartTimes>,
    ours: DriverResults,
    theirs: DriverResults,
}

/// What was found of one of the drivers.
#[derive(Default)]
struct DriverResults {
    first: PodStartSamples,
    further: PodStartSamples,
    first_calls: PublishCallSamples,
    further_calls: PublishCallSamples,
    crowds: Vec<(PodCrowd, StartTimes)>,
    memory: Vec<NodeState>,
}

impl Bench<'_> {
    fn round(&self, round: usize, results: &mut Results) -> anyhow::Result<()> {
        let plain = format!("plain-{round}");
        let Results { ours, theirs, .. } = results;
        let mut contestants = [(&OURS, ours), (&THEIRS, theirs)];
        if round.is_multiple_of(2) {
            contestants.reverse();
        }
        installed::wait_a_moment_until_quiet(self.cluster);
        let mut pods = vec![plain.clone()];
        results.plain.add(&start_pod(self.cluster, &plain, None, |_| {})?);
        for (driver, figures) in contestants {
            let volume = round_volume(driver, round);
            for (kind, starts, calls) in [
                ("first", &mut figures.first, &mut figures.first_calls),
                ("further", &mut figures.further, &mut figures.further_calls),
            ] {
                let pod = format!("{volume}-{kind}");
                let before = publish_calls(self.cluster, driver)?;
                starts.add(&start_pod(self.cluster, &pod, Some(&volume), |_| {})?);
                calls.add(&publish_calls(self.cluster, driver)?.since(&before));
                pods.push(pod);
            }
        }
        let names: Vec<&str> = pods.iter().map(String::as_str).collect();
        self.cluster.kubectl(&[&["delete", "pods", "--timeout=300s"], names.as_slice()].concat())?;
        Ok(())
    }

    /// Once without volumes, or once with each driver.
    fn start_crowd(&self, crowd: &PodCrowd, results: &mut Results) -> anyhow::Result<()> {
        if crowd.volumes == 0 {
            self.progress.say(&crowd.title());
            results.plain_crowd = Some(many_pods::start(self.cluster, &crowd.pods("plain"))?);
            return many_pods::end(self.cluster);
        }
        for (driver, figures) in [(&OURS, &mut results.ours), (&THEIRS, &mut results.theirs)] {
            self.progress.say(&format!("{}, {}", driver.title, crowd.title()));
            installed::wait_until_quiet(self.cluster)?;
            let times = many_pods::start(self.cluster, &crowd.pods(driver.short_name))?;
            figures.crowds.push((*crowd, times));
            figures.memory.push(NodeState::of(self.cluster, driver, &crowd.title(), crowd.volumes)?);
            many_pods::end(self.cluster)?;
        }
        installed::wait_until_quiet(self.cluster)
    }

    fn weigh(&self, state: &str, results: &mut Results) -> anyhow::Result<()> {
        for (driver, figures) in [(&OURS, &mut results.ours), (&THEIRS, &mut results.theirs)] {
            figures.memory.push(NodeState::of(self.cluster, driver, state, 0)?);
        }
        Ok(())
    }

    /// Of all rounds and crowds at once: Kubernetes binds some claims only when it looks at all of them again, after fifteen seconds.
    fn create_volumes(&self, plan: &Plan) -> anyhow::Result<()> {
        self.progress.say("creating the volumes");
        let names = |driver: &InstalledDriver| {
            let owner = driver.short_name;
            let rounds = (0..=plan.rounds).map(move |it| round_volume(driver, it));
            rounds.chain(plan.crowds.iter().flat_map(|it| it.volume_names(owner))).collect::<Vec<_>>()
        };
        // Where the store is, is an option of each volume: AWS's driver has no setting for it.
        let options = ["allow-delete", "allow-overwrite", "region us-east-1", "force-path-style"].map(str::to_owned);
        let options: Vec<String> = options.into_iter().chain([format!("endpoint-url {STORE_ENDPOINT}")]).collect();
        let both = [(&OURS, names(&OURS)), (&THEIRS, names(&THEIRS))];
        let volumes = both.iter().flat_map(|(driver, names)| {
            names.iter().map(|name| ClusterVolume { name, driver: driver.name, mount_options: &options })
        });
        create_volumes(self.cluster, &volumes.collect::<Vec<_>>())
    }
}

fn round_volume(driver: &InstalledDriver, round: usize) -> String {
    format!("{}-round-{round}", driver.short_name)
}

impl Results {
    fn text(&self, plan: &Plan) -> String {
        let Self { plain, ours, theirs, .. } = self;
        let names = ["first Pod", "further Pod"].map(|kind| [&OURS, &THEIRS].map(|it| format!("{kind}, {}", it.title)));
        let [[our_first, their_first], [our_further, their_further]] = names.each_ref().map(<[String; 2]>::each_ref);
        let starts = start_table(
            &[
                ("Pod without a volume", plain),
                (our_first, &ours.first),
                (their_first, &theirs.first),
                (our_further, &ours.further),
                (their_further, &theirs.further),
            ],
            plain,
        );
        let calls = publish_calls::table(&[
            (our_first, &ours.first_calls),
            (their_first, &theirs.first_calls),
            (our_further, &ours.further_calls),
            (their_further, &theirs.further_calls),
        ]);
        let memory = memory_table(&[(&OURS, &ours.memory), (&THEIRS, &theirs.memory)]);
        let (many, verdicts) = (self.many_table(), self.verdicts(plan));
        format!(
            "{starts}\n{CALLS_EXPLANATION}\n\n{calls}\n{MANY_EXPLANATION}\n\n{many}\n{MEMORY_EXPLANATION}\n\n{memory}\n{verdicts}"
        )
    }

    fn many_table(&self) -> MarkdownTable {
        let mut table = MarkdownTable::new(["s", "half of them", "all"]);
        if let Some(StartTimes { half, all }) = self.plain_crowd {
            table.add(["without a volume".to_owned(), figure(half), figure(all)]);
        }
        let rows = self.ours.crowds.iter().zip(&self.theirs.crowds);
        for (driver, (crowd, times)) in rows.flat_map(|(ours, theirs)| [(&OURS, ours), (&THEIRS, theirs)]) {
            let StartTimes { half, all } = times;
            table.add([format!("{}, {}", crowd.title(), driver.title), figure(*half), figure(*all)]);
        }
        table
    }

    fn verdicts(&self, plan: &Plan) -> Verdicts {
        let Self { ours, theirs, .. } = self;
        let mut verdicts = Verdicts::new(["measured"]);
        let mut add = |what: &str, limit: f64, measured: Option<f64>| {
            let target = format!("{what}: {} at most {limit} × {}", OURS.title, THEIRS.title);
            verdicts.add(&target, [measured], |it| it <= limit);
        };
        let starts = [("first Pod", &ours.first, &theirs.first), ("further Pod", &ours.further, &theirs.further)];
        for (name, ours, theirs) in starts {
            add(&format!("{name} runs, p50"), AS_QUICK, ratio(ours.running(), theirs.running()));
        }
        for ((crowd, ours), (_, theirs)) in ours.crowds.iter().zip(&theirs.crowds) {
            add(&format!("{} run", crowd.title()), AS_QUICK, Some(ours.all / theirs.all));
        }
        for (ours, theirs) in ours.memory.iter().zip(&theirs.memory) {
            if ours.volumes != 0 && ours.volumes != plan.most_volumes() {
                continue;
            }
            let (with, without) = (ours.node_plugin() / theirs.node_plugin(), ours.driver() / theirs.driver());
            add(&format!("{}: node plugin with sidecars, PSS", ours.name), MEMORY_LIMIT, Some(with));
            add(&format!("{}: driver without sidecars, PSS", ours.name), MEMORY_LIMIT, Some(without));
            let anonymous = ours.driver_anonymous() / theirs.driver_anonymous();
            add(&format!("{}: driver without sidecars, anonymous memory", ours.name), MEMORY_LIMIT, Some(anonymous));
        }
        verdicts
    }
}
