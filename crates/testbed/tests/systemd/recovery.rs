//! "Recovery actions": what the guide of earlier drivers leaves to the administrator happens by itself.

use std::fs;
use std::process::Command;

use rustix::process::{Signal, kill_process};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::systemd::{beside_systemd, systemctl, units};
use s3csi_testbed::wait::wait_for;

use crate::world::{World, mount_units, only_unit, volume};

#[test]
fn a_dead_engine_is_replaced_at_once_with_the_same_arguments() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-death");
        let world = World::start(&fixture);
        let target = world.publish(&volume(1).with_option("prefix=a$b/"));
        let command = |unit: &str| {
            let line = systemctl(&["show", "--property=ExecStart", "--value", unit]);
            line.split(" ; ").nth(1).unwrap().to_owned()
        };
        let (unit, before) = (only_unit(), command(&only_unit()));
        assert!(before.contains("prefix"), "{before}");
        world.kill_engine();
        wait_for("another unit serves the target", || {
            mount_units().first().is_some_and(|it| *it != unit) && fs::read_dir(&target).is_ok()
        });
        world.node().wait_for_log("EngineRemounted");
        assert_eq!(command(&only_unit()), before);
        world.unpublish(&volume(1));
        world.check_nothing_left();
    });
}

#[test]
fn a_dead_engine_of_an_earlier_node_plugin_is_replaced_too() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-adopted");
        let mut world = World::start(&fixture);
        let target = world.publish(&volume(1));
        world.kill_node();
        world.start_node();
        world.node().wait_for_log("looked at all units");
        world.kill_engine();
        world.node().wait_for_log("EngineRemounted");
        wait_for("it is served", || fs::read_dir(&target).is_ok());
        world.check_serves(&target);
        world.unpublish(&volume(1));
        world.check_nothing_left();
    });
}

#[test]
fn corrupted_mount_is_replaced_by_the_next_publish() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-corrupted");
        let mut world = World::start(&fixture);
        let target = world.publish(&volume(1));
        world.kill_node();
        world.kill_engine();
        assert!(fs::read_dir(&target).is_err());
        world.start_node();
        world.publish(&volume(1));
        world.check_serves(&target);
        world.unpublish(&volume(1));
        world.check_nothing_left();
    });
}

#[test]
fn a_hung_engine_is_replaced_by_the_next_publish() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-hung");
        let world = World::start(&fixture);
        let target = world.publish(&volume(1));
        kill_process(world.engines()[0], Signal::STOP).unwrap();
        world.publish(&volume(1));
        world.check_serves(&target);
        kill_process(world.engines()[0], Signal::STOP).unwrap();
        world.unpublish(&volume(1));
        world.check_nothing_left();
    });
}

#[test]
fn orphaned_unit_is_stopped() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-orphan");
        let mut world = World::start(&fixture);
        let target = world.publish(&volume(1));
        world.kill_node();
        // Somebody holds a file, and an administrator detaches the mount: the engine goes on without one.
        fs::write(target.join("file"), "x").unwrap();
        let open = fs::File::open(target.join("file")).unwrap();
        assert!(Command::new("umount").arg("--lazy").arg(&target).status().unwrap().success());
        assert_eq!(mount_units().len(), 1);
        world.start_node();
        wait_for("the unit is stopped", || mount_units().is_empty());
        world.node().wait_for_log("OrphanedUnitStopped");
        drop(open);
        world.unpublish(&volume(1));
        world.check_nothing_left();
    });
}

#[test]
fn stale_mount_of_a_pod_that_is_gone_is_removed() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-stale");
        let mut world = World::start(&fixture);
        let target = world.publish(&volume(1));
        let kept = world.publish(&volume(2));
        fs::write(kept.parent().unwrap().join("vol_data.json"), "{}").unwrap();
        world.kill_node();
        for engine in world.engines() {
            kill_process(engine, Signal::KILL).unwrap();
        }
        wait_for("both engines are gone", || world.engines().is_empty());
        world.start_node();
        world.node().wait_for_log("StaleMountRemoved");
        wait_for("the stale target is gone", || !target.exists());
        // Kubelet still knows this one, and will publish it again.
        assert_eq!(world.mounts(), [kept.as_path()]);
        world.publish(&volume(2));
        world.check_serves(&kept);
        world.unpublish(&volume(2));
        world.check_nothing_left();
    });
}

#[test]
fn mount_collision_is_reduced_to_the_unit_that_serves() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-collision");
        let mut world = World::start(&fixture);
        let target = world.publish(&volume(1));
        world.kill_node();
        // A second engine over the first, as two drivers in a race would start it. The engine itself refuses that, so the first
        // mount is hidden from it for a moment.
        let words = |file: &str| -> Vec<String> {
            let bytes = fs::read(format!("/proc/{}/{file}", world.engines()[0])).unwrap();
            bytes
                .split(|it| *it == 0)
                .map(|it| String::from_utf8(it.to_vec()).unwrap())
                .filter(|it| !it.is_empty())
                .collect()
        };
        let (command, environment) = (words("cmdline"), words("environ"));
        fs::write(target.join("file"), "x").unwrap();
        let open = fs::File::open(target.join("file")).unwrap();
        assert!(Command::new("umount").arg("--lazy").arg(&target).status().unwrap().success());
        let mut run = Command::new("systemd-run");
        run.args(["--unit=mount-s3-0.0.0-second", "--collect", "--property=Type=forking", "--quiet"]);
        let settings = environment.iter().filter(|it| it.starts_with("AWS_"));
        run.args(settings.map(|it| format!("--setenv={it}")));
        assert!(run.args(command).status().unwrap().success());
        assert_eq!(mount_units().len(), 2);

        world.start_node();
        wait_for("one unit is left", || mount_units() == ["mount-s3-0.0.0-second.service"]);
        world.node().wait_for_log("DuplicateUnitStopped");
        world.check_serves(&target);
        drop(open);
        world.unpublish(&volume(1));
        world.check_nothing_left();
    });
}

#[test]
fn leftover_credentials_and_failed_units_are_removed() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-leftover");
        let mut world = World::prepare(&fixture);
        let place = world.plugin.credentials().join("mp-0123");
        fs::create_dir_all(place.join("credentials")).unwrap();
        let target = world.kubelet.target(&volume(1));
        let run = Command::new("systemd-run")
            .args(["--unit=mount-s3-0.0.0-failed", "--quiet", "/bin/false"])
            .arg(&target)
            .status()
            .unwrap();
        assert!(run.success());
        wait_for("the unit has failed", || units("mount-s3-0.0.0-failed.service").len() == 1);
        world.start_node();
        wait_for("the failed unit is forgotten", || units("mount-s3-*").is_empty());
        wait_for("the credentials are removed", || !place.exists());
        world.check_nothing_left();
    });
}
