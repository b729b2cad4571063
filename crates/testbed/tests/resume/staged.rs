//! Files that are edited in place when the engine dies: its successor goes on with the local copy.

use std::fs::{self, File, OpenOptions};
use std::io::{Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::time::Duration;

use rustix::fs::{XattrFlags, fgetxattr, fsetxattr, getxattr};
use s3csi_s3_server::store::Store as _;
use s3csi_s3_server::{Effect, Fault, S3Operation};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::wait::wait_for;

use crate::world::{BUCKET, Options, SupervisedMount, World, noise};

fn editable(kept: &SupervisedMount<'_>, name: &str) -> File {
    OpenOptions::new().read(true).write(true).open(kept.path(name)).unwrap()
}

#[test]
fn an_edited_file_is_edited_on_and_stored() {
    let fixture = Fixture::new("staged-edit");
    let world = World::new(&fixture);
    world.put("file", b"0123456789");
    let kept = world.mount();
    let file = editable(&kept, "file");
    let reader = File::open(kept.path("file")).unwrap();
    file.write_all_at(b"AB", 0).unwrap();
    kept.kill_engine();
    file.write_all_at(b"CD", 2).unwrap();
    kept.kill_engine();
    let mut bytes = [0; 10];
    reader.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(&bytes, b"ABCD456789");
    assert_eq!(fs::metadata(kept.path("file")).unwrap().len(), 10);
    file.sync_all().unwrap();
    assert_eq!(world.store.object(BUCKET, "file").unwrap(), b"ABCD456789"[..]);
    drop((file, reader));
    kept.unmount();
}

#[test]
fn a_large_edited_file_is_edited_on_and_stored() {
    let fixture = Fixture::new("staged-large");
    let world = World::new(&fixture);
    let mut content = noise(3, 20 << 20);
    world.put("file", &content);
    let stage = fixture.create_directory("stage");
    let argument = format!("--stage={}", stage.display());
    let kept = world.mount_with(&Options { engine: &[&argument], ..Options::default() });
    let file = editable(&kept, "file");
    for number in 0..4_usize {
        let at = number * (5 << 20) + 17;
        content[at..at + 9].copy_from_slice(b"an edit..");
        file.write_all_at(b"an edit..", at as u64).unwrap();
        kept.kill_engine();
    }
    file.sync_all().unwrap();
    assert!(world.store.object(BUCKET, "file").unwrap() == content, "other bytes");
    drop(file);
    kept.unmount();
    assert_eq!(fs::read_dir(&stage).unwrap().count(), 0, "the staging directory is not empty");
}

#[test]
fn a_new_file_whose_writer_went_back_survives() {
    let fixture = Fixture::new("staged-new");
    let world = World::new(&fixture);
    let kept = world.mount();
    let mut file = File::create(kept.path("file")).unwrap();
    file.write_all(b"0123456789").unwrap();
    file.seek(SeekFrom::Start(2)).unwrap();
    file.write_all(b"AB").unwrap();
    kept.kill_engine();
    file.write_all(b"CD").unwrap();
    drop(file);
    wait_for("the file is stored", || world.store.object(BUCKET, "file").is_some_and(|it| *it == *b"01ABCD6789"));
    assert_eq!(fs::read(kept.path("file")).unwrap(), b"01ABCD6789");
    kept.unmount();
}

#[test]
fn appends_are_neither_lost_nor_doubled() {
    let fixture = Fixture::new("staged-append");
    let world = World::new(&fixture);
    world.put("log", b"");
    let kept = world.mount();
    let mut file = OpenOptions::new().append(true).open(kept.path("log")).unwrap();
    let mut expected = Vec::new();
    for number in 0..6 {
        let slow =
            world.store.inject(Fault::new(Effect::Slow(Duration::from_millis(20))).operation(S3Operation::PutObject));
        for line in 0..40 {
            let text = format!("line {number}-{line}\n");
            file.write_all(text.as_bytes()).unwrap();
            expected.extend(text.into_bytes());
        }
        slow.release();
        kept.kill_engine();
    }
    drop(file);
    wait_for("the log is stored", || world.store.object(BUCKET, "log").is_some_and(|it| it == expected));
    kept.unmount();
}

#[test]
fn a_close_inside_the_engine_is_finished_by_its_successor() {
    let fixture = Fixture::new("staged-inside");
    let world = World::new(&fixture);
    world.put("file", b"0123456789");
    let kept = world.mount();
    let file = editable(&kept, "file");
    file.write_all_at(b"AB", 0).unwrap();
    // The object is stored, but the engine dies before it knows.
    let slow = world.store.inject(Fault::new(Effect::Slow(Duration::from_secs(2))).operation(S3Operation::PutObject));
    let syncing = std::thread::spawn(move || file.sync_all().map(|()| file));
    wait_for("the engine stores the file", || slow.hits() > 0);
    kept.kill_engine();
    slow.release();
    let file = syncing.join().unwrap().unwrap();
    assert_eq!(world.store.object(BUCKET, "file").unwrap(), b"AB23456789"[..]);
    drop(file);
    kept.unmount();
}

#[test]
fn a_file_is_stored_on_after_a_store_whose_answer_was_lost() {
    let fixture = Fixture::new("staged-answer-lost");
    let world = World::new(&fixture);
    world.put("file", b"0123456789");
    let kept = world.mount();
    let file = editable(&kept, "file");
    file.write_all_at(b"AB", 0).unwrap();
    let lost = world.store.inject(Fault::new(Effect::AnswerDropped).operation(S3Operation::PutObject));
    file.sync_all().unwrap_err();
    lost.release();
    assert_eq!(world.store.object(BUCKET, "file").unwrap(), b"AB23456789"[..], "stored, but the engine does not know");
    file.write_all_at(b"CD", 2).unwrap();
    kept.kill_engine();
    file.sync_all().unwrap();
    assert_eq!(world.store.object(BUCKET, "file").unwrap(), b"ABCD456789"[..]);
    drop(file);
    kept.unmount();
}

#[test]
fn a_large_file_is_stored_on_after_a_store_whose_answer_was_lost() {
    let fixture = Fixture::new("staged-large-answer-lost");
    let world = World::new(&fixture);
    let mut content = noise(3, 20 << 20);
    world.put("file", &content);
    let stage = fixture.create_directory("stage");
    let argument = format!("--stage={}", stage.display());
    let kept = world.mount_with(&Options { engine: &[&argument], ..Options::default() });
    let file = editable(&kept, "file");
    let mut edit = |at: usize| {
        content[at..at + 9].copy_from_slice(b"an edit..");
        file.write_all_at(b"an edit..", at as u64).unwrap();
        content.clone()
    };
    let stored = edit(17);
    let lost_answer = Fault::new(Effect::AnswerDropped).operation(S3Operation::CompleteMultipartUpload);
    let lost = world.store.inject(lost_answer);
    file.sync_all().unwrap_err();
    lost.release();
    assert!(world.store.object(BUCKET, "file").unwrap() == stored, "stored, but the engine does not know");
    edit(6 << 20);
    kept.kill_engine();
    let expected = edit(12 << 20);
    file.sync_all().unwrap();
    assert!(world.store.object(BUCKET, "file").unwrap() == expected, "other bytes");
    drop(file);
    kept.unmount();
    assert_eq!(fs::read_dir(&stage).unwrap().count(), 0, "the staging directory is not empty");
}

#[test]
fn a_file_that_was_removed_while_it_is_open_stays_removed() {
    let fixture = Fixture::new("staged-removed");
    let world = World::new(&fixture);
    let kept = world.mount();
    let mut file = OpenOptions::new().read(true).write(true).create_new(true).open(kept.path("file")).unwrap();
    file.write_all(b"content").unwrap();
    fs::remove_file(kept.path("file")).unwrap();
    kept.kill_engine();
    let mut bytes = [0; 7];
    file.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(&bytes, b"content");
    file.write_all(b", more").unwrap();
    drop(file);
    assert!(!kept.path("file").exists());
    assert_eq!(world.store.keys(BUCKET), Vec::<String>::new());
    kept.unmount();
}

#[test]
fn a_closed_file_that_could_not_be_stored_is_stored_later() {
    let fixture = Fixture::new("staged-later");
    let world = World::new(&fixture);
    world.put("file", b"0123456789");
    let kept = world.mount();
    let file = editable(&kept, "file");
    file.write_all_at(b"AB", 0).unwrap();
    let denied = world.store.inject(Fault::new(Effect::Denied).operation(S3Operation::PutObject));
    file.sync_all().unwrap_err();
    drop(file);
    assert_eq!(fs::read(kept.path("file")).unwrap(), b"AB23456789");
    kept.kill_engine();
    denied.release();
    wait_for("the file is stored", || world.store.object(BUCKET, "file").is_some_and(|it| *it == *b"AB23456789"));
    kept.unmount();
}

/// Sets attributes of an open file, kills the engine and expects to find them after the file was closed.
#[track_caller]
fn check_attributes_survive(rule: &str, open: impl FnOnce(&World<'_>, &SupervisedMount<'_>) -> File) {
    let fixture = Fixture::new(rule);
    let world = World::new(&fixture);
    let kept = world.mount();
    let mut file = open(&world, &kept);
    fsetxattr(&file, "user.colour", b"blue", XattrFlags::empty()).unwrap();
    file.set_permissions(fs::Permissions::from_mode(0o640)).unwrap();
    kept.kill_engine();
    let mut value = [0; 4];
    assert_eq!(fgetxattr(&file, "user.colour", &mut value[..]), Ok(4));
    file.write_all(b"more").unwrap();
    drop(file);
    kept.kill_engine();
    assert_eq!(getxattr(kept.path("file"), "user.colour", &mut value[..]), Ok(4));
    assert_eq!(&value, b"blue");
    assert_eq!(fs::metadata(kept.path("file")).unwrap().permissions().mode() & 0o7777, 0o640);
    kept.unmount();
}

#[test]
fn attributes_set_before_close_survive_while_a_new_file_is_written() {
    check_attributes_survive("staged-attributes-new", |_, kept| {
        let mut file = File::create(kept.path("file")).unwrap();
        file.write_all(b"content").unwrap();
        file
    });
}

#[test]
fn attributes_set_before_close_survive_while_a_file_is_edited() {
    check_attributes_survive("staged-attributes-edited", |world, kept| {
        world.put("file", b"0123456789");
        let mut file = editable(kept, "file");
        file.write_all(b"AB").unwrap();
        file
    });
}
