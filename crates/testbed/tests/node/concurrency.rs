//! Many calls at once.

use std::fs;

use s3csi_s3_server::store::Store as _;
use s3csi_s3_server::{Effect, Fault};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::kubelet::CsiVolume;
use s3csi_testbed::wait::wait_for;
use tonic::Code;

use crate::world::{BUCKET, World, check_refused, pod, volume};

const TARGETS: u32 = 100;
const BUCKETS: u32 = 10;

fn one_of_many(number: u32) -> CsiVolume {
    let bucket = number % BUCKETS + 1;
    CsiVolume::new(&format!("bucket-{bucket}"), &format!("pv-{bucket}"), &pod(number))
}

/// Runs a call for every volume at once and answers what went wrong.
fn all_at_once<F: Future<Output = Result<(), tonic::Status>> + Send + 'static>(
    world: &World<'_>,
    volumes: &[CsiVolume],
    call: impl Fn(s3csi_testbed::kubelet::Kubelet, CsiVolume) -> F,
) -> Vec<String> {
    let tasks: Vec<_> = volumes.iter().map(|it| world.runtime.spawn(call(world.kubelet.clone(), it.clone()))).collect();
    let outcomes = tasks.into_iter().map(|it| world.runtime.block_on(it).unwrap());
    outcomes.filter_map(|it| it.err().map(|status| format!("{:?}: {}", status.code(), status.message()))).collect()
}

#[test]
fn a_hundred_targets_of_ten_buckets_at_once_have_ten_engines() {
    let fixture = Fixture::new("concurrency-100");
    let world = World::start(&fixture);
    let volumes: Vec<CsiVolume> = (0..TARGETS).map(one_of_many).collect();

    let failed = all_at_once(&world, &volumes, |kubelet, it| async move { kubelet.publish(&it).await.map(drop) });
    assert_eq!(failed, [""; 0]);
    assert_eq!(world.engines().len(), 10);
    assert_eq!(world.mounts().len(), 110);
    for (volume, number) in volumes.iter().zip(0..) {
        let name = format!("file-{number}");
        fs::write(world.kubelet.target(volume).join(&name), &volume.pod_uid).unwrap();
        assert_eq!(world.store.object(&volume.bucket, &name).unwrap(), volume.pod_uid.as_bytes());
    }
    assert_eq!(world.store.keys(BUCKET).len(), 10);

    let failed = all_at_once(&world, &volumes, |kubelet, it| async move { kubelet.unpublish(&it).await });
    assert_eq!(failed, [""; 0]);
    world.check_nothing_left();
}

#[test]
fn publish_and_unpublish_of_a_shared_source_side_by_side_never_fail() {
    let fixture = Fixture::new("concurrency-mixed");
    let world = World::start(&fixture);
    // Each Pod comes and goes several times, so that last unpublish and first publish meet in every order.
    let volumes: Vec<CsiVolume> = (1..=8).map(volume).collect();
    let failed = all_at_once(&world, &volumes, |kubelet, it| async move {
        for _ in 0..5 {
            kubelet.publish(&it).await?;
            kubelet.unpublish(&it).await?;
        }
        Ok(())
    });
    assert_eq!(failed, [""; 0]);
    world.check_nothing_left();
}

#[test]
fn the_same_target_twice_at_once_is_aborted_once() {
    let fixture = Fixture::new("concurrency-twice");
    let world = World::start(&fixture);
    let frozen = world.store.inject(Fault::new(Effect::Frozen).bucket(BUCKET));
    let first = world.publish_in_background(&volume(1));
    wait_for("the first call is under way", || 0 < frozen.hits());

    let words = ["another call for target", "still running"];
    check_refused(world.try_publish(&volume(1)), Code::Aborted, &words);
    check_refused(world.try_unpublish(&volume(1)), Code::Aborted, &words);

    frozen.release();
    let target = world.runtime.block_on(first).unwrap().unwrap();
    fs::write(target.join("file"), "x").unwrap();
    world.engine();
    world.unpublish(&volume(1));
    world.check_nothing_left();
}

#[test]
fn a_second_target_of_a_starting_source_waits_for_it() {
    let fixture = Fixture::new("concurrency-wait");
    let world = World::start(&fixture);
    let frozen = world.store.inject(Fault::new(Effect::Frozen).bucket(BUCKET));
    let first = world.publish_in_background(&volume(1));
    wait_for("the first call is under way", || 0 < frozen.hits());
    let second = world.publish_in_background(&volume(2));
    // Another volume does not wait for either.
    let other = CsiVolume::new("bucket-2", "pv-2", &pod(3));
    world.publish(&other);
    assert!(!first.is_finished() && !second.is_finished());

    frozen.release();
    for call in [first, second] {
        world.runtime.block_on(call).unwrap().unwrap();
    }
    assert_eq!(world.engines().len(), 2);
    for volume in [volume(1), volume(2), other] {
        world.unpublish(&volume);
    }
    world.check_nothing_left();
}
