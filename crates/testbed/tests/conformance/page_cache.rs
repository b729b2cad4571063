//! The kernel's page cache across opens: what was read is not fetched again, and never shown instead of something newer that
//! the engine knows of.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use rustix::fs::OFlags;
use rustix::io::Errno;
use s3csi_s3_server::{Config, Effect, Fault, S3Operation, S3Server};
use s3csi_testbed::engine::EngineMount;
use s3csi_testbed::wait::{SOON, wait_until};

use crate::world::{World, check_errno, in_process_with, noise};

const SIZE: usize = 4 << 20;
/// What direct I/O asks for: whole pages, at their own alignment.
const PAGE: usize = 4096;

fn world(rule: &str) -> World<S3Server> {
    in_process_with(rule, Config::default())
}

fn mount<'a>(world: &'a World<S3Server>, arguments: &[&str]) -> EngineMount<'a> {
    arguments.iter().fold(world.engine().writable(), |engine, it| engine.argument(*it)).mount()
}

/// Reads the whole file. Answers how often the server was asked for content.
#[track_caller]
fn gets(world: &World<S3Server>, path: &Path, expected: &[u8]) -> usize {
    world.store.forget_requests();
    assert!(fs::read(path).unwrap() == expected, "other bytes");
    world.store.count(S3Operation::GetObject)
}

#[test]
fn a_file_that_was_read_is_not_fetched_again() {
    for ttl in [&[][..], &["--metadata-ttl=minimal"], &["--metadata-ttl=60"]] {
        let world = world("again");
        let content = noise(1, SIZE);
        world.put("file", &content);
        let mount = mount(&world, ttl);
        assert!(0 < gets(&world, &mount.path("file"), &content), "{ttl:?}");
        for _ in 0..3 {
            assert_eq!(gets(&world, &mount.path("file"), &content), 0, "{ttl:?}");
        }
        let copy = Command::new("cmp").arg(mount.path("file")).arg(mount.path("file")).status().unwrap();
        assert!(copy.success());
        mount.unmount();
    }
}

#[test]
fn a_file_that_others_replaced_is_new_at_once_for_those_who_ask_each_time() {
    let world = world("asks");
    let versions = [noise(2, SIZE), noise(3, SIZE), noise(4, SIZE)];
    let mount = mount(&world, &["--metadata-ttl=minimal"]);
    for version in &versions {
        world.put("file", version);
        assert!(fs::read(mount.path("file")).unwrap() == *version, "other bytes");
        assert_eq!(gets(&world, &mount.path("file"), version), 0);
    }
    mount.unmount();
}

#[test]
fn a_file_that_others_replaced_is_whole_and_new_after_a_moment() {
    let world = world("moment");
    let (old, new) = (noise(2, SIZE), noise(3, SIZE));
    world.put("file", &old);
    let mount = mount(&world, &[]);
    assert!(fs::read(mount.path("file")).unwrap() == old, "other bytes");
    world.put("file", &new);
    let is_new = wait_until(Instant::now() + SOON, || {
        let found = fs::read(mount.path("file")).unwrap();
        assert!(found == old || found == new, "two versions are mixed");
        found == new
    });
    assert!(is_new, "the new version is not seen");
    assert_eq!(gets(&world, &mount.path("file"), &new), 0);
    mount.unmount();
}

#[test]
fn a_file_that_others_replaced_stays_whole_and_old_while_its_attributes_are_believed() {
    let world = world("believed");
    let (old, new) = (noise(2, SIZE), noise(3, SIZE));
    world.put("file", &old);
    let mount = mount(&world, &["--metadata-ttl=600"]);
    assert!(fs::read(mount.path("file")).unwrap() == old, "other bytes");
    world.put("file", &new);
    assert_eq!(gets(&world, &mount.path("file"), &old), 0);
    // What is not in the page cache any longer cannot be had any longer, but is never mixed.
    drop_pages(&mount.path("file"));
    check_errno(fs::read(mount.path("file")), &[Errno::STALE]);
    mount.unmount();
}

fn drop_pages(path: &Path) {
    rustix::fs::fadvise(File::open(path).unwrap(), 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

#[test]
fn a_reader_never_sees_two_versions() {
    let world = world("during");
    let (old, new) = (noise(5, 4 * SIZE), noise(6, 4 * SIZE));
    world.put("file", &old);
    let mount = mount(&world, &["--metadata-ttl=minimal"]);
    let mut reader = File::open(mount.path("file")).unwrap();
    let mut start = vec![0; 100_000];
    reader.read_exact(&mut start).unwrap();
    world.put("file", &new);
    assert!(fs::read(mount.path("file")).unwrap() == new, "other bytes");
    let mut at = 0;
    reader.seek(SeekFrom::Start(0)).unwrap();
    let mut piece = vec![0; 128 << 10];
    let ended: io::Result<()> = loop {
        match reader.read(&mut piece) {
            Ok(0) => break Ok(()),
            Ok(length) => {
                assert!(piece[..length] == old[at..at + length], "other bytes at {at}");
                at += length;
            }
            Err(error) => break Err(error),
        }
    };
    match ended {
        Ok(()) => assert_eq!(at, old.len()),
        Err(error) => check_errno::<()>(Err(error), &[Errno::STALE]),
    }
    assert!(start.len() <= at, "what was read before is in the page cache");
    assert_eq!(gets(&world, &mount.path("file"), &new), 0);
    drop(reader);
    mount.unmount();
}

#[test]
fn own_changes_are_seen_at_once() {
    let world = world("own");
    let mut content = noise(7, SIZE);
    world.put("file", &content);
    world.put("other", &noise(8, SIZE));
    let mount = mount(&world, &["--metadata-ttl=600"]);
    let path = mount.path("file");
    let check = |what: &str, expected: &[u8]| {
        for _ in 0..2 {
            assert!(fs::read(&path).unwrap() == expected, "other bytes after {what}");
        }
    };
    check("nothing", &content);

    content = noise(9, SIZE);
    fs::write(&path, &content).unwrap();
    check("overwriting", &content);

    let edited = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    edited.write_all_at(b"an edit", 12_345).unwrap();
    content[12_345..12_352].copy_from_slice(b"an edit");
    check("an edit that is not stored yet", &content);
    drop(edited);
    check("an edit", &content);

    OpenOptions::new().append(true).open(&path).unwrap().write_all(b"an end").unwrap();
    content.extend(b"an end");
    check("appending", &content);

    OpenOptions::new().write(true).open(&path).unwrap().set_len(1_000_001).unwrap();
    content.truncate(1_000_001);
    check("truncating", &content);

    fs::rename(mount.path("other"), &path).unwrap();
    check("a rename", &noise(8, SIZE));

    fs::remove_file(&path).unwrap();
    fs::write(&path, b"made again").unwrap();
    check("removing", b"made again");
    assert_eq!(gets(&world, &path, b"made again"), 0);
    mount.unmount();
}

#[test]
fn an_edit_beside_a_reader_is_seen_by_it_and_by_later_opens() {
    let world = world("beside");
    let mut content = noise(10, SIZE);
    world.put("file", &content);
    let mount = mount(&world, &[]);
    let mut reader = File::open(mount.path("file")).unwrap();
    let mut bytes = Vec::new();
    reader.read_to_end(&mut bytes).unwrap();
    assert!(bytes == content, "other bytes");
    let writer = OpenOptions::new().write(true).open(mount.path("file")).unwrap();
    writer.write_all_at(b"new", 5_000).unwrap();
    content[5_000..5_003].copy_from_slice(b"new");
    let mut piece = [0; 3];
    reader.read_exact_at(&mut piece, 5_000).unwrap();
    assert_eq!(&piece, b"new");
    drop(writer);
    assert!(fs::read(mount.path("file")).unwrap() == content, "other bytes while the copy is there");
    drop(reader);
    // Another client changes it, so what the copy left in the page cache is old.
    let theirs = noise(11, SIZE);
    world.put("file", &theirs);
    let is_new = wait_until(Instant::now() + SOON, || fs::read(mount.path("file")).is_ok_and(|it| it == theirs));
    assert!(is_new, "the new version is not seen");
    mount.unmount();
}

#[test]
fn what_could_not_be_stored_is_not_shown() {
    let world = world("poisoned");
    let content = noise(12, SIZE);
    world.put("file", &content);
    let mount = mount(&world, &["--writes=sequential"]);
    assert_eq!(gets(&world, &mount.path("file"), &content).min(1), 1);
    let denied = world.store.inject(Fault::new(Effect::Denied).operation(S3Operation::PutObject));
    let write = || {
        let mut file = OpenOptions::new().write(true).truncate(true).open(mount.path("file"))?;
        file.write_all(&noise(13, SIZE))?;
        file.sync_all()
    };
    assert!(write().is_err(), "stored although the server refused");
    denied.release();
    let is_old = wait_until(Instant::now() + SOON, || fs::read(mount.path("file")).is_ok_and(|it| it == content));
    assert!(is_old, "what was not stored is shown");
    mount.unmount();
}

#[test]
fn a_mapped_file_is_the_current_one() {
    let world = world("mapped");
    let mount = mount(&world, &["--metadata-ttl=minimal"]);
    let local = world.fixture.path("local");
    // Maps what it is given and goes through it, page by page.
    let hash = |path: &Path| {
        let output = Command::new("git").args(["hash-object", "--no-filters"]).arg(path).output().unwrap();
        assert!(output.status.success());
        output.stdout
    };
    for seed in 14..17 {
        let content = noise(seed, SIZE);
        world.put("file", &content);
        fs::write(&local, &content).unwrap();
        assert_eq!(hash(&mount.path("file")), hash(&local));
        assert_eq!(gets(&world, &mount.path("file"), &content), 0);
        assert_eq!(hash(&mount.path("file")), hash(&local));
    }
    mount.unmount();
}

#[test]
fn direct_io_asks_the_server_each_time() {
    let world = world("direct");
    let content = noise(17, SIZE);
    world.put("file", &content);
    let mount = mount(&world, &[]);
    gets(&world, &mount.path("file"), &content);
    let direct = i32::try_from(OFlags::DIRECT.bits()).unwrap();
    for _ in 0..2 {
        world.store.forget_requests();
        let file = OpenOptions::new().read(true).custom_flags(direct).open(mount.path("file")).unwrap();
        let mut buffer = vec![0; 2 * PAGE];
        let start = buffer.as_ptr().align_offset(PAGE);
        let page = &mut buffer[start..start + PAGE];
        file.read_exact_at(page, 8 * PAGE as u64).unwrap();
        assert!(*page == content[8 * PAGE..9 * PAGE], "other bytes");
        assert_ne!(world.store.count(S3Operation::GetObject), 0);
    }
    gets(&world, &mount.path("file"), &content);
    mount.unmount();
}
