//! `mount-s3 --keep-alive`: a mount made by hand that outlives its engine without a mounter.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use s3csi_s3_server::store::Store as _;
use s3csi_s3_server::{Config, S3Server};
use s3csi_testbed::engine::{EngineLauncher, EngineMount};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::leftovers::mounts_beneath;
use s3csi_testbed::processes;
use s3csi_testbed::wait::wait_for;

const BUCKET: &str = "alone";

fn store() -> S3Server {
    let config = Config { buckets: vec![BUCKET.to_owned()], ..Config::default() };
    S3Server::start_blocking(config).unwrap()
}

fn engine<'a>(fixture: &'a Fixture, store: &'a S3Server) -> EngineLauncher<'a> {
    EngineLauncher::new(fixture, store, BUCKET).writable().argument("--keep-alive")
}

/// The process that serves: a child of the one that keeps the mount.
fn serving(fixture: &Fixture) -> Option<Pid> {
    match processes::running("mount-s3", fixture.directory())[..] {
        [_, serving] => Some(serving),
        _ => None,
    }
}

#[track_caller]
fn kill_serving(fixture: &Fixture) {
    wait_for("an engine serves", || serving(fixture).is_some());
    let before = serving(fixture).unwrap();
    kill_process(before, Signal::KILL).unwrap();
    wait_for("another engine serves", || serving(fixture).is_some_and(|it| it != before));
}

#[track_caller]
fn check_survival(fixture: &Fixture, store: &S3Server, mount: &EngineMount<'_>) {
    store.put_object(BUCKET, "read", b"content").unwrap();
    let mut reader = File::open(mount.path("read")).unwrap();
    let mut writer = File::create(mount.path("written")).unwrap();
    writer.write_all(b"one ").unwrap();
    for _ in 0..3 {
        kill_serving(fixture);
    }
    let mut content = String::new();
    reader.read_to_string(&mut content).unwrap();
    assert_eq!(content, "content");
    writer.write_all(b"two").unwrap();
    writer.sync_all().unwrap();
    assert_eq!(store.object(BUCKET, "written").unwrap(), b"one two"[..]);
}

#[test]
fn a_mount_in_the_foreground_outlives_its_engine() {
    let fixture = Fixture::new("alone-foreground");
    let store = store();
    let mount = engine(&fixture, &store).mount();
    check_survival(&fixture, &store, &mount);
    mount.unmount();
}

#[test]
fn a_mount_in_the_background_outlives_its_engine() {
    let fixture = Fixture::new("alone-background");
    let store = store();
    let mount = engine(&fixture, &store).mount_in_background();
    check_survival(&fixture, &store, &mount);
    mount.unmount();
}

#[test]
fn a_mount_ends_when_its_supervisor_is_terminated() {
    let fixture = Fixture::new("alone-term");
    let store = store();
    let mount = engine(&fixture, &store).mount();
    fs::write(mount.path("file"), "content").unwrap();
    let supervisor = mount.process().unwrap();
    supervisor.signal(Signal::TERM);
    assert!(supervisor.wait_for_end().success(), "{supervisor}");
    assert!(mounts_beneath(mount.directory()).is_empty());
    assert_eq!(processes::running("mount-s3", fixture.directory()), []);
}

#[test]
fn a_mount_that_cannot_be_served_is_one_line_of_explanation_and_leaves_nothing() {
    let fixture = Fixture::new("alone-refused");
    let store = store();
    let engine = EngineLauncher::new(&fixture, &store, "missing-bucket").argument("--keep-alive");
    let refusal = engine.refusal(Duration::from_mins(1));
    assert_eq!(refusal.status.code(), Some(1));
    assert_eq!(refusal.errors.lines().count(), 1, "{}", refusal.errors);
    assert!(refusal.errors.contains("missing-bucket"), "{}", refusal.errors);
}
