//! Volumes in the spec of a Pod: only where they are enabled, and never with the driver's keys.

use s3csi_s3_server::store::Store as _;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::kubelet::CsiVolume;
use tonic::Code;

use crate::world::{BUCKET, World, check_refused, pod};

fn inline(world: &World<'_>, number: u32) -> CsiVolume {
    let account = world.store.account();
    let volume = CsiVolume::inline(BUCKET, "data", &pod(number)).with_secret(&account.access_key, &account.secret_key);
    volume.with_attribute("mountOptions", "allow-delete,allow-overwrite")
}

fn start<'a>(fixture: &'a Fixture, arguments: &[&str]) -> World<'a> {
    let mut world = World::prepare(fixture);
    world.start_mounter();
    world.start_node_with(arguments);
    world
}

#[test]
fn they_are_refused_unless_they_are_enabled() {
    let fixture = Fixture::new("inline-off");
    let world = start(&fixture, &[]);
    check_refused(world.try_publish(&inline(&world, 1)), Code::InvalidArgument, &["inlineVolumes.enabled"]);
    assert_eq!(world.store.requests(), []);
    world.check_nothing_left();
}

#[test]
fn each_is_mounted_for_its_pod_alone() {
    let fixture = Fixture::new("inline-on");
    let world = start(&fixture, &["--inline-volumes", "on"]);
    let (one, two) = (inline(&world, 1), inline(&world, 2));
    let target = world.publish(&one);
    world.check_serves(&target);
    // kubelet repeats the call.
    world.publish(&one);
    world.check_serves(&world.publish(&two));
    assert_eq!(world.engines().len(), 2, "Pods of different authors share nothing");
    for volume in [one, two] {
        world.unpublish(&volume);
    }
    world.check_nothing_left();
}

#[test]
fn an_author_of_pods_never_gets_the_driver_s_keys_nor_what_administrators_decide() {
    let fixture = Fixture::new("inline-limits");
    let world = start(&fixture, &["--inline-volumes", "on", "--secret-falls-back-to-driver", "default"]);
    let own = ["inline volume must bring its own keys"];
    let driver = inline(&world, 1).with_attribute("authenticationSource", "driver");
    check_refused(world.try_publish(&driver), Code::InvalidArgument, &own);
    check_refused(world.try_publish(&CsiVolume::inline(BUCKET, "data", &pod(1))), Code::InvalidArgument, &own);
    let mut without = inline(&world, 1);
    without.secrets.clear();
    check_refused(world.try_publish(&without), Code::Unauthenticated, &["no usable Secret"]);
    for attribute in ["endpointUrl", "httpsProxy", "cache", "mountpointPodServiceAccountName"] {
        let volume = inline(&world, 1).with_attribute(attribute, "http://127.0.0.1:1");
        check_refused(world.try_publish(&volume), Code::InvalidArgument, &[attribute, "use a PersistentVolume"]);
    }
    let options = inline(&world, 1).with_attribute("mountOptions", "cache /etc");
    check_refused(world.try_publish(&options), Code::InvalidArgument, &["--cache", "is not available"]);
    assert_eq!(world.store.requests(), []);
    world.check_nothing_left();
}
