//! What the mounter does about engines that die, freeze or cannot be started, and when it gives up.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::Signal;
use s3csi_mounter::handoff::Answer;
use s3csi_testbed::environment::product;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::wait::wait_for;

use crate::world::{Options, World, check_errno};

/// A program in place of the engine: the real one, until somebody puts a line in front of it.
fn replaceable_engine(fixture: &Fixture) -> PathBuf {
    let path = fixture.path("engine");
    write_engine(&path, "");
    path
}

fn write_engine(path: &Path, line: &str) {
    let engine = product("mount-s3").unwrap();
    let draft = path.with_extension("draft");
    fs::write(&draft, format!("#!/bin/sh\n{line}\nexec {} \"$@\"\n", engine.display())).unwrap();
    fs::set_permissions(&draft, fs::Permissions::from_mode(0o755)).unwrap();
    fs::rename(draft, path).unwrap();
}

#[test]
fn an_engine_that_stands_still_is_replaced() {
    let fixture = Fixture::new("resume-frozen");
    let world = World::new(&fixture);
    world.put("file", b"content");
    let kept = world.mount_with(&Options { mounter: &["--frozen-after", "2s"], ..Options::default() });
    let engine = kept.engine();
    kept.signal_engine(Signal::STOP);
    assert_eq!(fs::read(kept.path("file")).unwrap(), b"content");
    let (cause, stall) = kept.resumed();
    assert!(cause.contains("heartbeat"), "{cause}");
    assert!(stall >= Duration::from_secs(1), "{stall:?}");
    assert_ne!(kept.engine(), engine);
    kept.unmount();
}

#[test]
fn a_mount_without_an_engine_is_given_up_after_a_while() {
    let fixture = Fixture::new("resume-broken");
    let world = World::new(&fixture);
    world.put("file", b"content");
    let engine = replaceable_engine(&fixture);
    let options = Options { mounter: &["--longest-outage", "2s"], program: Some(&engine), ..Options::default() };
    let kept = world.mount_with(&options);
    write_engine(&engine, "echo broken >&2; exit 3");
    let start = Instant::now();
    kept.signal_engine(Signal::KILL);
    let error = fs::metadata(kept.path("file")).unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    let is_end = [Errno::CONNABORTED, Errno::NOTCONN].iter().any(|it| error.raw_os_error() == Some(it.raw_os_error()));
    assert!(is_end, "{error}");
    check_errno(fs::metadata(kept.path("file")), Errno::NOTCONN);
    kept.expect_lost();
}

#[test]
fn a_successor_that_fails_at_first_is_tried_again() {
    let fixture = Fixture::new("resume-retry");
    let world = World::new(&fixture);
    world.put("file", b"content");
    let engine = replaceable_engine(&fixture);
    let kept = world.mount_with(&Options { program: Some(&engine), ..Options::default() });
    write_engine(&engine, "echo not yet >&2; exit 3");
    kept.signal_engine(Signal::KILL);
    wait_for("a successor has failed", || kept.mounter().log_contains("not yet"));
    write_engine(&engine, "");
    assert_eq!(fs::read(kept.path("file")).unwrap(), b"content");
    let (cause, _) = kept.resumed();
    assert_eq!(cause, "ended with code 3: not yet");
    kept.unmount();
}

#[test]
fn engines_that_crash_again_and_again_are_given_up() {
    let fixture = Fixture::new("resume-loop");
    let world = World::new(&fixture);
    let engine = replaceable_engine(&fixture);
    let options = Options { mounter: &["--longest-outage", "3s"], program: Some(&engine), ..Options::default() };
    let kept = world.mount_with(&options);
    // Each successor serves for a moment and then crashes.
    write_engine(&engine, "(sleep 0.7; kill -ABRT $$) >/dev/null 2>&1 &");
    kept.kill_engine();
    let mut resumed = 0;
    while let Answer::Resumed { cause, .. } = kept.answer() {
        assert!(cause.starts_with("ended by signal 6"), "{cause}");
        resumed += 1;
    }
    assert!(resumed > 0, "{}", kept.mounter());
    wait_for("the mount is dead", || {
        fs::metadata(kept.path("x")).is_err_and(|it| it.raw_os_error() == Some(Errno::NOTCONN.raw_os_error()))
    });
    kept.end();
}

#[test]
fn a_mounter_that_does_not_keep_lets_the_mount_die() {
    let fixture = Fixture::new("resume-off");
    let world = World::new(&fixture);
    let kept = world.mount_with(&Options { mounter: &["--keep", "off"], ..Options::default() });
    kept.signal_engine(Signal::KILL);
    wait_for("the mount is dead", || {
        fs::metadata(kept.path("x")).is_err_and(|it| it.raw_os_error() == Some(Errno::NOTCONN.raw_os_error()))
    });
    kept.expect_lost();
}

#[test]
fn an_engine_lives_on_without_its_mounter() {
    let fixture = Fixture::new("resume-mounter");
    let world = World::new(&fixture);
    world.put("file", b"content");
    let kept = world.mount();
    kept.kill_engine();
    kept.mounter().kill();
    assert_eq!(fs::read(kept.path("file")).unwrap(), b"content");
    kept.abandon();
}
