//! A Mountpoint Pod is replaced while workloads use its mount: the next one takes over without errors.

use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use rustix::process::Pid;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::noise::noise;
use s3csi_testbed::processes::resident_kilobytes;
use s3csi_testbed::steady_reader::SteadyReader;
use s3csi_testbed::wait::wait_for;

use crate::world::{MountpointPod, World};

const MOVED: &str = "mount moved to another mounter";
const MOUNTED: &str = "s3.csi.scality.com/Mounted";
const MOVABLE: &str = "s3.csi.scality.com/Movable";

/// Writes small files, one after the other, and compares them.
struct SmallWriter {
    is_over: Arc<AtomicBool>,
    thread: JoinHandle<u64>,
}

impl SmallWriter {
    fn start(directory: &Path) -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let (directory, over) = (directory.to_owned(), is_over.clone());
        let write = move || {
            let mut files = 0;
            while !over.load(Ordering::Relaxed) {
                let (path, content) = (directory.join(format!("small-{files}")), noise(files, 10_000));
                fs::write(&path, &content).unwrap();
                let read = fs::read(&path).unwrap();
                assert!(read == content, "{} has {} bytes, or other ones", path.display(), read.len());
                files += 1;
            }
            files
        };
        Self { is_over, thread: std::thread::spawn(write) }
    }

    /// How many files were written without an error.
    #[track_caller]
    fn finish(self) -> u64 {
        self.is_over.store(true, Ordering::Relaxed);
        self.thread.join().expect("no write failed")
    }
}

#[track_caller]
fn wait_until_served_by(world: &World<'_>, pod: &MountpointPod) {
    wait_for("the new Mountpoint Pod serves", || world.engines_of(pod).len() == 1 && world.engines().len() == 1);
}

#[track_caller]
fn check_condition(world: &World<'_>, pod: &MountpointPod, kind: &str, expected: &str) {
    let condition = || world.runtime.block_on(world.cluster.condition(&pod.name, kind)).unwrap_or_default();
    wait_for(&format!("{kind} is {expected}"), || condition().starts_with(expected));
}

/// kubelet cannot unmount the directory of a Pod that has ended, nor delete the Pod, while another process has it open.
#[track_caller]
fn check_directory_is_closed(world: &World<'_>, pod: &MountpointPod) {
    let open = || {
        let descriptors = fs::read_dir(format!("/proc/{}/fd", world.node().pid())).unwrap();
        let links = descriptors.filter_map(|it| fs::read_link(it.ok()?.path()).ok());
        links.filter(|it| it.to_string_lossy().contains(&pod.uid)).count()
    };
    wait_for("the node plugin has closed the directory of the old Pod", || open() == 0);
}

#[test]
fn a_pod_that_is_deleted_hands_its_mount_over_without_an_error() {
    let fixture = Fixture::new("moves-deleted");
    let world = World::start(&fixture);
    let old = world.serve(&[1, 2]);
    let target = world.publish(&world.volume(1));
    let content = noise(1, 100_000);
    fs::write(target.join("kept"), &content).unwrap();
    let before = fs::metadata(&target).unwrap().dev();
    check_condition(&world, &old, MOVABLE, "True MountHeld");
    let reader = SteadyReader::start(&target, "kept", &content);
    let writer = SmallWriter::start(&target);

    world.begin_deletion(&old);
    let new = world.run_successor(&old, &[]);
    world.node().wait_for_log(MOVED);
    reader.wait_for_rounds(5);
    let files = writer.finish();
    let report = reader.finish_without_errors();
    println!("{} rounds, the longest took {:?}; {files} files written", report.rounds, report.longest);
    assert_eq!(fs::metadata(&target).unwrap().dev(), before, "it is the same mount");
    wait_until_served_by(&world, &new);
    check_condition(&world, &new, MOUNTED, "True Serving");
    check_condition(&world, &new, MOVABLE, "True MountHeld");
    check_condition(&world, &old, MOUNTED, "False MountMoved");
    check_directory_is_closed(&world, &old);
    world.finish_deletion(&old);

    // Workloads that come later use the same source.
    let second = world.publish(&world.volume(2));
    assert_eq!(fs::metadata(&second).unwrap().dev(), before);
    world.unpublish(&world.volume(1));
    world.unpublish(&world.volume(2));
    world.retire(&new);
    world.check_nothing_mounted();
}

#[test]
fn a_replaced_pod_ends_without_being_deleted() {
    let fixture = Fixture::new("moves-replaced");
    let world = World::start(&fixture);
    let old = world.serve(&[1]);
    let target = world.publish(&world.volume(1));
    fs::write(target.join("kept"), "x").unwrap();
    let before = fs::metadata(&target).unwrap().dev();
    let reader = SteadyReader::start(&target, "kept", b"x");
    let new = world.run_successor(&old, &[]);
    // It has its exit file and exits by itself; its keys are gone.
    world.finish_deletion(&old);
    wait_until_served_by(&world, &new);
    reader.wait_for_rounds(5);
    reader.finish_without_errors();
    assert_eq!(fs::metadata(&target).unwrap().dev(), before, "it is the same mount");
    // The next container of the new Pod resumes the mount, too.
    world.kill_mounter(&new);
    let new = world.start_mounter(&new, &[]);
    assert_eq!(fs::read(target.join("kept")).unwrap(), b"x");
    assert_eq!(fs::metadata(&target).unwrap().dev(), before, "it is the same mount");
    world.unpublish(&world.volume(1));
    world.retire(&new);
    world.check_nothing_mounted();
}

#[test]
fn a_big_file_delays_the_move_and_is_stored() {
    let fixture = Fixture::new("moves-busy");
    let world = World::start(&fixture);
    let old = world.run_pod_with(1, &["--drain-time", "1s"]);
    world.assign(&old.name, &[1]);
    let target = world.publish(&world.volume(1));
    let content = noise(3, 20 << 20);
    let mut file = File::create(target.join("big")).unwrap();
    file.write_all(&content).unwrap();
    let new = world.run_successor(&old, &["--drain-time", "1s"]);
    world.node().wait_for_log("mount not moved");
    assert_eq!(world.engines_of(&old).len(), 1, "the old one serves on");
    let events = || world.runtime.block_on(world.cluster.events(&world.workload(1)));
    wait_for("an Event on the workload", || events().iter().any(|it| it.contains("MountNotMoved")));
    file.sync_all().unwrap();
    drop(file);
    world.node().wait_for_log(MOVED);
    wait_until_served_by(&world, &new);
    assert!(fs::read(target.join("big")).unwrap() == content, "other bytes");
    world.finish_deletion(&old);
    world.unpublish(&world.volume(1));
    world.retire(&new);
    world.check_nothing_mounted();
}

#[test]
fn a_new_pod_that_cannot_take_over_leaves_the_mount_where_it_is() {
    let fixture = Fixture::new("moves-refused");
    let world = World::start(&fixture);
    let old = world.serve(&[1]);
    let target = world.publish(&world.volume(1));
    fs::write(target.join("kept"), "x").unwrap();
    let engine = world.engine();
    let reader = SteadyReader::start(&target, "kept", b"x");
    let new = world.run_successor(&old, &["--keep", "off"]);
    world.node().wait_for_log("mount not moved");
    reader.wait_for_rounds(5);
    reader.finish_without_errors();
    assert_eq!(world.engine(), engine, "the old one serves on");
    world.delete_pod(&new);
    world.unpublish(&world.volume(1));
    world.retire(&old);
    world.check_nothing_mounted();
}

/// The node plugin dies in the middle of a move; the next one finishes it.
#[track_caller]
fn check_crash(step: &str) {
    let fixture = Fixture::new(&format!("moves-crash-{step}"));
    let mut world = World::prepare(&fixture);
    world.start_node_with(&["--stop-after", step]);
    let old = world.serve(&[1]);
    let target = world.publish(&world.volume(1));
    fs::write(target.join("kept"), "x").unwrap();
    let before = fs::metadata(&target).unwrap().dev();
    let reader = SteadyReader::start(&target, "kept", b"x");
    let new = world.run_successor(&old, &[]);
    world.wait_for_end_of_node();
    world.start_node();
    world.node().wait_for_log("mount of an earlier process is held");
    // kubelet repeats its call, which brings the keys.
    world.publish(&world.volume(1));
    wait_until_served_by(&world, &new);
    reader.wait_for_rounds(5);
    reader.finish_without_errors();
    assert_eq!(fs::metadata(&target).unwrap().dev(), before, "it is the same mount");
    world.finish_deletion(&old);
    world.unpublish(&world.volume(1));
    world.retire(&new);
    world.check_nothing_mounted();
}

#[test]
fn a_node_plugin_that_dies_when_the_new_pod_is_prepared() {
    check_crash("move-prepared");
}

#[test]
fn a_node_plugin_that_dies_when_the_old_pod_has_released_the_mount() {
    check_crash("move-released");
}

#[test]
fn a_node_plugin_that_dies_after_the_new_pod_was_sent_go() {
    check_crash("move-told");
}

#[test]
fn a_node_plugin_that_dies_when_the_mount_has_moved() {
    check_crash("mount-moved");
}

#[test]
fn moves_leak_no_descriptors_and_no_memory() {
    let fixture = Fixture::new("moves-leaks");
    let world = World::start(&fixture);
    let mut pod = world.serve(&[1]);
    let target = world.publish(&world.volume(1));
    fs::write(target.join("kept"), "x").unwrap();
    let before = fs::metadata(&target).unwrap().dev();
    let descriptors = || descriptors_without_tcp(world.node().pid());
    let reader = SteadyReader::start(&target, "kept", b"x");
    let (mut held, mut memory) = (None, Vec::new());
    for _ in 0..moves() {
        let next = world.run_successor(&pod, &[]);
        world.finish_deletion(&pod);
        wait_until_served_by(&world, &next);
        let limit = *held.get_or_insert_with(descriptors);
        wait_for("no descriptor is left of the move", || descriptors() <= limit + SLACK);
        memory.push(resident_kilobytes(world.node().pid()));
        pod = next;
    }
    // The first moves fill caches and pools.
    let (first, last) = (memory[2], *memory.last().unwrap());
    println!("{} moves: {first} KiB after the third, {last} KiB after the last", memory.len());
    assert!(last < first + TOLERANCE_KILOBYTES, "{first} KiB became {last} KiB");
    reader.finish_without_errors();
    assert_eq!(fs::metadata(&target).unwrap().dev(), before, "it is the same mount");
    world.unpublish(&world.volume(1));
    world.retire(&pod);
    world.check_nothing_mounted();
}

/// What an allocator may keep of freed memory.
const TOLERANCE_KILOBYTES: u64 = 8 << 10;

/// The first count may have been taken before the node plugin had opened all that it needs.
const SLACK: usize = 2;

/// Few in every run, but more than the slack; many in `make soak`.
fn moves() -> u32 {
    std::env::var("S3CSI_SOAK_MOVES").map_or(5, |it| it.parse().unwrap())
}

/// The open descriptors of a process. The client of the API server opens and closes connections as it likes.
fn descriptors_without_tcp(pid: Pid) -> usize {
    let pid = pid.as_raw_pid();
    let tables = ["tcp", "tcp6"].map(|it| fs::read_to_string(format!("/proc/{pid}/net/{it}")).unwrap());
    let tcp: Vec<String> = tables
        .iter()
        .flat_map(|table| table.lines().skip(1))
        .filter_map(|line| line.split_whitespace().nth(9).map(|inode| format!("socket:[{inode}]")))
        .collect();
    let open = fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let links = open.filter_map(|it| fs::read_link(it.unwrap().path()).ok());
    links.filter(|it| !tcp.iter().any(|socket| Path::new(socket) == it)).count()
}
