//! "Recovery actions": what the guide of earlier drivers leaves to the administrator happens by itself.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::process::Command;

use s3csi_s3_server::store::{Account, Store as _};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::processes;
use s3csi_testbed::systemd::{beside_systemd, systemctl, units};
use s3csi_testbed::wait::wait_for;
use tonic::Code;

use crate::world::{BUCKET, World, check_refused, mount_units, only_unit, volume};

/// So that a test can read the plugin's figures.
const HEALTH: [&str; 2] = ["--health-address", "127.0.0.1:0"];

#[test]
fn a_dead_engine_is_replaced_at_once_with_the_same_arguments() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-death");
        let mut world = World::prepare_beside_systemd(&fixture);
        world.start_node_with(&HEALTH);
        let target = world.publish(&volume(1).with_option("prefix=a$b;c/"));
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
        assert_eq!(world.figure("s3csi_engine_deaths_total"), 1);
        assert_eq!(world.figure("s3csi_repairs_total{reason=\"EngineRemounted\"}"), 1);
        world.unpublish(&volume(1));
        world.check_nothing_left();
    });
}

#[test]
fn a_dead_engine_of_an_earlier_node_plugin_is_replaced_too() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-adopted");
        let mut world = World::start_beside_systemd(&fixture);
        let target = world.publish(&volume(1).with_option("prefix=a;b $c/"));
        let arguments = |engine| fs::read_to_string(format!("/proc/{engine}/cmdline")).unwrap();
        let before = arguments(world.engine());
        assert!(before.contains("a;b $c/"), "{before}");
        // What the next plugin knows of the unit comes from systemd after its reload.
        world.kill_node();
        systemctl(&["daemon-reload"]);
        world.start_node();
        world.node().wait_for_log("sweeping");
        world.kill_engine();
        world.node().wait_for_log("EngineRemounted");
        wait_for("it is served", || fs::read_dir(&target).is_ok());
        assert_eq!(arguments(world.engine()), before);
        world.unpublish(&volume(1));
        world.check_nothing_left();
    });
}

#[test]
fn corrupted_mount_is_replaced_by_the_next_publish() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-corrupted");
        let mut world = World::start_beside_systemd(&fixture);
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

/// Stops the engine and the supervisor that would replace it.
fn freeze(world: &World<'_>) {
    let engine = world.engine();
    let serving = world.serving(engine).unwrap();
    for process in [engine, serving] {
        processes::freeze(process);
    }
}

#[test]
fn a_silent_engine_is_kept_by_a_publish_and_ended_by_an_unpublish() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-hung");
        let world = World::start_beside_systemd(&fixture);
        world.publish(&volume(1));
        let (unit, mounts) = (only_unit(), world.mounts());
        freeze(&world);
        let reason = ["has not answered for", "The mount is kept"];
        check_refused(world.try_publish(&volume(1)), Code::Unavailable, &reason);
        assert_eq!((only_unit(), world.mounts()), (unit, mounts), "nothing was replaced");
        world.unpublish(&volume(1));
        world.check_nothing_left();
    });
}

#[test]
fn orphaned_unit_is_stopped() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-orphan");
        let mut world = World::start_beside_systemd(&fixture);
        let target = world.publish(&volume(1));
        world.kill_node();
        // Somebody holds a file, and an administrator detaches the mount: the engine goes on without one.
        fs::write(target.join("file"), "x").unwrap();
        let open = fs::File::open(target.join("file")).unwrap();
        assert!(Command::new("umount").arg("--lazy").arg(&target).status().unwrap().success());
        let orphan = only_unit();
        world.start_node_with(&HEALTH);
        wait_for("the unit is stopped", || mount_units().is_empty());
        world.node().wait_for_log("OrphanedUnitStopped");
        assert_eq!(world.figure("s3csi_repairs_total{reason=\"OrphanedUnitStopped\"}"), 1);
        drop(open);
        world.publish(&volume(1));
        world.check_serves(&target);
        assert_ne!(only_unit(), orphan);
        world.unpublish(&volume(1));
        world.check_nothing_left();
    });
}

#[test]
fn stale_mount_of_a_pod_that_is_gone_is_removed() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-stale");
        let mut world = World::start_beside_systemd(&fixture);
        let target = world.publish(&volume(1));
        let kept = world.publish(&volume(2));
        fs::write(kept.parent().unwrap().join("vol_data.json"), "{}").unwrap();
        world.kill_node();
        for engine in world.engines() {
            world.kill(engine);
        }
        wait_for("both engines are gone", || world.engines().is_empty());
        world.start_node_with(&HEALTH);
        world.node().wait_for_log("StaleMountRemoved");
        assert_eq!(world.figure("s3csi_repairs_total{reason=\"StaleMountRemoved\"}"), 1);
        wait_for("the stale target is gone", || !target.exists());
        // Kubelet still knows this one, and will publish it again.
        assert_eq!(world.mounts(), [kept.as_path()]);
        world.publish(&volume(2));
        world.check_serves(&kept);
        world.unpublish(&volume(2));
        world.check_nothing_left();
    });
}

/// Starts another engine for the target of the only one, as two drivers in a race would. The engine itself refuses to mount over
/// another, so nothing may be mounted there for the moment.
fn start_second_engine(world: &World<'_>) {
    let words = |file: &str| -> Vec<String> {
        let bytes = fs::read(format!("/proc/{}/{file}", world.engine())).unwrap();
        bytes
            .split(|it| *it == 0)
            .map(|it| String::from_utf8(it.to_vec()).unwrap())
            .filter(|it| !it.is_empty())
            .collect()
    };
    let mut run = Command::new("systemd-run");
    run.args(["--unit=mount-s3-0.0.0-second", "--collect", "--property=Type=forking", "--quiet"]);
    let environment = words("environ");
    run.args(environment.iter().filter(|it| it.starts_with("AWS_")).map(|it| format!("--setenv={it}")));
    assert!(run.args(words("cmdline")).status().unwrap().success());
    assert_eq!(mount_units().len(), 2);
}

#[track_caller]
fn run(program: &str, arguments: &[&OsStr]) {
    assert!(Command::new(program).args(arguments).status().unwrap().success(), "{program} {arguments:?}");
}

/// The node plugin comes back, and only the second engine stays.
#[track_caller]
fn check_reduced(world: &mut World<'_>, target: &Path) {
    world.start_node_with(&HEALTH);
    wait_for("one unit is left", || mount_units() == ["mount-s3-0.0.0-second.service"]);
    world.node().wait_for_log("DuplicateUnitStopped");
    world.check_serves(target);
    assert_eq!(world.figure("s3csi_repairs_total{reason=\"DuplicateUnitStopped\"}"), 1);
    assert_eq!(world.figure("s3csi_engine_deaths_total"), 0, "what was asked for is no death");
}

#[test]
fn mount_collision_is_reduced_to_the_unit_that_serves() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-collision");
        let mut world = World::start_beside_systemd(&fixture);
        let target = world.publish(&volume(1));
        world.kill_node();
        // The first engine lives on without a mount for as long as somebody holds a file.
        fs::write(target.join("file"), "x").unwrap();
        let open = fs::File::open(target.join("file")).unwrap();
        run("umount", &["--lazy".as_ref(), target.as_os_str()]);
        start_second_engine(&world);
        check_reduced(&mut world, &target);
        drop(open);
        world.unpublish(&volume(1));
        world.check_nothing_left();
    });
}

/// Two engines' mounts at one target, the named one on top.
#[track_caller]
fn check_stacked_mounts_are_reduced(name: &str, on_top: &str) {
    let fixture = Fixture::new(name);
    let mut world = World::start_beside_systemd(&fixture);
    let target = world.publish(&volume(1));
    world.kill_node();
    // Each is put aside while the other one is mounted, and then both are stacked.
    let aside = |name: &str| {
        let directory = fixture.create_directory(name);
        run("mount", &["--bind".as_ref(), target.as_os_str(), directory.as_os_str()]);
        run("umount", &[target.as_os_str()]);
        directory
    };
    let first = aside("first");
    start_second_engine(&world);
    let second = aside("second");
    let (lower, upper) = if on_top == "second" { (first, second) } else { (second, first) };
    for mount in [lower, upper] {
        run("mount", &["--move".as_ref(), mount.as_os_str(), target.as_os_str()]);
    }
    assert_eq!(world.mounts(), [target.as_path(), target.as_path()]);
    check_reduced(&mut world, &target);
    // Kubelet asks again and again; nothing more happens.
    world.publish(&volume(1));
    assert_eq!(mount_units().len(), 1);
    world.unpublish(&volume(1));
    assert!(!target.exists());
    world.check_nothing_left();
}

#[test]
fn mount_collision_with_stacked_mounts_is_reduced_and_both_mounts_go_with_the_pod() {
    beside_systemd(|| check_stacked_mounts_are_reduced("systemd-stacked", "second"));
}

#[test]
fn mount_collision_with_the_older_mount_on_top_uncovers_the_newer() {
    beside_systemd(|| check_stacked_mounts_are_reduced("systemd-covered", "first"));
}

#[test]
fn permission_denied_is_reported_and_new_credentials_with_a_pod_restart_help() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-denied");
        let world = World::start_beside_systemd(&fixture);
        let with = |account: &Account| volume(1).with_secret(&account.access_key, &account.secret_key);
        // Keys that expired before the Pod was started.
        let expired = Account::named("expired");
        check_refused(world.try_publish(&with(&expired)), Code::Unauthenticated, &["Could not mount", "journalctl -u"]);
        world.check_nothing_left();

        // Keys that expire while it runs: the store has others for the same name.
        let old = world.store.account().clone();
        let target = world.publish(&with(&old));
        world.check_serves(&target);
        world.store.put_object(BUCKET, "unread", b"x").unwrap();
        let new = Account::new(&old.access_key, "renewed-NeverPrintThis");
        world.store.add_account(&new).unwrap();
        fs::read(target.join("unread")).unwrap_err();
        world.unpublish(&with(&old));
        world.check_nothing_left();
        let target = world.publish(&with(&new));
        assert_eq!(fs::read(target.join("unread")).unwrap(), b"x");
        world.check_serves(&target);
        world.unpublish(&with(&new));
        world.check_nothing_left();
    });
}

#[test]
fn leftover_credentials_and_failed_units_are_removed() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-leftover");
        let mut world = World::prepare_beside_systemd(&fixture);
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
