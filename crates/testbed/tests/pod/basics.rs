//! What a workload gets, how workloads share, and what stays when they are gone.

use std::fs;
use std::os::unix::fs::MetadataExt as _;

use s3csi_driver::csi::proto::NodeGetCapabilitiesRequest;
use s3csi_driver::csi::proto::node_service_capability::rpc;
use s3csi_driver::csi::proto::node_service_capability::{Rpc, Type};
use s3csi_driver::csi::proto::volume_capability::access_mode::Mode;
use s3csi_s3_server::store::{Account, Store as _};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::kubelet::CsiVolume;
use s3csi_testbed::wait::wait_for;

use crate::world::{BUCKET, PV, World, names_in};

#[test]
fn a_workload_is_served_by_its_mountpoint_pod() {
    let fixture = Fixture::new("pod-basics");
    let world = World::start(&fixture);
    let pod = world.serve(&[1]);
    let target = world.publish(&world.volume(1));
    fs::write(target.join("file"), "content").unwrap();
    assert_eq!(world.store.object(BUCKET, "file").as_deref(), Some(b"content".as_slice()));
    assert_eq!(world.mounts(), [world.source(&pod), target.clone()]);
    assert_eq!(world.engines_of(&pod).len(), 1);

    world.unpublish(&world.volume(1));
    assert!(!target.exists());
    assert_eq!(world.mounts(), [world.source(&pod)], "the source waits for the controller's word");
    world.retire(&pod);
    world.check_nothing_mounted();
}

/// `ReadWriteOnce` and `ReadWriteOncePod`: the controller keeps them to one node, so the node need only say that it understands them.
#[test]
fn volumes_for_one_node_are_announced_and_published() {
    let fixture = Fixture::new("pod-single-node");
    let world = World::start(&fixture);
    let mut client = world.runtime.block_on(async { world.kubelet.node() });
    let announced = world.runtime.block_on(client.node_get_capabilities(NodeGetCapabilitiesRequest {}));
    let announced = announced.unwrap().into_inner().capabilities;
    let single_node = Type::Rpc(Rpc { r#type: rpc::Type::SingleNodeMultiWriter.into() });
    assert!(announced.iter().any(|it| it.r#type == Some(single_node)), "{announced:?}");
    world.serve(&[1, 2]);
    for (number, mode) in [(1, Mode::SingleNodeMultiWriter), (2, Mode::SingleNodeSingleWriter)] {
        let volume = CsiVolume { mode, ..world.volume(number) };
        let target = world.publish(&volume);
        fs::write(target.join(format!("file-{number}")), "x").unwrap();
        world.unpublish(&volume);
    }
}

#[test]
fn the_path_of_a_mounters_socket_may_be_longer_than_an_address() {
    let fixture = Fixture::new("pod-long-path");
    let world = World::start(&fixture);
    let pod = world.serve(&[1]);
    assert!(107 < pod.directory.join("mount.sock").as_os_str().len());
    world.publish(&world.volume(1));
    world.unpublish(&world.volume(1));
}

#[test]
fn five_workloads_one_after_the_other_share_one_source() {
    let fixture = Fixture::new("pod-sequential");
    let world = World::start(&fixture);
    let pod = world.serve(&[1, 2, 3, 4, 5]);
    let mut engine = None;
    for number in 1..=5 {
        let target = world.publish(&world.volume(number));
        fs::write(target.join(format!("file-{number}")), "x").unwrap();
        // Somebody else sees it through the same engine.
        assert_eq!(names_in(&world.source(&pod)).len(), number as usize);
        assert_eq!(*engine.get_or_insert(world.engine()), world.engine());
    }
    assert_eq!(world.mounts().len(), 6);
    for number in 1..=5 {
        world.unpublish(&world.volume(number));
        assert_eq!(world.mounts().len(), 6 - number as usize);
    }
    world.retire(&pod);
    world.check_nothing_mounted();
}

#[test]
fn twenty_workloads_at_once_share_one_source() {
    let fixture = Fixture::new("pod-concurrent");
    let world = World::start(&fixture);
    let numbers: Vec<u32> = (1..=20).collect();
    let pod = world.serve(&numbers);
    let calls: Vec<_> = numbers.iter().map(|it| world.publish_in_background(&world.volume(*it))).collect();
    for (call, number) in calls.into_iter().zip(&numbers) {
        let target = world.runtime.block_on(call).unwrap().unwrap();
        fs::write(target.join(number.to_string()), "x").unwrap();
    }
    assert_eq!(world.engines().len(), 1);
    assert_eq!(world.mounts().len(), 21);
    assert_eq!(pod.mounter().errors().matches("mount request received").count(), 1);
    assert_eq!(world.store.keys(BUCKET).len(), 20);
    for number in numbers {
        world.unpublish(&world.volume(number));
    }
    world.retire(&pod);
    world.check_nothing_mounted();
}

#[test]
fn two_mountpoint_pods_serve_the_same_volume_side_by_side() {
    let fixture = Fixture::new("pod-two");
    let world = World::start(&fixture);
    let pods = [1, 2].map(|it| world.serve(&[it]));
    let targets = [1, 2].map(|it| world.publish(&world.volume(it)));
    assert_ne!(fs::metadata(&targets[0]).unwrap().dev(), fs::metadata(&targets[1]).unwrap().dev());
    for pod in &pods {
        assert_eq!(world.engines_of(pod).len(), 1);
    }
    world.unpublish(&world.volume(1));
    world.retire(&pods[0]);
    fs::write(targets[1].join("file"), "x").unwrap();
    world.unpublish(&world.volume(2));
}

#[test]
fn publishing_again_changes_nothing_but_the_keys() {
    let fixture = Fixture::new("pod-again");
    let world = World::start(&fixture);
    let pod = world.serve(&[1]);
    let (old, new) = (Account::named("old"), Account::named("new"));
    world.store.add_account(&old).unwrap();
    world.store.add_account(&new).unwrap();
    world.store.create_bucket("of-old", &old).unwrap();
    let volume = CsiVolume::new("of-old", PV, &world.workload(1));
    let target = world.publish(&volume.clone().with_secret(&old.access_key, &old.secret_key));
    let mounts = world.mounts();
    let engine = world.engine();
    let file = pod.directory.join("credentials/s3-csi-credentials");
    assert!(fs::read_to_string(&file).unwrap().contains(&old.access_key));

    world.publish(&volume.with_secret(&new.access_key, &new.secret_key));
    assert!(fs::read_to_string(&file).unwrap().contains(&new.access_key));
    assert_eq!((world.mounts(), world.engine()), (mounts, engine));
    assert!(target.exists());
    world.unpublish(&world.volume(1));
}

#[test]
fn the_keys_are_for_the_group_of_the_mountpoint_pod_only() {
    let fixture = Fixture::new("pod-keys");
    let world = World::start(&fixture);
    let pod = world.serve(&[1]);
    world.publish(&world.volume(1));
    for name in ["credentials", "credentials/s3-csi-credentials", "credentials/s3-csi-config"] {
        let found = fs::metadata(pod.directory.join(name)).unwrap();
        assert_eq!((found.uid(), found.gid()), (0, 1000), "{name}");
        assert_eq!(found.mode() & 0o027, 0, "{name}: {:o}", found.mode());
    }
    world.unpublish(&world.volume(1));
}

#[test]
fn a_read_only_workload_cannot_write_and_its_neighbour_can() {
    let fixture = Fixture::new("pod-read-only");
    let world = World::start(&fixture);
    let pod = world.serve(&[1, 2]);
    let mut reader = world.volume(1);
    reader.is_read_only = true;
    let reading = world.publish(&reader);
    let writing = world.publish(&world.volume(2));
    fs::write(writing.join("file"), "x").unwrap();
    wait_for("the reader sees the file", || reading.join("file").exists());
    let refused = fs::write(reading.join("other"), "x").unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    world.unpublish(&reader);
    world.unpublish(&world.volume(2));
    world.retire(&pod);
}

#[test]
fn unpublish_of_what_was_never_published_succeeds() {
    let fixture = Fixture::new("pod-unpublish");
    let world = World::start(&fixture);
    world.unpublish(&world.volume(1));
    world.check_nothing_mounted();
}
