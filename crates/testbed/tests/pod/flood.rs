//! An attack on the node plugin's threads: many scrapes beside a mount that hangs, and many publishes to a mounter that accepts and
//! never answers. Meanwhile others are served, and kubelet's probes are answered.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::kubelet::CsiVolume;
use s3csi_testbed::processes::freeze;
use s3csi_testbed::wait::wait_for;

use crate::world::World;

/// More than the threads of tokio's blocking pool.
const SCRAPES: usize = 600;
const PUBLISHES: u32 = 540;

/// What others wait for at most, on a busy machine.
const OTHERS_WAIT: Duration = Duration::from_secs(20);

/// kubelet's probes time out after 3 s in our chart; three in a row restart the plugin.
const PROBE: Duration = Duration::from_secs(3);
const PROBES_THAT_MAY_FAIL: u32 = 2;

/// The volume of a workload in a namespace.
fn volume(world: &World<'_>, number: u32, namespace: &str) -> CsiVolume {
    let mut volume = world.volume(number);
    volume.attributes.insert("csi.storage.k8s.io/pod.namespace".to_owned(), namespace.to_owned());
    volume
}

/// The status of an answer, as a prober sees it; `None` if there is none in time.
fn probe(address: &str, path: &str, time: Duration) -> Option<u16> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(time)).ok()?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    text.split(' ').nth(1)?.parse().ok()
}

/// Probes as kubelet does until `is_over`, and answers how many failed in a row at most, and how many were made.
fn probe_until(address: &str, is_over: &AtomicBool) -> (u32, u32) {
    let (mut worst, mut row, mut count) = (0, 0, 0);
    while !is_over.load(Ordering::SeqCst) || count < 3 {
        row = if probe(address, "/healthz", PROBE) == Some(200) { 0 } else { row + 1 };
        worst = worst.max(row);
        count += 1;
    }
    (worst, count)
}

#[test]
fn a_flood_of_scrapes_and_publishes_delays_no_other_namespace() {
    let fixture = Fixture::new("flood");
    let mut world = World::prepare(&fixture);
    world.start_node_with(&["--health-address", "127.0.0.1:0"]);
    world.node().wait_for_log("serving /healthz");
    let log = world.node().errors();
    let address = log.lines().find_map(|it| it.split("address=").nth(1)).unwrap().split(' ').next().unwrap().to_owned();

    // One mount hangs; who would replace its engine is frozen as well.
    let hung = world.serve(&[1]);
    world.publish(&volume(&world, 1, "victim"));
    let engine = world.engine();
    hung.mounter().signal(Signal::STOP);
    freeze(engine);
    // Another one is healthy, and is to be unpublished; a third is to be published.
    let healthy = world.serve(&[2, 3]);
    world.publish(&volume(&world, 2, "innocent"));
    // A mounter that listens and never answers, for many workloads.
    let silent = world.create_pod(1000);
    world.set_phase(&silent, "Running");
    let flood: Vec<u32> = (1000..1000 + PUBLISHES).collect();
    world.assign(&silent.name, &flood);
    let socket = silent.directory.join("mount.sock");
    let _listener: UnixListener = crate::hostile::listen(&socket);

    let attacker = world.runtime.block_on(async { world.plugin.kubelet() });
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let probes = scope.spawn(|| probe_until(&address, &is_over));
        let scrapes: Vec<_> =
            (0..SCRAPES).map(|_| scope.spawn(|| probe(&address, "/metrics", Duration::from_secs(30)))).collect();
        let calls: Vec<_> = flood
            .iter()
            .map(|it| {
                let volume = volume(&world, *it, "greedy");
                fs::create_dir_all(world.kubelet.target(&volume).parent().unwrap()).unwrap();
                let mut request = tonic::Request::new(world.kubelet.publish_request(&volume));
                request.set_timeout(OTHERS_WAIT);
                let mut node = attacker.node();
                world.runtime.spawn(async move { node.node_publish_volume(request).await })
            })
            .collect();
        wait_for("the flood has reached the silent mounter", || world.source_exists(&silent));

        let start = Instant::now();
        let target = world.publish(&volume(&world, 3, "innocent"));
        fs::write(target.join("file"), "x").unwrap();
        world.unpublish(&volume(&world, 2, "innocent"));
        world.unpublish(&volume(&world, 3, "innocent"));
        assert!(start.elapsed() < OTHERS_WAIT, "others waited for {:?}", start.elapsed());

        let answered = scrapes.into_iter().map(|it| it.join().unwrap()).filter(|it| *it == Some(200)).count();
        assert!(0 < answered, "no scrape was answered");
        for call in calls {
            let refused = world.runtime.block_on(call).unwrap();
            assert!(refused.is_err(), "a volume of the silent mounter was published");
        }
        is_over.store(true, Ordering::SeqCst);
        let (worst, count) = probes.join().unwrap();
        println!("{answered} of {SCRAPES} scrapes answered; {worst} of {count} probes failed in a row");
        assert!(worst <= PROBES_THAT_MAY_FAIL, "kubelet would restart the plugin: {worst} probes in a row of {count}");
    });

    rustix::process::kill_process(engine, Signal::CONT).unwrap();
    hung.mounter().signal(Signal::CONT);
    fs::remove_file(&socket).unwrap();
    world.unpublish(&volume(&world, 1, "victim"));
    world.retire(&hung);
    world.retire(&healthy);
}
