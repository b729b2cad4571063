//! Files that are being written when the engine dies. Whatever is not in the bucket then is reported to whoever closes the
//! file; nothing is lost in silence.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::io::Errno;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::s3::Operation;
use s3csi_testbed::store::Store as _;
use s3csi_testbed::wait::wait_for;

use crate::world::{BUCKET, World, check_errno, noise};

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
    let kept = world.mount();
    let mut writer = Writer::start(&kept.path("file"));
    wait_for("the file is open", || kept.path("file").exists());
    kept.kill_engine();
    let content = noise(1, 3 << 20);
    writer.write(&content);
    writer.close().unwrap();
    assert!(world.store.object(BUCKET, "file").unwrap() == content, "other bytes");
    kept.unmount();
}

#[test]
fn a_big_file_that_was_partly_written_fails_at_close() {
    let fixture = Fixture::new("resume-write-part");
    let world = World::new(&fixture);
    let kept = world.mount();
    let mut writer = Writer::start(&kept.path("file"));
    writer.write(&noise(2, 40 << 20));
    wait_for("a part is uploaded", || world.store.count(Operation::UploadPart) > 0);
    kept.kill_engine();
    let error = writer.close().unwrap_err();
    assert!(error.contains("Input/output error"), "{error}");
    assert!(!kept.path("file").exists());
    assert_eq!(world.store.object(BUCKET, "file"), None);
    fs::write(kept.path("file"), "again").unwrap();
    assert_eq!(fs::read(kept.path("file")).unwrap(), b"again");
    kept.unmount();
}

#[test]
fn a_big_file_that_was_partly_written_fails_at_write_and_sync_too() {
    let fixture = Fixture::new("resume-write-more");
    let world = World::new(&fixture);
    let kept = world.mount();
    let mut file = File::create(kept.path("file")).unwrap();
    file.write_all(&noise(2, 40 << 20)).unwrap();
    kept.kill_engine();
    check_errno(file.write_all(b"more"), Errno::IO);
    check_errno(file.sync_all(), Errno::IO);
    drop(file);
    assert_eq!(world.store.object(BUCKET, "file"), None);
    kept.unmount();
}

#[test]
fn a_file_that_was_synced_is_stored_and_closes_well() {
    let fixture = Fixture::new("resume-write-sync");
    let world = World::new(&fixture);
    let kept = world.mount();
    let mut file = File::create(kept.path("file")).unwrap();
    file.write_all(b"content").unwrap();
    file.sync_all().unwrap();
    kept.kill_engine();
    file.sync_all().unwrap();
    drop(file);
    assert_eq!(fs::read(kept.path("file")).unwrap(), b"content");
    kept.unmount();
}
