//! Moves a mount from the mounter that serves it to another one, while workloads use it.
//!
//! The other mounter starts an engine first; only then the first one lets go, as soon as no data is lost by that. Until then every
//! failure leaves the mount where it is.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use s3csi_core::Chain;
use s3csi_core::hold::{Event, Phase};
use s3csi_core::text::shortened;
use s3csi_handoff::{self as handoff, Answer, AnswerReader, ReadAnswerError, SendError, SourceCommand};

use super::engine_monitor::{self, EngineMonitor};
use super::error::MAX_ERROR_BYTES;
use super::failpoints::{Failpoint, Failpoints};
use super::held_mounts::{HeldMount, MounterAddress, ResumeMode};
use super::reporter::EngineEvent;
use crate::host::{SafeDir, SafeDirError};

/// An engine gives up its start after 30 seconds.
const PREPARE_TIMEOUT: Duration = Duration::from_mins(1);

/// The first mounter answers when its drain time is over, at the latest, and the second one gives up some time after its own.
const RELEASE_TIMEOUT: Duration = Duration::from_mins(15);

/// A mounter that has closed its connection is dead; its monitor notices it at the same time.
const DISCONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// How often the connections are looked at.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// For requests and commands, which are short.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);

/// The thread has small buffers only.
const STACK_BYTES: usize = 256 << 10;

/// One move. Credentials are in the directory of the second mounter already.
pub struct MountMove {
    /// Watches the second mounter from now on.
    pub monitor: EngineMonitor,
    pub held: Arc<HeldMount>,
    /// The name of the source in commands.
    pub source: &'static str,
    pub to: MounterAddress,
    pub failpoints: Failpoints,
    /// Called when the mount has moved, and when another attempt may be made.
    pub on_end: Box<dyn Fn() + Send>,
}

/// Why a mount was not moved.
#[derive(Debug, thiserror::Error)]
enum MoveError {
    #[error("no mounter listens in the new Mountpoint Pod")]
    Connect {
        #[source]
        cause: SafeDirError,
    },

    #[error("failed to send the mount to the new mounter")]
    Send {
        #[source]
        cause: SendError,
    },

    #[error("failed to wait for the new mounter")]
    Wait {
        #[source]
        cause: io::Error,
    },

    #[error("the new mounter did not prepare an engine: {error}")]
    NotPrepared { error: String },

    #[error("the old mounter did not release the mount: {error}")]
    NotReleased { error: String },

    #[error("the mount is gone")]
    Gone,
}

impl MountMove {
    /// Moves the mount on a thread of its own, which then watches the engine.
    pub fn spawn(self) -> io::Result<()> {
        let run = move || self.run();
        thread::Builder::new().name("mount-move".to_owned()).stack_size(STACK_BYTES).spawn(run).map(drop)
    }

    fn run(self) {
        let Self { mut monitor, held, source, to, failpoints, on_end } = self;
        let name = monitor.source.clone();
        let connected = to.directory.connect(handoff::SOCKET);
        let begin = || Some((held.directory().ok()?, to.directory.try_clone().ok()?, held.begin_move(to)?));
        let Some((from, directory, id)) = begin() else {
            held.end_move(false);
            return;
        };
        monitor.id = id;
        tracing::info!(source = name, "moving the mount to another mounter");
        let exchange = Exchange { monitor: &monitor, held: &held, source, from: &from, to: &directory, failpoints };
        let prepared = connected.map_err(|cause| MoveError::Connect { cause }).and_then(|it| exchange.run(it));
        // This thread lives as long as the mount. kubelet can unmount the directory of a Pod that has ended, and delete the Pod, only
        // when it is closed.
        drop(from);
        let (has_moved, taken_over) = match prepared {
            Ok(mut reader) => {
                let (has_moved, progress) = monitor.await_takeover(&mut reader);
                (has_moved, Some((reader, progress)))
            }
            Err(error) => {
                monitor.on(Event::MoveFailed);
                let cause = Chain(&error).to_string();
                tracing::warn!(source = name, error = cause, "mount not moved");
                if !monitor.is_current() {
                    monitor.report(EngineEvent::NotMoved { cause: shortened(&cause, MAX_ERROR_BYTES) });
                    // A prepared engine would wait for its turn.
                    engine_monitor::stop_engine(&directory, source, Instant::now() + SEND_TIMEOUT);
                }
                (false, None)
            }
        };
        drop(directory);
        if has_moved {
            failpoints.hit(Failpoint::MountMoved);
            tracing::info!(source = name, "mount moved to another mounter");
        }
        let pause = held.end_move(has_moved);
        match taken_over {
            Some((reader, progress)) if has_moved => {
                on_end();
                monitor.run_after_takeover(reader, progress);
            }
            // The mount was released, and the new mounter did not take it.
            _ if monitor.is_current() => monitor.run_unserved(),
            _ => {
                thread::sleep(pause);
                on_end();
            }
        }
    }
}

/// What is said to both mounters until the second one may take over.
struct Exchange<'a> {
    monitor: &'a EngineMonitor,
    held: &'a HeldMount,
    source: &'static str,
    from: &'a SafeDir,
    to: &'a SafeDir,
    failpoints: Failpoints,
}

impl Exchange<'_> {
    /// Returns the connection to the second mounter, which was told to take over.
    fn run(&self, connection: UnixStream) -> Result<AnswerReader, MoveError> {
        let sent = connection
            .set_write_timeout(Some(SEND_TIMEOUT))
            .map_err(|cause| SendError::Send { cause })
            .and_then(|()| self.held.send(&connection, ResumeMode::OnCommand));
        sent.map_err(|cause| MoveError::Send { cause })?;
        let mut reader = AnswerReader::new(connection);
        reader.set_timeout(Some(POLL_INTERVAL)).map_err(|cause| MoveError::Wait { cause })?;
        self.prepare(&mut reader)?;
        self.failpoints.hit(Failpoint::MovePrepared);
        self.release(&mut reader)?;
        self.failpoints.hit(Failpoint::MoveReleased);
        send_command(self.to, &SourceCommand::Go(self.source.to_owned())).map_err(|error| match error {
            CommandError::Connect(cause) => MoveError::Connect { cause },
            CommandError::Send(cause) => MoveError::Send { cause },
        })?;
        self.failpoints.hit(Failpoint::MoveTold);
        Ok(reader)
    }

    fn prepare(&self, reader: &mut AnswerReader) -> Result<(), MoveError> {
        let deadline = Instant::now() + PREPARE_TIMEOUT;
        loop {
            match poll(reader) {
                Polled::Answer(Answer::Prepared) => return Ok(()),
                Polled::Nothing if self.held.phase() == Phase::Closed => return Err(MoveError::Gone),
                Polled::Nothing if deadline <= Instant::now() => {
                    return Err(MoveError::NotPrepared { error: "it did not answer in time".to_owned() });
                }
                Polled::Nothing => {}
                Polled::Answer(answer) => not_prepared(answer)?,
                Polled::Disconnected => {
                    return Err(MoveError::NotPrepared { error: "it closed the connection".to_owned() });
                }
            }
        }
    }

    /// Returns when no engine of the first mounter serves the mount: it has said so, or it is dead.
    fn release(&self, prepared: &mut AnswerReader) -> Result<(), MoveError> {
        let not_released = |error: &str| MoveError::NotReleased { error: error.to_owned() };
        // A mounter that cannot be asked may be dying; its monitor knows.
        let mut released = send_command(self.from, &SourceCommand::Release(self.source.to_owned())).ok();
        let mut deadline = Instant::now() + if released.is_some() { RELEASE_TIMEOUT } else { DISCONNECT_TIMEOUT };
        loop {
            match self.held.phase() {
                Phase::Moving { .. } => return Ok(()),
                Phase::Preparing => {}
                _ => return Err(MoveError::Gone),
            }
            if deadline <= Instant::now() {
                return Err(not_released("it did not answer in time"));
            }
            match released.as_mut().map(poll) {
                Some(Polled::Answer(Answer::Released)) => {
                    self.monitor.on(Event::Released);
                }
                Some(Polled::Answer(Answer::Failed { error, .. })) => return Err(not_released(&error)),
                Some(Polled::Answer(_) | Polled::Nothing) => {}
                Some(Polled::Disconnected) => {
                    released = None;
                    deadline = deadline.min(Instant::now() + DISCONNECT_TIMEOUT);
                }
                None => thread::sleep(POLL_INTERVAL),
            }
            match poll(prepared) {
                Polled::Answer(answer) => not_prepared(answer)?,
                Polled::Disconnected => {
                    return Err(MoveError::NotPrepared { error: "it closed the connection".to_owned() });
                }
                Polled::Nothing => {}
            }
        }
    }
}

fn send_command(mounter: &SafeDir, command: &SourceCommand) -> Result<AnswerReader, CommandError> {
    let connection = mounter.connect(handoff::SOCKET).map_err(CommandError::Connect)?;
    let prepare = || {
        connection.set_write_timeout(Some(SEND_TIMEOUT))?;
        connection.set_read_timeout(Some(POLL_INTERVAL))
    };
    prepare().map_err(|cause| CommandError::Send(SendError::Send { cause }))?;
    handoff::send_command(&connection, command).map_err(CommandError::Send)?;
    Ok(AnswerReader::new(connection))
}

enum CommandError {
    Connect(SafeDirError),
    Send(SendError),
}

enum Polled {
    Answer(Answer),
    /// No answer yet.
    Nothing,
    Disconnected,
}

fn poll(reader: &mut AnswerReader) -> Polled {
    match reader.next_answer() {
        Ok(Some(received)) => Polled::Answer(received.answer),
        Err(ReadAnswerError::Read { cause }) if cause.kind() == io::ErrorKind::WouldBlock => Polled::Nothing,
        // Answers of a later version are not understood.
        Err(ReadAnswerError::Invalid(_)) => Polled::Nothing,
        Ok(None) | Err(ReadAnswerError::Read { .. } | ReadAnswerError::TooLong) => Polled::Disconnected,
    }
}

/// What a mounter that is to take over must not answer.
fn not_prepared(answer: Answer) -> Result<(), MoveError> {
    match answer {
        Answer::Failed { error, .. } | Answer::Exited { error, .. } => Err(MoveError::NotPrepared { error }),
        Answer::Ready
        | Answer::Resumed { .. }
        | Answer::Replaced { .. }
        | Answer::Held { .. }
        | Answer::Prepared
        | Answer::Released => Ok(()),
    }
}
