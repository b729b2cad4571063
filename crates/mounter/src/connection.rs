//! One connection from its request to the end of its engine: what is answered, and what is written beside the socket.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::SendFlags;
use rustix::process::Signal;

use crate::cache::{Cache, CacheError, Caches};
use crate::directory::Directory;
use crate::engine::{Ended, StartError, Stream};
use crate::handoff::{self, Answer, InvalidSourceName, MountRequest, ReceiveLimits, Request, SourceName, StopRequest};
use crate::keeper::{self, Finished, Keeping, Post};
use crate::launch::{InvalidRequest, Launch};
use crate::log::{self, Chain};
use crate::output::shorten;
use crate::slots::{Attendance, Refused, RunningEngine, Slot, Slots};
use crate::{ERROR_FILE, EXIT_FILE};

/// What all connections share.
#[derive(Debug)]
pub struct House {
    pub directory: Arc<Directory>,
    pub engine: PathBuf,
    pub caches: Caches,
    /// Whom engines trust, if not whom everybody does.
    pub ca_bundle: Option<PathBuf>,
    pub slots: Arc<Slots>,
    pub receive_timeout: Duration,
    /// In a Mountpoint Pod the end of the one engine can be the end of the mounter.
    pub life: Life,
    pub keeping: Option<Keeping>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// Ends when the node has asked for it and the engine has ended: a Mountpoint Pod.
    OneSource,
    /// Serves sources as they come and go.
    ManySources,
}

/// Why no engine was started.
#[derive(Debug, thiserror::Error)]
enum RunError {
    #[error(transparent)]
    Source(InvalidSourceName),

    #[error(transparent)]
    Refused(Refused),

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
    Start(StartError),
}

/// A source whose engine is about to run or runs, and where its files are.
struct Place {
    slot: Slot,
    directory: Directory,
}

/// A healthy engine ends within milliseconds when its mount is gone.
const END_TIME: Duration = Duration::from_secs(5);

/// Only a process that the kernel itself keeps outlives this.
const KILL_TIME: Duration = Duration::from_secs(2);

/// Attends to one connection until it has nothing more to say.
pub fn attend(house: &House, stream: &UnixStream, mut attendance: Attendance) {
    let limits = ReceiveLimits::until(Instant::now() + house.receive_timeout);
    let received = handoff::receive(stream, limits);
    match received {
        Ok(Request::Mount(request, fuse)) => {
            attendance.end_handshake();
            run(house, stream, request, fuse);
        }
        // Counts as a handshake while it waits: that bounds how many there can be.
        Ok(Request::Stop(request)) => {
            let last_words = stop(house, &request);
            attendance.end_handshake();
            answer(stream, &last_words);
        }
        Err(error) => {
            log::warn("mount request not understood", &[("error", &Chain(&error))]);
            answer(stream, &failed(&Chain(&error).to_string()));
        }
    }
}

fn run(house: &House, stream: &UnixStream, request: MountRequest, fuse: OwnedFd) {
    let bucket = request.bucket_name.clone();
    let label = request.source.clone().unwrap_or_default();
    log::info("mount request received", &[("source", &label), ("request", &format_args!("{request:?}"))]);

    // When this is back, a refused descriptor is closed and its slot is free: the node may act on the answer at once.
    let started = find_place(house, &request).and_then(|place| serve(house, stream, place, request, fuse));
    let (place, finished, cache) = match started {
        Ok(started) => started,
        Err(error) => {
            log::warn("engine not started", &[("source", &label), ("bucket", &bucket), ("error", &Chain(&error))]);
            return answer(stream, &failed(&Chain(&error).to_string()));
        }
    };
    let last_words = judge(finished.ended, finished.was_ready);
    log::info("engine ended", &[("source", &label), ("bucket", &bucket), ("answer", &last_words.to_line().trim_end())]);

    if let Answer::Failed { error } = &last_words {
        place.write_error(error);
    }
    place.leave(house.life);
    // After the slot was given back: the node may send the next request for this source as soon as it has read this.
    answer(stream, &last_words);
    drop(cache);
}

fn find_place(house: &House, request: &MountRequest) -> Result<Place, RunError> {
    let source: Option<SourceName> = request.source.as_deref().map(str::parse).transpose().map_err(RunError::Source)?;
    if house.life == Life::OneSource
        && let Some(before) = house.slots.find(source.as_ref())
    {
        // The node sends a request only when nothing is mounted: whoever serves still has not noticed that yet.
        let _ = end(house, &before);
    }
    let slot = house.slots.reserve(source).map_err(RunError::Refused)?;
    let directory = house.directory.of(slot.source()).map_err(|cause| RunError::Directory {
        name: request.source.clone().unwrap_or_default(),
        directory: house.directory.path().to_owned(),
        cause,
    })?;
    let place = Place { slot, directory };
    // The words of an earlier engine must not be taken for those of this one.
    if let Err(cause) = place.directory.remove(ERROR_FILE) {
        log::warn("old error not removed", &[("directory", &place.directory.path().display()), ("error", &cause)]);
    }
    Ok(place)
}

/// Serves the mount until it has ended.
fn serve(
    house: &House,
    stream: &UnixStream,
    place: Place,
    request: MountRequest,
    fuse: OwnedFd,
) -> Result<(Place, Finished, Option<Cache>), RunError> {
    let serve = || {
        let launch = Launch::try_from(request).map_err(RunError::Request)?.trusting(house.ca_bundle.as_deref());
        let cache = launch.wants_cache().then(|| house.caches.create()).transpose().map_err(RunError::Cache)?;
        let post = Post {
            program: &house.engine,
            launch: &launch,
            cache: cache.as_ref().map(Cache::path),
            slot: &place.slot,
            keeping: house.keeping,
        };
        let mut tell = |news: &Answer| answer(stream, news);
        let mut relay = |kind: Stream, line: &[u8]| relay(kind, place.slot.source(), line);
        let finished = keeper::run(&post, fuse, &mut tell, &mut relay).map_err(RunError::Start)?;
        Ok((finished, cache))
    };
    match serve() {
        Ok((finished, cache)) => Ok((place, finished, cache)),
        Err(error) => {
            place.write_error(&Chain(&error).to_string());
            Err(error)
        }
    }
}

/// Sees to it that no engine serves a source whose mount is gone. An engine ends with its mount; one that is frozen cannot.
fn stop(house: &House, request: &StopRequest) -> Answer {
    let source: SourceName = match request.stop.parse() {
        Ok(source) => source,
        Err(error) => return failed(&Chain(&error).to_string()),
    };
    let exited = |signal: Option<Signal>| Answer::Exited {
        code: signal.is_none().then_some(0),
        signal: signal.map(Signal::as_raw),
        error: String::new(),
    };
    let Some(engine) = house.slots.find(Some(&source)) else { return exited(None) };
    match end(house, &engine) {
        End::ByItself => exited(None),
        End::Killed => exited(Some(Signal::KILL)),
        End::Not => failed(&format!("the engine of source {source} could not be ended")),
    }
}

/// How an engine ended whose mount is gone.
enum End {
    ByItself,
    Killed,
    Not,
}

fn end(house: &House, engine: &RunningEngine) -> End {
    if house.slots.wait_until_gone(engine, END_TIME) {
        return End::ByItself;
    }
    log::warn("engine killed: its mount is gone, but it did not end", &[("source", &engine.label())]);
    house.slots.kill(engine);
    if house.slots.wait_until_gone(engine, KILL_TIME) { End::Killed } else { End::Not }
}

impl Place {
    /// Older nodes do not read answers; this file is how they learn of a failure.
    fn write_error(&self, error: &str) {
        if let Err(cause) = self.directory.write(ERROR_FILE, shorten(error).as_bytes()) {
            let directory = self.directory.path().display();
            log::warn("error not written", &[("directory", &directory), ("error", &cause)]);
        }
    }

    fn leave(self, life: Life) {
        match life {
            Life::OneSource if self.directory.has(EXIT_FILE) => self.slot.end(),
            Life::OneSource | Life::ManySources => drop(self.slot),
        }
    }
}

/// The last answer about an engine.
fn judge(ended: Ended, is_ready: bool) -> Answer {
    let Ended { status, stderr } = ended;
    let status = match status {
        Ok(status) => status,
        Err(cause) => {
            log::warn("end of the engine unknown", &[("error", &cause)]);
            return Answer::Exited { code: None, signal: None, error: stderr };
        }
    };
    if is_ready || status.success() {
        return Answer::Exited { code: status.code(), signal: status.signal(), error: stderr };
    }
    if stderr.is_empty() { failed(&silent_end(status)) } else { failed(&stderr) }
}

fn silent_end(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("the engine ended with code {code} before it served the mount and gave no reason"),
        (None, Some(signal)) => format!("the engine was ended by signal {signal} before it served the mount"),
        (None, None) => "the engine ended before it served the mount".to_owned(),
    }
}

fn failed(error: &str) -> Answer {
    Answer::Failed { error: shorten(error) }
}

/// The peer may be gone, or may be an older node that never reads: neither is our concern, so this never waits.
fn answer(stream: &UnixStream, answer: &Answer) {
    let line = answer.to_line();
    let mut rest = line.as_bytes();
    while !rest.is_empty() {
        match rustix::net::send(stream, rest, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(sent) => rest = &rest[sent..],
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return,
        }
    }
}

/// What the engine says goes where we write, marked with its source when there are several.
fn relay(kind: Stream, source: Option<&SourceName>, line: &[u8]) {
    let mut marked = Vec::with_capacity(line.len() + 64);
    if let Some(source) = source {
        marked.extend_from_slice(format!("[{source}] ").as_bytes());
    }
    marked.extend_from_slice(line);
    marked.push(b'\n');
    // A reader that went away must not end the engine.
    let _ = match kind {
        Stream::Stdout => io::Write::write_all(&mut io::stdout().lock(), &marked),
        Stream::Stderr => io::Write::write_all(&mut io::stderr().lock(), &marked),
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    const CODE_1: i32 = 1 << 8;
    const KILLED: i32 = 9;

    #[test]
    fn an_engine_that_never_served_has_failed_in_its_own_words() {
        check(CODE_1, "no such bucket", false, &failed("no such bucket"));
        let silent = "the engine ended with code 1 before it served the mount and gave no reason";
        check(CODE_1, "", false, &failed(silent));
        check(KILLED, "", false, &failed("the engine was ended by signal 9 before it served the mount"));
    }

    #[test]
    fn an_engine_that_served_or_left_in_peace_has_exited() {
        check(0, "", false, &exited(Some(0), None, ""));
        check(0, "bye", true, &exited(Some(0), None, "bye"));
        check(CODE_1, "oh", true, &exited(Some(1), None, "oh"));
        check(KILLED, "", true, &exited(None, Some(9), ""));
    }

    #[track_caller]
    fn check(status: i32, stderr: &str, is_ready: bool, expected: &Answer) {
        let ended = Ended { status: Ok(ExitStatus::from_raw(status)), stderr: stderr.to_owned() };
        assert_eq!(&judge(ended, is_ready), expected);
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
