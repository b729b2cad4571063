//! Background mode: this process starts itself once more, waits until the mount works and ends; the other one serves.
//!
//! Not a fork: the S3 client library has threads by the time anything can fail. The child reports on its standard output, where
//! a foreground engine reports, too, and shares our standard error until then.

use std::io::{self, BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;
use std::{env, thread};

use rustix::process::{Pid, Signal, kill_process};

use crate::cli::BACKGROUND_CHILD;

/// As long as AWS's mount-s3 waits; units and scripts count on it.
const DEADLINE: Duration = Duration::from_secs(30);

#[derive(Debug, thiserror::Error)]
pub enum BackgroundError {
    #[error("cannot start the process that serves the mount")]
    Start {
        #[source]
        cause: io::Error,
    },

    /// It has said why on the standard error, which is ours, too; unless it was killed.
    #[error("the process that serves the mount ended")]
    ChildFailed,

    #[error("the process that serves the mount was ended by a signal ({status})")]
    ChildKilled { status: ExitStatus },

    #[error("the mount was not ready within {} seconds", DEADLINE.as_secs())]
    Timeout,

    #[error("cannot wait for the process that serves the mount")]
    Lost {
        #[source]
        cause: io::Error,
    },
}

/// Starts the process that serves; returns the line that it says when the mount works.
pub fn start() -> Result<String, BackgroundError> {
    // The real path, so that the process is called mount-s3 in `ps`; the link, if the program was replaced meanwhile.
    let program = env::current_exe().ok().filter(|it| it.exists()).unwrap_or_else(|| "/proc/self/exe".into());
    let mut words = env::args_os();
    let mut child = Command::new(program)
        .arg0(words.next().unwrap_or_else(|| "mount-s3".into()))
        .args(words)
        .env(BACKGROUND_CHILD, "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        // A Ctrl-C in the terminal is not meant for the mount.
        .process_group(0)
        .spawn()
        .map_err(|cause| BackgroundError::Start { cause })?;

    let (sender, reported) = channel();
    if let Some(output) = child.stdout.take() {
        thread::spawn(move || {
            let mut line = String::new();
            let read = BufReader::new(output).read_line(&mut line);
            // The receiver gives up only at the deadline.
            let _ = sender.send(read.ok().filter(|it| *it > 0).map(|_| line));
        });
    }
    match reported.recv_timeout(DEADLINE) {
        Ok(Some(line)) => Ok(line.trim_end().to_owned()),
        Ok(None) | Err(RecvTimeoutError::Disconnected) => {
            let status = child.wait().map_err(|cause| BackgroundError::Lost { cause })?;
            Err(if status.code().is_some() {
                BackgroundError::ChildFailed
            } else {
                BackgroundError::ChildKilled { status }
            })
        }
        Err(RecvTimeoutError::Timeout) => {
            terminate(&child);
            Err(BackgroundError::Timeout)
        }
    }
}

/// Detaches the standard streams once the mount is ready.
pub fn detach_streams() -> io::Result<()> {
    let nowhere = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdout(&nowhere)?;
    rustix::stdio::dup2_stderr(&nowhere)?;
    Ok(())
}

fn terminate(child: &Child) {
    if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        // It may have ended meanwhile.
        let _ = kill_process(pid, Signal::TERM);
    }
}
