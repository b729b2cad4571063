//! Volumes with the mount option `keep-alive`: the unit outlives its engine, and open files live on.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};

use rustix::process::{Pid, Signal, kill_process};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::systemd::beside_systemd;
use s3csi_testbed::wait::wait_for;

use crate::world::{World, mount_units, only_unit, volume};

/// The process that serves: a child of the one that keeps the mount.
fn serving(world: &World<'_>) -> Option<Pid> {
    match world.engines()[..] {
        [_, serving] => Some(serving),
        _ => None,
    }
}

#[test]
fn a_volume_that_is_kept_alive_shows_a_pause_when_its_engine_dies() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-kept");
        let world = World::start(&fixture);
        let volume = volume(1).with_option("keep-alive");
        let target = world.publish(&volume);
        fs::write(target.join("read"), "content").unwrap();
        let mut reader = File::open(target.join("read")).unwrap();
        let mut writer = File::create(target.join("written")).unwrap();
        writer.write_all(b"one ").unwrap();
        let unit = only_unit();
        for _ in 0..3 {
            wait_for("an engine serves", || serving(&world).is_some());
            let before = serving(&world).unwrap();
            kill_process(before, Signal::KILL).unwrap();
            wait_for("another engine serves", || serving(&world).is_some_and(|it| it != before));
        }
        let mut content = String::new();
        reader.read_to_string(&mut content).unwrap();
        assert_eq!(content, "content");
        writer.write_all(b"two").unwrap();
        writer.sync_all().unwrap();
        drop((reader, writer));
        assert_eq!(fs::read_to_string(target.join("written")).unwrap(), "one two");
        assert_eq!(mount_units(), [unit]);
        world.unpublish(&volume);
        world.check_nothing_left();
    });
}
