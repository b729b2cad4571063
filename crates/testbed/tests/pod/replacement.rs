//! A Mountpoint Pod, its container or its engine is gone while workloads need it: the next publish mounts the source anew.

use std::fs;

use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::wait::wait_for;

use crate::world::{MountpointPod, World};

/// What kubelet's next call finds dead, it repairs.
#[track_caller]
fn check_repaired(world: &World<'_>, pod: &MountpointPod) {
    let target = world.publish(&world.volume(1));
    fs::write(target.join("file"), "x").unwrap();
    assert_eq!(world.engines_of(pod).len(), 1);
    assert_eq!(world.mounts().len(), 2);
    world.unpublish(&world.volume(1));
    world.retire(pod);
    world.check_nothing_mounted();
}

#[test]
fn a_container_that_was_restarted_serves_the_source_anew() {
    let fixture = Fixture::new("pod-restarted");
    let world = World::start(&fixture);
    let pod = world.serve(&[1]);
    let target = world.publish(&world.volume(1));
    world.kill_mounter(&pod);
    assert!(fs::read_dir(&target).is_err(), "without an engine the mount is dead");
    let pod = world.start_mounter(&pod, &[]);
    check_repaired(&world, &pod);
}

#[test]
fn a_pod_of_the_same_name_serves_the_source_anew() {
    let fixture = Fixture::new("pod-replaced");
    let world = World::start(&fixture);
    let old = world.serve(&[1]);
    world.publish(&world.volume(1));
    world.delete_pod(&old);
    let new = world.run_pod(1);
    assert_eq!(old.name, new.name);
    assert_ne!(old.uid, new.uid);
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
    world.node().wait_for_log("another one has taken its place");
    check_repaired(&world, &pod);
}

#[test]
fn an_engine_that_takes_its_mount_with_it_is_started_anew_by_the_next_publish() {
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
fn a_frozen_engine_is_replaced_by_the_next_publish() {
    let fixture = Fixture::new("pod-frozen");
    let world = World::start(&fixture);
    let pod = world.run_pod_with(1, &["--keep", "off"]);
    world.assign(&pod.name, &[1]);
    world.publish(&world.volume(1));
    let engine = world.engine();
    s3csi_testbed::processes::freeze(engine);
    world.publish(&world.volume(1));
    assert_ne!(world.engine(), engine);
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
