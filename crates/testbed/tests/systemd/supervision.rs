//! The unit keeps its mount alive: when its engine dies, applications see a pause, and open files live on.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};

use rustix::process::{Signal, kill_process};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::systemd::{beside_systemd, systemctl};
use s3csi_testbed::wait::wait_for;

use crate::world::{World, mount_units, only_unit, volume};

#[test]
fn an_engine_that_dies_is_a_pause() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-kept");
        let mut world = World::prepare_beside_systemd(&fixture);
        world.start_node_with(&["--health-address", "127.0.0.1:0"]);
        let target = world.publish(&volume(1));
        fs::write(target.join("read"), "content").unwrap();
        let mut reader = File::open(target.join("read")).unwrap();
        let mut writer = File::create(target.join("written")).unwrap();
        writer.write_all(b"one ").unwrap();
        let (unit, supervisor) = (only_unit(), world.engine());
        let words = || systemctl(&["show", "--property=StatusText", "--value", &unit]);
        for number in 2..=4 {
            kill_process(world.serving(supervisor).unwrap(), Signal::KILL).unwrap();
            let expected = format!("engine {number} is serving; the previous one died (");
            // The administrator sees it.
            wait_for("another engine serves, and its unit says so", || words().starts_with(&expected));
        }
        let mut content = String::new();
        reader.read_to_string(&mut content).unwrap();
        assert_eq!(content, "content");
        writer.write_all(b"two").unwrap();
        writer.sync_all().unwrap();
        drop((reader, writer));
        assert_eq!(fs::read_to_string(target.join("written")).unwrap(), "one two");
        assert_eq!((mount_units(), world.engine()), (vec![unit.clone()], supervisor));
        assert!(!world.node().log_contains("EngineRemounted"));
        wait_for("the node counts it", || world.figure("s3csi_engine_stall_seconds_count") == 3);
        assert_eq!(world.figure("s3csi_engine_deaths_total"), 0);
        world.unpublish(&volume(1));
        world.check_nothing_left();
    });
}

#[test]
fn without_supervision_a_mount_dies_with_its_engine_and_is_remounted() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-unkept");
        let mut world = World::prepare_beside_systemd(&fixture);
        world.start_node_with(&["--engine-keep-alive", "off"]);
        let target = world.publish(&volume(1));
        assert_eq!(world.serving(world.engine()), None);
        let environment = systemctl(&["show", "--property=Environment", "--value", &only_unit()]);
        assert!(!environment.contains("KEEP_ALIVE"), "{environment}");
        world.kill_engine();
        world.node().wait_for_log("EngineRemounted");
        world.check_serves(&target);
        world.unpublish(&volume(1));
        world.check_nothing_left();
    });
}
