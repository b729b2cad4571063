//! Files that are being written when the engine dies. Writing small ones continues; the loss of a big one is reported at
//! close. No data is lost silently.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::io::Errno;
use s3csi_s3_server::store::Store as _;
use s3csi_s3_server::{Effect, Fault, S3Operation};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::wait::wait_for;

use crate::world::{BUCKET, Options, World, check_errno, noise};

/// Far more than what is kept of one file.
const BIG: usize = 100 << 20;

/// A process that writes one file and looks at the result of close, which `File` does not.
struct Writer(Child);

impl Writer {
    fn start(path: &Path) -> Self {
        let mut command = Command::new("sh");
        command.args(["-c", r#"exec cat > "$0""#]).arg(path).stdin(Stdio::piped()).stderr(Stdio::piped());
        Self(command.spawn().unwrap())
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0.stdin.as_mut().unwrap().write_all(bytes).unwrap();
    }

    /// Closes the file and answers what went wrong, if anything.
    fn close(mut self) -> Result<(), String> {
        drop(self.0.stdin.take());
        let output = self.0.wait_with_output().unwrap();
        if output.status.success() { Ok(()) } else { Err(String::from_utf8(output.stderr).unwrap()) }
    }
}

#[test]
fn a_file_with_nothing_written_yet_is_written_as_if_nothing_had_happened() {
    let fixture = Fixture::new("resume-write-empty");
    let world = World::new(&fixture);
    let mount = world.mount();
    let mut writer = Writer::start(&mount.path("file"));
    wait_for("the file is open", || mount.path("file").exists());
    mount.kill_engine();
    let content = noise(1, 3 << 20);
    writer.write(&content);
    writer.close().unwrap();
    assert!(world.store.object(BUCKET, "file").unwrap() == content, "other bytes");
    mount.unmount();
}

#[test]
fn a_big_file_that_was_partly_written_fails_at_close() {
    let fixture = Fixture::new("resume-write-part");
    let world = World::new(&fixture);
    let mount = world.mount();
    let mut writer = Writer::start(&mount.path("file"));
    writer.write(&noise(2, BIG));
    wait_for("a part is uploaded", || world.store.count(S3Operation::UploadPart) > 0);
    mount.kill_engine();
    let error = writer.close().unwrap_err();
    assert!(error.contains("Input/output error"), "{error}");
    assert!(!mount.path("file").exists());
    assert_eq!(world.store.object(BUCKET, "file"), None);
    fs::write(mount.path("file"), "again").unwrap();
    assert_eq!(fs::read(mount.path("file")).unwrap(), b"again");
    mount.unmount();
}

#[test]
fn a_big_file_that_was_partly_written_fails_at_write_and_sync_too() {
    let fixture = Fixture::new("resume-write-more");
    let world = World::new(&fixture);
    let mount = world.mount();
    let mut file = File::create(mount.path("file")).unwrap();
    file.write_all(&noise(2, BIG)).unwrap();
    mount.kill_engine();
    check_errno(file.write_all(b"more"), Errno::IO);
    check_errno(file.sync_all(), Errno::IO);
    drop(file);
    assert_eq!(world.store.object(BUCKET, "file"), None);
    mount.unmount();
}

#[test]
fn a_file_that_was_synced_is_stored_and_closes_well() {
    let fixture = Fixture::new("resume-write-sync");
    let world = World::new(&fixture);
    let mount = world.mount();
    let mut file = File::create(mount.path("file")).unwrap();
    file.write_all(b"content").unwrap();
    file.sync_all().unwrap();
    mount.kill_engine();
    file.sync_all().unwrap();
    drop(file);
    assert_eq!(fs::read(mount.path("file")).unwrap(), b"content");
    mount.unmount();
}

#[test]
fn a_small_file_is_written_on_by_the_successor() {
    let fixture = Fixture::new("resume-write-small");
    let world = World::new(&fixture);
    let mount = world.mount();
    let content = noise(3, 6 << 20);
    let mut writer = Writer::start(&mount.path("directory-file"));
    for piece in content.chunks(700_000) {
        writer.write(piece);
        let path = mount.path("directory-file");
        wait_for("a piece has arrived", || fs::metadata(&path).is_ok_and(|it| it.len() > 0));
        mount.kill_engine();
    }
    writer.close().unwrap();
    assert!(world.store.object(BUCKET, "directory-file").unwrap() == content, "other bytes");
    mount.unmount();
}

#[test]
fn a_small_file_whose_writer_only_closes_it_is_stored() {
    let fixture = Fixture::new("resume-write-close");
    let world = World::new(&fixture);
    world.put("file", b"earlier content");
    let mount = world.mount();
    let mut file = File::create(mount.path("file")).unwrap();
    file.write_all(b"later content").unwrap();
    mount.kill_engine();
    wait_for("the file has its size again", || fs::metadata(mount.path("file")).unwrap().len() == 13);
    file.sync_all().unwrap();
    assert_eq!(world.store.object(BUCKET, "file").unwrap(), b"later content"[..]);
    drop(file);
    assert_eq!(fs::read(mount.path("file")).unwrap(), b"later content");
    mount.unmount();
}

#[test]
fn a_file_that_becomes_big_after_the_engine_died_is_stored() {
    let fixture = Fixture::new("resume-write-grow");
    let world = World::new(&fixture);
    let mount = world.mount();
    let content = noise(4, 30 << 20);
    let mut file = File::create(mount.path("file")).unwrap();
    file.write_all(&content[..7 << 20]).unwrap();
    mount.kill_engine();
    file.write_all(&content[7 << 20..]).unwrap();
    file.sync_all().unwrap();
    assert!(world.store.object(BUCKET, "file").unwrap() == content, "other bytes");
    drop(file);
    mount.unmount();
}

#[test]
fn a_close_inside_the_engine_is_finished_by_its_successor() {
    let fixture = Fixture::new("resume-write-inside");
    let world = World::new(&fixture);
    let mount = world.mount_with(&Options { without: &["--allow-overwrite"], ..Options::default() });
    let mut writer = Writer::start(&mount.path("file"));
    writer.write(b"content");
    // The object is stored, but the engine cannot say so any more.
    let slow = world.store.inject(Fault::new(Effect::Slow(Duration::from_secs(2))).operation(S3Operation::PutObject));
    let closing = std::thread::spawn(move || writer.close());
    wait_for("the engine stores the file", || slow.hits() > 0);
    mount.kill_engine();
    slow.release();
    closing.join().unwrap().unwrap();
    assert_eq!(world.store.object(BUCKET, "file").unwrap(), b"content"[..]);
    mount.unmount();
}

#[test]
fn files_that_are_too_many_to_be_kept_fail_at_sync_and_the_others_are_stored() {
    let fixture = Fixture::new("resume-write-many");
    let world = World::new(&fixture);
    let mount = world.mount();
    let content = noise(5, 7 << 20);
    let mut files: Vec<File> = (0..12)
        .map(|number| {
            let mut file = File::create(mount.path(&format!("file-{number}"))).unwrap();
            file.write_all(&content).unwrap();
            file
        })
        .collect();
    mount.kill_engine();
    let mut stored = 0;
    for (number, file) in files.iter_mut().enumerate() {
        let is_there = |name: &str| world.store.object(BUCKET, name).is_some_and(|it| it == content);
        match file.sync_all() {
            Ok(()) => {
                stored += 1;
                assert!(is_there(&format!("file-{number}")), "file {number} was synced and is not in the bucket");
            }
            Err(error) => {
                assert_eq!(error.raw_os_error(), Some(Errno::IO.raw_os_error()));
                assert_eq!(world.store.object(BUCKET, &format!("file-{number}")), None);
            }
        }
    }
    assert_eq!(stored, 9, "64 MiB are kept");
    drop(files);
    mount.unmount();
}

#[test]
fn a_file_that_was_closed_by_a_child_only_is_stored_after_the_last_close() {
    let fixture = Fixture::new("resume-write-child");
    let world = World::new(&fixture);
    let mount = world.mount();
    let mut file = File::create(mount.path("file")).unwrap();
    file.write_all(b"content").unwrap();
    // A child has the file open, too, for a moment.
    let child = file.try_clone().unwrap();
    assert!(Command::new("true").stdin(Stdio::from(child)).status().unwrap().success());
    mount.kill_engine();
    drop(file);
    wait_for("the file is stored", || world.store.object(BUCKET, "file").is_some_and(|it| *it == *b"content"));
    mount.unmount();
}
