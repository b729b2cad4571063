//! "Common operational patterns" and "Mount persistence": what an administrator sees in everyday life.

use std::fs;
use std::path::Path;
use std::process::Command;

use s3csi_s3_server::store::{Account, Store as _};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::kubelet::CsiVolume;
use s3csi_testbed::systemd::{beside_systemd, journal, over_a_restart_of_the_machine, systemctl};
use s3csi_testbed::wait::wait_for;
use s3csi_testbed::world::read_ahead;

use crate::world::{BUCKET, World, mount_units, names_in, only_unit, volume};

#[test]
fn pod_start_creates_a_unit_that_serves_the_target_itself() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-start");
        let world = World::start_beside_systemd(&fixture);
        let target = world.publish(&volume(1));
        world.check_serves(&target);
        assert_eq!(world.mounts(), [target.as_path()], "no source and no bind: the target is the mount");
        wait_for("the kernel reads far ahead", || read_ahead(&target) == "512");

        // What the operations guide promises.
        let table = systemctl(&["list-units", "mount-s3-*"]);
        assert!(table.contains("mount-s3-") && table.contains("running"), "{table}");
        assert!(table.contains("Mountpoint for Amazon S3 CSI driver FUSE daemon"), "{table}");
        let mounts = String::from_utf8(Command::new("mount").output().unwrap().stdout).unwrap();
        let is_shown = |it: &str| it.starts_with("mountpoint-s3") && it.contains(target.to_str().unwrap());
        assert!(mounts.lines().any(is_shown), "{mounts}");
        wait_for("systemd logs the start", || journal().contains("Started mount-s3-"));
        let unit = only_unit();
        let words: Vec<&str> = unit.splitn(4, '-').collect();
        assert_eq!((words[0], words[1], words[2]), ("mount", "s3", env!("CARGO_PKG_VERSION")));
        assert_eq!(words[3].len(), "a1b2c3d4-e5f6-7890-abcd-ef1234567890.service".len());
        let show = systemctl(&["show", "--property=Type,CollectMode,TimeoutStartUSec,ExecStart", &unit]);
        assert!(show.contains("Type=forking") && show.contains("CollectMode=inactive-or-failed"), "{show}");

        world.unpublish(&volume(1));
        assert!(!target.exists());
        world.check_nothing_left();
    });
}

#[test]
fn pod_restart_ends_the_old_unit_and_starts_a_new_one() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-restart");
        let world = World::start_beside_systemd(&fixture);
        fs::write(world.publish(&volume(1)).join("kept"), "by the first Pod").unwrap();
        let first = only_unit();
        world.unpublish(&volume(1));
        let target = world.publish(&volume(2));
        assert_eq!(fs::read_to_string(target.join("kept")).unwrap(), "by the first Pod");
        assert_ne!(only_unit(), first);
        world.unpublish(&volume(2));
        world.check_nothing_left();
    });
}

#[test]
fn csi_restart_makes_no_new_unit_for_a_healthy_mount() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-csi");
        let mut world = World::start_beside_systemd(&fixture);
        let target = world.publish(&volume(1));
        let (unit, engines) = (only_unit(), world.engines());
        world.kill_node();
        world.check_serves(&target);
        world.start_node();
        for _ in 0..3 {
            world.publish(&volume(1));
        }
        assert_eq!((only_unit(), world.engines()), (unit, engines));
        world.unpublish(&volume(1));
        world.check_nothing_left();
    });
}

#[test]
fn node_restart_everything_is_recreated() {
    over_a_restart_of_the_machine(
        |disk| {
            let fixture = Fixture::new("systemd-power");
            std::os::unix::fs::symlink(disk, fixture.path("kubelet")).unwrap();
            fs::write(disk.join("fixture"), fixture.directory().to_str().unwrap()).unwrap();
            let world = World::start_beside_systemd(&fixture);
            world.check_serves(&world.publish(&volume(1)));
            // A power failure: nothing is cleaned up.
            std::mem::forget(world);
            std::mem::forget(fixture);
        },
        |disk| {
            fs::remove_dir_all(Path::new(&fs::read_to_string(disk.join("fixture")).unwrap())).unwrap();
            let fixture = Fixture::new("systemd-power-on");
            std::os::unix::fs::symlink(disk, fixture.path("kubelet")).unwrap();
            let world = World::start_beside_systemd(&fixture);
            assert_eq!(mount_units(), [""; 0]);
            let target = world.publish(&volume(1));
            world.check_serves(&target);
            world.unpublish(&volume(1));
            world.check_nothing_left();
        },
    );
}

#[test]
fn credential_refresh_brings_new_keys_to_a_running_mount_without_another_unit() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-keys");
        let world = World::start_beside_systemd(&fixture);
        let old = Account::named("old");
        let new = Account::new(&old.access_key, "rotated-NeverPrintThis");
        world.store.add_account(&old).unwrap();
        world.store.create_bucket("of-old", &old).unwrap();
        let with = |account: &Account| {
            let of_old = CsiVolume::new("of-old", "pv-of-old", "00000001-aaaa-4aaa-8aaa-aaaaaaaaaaaa");
            of_old.with_secret(&account.access_key, &account.secret_key)
        };
        let target = world.publish(&with(&old));
        fs::write(target.join("file"), "x").unwrap();
        let (unit, supervisor) = (only_unit(), world.engine());
        let serving = world.serving(supervisor);

        // The old key is worth nothing from now on.
        world.store.add_account(&new).unwrap();
        world.publish(&with(&new));
        wait_for("an engine with the new key serves", || {
            world.serving(supervisor).is_some_and(|it| Some(it) != serving) && fs::metadata(target.join("file")).is_ok()
        });
        fs::write(target.join("after"), "x").unwrap();
        assert_eq!((only_unit(), world.engine()), (unit, supervisor), "something was mounted again");
        world.node().wait_for_log("engine replaced on the same mount");
        let place = names_in(&world.plugin.credentials());
        assert_eq!(place.len(), 1);
        let file = world.plugin.credentials().join(&place[0]).join("credentials/s3-csi-credentials");
        assert!(fs::read_to_string(file).unwrap().contains(&new.secret_key));
        world.unpublish(&with(&new));
        world.check_nothing_left();
    });
}

#[test]
fn no_secret_is_in_a_unit_its_file_or_its_arguments() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-secret");
        let world = World::start_beside_systemd(&fixture);
        world.publish(&volume(1));
        let unit = only_unit();
        let secret = &world.store.account().secret_key;
        let access = &world.store.account().access_key;
        let properties = systemctl(&["show", "--all", &unit]);
        let file = fs::read_to_string(format!("/run/systemd/transient/{unit}")).unwrap();
        let mut arguments = String::new();
        for engine in world.engines() {
            arguments += &fs::read_to_string(format!("/proc/{engine}/cmdline")).unwrap();
            arguments += &fs::read_to_string(format!("/proc/{engine}/environ")).unwrap();
        }
        assert!(properties.contains("AWS_SHARED_CREDENTIALS_FILE") && arguments.contains(BUCKET));
        for text in [&properties, &file, &arguments, &journal()] {
            assert!(!text.contains(secret) && !text.contains(access));
        }
        world.unpublish(&volume(1));
        world.check_nothing_left();
    });
}

#[test]
fn resource_limits_of_settings_and_of_the_volume_become_the_unit_s() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-limits");
        let mut world = World::prepare_beside_systemd(&fixture);
        world.start_node_with(&["--engine-memory-limit", "512Mi", "--engine-tasks-limit", "100"]);
        let mut limited = volume(1);
        for (name, value) in [("LimitsMemory", "1Gi"), ("LimitsCpu", "500m")] {
            limited.attributes.insert(format!("mountpointContainerResources{name}"), value.to_owned());
        }
        world.publish(&limited);
        let show = systemctl(&["show", "--property=MemoryMax,CPUQuotaPerSecUSec,TasksMax", &only_unit()]);
        for line in ["MemoryMax=1073741824", "CPUQuotaPerSecUSec=500ms", "TasksMax=100"] {
            assert!(show.lines().any(|it| it == line), "{line} is missing in {show}");
        }
        world.unpublish(&limited);
        world.check_nothing_left();
    });
}

#[test]
fn a_read_only_volume_cannot_be_written_to() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-ro");
        let world = World::start_beside_systemd(&fixture);
        let read_only = CsiVolume { is_read_only: true, ..volume(1) };
        let target = world.publish(&read_only);
        let error = fs::write(target.join("file"), "x").unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
        world.unpublish(&read_only);
        world.check_nothing_left();
    });
}

#[test]
fn two_hundred_volumes_at_once_are_all_served_once() {
    const COUNT: u32 = 200;
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-200");
        let world = World::start_beside_systemd(&fixture);
        world.publish_together((0..COUNT).map(volume));
        let count = usize::try_from(COUNT).unwrap();
        assert_eq!((mount_units().len(), world.mounts().len(), world.engines().len()), (count, count, count));
        world.unpublish_together((0..COUNT).map(volume));
        world.check_nothing_left();
    });
}
