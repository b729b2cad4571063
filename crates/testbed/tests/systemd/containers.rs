//! The node plugin as its container sees the node: another mount namespace, terminals of its own, the host's devices elsewhere.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;

use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::kubelet::CsiVolume;
use s3csi_testbed::systemd::beside_systemd;
use tonic::Code;

use crate::world::{World, check_refused, mount_units, volume};

/// What the container's program may do.
#[derive(Clone, Copy)]
enum Privileges {
    /// As `privileged: true`.
    All,
    /// As `capabilities: drop: [ALL]`.
    None,
}

/// Puts the node plugin into a container from its next start on; answers the path of the host's `/dev/ptmx` in it. The container
/// gets the host's mounts (`HostToContainer`), the host gets none of the container's.
fn contain(world: &mut World<'_>, fixture: &Fixture, privileges: Privileges) -> String {
    // As on a real node; a private mount would keep what systemd mounts to itself.
    run_mount(&["--make-rshared", "/"]);
    // Terminals of other tests must not have the numbers of the container's.
    run_mount(&["-t", "devpts", "-o", "newinstance,ptmxmode=0666", "devpts", "/dev/pts"]);
    let devices = fixture.create_directory("host/dev");
    let drop = match privileges {
        Privileges::All => "",
        Privileges::None => "setpriv --bounding-set=-all --inh-caps=-all --no-new-privs",
    };
    let script = fixture.path("container");
    let text = format!(
        "#!/bin/sh\n\
         set -e\n\
         mount --make-rslave /\n\
         mount --rbind /dev {}\n\
         mount -t devpts -o newinstance,ptmxmode=0666 devpts /dev/pts\n\
         mount --bind /dev/pts/ptmx /dev/ptmx\n\
         exec {drop} \"$@\"\n",
        devices.display()
    );
    fs::write(&script, text).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    let entry = ["unshare", "--mount", "--propagation=unchanged", "--"].map(Into::into);
    world.plugin.set_entry(entry.into_iter().chain([script.into()]).collect());
    devices.join("ptmx").to_str().unwrap().to_owned()
}

#[track_caller]
fn run_mount(arguments: &[&str]) {
    assert!(Command::new("mount").args(arguments).status().unwrap().success(), "mount {arguments:?}");
}

fn check_works_in_a_container(name: &str, privileges: Privileges) {
    let fixture = Fixture::new(name);
    let mut world = World::prepare_beside_systemd(&fixture);
    let ptmx = contain(&mut world, &fixture, privileges);
    world.start_node_with(&["--ptmx-path", &ptmx]);
    let namespace = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/mnt")).unwrap();
    assert_ne!(namespace(&world.node().pid().to_string()), namespace("self"));

    let target = world.publish(&volume(1));
    world.check_serves(&target);
    // Also the second time, when it is the plugin that must see the mount.
    world.publish(&volume(1));
    assert_eq!(mount_units().len(), 1);
    // These words came over a terminal of the host.
    let missing = CsiVolume { bucket: "no-such-bucket".to_owned(), ..volume(2) };
    check_refused(world.try_publish(&missing), Code::NotFound, &["the engine failed", "does not exist"]);
    world.kill_engine();
    world.node().wait_for_log("EngineRemounted");
    world.check_serves(&target);
    world.unpublish(&volume(1));
    world.check_nothing_left();
}

#[test]
fn volumes_are_published_from_a_container_with_the_host_s_terminals() {
    beside_systemd(|| check_works_in_a_container("systemd-container", Privileges::All));
}

#[test]
fn volumes_are_published_from_a_container_without_any_capability() {
    beside_systemd(|| check_works_in_a_container("systemd-unprivileged", Privileges::None));
}

#[test]
fn a_terminal_of_the_container_fails_cleanly() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-terminal");
        let mut world = World::prepare_beside_systemd(&fixture);
        contain(&mut world, &fixture, Privileges::All);
        world.start_node();
        check_refused(world.try_publish(&volume(1)), Code::Internal, &["PTMX_PATH"]);
        world.check_nothing_left();
    });
}
