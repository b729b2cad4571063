//! What ties programs and directories to this process, also when it is killed and nothing of it can clean up any more.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;
use std::sync::mpsc::{Sender, channel};
use std::thread;

use crate::process::command;

/// The same command with SIGKILL for it when the thread that starts it ends; see [`on_lasting_thread`].
pub(super) fn killed_with_thread(program: &Path) -> Command {
    let mut command = command(Path::new("setpriv"));
    command.args(["--pdeathsig", "KILL", "--"]).arg(program);
    command
}

/// The death signal is tied to a thread and not to a process. A control plane that several tests share must not end with the
/// first of them, so all are started by a thread that ends with the process.
pub(super) fn on_lasting_thread<Outcome: Send + 'static>(
    work: impl FnOnce() -> Outcome + Send + 'static,
) -> Option<Outcome> {
    static THREAD: LazyLock<Sender<Box<dyn FnOnce() + Send>>> = LazyLock::new(|| {
        let (sender, receiver) = channel::<Box<dyn FnOnce() + Send>>();
        thread::spawn(move || receiver.into_iter().for_each(|work| work()));
        sender
    });
    let (sender, receiver) = channel();
    let job = move || {
        let _ = sender.send(work());
    };
    THREAD.send(Box::new(job)).ok()?;
    receiver.recv().ok()
}

/// A temporary directory. A shell that waits for the end of a pipe removes it, whether this value is dropped or the whole
/// process is killed.
pub(super) struct ClusterDirectory {
    path: PathBuf,
    remover: Child,
}

/// Programs that were killed with us need a moment until they write nothing any more.
const REMOVER: &str = r#"
trap '' HUP INT TERM
cat >/dev/null
for try in $(seq 100); do
  rm -rf -- "$0" 2>/dev/null && exit
  sleep 0.1
done
"#;

impl ClusterDirectory {
    pub(super) fn new() -> io::Result<Self> {
        let path = tempfile::Builder::new().prefix("s3csi-kube-").rand_bytes(6).tempdir_in("/tmp")?.keep();
        let remover = command(Path::new("sh"))
            .args(["-c", REMOVER])
            .arg(&path)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        Ok(Self { path, remover })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for ClusterDirectory {
    fn drop(&mut self) {
        // Waiting closes the pipe first.
        let _ = self.remover.wait();
    }
}
