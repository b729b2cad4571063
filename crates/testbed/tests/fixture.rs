//! The fixture finds what a test leaves behind, says so, and removes it.
#![forbid(unsafe_code)]

use std::fs;
use std::os::unix::net::UnixListener;
use std::process::Command;
use std::time::Duration;

use rustix::mount::{MountFlags, mount};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::leftovers::mounts_beneath;

#[track_caller]
fn check_found(fixture: Fixture, expected: &str) {
    let directory = fixture.directory().to_owned();
    let error = fixture.finish_within(Duration::from_millis(200)).unwrap_err().to_string();
    assert!(error.contains(expected), "{expected:?} is not in: {error}");
    assert!(!directory.exists(), "the directory is still there");
    assert!(mounts_beneath(&directory).is_empty(), "a mount is still there");
}

#[test]
fn an_empty_fixture_leaves_nothing() {
    let fixture = Fixture::new("nothing");
    let directory = fixture.directory().to_owned();
    fs::write(fixture.path("file"), "content").unwrap();
    fixture.finish().unwrap();
    assert!(!directory.exists());
}

#[test]
fn a_process_that_was_dropped_is_gone() {
    let fixture = Fixture::new("process");
    let process = fixture.start("sleep", Command::new("sleep").arg("600")).unwrap();
    assert!(process.is_running());
    assert!(!fixture.leftovers().is_empty());
    drop(process);
    fixture.finish().unwrap();
}

#[test]
fn a_forgotten_process_is_found() {
    let fixture = Fixture::new("forgotten");
    let process = fixture.start("sleep", Command::new("sleep").arg("600")).unwrap();
    std::mem::forget(process);
    check_found(fixture, "process ");
}

#[test]
fn a_grandchild_is_found_by_its_open_file() {
    let fixture = Fixture::new("grandchild");
    let script = format!("sleep 600 9>{}/file & exit 0", fixture.directory().display());
    let process = fixture.start("shell", Command::new("sh").args(["-c", &script])).unwrap();
    assert!(process.wait_for_end().success());
    drop(process);
    check_found(fixture, "(sleep 600)");
}

#[test]
fn a_mount_is_found() {
    let fixture = Fixture::new("mount");
    let place = fixture.create_directory("a mount");
    mount("none", &place, "tmpfs", MountFlags::empty(), None).unwrap();
    check_found(fixture, "/a mount");
}

#[test]
fn a_socket_is_found() {
    let fixture = Fixture::new("socket");
    drop(UnixListener::bind(fixture.path("mount.sock")).unwrap());
    check_found(fixture, "/mount.sock");
}
