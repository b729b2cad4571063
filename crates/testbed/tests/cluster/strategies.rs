//! The same suite for each strategy, each installed from the chart: three drivers beside each other in one cluster.

use std::os::unix::fs::MetadataExt as _;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use rustix::process::{Pid, Signal, kill_process};

use crate::restarts::restart_plugin;
use crate::sub_paths::check_sub_paths;
use crate::world::{
    CLUSTER, DRIVER, NAMESPACE, NODE, OTHER_NODE, Volume, Workload, alone, authority, delete_pods, engines_of, events,
    eventually, in_peace, is_registered, mounts, pod, settings,
};

/// A strategy, as it is installed.
pub struct Installed {
    pub strategy: &'static str,
    pub driver: &'static str,
    pub namespace: &'static str,
}

pub const POD: Installed = Installed { strategy: "pod", driver: DRIVER, namespace: NAMESPACE };

pub const SYSTEMD: Installed = Installed { strategy: "systemd", driver: "systemd.s3csi.test", namespace: "s3-systemd" };

pub const DAEMON: Installed = Installed { strategy: "daemon", driver: "daemon.s3csi.test", namespace: "s3-daemon" };

/// Not for tests that hold the lock of [`alone`] and [`in_peace`].
pub fn install_systemd() {
    static IS_INSTALLED: LazyLock<()> = LazyLock::new(|| install(&SYSTEMD));
    LazyLock::force(&IS_INSTALLED);
}

/// For one test at a time: some end the mounter, which all volumes of a node share. Not for tests that hold the lock of [`alone`] and
/// [`in_peace`].
pub fn install_daemon() -> MutexGuard<'static, ()> {
    static IS_INSTALLED: LazyLock<()> = LazyLock::new(|| install(&DAEMON));
    static IN_USE: Mutex<()> = Mutex::new(());
    let guard = IN_USE.lock().unwrap_or_else(PoisonError::into_inner);
    LazyLock::force(&IS_INSTALLED);
    guard
}

fn install(Installed { strategy, driver, namespace, .. }: &Installed) {
    let _peace = in_peace();
    let (strategy, authority) = (format!("strategy={strategy}"), authority(&CLUSTER));
    let mut arguments = settings(&authority);
    arguments.extend(["--set", &strategy]);
    CLUSTER.install_driver(namespace, driver, &arguments).unwrap();
}

#[test]
fn strategy_pod() {
    check(&POD);
}

#[test]
fn sub_paths_with_strategy_pod() {
    check_sub_paths(POD.strategy, POD.driver);
}

#[test]
fn sub_paths_with_strategy_systemd() {
    install_systemd();
    check_sub_paths(SYSTEMD.strategy, SYSTEMD.driver);
}

#[test]
fn sub_paths_with_strategy_daemon() {
    let _daemon = install_daemon();
    check_sub_paths(DAEMON.strategy, DAEMON.driver);
}

#[test]
fn strategy_systemd() {
    install_systemd();
    check(&SYSTEMD);
}

#[test]
fn strategy_daemon() {
    let _daemon = install_daemon();
    check(&DAEMON);
}

fn check(installed: &Installed) {
    for place in [NODE, OTHER_NODE] {
        // Other tests restart things on the second node.
        eventually("kubelet knows the driver", || is_registered(place, installed.driver));
    }
    let name = |what: &str| format!("{}-{what}", installed.strategy);
    let (writable, fixed, missing) = (name("writable"), name("fixed"), name("missing"));
    let volume = |name| Volume { driver: installed.driver, ..Volume::new(name) };
    volume(&writable).create();
    Volume { access_mode: "ReadOnlyMany", ..volume(&fixed) }.create();
    volume(&missing).create_without_bucket();
    CLUSTER.put_object(&fixed, "file", "fixed\n").unwrap();

    let writer = Workload::new(&name("writer"), &writable).secured("runAsUser", 1000).secured("fsGroup", 1000);
    let reader = Workload::new(&name("reader"), &writable).secured("fsGroup", 1000).with_volume(&fixed, "/fixed");
    let waiting = Workload::new(&name("waiting"), &missing);
    let all = [&writer, &reader, &waiting];
    for workload in all {
        workload.create();
    }
    writer.wait_until_it_runs();
    reader.wait_until_it_runs();

    writer.run("echo from the Pod > /data/greeting");
    assert_eq!(reader.run("cat /data/greeting /fixed/file"), "from the Pod\nfixed\n");
    assert_eq!(CLUSTER.object(&writable, "greeting").unwrap(), b"from the Pod\n");
    let refused = reader.try_to_run("echo new > /fixed/new").unwrap_err();
    assert!(refused.contains("Read-only file system"), "{refused}");
    eventually("an Event names the bucket that is missing", || {
        let words = format!("bucket \"{missing}\" does not exist");
        events(&waiting.name, "FailedMount").iter().any(|it| it.contains(&words))
    });
    CLUSTER.create_bucket(&missing).unwrap();

    for engine in engines_of(&writable) {
        let (user, capabilities) = privileges(engine);
        // Of processes that may be neither dumped nor inspected: engines of other volumes have the same user.
        let owner = std::fs::metadata(format!("/proc/{engine}/environ")).unwrap().uid();
        assert_eq!(owner, 0, "{engine} of strategy {} can be inspected by its user", installed.strategy);
        assert_eq!(user == 0, installed.strategy == "systemd", "{engine} of strategy {}", installed.strategy);
        assert_eq!(capabilities == 0, installed.strategy != "systemd", "{engine} of strategy {}", installed.strategy);
    }
    check_engines_may_die(&writable, &reader);
    // The driver that all other tests use is not restarted while one of them counts seconds.
    let alone = (installed.driver == DRIVER).then(alone);
    restart_plugin(installed.namespace, NODE);
    eventually("kubelet knows the driver again", || is_registered(NODE, installed.driver));
    drop(alone);
    assert_eq!(reader.run("cat /data/greeting"), "from the Pod\n");
    writer.run("rm /data/greeting");
    waiting.wait_until_it_runs();

    let uids: Vec<String> =
        all.iter().map(|it| pod(&it.name)["metadata"]["uid"].as_str().unwrap().to_owned()).collect();
    delete_pods(&all);
    for uid in uids {
        assert_eq!(mounts(NODE, &uid), Vec::<String>::new());
    }
    eventually("no engine is left, and no mount", || {
        let buckets = [&writable, &fixed, &missing];
        let units = CLUSTER.run(NODE, &["systemctl", "list-units", "--plain", "--no-legend", "mount-s3-*"]).unwrap();
        buckets.iter().all(|it| engines_of(it).is_empty()) && (installed.strategy != "systemd" || units.is_empty())
    });
    let sources = format!("/plugins/{}/mnt/", installed.driver);
    if installed.strategy == "daemon" {
        eventually("no source is left", || mounts(NODE, &sources).is_empty());
    }
}

/// As whom a process runs, and what it may do beyond others.
fn privileges(process: Pid) -> (u32, u64) {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let field = |name: &str| status.lines().find_map(|it| it.strip_prefix(name)?.split_whitespace().next()).unwrap();
    (field("Uid:").parse().unwrap(), u64::from_str_radix(field("CapEff:"), 16).unwrap())
}

/// Every engine of a bucket is killed while somebody reads, who sees no error.
fn check_engines_may_die(bucket: &str, reader: &Workload) {
    let script = "for round in 1 2 3 4 5 6 7 8 9 10; do cat /data/greeting; sleep 0.2; done";
    let expected = "from the Pod\n".repeat(10);
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| reader.run(script));
        let before = engines_of(bucket);
        assert!(!before.is_empty(), "no engine serves {bucket}");
        for engine in &before {
            kill_process(*engine, Signal::KILL).unwrap();
        }
        assert_eq!(reading.join().unwrap(), expected);
        eventually("other engines serve", || {
            let now = engines_of(bucket);
            now.len() == before.len() && now.iter().all(|it| !before.contains(it))
        });
    });
}
