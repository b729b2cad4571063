//! The node plugin dies between any two steps. The next one finishes the call or cleans up.

use std::fs;

use s3csi_testbed::fixture::Fixture;

use crate::world::World;

/// A node whose plugin has just died in a publish.
fn crash_in_publish(world: &mut World<'_>, step: &str) {
    world.start_node_with(&["--stop-after", step]);
    let outcome = world.try_publish(&world.volume(1));
    assert!(outcome.is_err(), "{step}: the call was answered");
    world.wait_for_end_of_node();
}

fn check_publish(step: &str) {
    let fixture = Fixture::new(&format!("pod-crash-publish-{step}"));
    let mut world = World::prepare(&fixture);
    let pod = world.serve(&[1]);

    // Kubelet tries again.
    crash_in_publish(&mut world, step);
    world.start_node();
    let target = world.publish(&world.volume(1));
    fs::write(target.join("file"), "x").unwrap();
    assert_eq!(world.engines().len(), 1, "{step}");
    world.unpublish(&world.volume(1));
    world.retire(&pod);
    world.check_nothing_mounted();
    world.delete_pod(&pod);
    world.stop_node();

    // The workload was deleted meanwhile: kubelet unpublishes what it never saw published.
    let pod = world.serve(&[1]);
    crash_in_publish(&mut world, step);
    world.start_node();
    world.unpublish(&world.volume(1));
    world.retire(&pod);
    world.check_nothing_mounted();
    world.delete_pod(&pod);
    world.stop_node();

    if step != "bound" {
        // Kubelet never comes back, and the controller notices.
        let pod = world.serve(&[1]);
        crash_in_publish(&mut world, step);
        world.annotate_needs_unmount(&pod);
        world.start_node();
        world.wait_for_end_of(&pod);
        world.check_nothing_mounted();
    }
}

fn check_unpublish(step: &str) {
    let fixture = Fixture::new(&format!("pod-crash-unpublish-{step}"));
    let mut world = World::prepare(&fixture);
    let pod = world.serve(&[1]);
    let crash = |world: &mut World<'_>| {
        world.start_node();
        world.publish(&world.volume(1));
        world.kill_node();
        world.start_node_with(&["--stop-after", step]);
        let outcome = world.try_unpublish(&world.volume(1));
        assert!(outcome.is_err(), "{step}: the call was answered");
        world.wait_for_end_of_node();
        world.start_node();
    };

    // The same volume is wanted again before kubelet has tried again.
    crash(&mut world);
    let target = world.publish(&world.volume(1));
    fs::write(target.join("file"), "x").unwrap();
    world.stop_node();

    crash(&mut world);
    world.unpublish(&world.volume(1));
    assert!(!world.kubelet.target(&world.volume(1)).exists(), "{step}");
    world.retire(&pod);
    world.check_nothing_mounted();
}

fn check_retire(step: &str) {
    let fixture = Fixture::new(&format!("pod-crash-retire-{step}"));
    let mut world = World::start(&fixture);
    let pod = world.serve(&[1]);
    world.publish(&world.volume(1));
    world.unpublish(&world.volume(1));
    world.stop_node();
    world.start_node_with(&["--stop-after", step]);
    world.annotate_needs_unmount(&pod);
    world.wait_for_end_of_node();
    world.start_node();
    world.wait_for_end_of(&pod);
    world.check_nothing_mounted();
}

macro_rules! crashes {
    ($($name:ident: $check:ident($step:literal);)*) => {$(
        #[test]
        fn $name() {
            $check($step);
        }
    )*};
}

crashes! {
    publish_locked: check_publish("locked");
    publish_directory_created: check_publish("directory-created");
    publish_credentials_written: check_publish("credentials-written");
    publish_connected: check_publish("connected");
    publish_fuse_mounted: check_publish("fuse-mounted");
    publish_handed_over: check_publish("handed-over");
    publish_served: check_publish("served");
    publish_bound: check_publish("bound");
    unpublish_locked: check_unpublish("locked");
    unpublish_unbound: check_unpublish("unbound");
    unpublish_target_removed: check_unpublish("target-removed");
    retire_exit_asked: check_retire("exit-asked");
    retire_source_unmounted: check_retire("source-unmounted");
    retire_source_removed: check_retire("source-removed");
    retire_credentials_removed: check_retire("credentials-removed");
}

#[test]
fn an_unused_dead_mount_is_removed_by_the_next_plugin() {
    let fixture = Fixture::new("pod-crash-forgotten");
    let mut world = World::prepare(&fixture);
    let _pod = world.serve(&[1]);
    crash_in_publish(&mut world, "fuse-mounted");
    assert_eq!(world.mounts().len(), 1);
    world.start_node();
    world.check_nothing_mounted();
}
