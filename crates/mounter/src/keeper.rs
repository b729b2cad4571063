//! Keeps a mount alive though its engine dies: holds the FUSE connection and the engine's memory, and starts a successor.
//!
//! It knows nothing of FUSE requests or of what is in that memory, but for its first number, which counts up while an engine
//! lives. An engine that does not speak with us (another `mount-s3`) is run as it is and takes its mount with it.

use std::fmt::Write as _;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::MemfdFlags;

use crate::engine::{Ended, Engine, Inheritance, Leash, StartError, Stream, Watcher};
use crate::handoff::Answer;
use crate::launch::Launch;
use crate::log::{self, Chain};
use crate::output::shorten;
use crate::slots::Slot;

/// How long what is endured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keeping {
    /// Nobody can use the mount meanwhile, and who tries cannot be killed. After this time it is given up.
    pub longest_outage: Duration,
    /// An engine whose heart stood still for so long is killed and replaced.
    pub frozen_after: Duration,
}

/// One mount and how engines for it are run.
pub struct Post<'a> {
    pub program: &'a Path,
    pub launch: &'a Launch,
    pub cache: Option<&'a Path>,
    pub slot: &'a Slot,
    pub keeping: Option<Keeping>,
}

/// The end of the last engine.
#[derive(Debug)]
pub struct Finished {
    pub ended: Ended,
    /// Some engine has said that it serves the mount.
    pub was_ready: bool,
}

/// How our engine says that it has answered the kernel. Another engine may never say it; the node finds out by itself then.
const READY: &[u8] = b" is mounted at ";

/// What an engine and its keeper say to each other.
const PREPARED: u8 = b'S';
const GO: u8 = b'G';
const RUNNING: u8 = b'R';

/// How often the heart is listened to. An engine's beats four times a second.
const TICK: Duration = Duration::from_millis(500);

/// An engine that dies by itself so soon after its start has the same trouble as the one before.
const STEADY_AFTER: Duration = Duration::from_secs(10);

/// Who kills an engine so soon after its start will probably do it again.
const SHORT_LIFE: Duration = Duration::from_millis(200);
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// What outlives an engine.
#[derive(Debug)]
struct Kept {
    fuse: OwnedFd,
    state: OwnedFd,
}

/// A time in which nobody serves the mount.
#[derive(Clone, Debug)]
struct Outage {
    since: Instant,
    cause: String,
}

/// What is known over all engines of a mount.
struct Keeper<'a> {
    post: &'a Post<'a>,
    keeping: Keeping,
    kept: Option<Kept>,
    tell: &'a mut dyn FnMut(&Answer),
    relay: &'a mut dyn FnMut(Stream, &[u8]),
    was_ready: bool,
    /// An engine has spoken with us, so that it can be replaced.
    has_spoken: bool,
    has_served: bool,
    outage: Option<Outage>,
    /// Engines in a row that did not last.
    failures: u32,
    /// When the present engine began to serve.
    running_since: Option<Instant>,
    pulse: Pulse,
    /// Why we killed the present engine.
    verdict: Option<String>,
}

/// The last heartbeat that was heard.
#[derive(Clone, Copy, Debug)]
struct Pulse {
    beat: u64,
    heard: Instant,
    silent_ticks: u32,
    ticked: Instant,
}

/// Runs the first engine and its successors until the mount has ended or cannot be kept.
pub fn run(
    post: &Post<'_>,
    fuse: OwnedFd,
    tell: &mut dyn FnMut(&Answer),
    relay: &mut dyn FnMut(Stream, &[u8]),
) -> Result<Finished, StartError> {
    let state = post.keeping.map(|_| rustix::fs::memfd_create("engine state", MemfdFlags::CLOEXEC)).transpose();
    let state = state.map_err(|cause| StartError::Inherit { cause: cause.into() })?;
    let inheritance = Inheritance { fuse: fuse.as_fd(), state: state.as_ref().map(AsFd::as_fd) };
    let first = Engine::start(post.program, post.launch, post.cache, inheritance)?;
    let mut keeper = Keeper {
        post,
        keeping: post.keeping.unwrap_or(Keeping { longest_outage: Duration::ZERO, frozen_after: Duration::MAX }),
        // Without a state our copy of the descriptor is closed here: else the mount would hang when the engine dies.
        kept: state.map(|state| Kept { fuse, state }),
        tell,
        relay,
        was_ready: false,
        has_spoken: false,
        has_served: false,
        outage: None,
        failures: 0,
        running_since: None,
        pulse: Pulse::new(),
        verdict: None,
    };
    Ok(keeper.keep(first))
}

impl Keeper<'_> {
    fn keep(&mut self, first: Engine) -> Finished {
        let mut engine = first;
        loop {
            self.post.slot.started(engine.process());
            log::info("engine started", &[("source", &self.label()), ("pid", &engine.id())]);
            self.running_since = None;
            self.verdict = None;
            let ended = engine.watch(self);
            let noticed = Instant::now();
            if !self.must_continue(&ended) {
                return Finished { ended, was_ready: self.was_ready };
            }
            self.note_death(&ended, noticed);
            engine = match self.start_successor() {
                Some(engine) => engine,
                None => return Finished { ended, was_ready: self.was_ready },
            };
        }
    }

    /// Whether the mount needs another engine.
    fn must_continue(&self, ended: &Ended) -> bool {
        let has_left_in_peace = ended.status.as_ref().is_ok_and(ExitStatus::success);
        self.has_served && !has_left_in_peace && !self.post.slot.is_unwanted() && self.is_connected()
    }

    /// The kernel reports an error on the descriptor once the mount is gone.
    fn is_connected(&self) -> bool {
        let Some(kept) = &self.kept else { return false };
        let mut watched = [PollFd::new(&kept.fuse, PollFlags::IN)];
        let looked = rustix::event::poll(&mut watched, Some(&Timespec::default()));
        looked.is_ok() && !watched[0].revents().contains(PollFlags::ERR)
    }

    fn note_death(&mut self, ended: &Ended, noticed: Instant) {
        let cause = self.verdict.take().unwrap_or_else(|| cause_of_death(ended));
        let is_own_fault = ended.status.as_ref().is_ok_and(|it| it.signal() != Some(KILL));
        let lived = self.running_since.map_or(Duration::ZERO, |it| noticed.duration_since(it));
        let is_same_trouble = lived.is_zero() || (is_own_fault && lived < STEADY_AFTER);
        self.failures = if is_same_trouble || lived < SHORT_LIFE { self.failures.saturating_add(1) } else { 0 };
        log::warn("engine died; another one takes its place", &[("source", &self.label()), ("cause", &cause)]);
        match &mut self.outage {
            Some(outage) if is_same_trouble => outage.cause = cause,
            outage => {
                // Of a frozen engine, the time since its last heartbeat counts as well.
                let since = if self.pulse.is_silent() { self.pulse.heard } else { noticed };
                *outage = Some(Outage { since, cause });
            }
        }
    }

    /// Nothing, if the time is over or the mount is gone.
    fn start_successor(&mut self) -> Option<Engine> {
        loop {
            std::thread::sleep(pause(self.failures).min(self.time_left()));
            let is_pointless = self.time_left().is_zero() || self.post.slot.is_unwanted() || !self.is_connected();
            let kept = self.kept.as_ref().filter(|_| !is_pointless)?;
            let inheritance = Inheritance { fuse: kept.fuse.as_fd(), state: Some(kept.state.as_fd()) };
            match Engine::start(self.post.program, self.post.launch, self.post.cache, inheritance) {
                Ok(engine) => return Some(engine),
                Err(error) => {
                    self.failures = self.failures.saturating_add(1);
                    log::warn("successor not started", &[("source", &self.label()), ("error", &Chain(&error))]);
                }
            }
        }
    }

    fn time_left(&self) -> Duration {
        let outage = self.outage.as_ref().map_or(Duration::ZERO, |it| it.since.elapsed());
        self.keeping.longest_outage.saturating_sub(outage)
    }

    fn label(&self) -> String {
        self.post.slot.source().map(ToString::to_string).unwrap_or_default()
    }
}

/// The number of SIGKILL. An engine never sends it to itself.
const KILL: i32 = 9;

impl Watcher for Keeper<'_> {
    fn hear_line(&mut self, stream: Stream, line: &[u8]) {
        (self.relay)(stream, line);
        let says_ready = stream == Stream::Stdout && line.windows(READY.len()).any(|it| it == READY);
        if says_ready && !self.was_ready {
            self.was_ready = true;
            if !self.has_spoken {
                // An engine that serves and has never spoken with us cannot be replaced. Our copy of the descriptor would
                // only make the mount hang when it dies.
                self.kept = None;
            }
            (self.tell)(&Answer::Ready);
        }
    }

    fn hear_letter(&mut self, letter: u8, leash: &Leash) {
        self.has_spoken = true;
        match letter {
            PREPARED => leash.say(GO),
            RUNNING => {
                self.has_served = true;
                self.running_since = Some(Instant::now());
                self.pulse = Pulse::new();
                // An engine with the same trouble as the one before must last for a while before that is over.
                let Some(outage) = &self.outage else { return };
                let stall = outage.since.elapsed();
                let stall_milliseconds = u64::try_from(stall.as_millis()).unwrap_or(u64::MAX);
                log::info("mount resumed", &[("source", &self.label()), ("stall", &format_args!("{stall:?}"))]);
                (self.tell)(&Answer::Resumed { cause: outage.cause.clone(), stall_milliseconds });
            }
            _ => {}
        }
    }

    fn interval(&self) -> Option<Duration> {
        self.kept.as_ref().map(|_| TICK)
    }

    fn tick(&mut self, leash: &Leash) {
        let Some(kept) = &self.kept else { return };
        let Some(running_since) = self.running_since else {
            if self.outage.is_some() && self.time_left().is_zero() && self.verdict.is_none() {
                self.verdict = Some("did not start in time".to_owned());
                leash.kill();
            }
            return;
        };
        if self.outage.is_some() && running_since.elapsed() >= STEADY_AFTER {
            self.outage = None;
            self.failures = 0;
        }
        if self.pulse.is_stopped(beat(&kept.state), self.keeping.frozen_after) && self.verdict.is_none() {
            log::warn("engine stands still and is killed", &[("source", &self.label())]);
            self.verdict = Some(format!("no heartbeat for {} seconds", self.keeping.frozen_after.as_secs_f32()));
            leash.kill();
        }
    }
}

impl Pulse {
    fn new() -> Self {
        Self { beat: 0, heard: Instant::now(), silent_ticks: 0, ticked: Instant::now() }
    }

    fn is_silent(&self) -> bool {
        self.silent_ticks > 1
    }

    /// Counts in ticks and not in time: if we could not run ourselves, nobody else could either.
    fn is_stopped(&mut self, beat: u64, limit: Duration) -> bool {
        if beat != self.beat {
            *self = Self { beat, ..Self::new() };
        } else if self.ticked.elapsed() >= TICK {
            self.ticked = Instant::now();
            self.silent_ticks += 1;
        }
        TICK.saturating_mul(self.silent_ticks) >= limit
    }
}

/// The first number in an engine's state.
fn beat(state: &OwnedFd) -> u64 {
    let mut bytes = [0; 8];
    let read = rustix::io::pread(state, &mut bytes, 0);
    if read == Ok(bytes.len()) { u64::from_ne_bytes(bytes) } else { 0 }
}

fn pause(failures: u32) -> Duration {
    match failures.checked_sub(2) {
        None => Duration::ZERO,
        Some(doublings) => FIRST_PAUSE.saturating_mul(1 << doublings.min(10)).min(LONGEST_PAUSE),
    }
}

fn cause_of_death(ended: &Ended) -> String {
    let mut cause = match &ended.status {
        Ok(status) => match (status.code(), status.signal()) {
            (Some(code), _) => format!("ended with code {code}"),
            (None, Some(signal)) => format!("ended by signal {signal}"),
            (None, None) => "ended".to_owned(),
        },
        Err(cause) => format!("ended in an unknown way ({cause})"),
    };
    if let Some(words) = ended.stderr.lines().next_back() {
        let _ = write!(cause, ": {words}");
    }
    shorten(&cause)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_successors_start_at_once_and_later_ones_wait() {
        let pauses: Vec<u128> = (0..9).map(|it| pause(it).as_millis()).collect();
        assert_eq!(pauses, [0, 0, 100, 200, 400, 800, 1600, 2000, 2000]);
        assert_eq!(pause(u32::MAX), LONGEST_PAUSE);
    }

    #[test]
    fn a_heart_that_beats_is_never_stopped() {
        let mut pulse = Pulse::new();
        for beat in 1..100 {
            assert!(!pulse.is_stopped(beat, TICK));
        }
        // The time we did not look does not count.
        pulse.ticked -= TICK * 10;
        assert!(!pulse.is_stopped(99, TICK * 2));
        pulse.ticked -= TICK;
        assert!(pulse.is_stopped(99, TICK * 2));
        assert!(!pulse.is_stopped(100, TICK * 2));
    }

    #[test]
    fn a_death_is_described_with_the_last_words() {
        check(9, "", "ended by signal 9");
        check(1 << 8, "one\ntwo\n", "ended with code 1: two");
    }

    #[track_caller]
    fn check(status: i32, stderr: &str, expected: &str) {
        let ended = Ended { status: Ok(ExitStatus::from_raw(status)), stderr: stderr.to_owned() };
        assert_eq!(cause_of_death(&ended), expected);
    }
}
