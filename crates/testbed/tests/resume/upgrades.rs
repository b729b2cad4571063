//! Engines that are replaced on request (SIGUSR1 to the mounter) while somebody works.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Signal, kill_process};
use s3csi_s3_server::store::Store as _;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::wait::wait_for;

use crate::supervisor::{replaceable_engine, write_engine};
use crate::world::{BUCKET, Options, SupervisedMount, World, noise};

const UPGRADES: usize = 20;

fn ask_for_upgrade(mount: &SupervisedMount<'_>) {
    kill_process(mount.mounter().pid(), Signal::USR1).unwrap();
}

#[track_caller]
fn upgrade(mount: &SupervisedMount<'_>) {
    ask_for_upgrade(mount);
    assert_eq!(mount.resumed().0, "replaced: upgrade requested");
}

#[test]
fn twenty_upgrades_under_a_reader_and_a_writer_are_seen_by_neither() {
    let fixture = Fixture::new("resume-upgrades");
    let world = World::new(&fixture);
    let content = noise(1, 3 << 20);
    world.put("file", &content);
    let mount = world.mount();
    let is_over = AtomicBool::new(false);
    let (read, written) = std::thread::scope(|scope| {
        let reader = scope.spawn(|| read_often(&mount.path("file"), &content, &is_over));
        let writer = scope.spawn(|| write_often(&mount.directory, &is_over));
        for _ in 0..UPGRADES {
            let before = mount.engine();
            upgrade(&mount);
            assert_ne!(mount.engine(), before);
        }
        is_over.store(true, Ordering::SeqCst);
        (reader.join().unwrap(), writer.join().unwrap())
    });
    assert!(read > 0 && written > 0, "{read} reads, {written} writes");
    for number in 0..written {
        let stored = world.store.object(BUCKET, &format!("written-{number}"));
        assert!(stored.is_some_and(|it| it == piece(number)), "file {number} is not in the bucket");
    }
    mount.unmount();
}

fn read_often(path: &Path, expected: &[u8], is_over: &AtomicBool) -> usize {
    let mut rounds = 0;
    while !is_over.load(Ordering::SeqCst) {
        assert!(fs::read(path).unwrap() == expected, "other bytes");
        rounds += 1;
    }
    rounds
}

/// Small and big files, in turn.
fn write_often(directory: &Path, is_over: &AtomicBool) -> usize {
    let mut rounds = 0;
    while !is_over.load(Ordering::SeqCst) {
        let mut file = File::create(directory.join(format!("written-{rounds}"))).unwrap();
        for chunk in piece(rounds).chunks(1 << 20) {
            file.write_all(chunk).unwrap();
        }
        file.sync_all().unwrap();
        rounds += 1;
    }
    rounds
}

fn piece(number: usize) -> Vec<u8> {
    noise(number as u64 + 10, if number % 4 == 3 { 20 << 20 } else { 100_000 })
}

#[test]
fn an_engine_that_talks_in_another_way_is_refused_and_the_old_one_stays() {
    let fixture = Fixture::new("resume-incompatible");
    let world = World::new(&fixture);
    world.put("file", b"content");
    let program = replaceable_engine(&fixture);
    let mount = world.mount_with(&Options { program: Some(&program), ..Options::default() });
    let engine = mount.engine();
    write_engine(&program, "export UNSTABLE_MOUNTPOINT_MAX_BACKGROUND=17");
    ask_for_upgrade(&mount);
    wait_for("the other engine is refused", || mount.mounter().log_contains("engine not replaced"));
    assert!(mount.mounter().log_contains("negotiates other FUSE features"), "{}", mount.mounter());
    assert_eq!(mount.engines(), [engine]);
    assert_eq!(fs::read(mount.path("file")).unwrap(), b"content");
    mount.unmount();
}

#[test]
fn an_engine_that_cannot_start_replaces_no_engine() {
    let fixture = Fixture::new("resume-upgrade-broken");
    let world = World::new(&fixture);
    world.put("file", b"content");
    let program = replaceable_engine(&fixture);
    let mount = world.mount_with(&Options { program: Some(&program), ..Options::default() });
    let engine = mount.engine();
    write_engine(&program, "echo broken >&2; exit 3");
    ask_for_upgrade(&mount);
    wait_for("the other engine is refused", || mount.mounter().log_contains("engine not replaced"));
    assert_eq!(mount.engines(), [engine]);
    write_engine(&program, "");
    upgrade(&mount);
    assert_eq!(fs::read(mount.path("file")).unwrap(), b"content");
    mount.unmount();
}

#[test]
fn a_big_file_that_is_being_written_is_stored_before_the_engine_is_replaced() {
    let fixture = Fixture::new("resume-upgrade-drain");
    let world = World::new(&fixture);
    let mount = world.mount();
    let content = noise(2, 20 << 20);
    let mut file = File::create(mount.path("file")).unwrap();
    file.write_all(&content).unwrap();
    let engine = mount.engine();
    ask_for_upgrade(&mount);
    wait_for("another engine is prepared", || mount.engines().len() == 2);
    assert_eq!(mount.engine(), engine);
    file.sync_all().unwrap();
    assert_eq!(mount.resumed().0, "replaced: upgrade requested");
    assert!(fs::read(mount.path("file")).unwrap() == content, "other bytes");
    drop(file);
    mount.unmount();
}

#[test]
fn a_big_file_that_takes_too_long_keeps_its_engine() {
    let fixture = Fixture::new("resume-upgrade-late");
    let world = World::new(&fixture);
    let mount = world.mount_with(&Options { mounter: &["--drain-time", "1s"], ..Options::default() });
    let content = noise(3, 20 << 20);
    let mut file = File::create(mount.path("file")).unwrap();
    file.write_all(&content).unwrap();
    let engine = mount.engine();
    ask_for_upgrade(&mount);
    wait_for("the request is given up", || mount.mounter().log_contains("files are being written"));
    assert_eq!(mount.engines(), [engine]);
    file.sync_all().unwrap();
    assert!(world.store.object(BUCKET, "file").unwrap() == content, "other bytes");
    drop(file);
    mount.unmount();
}
