//! What was broken behind the plugin's back is repaired by the next call; what is not ours is left alone.

use std::fs;
use std::io::ErrorKind;

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use s3csi_s3_server::store::Store as _;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::wait::wait_for;
use tonic::Code;

use crate::world::{BUCKET, World, check_refused, device, volume};

#[test]
fn a_killed_engine_is_a_pause_for_every_target() {
    let fixture = Fixture::new("repair-pause");
    let world = World::start(&fixture);
    let targets = [world.publish(&volume(1)), world.publish(&volume(2))];
    fs::write(targets[0].join("kept"), "x").unwrap();
    let (engine, before) = (world.engine(), device(&targets[0]));
    let mut open = fs::File::open(targets[1].join("kept")).unwrap();
    world.kill_engine();
    for target in &targets {
        assert_eq!(fs::read_to_string(target.join("kept")).unwrap(), "x");
    }
    assert_eq!(std::io::read_to_string(&mut open).unwrap(), "x");
    drop(open);
    world.node().wait_for_log("engine died, a new engine resumed its mount");
    assert_ne!(world.engine(), engine);

    world.publish(&volume(1));
    assert_eq!((device(&targets[0]), device(&targets[1])), (before, before));
    world.unpublish(&volume(1));
    world.kill_engine();
    assert_eq!(fs::read_to_string(targets[1].join("kept")).unwrap(), "x");
    world.unpublish(&volume(2));
    world.check_nothing_left();
}

#[test]
fn a_frozen_engine_is_replaced_without_a_publish() {
    let fixture = Fixture::new("repair-frozen");
    let world = World::start(&fixture);
    let target = world.publish(&volume(1));
    fs::write(target.join("kept"), "x").unwrap();
    let engine = world.engine();
    s3csi_testbed::processes::freeze(engine);
    assert_eq!(fs::read_to_string(target.join("kept")).unwrap(), "x");
    assert_ne!(world.engine(), engine);
    world.unpublish(&volume(1));
    world.check_nothing_left();
}

#[test]
fn a_killed_engine_is_replaced_for_every_target() {
    let fixture = Fixture::new("repair-engine");
    let world = World::start_without_supervisor(&fixture);
    let targets = [world.publish(&volume(1)), world.publish(&volume(2))];
    fs::write(targets[0].join("kept"), "x").unwrap();
    let (engine, old) = (world.engine(), device(&targets[0]));
    world.kill_engine();
    for target in &targets {
        // A look that was under way when the connection ended is aborted, later ones find it gone.
        let error = fs::read_dir(target).unwrap_err().kind();
        assert!(matches!(error, ErrorKind::NotConnected | ErrorKind::ConnectionAborted), "{error}");
    }

    world.publish(&volume(1));
    assert_eq!(fs::read_to_string(targets[0].join("kept")).unwrap(), "x");
    world.publish(&volume(2));
    assert_eq!(fs::read_to_string(targets[1].join("kept")).unwrap(), "x");
    assert_ne!(world.engine(), engine);
    assert_eq!(device(&targets[0]), device(&targets[1]));
    assert_ne!(device(&targets[0]), old);
    // The dead mounts of the targets are covered, that of the source is gone.
    assert_eq!(world.mounts().len(), 5, "{:?}", world.mounts());

    world.unpublish(&volume(1));
    world.unpublish(&volume(2));
    world.check_nothing_left();
}

#[test]
fn the_log_says_that_an_engine_died() {
    let fixture = Fixture::new("repair-log");
    let world = World::start_without_supervisor(&fixture);
    world.publish(&volume(1));
    world.kill_engine();
    world.node().wait_for_log("engine died");
    world.unpublish(&volume(1));
    world.check_nothing_left();
}

#[test]
fn a_dead_target_is_unpublished() {
    let fixture = Fixture::new("repair-dead");
    let world = World::start_without_supervisor(&fixture);
    let target = world.publish(&volume(1));
    world.publish(&volume(2));
    world.kill_engine();
    world.unpublish(&volume(1));
    assert!(!target.exists());
    world.unpublish(&volume(2));
    world.check_nothing_left();
}

#[test]
fn a_target_that_was_replaced_for_one_workload_only_is_unpublished_for_the_other() {
    let fixture = Fixture::new("repair-half");
    let world = World::start_without_supervisor(&fixture);
    world.publish(&volume(1));
    world.publish(&volume(2));
    world.kill_engine();
    // Pod 1 has the new engine, Pod 2 still the dead one's mount.
    let target = world.publish(&volume(1));
    world.unpublish(&volume(2));
    fs::write(target.join("file"), "x").unwrap();
    world.unpublish(&volume(1));
    world.check_nothing_left();
}

#[test]
fn a_killed_mounter_does_not_matter_once_it_is_back() {
    let fixture = Fixture::new("repair-mounter");
    let mut world = World::start(&fixture);
    let target = world.publish(&volume(1));
    fs::write(target.join("kept"), "x").unwrap();
    world.kill_mounter();
    world.start_mounter();

    world.publish(&volume(1));
    assert_eq!(fs::read_to_string(target.join("kept")).unwrap(), "x");
    world.publish(&volume(2));
    world.engine();
    world.unpublish(&volume(1));
    world.unpublish(&volume(2));
    world.check_nothing_left();
}

#[test]
fn without_a_mounter_publish_says_so_and_unpublish_works() {
    let fixture = Fixture::new("repair-no-mounter");
    let mut world = World::start(&fixture);
    let target = world.publish(&volume(1));
    world.kill_mounter();
    let mut other = volume(2);
    other.pv = "pv-2".to_owned();
    check_refused(world.try_publish(&other), Code::Unavailable, &["Could not mount", "no mounter listens", "kubectl"]);
    world.unpublish(&volume(1));
    assert!(!target.exists());
    world.start_mounter();
    world.check_nothing_left();
}

#[test]
fn a_killed_mounter_and_its_engine_are_both_replaced() {
    let fixture = Fixture::new("repair-both");
    let mut world = World::start(&fixture);
    let target = world.publish(&volume(1));
    world.kill_mounter();
    if !world.engines().is_empty() {
        world.kill_engine();
    }
    world.start_mounter();
    world.publish(&volume(1));
    fs::write(target.join("file"), "x").unwrap();
    world.unpublish(&volume(1));
    world.check_nothing_left();
}

#[test]
fn mounts_live_on_without_the_plugin_and_a_new_one_knows_them() {
    let fixture = Fixture::new("repair-plugin");
    let mut world = World::start(&fixture);
    let target = world.publish(&volume(1));
    let engine = world.engine();
    world.kill_node();
    fs::write(target.join("meanwhile"), "x").unwrap();
    world.start_node();
    assert_eq!(fs::read_to_string(target.join("meanwhile")).unwrap(), "x");

    world.publish(&volume(1));
    let other = world.publish(&volume(2));
    assert_eq!(world.engine(), engine);
    assert_eq!(fs::read_to_string(other.join("meanwhile")).unwrap(), "x");
    world.kill_node();
    world.start_node();
    world.unpublish(&volume(1));
    world.unpublish(&volume(2));
    world.check_nothing_left();
}

#[test]
fn an_engine_that_died_without_the_plugin_is_replaced_by_the_next_one() {
    let fixture = Fixture::new("repair-plugin-engine");
    let mut world = World::start_without_supervisor(&fixture);
    let target = world.publish(&volume(1));
    world.kill_node();
    world.kill_engine();
    world.start_node();
    world.publish(&volume(1));
    fs::write(target.join("file"), "x").unwrap();
    world.unpublish(&volume(1));
    world.check_nothing_left();
}

#[test]
fn a_source_that_was_unmounted_by_hand_is_mounted_again() {
    let fixture = Fixture::new("repair-source");
    let world = World::start(&fixture);
    let target = world.publish(&volume(1));
    fs::write(target.join("kept"), "x").unwrap();
    unmount(world.source(), UnmountFlags::empty()).unwrap();

    world.publish(&volume(1));
    let other = world.publish(&volume(2));
    assert_eq!(device(&target), device(&other));
    assert_eq!(fs::read_to_string(target.join("kept")).unwrap(), "x");
    world.wait_for_engines(1);
    world.unpublish(&volume(1));
    world.unpublish(&volume(2));
    world.check_nothing_left();
}

#[test]
fn a_target_whose_source_was_unmounted_by_hand_is_unpublished_with_its_engine() {
    let fixture = Fixture::new("repair-source-gone");
    let world = World::start(&fixture);
    world.publish(&volume(1));
    unmount(world.source(), UnmountFlags::empty()).unwrap();
    world.unpublish(&volume(1));
    world.check_nothing_left();
}

#[test]
fn a_target_that_was_unmounted_by_hand_is_bound_again() {
    let fixture = Fixture::new("repair-target");
    let world = World::start(&fixture);
    let target = world.publish(&volume(1));
    let (engine, before) = (world.engine(), device(&target));
    unmount(&target, UnmountFlags::empty()).unwrap();
    assert_ne!(device(&target), before);

    world.publish(&volume(1));
    assert_eq!((world.engine(), device(&target)), (engine, before));
    // Once more, but without another publish: the source has no user left and is removed by the unpublish.
    unmount(&target, UnmountFlags::empty()).unwrap();
    world.unpublish(&volume(1));
    assert!(!target.exists());
    world.check_nothing_left();
}

#[test]
fn a_foreign_mount_at_the_target_is_reported_and_stays() {
    let fixture = Fixture::new("repair-foreign");
    let world = World::start(&fixture);
    let target = world.kubelet.target(&volume(1));
    fs::create_dir_all(&target).unwrap();
    mount("tmpfs", &target, "tmpfs", MountFlags::empty(), None).unwrap();
    fs::write(target.join("precious"), "mine").unwrap();

    check_refused(world.try_publish(&volume(1)), Code::FailedPrecondition, &["tmpfs", "is not ours", "umount"]);
    check_refused(world.try_unpublish(&volume(1)), Code::FailedPrecondition, &["Could not unmount", "tmpfs"]);
    assert_eq!(fs::read_to_string(target.join("precious")).unwrap(), "mine");

    unmount(&target, UnmountFlags::empty()).unwrap();
    world.publish(&volume(1));
    world.unpublish(&volume(1));
    world.check_nothing_left();
}

#[test]
fn several_mounts_of_ours_on_one_target_all_go() {
    let fixture = Fixture::new("repair-stacked");
    let world = World::start(&fixture);
    let target = world.publish(&volume(1));
    // As two concurrent plugins or an earlier driver could have left it.
    rustix::mount::mount_bind(world.source(), &target).unwrap();
    world.unpublish(&volume(1));
    assert!(!target.exists());
    world.check_nothing_left();
}

#[test]
fn a_file_in_the_source_s_place_is_an_error_and_stays() {
    let fixture = Fixture::new("repair-file");
    let world = World::start(&fixture);
    world.publish(&volume(1));
    let source = world.source();
    world.unpublish(&volume(1));
    fs::write(&source, "precious").unwrap();
    check_refused(world.try_publish(&volume(1)), Code::Internal, &["Could not mount", BUCKET]);
    assert_eq!(fs::read_to_string(&source).unwrap(), "precious");
    fs::remove_file(&source).unwrap();
    world.publish(&volume(1));
    world.unpublish(&volume(1));
}

#[test]
fn what_was_written_before_a_kill_is_in_the_store() {
    let fixture = Fixture::new("repair-data");
    let world = World::start_without_supervisor(&fixture);
    let target = world.publish(&volume(1));
    for number in 0..20 {
        fs::write(target.join(format!("file-{number}")), vec![b'x'; 100_000]).unwrap();
    }
    world.kill_engine();
    assert_eq!(world.store.keys(BUCKET).len(), 20);
    world.unpublish(&volume(1));
    wait_for("nothing is left", || world.leftovers().is_empty());
}
