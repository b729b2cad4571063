//! Detects frozen and stuck engines by the counters at the start of their state.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};

/// How often the counters are read. An engine writes its heartbeat four times a second.
pub const TICK: Duration = Duration::from_millis(500);

/// The upload of a big file over a slow network may block other requests for long, and killing the engine would lose it.
const UPLOAD_FACTOR: u32 = 6;

/// The first numbers in the state of an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineCounters {
    /// Increases while the engine is alive.
    pub beat: u64,
    /// Files whose data would be lost if the engine died.
    pub unstored: u64,
    /// Requests of the kernel that the engine has begun.
    pub begun: u64,
    /// Requests of the kernel that the engine has finished.
    pub done: u64,
    /// Files in a staging directory that only this container has.
    pub staged_on_disk: u64,
}

/// Follows the counters of one engine and notices when they stand still.
#[derive(Clone, Copy, Debug)]
pub struct EngineHeartbeat {
    counters: EngineCounters,
    last_beat: Instant,
    silent_ticks: u32,
    idle_ticks: u32,
    ticked: Instant,
}

/// Why an engine must be replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineFault {
    /// No heartbeat.
    Frozen,
    /// A heartbeat, but no request is answered.
    Stuck,
}

impl EngineCounters {
    pub fn read(state: &OwnedFd) -> Self {
        let mut bytes = [0; 56];
        if rustix::io::pread(state, &mut bytes, 0) != Ok(bytes.len()) {
            return Self::default();
        }
        let number = |index: usize| {
            let mut number = [0; 8];
            number.copy_from_slice(&bytes[index * 8..][..8]);
            u64::from_ne_bytes(number)
        };
        Self { beat: number(0), unstored: number(1), begun: number(2), done: number(3), staged_on_disk: number(6) }
    }
}

impl EngineHeartbeat {
    pub fn new() -> Self {
        let now = Instant::now();
        Self { counters: EngineCounters::default(), last_beat: now, silent_ticks: 0, idle_ticks: 0, ticked: now }
    }

    /// The time of the last heartbeat, if the next one is overdue.
    pub fn silent_since(&self) -> Option<Instant> {
        (self.silent_ticks > 1).then_some(self.last_beat)
    }

    /// Counts in ticks and not in time: when this process did not run, the engine probably did not run either.
    pub fn observe(
        &mut self,
        counters: EngineCounters,
        has_waiting_requests: bool,
        limits: HeartbeatLimits,
    ) -> Option<EngineFault> {
        let has_beat = counters.beat != self.counters.beat;
        let has_progressed =
            counters.done != self.counters.done || !(has_waiting_requests || counters.begun != counters.done);
        self.counters = counters;
        if has_beat {
            self.last_beat = Instant::now();
            self.silent_ticks = 0;
        }
        if has_progressed {
            self.idle_ticks = 0;
        }
        if self.ticked.elapsed() >= TICK {
            self.ticked = Instant::now();
            self.silent_ticks += u32::from(!has_beat);
            self.idle_ticks += u32::from(!has_progressed);
        }
        let factor = if counters.unstored > 0 { UPLOAD_FACTOR } else { 1 };
        if TICK.saturating_mul(self.silent_ticks) >= limits.frozen_after {
            Some(EngineFault::Frozen)
        } else if TICK.saturating_mul(self.idle_ticks) >= limits.stuck_after.saturating_mul(factor) {
            Some(EngineFault::Stuck)
        } else {
            None
        }
    }
}

/// When an engine counts as faulty.
#[derive(Clone, Copy, Debug)]
pub struct HeartbeatLimits {
    pub frozen_after: Duration,
    pub stuck_after: Duration,
}

/// The state of a FUSE connection as poll(2) reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FuseConnection {
    pub is_alive: bool,
    /// Requests are queued that no engine has read.
    pub has_waiting_requests: bool,
}

impl FuseConnection {
    pub fn poll(fuse: &OwnedFd) -> Self {
        let mut watched = [PollFd::new(fuse, PollFlags::IN)];
        let polled = rustix::event::poll(&mut watched, Some(&Timespec::default()));
        let events = watched[0].revents();
        // The kernel reports POLLERR once the mount is gone.
        Self {
            is_alive: polled.is_ok() && !events.contains(PollFlags::ERR),
            has_waiting_requests: events.contains(PollFlags::IN),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: HeartbeatLimits =
        HeartbeatLimits { frozen_after: Duration::from_secs(1), stuck_after: Duration::from_secs(2) };

    /// Observes once per tick and returns the last verdict.
    fn check(counters: impl Iterator<Item = EngineCounters>, has_waiting_requests: bool) -> Option<EngineFault> {
        let mut heartbeat = EngineHeartbeat::new();
        let mut fault = None;
        for it in counters {
            heartbeat.ticked -= TICK;
            fault = heartbeat.observe(it, has_waiting_requests, LIMITS);
        }
        fault
    }

    #[test]
    fn counters_are_read_from_the_head_of_the_state_or_are_zero() {
        let state = |numbers: u64| {
            let mut file = tempfile::tempfile().unwrap();
            (1..=numbers).for_each(|it| std::io::Write::write_all(&mut file, &it.to_ne_bytes()).unwrap());
            EngineCounters::read(&file.into())
        };
        assert_eq!(state(7), EngineCounters { beat: 1, unstored: 2, begun: 3, done: 4, staged_on_disk: 7 });
        assert_eq!(state(6), EngineCounters::default(), "too short");
    }

    #[test]
    fn an_engine_with_a_heartbeat_is_never_frozen() {
        assert_eq!(check((1..100).map(|beat| EngineCounters { beat, ..EngineCounters::default() }), false), None);
        assert_eq!(
            check((1..4).map(|_| EngineCounters { beat: 1, ..EngineCounters::default() }), false),
            Some(EngineFault::Frozen)
        );
    }

    #[test]
    fn time_without_observations_does_not_count() {
        let mut heartbeat = EngineHeartbeat::new();
        heartbeat.observe(EngineCounters { beat: 1, ..EngineCounters::default() }, false, LIMITS);
        heartbeat.ticked -= TICK * 10;
        assert_eq!(heartbeat.observe(EngineCounters { beat: 1, ..EngineCounters::default() }, false, LIMITS), None);
    }

    #[test]
    fn an_engine_that_answers_no_waiting_request_is_stuck() {
        let idle = |beat| EngineCounters { beat, begun: 7, done: 7, ..EngineCounters::default() };
        let working = |beat| EngineCounters { beat, begun: 7, done: 6, ..EngineCounters::default() };
        let busy = |beat| EngineCounters { beat, begun: beat + 3, done: beat, ..EngineCounters::default() };
        assert_eq!(check((1..6).map(idle), false), None);
        assert_eq!(check((1..6).map(idle), true), Some(EngineFault::Stuck), "queued requests");
        assert_eq!(check((1..6).map(working), false), Some(EngineFault::Stuck), "a request without an answer");
        assert_eq!(check((1..100).map(busy), true), None);
    }

    #[test]
    fn uploads_that_would_be_lost_get_more_time() {
        let uploading = |beat| EngineCounters { beat, unstored: 1, begun: 7, done: 6, ..EngineCounters::default() };
        assert_eq!(check((1..20).map(uploading), false), None);
        assert_eq!(check((1..30).map(uploading), false), Some(EngineFault::Stuck));
    }
}
