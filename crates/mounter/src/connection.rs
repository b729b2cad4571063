//! Handles one connection from its request to the exit of its engine: answers, and writes the error file.

use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::{Duration, Instant};

use s3csi_core::Chain;
use s3csi_handoff::{
    self as handoff, Answer, ERROR_FILE, EXIT_FILE, EngineFailure, InvalidSourceName, MountRequest, ReceiveLimits,
    ReceivedMount, Request, SourceName, send_answer,
};
use s3csi_supervisor::{
    self as supervisor, CaBundle, EngineDirectories, EngineExit, InvalidRequest, Launch, MountDescriptors,
    MountResources, MountSpec, Outcome, StartError, Stream, SupervisorConfig, SupervisorHandle, TakeoverTrigger, log,
    shorten,
};

use crate::cache::{CacheDirectory, CacheError, Caches};
use crate::commands;
use crate::directory::Directory;
use crate::registry::{ConnectionGuard, EngineEntry, EngineRegistration, EngineRegistry, Rejected};
use crate::stage::{SourceStage, StageError, Stages};
use crate::subscribers::Subscribers;

/// Shared by all connections.
#[derive(Debug)]
pub struct Context {
    pub directory: Arc<Directory>,
    pub engine: PathBuf,
    pub caches: Caches,
    /// Where engines stage large files, if not in a directory that they make themselves.
    pub stages: Option<Stages>,
    /// The CA bundle of engines, if not that of the system.
    pub ca_bundle: Option<CaBundle>,
    pub registry: Arc<EngineRegistry>,
    pub receive_timeout: Duration,
    pub mode: Mode,
    pub supervisor: Option<SupervisorConfig>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// In a Mountpoint Pod: the mounter exits with its engine if the node plugin has requested it by `mount.exit`.
    OneSource,
    /// Serves all sources of a node as they come and go.
    ManySources,
}

/// Why no engine was started.
#[derive(Debug, thiserror::Error)]
enum RunError {
    #[error(transparent)]
    Source(InvalidSourceName),

    #[error(transparent)]
    Rejected(Rejected),

    #[error("failed to create the control of the engine")]
    Handle {
        #[source]
        cause: io::Error,
    },

    #[error("the directory of source {name} cannot be opened in {directory:?}")]
    Directory {
        name: String,
        directory: PathBuf,
        #[source]
        cause: io::Error,
    },

    #[error(transparent)]
    Request(InvalidRequest),

    #[error(transparent)]
    Cache(CacheError),

    #[error(transparent)]
    Stage(StageError),

    #[error(transparent)]
    Start(StartError),
}

/// A source that is served, and the directory of its files.
struct Source {
    registration: EngineRegistration,
    directory: Directory,
}

/// The end of a mount, and what its engines had on disk.
struct EndedMount {
    source: Source,
    outcome: Outcome,
    cache: Option<CacheDirectory>,
    stage: Option<SourceStage>,
}

/// Handles one connection until its last answer.
pub fn handle(context: &Context, stream: UnixStream, mut guard: ConnectionGuard) {
    let limits = ReceiveLimits::until(Instant::now() + context.receive_timeout);
    match handoff::receive(&stream, limits) {
        Ok(Request::Mount(mount)) => {
            guard.end_handshake();
            run(context, stream, mount);
        }
        // Counts as a handshake while it waits, which bounds their number.
        Ok(Request::Command(command)) => commands::execute(context, stream, &command),
        Err(error) => {
            log::warn("invalid mount request", &[("error", &Chain(&error))]);
            send_answer(&stream, &failed(&Chain(&error).to_string()), &[]);
        }
    }
}

fn run(context: &Context, stream: UnixStream, mount: ReceivedMount) {
    let ReceivedMount { request, fuse, state } = mount;
    let bucket = request.bucket_name.clone();
    let label = request.source.clone().unwrap_or_default();
    log::info("mount request received", &[("source", &label), ("request", &format_args!("{request:?}"))]);

    let takeover = if request.wait { TakeoverTrigger::OnRequest } else { TakeoverTrigger::Immediate };
    let is_resumed = state.is_some();
    let descriptors = match state {
        None => MountDescriptors::New { fuse },
        Some(state) => MountDescriptors::Resumed { resources: MountResources { fuse, state }, takeover },
    };
    let reply = stream.try_clone();
    // When this returns, a rejected descriptor is closed and its registration removed: the node plugin may retry at once.
    let served = register(context, stream, request).and_then(|source| serve(context, source, descriptors));
    let EndedMount { source, outcome, cache, stage } = match served {
        Ok(served) => served,
        Err(error) => {
            log::warn("engine not started", &[("source", &label), ("bucket", &bucket), ("error", &Chain(&error))]);
            if let Ok(stream) = reply {
                send_answer(&stream, &failed(&Chain(&error).to_string()), &[]);
            }
            return;
        }
    };
    let last_answer = final_answer(outcome);
    log::info(
        "engine exited",
        &[("source", &label), ("bucket", &bucket), ("answer", &last_answer.to_line().trim_end())],
    );

    let has_failed = matches!(last_answer, Answer::Failed { .. });
    if let Answer::Failed { error, .. } = &last_answer {
        source.write_error(error);
    }
    // The node plugin tries again to resume the mount, which then needs its staged files.
    if let Some(stage) = stage.filter(|_| !(is_resumed && has_failed)) {
        stage.remove();
    }
    let engine = Arc::clone(source.registration.engine());
    source.remove(context.mode);
    // Last: the node plugin may send the next request for this source as soon as it has read this.
    engine.subscribers.report(&last_answer, &[]);
    drop(cache);
}

fn register(context: &Context, stream: UnixStream, request: MountRequest) -> Result<Source, RunError> {
    let name: Option<SourceName> = request.source.as_deref().map(str::parse).transpose().map_err(RunError::Source)?;
    if context.mode == Mode::OneSource
        && let Some(previous) = context.registry.find(name.as_ref())
    {
        // The node plugin sends a request only when nothing is mounted: the previous engine has not noticed that yet.
        let _ = commands::end(context, &previous);
    }
    let handle = SupervisorHandle::new().map_err(|cause| RunError::Handle { cause })?;
    let engine = EngineEntry { handle, subscribers: Subscribers::new(stream), request };
    let registration = context.registry.register(name, engine).map_err(RunError::Rejected)?;
    let directory = context.directory.of(registration.source()).map_err(|cause| RunError::Directory {
        name: registration.label().to_owned(),
        directory: context.directory.path().to_owned(),
        cause,
    })?;
    let source = Source { registration, directory };
    // The error of an earlier engine must not be taken for one of this engine.
    if let Err(cause) = source.directory.remove(ERROR_FILE) {
        let directory = source.directory.path().display();
        log::warn("old error file not removed", &[("directory", &directory), ("error", &cause)]);
    }
    Ok(source)
}

/// Serves the mount until it ends.
fn serve(context: &Context, source: Source, descriptors: MountDescriptors) -> Result<EndedMount, RunError> {
    let serve = || {
        let EngineEntry { handle, subscribers, request } = &**source.registration.engine();
        let launch = Launch::try_from(request.clone()).map_err(RunError::Request)?;
        let launch = launch.with_ca_bundle(context.ca_bundle.as_ref());
        let cache = launch.wants_cache().then(|| context.caches.create()).transpose().map_err(RunError::Cache)?;
        let stage = context.stages.as_ref().map(|it| it.create(source.registration.source())).transpose();
        let stage = stage.map_err(RunError::Stage)?;
        let spec = MountSpec {
            program: &context.engine,
            launch: &launch,
            directories: EngineDirectories {
                cache: cache.as_ref().map(CacheDirectory::path),
                stage: stage.as_ref().map(SourceStage::spec),
            },
            label: source.registration.label(),
            handle,
            config: context.supervisor,
            is_held: request.hold,
            resume_cause: "the mounter was restarted",
        };
        let mut report = |event: &Answer| match (event, handle.resources()) {
            (Answer::Held { .. }, Some(resources)) => subscribers.report(event, &[resources.state.as_fd()]),
            _ => subscribers.report(event, &[]),
        };
        let mut relay = |stream: Stream, line: &[u8]| relay(stream, source.registration.source(), line);
        let outcome = supervisor::run(&spec, descriptors, &mut report, &mut relay).map_err(RunError::Start)?;
        Ok((outcome, cache, stage))
    };
    match serve() {
        Ok((outcome, cache, stage)) => Ok(EndedMount { source, outcome, cache, stage }),
        Err(error) => {
            source.write_error(&Chain(&error).to_string());
            Err(error)
        }
    }
}

impl Source {
    /// Older node plugins do not read answers but this file.
    fn write_error(&self, error: &str) {
        if let Err(cause) = self.directory.write(ERROR_FILE, shorten(error).as_bytes()) {
            let directory = self.directory.path().display();
            log::warn("error file not written", &[("directory", &directory), ("error", &cause)]);
        }
    }

    fn remove(self, mode: Mode) {
        match mode {
            Mode::OneSource if self.directory.has(EXIT_FILE) => self.registration.shut_down(),
            Mode::OneSource | Mode::ManySources => drop(self.registration),
        }
    }
}

/// The last answer about an engine.
fn final_answer(outcome: Outcome) -> Answer {
    let Outcome { exit: EngineExit { status, stderr }, was_ready, is_released } = outcome;
    if is_released {
        return Answer::Released;
    }
    let status = match status {
        Ok(status) => status,
        Err(cause) => {
            log::warn("exit status of the engine unknown", &[("error", &cause)]);
            return Answer::Exited { code: None, signal: None, error: stderr };
        }
    };
    if was_ready || status.success() {
        let error = EngineFailure::from_error_output(&stderr).message;
        return Answer::Exited { code: status.code(), signal: status.signal(), error };
    }
    if stderr.is_empty() {
        return failed(&silent_exit(status));
    }
    let EngineFailure { code, message } = EngineFailure::from_error_output(&stderr);
    Answer::Failed { error: shorten(&message), code: Some(code) }
}

fn silent_exit(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => {
            format!("the engine exited with code {code} before it served the mount, without an error message")
        }
        (None, Some(signal)) => format!("the engine was killed by signal {signal} before it served the mount"),
        (None, None) => "the engine exited before it served the mount".to_owned(),
    }
}

pub fn failed(error: &str) -> Answer {
    Answer::Failed { error: shorten(error), code: None }
}

/// Writes a line of an engine to our own output, marked with its source if there are several.
fn relay(stream: Stream, source: Option<&SourceName>, line: &[u8]) {
    let mut marked = Vec::with_capacity(line.len() + 64);
    if let Some(source) = source {
        marked.extend_from_slice(format!("[{source}] ").as_bytes());
    }
    marked.extend_from_slice(line);
    marked.push(b'\n');
    // A closed stream must not end the engine.
    let _ = match stream {
        Stream::Stdout => io::Write::write_all(&mut io::stdout().lock(), &marked),
        Stream::Stderr => io::Write::write_all(&mut io::stderr().lock(), &marked),
    };
}

#[cfg(test)]
mod tests {
    use s3csi_core::FailureCode;

    use super::*;

    const CODE_1: i32 = 1 << 8;
    const KILLED: i32 = 9;

    #[test]
    fn an_engine_that_never_served_has_failed() {
        let not_found = |error: &str| Answer::Failed { error: error.into(), code: Some(FailureCode::NoSuchBucket) };
        check(CODE_1, "NoSuchBucket", false, &not_found("NoSuchBucket"));
        let line = r#"{"code":"no-such-bucket","message":"gone"}"#;
        check(CODE_1, &format!("a warning\n{line}"), false, &not_found("gone"));
        check(CODE_1, line, true, &exited(Some(1), None, "gone"));
        let silent = "the engine exited with code 1 before it served the mount, without an error message";
        check(CODE_1, "", false, &failed(silent));
        check(KILLED, "", false, &failed("the engine was killed by signal 9 before it served the mount"));
    }

    #[test]
    fn an_engine_that_served_or_succeeded_has_exited() {
        check(0, "", false, &exited(Some(0), None, ""));
        check(0, "bye", true, &exited(Some(0), None, "bye"));
        check(CODE_1, "oh", true, &exited(Some(1), None, "oh"));
        check(KILLED, "", true, &exited(None, Some(9), ""));
    }

    #[track_caller]
    fn check(status: i32, stderr: &str, was_ready: bool, expected: &Answer) {
        let exit = EngineExit { status: Ok(ExitStatus::from_raw(status)), stderr: stderr.to_owned() };
        let outcome = Outcome { exit, was_ready, is_released: false };
        assert_eq!(&final_answer(outcome), expected);
    }

    fn exited(code: Option<i32>, signal: Option<i32>, error: &str) -> Answer {
        Answer::Exited { code, signal, error: error.to_owned() }
    }

    #[test]
    fn no_answer_is_longer_than_announced() {
        let worst = failed(&"\u{1}".repeat(handoff::MAX_ANSWER_BYTES));
        assert!(worst.to_line().len() <= handoff::MAX_ANSWER_BYTES);
        let worst = failed(&"\"".repeat(handoff::MAX_ANSWER_BYTES));
        assert!(worst.to_line().len() <= handoff::MAX_ANSWER_BYTES);
    }
}
