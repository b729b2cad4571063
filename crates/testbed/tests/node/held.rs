//! Mounts outlive their mounter: the node plugin holds copies of their descriptors, and the next mounter resumes them.

use std::fs;
use std::io::Write as _;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use s3csi_driver::csi::proto::NodeGetVolumeStatsRequest;
use s3csi_s3_server::store::Store as _;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::noise::noise;
use s3csi_testbed::steady_reader::SteadyReader;
use s3csi_testbed::wait::wait_for;
use tonic::Code;

use crate::world::{BUCKET, World, check_refused, device, volume};

const RESUMED: &str = "a new engine resumed its mount";
const WAITING: &str = "waiting for one that resumes the mount";

/// Kills mounter and engines at once, as the kernel does with a container that uses too much memory.
fn kill_container(world: &mut World<'_>) {
    let engines = world.engine_processes();
    kill_process(world.mounter().pid(), Signal::KILL).unwrap();
    for engine in &engines {
        kill_process(*engine, Signal::KILL).unwrap();
    }
    world.kill_mounter();
    wait_for("the engines are gone", || !world.engine_processes().iter().any(|it| engines.contains(it)));
}

fn descriptors(process: Pid) -> usize {
    fs::read_dir(format!("/proc/{process}/fd")).unwrap().count()
}

#[test]
fn readers_see_no_error_when_mounter_and_engine_are_killed_together() {
    let fixture = Fixture::new("held-killed");
    let mut world = World::start(&fixture);
    let content = noise(1, 100_000);
    world.store.put_object(BUCKET, "file", &content).unwrap();
    let target = world.publish(&volume(1));
    let before = device(&target);
    let reader = SteadyReader::start(&target, "file", &content);
    for _ in 0..3 {
        kill_container(&mut world);
        world.start_mounter();
        reader.wait_for_rounds(5);
    }
    let report = reader.finish_without_errors();
    println!("{} rounds, the longest took {:?}", report.rounds, report.longest);
    assert_eq!(device(&target), before, "it is the same mount");
    world.node().wait_for_log(RESUMED);
    world.check_serves(&target);
    world.unpublish(&volume(1));
    world.check_nothing_left();
}

#[test]
fn every_mount_of_a_killed_mounter_is_resumed() {
    let fixture = Fixture::new("held-many");
    let mut world = World::start(&fixture);
    let mut volumes = Vec::new();
    for number in 1..=4 {
        let mut volume = volume(number);
        volume.pv = format!("pv-{number}");
        volume.bucket = format!("bucket-{number}");
        world.store.put_object(&volume.bucket, "file", b"x").unwrap();
        volumes.push(volume);
    }
    let readers: Vec<_> = volumes.iter().map(|it| SteadyReader::start(&world.publish(it), "file", b"x")).collect();
    kill_container(&mut world);
    world.start_mounter();
    for reader in readers {
        reader.wait_for_rounds(5);
        reader.finish_without_errors();
    }
    for volume in &volumes {
        world.unpublish(volume);
    }
    world.check_nothing_left();
}

#[test]
fn an_engine_that_outlives_its_mounter_serves_on_and_is_replaced_when_it_dies() {
    let fixture = Fixture::new("held-orphan");
    let mut world = World::start(&fixture);
    world.store.put_object(BUCKET, "file", b"x").unwrap();
    let target = world.publish(&volume(1));
    let (engine, before) = (world.engine(), device(&target));
    let reader = SteadyReader::start(&target, "file", b"x");
    world.kill_mounter();
    world.node().wait_for_log(WAITING);
    world.start_mounter();
    reader.wait_for_rounds(5);
    assert_eq!(world.engine(), engine, "an engine that serves was replaced");
    kill_process(engine, Signal::KILL).unwrap();
    world.node().wait_for_log(RESUMED);
    reader.wait_for_rounds(5);
    reader.finish_without_errors();
    assert_eq!(device(&target), before);
    world.unpublish(&volume(1));
    world.check_nothing_left();
}

#[test]
fn a_mount_that_no_mounter_resumes_is_aborted_at_the_limit() {
    const LIMIT: Duration = Duration::from_secs(3);
    let fixture = Fixture::new("held-limit");
    let mut world = World::prepare(&fixture);
    world.start_mounter();
    world.start_node_with(&["--longest-outage", "3s"]);
    world.store.put_object(BUCKET, "file", b"x").unwrap();
    let target = world.publish(&volume(1));
    kill_container(&mut world);
    let killed = Instant::now();
    // It waits for an engine, and fails when the connection is aborted.
    let error = fs::read(target.join("file")).unwrap_err();
    assert!(LIMIT < killed.elapsed() + Duration::from_secs(1), "failed after {:?}: {error}", killed.elapsed());
    world.node().wait_for_log("connection aborted");
    world.start_mounter();
    world.publish(&volume(1));
    world.check_serves(&target);
    world.unpublish(&volume(1));
    world.check_nothing_left();
}

#[test]
fn during_an_outage_publish_reports_it_and_unpublish_works() {
    let fixture = Fixture::new("held-unpublish");
    let mut world = World::start(&fixture);
    let target = world.publish(&volume(1));
    kill_container(&mut world);
    let outcome = world.try_publish_within(&volume(2), Duration::from_secs(3));
    check_refused(outcome, Code::Unavailable, &["the mounter of the source has been gone for"]);
    let request = NodeGetVolumeStatsRequest {
        volume_id: "any".to_owned(),
        volume_path: target.to_string_lossy().into_owned(),
        staging_target_path: String::new(),
    };
    let stats = world.runtime.block_on(world.kubelet.node().node_get_volume_stats(request)).unwrap().into_inner();
    let condition = stats.volume_condition.unwrap();
    assert!(condition.abnormal && condition.message.contains("the mounter has been gone for"), "{condition:?}");
    let begun = Instant::now();
    world.unpublish(&volume(1));
    assert!(begun.elapsed() < Duration::from_secs(10), "took {:?}", begun.elapsed());
    world.start_mounter();
    world.check_nothing_left();
}

#[test]
fn a_restarted_node_plugin_holds_the_mounts_it_finds() {
    let fixture = Fixture::new("held-restart");
    let mut world = World::start(&fixture);
    world.store.put_object(BUCKET, "file", b"x").unwrap();
    let target = world.publish(&volume(1));
    let before = device(&target);
    let reader = SteadyReader::start(&target, "file", b"x");
    world.kill_node();
    world.start_node();
    world.node().wait_for_log("mount of an earlier process is held");
    kill_container(&mut world);
    world.start_mounter();
    reader.wait_for_rounds(5);
    reader.finish_without_errors();
    assert_eq!(device(&target), before);
    world.node().wait_for_log(RESUMED);
    world.unpublish(&volume(1));
    world.check_nothing_left();
}

#[test]
fn hold_and_resume_leak_no_descriptors() {
    let fixture = Fixture::new("held-leaks");
    let mut world = World::start(&fixture);
    let target = world.publish(&volume(1));
    let node = world.node().pid();
    fs::write(target.join("file"), "x").unwrap();
    let held = descriptors(node);
    for _ in 0..5 {
        kill_container(&mut world);
        world.start_mounter();
        assert_eq!(fs::read_to_string(target.join("file")).unwrap(), "x");
        wait_for("no descriptor is left of the resume", || descriptors(node) <= held);
    }
    world.unpublish(&volume(1));
    wait_for("the copies are closed", || descriptors(node) < held);
    world.check_nothing_left();
}

#[test]
fn a_stopping_mounter_serves_all_mounts_until_a_big_file_is_stored() {
    let fixture = Fixture::new("held-stop");
    let mut world = World::start(&fixture);
    let mut other = volume(2);
    "pv-2".clone_into(&mut other.pv);
    "bucket-2".clone_into(&mut other.bucket);
    world.store.put_object(BUCKET, "file", b"x").unwrap();
    let (target, busy) = (world.publish(&volume(1)), world.publish(&other));
    let (before, engines) = (device(&target), world.engine_processes());
    let reader = SteadyReader::start(&target, "file", b"x");
    let content = noise(2, 20 << 20);
    let mut file = fs::File::create(busy.join("big")).unwrap();
    file.write_all(&content).unwrap();
    world.mounter().signal(Signal::TERM);
    world.mounter().wait_for_log("stop requested");
    reader.wait_for_rounds(20);
    assert_eq!(world.engine_processes(), engines, "engines serve on until nothing is lost");
    let mut third = volume(3);
    "pv-3".clone_into(&mut third.pv);
    "bucket-3".clone_into(&mut third.bucket);
    check_refused(world.try_publish(&third), Code::Internal, &["this mounter is shutting down"]);
    file.sync_all().unwrap();
    drop(file);
    assert!(world.mounter().wait_for_end().success());
    world.start_mounter();
    reader.wait_for_rounds(5);
    reader.finish_without_errors();
    assert_eq!(device(&target), before, "it is the same mount");
    assert!(fs::read(busy.join("big")).unwrap() == content, "other bytes");
    world.unpublish(&volume(1));
    world.unpublish(&other);
    world.check_nothing_left();
}

#[test]
fn a_stopping_mounter_serves_until_a_node_plugin_holds_its_mounts_again() {
    let fixture = Fixture::new("held-stop-alone");
    let mut world = World::start(&fixture);
    world.store.put_object(BUCKET, "file", b"x").unwrap();
    let target = world.publish(&volume(1));
    let (before, engine) = (device(&target), world.engine());
    let reader = SteadyReader::start(&target, "file", b"x");
    world.kill_node();
    world.mounter().signal(Signal::TERM);
    world.mounter().wait_for_log("stop requested");
    reader.wait_for_rounds(20);
    assert_eq!(world.engine(), engine, "without a node plugin nothing would hold the mount");
    assert!(world.mounter().is_running());
    world.start_node();
    world.mounter().wait_for_log("mounts released for the next mounter");
    assert!(world.mounter().wait_for_end().success());
    world.start_mounter();
    reader.wait_for_rounds(5);
    reader.finish_without_errors();
    assert_eq!(device(&target), before, "it is the same mount");
    assert_ne!(world.engine(), engine);
    world.unpublish(&volume(1));
    world.check_nothing_left();
}

#[test]
fn a_stopping_node_plugin_waits_until_its_mounts_are_served() {
    let fixture = Fixture::new("held-node-stop");
    let mut world = World::start(&fixture);
    world.store.put_object(BUCKET, "file", b"x").unwrap();
    let target = world.publish(&volume(1));
    let before = device(&target);
    let reader = SteadyReader::start(&target, "file", b"x");
    kill_container(&mut world);
    world.node().wait_for_log(WAITING);
    world.node().signal(Signal::TERM);
    world.node().wait_for_log("ending when they are served");
    world.start_mounter();
    reader.wait_for_rounds(5);
    world.wait_for_end_of_node();
    reader.wait_for_rounds(5);
    reader.finish_without_errors();
    assert_eq!(device(&target), before, "it is the same mount");
    world.start_node();
    world.unpublish(&volume(1));
    world.check_nothing_left();
}
