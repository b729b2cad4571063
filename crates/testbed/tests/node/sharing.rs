//! Who shares an engine with whom: only those for whom nothing about it differs.

use s3csi_driver::csi::proto::volume_capability::access_mode::Mode;
use s3csi_s3_server::store::Store as _;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::kubelet::CsiVolume;

use crate::world::{World, volume};

/// Publishes the volume of Pod 1 as it is and that of Pod 2 changed, and counts engines.
#[track_caller]
fn check(world: &World<'_>, what: &str, change: impl FnOnce(&mut CsiVolume), engines: usize) {
    let mut other = volume(2);
    change(&mut other);
    world.publish(&other);
    assert_eq!(world.engines().len(), engines, "{what}");
    world.unpublish(&other);
    world.wait_for_engines(1);
}

#[test]
fn volumes_that_differ_in_anything_have_separate_engines() {
    let fixture = Fixture::new("sharing-own");
    let world = World::start(&fixture);
    let account = world.store.account().clone();
    world.publish(&volume(1));

    check(&world, "fsGroup", |it| it.fs_group = "4321".to_owned(), 2);
    check(&world, "another option", |it| it.mount_options.push("prefix=a/".to_owned()), 2);
    check(&world, "an option less", |it| it.mount_options.truncate(1), 2);
    check(&world, "PV", |it| it.pv = "pv-2".to_owned(), 2);
    check(&world, "volume handle", |it| it.handle = "other-handle".to_owned(), 2);
    check(&world, "bucket", |it| it.bucket = "bucket-2".to_owned(), 2);
    check(&world, "read-only volume", |it| it.mode = Mode::MultiNodeReaderOnly, 2);
    check(&world, "keys", |it| *it = it.clone().with_secret(&account.access_key, &account.secret_key), 2);

    world.unpublish(&volume(1));
    world.check_nothing_left();
}

#[test]
fn spelling_order_and_the_workload_itself_make_no_difference() {
    let fixture = Fixture::new("sharing-same");
    let world = World::start(&fixture);
    let options = |list: &[&str]| list.iter().map(|it| (*it).to_owned()).collect::<Vec<_>>();
    world.publish(&volume(1));

    check(&world, "another Pod", |_| {}, 1);
    check(&world, "order", |it| it.mount_options.reverse(), 1);
    check(&world, "dashes", |it| it.mount_options = options(&["--allow-overwrite", "--allow-delete"]), 1);
    let twice = ["allow-delete", "--allow-overwrite", "allow-delete"];
    check(&world, "the same option twice", |it| it.mount_options = options(&twice), 1);
    check(&world, "a workload that only reads", |it| it.is_read_only = true, 1);
    let namespace = "csi.storage.k8s.io/pod.namespace";
    check(&world, "namespace", |it| drop(it.attributes.insert(namespace.to_owned(), "elsewhere".to_owned())), 1);
    check(&world, "driver by name", |it| drop(it.attributes.insert("authenticationSource".into(), "driver".into())), 1);

    world.unpublish(&volume(1));
    world.check_nothing_left();
}
