//! Whether an engine is alive and gets on with its work, as far as the numbers at the start of its state tell.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};

/// How often an engine is listened to. Its heart beats four times a second.
pub const TICK: Duration = Duration::from_millis(500);

/// The upload of a big file over a slow line may keep everybody waiting for long, and would be lost.
const PATIENCE_WITH_UPLOADS: u32 = 6;

/// The first numbers in an engine's state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Signs {
    /// Counts up while the engine lives.
    pub beat: u64,
    /// Files whose data would be lost with the engine.
    pub unstored: u64,
    /// Requests of the kernel that were begun.
    pub begun: u64,
    /// Requests of the kernel that were done with.
    pub done: u64,
}

/// What an engine was seen to do, and since when it does nothing.
#[derive(Clone, Copy, Debug)]
pub struct Pulse {
    signs: Signs,
    heard: Instant,
    silent_ticks: u32,
    idle_ticks: u32,
    ticked: Instant,
}

/// What is wrong with an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// Its heart does not beat.
    Frozen,
    /// Its heart beats, but it answers nobody.
    Stuck,
}

impl Signs {
    pub fn read(state: &File) -> Self {
        let mut bytes = [0; 32];
        if state.read_exact_at(&mut bytes, 0).is_err() {
            return Self::default();
        }
        let number = |index: usize| {
            let mut number = [0; 8];
            number.copy_from_slice(&bytes[index * 8..][..8]);
            u64::from_ne_bytes(number)
        };
        Self { beat: number(0), unstored: number(1), begun: number(2), done: number(3) }
    }
}

impl Pulse {
    pub fn new() -> Self {
        let now = Instant::now();
        Self { signs: Signs::default(), heard: now, silent_ticks: 0, idle_ticks: 0, ticked: now }
    }

    /// When it was heard last, if it is silent now.
    pub fn silent_since(&self) -> Option<Instant> {
        (self.silent_ticks > 1).then_some(self.heard)
    }

    /// Counts in ticks and not in time: if we could not run ourselves, nobody else could either.
    pub fn listen(&mut self, signs: Signs, is_somebody_waiting: bool, limits: Limits) -> Option<Trouble> {
        let has_beaten = signs.beat != self.signs.beat;
        let has_worked = signs.done != self.signs.done || !(is_somebody_waiting || signs.begun != signs.done);
        self.signs = signs;
        if has_beaten {
            self.heard = Instant::now();
            self.silent_ticks = 0;
        }
        if has_worked {
            self.idle_ticks = 0;
        }
        if self.ticked.elapsed() >= TICK {
            self.ticked = Instant::now();
            self.silent_ticks += u32::from(!has_beaten);
            self.idle_ticks += u32::from(!has_worked);
        }
        let patience = if signs.unstored > 0 { PATIENCE_WITH_UPLOADS } else { 1 };
        if TICK.saturating_mul(self.silent_ticks) >= limits.frozen_after {
            Some(Trouble::Frozen)
        } else if TICK.saturating_mul(self.idle_ticks) >= limits.stuck_after.saturating_mul(patience) {
            Some(Trouble::Stuck)
        } else {
            None
        }
    }
}

/// How long what is endured.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub frozen_after: Duration,
    pub stuck_after: Duration,
}

/// What the kernel says of a FUSE connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connection {
    pub is_alive: bool,
    /// Requests wait that no engine has read.
    pub is_somebody_waiting: bool,
}

impl Connection {
    pub fn look(fuse: &OwnedFd) -> Self {
        let mut watched = [PollFd::new(fuse, PollFlags::IN)];
        let looked = rustix::event::poll(&mut watched, Some(&Timespec::default()));
        let seen = watched[0].revents();
        // The kernel reports an error once the mount is gone.
        Self {
            is_alive: looked.is_ok() && !seen.contains(PollFlags::ERR),
            is_somebody_waiting: seen.contains(PollFlags::IN),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { frozen_after: Duration::from_secs(1), stuck_after: Duration::from_secs(2) };

    /// Listens once per tick and answers what was wrong at last.
    fn check(signs: impl Iterator<Item = Signs>, is_somebody_waiting: bool) -> Option<Trouble> {
        let mut pulse = Pulse::new();
        let mut trouble = None;
        for it in signs {
            pulse.ticked -= TICK;
            trouble = pulse.listen(it, is_somebody_waiting, LIMITS);
        }
        trouble
    }

    #[test]
    fn a_heart_that_beats_is_never_frozen() {
        assert_eq!(check((1..100).map(|beat| Signs { beat, ..Signs::default() }), false), None);
        assert_eq!(check((1..4).map(|_| Signs { beat: 1, ..Signs::default() }), false), Some(Trouble::Frozen));
    }

    #[test]
    fn the_time_we_did_not_look_does_not_count() {
        let mut pulse = Pulse::new();
        pulse.listen(Signs { beat: 1, ..Signs::default() }, false, LIMITS);
        pulse.ticked -= TICK * 10;
        assert_eq!(pulse.listen(Signs { beat: 1, ..Signs::default() }, false, LIMITS), None);
    }

    #[test]
    fn an_engine_that_answers_nobody_who_waits_is_stuck() {
        let idle = |beat| Signs { beat, begun: 7, done: 7, ..Signs::default() };
        let working = |beat| Signs { beat, begun: 7, done: 6, ..Signs::default() };
        let busy = |beat| Signs { beat, begun: beat + 3, done: beat, ..Signs::default() };
        assert_eq!(check((1..6).map(idle), false), None);
        assert_eq!(check((1..6).map(idle), true), Some(Trouble::Stuck), "requests that nobody reads");
        assert_eq!(check((1..6).map(working), false), Some(Trouble::Stuck), "a request that nobody answers");
        assert_eq!(check((1..100).map(busy), true), None);
    }

    #[test]
    fn uploads_that_would_be_lost_are_given_more_time() {
        let uploading = |beat| Signs { beat, unstored: 1, begun: 7, done: 6 };
        assert_eq!(check((1..20).map(uploading), false), None);
        assert_eq!(check((1..30).map(uploading), false), Some(Trouble::Stuck));
    }
}
