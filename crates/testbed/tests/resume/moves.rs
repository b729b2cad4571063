//! A mount that one mounter hands over to another one, as the node plugin does it: a living mounter releases it, or a dead one
//! left it. The test plays the node plugin and holds the descriptors.

use std::fs::{self, File};
use std::io::Write as _;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Instant;

use s3csi_driver::host::{Access, FuseOptions, Host as _, Kernel};
use s3csi_handoff::{self as handoff, Answer, AnswerReader, MountRequest, ReceivedAnswer, SourceCommand};
use s3csi_testbed::environment::product;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::process::{Process, command};
use s3csi_testbed::processes;
use s3csi_testbed::steady_reader::SteadyReader;
use s3csi_testbed::wait::{SOON, wait_for, wait_until};

use crate::world::{Options, World, noise};

struct Mounter {
    process: Process,
    socket: PathBuf,
}

/// What a node plugin holds of a mount.
struct Held {
    directory: PathBuf,
    fuse: OwnedFd,
    state: OwnedFd,
    request: MountRequest,
    answers: AnswerReader,
}

impl Mounter {
    fn start(fixture: &Fixture, name: &str, arguments: &[&str]) -> Self {
        let directory = fixture.create_directory(name);
        let mut command = command(&product("s3csi-mounter").unwrap());
        command.arg("--directory").arg(&directory).arg("--engine").arg(product("mount-s3").unwrap()).args(arguments);
        let process = fixture.start(name, &mut command).unwrap();
        let socket = directory.join(handoff::SOCKET);
        wait_for("the mounter listens", || UnixStream::connect(&socket).is_ok());
        Self { process, socket }
    }

    fn connect(&self) -> UnixStream {
        handoff::connect(&self.socket, SOON).unwrap()
    }

    #[track_caller]
    fn command(&self, command: &SourceCommand) -> Option<ReceivedAnswer> {
        let connection = self.connect();
        handoff::send_command(&connection, command).unwrap();
        reader(connection).next_answer().unwrap()
    }

    /// Kills the mounter and its engine at once.
    fn kill(&self, fixture: &Fixture) {
        let engines = processes::running("mount-s3", fixture.directory());
        self.process.kill();
        for engine in engines {
            // It may have noticed the end of its mounter.
            let _ = rustix::process::kill_process(engine, rustix::process::Signal::KILL);
        }
        wait_for("the engine is gone", || processes::running("mount-s3", fixture.directory()).is_empty());
        fs::remove_file(&self.socket).unwrap();
    }
}

fn reader(connection: UnixStream) -> AnswerReader {
    let reader = AnswerReader::new(connection);
    reader.set_timeout(Some(SOON)).unwrap();
    reader
}

#[track_caller]
fn next(answers: &mut AnswerReader) -> Answer {
    answers.next_answer().unwrap().expect("the mounter answers").answer
}

impl Held {
    #[track_caller]
    fn mount(fixture: &Fixture, world: &World<'_>, mounter: &Mounter) -> Self {
        let directory = fixture.create_directory("mount");
        let options = FuseOptions { access: Access::ReadWrite, allow_other: true };
        let fuse = Kernel::default().mount_fuse(&directory, &options).unwrap();
        let request = MountRequest { hold: true, ..world.request(&Options::default()) };
        let connection = mounter.connect();
        handoff::send(&connection, &request, fuse.as_fd()).unwrap();
        let mut answers = reader(connection);
        let ReceivedAnswer { answer, mut descriptors } = answers.next_answer().unwrap().unwrap();
        assert_eq!(answer, Answer::Held { request: None }, "{}", mounter.process);
        let state = descriptors.pop().expect("the state is attached");
        assert_eq!(next(&mut answers), Answer::Ready);
        Self { directory, fuse, state, request, answers }
    }

    /// Sends the descriptors to another mounter.
    fn resume(&self, mounter: &Mounter, wait: bool) -> AnswerReader {
        let connection = mounter.connect();
        let request = MountRequest { resume: true, wait, ..self.request.clone() };
        handoff::send_resume(&connection, &request, self.fuse.as_fd(), self.state.as_fd()).unwrap();
        reader(connection)
    }

    fn device(&self) -> u64 {
        fs::metadata(&self.directory).unwrap().dev()
    }

    #[track_caller]
    fn unmount(self, mounter: &Mounter, mut answers: AnswerReader) {
        unmount(&self.directory);
        drop((self.fuse, self.state));
        assert_eq!(next(&mut answers), Answer::Exited { code: Some(0), signal: None, error: String::new() });
        assert!(mounter.process.terminate().success(), "{}", mounter.process);
    }
}

#[track_caller]
fn unmount(directory: &Path) {
    let host = Kernel::default();
    assert!(wait_until(Instant::now() + SOON, || host.unmount(directory).is_ok()), "{} is busy", directory.display());
}

#[test]
fn a_mount_moves_to_another_mounter_without_an_error() {
    let fixture = Fixture::new("moves-planned");
    let world = World::new(&fixture);
    let content = noise(1, 100_000);
    world.put("file", &content);
    let (old, new) = (Mounter::start(&fixture, "old", &[]), Mounter::start(&fixture, "new", &[]));
    let mut held = Held::mount(&fixture, &world, &old);
    let device = held.device();
    let steady = SteadyReader::start(&held.directory, "file", &content);

    let mut answers = held.resume(&new, true);
    assert_eq!(next(&mut answers), Answer::Prepared, "{}", new.process);
    let released = old.command(&SourceCommand::Release(String::new())).unwrap().answer;
    assert_eq!(released, Answer::Released, "{}", old.process);
    assert_eq!(next(&mut held.answers), Answer::Released, "the connection of the request hears it, too");
    assert!(new.command(&SourceCommand::Go(String::new())).is_none(), "go has no answer of its own");
    match next(&mut answers) {
        Answer::Replaced { reason, .. } => assert_eq!(reason, "mounter replaced"),
        other => panic!("{other:?}: {}", new.process),
    }
    assert!(old.process.terminate().success(), "{}", old.process);

    steady.wait_for_rounds(5);
    let report = steady.finish_without_errors();
    println!("{} rounds, the longest took {:?}", report.rounds, report.longest);
    assert_eq!(held.device(), device);
    held.unmount(&new, answers);
}

#[test]
fn a_mounter_that_would_show_another_prefix_does_not_get_the_mount() {
    let fixture = Fixture::new("moves-prefix");
    let world = World::new(&fixture);
    world.put("file", b"content");
    let (old, new) = (Mounter::start(&fixture, "old", &[]), Mounter::start(&fixture, "new", &[]));
    let mut held = Held::mount(&fixture, &world, &old);
    held.request.args.push("--prefix=other/".to_owned());
    let mut answers = held.resume(&new, true);
    match next(&mut answers) {
        Answer::Exited { error, .. } => assert!(error.contains("another bucket, prefix or endpoint"), "{error}"),
        other => panic!("{other:?}: {}", new.process),
    }
    assert_eq!(fs::read(held.directory.join("file")).unwrap(), b"content", "the old one serves on");
    assert!(new.process.terminate().success(), "{}", new.process);
    let answers = std::mem::replace(&mut held.answers, AnswerReader::new(UnixStream::pair().unwrap().0));
    held.unmount(&old, answers);
}

#[test]
fn a_mount_is_not_released_while_a_big_file_is_written() {
    let fixture = Fixture::new("moves-busy");
    let world = World::new(&fixture);
    let mounter = Mounter::start(&fixture, "old", &["--drain-time", "1s"]);
    let mut held = Held::mount(&fixture, &world, &mounter);
    let content = noise(2, 20 << 20);
    let mut file = File::create(held.directory.join("file")).unwrap();
    file.write_all(&content).unwrap();
    match mounter.command(&SourceCommand::Release(String::new())).unwrap().answer {
        Answer::Failed { error, .. } => assert_eq!(error, "files are being written"),
        other => panic!("{other:?}: {}", mounter.process),
    }
    file.sync_all().unwrap();
    drop(file);
    assert!(fs::read(held.directory.join("file")).unwrap() == content, "other bytes");
    let released = mounter.command(&SourceCommand::Release(String::new())).unwrap().answer;
    assert_eq!(released, Answer::Released, "{}", mounter.process);
    assert_eq!(next(&mut held.answers), Answer::Released);
    let answers = held.resume(&mounter, false);
    assert!(fs::read(held.directory.join("file")).unwrap() == content, "other bytes");
    finish_resumed(held, &mounter, answers);
}

/// Takes the report of the resume and unmounts.
#[track_caller]
fn finish_resumed(held: Held, mounter: &Mounter, mut answers: AnswerReader) {
    match next(&mut answers) {
        Answer::Resumed { cause, .. } => assert_eq!(cause, "the mounter was restarted"),
        other => panic!("{other:?}: {}", mounter.process),
    }
    held.unmount(mounter, answers);
}

#[test]
fn descriptors_that_a_mounter_sends_to_a_restarted_node_plugin_resume_the_mount() {
    let fixture = Fixture::new("moves-hold");
    let world = World::new(&fixture);
    world.put("file", b"content");
    let (old, new) = (Mounter::start(&fixture, "old", &[]), Mounter::start(&fixture, "new", &[]));
    let held = Held::mount(&fixture, &world, &old);
    let (directory, request) = (held.directory.clone(), held.request.clone());
    drop(held);
    let ReceivedAnswer { answer, descriptors } = old.command(&SourceCommand::Hold(String::new())).unwrap();
    assert_eq!(answer, Answer::Held { request: Some(request.clone()) });
    let [fuse, state] = <[OwnedFd; 2]>::try_from(descriptors).unwrap();
    let device = fs::metadata(&directory).unwrap().dev();
    let steady = SteadyReader::start(&directory, "file", b"content");
    old.kill(&fixture);
    let unused = AnswerReader::new(UnixStream::pair().unwrap().0);
    let held = Held { directory, fuse, state, request, answers: unused };
    let answers = held.resume(&new, false);
    steady.wait_for_rounds(5);
    steady.finish_without_errors();
    assert_eq!(held.device(), device);
    finish_resumed(held, &new, answers);
}

#[test]
fn a_second_engine_waits_until_the_first_one_is_gone() {
    let fixture = Fixture::new("moves-lock");
    let world = World::new(&fixture);
    world.put("file", b"content");
    let (old, new) = (Mounter::start(&fixture, "old", &[]), Mounter::start(&fixture, "new", &[]));
    let held = Held::mount(&fixture, &world, &old);
    let steady = SteadyReader::start(&held.directory, "file", b"content");
    // A mistake of the node plugin: the old mounter still serves.
    let answers = held.resume(&new, false);
    wait_for("both engines run", || processes::running("mount-s3", fixture.directory()).len() == 2);
    steady.wait_for_rounds(20);
    let engines = processes::running("mount-s3", fixture.directory());
    old.process.kill();
    rustix::process::kill_process(engines[0], rustix::process::Signal::KILL).unwrap();
    fs::remove_file(&old.socket).unwrap();
    steady.wait_for_rounds(5);
    steady.finish_without_errors();
    finish_resumed(held, &new, answers);
}
