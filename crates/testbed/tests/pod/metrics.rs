//! The metrics of a node: they follow what happens, and a scrape never waits.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};
use s3csi_driver::metrics::{ALL, Program};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::http;
use s3csi_testbed::kubelet::Kubelet;
use s3csi_testbed::wait::wait_for;

use crate::world::World;

/// Prometheus gives up after 10 s by default.
const SCRAPED_WITHIN: Duration = Duration::from_secs(8);

impl World<'_> {
    /// All series by name and labels, as they are written.
    #[track_caller]
    fn scrape(&self) -> BTreeMap<String, String> {
        let log = self.node().errors();
        let address = log.lines().find_map(|it| it.split("address=").nth(1)).unwrap();
        let start = Instant::now();
        let answer = http::get(address.split(' ').next().unwrap(), "/metrics");
        assert!(start.elapsed() < SCRAPED_WITHIN, "took {:?}", start.elapsed());
        assert_eq!(answer.status, 200);
        let lines = answer.body.lines().filter(|it| !it.starts_with('#'));
        lines.map(|it| it.rsplit_once(' ').unwrap()).map(|(name, it)| (name.to_owned(), it.to_owned())).collect()
    }

    #[track_caller]
    fn wait_for_figure(&self, name: &str, expected: &str) {
        wait_for(&format!("{name} is {expected}"), || self.scrape().get(name).is_some_and(|it| it == expected));
    }

    fn start_node_with_metrics(&mut self) {
        self.start_node_with(&["--health-address", "127.0.0.1:0", "--longest-outage", "1s"]);
        self.node().wait_for_log("serving /healthz and /metrics");
    }
}

fn mounts(state: &str) -> String {
    format!("s3csi_mounts{{strategy=\"pod\",state=\"{state}\"}}")
}

#[test]
fn figures_follow_what_happens() {
    let fixture = Fixture::new("pod-metrics");
    let mut world = World::prepare(&fixture);
    world.start_node_with_metrics();
    world.wait_for_figure("s3csi_registered", "0");
    world.runtime.block_on(Kubelet::register(&world.plugin.registration_socket())).unwrap();
    world.wait_for_figure("s3csi_registered", "1");
    let pod = world.serve(&[1]);
    world.publish(&world.volume(1));
    let figures = world.scrape();
    for phase in ["assignment", "credentials", "source", "bind", "total"] {
        let name = format!("s3csi_publish_duration_seconds_count{{phase=\"{phase}\",code=\"OK\"}}");
        assert_eq!(figures.get(&name).map(String::as_str), Some("1"), "{name} in {figures:?}");
    }
    // The state of the mounts may be a second old.
    for (name, value) in [(mounts("alive"), "1"), (mounts("dead"), "0"), ("s3csi_targets".to_owned(), "1")] {
        world.wait_for_figure(&name, value);
    }
    assert!(figures["s3csi_credentials_age_seconds"].parse::<f64>().unwrap() < 60.0);
    world.wait_for_figure("s3csi_api_requests_total{verb=\"patch\",resource=\"pods/status\",code=\"200\"}", "1");
    world.wait_for_figure("s3csi_events_total{outcome=\"written\"}", "1");

    kill_process(world.engine(), Signal::KILL).unwrap();
    world.wait_for_figure("s3csi_engine_stall_seconds_count", "1");
    world.kill_mounter(&pod);
    world.wait_for_figure("s3csi_engine_deaths_total", "1");
    world.wait_for_figure(&mounts("dead"), "1");
    let pod = world.start_mounter(&pod, &[]);
    world.publish(&world.volume(1));
    world.wait_for_figure(&mounts("alive"), "1");
    world.wait_for_figure("s3csi_repairs_total{reason=\"DeadSourceReplaced\"}", "1");

    world.unpublish(&world.volume(1));
    world.wait_for_figure("s3csi_unpublish_duration_seconds_count{phase=\"unmount\",code=\"OK\"}", "1");
    world.retire(&pod);
    world.wait_for_figure(&mounts("alive"), "0");
    assert_eq!(world.scrape()["s3csi_engine_deaths_total"], "1", "an end that was wanted is no death");
    assert!(world.try_publish_within(&world.volume(9), Duration::from_secs(3)).is_err());
    world.wait_for_figure("s3csi_publish_duration_seconds_count{phase=\"total\",code=\"UNAVAILABLE\"}", "1");

    let shown = world.scrape();
    for description in ALL.iter().filter(|it| it.of != Program::Controller) {
        let is_shown =
            description.series().iter().all(|it| shown.keys().any(|name| name.split('{').next() == Some(it)));
        assert!(is_shown, "{} is not shown in {shown:?}", description.family());
    }
}

#[test]
fn a_hung_mount_is_counted_and_delays_no_scrape() {
    let fixture = Fixture::new("pod-metrics-hung");
    let mut world = World::prepare(&fixture);
    world.start_node_with_metrics();
    let pod = world.serve(&[1]);
    world.publish(&world.volume(1));
    let engine = world.engine();
    // Who would replace it, is frozen as well.
    pod.mounter().signal(Signal::STOP);
    kill_process(engine, Signal::STOP).unwrap();
    assert_eq!(world.scrape()[&mounts("hung")], "1");
    let threads = || fs::read_dir(format!("/proc/{}/task", world.node().pid())).unwrap().count();
    let before = threads();
    for _ in 0..3 {
        assert_eq!(world.scrape()[&mounts("hung")], "1");
    }
    assert!(threads() <= before + 2, "threads wait for a mount that hangs: {before}, then {}", threads());

    kill_process(engine, Signal::CONT).unwrap();
    pod.mounter().signal(Signal::CONT);
    world.wait_for_figure(&mounts("alive"), "1");
    world.unpublish(&world.volume(1));
    world.retire(&pod);
}
