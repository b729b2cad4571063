//! A Mountpoint Pod, its container or its engine is gone while workloads need it: the next publish mounts the source again.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt as _;

use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::noise::noise;
use s3csi_testbed::steady_reader::SteadyReader;
use s3csi_testbed::wait::wait_for;
use tonic::Code;

use crate::world::{MountpointPod, World, check_refused};

/// What kubelet's next call finds dead, it repairs.
#[track_caller]
fn check_repaired(world: &World<'_>, pod: &MountpointPod) {
    let target = world.publish(&world.volume(1));
    fs::write(target.join("file"), "x").unwrap();
    assert_eq!(world.engines_of(pod).len(), 1);
    // Beneath the target there may still be the dead mount that it covers.
    let places: BTreeSet<_> = world.mounts().into_iter().collect();
    assert_eq!(places.len(), 2, "{places:?}");
    world.unpublish(&world.volume(1));
    world.retire(pod);
    world.check_nothing_mounted();
}

#[test]
fn readers_see_no_error_when_the_container_is_killed_and_restarted() {
    let fixture = Fixture::new("pod-restarted");
    let world = World::start(&fixture);
    let pod = world.serve(&[1]);
    let target = world.publish(&world.volume(1));
    let content = noise(1, 100_000);
    fs::write(target.join("kept"), &content).unwrap();
    let before = fs::metadata(&target).unwrap().dev();
    let reader = SteadyReader::start(&target, "kept", &content);
    world.kill_mounter(&pod);
    let pod = world.start_mounter(&pod, &[]);
    reader.wait_for_rounds(5);
    let report = reader.finish_without_errors();
    println!("{} rounds, the longest took {:?}", report.rounds, report.longest);
    assert_eq!(fs::metadata(&target).unwrap().dev(), before, "it is the same mount");
    world.node().wait_for_log("a new engine resumed its mount");
    check_repaired(&world, &pod);
}

#[test]
fn readers_see_no_error_when_the_pod_is_deleted_and_created_again() {
    let fixture = Fixture::new("pod-replaced");
    let world = World::start(&fixture);
    let old = world.serve(&[1]);
    let target = world.publish(&world.volume(1));
    fs::write(target.join("kept"), "x").unwrap();
    let before = fs::metadata(&target).unwrap().dev();
    let reader = SteadyReader::start(&target, "kept", b"x");
    world.delete_pod(&old);
    let new = world.run_pod(1);
    assert_eq!(old.name, new.name);
    assert_ne!(old.uid, new.uid);
    reader.wait_for_rounds(5);
    reader.finish_without_errors();
    assert_eq!(fs::metadata(&target).unwrap().dev(), before, "it is the same mount");
    check_repaired(&world, &new);
}

#[test]
fn a_pod_that_is_created_again_after_a_restart_of_the_node_plugin_gets_its_keys_with_the_next_publish() {
    let fixture = Fixture::new("pod-replaced-later");
    let mut world = World::start(&fixture);
    let old = world.serve(&[1]);
    let target = world.publish(&world.volume(1));
    fs::write(target.join("kept"), "x").unwrap();
    let before = fs::metadata(&target).unwrap().dev();
    let reader = SteadyReader::start(&target, "kept", b"x");
    world.kill_node();
    world.start_node();
    world.node().wait_for_log("mount of an earlier process is held");
    world.delete_pod(&old);
    let new = world.run_pod(1);
    // kubelet repeats its call; this one finds a mount without an engine.
    let outcome = world.try_publish_within(&world.volume(1), std::time::Duration::from_secs(30));
    println!("{outcome:?}");
    reader.wait_for_rounds(5);
    reader.finish_without_errors();
    assert_eq!(fs::metadata(&target).unwrap().dev(), before, "it is the same mount");
    check_repaired(&world, &new);
}

#[test]
fn another_pod_serves_the_workload_from_its_own_source() {
    let fixture = Fixture::new("pod-moved");
    let world = World::start(&fixture);
    let old = world.serve(&[1]);
    world.publish(&world.volume(1));
    world.delete_pod(&old);
    let new = world.run_pod(2);
    world.assign(&old.name, &[]);
    world.assign(&new.name, &[1]);
    let target = world.publish(&world.volume(1));
    fs::write(target.join("file"), "x").unwrap();
    wait_for("the old source is gone", || !world.source_exists(&old));
    check_repaired(&world, &new);
}

#[test]
fn an_engine_that_dies_is_replaced_by_its_mounter() {
    let fixture = Fixture::new("pod-engine");
    let world = World::start(&fixture);
    let pod = world.serve(&[1]);
    let target = world.publish(&world.volume(1));
    let engine = world.engine();
    rustix::process::kill_process(engine, rustix::process::Signal::KILL).unwrap();
    fs::write(target.join("file"), "x").unwrap();
    world.node().wait_for_log("a new engine resumed its mount");
    check_repaired(&world, &pod);
}

#[test]
fn an_engine_that_removes_its_mount_is_restarted_by_the_next_publish() {
    let fixture = Fixture::new("pod-engine-only");
    let world = World::start(&fixture);
    let pod = world.run_pod_with(1, &["--keep", "off"]);
    world.assign(&pod.name, &[1]);
    let target = world.publish(&world.volume(1));
    let engine = world.engine();
    rustix::process::kill_process(engine, rustix::process::Signal::KILL).unwrap();
    wait_for("the mount is dead", || fs::read_dir(&target).is_err());
    check_repaired(&world, &pod);
}

#[test]
fn a_silent_engine_is_kept_by_a_publish_until_it_is_dead() {
    let fixture = Fixture::new("pod-frozen");
    let world = World::start(&fixture);
    let pod = world.run_pod_with(1, &["--keep", "off"]);
    world.assign(&pod.name, &[1]);
    let target = world.publish(&world.volume(1));
    let (engine, mounts) = (world.engine(), world.mounts());
    s3csi_testbed::processes::freeze(engine);
    let reason = ["has not answered for", "The mount is kept"];
    check_refused(world.try_publish(&world.volume(1)), Code::Unavailable, &reason);
    assert_eq!((world.engine(), world.mounts()), (engine, mounts), "nothing was replaced");
    rustix::process::kill_process(engine, rustix::process::Signal::KILL).unwrap();
    wait_for("the mount is dead", || fs::read_dir(&target).is_err());
    check_repaired(&world, &pod);
}

#[test]
fn a_restart_of_the_node_plugin_is_not_noticed_by_workloads() {
    let fixture = Fixture::new("pod-node-restart");
    let mut world = World::start(&fixture);
    let pod = world.serve(&[1]);
    let target = world.publish(&world.volume(1));
    let (mounts, engine) = (world.mounts(), world.engine());
    world.kill_node();
    fs::write(target.join("while-away"), "x").unwrap();
    world.start_node();
    world.publish(&world.volume(1));
    assert_eq!((world.mounts(), world.engine()), (mounts, engine));
    check_repaired(&world, &pod);
}
