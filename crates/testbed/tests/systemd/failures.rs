//! A publish that fails leaves nothing of its own and tells what the engine said; what others left is respected.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use s3csi_s3_server::store::Store as _;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::kubelet::CsiVolume;
use s3csi_testbed::systemd::beside_systemd;
use tonic::Code;

use crate::world::{BUCKET, World, check_refused, volume};

#[test]
fn the_answer_has_the_engines_message_and_the_command_to_see_more() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-words");
        let world = World::start_beside_systemd(&fixture);
        let missing = CsiVolume { bucket: "no-such-bucket".to_owned(), ..volume(1) };
        let start = Instant::now();
        let words = ["no-such-bucket", "the engine failed", "does not exist", "journalctl -u mount-s3-"];
        check_refused(world.try_publish(&missing), Code::NotFound, &words);
        assert!(start.elapsed() < Duration::from_secs(15), "the failure was told late: {:?}", start.elapsed());
        assert!(!world.kubelet.target(&missing).exists(), "the directory that was made is gone");
        world.check_nothing_left();
    });
}

#[test]
fn a_directory_that_was_there_before_stays_after_a_failure() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-directory");
        let world = World::start_beside_systemd(&fixture);
        let missing = CsiVolume { bucket: "no-such-bucket".to_owned(), ..volume(1) };
        let target = world.kubelet.target(&missing);
        fs::create_dir_all(&target).unwrap();
        check_refused(world.try_publish(&missing), Code::NotFound, &["the engine failed"]);
        assert!(target.is_dir());
        world.check_nothing_left();
    });
}

#[test]
fn something_else_mounted_at_the_target_is_a_clear_error() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-foreign");
        let world = World::start_beside_systemd(&fixture);
        let target = world.kubelet.target(&volume(1));
        fs::create_dir_all(&target).unwrap();
        let mount = Command::new("mount").args(["-t", "tmpfs", "foreign"]).arg(&target).status().unwrap();
        assert!(mount.success());
        check_refused(world.try_publish(&volume(1)), Code::FailedPrecondition, &["tmpfs", "not ours", "umount"]);
        check_refused(world.try_unpublish(&volume(1)), Code::FailedPrecondition, &["tmpfs", "not ours"]);
        assert!(Command::new("umount").arg(&target).status().unwrap().success());
        world.unpublish(&volume(1));
        world.check_nothing_left();
    });
}

#[test]
fn a_target_in_use_stays_and_the_error_says_who_holds_it() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-busy");
        let world = World::start_beside_systemd(&fixture);
        let target = world.publish(&volume(1));
        fs::write(target.join("file"), "x").unwrap();
        let open = fs::File::open(target.join("file")).unwrap();
        let who = format!("({})", std::process::id());
        check_refused(
            world.try_unpublish(&volume(1)),
            Code::FailedPrecondition,
            &["Could not unmount", "in use", &who],
        );
        world.check_serves(&target);
        drop(open);
        world.unpublish(&volume(1));
        world.check_nothing_left();
    });
}

#[test]
fn wrong_limits_and_options_are_refused_before_anything_is_made() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-wrong");
        let world = World::start_beside_systemd(&fixture);
        let mut wrong = volume(1);
        wrong.attributes.insert("mountpointContainerResourcesLimitsMemory".to_owned(), "much".to_owned());
        check_refused(
            world.try_publish(&wrong),
            Code::InvalidArgument,
            &["mountpointContainerResourcesLimitsMemory", "much"],
        );
        assert!(!world.kubelet.target(&wrong).exists());
        world.check_nothing_left();
    });
}

#[test]
fn a_dead_mount_in_use_can_be_removed() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-dead");
        let mut world = World::start_beside_systemd(&fixture);
        world.store.put_object(BUCKET, "file", b"x").unwrap();
        let target = world.publish(&volume(1));
        let open = fs::File::open(target.join("file")).unwrap();
        // There is no supervisor to replace the engine.
        world.kill_node();
        world.kill_engine();
        world.start_node();
        world.unpublish(&volume(1));
        drop(open);
        assert!(!target.exists());
        world.check_nothing_left();
    });
}
