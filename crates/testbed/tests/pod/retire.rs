//! The end of sources: when the controller says so, or their Mountpoint Pod is gone; and never while somebody uses them.

use std::fs;

use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::wait::wait_for;

use crate::world::World;

#[test]
fn a_source_in_use_is_never_taken_away() {
    let fixture = Fixture::new("retire-used");
    let mut world = World::start(&fixture);
    let pod = world.serve(&[1, 2]);
    let targets = [1, 2].map(|it| world.publish(&world.volume(it)));
    world.annotate_needs_unmount(&pod);
    world.node().wait_for_log("still in use");
    for target in &targets {
        fs::write(target.join("file"), "x").unwrap();
    }
    // The end is not announced either, so that a dying engine would be replaced.
    assert!(!pod.directory.join("mount.exit").exists());

    world.unpublish(&world.volume(1));
    // A restarted plugin checks it as well.
    world.kill_node();
    world.start_node();
    world.node().wait_for_log("still in use");
    fs::write(targets[1].join("more"), "x").unwrap();

    world.unpublish(&world.volume(2));
    world.wait_for_end_of(&pod);
    world.check_nothing_mounted();
}

#[test]
fn an_engine_that_dies_while_its_source_waits_for_the_last_workload_is_replaced() {
    let fixture = Fixture::new("retire-dies");
    let world = World::start(&fixture);
    let pod = world.serve(&[1]);
    let target = world.publish(&world.volume(1));
    world.annotate_needs_unmount(&pod);
    world.node().wait_for_log("still in use");
    let engine = world.engine();
    rustix::process::kill_process(engine, rustix::process::Signal::KILL).unwrap();
    fs::write(target.join("file"), "x").unwrap();
    assert_ne!(world.engine(), engine);
    world.unpublish(&world.volume(1));
    world.wait_for_end_of(&pod);
    world.check_nothing_mounted();
}

#[test]
fn a_mountpoint_pod_that_never_had_a_workload_ends() {
    let fixture = Fixture::new("retire-idle");
    let world = World::start(&fixture);
    let pod = world.serve(&[1]);
    world.retire(&pod);
    world.check_nothing_mounted();
}

#[test]
fn what_was_annotated_while_no_plugin_ran_is_taken_away_at_its_start() {
    let fixture = Fixture::new("retire-later");
    let mut world = World::start(&fixture);
    let pod = world.serve(&[1]);
    world.publish(&world.volume(1));
    world.unpublish(&world.volume(1));
    world.kill_node();
    world.annotate_needs_unmount(&pod);
    world.start_node();
    world.wait_for_end_of(&pod);
    world.check_nothing_mounted();
}

#[test]
fn the_source_of_a_mountpoint_pod_that_is_gone_is_taken_away() {
    let fixture = Fixture::new("retire-gone");
    let world = World::start(&fixture);
    let pod = world.serve(&[1]);
    world.publish(&world.volume(1));
    world.unpublish(&world.volume(1));
    assert!(world.source_exists(&pod));
    world.delete_pod(&pod);
    world.check_nothing_mounted();
}

#[test]
fn the_source_of_a_mountpoint_pod_that_is_gone_goes_with_its_last_workload() {
    let fixture = Fixture::new("retire-gone-used");
    let world = World::start(&fixture);
    let pod = world.serve(&[1]);
    let target = world.publish(&world.volume(1));
    world.delete_pod(&pod);
    wait_for("the node has seen it", || world.node().log_contains("still in use"));
    assert!(world.mounts().contains(&target));
    world.unpublish(&world.volume(1));
    world.check_nothing_mounted();
}

#[test]
fn what_is_not_a_source_is_left_alone() {
    let fixture = Fixture::new("retire-foreign");
    let world = World::start(&fixture);
    let foreign = world.plugin.sources().join("somebody-elses");
    fs::create_dir(&foreign).unwrap();
    let pod = world.serve(&[1]);
    world.publish(&world.volume(1));
    world.unpublish(&world.volume(1));
    world.retire(&pod);
    assert!(foreign.is_dir());
    fs::remove_dir(&foreign).unwrap();
}
