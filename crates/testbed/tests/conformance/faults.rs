//! A server that fails for a while, or for good, after the mount: short failures are not seen, long ones are errors.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::Path;
use std::thread;
use std::time::Duration;

use rustix::io::Errno;
use s3csi_s3_server::{Config, Effect, Fault, S3Operation, S3Server};
use s3csi_testbed::engine::EngineMount;
use s3csi_testbed::wait::wait_for;

use crate::world::{World, check_errno, in_process_with, noise};

fn world(rule: &str) -> World<S3Server> {
    in_process_with(rule, Config::default())
}

/// The file is read correctly although the server misbehaves at first.
#[track_caller]
fn check_read_survives(effect: Effect) {
    let world = world("read-fault");
    let content = noise(3, 3 * 1024 * 1024);
    world.put("file", &content);
    let mount = world.mount();
    let fault = world.store.inject(Fault::new(effect).operation(S3Operation::GetObject).times(2));
    assert!(fs::read(mount.path("file")).unwrap() == content, "{effect:?}: other content");
    assert!(0 < fault.hits(), "{effect:?}: never met");
    mount.unmount();
}

/// The file is stored although the server misbehaves at first.
#[track_caller]
fn check_write_survives(effect: Effect, operation: S3Operation, size: usize) {
    let world = world("write-fault");
    let content = noise(4, size);
    let mount = world.mount();
    let fault = world.store.inject(Fault::new(effect).operation(operation).times(2));
    fs::write(mount.path("file"), &content).unwrap();
    world.check_object("file", &content);
    assert!(0 < fault.hits(), "{effect:?}: never met");
    mount.unmount();
}

#[test]
fn reads_outlive_short_failures() {
    check_read_survives(Effect::Unavailable);
    check_read_survives(Effect::Dropped);
    check_read_survives(Effect::Slow(Duration::from_millis(300)));
}

#[test]
fn a_truncated_answer_is_never_taken_for_a_whole_one() {
    check_read_survives(Effect::Truncated { after: 100_000 });
}

#[test]
fn writes_outlive_short_failures() {
    check_write_survives(Effect::Unavailable, S3Operation::PutObject, 1000);
    check_write_survives(Effect::Dropped, S3Operation::PutObject, 1000);
    check_write_survives(Effect::Unavailable, S3Operation::UploadPart, 12 * 1024 * 1024);
    check_write_survives(Effect::Dropped, S3Operation::CompleteMultipartUpload, 12 * 1024 * 1024);
}

#[test]
fn a_refused_read_is_an_error() {
    let world = world("denied-read");
    world.put("file", b"content");
    let mount = world.mount();
    let fault = world.store.inject(Fault::new(Effect::Denied).operation(S3Operation::GetObject));
    check_errno(fs::read(mount.path("file")), &[Errno::IO, Errno::ACCESS, Errno::PERM]);
    fault.release();
    assert_eq!(fs::read(mount.path("file")).unwrap(), b"content");
    mount.unmount();
}

#[test]
fn an_object_that_vanished_is_an_error() {
    let world = world("vanished");
    world.put("file", b"content");
    let mount = world.mount();
    let _fault = world.store.inject(Fault::new(Effect::NotFound).operation(S3Operation::GetObject));
    check_errno(fs::read(mount.path("file")), &[Errno::IO, Errno::NOENT, Errno::STALE]);
    mount.unmount();
}

/// Neither of the two may claim success: write, or else fsync and close.
#[track_caller]
fn check_write_fails(operation: S3Operation, size: usize) {
    let world = world("denied-write");
    let mount = world.mount();
    let fault = world.store.inject(Fault::new(Effect::Denied).operation(operation));
    let write = || -> io::Result<()> {
        let mut file = File::create(mount.path("file"))?;
        file.write_all(&noise(5, size))?;
        file.sync_all()
    };
    check_errno(write(), &[Errno::IO, Errno::ACCESS, Errno::PERM]);
    assert!(0 < fault.hits());
    assert_eq!(world.object("file"), None);
    mount.unmount();
}

#[test]
fn a_refused_write_is_an_error() {
    check_write_fails(S3Operation::PutObject, 1000);
    check_write_fails(S3Operation::CreateMultipartUpload, 12 * 1024 * 1024);
    check_write_fails(S3Operation::UploadPart, 12 * 1024 * 1024);
    check_write_fails(S3Operation::CompleteMultipartUpload, 12 * 1024 * 1024);
}

#[test]
fn a_frozen_answer_is_waited_for() {
    let world = world("frozen");
    world.put("file", b"content");
    let mount = world.mount();
    let fault = world.store.inject(Fault::new(Effect::Frozen).operation(S3Operation::GetObject));
    let path = mount.path("file");
    let reader = thread::spawn(move || fs::read(path));
    wait_for("the read has reached the server", || 0 < fault.hits());
    assert!(!reader.is_finished());
    fault.release();
    assert_eq!(reader.join().unwrap().unwrap(), b"content");
    mount.unmount();
}

/// An engine that gives each request without an answer up after a second, sooner than in real life.
fn mount_impatient<'a>(world: &'a World<S3Server>, store_timeout: &str) -> EngineMount<'a> {
    let engine = world.engine().writable().argument(format!("--store-timeout={store_timeout}"));
    engine.environment("S3CSI_ENGINE_TRIALS", "longest-answer=1").mount()
}

/// Calls that wait for the store are repeated until it answers, and succeed then.
#[track_caller]
fn check_waits<T: 'static>(operation: S3Operation, call: fn(&Path) -> io::Result<T>) {
    let world = world("silent");
    world.put("file", b"content");
    let mount = mount_impatient(&world, "10m");
    let fault = world.store.inject(Fault::new(Effect::Frozen).operation(operation));
    let directory = mount.directory().to_owned();
    let caller = thread::spawn(move || call(&directory).map(drop));
    wait_for("the request was repeated", || 2 < fault.hits());
    assert!(!caller.is_finished(), "{operation:?}: the call did not wait");
    fault.release();
    caller.join().unwrap().unwrap();
    mount.unmount();
}

#[test]
fn calls_wait_for_a_store_that_answers_nothing() {
    check_waits(S3Operation::HeadObject, |it| fs::read(it.join("file")));
    check_waits(S3Operation::ListObjectsV2, |it| fs::read_dir(it)?.collect::<io::Result<Vec<_>>>());
    check_waits(S3Operation::DeleteObject, |it| fs::remove_file(it.join("file")));
}

#[test]
fn calls_fail_when_the_store_timeout_is_over() {
    let world = world("silent-for-long");
    world.put("file", b"content");
    let mount = mount_impatient(&world, "2s");
    let fault = world.store.inject(Fault::new(Effect::Frozen));
    check_errno(fs::read(mount.path("file")), &[Errno::IO]);
    let process = mount.process().unwrap();
    wait_for("the log says so", || process.log_contains("the store does not answer"));
    fault.release();
    wait_for("the store is used again", || fs::read(mount.path("file")).is_ok_and(|it| it == b"content"));
    mount.unmount();
}
