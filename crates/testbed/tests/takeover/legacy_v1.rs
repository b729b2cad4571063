//! Units of version 1 under our default strategy `pod`.

use s3csi_testbed::earlier_driver::{EarlierBuild, EarlierMounter};

use crate::world::{Access, SECOND_KEYS, World};

#[test]
fn units_of_version_1_serve_on_get_rotated_keys_and_leave_nothing() {
    check_units_serve_on(&World::start("takeover-v1", EarlierMounter::Systemd));
}

/// The driver of AWS, unchanged, is replaced by ours under its name.
#[test]
fn units_of_the_driver_of_aws_serve_on_and_a_recreated_workload_gets_a_mountpoint_pod() {
    let world = World::start_build("takeover-aws", EarlierBuild::Aws, EarlierMounter::Systemd);
    check_units_serve_on(&world);
    let workload = world.start_pod("kept-unit", Access::ReadWrite);
    world.check_undisturbed(&workload);
    assert_eq!(world.mountpoint_pods().len(), 1, "the recreated workload has a Mountpoint Pod");
    world.delete_pod(&workload);
    world.check_nothing_left();
}

fn check_units_serve_on(world: &World) {
    let workload = world.start_workload("kept-unit", Access::ReadWrite);
    let reader = world.start_workload("kept-reader", Access::ReadOnly);
    let (units, mount) = (world.units(), world.mount_in_container(&workload));
    let mount_of_reader = world.mount_in_container(&reader);
    assert_eq!(units.len(), 2, "{units:?}");

    world.upgrade(&[]);
    world.check_undisturbed(&workload);
    assert_eq!(world.units(), units, "the units go on");

    world.rotate_driver_keys(SECOND_KEYS);
    let (access_key, _) = SECOND_KEYS;
    for workload in [&workload, &reader] {
        let (uid, name) = (&workload.uid, &workload.name);
        let file = format!("{}/{uid}-{name}-s3-csi-credentials", world.plugin_directory());
        world.eventually("the new keys are where the unit reads them", || {
            world.on_node(&format!("cat {file} || true")).contains(access_key)
        });
        world.check_undisturbed(workload);
    }
    assert_eq!(world.mount_in_container(&workload), mount, "nothing was mounted over it");
    assert_eq!(world.mount_in_container(&reader), mount_of_reader, "the read-only mount stays");
    assert_eq!(world.units(), units, "the units go on");
    world.check_all_stored(&workload);

    world.delete_pod(&workload);
    world.delete_pod(&reader);
    world.check_nothing_left();
}

#[test]
fn a_recreated_workload_of_version_1_gets_a_mountpoint_pod() {
    let world = World::start("takeover-v1-moves", EarlierMounter::Systemd);
    let workload = world.start_workload("moves", Access::ReadWrite);
    world.upgrade(&[]);
    world.delete_pod(&workload);
    let workload = world.start_pod("moves", Access::ReadWrite);
    world.check_undisturbed(&workload);
    assert_eq!(world.mountpoint_pods().len(), 1, "the recreated workload has a Mountpoint Pod");
    assert_eq!(world.units(), Vec::<String>::new(), "its unit is gone");
    world.delete_pod(&workload);
    world.check_nothing_left();
}

#[test]
fn a_unit_of_version_1_that_dies_is_replaced_by_a_mountpoint_pod_without_a_new_workload() {
    let world = World::start("takeover-v1-dies", EarlierMounter::Systemd);
    let workload = world.start_workload("dies", Access::ReadWrite);
    world.upgrade(&[]);
    world.check_undisturbed(&workload);
    let [unit] = &world.units()[..] else { panic!("{:?}", world.units()) };

    world.on_node(&format!("systemctl kill --signal=KILL {unit}"));
    // Without a probe: its container runs on with the dead mount.
    world.eventually("the volume is mounted again, by a Mountpoint Pod", || {
        !world.mountpoint_pods().is_empty() && world.is_served_on_node(&workload)
    });
    assert_eq!(world.restarts(&workload), 0, "nothing has restarted the container");
    world.restart_container(&workload);
    world.check_undisturbed(&workload);
    world.check_all_stored(&workload);
    assert_eq!(world.mountpoint_pods().len(), 1, "a Mountpoint Pod serves it");

    world.delete_pod(&workload);
    // Version 1 asked systemd to keep failed units.
    world.on_node("systemctl reset-failed 'mount-s3-*' || true");
    world.check_nothing_left();
}

#[test]
fn keys_left_behind_are_removed_and_those_of_a_running_unit_stay() {
    let world = World::start("takeover-keys", EarlierMounter::Systemd);
    let workload = world.start_workload("keeps-keys", Access::ReadWrite);
    let used = world.key_files();
    assert_eq!(used.len(), 2, "{used:?}");
    // As 2.2.0 leaves them: for workloads that are gone, for ever.
    let gone = "5a6c1b6e-0000-4000-8000-000000000000-gone-s3-csi";
    let leave = || {
        for end in ["config", "credentials"] {
            let file = format!("{}/{gone}-{end}", world.plugin_directory());
            world.on_node(&format!("echo '[{gone}]' > {file}; touch -d '1 hour ago' {file}"));
        }
    };
    for strategy in ["pod", "daemon", "systemd"] {
        leave();
        world.upgrade(&["--set", &format!("strategy={strategy}")]);
        world.eventually("the keys of the gone workload are removed", || world.key_files() == used);
        world.check_undisturbed(&workload);
    }
    world.delete_pod(&workload);
    world.check_nothing_left();
}
