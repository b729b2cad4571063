//! Executes commands for a source that is served: stop, release, go, hold.

use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::process::Signal;
use s3csi_core::Chain;
use s3csi_handoff::{Answer, InvalidSourceName, MAX_ANSWER_BYTES, SourceCommand, SourceName, send_answer};
use s3csi_supervisor::log;

use crate::connection::{Context, failed};
use crate::registry::EngineId;

/// How an engine ended whose mount is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Exited,
    Killed,
    StillRunning,
}

/// A healthy engine exits within milliseconds when its mount is gone.
const EXIT_TIME: Duration = Duration::from_secs(5);

/// Only a process in uninterruptible sleep outlives this.
const KILL_TIME: Duration = Duration::from_secs(2);

pub fn execute(context: &Context, stream: UnixStream, command: &SourceCommand) {
    let answer = match command {
        SourceCommand::Stop(name) => stop(context, name),
        SourceCommand::Release(name) => release(context, name),
        SourceCommand::Go(name) => match find(context, name) {
            Some(entry) => {
                context.registry.entry(&entry).into_iter().for_each(|it| it.handle.go());
                return;
            }
            None => not_served(name),
        },
        SourceCommand::Hold(name) => match hold(context, name, stream) {
            Ok(()) => return,
            Err((stream, answer)) => {
                send_answer(&stream, &answer, &[]);
                return;
            }
        },
    };
    send_answer(&stream, &answer, &[]);
}

/// Ends the engine of a source whose mount is gone. A healthy engine exits with its mount; a frozen one cannot.
fn stop(context: &Context, name: &str) -> Answer {
    let source = match parse(name) {
        Ok(source) => source,
        Err(error) => return failed(&Chain(&error).to_string()),
    };
    let exited = |signal: Option<Signal>| Answer::Exited {
        code: signal.is_none().then_some(0),
        signal: signal.map(Signal::as_raw),
        error: String::new(),
    };
    let Some(engine) = context.registry.find(source.as_ref()) else { return exited(None) };
    match end(context, &engine) {
        End::Exited => exited(None),
        End::Killed => exited(Some(Signal::KILL)),
        End::StillRunning => failed(&format!("the engine of source {name} could not be killed")),
    }
}

pub fn end(context: &Context, engine: &EngineId) -> End {
    if context.registry.wait_until_removed(engine, EXIT_TIME) {
        return End::Exited;
    }
    log::warn("killing engine that did not exit with its mount", &[("source", &engine.label())]);
    context.registry.kill(engine);
    if context.registry.wait_until_removed(engine, KILL_TIME) { End::Killed } else { End::StillRunning }
}

/// Lets another mounter continue the mount.
fn release(context: &Context, name: &str) -> Answer {
    // Without an engine there is nothing to wait for.
    let Some(engine) = find(context, name) else { return Answer::Released };
    let Some(entry) = context.registry.entry(&engine) else { return Answer::Released };
    log::info("release requested", &[("source", &engine.label())]);
    entry.handle.release();
    let time = context.supervisor.map_or(EXIT_TIME, |it| it.drain_time);
    if context.registry.wait_until_removed(&engine, time) {
        return Answer::Released;
    }
    if entry.handle.cancel_release() {
        log::warn("engine not released", &[("source", &engine.label()), ("cause", &"files are being written")]);
        return failed("files are being written");
    }
    // It was accepted at the last moment.
    if context.registry.wait_until_removed(&engine, KILL_TIME) {
        Answer::Released
    } else {
        failed("the engine could not be killed")
    }
}

/// Sends copies of the descriptors, and subscribes the connection to the events of the engine.
fn hold(context: &Context, name: &str, stream: UnixStream) -> Result<(), (UnixStream, Answer)> {
    let entry = find(context, name).and_then(|it| context.registry.entry(&it));
    let Some(entry) = entry else { return Err((stream, not_served(name))) };
    let Some(resources) = entry.handle.resources() else {
        // The node plugin was restarted in the middle of a move.
        return Err((stream, if entry.request.wait { Answer::Prepared } else { not_served(name) }));
    };
    let held = Answer::Held { request: Some(entry.request.clone()) };
    if MAX_ANSWER_BYTES < held.to_line().len() {
        return Err((stream, failed("the mount request is too long to be repeated")));
    }
    if send_answer(&stream, &held, &[resources.fuse.as_fd(), resources.state.as_fd()]) {
        log::info("descriptors sent to the node plugin", &[("source", &name)]);
        entry.subscribers.add(stream);
    }
    Ok(())
}

fn find(context: &Context, name: &str) -> Option<EngineId> {
    context.registry.find(parse(name).ok()?.as_ref())
}

/// The empty name is that of the only source of a Mountpoint Pod.
fn parse(name: &str) -> Result<Option<SourceName>, InvalidSourceName> {
    if name.is_empty() { Ok(None) } else { name.parse().map(Some) }
}

fn not_served(name: &str) -> Answer {
    failed(&format!("source {name:?} is not served by this mounter"))
}
