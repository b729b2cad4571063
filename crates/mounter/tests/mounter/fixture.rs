//! Starts mounters, sends requests and looks at processes from outside.

use std::fs::File;
use std::io::{BufRead, BufReader, IoSlice, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{Mode, OFlags};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use rustix::process::{Pid, Signal};
use s3csi_handoff::SOCKET;
use s3csi_handoff::{self as handoff, Answer, ConnectError, MountRequest};

/// Far more than anything here takes, on a busy machine, too.
pub const PATIENCE: Duration = Duration::from_mins(1);

/// Says that it serves, and does so until its gate is opened.
pub const SERVE: &str = r#"echo "$1 is mounted at $2"; read -r _ < "$GATE""#;

/// A running mounter with a directory of its own. Dropping it ends it and its engines.
pub struct Mounter {
    child: Child,
    place: tempfile::TempDir,
}

impl Mounter {
    pub fn start(flags: &[&str]) -> Self {
        Self::start_in(tempfile::tempdir().unwrap(), flags)
    }

    pub fn start_in(place: tempfile::TempDir, flags: &[&str]) -> Self {
        let mut mounter = Self { child: spawn(place.path(), flags), place };
        eventually("the mounter listens", || {
            assert!(mounter.child.try_wait().unwrap().is_none(), "the mounter has ended: {}", mounter.log());
            is_listening(&mounter.directory())
        });
        mounter
    }

    /// Where the mounter listens.
    pub fn directory(&self) -> PathBuf {
        self.place.path().join("directory")
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory().join(name)
    }

    /// Where engines have their caches.
    pub fn cache_root(&self) -> PathBuf {
        self.place.path().join("cache")
    }

    /// A path outside the mounter's directory.
    pub fn beside(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.place.path().join("stderr")).unwrap()
    }

    pub fn output(&self) -> String {
        std::fs::read_to_string(self.place.path().join("stdout")).unwrap()
    }

    pub fn connect(&self) -> Client {
        let stream = handoff::connect(&self.path(SOCKET), PATIENCE).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Client { reader: BufReader::new(stream) }
    }

    /// Sends a request as the node does; the node's copy of the descriptor is closed.
    pub fn request(&self, request: &MountRequest, fuse: OwnedFd) -> Client {
        let client = self.connect();
        handoff::send(client.stream(), request, fuse.as_fd()).unwrap();
        drop(fuse);
        client
    }

    /// Runs an engine with this script.
    pub fn run(&self, script: &str) -> Client {
        self.request(&scripted(script), Pipe::new().writer)
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub fn signal(&self, signal: Signal) {
        send_signal(self.child.id(), signal);
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    pub fn wait(&mut self) -> ExitStatus {
        let mut status = None;
        eventually("the mounter ends", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap()
    }

    /// The engines that run now.
    pub fn engines(&self) -> Vec<u32> {
        let Ok(tasks) = std::fs::read_dir(format!("/proc/{}/task", self.child.id())) else { return Vec::new() };
        let children = tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("children")).ok());
        children.flat_map(|it| it.split_whitespace().map(|id| id.parse().unwrap()).collect::<Vec<_>>()).collect()
    }

    pub fn descriptors(&self) -> Vec<PathBuf> {
        open_files(self.child.id())
    }

    /// Runs `body` and proves that the mounter has no more open files afterwards than before.
    pub fn leaks_nothing<T>(&self, body: impl FnOnce() -> T) -> T {
        let idle = IDLE_DESCRIPTORS + inherited();
        eventually("the mounter is idle", || self.descriptors().len() <= idle);
        let result = body();
        eventually("all descriptors are closed", || self.descriptors().len() <= idle);
        result
    }

    /// The temporary directory, for a successor.
    pub fn into_place(mut self) -> tempfile::TempDir {
        self.end();
        std::mem::replace(&mut self.place, tempfile::tempdir().unwrap())
    }

    fn end(&mut self) {
        let engines = self.engines();
        let _ = self.child.kill();
        let _ = self.child.wait();
        for engine in engines {
            let _ = Pid::from_raw(engine.cast_signed()).map(|it| rustix::process::kill_process(it, Signal::KILL));
        }
    }
}

/// Standard streams, directory, listener and the pair that wakes the loop, of which each of three signals has a copy.
const IDLE_DESCRIPTORS: usize = 3 + 1 + 1 + 2 + 3;

impl Drop for Mounter {
    fn drop(&mut self) {
        self.end();
    }
}

/// Starts a mounter without waiting for it; its output goes to files beside its directory.
pub fn spawn(place: &Path, flags: &[&str]) -> Child {
    std::fs::create_dir_all(place.join("directory")).unwrap();
    std::fs::create_dir_all(place.join("cache")).unwrap();
    let log = |name| Stdio::from(File::options().create(true).append(true).open(place.join(name)).unwrap());
    Command::new(env!("CARGO_BIN_EXE_s3csi-mounter"))
        .arg("--directory")
        .arg(place.join("directory"))
        .arg("--cache-dir")
        .arg(place.join("cache"))
        .args(if flags.contains(&"--engine") { vec![] } else { vec!["--engine", ENGINE] })
        .args(flags)
        .stdin(Stdio::null())
        .stdout(log("stdout"))
        .stderr(log("stderr"))
        .spawn()
        .unwrap()
}

pub const ENGINE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/mounter/engine.sh");

/// The node's end of a connection.
pub struct Client {
    reader: BufReader<UnixStream>,
}

impl Client {
    pub fn stream(&self) -> &UnixStream {
        self.reader.get_ref()
    }

    /// Sends bytes as they are, with these descriptors.
    pub fn send(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
        }
        let sent = rustix::net::sendmsg(self.stream(), &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL);
        assert_eq!(sent.unwrap(), bytes.len());
    }

    pub fn finish(&self) {
        self.stream().shutdown(Shutdown::Write).unwrap();
    }

    pub fn answer(&mut self) -> Answer {
        let mut line = String::new();
        self.reader.read_line(&mut line).unwrap();
        Answer::from_line(&line).unwrap()
    }

    /// The words of an answer that must be a failure.
    pub fn failure(&mut self) -> String {
        match self.answer() {
            Answer::Failed { error, .. } => error,
            other => panic!("{other:?}"),
        }
    }

    pub fn expect(&mut self, expected: &Answer) {
        assert_eq!(&self.answer(), expected);
    }

    /// The mounter has closed the connection.
    pub fn expect_end(&mut self) {
        let mut line = String::new();
        assert_eq!(self.reader.read_line(&mut line).unwrap(), 0, "{line}");
    }
}

/// Stands for a FUSE connection: the writer is handed over, the reader tells when its last copy was closed.
pub struct Pipe {
    pub reader: OwnedFd,
    pub writer: OwnedFd,
}

impl Pipe {
    pub fn new() -> Self {
        let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        Self { reader, writer }
    }
}

/// How the descriptor of a pipe looks in `/proc`.
pub fn link_of(descriptor: BorrowedFd<'_>) -> PathBuf {
    PathBuf::from(format!("pipe:[{}]", rustix::fs::fstat(descriptor).unwrap().st_ino))
}

/// No process has the writing end open any more: reading returns the end of the file.
#[track_caller]
pub fn expect_closed(reader: &OwnedFd) {
    let mut watched = [PollFd::new(reader, PollFlags::IN)];
    rustix::event::poll(&mut watched, Some(&Timespec::try_from(PATIENCE).unwrap())).unwrap();
    assert!(watched[0].revents().contains(PollFlags::HUP), "somebody still has the descriptor");
}

/// What engines wait at until a test lets them go.
pub struct Gate {
    path: PathBuf,
    file: File,
}

impl Gate {
    pub fn new(mounter: &Mounter, name: &str) -> Self {
        let path = mounter.beside(name);
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        // For reading, too, so that opening does not wait for the engine.
        let file = rustix::fs::open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).unwrap();
        Self { path, file: File::from(file) }
    }

    /// The request of an engine that serves until this gate is opened.
    pub fn served(&self) -> MountRequest {
        self.guard(scripted(SERVE))
    }

    pub fn guard(&self, mut request: MountRequest) -> MountRequest {
        request.env.push(format!("GATE={}", self.path.display()));
        request
    }

    /// Lets one engine go.
    pub fn open(&self) {
        (&self.file).write_all(b"\n").unwrap();
    }
}

pub fn scripted(script: &str) -> MountRequest {
    MountRequest {
        bucket_name: "bucket".to_owned(),
        args: Vec::new(),
        env: vec![format!("SCRIPT={script}")],
        ..MountRequest::default()
    }
}

/// Makes the directory of a source, as the node does before it sends a request.
pub fn for_source(mounter: &Mounter, request: MountRequest, name: &str) -> MountRequest {
    std::fs::create_dir_all(mounter.path(name)).unwrap();
    MountRequest { source: Some(name.to_owned()), ..request }
}

pub fn exited(code: i32, error: &str) -> Answer {
    Answer::Exited { code: Some(code), signal: None, error: error.to_owned() }
}

pub fn killed(signal: Signal) -> Answer {
    Answer::Exited { code: None, signal: Some(signal.as_raw()), error: String::new() }
}

pub fn send_signal(process: u32, signal: Signal) {
    rustix::process::kill_process(Pid::from_raw(process.cast_signed()).unwrap(), signal).unwrap();
}

/// What the descriptors of a process point to. Those of the mounter, which forbids inspection, are visible to root only.
pub fn open_files(process: u32) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(format!("/proc/{process}/fd")) else { return Vec::new() };
    entries.filter_map(|it| std::fs::read_link(it.ok()?.path()).ok()).collect()
}

/// How many descriptors besides the standard streams the parent of the tests leaves open in every process.
fn inherited() -> usize {
    const CLOSE_ON_EXEC: u32 = 0o2_000_000;
    let entries = std::fs::read_dir("/proc/self/fdinfo").unwrap().map(|it| it.unwrap());
    let is_inheritable = |path: PathBuf| {
        // It may have been closed meanwhile by another test.
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let flags = text.lines().find_map(|it| it.strip_prefix("flags:"));
        flags.is_some_and(|it| u32::from_str_radix(it.trim(), 8).unwrap() & CLOSE_ON_EXEC == 0)
    };
    let is_standard = |name: &str| ["0", "1", "2"].contains(&name);
    entries.filter(|it| !is_standard(it.file_name().to_str().unwrap()) && is_inheritable(it.path())).count()
}

pub fn is_listening(directory: &Path) -> bool {
    match handoff::connect(&directory.join(SOCKET), PATIENCE) {
        Ok(_) => true,
        Err(ConnectError::NotListening { .. }) => false,
        Err(error) => panic!("{error}"),
    }
}

/// Looks again and again until the condition holds.
#[track_caller]
pub fn eventually(condition: &str, mut is_true: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_true() {
        assert!(Instant::now() < deadline, "in vain waited until {condition}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
