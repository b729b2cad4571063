//! Staging files that other programs remove or change: what was edited is stored whole, or its writer gets an error and the object
//! stays as it was. Nothing is lost in silence.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use s3csi_s3_server::store::Store as _;
use s3csi_s3_server::{Effect, Fault, S3Operation};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::wait::wait_for;

use crate::world::{BUCKET, Options, SupervisedMount, World, noise};

const LOST: &str = "is missing, so it is not stored";
const SIZE: usize = 20 << 20;

/// A process that edits one file and looks at the result of close, which `File` does not.
struct Editor {
    process: Child,
    orders: ChildStdin,
    results: BufReader<ChildStdout>,
}

impl Editor {
    fn open(path: &Path) -> Self {
        let script = "import errno, os, sys\n\
            f = os.open(sys.argv[1], os.O_RDWR)\n\
            run = {'write': lambda at: os.pwrite(f, b'edit', int(at)), 'fsync': lambda _: os.fsync(f), 'close': lambda _: os.close(f)}\n\
            for line in sys.stdin:\n    \
                what, at = line.split()\n    \
                try:\n        \
                    run[what](at)\n        \
                    print('ok', flush=True)\n    \
                except OSError as e:\n        \
                    print(errno.errorcode[e.errno], flush=True)\n";
        let mut command = Command::new("python3");
        let command = command.args(["-c", script]).arg(path).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let orders = process.stdin.take().unwrap();
        let results = BufReader::new(process.stdout.take().unwrap());
        Self { process, orders, results }
    }

    #[track_caller]
    fn check(&mut self, order: &str, expected: &str) {
        writeln!(self.orders, "{order}").unwrap();
        let mut result = String::new();
        self.results.read_line(&mut result).unwrap();
        assert_eq!(result.trim(), expected, "{order}");
    }

    fn end(self) {
        let Self { mut process, orders, results } = self;
        drop((orders, results));
        assert!(process.wait().unwrap().success());
    }
}

struct Staging {
    directory: PathBuf,
    content: Vec<u8>,
}

impl Staging {
    fn new(fixture: &Fixture, world: &World<'_>) -> Self {
        let content = noise(5, SIZE);
        world.put("file", &content);
        Self { directory: fixture.create_directory("stage"), content }
    }

    fn mount<'a>(&self, world: &World<'a>) -> SupervisedMount<'a> {
        let directory = format!("--stage-dir={}", self.directory.display());
        world.mount_with(&Options { mounter: &[&directory, "--stage-size-limit=1Gi"], ..Options::default() })
    }

    /// What a directory contains.
    fn entries(directory: &Path) -> Vec<PathBuf> {
        fs::read_dir(directory).unwrap().map(|it| it.unwrap().path()).collect()
    }

    /// The directories that engines made.
    fn directories(&self) -> Vec<PathBuf> {
        Self::entries(&self.directory.join("source"))
    }

    /// All staging files: contents, and the maps of their blocks.
    fn files(&self) -> Vec<PathBuf> {
        let files: Vec<PathBuf> = self.directories().iter().flat_map(|it| Self::entries(it)).collect();
        assert!(!files.is_empty(), "nothing is staged");
        files
    }

    fn remove(&self) {
        for file in self.files() {
            fs::remove_file(file).unwrap();
        }
    }

    /// The object is the old one, and the file can be edited again.
    #[track_caller]
    fn check_intact(&self, world: &World<'_>, mount: &SupervisedMount<'_>) {
        assert!(world.store.object(BUCKET, "file").unwrap() == self.content, "the object was changed");
        let read = fs::read(mount.path("file")).unwrap();
        let differs = read.iter().zip(&self.content).position(|(found, expected)| found != expected);
        assert!(read == self.content, "the file has {} bytes and differs at {differs:?}", read.len());
        let mut expected = self.content.clone();
        expected[7..11].copy_from_slice(b"edit");
        let mut editor = Editor::open(&mount.path("file"));
        editor.check("write 7", "ok");
        editor.check("close 0", "ok");
        editor.end();
        assert!(world.store.object(BUCKET, "file").unwrap() == expected, "other bytes");
    }
}

#[test]
fn files_that_were_removed_are_stored_by_the_engine_that_has_them_open() {
    let fixture = Fixture::new("lost-running");
    let world = World::new(&fixture);
    let staging = Staging::new(&fixture, &world);
    let mount = staging.mount(&world);
    let mut editor = Editor::open(&mount.path("file"));
    editor.check("write 17", "ok");
    staging.remove();
    editor.check("write 15000000", "ok");
    editor.check("close 0", "ok");
    editor.end();
    let mut expected = staging.content.clone();
    for at in [17, 15_000_000] {
        expected[at..at + 4].copy_from_slice(b"edit");
    }
    assert!(world.store.object(BUCKET, "file").unwrap() == expected, "other bytes");
    assert!(mount.mounter().log_contains("removed a staging file"), "{}", mount.mounter());
    // The directory is made again for the next one.
    for directory in staging.directories() {
        fs::remove_dir_all(directory).unwrap();
    }
    let file = OpenOptions::new().write(true).open(mount.path("file")).unwrap();
    file.write_all_at(b"more", 100).unwrap();
    mount.kill_engine();
    file.sync_all().unwrap();
    expected[100..104].copy_from_slice(b"more");
    assert!(world.store.object(BUCKET, "file").unwrap() == expected, "other bytes");
    drop(file);
    mount.unmount();
}

#[test]
fn a_successor_that_does_not_find_the_files_fails_their_writers() {
    let fixture = Fixture::new("lost-removed");
    let world = World::new(&fixture);
    let staging = Staging::new(&fixture, &world);
    let mount = staging.mount(&world);
    let mut editor = Editor::open(&mount.path("file"));
    let reader = File::open(mount.path("file")).unwrap();
    editor.check("write 17", "ok");
    staging.remove();
    mount.kill_engine();
    editor.check("write 15000000", "EIO");
    editor.check("fsync 0", "EIO");
    assert!(reader.read_exact_at(&mut [0; 100], 0).is_err(), "a reader sees bytes of another version");
    mount.kill_engine();
    editor.check("write 17", "EIO");
    editor.check("close 0", "EIO");
    editor.end();
    drop(reader);
    assert!(mount.mounter().log_contains(LOST), "{}", mount.mounter());
    staging.check_intact(&world, &mount);
    mount.unmount();
}

#[test]
fn a_successor_that_finds_a_damaged_file_fails_its_writers() {
    for (name, length) in [("", 100), ("", (SIZE - 1) as u64), (".blocks", 0), (".blocks", 9)] {
        let fixture = Fixture::new("lost-damaged");
        let world = World::new(&fixture);
        let staging = Staging::new(&fixture, &world);
        let mount = staging.mount(&world);
        let mut editor = Editor::open(&mount.path("file"));
        editor.check("write 15000000", "ok");
        let is_damaged = |it: &&PathBuf| it.to_string_lossy().ends_with(".blocks") == name.ends_with(".blocks");
        let files = staging.files();
        let damaged = files.iter().find(is_damaged).unwrap();
        OpenOptions::new().write(true).open(damaged).unwrap().set_len(length).unwrap();
        mount.kill_engine();
        editor.check("fsync 0", "EIO");
        editor.check("close 0", "EIO");
        editor.end();
        staging.check_intact(&world, &mount);
        mount.unmount();
    }
}

#[test]
fn a_file_that_was_shortened_is_not_filled_with_zeros() {
    let fixture = Fixture::new("lost-shortened");
    let world = World::new(&fixture);
    let staging = Staging::new(&fixture, &world);
    let mount = staging.mount(&world);
    for order in ["write 20971520", "write 17", "fsync 0"] {
        let mut editor = Editor::open(&mount.path("file"));
        editor.check("write 15000000", "ok");
        let data = staging.files().into_iter().find(|it| !it.to_string_lossy().ends_with(".blocks")).unwrap();
        OpenOptions::new().write(true).open(data).unwrap().set_len(0).unwrap();
        editor.check(order, "EIO");
        editor.check("close 0", "EIO");
        editor.end();
        assert!(world.store.object(BUCKET, "file").unwrap() == staging.content, "{order}: the object was changed");
    }
    assert!(mount.mounter().log_contains(LOST), "{}", mount.mounter());
    staging.check_intact(&world, &mount);
    mount.unmount();
}

#[test]
fn a_closed_file_that_could_not_be_stored_and_is_lost_is_logged() {
    let fixture = Fixture::new("lost-closed");
    let world = World::new(&fixture);
    let staging = Staging::new(&fixture, &world);
    let mount = staging.mount(&world);
    let denied = world.store.inject(Fault::new(Effect::Denied).operation(S3Operation::CreateMultipartUpload));
    let mut editor = Editor::open(&mount.path("file"));
    editor.check("write 15000000", "ok");
    editor.check("close 0", "EIO");
    editor.end();
    staging.remove();
    mount.kill_engine();
    denied.release();
    wait_for("the loss is logged", || mount.mounter().log_contains(LOST));
    wait_for("the file is not open any longer", || File::open(mount.path("file")).is_ok());
    staging.check_intact(&world, &mount);
    mount.unmount();
}
