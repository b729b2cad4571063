//! Publish and unpublish when nothing goes wrong.

use std::fs;
use std::os::unix::fs::symlink;

use s3csi_s3_server::store::Store as _;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::kubelet::CsiVolume;
use s3csi_testbed::wait::wait_for;
use s3csi_testbed::world::read_ahead;
use tonic::Code;

use crate::world::{BUCKET, World, check_refused, device, names_in, pod, volume};

#[test]
fn a_published_target_shows_the_bucket_and_what_is_written_there_is_in_the_bucket() {
    let fixture = Fixture::new("basics-data");
    let world = World::start(&fixture);
    world.store.put_object(BUCKET, "from/store.txt", b"made in the store").unwrap();

    let target = world.publish(&volume(1));
    assert_eq!(fs::read_to_string(target.join("from/store.txt")).unwrap(), "made in the store");
    assert_eq!(read_ahead(&target), "512", "the engine may not say it itself");
    fs::write(target.join("hello.txt"), "made by the workload").unwrap();
    assert_eq!(world.store.object(BUCKET, "hello.txt").as_deref(), Some(b"made by the workload".as_slice()));

    world.unpublish(&volume(1));
    assert!(!target.exists(), "the target directory must be gone");
    world.check_nothing_left();
    assert_eq!(world.store.keys(BUCKET), ["from/store.txt", "hello.txt"]);
}

#[test]
fn publishing_again_changes_nothing() {
    let fixture = Fixture::new("basics-again");
    let world = World::start(&fixture);
    let target = world.publish(&volume(1));
    let before = (world.engine(), device(&target), world.mounts());
    for _ in 0..3 {
        assert_eq!(world.publish(&volume(1)), target);
    }
    assert_eq!((world.engine(), device(&target), world.mounts()), before);
    world.unpublish(&volume(1));
    world.check_nothing_left();
}

#[test]
fn targets_of_one_volume_share_an_engine_until_the_last_is_unpublished() {
    let fixture = Fixture::new("basics-share");
    let world = World::start(&fixture);
    let (first, second) = (world.publish(&volume(1)), world.publish(&volume(2)));
    assert_eq!(device(&first), device(&second));
    let engine = world.engine();
    fs::write(first.join("note"), "for both").unwrap();

    world.unpublish(&volume(1));
    assert!(!first.exists());
    assert_eq!(world.engine(), engine);
    assert_eq!(fs::read_to_string(second.join("note")).unwrap(), "for both");

    world.unpublish(&volume(2));
    world.check_nothing_left();
}

#[test]
fn the_last_unpublish_removes_source_and_credentials_before_it_answers() {
    let fixture = Fixture::new("basics-last");
    let world = World::start(&fixture);
    world.publish(&volume(1));
    assert_eq!(
        names_in(&world.mounter_source_directory().join("credentials")),
        ["s3-csi-config", "s3-csi-credentials"]
    );
    world.unpublish(&volume(1));
    assert_eq!(world.leftovers(), [""; 0]);
}

#[test]
fn unpublishing_what_is_not_there_is_fine() {
    let fixture = Fixture::new("basics-nothing");
    let world = World::start(&fixture);
    // Never heard of: not even the directories above it exist.
    world.unpublish(&volume(1));
    // Only a directory, as kubelet leaves it after a publish that failed.
    let target = world.kubelet.target(&volume(2));
    fs::create_dir_all(&target).unwrap();
    world.unpublish(&volume(2));
    assert!(!target.exists());
    // Twice.
    world.publish(&volume(3));
    world.unpublish(&volume(3));
    world.unpublish(&volume(3));
    world.check_nothing_left();
}

#[test]
fn a_target_directory_with_foreign_files_is_not_emptied() {
    let fixture = Fixture::new("basics-files");
    let world = World::start(&fixture);
    let target = world.kubelet.target(&volume(1));
    fs::create_dir_all(&target).unwrap();
    fs::write(target.join("precious"), "mine").unwrap();
    check_refused(world.try_unpublish(&volume(1)), Code::Internal, &["failed to remove", "not empty"]);
    assert_eq!(fs::read_to_string(target.join("precious")).unwrap(), "mine");
}

#[test]
fn a_target_with_an_open_file_stays_until_it_is_closed() {
    let fixture = Fixture::new("basics-open");
    let world = World::start(&fixture);
    world.store.put_object(BUCKET, "open.txt", b"still read").unwrap();
    let target = world.publish(&volume(1));
    let open = fs::File::open(target.join("open.txt")).unwrap();

    check_refused(
        world.try_unpublish(&volume(1)),
        Code::FailedPrecondition,
        &["Could not unmount", "is in use", "fuser"],
    );
    assert_eq!(fs::read_to_string(target.join("open.txt")).unwrap(), "still read");

    drop(open);
    world.unpublish(&volume(1));
    world.check_nothing_left();
}

#[test]
fn a_short_look_into_a_volume_does_not_keep_it_from_being_unpublished() {
    let fixture = Fixture::new("basics-look");
    let world = World::start(&fixture);
    world.store.put_object(BUCKET, "open.txt", b"x").unwrap();
    let target = world.publish(&volume(1));
    let open = fs::File::open(target.join("open.txt")).unwrap();
    let unpublish = world.unpublish_in_background(&volume(1));
    // It has found the target in use by now, or finds it free.
    wait_for("unpublish is under way", || world.node().log_contains("target is in use") || unpublish.is_finished());
    drop(open);
    world.runtime.block_on(unpublish).unwrap().unwrap();
    world.check_nothing_left();
}

#[test]
fn volumes_of_different_buckets_show_different_objects() {
    let fixture = Fixture::new("basics-buckets");
    let world = World::start(&fixture);
    let volumes = ["bucket-1", "bucket-2"].map(|bucket| CsiVolume::new(bucket, &format!("pv-of-{bucket}"), &pod(1)));
    for volume in &volumes {
        fs::write(world.publish(volume).join("name"), &volume.bucket).unwrap();
    }
    assert_eq!(world.engines().len(), 2);
    for volume in &volumes {
        assert_eq!(world.store.object(&volume.bucket, "name").unwrap(), volume.bucket.as_bytes());
        world.unpublish(volume);
    }
    world.check_nothing_left();
}

#[test]
fn kubelet_s_directory_may_be_a_link() {
    let fixture = Fixture::new("basics-link");
    fixture.create_directory("elsewhere");
    symlink("elsewhere", fixture.path("kubelet")).unwrap();
    let world = World::start(&fixture);
    let target = world.publish(&volume(1));
    fs::write(target.join("file"), "x").unwrap();
    world.publish(&volume(1));
    world.publish(&volume(2));
    world.engine();
    assert_eq!(world.mounts().len(), 3);
    world.unpublish(&volume(1));
    world.unpublish(&volume(2));
    world.check_nothing_left();
}
