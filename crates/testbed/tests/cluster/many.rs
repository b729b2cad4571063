//! Many Pods and volumes on one node at once: how long it takes, and what the driver needs for it.

use std::io::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::Pid;
use s3csi_testbed::processes;
use s3csi_testbed::wait::wait_patiently_until;
use serde_json::{Value, json};

use crate::world::{
    CLUSTER, NAMESPACE, OTHER_NODE, Volume, Workload, alone, attachments, engines_of, existing_mountpoint_pods,
    mountpoint_pods, mounts, objects,
};

const VOLUMES: usize = 20;
const PODS: usize = 60;

/// On two idle cores it takes a quarter of this.
const LONGEST: Duration = Duration::from_mins(6);

/// A program of the driver in its Pod.
struct Program {
    what: String,
    process: Pid,
    /// Processor time until now, in hundredths of a second.
    used: u64,
}

impl Program {
    /// The programs of the Pods that a label selects.
    fn all(selector: &str) -> Vec<Self> {
        let pods = objects(&format!("/api/v1/namespaces/{NAMESPACE}/pods?labelSelector=app={selector}"));
        let names = pods.iter().filter_map(|it| it["metadata"]["name"].as_str());
        names
            .map(|name| {
                let found = processes::running("s3csi", Path::new(&format!("HOSTNAME={name}")));
                let [process] = found.as_slice() else { panic!("the processes of {name}: {found:?}") };
                Self { what: name.to_owned(), process: *process, used: processor_time(*process) }
            })
            .collect()
    }

    /// Processor time since then in seconds, and the most memory it ever had in MiB.
    fn cost(&self) -> (f64, u64) {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process)).unwrap();
        let peak = status.lines().find_map(|it| it.strip_prefix("VmHWM:")).unwrap();
        let kibibytes: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
        let hundredths = u32::try_from(processor_time(self.process) - self.used).unwrap();
        (f64::from(hundredths) / 100.0, kibibytes / 1024)
    }
}

fn processor_time(process: Pid) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    // The name may contain anything, so count from behind it: user time is the 12th field from there, system time the next.
    let (_, rest) = stat.rsplit_once(") ").unwrap();
    rest.split(' ').skip(11).take(2).map(|it| it.parse::<u64>().unwrap()).sum()
}

fn volume(number: usize) -> String {
    format!("many-{number}")
}

/// Past the capturing of the test harness: these are figures for people.
fn say(words: &str) {
    let _ = writeln!(std::io::stderr(), "many: {words}");
}

#[test]
fn sixty_pods_over_twenty_volumes_run_on_one_node_and_leave_nothing() {
    let _alone = alone();
    let programs: Vec<Program> =
        ["scality-s3-csi-node", "s3-csi-controller"].into_iter().flat_map(Program::all).collect();
    let mut all: Vec<Value> = Vec::new();
    for number in 0..VOLUMES {
        CLUSTER.create_bucket(&volume(number)).unwrap();
        all.extend(Volume::new(&volume(number)).objects());
    }
    for number in 0..PODS {
        let mut workload = Workload::new(&format!("many-{number}"), &volume(number % VOLUMES)).on(OTHER_NODE);
        workload = workload.script(&format!("echo hello > /data/from-{number}"));
        workload.object["metadata"]["labels"] = json!({ "app": "many" });
        all.push(workload.object);
    }
    let started = Instant::now();
    CLUSTER.apply(&json!({ "apiVersion": "v1", "kind": "List", "items": all }).to_string()).unwrap();
    let running = || {
        let pods = objects("/api/v1/namespaces/default/pods?labelSelector=app=many");
        pods.iter().filter(|it| it["status"]["phase"] == "Running").count()
    };
    let is_done = wait_patiently_until(started + LONGEST, || running() == PODS);
    say(&format!(
        "{} of {PODS} Pods over {VOLUMES} volumes run after {:.1} s",
        running(),
        started.elapsed().as_secs_f64()
    ));
    for program in &programs {
        let (seconds, mebibytes) = program.cost();
        say(&format!("{} used {seconds:.2} s of processor time, and {mebibytes} MiB of memory at most", program.what));
        assert!(mebibytes < 100, "{} needs {mebibytes} MiB", program.what);
    }
    assert!(is_done, "{}", CLUSTER.kubectl(&["get", "events", "--field-selector=type=Warning"]).unwrap());
    let pods: Vec<String> = (0..VOLUMES).flat_map(|it| mountpoint_pods(&volume(it))).collect();
    assert_eq!(pods.len(), VOLUMES, "one Mountpoint Pod for each volume");
    for number in 0..PODS {
        let bucket = volume(number % VOLUMES);
        assert!(
            wait_patiently_until(Instant::now() + LONGEST, || CLUSTER
                .object(&bucket, &format!("from-{number}"))
                .is_some()),
            "the file of Pod {number} is not in {bucket}"
        );
    }

    let started = Instant::now();
    CLUSTER.kubectl(&["delete", "pods", "--selector=app=many", "--timeout=360s"]).unwrap();
    let left = || -> Vec<String> {
        let existing = existing_mountpoint_pods();
        let pods_left = pods.iter().filter(|it| existing.contains(*it)).map(|it| format!("Pod {it}"));
        let attachments =
            (0..VOLUMES).flat_map(|it| attachments(&volume(it))).map(|it| format!("{}", it["metadata"]["name"]));
        let engines = engines_of("many-").into_iter().map(|it| format!("engine {it}"));
        let mounts = pods.iter().flat_map(|it| mounts(OTHER_NODE, it));
        pods_left.chain(attachments).chain(engines).chain(mounts).collect()
    };
    let is_done = wait_patiently_until(started + LONGEST, || left().is_empty());
    say(&format!("all of it is gone after {:.1} s", started.elapsed().as_secs_f64()));
    assert!(is_done, "left: {:#?}", left());
}
