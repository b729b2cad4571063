//! What is written is what is read, here and on the server.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _};
use std::process::Command;
use std::thread;

use rustix::io::Errno;
use s3csi_s3_server::{Config, S3Operation};
use s3csi_testbed::wait::wait_for;
use s3csi_testbed::world::read_ahead;
use sha2::{Digest as _, Sha256};

use crate::on_both_servers;
use crate::world::{BUCKET, World, check_errno, in_process_with, listing, noise};

on_both_servers!(
    a_written_file_is_stored_and_read_back,
    a_file_shows_its_size_mode_and_times,
    a_file_can_be_overwritten,
    overwriting_needs_permission,
    a_file_can_be_deleted,
    deleting_needs_permission,
    a_file_is_stored_once_fsync_returned,
    a_large_file_survives_the_round_trip,
    reads_at_random_places_get_the_right_bytes,
    several_readers_of_one_open_file_get_the_right_bytes,
    small_files_read_one_after_the_other_are_right,
    a_small_file_that_others_replaced_is_read_as_it_is_now,
    objects_made_by_others_are_seen,
    what_shells_and_their_commands_write_is_whole,
    a_child_that_starts_meanwhile_does_not_end_an_upload,
    only_a_prefix_of_the_bucket_is_mounted,
);

fn a_written_file_is_stored_and_read_back(world: &World) {
    let mount = world.mount();
    fs::write(mount.path("hello.txt"), "hello\n").unwrap();
    world.check_object("hello.txt", b"hello\n");
    assert_eq!(fs::read(mount.path("hello.txt")).unwrap(), b"hello\n");
    assert_eq!(listing(mount.directory()), ["hello.txt"]);
    mount.unmount();
}

fn a_file_shows_its_size_mode_and_times(world: &World) {
    world.put("a/file", b"12345");
    let mount =
        world.engine().writable().argument("--file-mode=0640").argument("--uid=1234").argument("--gid=4321").mount();
    let file = fs::metadata(mount.path("a/file")).unwrap();
    assert_eq!((file.len(), file.permissions().mode() & 0o7777, file.uid(), file.gid()), (5, 0o640, 1234, 4321));
    let age = file.modified().unwrap().elapsed().unwrap_or_default();
    assert!(age.as_secs() < 600, "the file is {age:?} old");
    let directory = fs::metadata(mount.path("a")).unwrap();
    assert_eq!((directory.is_dir(), directory.permissions().mode() & 0o7777), (true, 0o755));
    check_errno(fs::metadata(mount.path("missing")), &[Errno::NOENT]);
    mount.unmount();
}

fn a_file_can_be_overwritten(world: &World) {
    world.put("file", b"a longer old content");
    let mount = world.mount();
    fs::write(mount.path("file"), "new").unwrap();
    world.check_object("file", b"new");
    assert_eq!(fs::read(mount.path("file")).unwrap(), b"new");
    mount.unmount();
}

fn overwriting_needs_permission(world: &World) {
    world.put("file", b"old");
    let mount = world.engine().argument("--allow-delete").mount();
    check_errno(fs::write(mount.path("file"), "new"), &[Errno::PERM, Errno::EXIST, Errno::ACCESS]);
    world.check_object("file", b"old");
    mount.unmount();
}

fn a_file_can_be_deleted(world: &World) {
    world.put("file", b"content");
    let mount = world.mount();
    fs::remove_file(mount.path("file")).unwrap();
    assert_eq!(world.object("file"), None);
    check_errno(File::open(mount.path("file")), &[Errno::NOENT]);
    mount.unmount();
}

fn deleting_needs_permission(world: &World) {
    world.put("file", b"content");
    let mount = world.engine().argument("--allow-overwrite").mount();
    check_errno(fs::remove_file(mount.path("file")), &[Errno::PERM, Errno::ACCESS]);
    world.check_object("file", b"content");
    mount.unmount();
}

fn a_file_is_stored_once_fsync_returned(world: &World) {
    let mount = world.mount();
    let mut file = File::create(mount.path("file")).unwrap();
    file.write_all(b"precious").unwrap();
    file.sync_all().unwrap();
    world.check_object("file", b"precious");
    drop(file);
    world.check_object("file", b"precious");
    mount.unmount();
}

fn a_large_file_survives_the_round_trip(world: &World) {
    let content = noise(100, 100 * 1024 * 1024);
    let expected = Sha256::digest(&content);
    let mount = world.mount();
    fs::write(mount.path("large"), &content).unwrap();
    drop(content);
    mount.unmount();
    assert_eq!(Sha256::digest(world.object("large").unwrap()), expected, "stored");
    // A new mount has nothing in the page cache.
    let mount = world.mount();
    let mut digest = Sha256::new();
    let mut file = File::open(mount.path("large")).unwrap();
    let mut buffer = vec![0; 1024 * 1024];
    assert_eq!(read_ahead(&mount.path("")), "512");
    loop {
        match file.read(&mut buffer).unwrap() {
            0 => break,
            length => digest.update(&buffer[..length]),
        }
    }
    drop(file);
    assert_eq!(digest.finalize(), expected, "read");
    mount.unmount();
}

fn reads_at_random_places_get_the_right_bytes(world: &World) {
    let content = noise(7, 20 * 1024 * 1024 + 13);
    world.put("file", &content);
    let mount = world.mount();
    let file = File::open(mount.path("file")).unwrap();
    for (number, place) in noise(8, 40 * 8).chunks_exact(8).enumerate() {
        let length = [1, 100, 4096, 65_537][number % 4];
        let offset = u64::from_le_bytes(place.try_into().unwrap()) % (content.len() - length) as u64;
        let mut buffer = vec![0; length];
        file.read_exact_at(&mut buffer, offset).unwrap();
        let offset = usize::try_from(offset).unwrap();
        assert!(buffer == content[offset..offset + length], "{length} bytes at {offset}");
    }
    let mut beyond = [0; 16];
    assert_eq!(file.read_at(&mut beyond, content.len() as u64 - 3).unwrap(), 3, "the end of the file");
    assert_eq!(file.read_at(&mut beyond, content.len() as u64 + 3).unwrap(), 0, "beyond the end");
    drop(file);
    mount.unmount();
}

/// Each in order, but not in the order of the others.
fn several_readers_of_one_open_file_get_the_right_bytes(world: &World) {
    const READERS: usize = 4;
    let content = noise(9, 24 * 1024 * 1024 + 5);
    world.put("file", &content);
    let mount = world.mount();
    let file = File::open(mount.path("file")).unwrap();
    let part = content.len() / READERS;
    thread::scope(|scope| {
        for (number, expected) in content.chunks(part).enumerate() {
            let file = &file;
            scope.spawn(move || {
                let mut buffer = vec![0; expected.len()];
                for (step, piece) in buffer.chunks_mut(300_000).enumerate() {
                    file.read_exact_at(piece, (number * part + step * 300_000) as u64).unwrap();
                }
                assert!(buffer == expected, "other bytes in part {number}");
            });
        }
    });
    drop(file);
    mount.unmount();
}

/// From the third file on, content comes together with the attributes.
fn small_files_read_one_after_the_other_are_right(world: &World) {
    let sizes = [1, 2, 100, 4096, 0, 4097, 131_071, 131_072, 131_073, 3, 300_000, 5];
    let files: Vec<(String, Vec<u8>)> = (0..36_usize)
        .map(|number| (format!("many/{number:02}"), noise(number as u64, sizes[number % sizes.len()])))
        .collect();
    for (key, content) in &files {
        world.put(key, content);
    }
    let mount = world.mount();
    for (key, content) in &files {
        assert!(fs::read(mount.path(key)).unwrap() == *content, "{key} was read wrong");
        check_errno(fs::read(mount.path(&format!("{key}-missing"))), &[Errno::NOENT]);
    }
    let file = File::open(mount.path("many/03")).unwrap();
    let mut middle = [0; 50];
    file.read_exact_at(&mut middle, 4000).unwrap();
    assert_eq!(middle, files[3].1[4000..4050]);
    drop(file);
    mount.unmount();
}

#[test]
fn the_content_of_a_small_file_is_asked_for_together_with_its_attributes() {
    let world = in_process_with("ahead", Config::default());
    let names: Vec<String> = (0..8).map(|it| format!("many/{it}")).collect();
    for name in &names {
        world.put(name, name.as_bytes());
    }
    let mount = world.mount();
    for name in &names {
        world.store.forget_requests();
        assert_eq!(fs::read(mount.path(name)).unwrap(), name.as_bytes());
        assert_eq!(world.store.count(S3Operation::GetObject), 1, "each file is fetched once");
    }
    // The engine expects that files of this directory are read, and cannot know that this one is not.
    world.store.forget_requests();
    world.put("many/8", b"new");
    assert_eq!(fs::metadata(mount.path("many/8")).unwrap().len(), 3);
    wait_for("the content is asked for", || world.store.count(S3Operation::GetObject) == 1);
    mount.unmount();
}

fn a_small_file_that_others_replaced_is_read_as_it_is_now(world: &World) {
    // What was just looked at may be older than its content; here every look asks the server.
    let mount = world.engine().writable().argument("--metadata-ttl=minimal").mount();
    for round in 0..20 {
        for name in ["a", "b"] {
            let content = format!("{name} in round {round}");
            world.put(name, content.as_bytes());
            assert_eq!(fs::read_to_string(mount.path(name)).unwrap(), content);
        }
    }
    mount.unmount();
}

fn objects_made_by_others_are_seen(world: &World) {
    let mount = world.mount();
    assert_eq!(listing(mount.directory()), Vec::<String>::new());
    world.put("later", b"content");
    assert_eq!(listing(mount.directory()), ["later"]);
    assert_eq!(fs::read(mount.path("later")).unwrap(), b"content");
    mount.unmount();
}

fn what_shells_and_their_commands_write_is_whole(world: &World) {
    let mount = world.mount();
    fs::write(world.fixture.path("source"), noise(9, 300_000)).unwrap();
    let script = "(echo one; sh -c 'echo two'; echo three) > several && \
                  cp ../../source copied && \
                  dd if=../../source of=dd bs=4096 status=none && \
                  cat copied dd > joined && \
                  touch touched";
    let shell = Command::new("sh").args(["-ec", script]).current_dir(mount.directory()).status().unwrap();
    assert!(shell.success(), "{shell}");
    world.check_object("several", b"one\ntwo\nthree\n");
    world.check_object("copied", &noise(9, 300_000));
    world.check_object("dd", &noise(9, 300_000));
    world.check_object("joined", &[noise(9, 300_000), noise(9, 300_000)].concat());
    world.check_object_soon("touched", b"");
    mount.unmount();
}

/// Until it has become another program, a child holds the same files as its parent, and then closes them.
fn a_child_that_starts_meanwhile_does_not_end_an_upload(world: &World) {
    let mount = world.mount();
    let mut file = File::create(mount.path("file")).unwrap();
    for _ in 0..3 {
        file.write_all(b"part ").unwrap();
        assert!(Command::new("true").status().unwrap().success());
    }
    file.write_all(b"end").unwrap();
    drop(file);
    world.check_object("file", b"part part part end");
    mount.unmount();
}

fn only_a_prefix_of_the_bucket_is_mounted(world: &World) {
    world.put("inside/file", b"content");
    world.put("outside", b"content");
    let mount = world.engine().writable().argument("--prefix=inside/").mount();
    assert_eq!(listing(mount.directory()), ["file"]);
    fs::write(mount.path("new"), "new").unwrap();
    world.check_object("inside/new", b"new");
    assert_eq!(world.store.object(BUCKET, "new"), None);
    mount.unmount();
}
