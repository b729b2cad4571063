//! Files that are too large for an engine's memory are edited in place: their copies are in a directory that the mounter provides.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use rustix::io::Errno;
use rustix::process::{Signal, kill_process};
use s3csi_s3_server::store::Store as _;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::noise::noise;
use s3csi_testbed::wait::wait_for;

use crate::world::{BUCKET, World, names_in, volume};

const SIZE: usize = 20 << 20;
const PLACE: usize = 15 << 20;

/// A world whose mounter has a staging directory of this size, and the mounter's arguments for it.
fn start<'a>(fixture: &'a Fixture, size: &str) -> (World<'a>, PathBuf, [String; 2]) {
    let mut world = World::prepare(fixture);
    let stage = world.plugin.make_stage_directory("stage").unwrap();
    let arguments = [format!("--stage-dir={}", stage.display()), format!("--stage-size-limit={size}")];
    world.start_mounter_with(&arguments.each_ref().map(String::as_str));
    world.start_node();
    (world, stage, arguments)
}

fn editable(path: &Path) -> File {
    File::options().read(true).write(true).open(path).unwrap()
}

/// Another process that edits a file. The test's own may not have it open while it starts programs: they would wait in exec(2) for a
/// mount that is not served.
struct Editor {
    process: Child,
    writes: ChildStdin,
    results: BufReader<ChildStdout>,
}

impl Editor {
    fn open(path: &Path) -> Self {
        let script = "import os, sys\n\
            f = os.open(sys.argv[1], os.O_RDWR)\n\
            for line in sys.stdin:\n    \
                text, at = line.split()\n    \
                os.pwrite(f, text.encode(), int(at))\n    \
                print('written', flush=True)\n\
            os.close(f)\n";
        let mut command = Command::new("python3");
        let command = command.args(["-c", script]).arg(path).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let writes = process.stdin.take().unwrap();
        let results = BufReader::new(process.stdout.take().unwrap());
        Self { process, writes, results }
    }

    fn write(&mut self, text: &str, at: usize) {
        writeln!(self.writes, "{text} {at}").unwrap();
        let mut result = String::new();
        self.results.read_line(&mut result).unwrap();
        assert_eq!(result, "written\n");
    }

    fn close(self) {
        let Self { mut process, writes, results } = self;
        drop((writes, results));
        assert!(process.wait().unwrap().success());
    }
}

/// The staging directory of the only source.
#[track_caller]
fn of_source(stage: &Path) -> PathBuf {
    let sources = names_in(&stage.join("sources"));
    assert_eq!(sources.len(), 1, "staging directories: {sources:?}");
    stage.join("sources").join(&sources[0])
}

#[track_caller]
fn check_object(world: &World<'_>, expected: &[u8]) {
    assert!(world.store.object(BUCKET, "file").unwrap() == expected, "the object has other bytes");
}

#[test]
fn a_large_file_is_edited_and_its_copy_is_gone_with_the_mount() {
    let fixture = Fixture::new("staging-edit");
    let (world, stage, _) = start(&fixture, "1Gi");
    let mut content = noise(1, SIZE);
    world.store.put_object(BUCKET, "file", &content).unwrap();
    let target = world.publish(&volume(1));
    let file = editable(&target.join("file"));
    file.write_all_at(b"edited", PLACE as u64).unwrap();
    content[PLACE..PLACE + 6].copy_from_slice(b"edited");
    assert_eq!(names_in(&of_source(&stage)).len(), 1, "the engine has made its directory in it");
    drop(file);
    check_object(&world, &content);
    world.unpublish(&volume(1));
    world.check_nothing_left();
    assert_eq!(names_in(&stage.join("sources")), [""; 0]);
}

#[test]
fn a_full_staging_directory_is_no_space_and_the_log_names_the_setting() {
    let fixture = Fixture::new("staging-full");
    // Room for one block of 8 MiB.
    let (world, ..) = start(&fixture, "10Mi");
    let content = noise(1, SIZE);
    world.store.put_object(BUCKET, "file", &content).unwrap();
    // A volume may not take more than the mounter allows.
    let volume = volume(1).with_option("max-stage-size 5000");
    let target = world.publish(&volume);
    let file = editable(&target.join("file"));
    file.write_all_at(b"edited", 0).unwrap();
    let error = file.write_all_at(b"edited", PLACE as u64).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(Errno::NOSPC.raw_os_error()));
    world.mounter().wait_for_log("the staging directory is full; raise --max-stage-size");
    drop(file);
    world.unpublish(&volume);
    world.check_nothing_left();
}

#[test]
fn a_file_that_is_being_edited_survives_the_mounter() {
    let fixture = Fixture::new("staging-resumed");
    let (mut world, stage, arguments) = start(&fixture, "1Gi");
    let mut content = noise(1, SIZE);
    world.store.put_object(BUCKET, "file", &content).unwrap();
    let target = world.publish(&volume(1));
    let mut editor = Editor::open(&target.join("file"));
    editor.write("before", PLACE);

    let engine = world.engine();
    kill_process(world.mounter().pid(), Signal::KILL).unwrap();
    kill_process(engine, Signal::KILL).unwrap();
    world.kill_mounter();
    wait_for("the engine is gone", || !world.engine_processes().contains(&engine));
    world.start_mounter_with(&arguments.each_ref().map(String::as_str));

    editor.write("after", 0);
    editor.close();
    content[PLACE..PLACE + 6].copy_from_slice(b"before");
    content[..5].copy_from_slice(b"after");
    check_object(&world, &content);
    world.unpublish(&volume(1));
    world.check_nothing_left();
    assert_eq!(names_in(&stage.join("sources")), [""; 0]);
}
