//! A volume may be a part of a bucket, and may be in another store: what volumes on demand say about themselves.

use std::fs;

use s3csi_s3_server::store::{Account, Store as _};
use s3csi_s3_server::{Config, S3Server};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::kubelet::CsiVolume;
use tonic::Code;

use crate::world::{BUCKET, World, check_refused, names_in, pod};

fn with_attribute(mut volume: CsiVolume, key: &str, value: &str) -> CsiVolume {
    volume.attributes.insert(key.to_owned(), value.to_owned());
    volume
}

#[test]
fn two_parts_of_one_bucket_do_not_see_each_other() {
    let fixture = Fixture::new("places-prefix");
    let world = World::start(&fixture);
    let part = |number: u32, prefix: &str| {
        with_attribute(CsiVolume::new(BUCKET, &format!("pv-part-{number}"), &pod(number)), "prefix", prefix)
    };
    let (one, other) = (part(1, "team/a/"), part(2, "team/ab/"));
    let (first, second) = (world.publish(&one), world.publish(&other));
    fs::write(first.join("x"), "one").unwrap();
    fs::write(second.join("y"), "other").unwrap();
    assert_eq!((names_in(&first), names_in(&second)), (vec!["x".to_owned()], vec!["y".to_owned()]));
    assert_eq!(world.store.keys(BUCKET), ["team/a/x", "team/ab/y"]);
    world.unpublish(&one);
    world.unpublish(&other);

    let twice = part(1, "team/a/").with_option("prefix=team/");
    check_refused(world.try_publish(&twice), Code::InvalidArgument, &["exclude each other"]);
    world.check_nothing_left();
}

#[test]
fn another_store_gets_the_volume_s_keys_and_never_the_driver_s() {
    let fixture = Fixture::new("places-store");
    let world = World::start(&fixture);
    let account = Account::named("elsewhere");
    let config = Config { accounts: vec![account.clone()], buckets: vec!["far".to_owned()], ..Config::default() };
    let elsewhere = S3Server::start_blocking(config).unwrap();
    let far = with_attribute(CsiVolume::new("far", "pv-far", &pod(1)), "endpointUrl", &elsewhere.endpoint());

    check_refused(world.try_publish(&far), Code::InvalidArgument, &["endpointUrl is only for volumes with keys"]);
    assert_eq!(elsewhere.requests(), [], "a request reached the other store");

    let far = far.with_secret(&account.access_key, &account.secret_key);
    let target = world.publish(&far);
    fs::write(target.join("file"), "content").unwrap();
    assert_eq!(elsewhere.object("far", "file").unwrap(), "content");
    world.unpublish(&far);
    assert_eq!(world.store.requests(), [], "a request reached the driver's own store");
    world.check_nothing_left();
}
