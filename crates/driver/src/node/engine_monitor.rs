//! Reads the hand-over connection of a source for as long as its engine runs: how the start went, and how the engine ended.
//! When the mounter dies, waits for another one and lets it resume the mount.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use s3csi_core::Chain;
use s3csi_core::hold::{Action, Event, Observation, Phase};
use s3csi_core::text::shortened;
use s3csi_handoff::{
    self as handoff, Answer, AnswerReader, MountRequest, ReadAnswerError, ReceivedAnswer, SourceCommand,
};

use super::error::MAX_ERROR_BYTES;
use super::held_mounts::{HeldMount, HeldMounts, MonitorId, ResumeMode};
use super::reporter::{EngineEvent, Reporter};
use crate::host::{Host, SafeDir};

/// The mounter gives an engine five seconds to end with its mount before it kills it.
const STOP_TIMEOUT: Duration = Duration::from_secs(8);

/// Enough to send the request when there is no time to wait for the answer: the mounter then stops the engine anyway.
const SHORTEST_STOP_TIMEOUT: Duration = Duration::from_millis(100);

/// A mounter answers a `hold` command at once.
const HOLD_TIMEOUT: Duration = Duration::from_secs(2);

/// A mounter sends a handful of answers. One that sends more is ignored from then on.
const MOST_ANSWERS: usize = 10_000;

/// How often a mount without a mounter is looked at.
const OBSERVE_INTERVAL: Duration = Duration::from_millis(100);

/// How long after a failed attempt the next one starts.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// An engine gives up its start after 30 seconds. A mounter that serves and has not sent the state until then does not send it.
const HELD_TIMEOUT: Duration = Duration::from_mins(1);

/// How long a mounter that is to resume a mount may take to receive the request.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);

/// The thread has small buffers only.
const STACK_BYTES: usize = 256 << 10;

/// What arrived on the connection.
#[derive(Debug)]
pub enum MonitorEvent {
    Answered(Answer),
    /// The mounter closed the connection.
    Disconnected,
}

/// Watches the engine of one source.
pub struct EngineMonitor {
    pub source: String,
    /// Where the source is mounted.
    pub path: PathBuf,
    pub host: Arc<dyn Host>,
    pub reporter: Arc<Reporter>,
    pub held_mounts: HeldMounts,
    /// The copies of the mount's descriptors. Without them the mount ends with its mounter.
    pub held: Option<Arc<HeldMount>>,
    pub id: MonitorId,
}

/// What is known of the engine from its answers.
pub struct MonitorProgress {
    begun: Instant,
    is_serving: bool,
    /// The mounter has resumed the mount, or served it from the start.
    has_served: bool,
    answers: usize,
}

impl EngineMonitor {
    /// Reads answers on a thread of its own until the engine has ended for good. `events` gets all of them while the publish
    /// call waits; deaths and replacements of the engine are logged and reported.
    pub fn spawn<E: Send + 'static>(
        self,
        connection: UnixStream,
        events: mpsc::Sender<E>,
        wrap: impl Fn(MonitorEvent) -> E + Send + 'static,
    ) -> io::Result<()> {
        let reader = AnswerReader::new(connection);
        let progress = MonitorProgress { begun: Instant::now(), is_serving: false, has_served: true, answers: 0 };
        // The receiver is gone once the publish call has ended.
        let mut emit = move |event| drop(events.send(wrap(event)));
        let run = move || self.run(reader, progress, &mut emit);
        thread::Builder::new().name("engine-monitor".to_owned()).stack_size(STACK_BYTES).spawn(run).map(drop)
    }

    /// Watches an engine that already serves, after this plugin was restarted.
    pub fn spawn_for_served(self, reader: AnswerReader) -> io::Result<()> {
        let progress = MonitorProgress { begun: Instant::now(), is_serving: true, has_served: true, answers: 0 };
        let run = move || self.run(reader, progress, &mut |_| {});
        thread::Builder::new().name("engine-monitor".to_owned()).stack_size(STACK_BYTES).spawn(run).map(drop)
    }

    /// Reads until another mounter has taken over, or does not. Returns whether it has.
    pub fn await_takeover(&self, reader: &mut AnswerReader) -> (bool, MonitorProgress) {
        let mut progress = MonitorProgress { begun: Instant::now(), is_serving: true, has_served: false, answers: 0 };
        while let Some(Phase::Moving { .. }) = self.phase() {
            if !self.read_answer(reader, &mut progress, &mut |_| {}) {
                self.on(Event::Disconnected);
            }
        }
        (self.phase() == Some(Phase::Served), progress)
    }

    /// Watches a mounter that has taken over from another one.
    pub fn run_after_takeover(self, reader: AnswerReader, progress: MonitorProgress) {
        self.run(reader, progress, &mut |_| {});
    }

    /// Waits for a mounter after the one that was to take over did not, and watches it.
    pub fn run_unserved(self) {
        let progress = MonitorProgress { begun: Instant::now(), is_serving: true, has_served: false, answers: 0 };
        let Some(connection) = self.wait_for_mounter(Instant::now() + RETRY_INTERVAL) else {
            return self.end(&progress);
        };
        self.run(AnswerReader::new(connection), progress, &mut |_| {});
    }

    fn run(self, mut reader: AnswerReader, mut progress: MonitorProgress, emit: &mut dyn FnMut(MonitorEvent)) {
        loop {
            self.read_answers(&mut reader, &mut progress, emit);
            if MOST_ANSWERS <= progress.answers {
                reader.shut_down();
            }
            self.on(Event::Disconnected);
            if !self.is_current() {
                tracing::debug!(source = self.source, "another mounter serves the mount");
                return;
            }
            emit(MonitorEvent::Disconnected);
            if let Some(Phase::Unserved { .. }) = self.phase() {
                let limit = self.held_mounts.longest_outage();
                tracing::warn!(
                    source = self.source,
                    ?limit,
                    "mounter disconnected, waiting for one that resumes the mount"
                );
            }
            // A mounter that fails at once must not be asked in a tight loop.
            let pause = if progress.has_served { Duration::ZERO } else { RETRY_INTERVAL };
            let Some(connection) = self.wait_for_mounter(Instant::now() + pause) else { break };
            reader = AnswerReader::new(connection);
            progress.has_served = false;
        }
        self.end(&progress);
    }

    fn end(&self, progress: &MonitorProgress) {
        if progress.is_serving {
            tracing::warn!(source = self.source, "mounter disconnected, its engine is gone");
            self.report(EngineEvent::Died { error: "its mounter ended".to_owned() });
        }
        if let Some(held) = &self.held {
            self.held_mounts.forget(&self.path, held);
        }
    }

    /// Reads until the connection ends, or nothing is to be expected from it any more.
    fn read_answers(
        &self,
        reader: &mut AnswerReader,
        progress: &mut MonitorProgress,
        emit: &mut dyn FnMut(MonitorEvent),
    ) {
        while progress.answers < MOST_ANSWERS && self.is_current() {
            if !self.read_answer(reader, progress, emit) {
                return;
            }
        }
    }

    /// Reads one answer, or waits for a while. Returns whether more is to be expected.
    fn read_answer(
        &self,
        reader: &mut AnswerReader,
        progress: &mut MonitorProgress,
        emit: &mut dyn FnMut(MonitorEvent),
    ) -> bool {
        // Only while something is waited for with a deadline.
        let timeout = match self.phase() {
            Some(Phase::Starting | Phase::Resuming { .. } | Phase::Moving { .. }) => Some(OBSERVE_INTERVAL),
            Some(Phase::Served | Phase::Preparing | Phase::Unserved { .. } | Phase::Closed) | None => None,
        };
        if reader.set_timeout(timeout).is_err() {
            return false;
        }
        match reader.next_answer() {
            Ok(Some(ReceivedAnswer { answer, descriptors })) => {
                progress.answers += 1;
                self.observe(&answer, descriptors, progress);
                emit(MonitorEvent::Answered(answer));
                true
            }
            Err(ReadAnswerError::Read { cause }) if cause.kind() == io::ErrorKind::WouldBlock => {
                if progress.begun.elapsed() >= HELD_TIMEOUT && self.phase() == Some(Phase::Starting) {
                    self.on(Event::NotHeld);
                }
                let seen = self.held.as_ref().map(|it| it.observe());
                seen.is_none_or(|it| self.on(Event::Observed(it)) == Action::Nothing)
            }
            // Answers of a later version are not understood.
            Err(ReadAnswerError::Invalid(_)) => {
                progress.answers += 1;
                true
            }
            Ok(None) | Err(ReadAnswerError::Read { .. } | ReadAnswerError::TooLong) => false,
        }
    }

    /// Waits until a mounter has received the descriptors. `None` if the mount is not held any longer.
    fn wait_for_mounter(&self, mut not_before: Instant) -> Option<UnixStream> {
        let held = self.held.as_ref()?;
        while let Phase::Unserved { .. } = held.phase() {
            let seen = held.observe();
            let may_connect = seen.is_connected && !seen.has_engine && not_before <= Instant::now();
            let connection = may_connect.then(|| held.connect()).flatten();
            match self.on(Event::Observed(Observation { has_mounter: connection.is_some(), ..seen })) {
                Action::Nothing => thread::sleep(OBSERVE_INTERVAL),
                Action::Close => return None,
                Action::AbortAndClose => {
                    tracing::warn!(source = self.source, "no mounter resumed the mount in time, connection aborted");
                    return None;
                }
                Action::Resume => {
                    let connection = connection?;
                    match send(held, &connection) {
                        Ok(()) => return Some(connection),
                        Err(error) => {
                            tracing::warn!(source = self.source, error = %Chain(&error), "descriptors not sent to the mounter");
                            self.on(Event::ResumeFailed);
                            not_before = Instant::now() + RETRY_INTERVAL;
                        }
                    }
                }
            }
        }
        None
    }

    /// Handles one answer of the mounter.
    fn observe(&self, answer: &Answer, descriptors: Vec<OwnedFd>, progress: &mut MonitorProgress) {
        let source = &self.source;
        match answer {
            Answer::Ready => {
                progress.is_serving = true;
                if self.phase() == Some(Phase::Starting) {
                    // Our mounter sends `held` before.
                    self.on(Event::NotHeld);
                }
            }
            Answer::Held { .. } => self.keep_state(descriptors),
            Answer::Resumed { cause, stall_milliseconds } => {
                // The new mounter does not know how long there was none.
                let outage = self.held.as_ref().and_then(|it| it.outage());
                let stall = outage.unwrap_or(Duration::from_millis(*stall_milliseconds));
                tracing::warn!(source, cause, ?stall, "engine died, a new engine resumed its mount");
                progress.has_served = true;
                self.on(Event::Resumed);
                self.report(EngineEvent::Resumed { cause: shortened(cause, MAX_ERROR_BYTES), stall });
            }
            Answer::Replaced { reason, stall_milliseconds } => {
                // The new mounter does not know when the old one stopped serving.
                let outage = self.held.as_ref().and_then(|it| it.outage());
                let stall = outage.unwrap_or(Duration::from_millis(*stall_milliseconds));
                tracing::info!(source, reason, ?stall, "engine replaced on the same mount");
                progress.has_served = true;
                self.on(Event::Resumed);
                self.report(EngineEvent::Replaced { reason: shortened(reason, MAX_ERROR_BYTES), stall });
            }
            Answer::Exited { code: Some(0), .. } => {
                tracing::debug!(source, "engine ended");
                progress.is_serving = false;
                self.on(Event::Exited);
            }
            Answer::Exited { code, signal, error } => {
                let was_resuming = matches!(self.phase(), Some(Phase::Resuming { .. } | Phase::Moving { .. }));
                self.on(Event::GivenUp);
                if progress.is_serving && !was_resuming {
                    tracing::warn!(
                        source,
                        code,
                        signal,
                        error,
                        "engine died; the next publish of its volumes mounts it again"
                    );
                    progress.is_serving = false;
                    self.report(EngineEvent::Died { error: shortened(error, MAX_ERROR_BYTES) });
                }
            }
            Answer::Failed { error, .. } => {
                if let Some(Phase::Resuming { .. } | Phase::Moving { .. }) = self.phase() {
                    tracing::warn!(source, error, "mounter did not resume the mount");
                    self.on(Event::ResumeFailed);
                } else {
                    self.on(Event::Exited);
                }
            }
            // Another mounter is to continue the mount.
            Answer::Released => drop(self.on(Event::Released)),
            Answer::Prepared => {}
        }
    }

    fn keep_state(&self, descriptors: Vec<OwnedFd>) {
        let Some(held) = &self.held else { return };
        match held.keep_state(descriptors) {
            Ok(()) => drop(self.on(Event::Held)),
            Err(error) => {
                tracing::warn!(source = self.source, error = %Chain(&error), "failed to hold the mount");
                self.on(Event::NotHeld);
            }
        }
    }

    pub fn phase(&self) -> Option<Phase> {
        self.held.as_ref().map(|it| it.phase())
    }

    pub fn on(&self, event: Event) -> Action {
        self.held.as_ref().map_or(Action::Nothing, |it| it.on(self.id, event, self.host.as_ref()))
    }

    /// Whether the mount is served by the mounter that this monitor watches.
    pub fn is_current(&self) -> bool {
        self.held.as_ref().is_none_or(|it| it.is_monitored_by(self.id))
    }

    pub fn report(&self, event: EngineEvent) {
        self.reporter.engine_event(&self.source, event);
    }
}

fn send(held: &HeldMount, connection: &UnixStream) -> Result<(), handoff::SendError> {
    connection.set_write_timeout(Some(SEND_TIMEOUT)).map_err(|cause| handoff::SendError::Send { cause })?;
    held.send(connection, ResumeMode::Immediate)
}

/// Copies of the descriptors of a mount, from the mounter that serves it.
pub struct SentDescriptors {
    pub descriptors: Vec<OwnedFd>,
    /// How the mount is resumed.
    pub request: MountRequest,
    /// Further answers of the mounter.
    pub reader: AnswerReader,
}

/// What a mounter has of a source.
pub enum ServedSource {
    Served(SentDescriptors),
    /// An engine waits for the command to take over from another mounter.
    Prepared,
}

/// Requests copies of the descriptors. `None` if the mounter does not serve the source.
pub fn request_descriptors(mounter: &SafeDir, source: &str) -> Option<ServedSource> {
    let mut reader = send_command(mounter, &SourceCommand::Hold(source.to_owned()))?;
    match reader.next_answer().ok()?? {
        ReceivedAnswer { answer: Answer::Held { request: Some(request) }, descriptors } => {
            Some(ServedSource::Served(SentDescriptors { descriptors, request, reader }))
        }
        ReceivedAnswer { answer: Answer::Prepared, .. } => Some(ServedSource::Prepared),
        _ => None,
    }
}

/// Lets a prepared engine take over, after a restart of this plugin in the middle of a move.
pub fn tell_to_take_over(mounter: &SafeDir, source: &str) {
    tracing::info!(mounter = ?mounter.path(), "a move was interrupted, the prepared engine takes over");
    drop(send_command(mounter, &SourceCommand::Go(source.to_owned())));
}

fn send_command(mounter: &SafeDir, command: &SourceCommand) -> Option<AnswerReader> {
    let connection = mounter.connect(s3csi_handoff::SOCKET).ok()?;
    connection.set_write_timeout(Some(HOLD_TIMEOUT)).ok()?;
    handoff::send_command(&connection, command).ok()?;
    let reader = AnswerReader::new(connection);
    reader.set_timeout(Some(HOLD_TIMEOUT)).ok()?;
    Some(reader)
}

/// Stops the engine of a source whose mount is gone. A mounter that cannot be reached has no engines.
pub fn stop_engine(mounter: &SafeDir, source: &str, deadline: Instant) {
    let left = deadline.saturating_duration_since(Instant::now()).clamp(SHORTEST_STOP_TIMEOUT, STOP_TIMEOUT);
    let Ok(connection) = mounter.connect(s3csi_handoff::SOCKET) else { return };
    let is_sent = connection.set_read_timeout(Some(left)).is_ok()
        && connection.set_write_timeout(Some(left)).is_ok()
        && handoff::send_command(&connection, &SourceCommand::Stop(source.to_owned())).is_ok();
    if !is_sent || !matches!(AnswerReader::new(connection).next_answer(), Ok(Some(_))) {
        tracing::warn!(source, "mounter did not confirm that the engine has ended");
    }
}
