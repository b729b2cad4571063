//! Files and directories that are open when the engine dies.

use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::process::{Command, Stdio};

use rustix::io::Errno;
use s3csi_s3_server::{Effect, Fault, S3Operation, Transport};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::wait::wait_for;

use crate::world::{BUCKET, Options, World, check_errno, noise};

#[test]
fn an_open_file_is_read_on() {
    let fixture = Fixture::new("resume-read");
    let world = World::new(&fixture);
    let content = noise(1, 20 << 20);
    world.put("file", &content);
    let mount = world.mount();
    let mut file = File::open(mount.path("file")).unwrap();
    let before = file.metadata().unwrap();
    let mut start = vec![0; 1 << 20];
    file.read_exact(&mut start).unwrap();

    let (cause, _) = mount.kill_engine();

    assert_eq!(cause, "killed by signal 9");
    let mut rest = Vec::new();
    file.read_to_end(&mut rest).unwrap();
    assert!(start == content[..1 << 20] && rest == content[1 << 20..], "other bytes");
    let after = fs::metadata(mount.path("file")).unwrap();
    assert_eq!((before.ino(), before.len()), (after.ino(), after.len()));
    drop(file);
    mount.unmount();
}

#[test]
fn ten_engines_one_after_the_other_serve_one_handle() {
    let fixture = Fixture::new("resume-ten");
    let world = World::with(&fixture, Transport::Tls);
    let content = noise(2, 4 << 20);
    world.put("a/b/c/file", &content);
    let mount = world.mount();
    let file = File::open(mount.path("a/b/c/file")).unwrap();
    let mut piece = vec![0; 100_000];
    for round in 0..10_u64 {
        mount.kill_engine();
        let offset = round * 300_000;
        file.read_exact_at(&mut piece, offset).unwrap();
        let start = usize::try_from(offset).unwrap();
        assert!(piece == content[start..start + piece.len()], "other bytes in round {round}");
    }
    drop(file);
    mount.unmount();
}

#[test]
fn a_request_inside_the_engine_is_answered_by_its_successor() {
    let fixture = Fixture::new("resume-inside");
    let world = World::new(&fixture);
    let content = noise(3, 100_000);
    world.put("file", &content);
    let mount = world.mount();
    let frozen = world.store.inject(Fault::new(Effect::Frozen).operation(S3Operation::GetObject));
    let reader = std::thread::spawn({
        let path = mount.path("file");
        move || fs::read(path)
    });
    wait_for("the engine asks for the content", || frozen.hits() > 0);
    mount.signal_engine(rustix::process::Signal::KILL);
    frozen.release();
    assert!(reader.join().unwrap().unwrap() == content, "other bytes");
    mount.resumed();
    mount.unmount();
}

#[test]
fn a_file_that_was_replaced_meanwhile_is_stale_and_its_name_is_not() {
    let fixture = Fixture::new("resume-replaced");
    let world = World::new(&fixture);
    world.put("file", &noise(4, 1 << 20));
    let mount = world.mount();
    let file = File::open(mount.path("file")).unwrap();
    let mut piece = vec![0; 10];
    file.read_exact_at(&mut piece, 0).unwrap();
    mount.kill_engine();
    let other = noise(5, (1 << 20) + 1);
    world.put("file", &other);
    // Beyond what the page cache may still have.
    check_errno(file.read_exact_at(&mut piece, 1 << 19), Errno::STALE);
    assert!(fs::read(mount.path("file")).unwrap() == other, "other bytes");
    drop(file);
    mount.unmount();
}

#[test]
fn an_open_directory_is_listed_on() {
    let fixture = Fixture::new("resume-directory");
    let world = World::new(&fixture);
    let expected: Vec<String> = (0..1000).map(|it| format!("file-{it:04}")).collect();
    for name in &expected {
        world.put(&format!("directory/{name}"), b"x");
    }
    let mount = world.mount();
    let mut entries = fs::read_dir(mount.path("directory")).unwrap();
    let mut names: Vec<String> = entries.by_ref().take(200).map(|it| name(&it.unwrap())).collect();
    mount.kill_engine();
    names.extend(entries.map(|it| name(&it.unwrap())));
    names.sort();
    assert_eq!(names, expected);
    mount.unmount();
}

#[test]
fn a_mapped_file_is_read_on() {
    let fixture = Fixture::new("resume-mapped");
    let world = World::new(&fixture);
    let content = noise(7, 40 << 20);
    world.put("file", &content);
    let copy = fixture.path("copy");
    fs::write(&copy, &content).unwrap();
    let mount = world.mount();
    // Maps what it is given and goes through it, page by page.
    let start = |path: &std::path::Path| {
        let mut command = Command::new("git");
        command.args(["hash-object", "--no-filters"]).arg(path).stdout(Stdio::piped()).spawn().unwrap()
    };
    let expected = start(&copy).wait_with_output().unwrap();
    for _ in 0..3 {
        let frozen = world.store.inject(Fault::new(Effect::Frozen).operation(S3Operation::GetObject));
        rustix::fs::fadvise(File::open(mount.path("file")).unwrap(), 0, None, rustix::fs::Advice::DontNeed).unwrap();
        let reader = start(&mount.path("file"));
        wait_for("a page is missing", || frozen.hits() > 0);
        mount.kill_engine();
        frozen.release();
        let found = reader.wait_with_output().unwrap();
        assert!(found.status.success() && expected.status.success());
        assert_eq!(found.stdout, expected.stdout);
    }
    mount.unmount();
}

fn name(entry: &fs::DirEntry) -> String {
    entry.file_name().into_string().unwrap()
}

#[test]
fn a_working_directory_stays_where_it_is() {
    let fixture = Fixture::new("resume-cwd");
    let world = World::new(&fixture);
    world.put("a/b/file", b"content");
    let mount = world.mount();
    let mut shell = Command::new("sh")
        .args(["-c", "read -r _; cat file; ls -la; pwd"])
        .current_dir(mount.path("a/b"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    mount.kill_engine();
    drop(shell.stdin.take());
    let output = shell.wait_with_output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.starts_with("content"), "{text}");
    assert!(text.ends_with(&format!("{}\n", mount.path("a/b").display())), "{text}");
    mount.unmount();
}

#[test]
fn a_disk_cache_is_used_on() {
    let fixture = Fixture::new("resume-cache");
    let world = World::new(&fixture);
    let content = noise(6, 5 << 20);
    world.put("file", &content);
    let mount = world.mount_with(&Options { engine: &["--cache=x"], ..Options::default() });
    let mut file = File::open(mount.path("file")).unwrap();
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).unwrap();
    assert!(bytes == content, "other bytes");
    // Neither the page cache nor the store answers then.
    let reads_from_the_disk_cache = || {
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        world.store.forget_requests();
        assert!(fs::read(mount.path("file")).unwrap() == content, "other bytes");
        world.store.count(S3Operation::GetObject) == 0
    };
    wait_for("the disk cache has the file", reads_from_the_disk_cache);
    mount.kill_engine();
    assert!(reads_from_the_disk_cache(), "the next engine does not use the cache");
    bytes.clear();
    file.seek(SeekFrom::Start(0)).unwrap();
    file.read_to_end(&mut bytes).unwrap();
    assert!(bytes == content, "other bytes");
    drop(file);
    mount.unmount();
}

#[test]
fn the_end_of_the_store_is_an_error_of_files_and_not_of_the_mount() {
    let fixture = Fixture::new("resume-away");
    let world = World::new(&fixture);
    world.put("file", b"content");
    let mount = world.mount();
    let away = world.store.inject(Fault::new(Effect::Dropped).bucket(BUCKET));
    mount.kill_engine();
    assert!(fs::metadata(mount.path("file")).is_err());
    away.release();
    wait_for("the file can be read", || fs::read(mount.path("file")).is_ok_and(|it| it == b"content"));
    mount.unmount();
}
