//! Engines that are replaced on request (SIGUSR1 to the mounter) while somebody works.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Signal, kill_process};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::store::Store as _;
use s3csi_testbed::wait::wait_for;

use crate::keeper::{replaceable_engine, write_engine};
use crate::world::{BUCKET, Kept, Options, World, noise};

const UPGRADES: usize = 20;

fn ask_for_upgrade(kept: &Kept<'_>) {
    kill_process(kept.mounter().pid(), Signal::USR1).unwrap();
}

#[track_caller]
fn upgrade(kept: &Kept<'_>) {
    ask_for_upgrade(kept);
    assert_eq!(kept.resumed().0, "replaced on request");
}

#[test]
fn twenty_upgrades_under_a_reader_and_a_writer_are_seen_by_neither() {
    let fixture = Fixture::new("resume-upgrades");
    let world = World::new(&fixture);
    let content = noise(1, 3 << 20);
    world.put("file", &content);
    let kept = world.mount();
    let is_over = AtomicBool::new(false);
    let (read, written) = std::thread::scope(|scope| {
        let reader = scope.spawn(|| read_often(&kept.path("file"), &content, &is_over));
        let writer = scope.spawn(|| write_often(&kept.directory, &is_over));
        for _ in 0..UPGRADES {
            let before = kept.engine();
            upgrade(&kept);
            assert_ne!(kept.engine(), before);
        }
        is_over.store(true, Ordering::SeqCst);
        (reader.join().unwrap(), writer.join().unwrap())
    });
    assert!(read > 0 && written > 0, "{read} reads, {written} writes");
    for number in 0..written {
        let stored = world.store.object(BUCKET, &format!("written-{number}"));
        assert!(stored.is_some_and(|it| it == piece(number)), "file {number} is not in the bucket");
    }
    kept.unmount();
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
    let kept = world.mount_with(&Options { program: Some(&program), ..Options::default() });
    let engine = kept.engine();
    write_engine(&program, "export UNSTABLE_MOUNTPOINT_MAX_BACKGROUND=17");
    ask_for_upgrade(&kept);
    wait_for("the other engine is refused", || kept.mounter().log_contains("engine not replaced"));
    assert!(kept.mounter().log_contains("uses FUSE in another way"), "{}", kept.mounter());
    assert_eq!(kept.engines(), [engine]);
    assert_eq!(fs::read(kept.path("file")).unwrap(), b"content");
    kept.unmount();
}

#[test]
fn an_engine_that_cannot_start_replaces_nobody() {
    let fixture = Fixture::new("resume-upgrade-broken");
    let world = World::new(&fixture);
    world.put("file", b"content");
    let program = replaceable_engine(&fixture);
    let kept = world.mount_with(&Options { program: Some(&program), ..Options::default() });
    let engine = kept.engine();
    write_engine(&program, "echo broken >&2; exit 3");
    ask_for_upgrade(&kept);
    wait_for("the other engine is refused", || kept.mounter().log_contains("engine not replaced"));
    assert_eq!(kept.engines(), [engine]);
    write_engine(&program, "");
    upgrade(&kept);
    assert_eq!(fs::read(kept.path("file")).unwrap(), b"content");
    kept.unmount();
}

#[test]
fn a_big_file_that_is_being_written_is_stored_before_the_engine_is_replaced() {
    let fixture = Fixture::new("resume-upgrade-drain");
    let world = World::new(&fixture);
    let kept = world.mount();
    let content = noise(2, 20 << 20);
    let mut file = File::create(kept.path("file")).unwrap();
    file.write_all(&content).unwrap();
    let engine = kept.engine();
    ask_for_upgrade(&kept);
    wait_for("another engine is prepared", || kept.engines().len() == 2);
    assert_eq!(kept.engine(), engine);
    file.sync_all().unwrap();
    assert_eq!(kept.resumed().0, "replaced on request");
    assert!(fs::read(kept.path("file")).unwrap() == content, "other bytes");
    drop(file);
    kept.unmount();
}

#[test]
fn a_big_file_that_takes_too_long_keeps_its_engine() {
    let fixture = Fixture::new("resume-upgrade-late");
    let world = World::new(&fixture);
    let kept = world.mount_with(&Options { mounter: &["--drain-time", "1s"], ..Options::default() });
    let content = noise(3, 20 << 20);
    let mut file = File::create(kept.path("file")).unwrap();
    file.write_all(&content).unwrap();
    let engine = kept.engine();
    ask_for_upgrade(&kept);
    wait_for("the request is given up", || kept.mounter().log_contains("files are being written"));
    assert_eq!(kept.engines(), [engine]);
    file.sync_all().unwrap();
    assert!(world.store.object(BUCKET, "file").unwrap() == content, "other bytes");
    drop(file);
    kept.unmount();
}
