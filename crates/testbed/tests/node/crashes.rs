//! The node plugin, and what it works with, dies between any two steps of a publish or an unpublish. The next
//! call finishes the work or cleans up.

use std::fs;

use rustix::process::{Signal, kill_process};
use s3csi_s3_server::{Effect, Fault};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::wait::wait_for;
use tonic::Code;

use crate::world::{BUCKET, World, check_refused, volume};

/// Who is killed besides the node plugin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Also {
    Nothing,
    Engines,
    Mounter,
    MounterAndEngines,
}

const EVERY_COMBINATION: [Also; 4] = [Also::Nothing, Also::Engines, Also::Mounter, Also::MounterAndEngines];

fn kill_also(world: &mut World<'_>, also: Also) {
    if matches!(also, Also::Mounter | Also::MounterAndEngines) {
        world.kill_mounter();
        world.start_mounter();
    }
    if matches!(also, Also::Engines | Also::MounterAndEngines) {
        // The mounter may only now be starting one.
        wait_for("no engine runs", || {
            let engines = world.engines();
            for engine in &engines {
                // It may have ended by itself.
                let _ = kill_process(*engine, Signal::KILL);
            }
            engines.is_empty()
        });
    }
}

/// A node whose plugin has just died in a publish.
fn crash_in_publish(world: &mut World<'_>, step: &str, also: Also) {
    world.start_node_with(&["--stop-after", step]);
    let outcome = world.try_publish(&volume(1));
    assert!(outcome.is_err(), "{step}: the call was answered");
    world.wait_for_end_of_node();
    kill_also(world, also);
}

/// A node whose plugin has just died in an unpublish.
fn crash_in_unpublish(world: &mut World<'_>, step: &str, also: Also) {
    world.start_node();
    world.publish(&volume(1));
    world.kill_node();
    world.start_node_with(&["--stop-after", step]);
    let outcome = world.try_unpublish(&volume(1));
    assert!(outcome.is_err(), "{step}: the call was answered");
    world.wait_for_end_of_node();
    kill_also(world, also);
}

fn check_publish(step: &str) {
    let fixture = Fixture::new(&format!("crash-publish-{step}"));
    let mut world = World::prepare(&fixture);
    world.start_mounter();
    for also in EVERY_COMBINATION {
        // Kubelet tries again.
        crash_in_publish(&mut world, step, also);
        check_recovery(&mut world);

        // The Pod was deleted meanwhile: kubelet unpublishes what it never saw published.
        crash_in_publish(&mut world, step, also);
        world.start_node();
        world.unpublish(&volume(1));
        world.check_nothing_left();
        world.stop_node();
    }
    if step != "bound" {
        // Kubelet never comes back: the plugin clears up by itself when it starts.
        crash_in_publish(&mut world, step, Also::Nothing);
        world.start_node();
        world.check_nothing_left();
        world.stop_node();
    }
}

/// A restarted plugin serves the volume and leaves nothing of it.
fn check_recovery(world: &mut World<'_>) {
    world.start_node();
    let target = world.publish(&volume(1));
    fs::write(target.join("file"), "x").unwrap();
    world.unpublish(&volume(1));
    world.check_nothing_left();
    world.stop_node();
}

fn check_unpublish(step: &str) {
    let fixture = Fixture::new(&format!("crash-unpublish-{step}"));
    let mut world = World::prepare(&fixture);
    world.start_mounter();
    for also in EVERY_COMBINATION {
        // Kubelet tries again.
        crash_in_unpublish(&mut world, step, also);
        world.start_node();
        world.unpublish(&volume(1));
        assert!(!world.kubelet.target(&volume(1)).exists(), "{step}");
        world.check_nothing_left();
        world.stop_node();

        // The same volume is wanted again before.
        crash_in_unpublish(&mut world, step, also);
        check_recovery(&mut world);
    }
    if step != "locked" {
        crash_in_unpublish(&mut world, step, Also::Nothing);
        world.start_node();
        world.check_nothing_left();
        world.stop_node();
    }
}

#[test]
fn publish_locked() {
    check_publish("locked");
}

#[test]
fn publish_directory_created() {
    check_publish("directory-created");
}

#[test]
fn publish_credentials_written() {
    check_publish("credentials-written");
}

#[test]
fn publish_connected() {
    check_publish("connected");
}

#[test]
fn publish_fuse_mounted() {
    check_publish("fuse-mounted");
}

#[test]
fn publish_handed_over() {
    check_publish("handed-over");
}

#[test]
fn publish_served() {
    check_publish("served");
}

#[test]
fn publish_bound() {
    check_publish("bound");
}

#[test]
fn unpublish_locked() {
    check_unpublish("locked");
}

#[test]
fn unpublish_unbound() {
    check_unpublish("unbound");
}

#[test]
fn unpublish_target_removed() {
    check_unpublish("target-removed");
}

#[test]
fn unpublish_source_unmounted() {
    check_unpublish("source-unmounted");
}

#[test]
fn unpublish_source_removed() {
    check_unpublish("source-removed");
}

#[test]
fn unpublish_engine_ended() {
    check_unpublish("engine-ended");
}

#[test]
fn unpublish_credentials_removed() {
    check_unpublish("credentials-removed");
}

#[test]
fn an_engine_killed_at_its_start_is_an_error_and_the_next_publish_works() {
    let fixture = Fixture::new("crash-engine-start");
    let world = World::start(&fixture);
    let frozen = world.store.inject(Fault::new(Effect::Frozen).bucket(BUCKET));
    let publish = world.publish_in_background(&volume(1));
    wait_for("the engine asks the store", || 0 < frozen.hits());
    world.kill_engine();
    let outcome = world.runtime.block_on(publish).unwrap();
    check_refused(outcome, Code::Internal, &["Could not mount", BUCKET, "signal 9"]);
    world.check_nothing_left();

    frozen.release();
    world.publish(&volume(1));
    world.unpublish(&volume(1));
    world.check_nothing_left();
}

#[test]
fn a_mounter_killed_during_a_start_is_an_error_and_the_next_publish_works() {
    let fixture = Fixture::new("crash-mounter-start");
    let mut world = World::start(&fixture);
    let frozen = world.store.inject(Fault::new(Effect::Frozen).bucket(BUCKET));
    let publish = world.publish_in_background(&volume(1));
    wait_for("the engine asks the store", || 0 < frozen.hits());
    world.kill_mounter();
    let outcome = world.runtime.block_on(publish).unwrap();
    check_refused(outcome, Code::Unavailable, &["Could not mount", BUCKET, "the mounter ended"]);

    // The engine of the dead mounter finds its mount gone as soon as the store answers.
    frozen.release();
    world.start_mounter();
    world.check_nothing_left();
    world.publish(&volume(1));
    world.unpublish(&volume(1));
    world.check_nothing_left();
}
