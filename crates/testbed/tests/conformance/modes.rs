//! How the engine is started and how it ends.

use std::fs;

use rustix::io::Errno;
use rustix::process::Signal;
use s3csi_driver::host::Access;
use s3csi_testbed::leftovers::mounts_beneath;

use crate::on_both_servers;
use crate::world::{BUCKETS, World, check_errno, listing};

on_both_servers!(
    a_read_only_mount_reads_and_never_writes,
    a_mount_in_the_background_outlives_its_starter,
    a_passed_descriptor_is_served,
    a_passed_descriptor_is_served_read_only,
);

fn a_read_only_mount_reads_and_never_writes(world: &World) {
    world.put("file", b"content");
    let mount = world.engine().argument("--read-only").mount();
    assert_eq!(fs::read(mount.path("file")).unwrap(), b"content");
    check_errno(fs::write(mount.path("new"), "new"), &[Errno::ROFS]);
    check_errno(fs::write(mount.path("file"), "new"), &[Errno::ROFS]);
    check_errno(fs::remove_file(mount.path("file")), &[Errno::ROFS]);
    check_errno(fs::create_dir(mount.path("directory")), &[Errno::ROFS]);
    check_errno(fs::rename(mount.path("file"), mount.path("new")), &[Errno::ROFS]);
    assert_eq!(world.keys(), ["file"]);
    mount.unmount();
}

fn a_mount_in_the_background_outlives_its_starter(world: &World) {
    let mount = world.engine().writable().mount_in_background();
    fs::write(mount.path("file"), "content").unwrap();
    world.check_object("file", b"content");
    assert_eq!(listing(mount.directory()), ["file"]);
    mount.unmount();
}

fn a_passed_descriptor_is_served(world: &World) {
    let mount = world.engine().writable().mount_by_descriptor(Access::ReadWrite);
    fs::write(mount.path("file"), "content").unwrap();
    world.check_object("file", b"content");
    assert_eq!(fs::read(mount.path("file")).unwrap(), b"content");
    mount.unmount();
}

fn a_passed_descriptor_is_served_read_only(world: &World) {
    world.put("file", b"content");
    let mount = world.engine().argument("--read-only").mount_by_descriptor(Access::ReadOnly);
    assert_eq!(fs::read(mount.path("file")).unwrap(), b"content");
    check_errno(fs::write(mount.path("new"), "new"), &[Errno::ROFS]);
    mount.unmount();
}

#[test]
fn a_terminated_engine_takes_its_own_mount_away() {
    let world = World::in_process("terminated", BUCKETS);
    let mount = world.mount();
    let process = mount.process().unwrap();
    let status = process.terminate();
    assert!(status.success(), "{status}{process}");
    assert!(mounts_beneath(mount.directory()).is_empty(), "the mount is still there");
}

#[test]
fn a_killed_engine_leaves_a_mount_that_answers_with_an_error_at_once() {
    let world = World::in_process("killed", BUCKETS);
    world.put("file", b"content");
    let mount = world.mount();
    mount.process().unwrap().signal(Signal::KILL);
    mount.process().unwrap().wait_for_end();
    check_errno(fs::metadata(mount.path("file")), &[Errno::NOTCONN]);
    check_errno(fs::read_dir(mount.directory()), &[Errno::NOTCONN]);
}

#[test]
fn the_mount_is_found_by_its_name() {
    let world = World::in_process("named", BUCKETS);
    let mount = world.mount();
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let place = mount.directory().to_str().unwrap();
    let line = table.lines().find(|it| it.contains(place)).unwrap();
    assert!(line.contains(" mountpoint-s3 "), "{line}");
    mount.unmount();
}
