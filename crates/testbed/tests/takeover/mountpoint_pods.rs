//! Mountpoint Pods of version 2 after the upgrade.

use s3csi_testbed::earlier_driver::EarlierMounter;

use crate::world::{Access, SECOND_KEYS, Workload, World};

#[test]
fn mountpoint_pods_of_version_2_serve_on_get_rotated_keys_and_end_with_their_last_workload() {
    let world = World::start("takeover-v2", EarlierMounter::Pod);
    let workload = world.start_workload("kept-pod", Access::ReadWrite);
    let reader = world.start_workload("kept-reader", Access::ReadOnly);
    let (pods, mount) = (world.mountpoint_pods(), world.mount_in_container(&workload));
    let mount_of_reader = world.mount_in_container(&reader);
    assert_eq!(pods.len(), 2, "{pods:?}");
    let owner = |workload: &Workload| world.run(workload, "stat -c '%u %g %a' /data /data/seed");
    let owner_before = owner(&workload);

    world.upgrade(&[]);
    world.wait_for_republish(&workload);
    world.check_undisturbed(&workload);
    world.check_undisturbed(&reader);
    assert_eq!(world.mountpoint_pods(), pods, "the same Mountpoint Pods go on");
    assert_eq!(world.mount_in_container(&workload), mount, "nothing was mounted over it");
    assert_eq!(world.mount_in_container(&reader), mount_of_reader, "the read-only bind stays");

    world.rotate_driver_keys(SECOND_KEYS);
    let (access_key, _) = SECOND_KEYS;
    world.eventually("the new keys are where the engines read them", || {
        pods.iter().all(|(uid, volume)| world.keys_of_mountpoint_pod(uid, volume).contains(access_key))
    });
    world.check_undisturbed(&workload);
    world.check_undisturbed(&reader);
    world.check_all_stored(&workload);

    world.delete_pod(&workload);
    world.delete_pod(&reader);
    world.check_nothing_left();

    let recreated = world.start_pod("kept-pod", Access::ReadWrite);
    assert_eq!(owner(&recreated), owner_before, "owner, group and mode are those of before");
    world.delete_pod(&recreated);
    world.check_nothing_left();
}
