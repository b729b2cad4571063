//! A Pod's fsGroup, and who but root may use a mount.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use s3csi_driver::csi::proto::NodeGetCapabilitiesRequest;
use s3csi_driver::csi::proto::node_service_capability::{Rpc, Type, rpc};
use s3csi_s3_server::store::Store as _;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::kubelet::CsiVolume;

use crate::world::{BUCKET, World, volume};

const USER: u32 = 12_345;
const GROUP: u32 = 4_321;

/// Whether a process of this user and group can write a file here, and read it.
fn can_use(directory: &Path, user: u32, group: u32) -> bool {
    let script = "echo hello > \"$0/by-$1\" && test \"$(cat \"$0/by-$1\")\" = hello";
    let mut shell = Command::new("/bin/sh");
    shell.args(["-c", script]).arg(directory).arg(user.to_string()).uid(user).gid(group);
    shell.stderr(std::process::Stdio::null()).status().unwrap().success()
}

/// Mode, user and group.
fn ownership(path: &Path) -> (u32, u32, u32) {
    let found = fs::metadata(path).unwrap();
    (found.mode() & 0o7777, found.uid(), found.gid())
}

#[test]
fn the_node_asks_kubelet_for_the_group() {
    let fixture = Fixture::new("groups-capability");
    let world = World::start(&fixture);
    let mut client = world.runtime.block_on(async { world.kubelet.node() });
    let answer =
        world.runtime.block_on(client.node_get_capabilities(NodeGetCapabilitiesRequest {})).unwrap().into_inner();
    let announced: Vec<_> = answer.capabilities.into_iter().filter_map(|it| it.r#type).collect();
    let group = Type::Rpc(Rpc { r#type: rpc::Type::VolumeMountGroup.into() });
    assert!(announced.contains(&group), "announced: {announced:?}");
}

#[test]
fn files_belong_to_the_fs_group_and_its_members_can_write() {
    let fixture = Fixture::new("groups-fs-group");
    let world = World::start(&fixture);
    world.store.put_object(BUCKET, "directory/file", b"x").unwrap();
    let volume = CsiVolume { fs_group: GROUP.to_string(), ..volume(1) };
    let target = world.publish(&volume);

    let (mode, _, group) = ownership(&target);
    assert_eq!((mode, group), (0o770, GROUP));
    let (mode, _, group) = ownership(&target.join("directory"));
    assert_eq!((mode, group), (0o770, GROUP));
    let (mode, _, group) = ownership(&target.join("directory/file"));
    assert_eq!((mode, group), (0o660, GROUP));
    assert!(can_use(&target, USER, GROUP), "a member of the group");
    assert!(!can_use(&target, USER, GROUP + 1), "a stranger");

    world.unpublish(&volume);
    world.check_nothing_left();
}

#[test]
fn what_the_volume_says_wins_over_the_group() {
    let fixture = Fixture::new("groups-options");
    let world = World::start(&fixture);
    let mut volume = CsiVolume { fs_group: GROUP.to_string(), ..volume(1) };
    let options = ["gid=777", "uid=888", "dir-mode=755", "file-mode=644", "allow-other"];
    volume.mount_options.extend(options.map(str::to_owned));
    let target = world.publish(&volume);
    assert_eq!(ownership(&target), (0o755, 888, 777));
    assert!(can_use(&target, 888, 777));
    world.unpublish(&volume);
}

#[test]
fn without_a_group_only_root_gets_in() {
    let fixture = Fixture::new("groups-root");
    let world = World::start(&fixture);
    let target = world.publish(&volume(1));
    assert!(can_use(&target, 0, 0), "root");
    assert!(!can_use(&target, USER, GROUP), "somebody else");
    assert!(fs::read_dir(&target).unwrap().count() == 1);
    world.unpublish(&volume(1));
}

#[test]
fn others_get_in_when_the_volume_says_so() {
    let fixture = Fixture::new("groups-other");
    let world = World::start(&fixture);
    let mut volume = volume(1);
    volume.mount_options.extend(["allow-other", "dir-mode=777"].map(str::to_owned));
    let target = world.publish(&volume);
    assert!(can_use(&target, USER, GROUP));
    world.unpublish(&volume);
}

#[test]
fn group_zero_is_served_without_our_defaults() {
    let fixture = Fixture::new("groups-zero");
    let world = World::start(&fixture);
    let volume = CsiVolume { fs_group: "0".to_owned(), ..volume(1) };
    let target = world.publish(&volume);
    assert!(can_use(&target, 0, 0));
    // With the defaults of other groups, the directory would have mode 770 and let members in.
    assert_eq!(ownership(&target).0, 0o755);
    assert!(!can_use(&target, USER, 0), "a member of group 0");
    world.unpublish(&volume);
}
