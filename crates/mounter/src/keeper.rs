//! Keeps a mount alive though its engine dies: holds the FUSE connection and the engine's memory, and starts a successor.
//!
//! It knows nothing of FUSE requests or of what is in that memory, but for its first numbers (see `pulse`). An engine that does
//! not speak with us (another `mount-s3`) is run as it is and takes its mount with it.

mod death;
mod keys;
mod pulse;
mod spare;

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::MemfdFlags;

use crate::engine::{self, Ended, Engine, Haste, Inheritance, Life, News, StartError, Stream};
use crate::handoff::Answer;
use crate::launch::Launch;
use crate::log::{self, Chain};
use crate::slots::Slot;
use crate::survival;
use death::{KILL, MemoryKills};
use keys::{Fingerprint, Keys};
use pulse::{Connection, Limits, Pulse, Signs, TICK, Trouble};
use spare::Spare;

/// How long what is endured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keeping {
    /// Nobody can use the mount meanwhile, and who tries cannot be killed. After this time it is given up.
    pub longest_outage: Duration,
    /// An engine whose heart stood still for so long is killed and replaced.
    pub frozen_after: Duration,
    /// An engine that lives, but answered nobody for so long though somebody waits, is killed and replaced.
    pub stuck_after: Duration,
    /// When an engine is replaced on request: how long files that are being written may take until they are stored.
    pub drain_time: Duration,
    pub standby: Standby,
    /// How likely engines are to be killed when memory runs out (`oom_score_adj`), if not as likely as we are ourselves.
    pub engine_oom_score: Option<i32>,
}

impl Keeping {
    fn treat(&self, engine: &Engine) {
        if let Some(score) = self.engine_oom_score {
            survival::expose(engine.id(), score);
        }
    }
}

/// Whether a second engine stands by, ready to take over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standby {
    None,
    Prepared,
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

/// An engine that dies by itself so soon after its start has the same trouble as the one before.
const STEADY_AFTER: Duration = Duration::from_secs(10);

/// Who kills an engine so soon after its start will probably do it again.
const SHORT_LIFE: Duration = Duration::from_millis(200);
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// How often the memory of an engine is looked at, so that a death can be explained.
const MEMORY_INTERVAL: Duration = Duration::from_secs(5);

/// What outlives an engine.
#[derive(Debug)]
struct Kept {
    fuse: OwnedFd,
    state: File,
}

/// Why an engine had to end.
#[derive(Clone, Debug)]
struct Verdict {
    cause: String,
    /// It was well, and another one is ready to take its place.
    is_planned: bool,
}

/// A time in which nobody serves the mount.
#[derive(Clone, Debug)]
struct Outage {
    since: Instant,
    cause: String,
    is_planned: bool,
}

/// The engine that serves or is about to, and perhaps one that could.
struct Engines {
    current: Engine,
    /// What the present engine signs with.
    keys: Option<Fingerprint>,
    spare: Option<Spare>,
}

/// An engine that may take over, and the keys it was started with.
type Successor = (Engine, Option<Fingerprint>);

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
    /// Kills for want of memory, when that was looked at last.
    memory: (MemoryKills, Instant),
    /// Why we killed the present engine.
    verdict: Option<Verdict>,
    /// How many requests for another engine were heard of.
    upgrades: u64,
    keys: Keys,
    /// Keys that could not be used, and when they are tried again.
    unusable_keys: Option<(Fingerprint, Instant)>,
    standby_failures: u32,
    /// No other standby is started before.
    standby_not_before: Instant,
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
    let inheritance = Inheritance { fuse: fuse.as_fd(), state: state.as_ref().map(AsFd::as_fd), haste: Haste::AtOnce };
    let mut keys = Keys::in_file(post.launch.keys());
    // Before the engine reads them: if they change between the two, one engine too many is started, and not one too few.
    let first_keys = keys.look();
    let first = Engine::start(post.program, post.launch, post.cache, inheritance)?;
    if let Some(keeping) = &post.keeping {
        keeping.treat(&first);
    }
    let never = Keeping {
        longest_outage: Duration::ZERO,
        frozen_after: Duration::MAX,
        stuck_after: Duration::MAX,
        drain_time: Duration::ZERO,
        standby: Standby::None,
        engine_oom_score: None,
    };
    let mut keeper = Keeper {
        post,
        keeping: post.keeping.unwrap_or(never),
        // Without a state our copy of the descriptor is closed here: else the mount would hang when the engine dies.
        kept: state.map(|state| Kept { fuse, state: state.into() }),
        tell,
        relay,
        was_ready: false,
        has_spoken: false,
        has_served: false,
        outage: None,
        failures: 0,
        running_since: None,
        pulse: Pulse::new(),
        memory: (MemoryKills::default(), Instant::now()),
        verdict: None,
        upgrades: post.slot.upgrades(),
        keys,
        unusable_keys: None,
        standby_failures: 0,
        standby_not_before: Instant::now(),
    };
    Ok(keeper.keep(first, first_keys))
}

impl Keeper<'_> {
    fn keep(&mut self, first: Engine, keys: Option<Fingerprint>) -> Finished {
        let mut engines = Engines { current: first, keys, spare: None };
        self.welcome(&engines.current);
        let ended = loop {
            let all = std::iter::once(&engines.current).chain(engines.spare.as_ref().map(Spare::engine));
            engine::wait_for_news(all, self.interval(&engines));
            let life = self.attend(&mut engines.current);
            self.attend_spare(&mut engines.spare);
            if life == Life::Goes {
                self.tick(&mut engines);
                continue;
            }
            let noticed = Instant::now();
            let (successor, ended) = self.bury(engines.current, engines.spare.take(), noticed);
            match successor {
                Some((current, keys)) => engines = Engines { current, keys, spare: None },
                None => break ended,
            }
            self.welcome(&engines.current);
        };
        Finished { ended, was_ready: self.was_ready }
    }

    /// Collects an engine that has ended and finds another one, if the mount needs one.
    fn bury(&mut self, engine: Engine, spare: Option<Spare>, noticed: Instant) -> (Option<Successor>, Ended) {
        let ended = engine.collect();
        if !self.must_continue() {
            spare.into_iter().for_each(Spare::dismiss);
            return (None, ended);
        }
        self.note_death(&ended, noticed);
        let successor = match spare {
            Some(spare) => Some(spare.promote()),
            None => self.start_successor(),
        };
        (successor, ended)
    }

    /// From now on this engine is the present one.
    fn welcome(&mut self, engine: &Engine) {
        self.post.slot.started(engine.process());
        log::info("engine started", &[("source", &self.label()), ("pid", &engine.id())]);
        self.running_since = None;
        self.verdict = None;
    }

    /// Hears what the present engine has to say.
    fn attend(&mut self, engine: &mut Engine) -> Life {
        for letter in engine.letters() {
            self.hear_letter(letter, engine);
        }
        engine.attend(&mut |News { stream, line }| self.hear_line(stream, line))
    }

    /// Whether the mount needs another engine. How the last one ended does not matter: it may have been asked to by somebody
    /// who does not know of us.
    fn must_continue(&self) -> bool {
        self.has_served && !self.post.slot.is_unwanted() && self.is_connected()
    }

    fn is_connected(&self) -> bool {
        self.kept.as_ref().is_some_and(|it| Connection::look(&it.fuse).is_alive)
    }

    fn note_death(&mut self, ended: &Ended, noticed: Instant) {
        let Verdict { cause, is_planned } = self
            .verdict
            .take()
            .unwrap_or_else(|| Verdict { cause: death::cause(ended, self.memory.0.are_more_now()), is_planned: false });
        let is_own_fault = ended.status.as_ref().is_ok_and(|it| it.signal() != Some(KILL));
        let lived = self.running_since.map_or(Duration::ZERO, |it| noticed.duration_since(it));
        let is_same_trouble = lived.is_zero() || (is_own_fault && lived < STEADY_AFTER);
        self.failures = if is_same_trouble || lived < SHORT_LIFE { self.failures.saturating_add(1) } else { 0 };
        if is_planned {
            log::info("engine is replaced", &[("source", &self.label()), ("reason", &cause)]);
        } else {
            log::warn("engine died; another one takes its place", &[("source", &self.label()), ("cause", &cause)]);
        }
        // Of a frozen engine, the time since its last heartbeat counts as well; of several with the same trouble, all of them.
        let begun = self.outage.as_ref().filter(|_| is_same_trouble).map(|it| it.since);
        let since = begun.or_else(|| self.pulse.silent_since()).unwrap_or(noticed);
        self.outage = Some(Outage { since, cause, is_planned });
    }

    /// Nothing, if the time is over or the mount is gone.
    fn start_successor(&mut self) -> Option<Successor> {
        loop {
            std::thread::sleep(pause(self.failures).min(self.time_left()));
            let is_pointless = self.time_left().is_zero() || self.post.slot.is_unwanted() || !self.is_connected();
            if is_pointless {
                return None;
            }
            match self.start_engine(Haste::AtOnce)? {
                Ok(successor) => return Some(successor),
                Err(error) => {
                    self.failures = self.failures.saturating_add(1);
                    log::warn("successor not started", &[("source", &self.label()), ("error", &Chain(&error))]);
                }
            }
        }
    }

    /// Nothing, if there is nothing to inherit.
    fn start_engine(&mut self, haste: Haste) -> Option<Result<Successor, StartError>> {
        let kept = self.kept.as_ref()?;
        let keys = self.keys.look();
        let inheritance = Inheritance { fuse: kept.fuse.as_fd(), state: Some(kept.state.as_fd()), haste };
        let started = Engine::start(self.post.program, self.post.launch, self.post.cache, inheritance);
        Some(started.inspect(|it| self.keeping.treat(it)).map(|it| (it, keys)))
    }

    fn time_left(&self) -> Duration {
        let outage = self.outage.as_ref().map_or(Duration::ZERO, |it| it.since.elapsed());
        self.keeping.longest_outage.saturating_sub(outage)
    }

    fn label(&self) -> String {
        self.post.slot.source().map(ToString::to_string).unwrap_or_default()
    }

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

    fn hear_letter(&mut self, letter: u8, engine: &Engine) {
        self.has_spoken = true;
        match letter {
            PREPARED => engine.say(GO),
            RUNNING => {
                self.has_served = true;
                self.running_since = Some(Instant::now());
                self.pulse = Pulse::new();
                self.memory = (MemoryKills::of(engine.id()), Instant::now());
                // An engine with the same trouble as the one before must last for a while before that is over.
                let Some(outage) = &self.outage else { return };
                let stall = outage.since.elapsed();
                let stall_milliseconds = u64::try_from(stall.as_millis()).unwrap_or(u64::MAX);
                log::info("mount resumed", &[("source", &self.label()), ("stall", &format_args!("{stall:?}"))]);
                let cause = outage.cause.clone();
                (self.tell)(&if outage.is_planned {
                    Answer::Replaced { reason: cause, stall_milliseconds }
                } else {
                    Answer::Resumed { cause, stall_milliseconds }
                });
            }
            _ => {}
        }
    }

    fn interval(&self, engines: &Engines) -> Option<Duration> {
        let is_waiting = engines.spare.as_ref().is_some_and(Spare::is_waiting_for_files);
        self.kept.as_ref().map(|_| if is_waiting { spare::DRAIN_INTERVAL } else { TICK })
    }

    fn tick(&mut self, engines: &mut Engines) {
        let Some(running_since) = self.running_since else {
            if self.outage.is_some() && self.time_left().is_zero() && self.verdict.is_none() {
                self.verdict = Some(Verdict { cause: "did not start in time".to_owned(), is_planned: false });
                engines.current.kill();
            }
            return;
        };
        let Some(kept) = &self.kept else { return };
        if self.outage.is_some() && running_since.elapsed() >= STEADY_AFTER {
            self.outage = None;
            self.failures = 0;
        }
        if self.memory.1.elapsed() >= MEMORY_INTERVAL {
            self.memory = (MemoryKills::of(engines.current.id()), Instant::now());
        }
        let Keeping { frozen_after, stuck_after, .. } = self.keeping;
        let is_somebody_waiting = Connection::look(&kept.fuse).is_somebody_waiting;
        let signs = Signs::read(&kept.state);
        match self.pulse.listen(signs, is_somebody_waiting, Limits { frozen_after, stuck_after }) {
            Some(trouble) if self.verdict.is_none() => self.condemn(&engines.current, trouble),
            Some(_) => {}
            None => self.tend_spare(engines),
        }
    }

    fn condemn(&mut self, engine: &Engine, trouble: Trouble) {
        let cause = match trouble {
            Trouble::Frozen => format!("no heartbeat for {} seconds", self.keeping.frozen_after.as_secs_f32()),
            Trouble::Stuck => format!("no request answered for {} seconds", self.keeping.stuck_after.as_secs_f32()),
        };
        log::warn("engine killed", &[("source", &self.label()), ("cause", &cause)]);
        self.verdict = Some(Verdict { cause, is_planned: false });
        engine.kill();
    }
}

fn pause(failures: u32) -> Duration {
    match failures.checked_sub(2) {
        None => Duration::ZERO,
        Some(doublings) => FIRST_PAUSE.saturating_mul(1 << doublings.min(10)).min(LONGEST_PAUSE),
    }
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
}
