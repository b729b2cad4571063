//! An engine that neither answers nor exits: no call waits for it for long, and nothing of it stays behind.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use s3csi_s3_server::store::Store as _;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::processes;
use s3csi_testbed::wait::wait_for;
use tonic::Code;

use crate::world::{BUCKET, World, check_refused, device, volume};

const LONGEST_UNPUBLISH: Duration = Duration::from_secs(10);

/// Sends SIGSTOP to the engine and returns its PID. The node gets no notice of it.
fn freeze_engine(world: &World<'_>) -> Pid {
    let engine = world.engine();
    processes::freeze(engine);
    engine
}

/// The states of a process's threads, as in /proc.
fn states(process: Pid) -> Vec<char> {
    let threads = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    threads.filter_map(|it| state(&it.path())).collect()
}

/// Whether the process waits for an answer of a FUSE server.
fn waits_for_fuse(process: Pid) -> bool {
    let place = fs::read_to_string(format!("/proc/{process}/wchan")).unwrap_or_default();
    place.contains("fuse") || place.contains("request_wait_answer") || states(process).contains(&'D')
}

fn state(thread: &Path) -> Option<char> {
    let text = fs::read_to_string(thread.join("stat")).ok()?;
    text.rsplit_once(')')?.1.trim_start().chars().next()
}

/// No thread of the node plugin, the mounter or this test waits in the kernel where no signal reaches it.
fn check_nothing_hangs(world: &World<'_>) {
    let processes = [world.node().pid(), world.mounter().pid(), rustix::process::getpid()];
    for process in processes {
        // A thread may be there for a moment at any time, when it reads from a disk.
        wait_for("no thread hangs", || !states(process).contains(&'D'));
    }
}

#[track_caller]
fn check_unpublish_is_quick(world: &World<'_>, number: u32) {
    let start = Instant::now();
    world.unpublish(&volume(number));
    assert!(start.elapsed() < LONGEST_UNPUBLISH, "took {:?}", start.elapsed());
}

#[test]
fn unpublish_does_not_wait_for_a_frozen_engine_and_ends_it() {
    let fixture = Fixture::new("hung-unpublish");
    let world = World::start(&fixture);
    let target = world.publish(&volume(1));
    let engine = freeze_engine(&world);
    check_unpublish_is_quick(&world, 1);
    assert!(!target.exists());
    assert!(!world.engines().contains(&engine));
    check_nothing_hangs(&world);
    world.check_nothing_left();
}

#[test]
fn unpublish_frees_a_reader_that_waits_for_a_frozen_engine() {
    let fixture = Fixture::new("hung-reader");
    let world = World::start(&fixture);
    world.store.put_object(BUCKET, "file", b"content").unwrap();
    let target = world.publish(&volume(1));
    freeze_engine(&world);
    let mut reader = Command::new("cat").arg(target.join("file")).stdout(Stdio::null()).spawn().unwrap();
    let pid = Pid::from_child(&reader);
    wait_for("the reader waits for the engine", || {
        assert_eq!(reader.try_wait().unwrap(), None, "the reader did not wait");
        waits_for_fuse(pid)
    });

    check_unpublish_is_quick(&world, 1);
    assert!(!reader.wait().unwrap().success(), "the reader must get an error");
    check_nothing_hangs(&world);
    world.check_nothing_left();
}

#[test]
fn unpublish_of_one_target_leaves_the_frozen_engine_to_the_other() {
    let fixture = Fixture::new("hung-shared");
    let world = World::start(&fixture);
    world.publish(&volume(1));
    let other = world.publish(&volume(2));
    let engine = freeze_engine(&world);
    check_unpublish_is_quick(&world, 1);
    kill_process(engine, Signal::CONT).unwrap();
    fs::write(other.join("file"), "x").unwrap();
    world.unpublish(&volume(2));
    world.check_nothing_left();
}

#[test]
fn a_publish_waits_until_the_supervisor_has_replaced_a_frozen_engine() {
    let fixture = Fixture::new("hung-publish");
    let world = World::start(&fixture);
    let target = world.publish(&volume(1));
    fs::write(target.join("kept"), "x").unwrap();
    let engine = freeze_engine(&world);
    world.publish(&volume(1));
    assert_eq!(fs::read_to_string(target.join("kept")).unwrap(), "x");
    assert_ne!(world.engine(), engine);
    check_nothing_hangs(&world);
    world.unpublish(&volume(1));
    world.check_nothing_left();
}

#[test]
fn other_volumes_are_served_while_one_engine_is_frozen() {
    let fixture = Fixture::new("hung-others");
    let world = World::start(&fixture);
    let frozen = world.publish(&volume(1));
    let engine = freeze_engine(&world);
    let mut other = volume(2);
    other.pv = "pv-2".to_owned();
    other.bucket = "bucket-2".to_owned();
    let start = Instant::now();
    let target = world.publish(&other);
    assert!(start.elapsed() < LONGEST_UNPUBLISH, "took {:?}", start.elapsed());
    fs::write(target.join("file"), "x").unwrap();
    world.unpublish(&other);

    kill_process(engine, Signal::CONT).unwrap();
    assert_ne!(device(&frozen), device(frozen.parent().unwrap()));
    world.unpublish(&volume(1));
    world.check_nothing_left();
}

#[test]
fn calls_do_not_wait_long_for_a_frozen_mounter() {
    let fixture = Fixture::new("hung-mounter");
    let world = World::start(&fixture);
    let target = world.publish(&volume(1));
    world.mounter().signal(Signal::STOP);

    // What is mounted goes on working, and goes.
    fs::write(target.join("file"), "x").unwrap();
    world.publish(&volume(1));
    check_unpublish_is_quick(&world, 1);
    assert!(!target.exists());

    // What needs the mounter fails in time.
    let outcome = world.try_publish_within(&volume(1), Duration::from_secs(4));
    check_refused(outcome, Code::DeadlineExceeded, &["Could not mount", "did not answer in time"]);

    // Abandoned requests do no harm.
    world.mounter().signal(Signal::CONT);
    world.check_nothing_left();
    fs::write(world.publish(&volume(1)).join("again"), "x").unwrap();
    world.unpublish(&volume(1));
    world.check_nothing_left();
}
