//! The node plugin dies after any step, and systemd is restarted in the middle: nothing is lost, nothing stays behind.

use std::fs;

use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::systemd::{beside_systemd, systemctl};
use s3csi_testbed::wait::wait_for;
use tonic::Code;

use crate::world::{World, check_refused, mount_units, volume};

const PUBLISH_STEPS: [&str; 6] =
    ["locked", "directory-created", "credentials-written", "handed-over", "served", "bound"];
const UNPUBLISH_STEPS: [&str; 5] = ["locked", "unbound", "engine-ended", "target-removed", "credentials-removed"];

/// The node plugin ends right after this step of a publish.
fn crash_in_publish(world: &mut World<'_>, step: &str) {
    world.start_node_with(&["--stop-after", step]);
    assert!(world.try_publish(&volume(1)).is_err(), "{step}: the call was answered");
    world.wait_for_end_of_node();
}

#[test]
fn the_next_publish_finishes_what_a_killed_one_began() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-killed");
        let mut world = World::prepare_beside_systemd(&fixture);
        for step in PUBLISH_STEPS {
            crash_in_publish(&mut world, step);
            world.start_node();
            let target = world.publish(&volume(1));
            world.check_serves(&target);
            assert_eq!(mount_units().len(), 1, "{step}");
            world.unpublish(&volume(1));
            world.check_nothing_left();
            world.stop_node();
        }
    });
}

#[test]
fn an_unpublish_cleans_up_after_a_killed_publish_and_a_killed_unpublish() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-killed-twice");
        let mut world = World::prepare_beside_systemd(&fixture);
        for step in PUBLISH_STEPS {
            crash_in_publish(&mut world, step);
            world.start_node();
            world.unpublish(&volume(1));
            world.check_nothing_left();
            world.stop_node();
        }
        for step in UNPUBLISH_STEPS {
            world.start_node();
            world.publish(&volume(1));
            world.kill_node();
            world.start_node_with(&["--stop-after", step]);
            assert!(world.try_unpublish(&volume(1)).is_err(), "{step}: the call was answered");
            world.wait_for_end_of_node();
            world.start_node();
            world.unpublish(&volume(1));
            world.check_nothing_left();
            world.stop_node();
        }
    });
}

#[test]
fn restarts_of_the_manager_during_mounts_lose_nothing() {
    const COUNT: u32 = 12;
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-reexec");
        let world = World::start_beside_systemd(&fixture);
        let calls: Vec<_> = (0..COUNT).map(|number| world.publish_in_background(&volume(number))).collect();
        for command in ["daemon-reload", "daemon-reexec", "daemon-reload", "daemon-reexec"] {
            systemctl(&[command]);
        }
        for call in calls {
            let target = world.runtime.block_on(call).unwrap().unwrap();
            fs::read_dir(target).unwrap();
        }
        let units = mount_units();
        assert_eq!(units.len(), usize::try_from(COUNT).unwrap());

        // With all of them running: nothing is taken for dead, and a death is still noticed.
        systemctl(&["daemon-reload"]);
        systemctl(&["daemon-reexec"]);
        for number in 0..COUNT {
            world.publish(&volume(number));
        }
        assert_eq!(mount_units(), units);
        assert!(!world.node().log_contains("EngineRemounted"));
        world.kill(world.engines()[0]);
        world.node().wait_for_log("EngineRemounted");
        wait_for("all are served again", || world.engines().len() == units.len());
        for number in 0..COUNT {
            world.unpublish(&volume(number));
        }
        world.check_nothing_left();
    });
}

#[test]
fn a_reload_during_a_start_never_changes_what_is_mounted() {
    const COUNT: u32 = 12;
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-garbled");
        let world = World::start_beside_systemd(&fixture);
        let odd = |number| volume(number).with_option("prefix=a;$b/");
        let calls: Vec<_> = (0..COUNT).map(|number| world.publish_in_background(&odd(number))).collect();
        for _ in 0..10 {
            systemctl(&["daemon-reload"]);
        }
        for call in calls {
            let outcome = world.runtime.block_on(call).unwrap();
            if outcome.is_err() {
                check_refused(outcome, Code::Unavailable, &["systemd was reloaded"]);
            }
        }
        // As kubelet does.
        for number in 0..COUNT {
            world.publish(&odd(number));
        }
        for engine in world.engines() {
            let arguments = fs::read_to_string(format!("/proc/{engine}/cmdline")).unwrap();
            assert!(arguments.contains("--prefix=a;$b/\0"), "{arguments}");
        }
        assert_eq!((mount_units().len(), world.engines().len()), (12, 12));
        for number in 0..COUNT {
            world.unpublish(&odd(number));
        }
        world.check_nothing_left();
    });
}
