//! A mount that does not come about: the message carries the engine's own words and the command that shows more, in time,
//! and nothing stays.

use std::fs;
use std::time::Duration;

use s3csi_s3_server::{Effect, Fault};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::kubelet::CsiVolume;
use s3csi_testbed::wait::wait_for;
use tonic::Code;

use crate::cluster::NAMESPACE;
use crate::world::{BUCKET, PV, World, check_refused};

const TIME: Duration = Duration::from_secs(6);

#[test]
fn the_error_has_the_engines_message_and_the_command_for_its_log() {
    let fixture = Fixture::new("pod-words");
    let world = World::start(&fixture);
    let pod = world.serve(&[1]);
    let volume = CsiVolume::new("no-such-bucket", PV, &world.workload(1));
    let command = format!("kubectl logs -n {NAMESPACE} {}", pod.name);
    check_refused(
        world.try_publish(&volume),
        Code::NotFound,
        &["Could not mount \"no-such-bucket\"", "the engine failed", "does not exist", &command],
    );
    world.check_nothing_mounted();
    let left = fs::read_to_string(pod.directory.join("mount.err")).unwrap();
    assert!(left.contains("does not exist"), "{left}");

    // The same Mountpoint Pod serves as soon as the trouble is over.
    let target = world.publish(&world.volume(1));
    fs::write(target.join("file"), "x").unwrap();
    world.unpublish(&world.volume(1));
    world.retire(&pod);
}

#[test]
fn invalid_options_are_refused_without_waiting() {
    let fixture = Fixture::new("pod-options");
    let world = World::start(&fixture);
    let volume = world.volume(1).with_option("read-only=maybe");
    check_refused(world.try_publish_within(&volume, Duration::from_secs(2)), Code::InvalidArgument, &["--read-only"]);
    world.check_nothing_mounted();
}

#[test]
fn a_frozen_store_is_reported_before_kubelet_gives_up() {
    let fixture = Fixture::new("pod-frozen-store");
    let world = World::start(&fixture);
    let pod = world.serve(&[1]);
    let frozen = world.store.inject(Fault::new(Effect::Frozen).bucket(BUCKET));
    let command = format!("kubectl logs -n {NAMESPACE} {}", pod.name);
    check_refused(
        world.try_publish_within(&world.volume(1), TIME),
        Code::DeadlineExceeded,
        &["did not answer in time", &command],
    );
    wait_for("the mount is gone", || world.mounts().is_empty());
    frozen.release();
    world.publish(&world.volume(1));
    world.unpublish(&world.volume(1));
    world.retire(&pod);
    world.check_nothing_mounted();
}

#[test]
fn a_mountpoint_pod_without_a_mounter_is_unavailable() {
    let fixture = Fixture::new("pod-no-mounter");
    let world = World::start(&fixture);
    let pod = world.create_pod(1);
    world.set_phase(&pod, "Running");
    world.assign(&pod.name, &[1]);
    let outcome = world.try_publish_within(&world.volume(1), TIME);
    check_refused(outcome, Code::Unavailable, &["no mounter listens", "kubectl logs", &pod.name]);
    world.check_nothing_mounted();
}

#[test]
fn a_mountpoint_pod_whose_directory_is_not_there_is_unavailable() {
    let fixture = Fixture::new("pod-directory");
    let world = World::start(&fixture);
    let pod = world.create_pod(1);
    world.set_phase(&pod, "Running");
    world.assign(&pod.name, &[1]);
    fs::remove_dir(&pod.directory).unwrap();
    let outcome = world.try_publish_within(&world.volume(1), TIME);
    check_refused(outcome, Code::Unavailable, &["cannot be used", &pod.uid]);
    world.check_nothing_mounted();
}

#[test]
fn an_engine_that_dies_at_its_start_is_an_error_and_the_next_publish_works() {
    let fixture = Fixture::new("pod-engine-dies");
    let world = World::start(&fixture);
    let pod = world.serve(&[1]);
    let frozen = world.store.inject(Fault::new(Effect::Frozen).bucket(BUCKET));
    let publish = world.publish_in_background(&world.volume(1));
    wait_for("the engine asks the store", || 0 < frozen.hits());
    rustix::process::kill_process(world.engine(), rustix::process::Signal::KILL).unwrap();
    check_refused(world.runtime.block_on(publish).unwrap(), Code::Internal, &["the engine failed", "signal 9"]);
    frozen.release();
    world.check_nothing_mounted();
    world.publish(&world.volume(1));
    world.unpublish(&world.volume(1));
    world.retire(&pod);
}

#[test]
fn a_container_that_dies_at_the_start_is_an_error_and_the_next_publish_works() {
    let fixture = Fixture::new("pod-container-dies");
    let world = World::start(&fixture);
    let pod = world.serve(&[1]);
    let frozen = world.store.inject(Fault::new(Effect::Frozen).bucket(BUCKET));
    let publish = world.publish_in_background(&world.volume(1));
    wait_for("the engine asks the store", || 0 < frozen.hits());
    world.kill_mounter(&pod);
    let outcome = world.runtime.block_on(publish).unwrap();
    check_refused(outcome, Code::Unavailable, &["the mounter ended", "kubectl logs", &pod.name]);
    frozen.release();
    world.check_nothing_mounted();

    // Kubelet starts the container again.
    let pod = world.start_mounter(&pod, &[]);
    world.publish(&world.volume(1));
    world.unpublish(&world.volume(1));
    world.retire(&pod);
}
