//! When S3 says no, or nothing: the code says what kind of problem it is, the message which volume and what to do, in time.

use std::time::{Duration, Instant};

use s3csi_s3_server::store::{Account, Store as _};
use s3csi_s3_server::{Effect, Fault};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::kubelet::CsiVolume;
use tonic::Code;

use crate::world::{BUCKET, World, check_refused, pod, volume};

/// Kubelet gives a call two minutes; an answer that is known earlier comes earlier.
const BOUND: Duration = Duration::from_secs(45);

#[track_caller]
fn check(world: &World<'_>, volume: &CsiVolume, code: Code, words: &[&str]) {
    let start = Instant::now();
    let outcome = world.try_publish(volume);
    assert!(start.elapsed() < BOUND, "took {:?}", start.elapsed());
    let target = world.kubelet.target(volume);
    let place = [format!("Could not mount \"{}\" at \"{}\"", volume.bucket, target.display())];
    let words: Vec<&str> = place.iter().map(String::as_str).chain(words.iter().copied()).collect();
    check_refused(outcome, code, &words);
    world.check_nothing_left();
}

#[test]
fn a_missing_bucket_is_not_found() {
    let fixture = Fixture::new("words-bucket");
    let world = World::start(&fixture);
    check(&world, &CsiVolume::new("no-such-bucket", "pv", &pod(1)), Code::NotFound, &["does not exist"]);
}

#[test]
fn a_bucket_of_another_account_is_forbidden() {
    let fixture = Fixture::new("words-forbidden");
    let world = World::start(&fixture);
    let owner = Account::named("owner");
    world.store.add_account(&owner).unwrap();
    world.store.create_bucket("not-ours", &owner).unwrap();
    check(
        &world,
        &CsiVolume::new("not-ours", "pv", &pod(1)),
        Code::PermissionDenied,
        &["AccessDenied: Access Denied", "ask its owner"],
    );
}

#[test]
fn the_words_of_the_store_about_a_key_that_it_does_not_know_are_kept() {
    let fixture = Fixture::new("words-unknown-key");
    let world = World::start(&fixture);
    check(
        &world,
        &volume(1).with_secret("stranger", "NeverPrintThis"),
        Code::Unauthenticated,
        &["InvalidAccessKeyId: The AWS Access Key Id you provided does not exist in our records."],
    );
}

#[test]
fn a_store_that_is_not_there_is_unavailable() {
    let fixture = Fixture::new("words-unreachable");
    // Nothing listens on port 1.
    let world = World::start_with(&fixture, |it| it.endpoint_url = "http://127.0.0.1:1".to_owned());
    check(&world, &volume(1), Code::Unavailable, &["127.0.0.1:1"]);
}

#[test]
fn a_store_without_a_name_is_unavailable() {
    let fixture = Fixture::new("words-dns");
    let world = World::start_with(&fixture, |it| it.endpoint_url = "http://no-such-host.invalid:8000".to_owned());
    check(&world, &volume(1), Code::Unavailable, &["no-such-host.invalid"]);
}

#[test]
fn a_store_that_refuses_for_a_moment_is_asked_again() {
    let fixture = Fixture::new("words-busy");
    let world = World::start(&fixture);
    let busy = world.store.inject(Fault::new(Effect::Unavailable).bucket(BUCKET).times(1));
    world.publish(&volume(1));
    assert_eq!(busy.hits(), 1);
    world.unpublish(&volume(1));
    world.check_nothing_left();
}

#[test]
fn a_frozen_store_is_reported_before_kubelet_gives_up() {
    let fixture = Fixture::new("words-frozen");
    let world = World::start(&fixture);
    let frozen = world.store.inject(Fault::new(Effect::Frozen).bucket(BUCKET));
    let outcome = world.try_publish_within(&volume(1), Duration::from_secs(4));
    // These words are ours: kubelet's own message at its deadline would say nothing.
    check_refused(
        outcome,
        Code::DeadlineExceeded,
        &["Could not mount", BUCKET, "did not answer in time", "kubectl logs"],
    );
    world.check_nothing_left();

    frozen.release();
    world.publish(&volume(1));
    world.unpublish(&volume(1));
    world.check_nothing_left();
}
