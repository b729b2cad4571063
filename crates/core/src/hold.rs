//! How long the node plugin holds the descriptors of a mount, so that the mount outlives its mounter, and when it closes them.
//!
//! As long as one process holds the FUSE descriptor the connection lives, and requests wait instead of failing. So every hold
//! must end: it is served, or it waits with a deadline, or it is closed.

use std::time::Duration;

/// One held mount. Times are those of any monotonic clock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hold {
    phase: Phase,
    /// How long a mount may wait for a mounter.
    limit: Duration,
}

/// Who serves the mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The first engine is starting; the mounter has not sent the state yet.
    Starting,
    Served,
    /// One mounter serves the mount, and another one prepares to take over.
    Preparing,
    /// The first mounter has released the mount, and the second one has not taken over yet.
    Moving {
        since: Duration,
    },
    /// The mounter is gone.
    Unserved {
        since: Duration,
    },
    /// Another mounter has received the descriptors and not answered yet.
    Resuming {
        since: Duration,
    },
    Closed,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The mounter has sent the state, so another mounter could resume the mount.
    Held,
    /// The mounter serves the mount and has not sent the state: it is of an earlier version, or its engine is.
    NotHeld,
    /// The connection to the mounter ended without a last answer.
    Disconnected,
    /// The engine exited because its mount is gone, or never served it.
    Exited,
    /// The mounter has given the mount up, and it still exists.
    GivenUp,
    /// The mount was looked at.
    Observed(Observation),
    Resumed,
    ResumeFailed,
    /// Another mounter is to take over from the one that serves the mount.
    MoveStarted,
    /// The mounter that served the mount has released it for the other one.
    Released,
    /// The other mounter does not take over.
    MoveFailed,
    /// The mount is about to be unmounted.
    Ending,
}

/// What the kernel says of a mount whose mounter is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Observation {
    /// The connection still exists: it was neither unmounted nor aborted.
    pub is_connected: bool,
    /// An engine has the lock on the state: it outlived its mounter.
    pub has_engine: bool,
    /// A mounter listens.
    pub has_mounter: bool,
}

/// What to do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Nothing,
    /// Send the descriptors to the mounter.
    Resume,
    /// Close the descriptors.
    Close,
    /// Abort the connection, so that waiting callers fail, and close the descriptors.
    AbortAndClose,
}

impl Hold {
    pub fn new(limit: Duration) -> Self {
        Self { phase: Phase::Starting, limit }
    }

    /// A hold whose descriptors came from a mounter that serves the mount.
    pub fn served(limit: Duration) -> Self {
        Self { phase: Phase::Served, limit }
    }

    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// When the mount is given up, unless it is served until then.
    pub fn deadline(&self) -> Option<Duration> {
        match self.phase {
            Phase::Unserved { since } | Phase::Resuming { since } | Phase::Moving { since } => {
                Some(since.saturating_add(self.limit))
            }
            Phase::Starting | Phase::Served | Phase::Preparing | Phase::Closed => None,
        }
    }

    pub fn on(&mut self, event: Event, now: Duration) -> Action {
        let (phase, action) = match (self.phase, event) {
            (Phase::Closed, _) => (Phase::Closed, Action::Nothing),
            (_, Event::Ending | Event::Exited)
            | (Phase::Starting, Event::NotHeld | Event::Disconnected | Event::GivenUp) => {
                (Phase::Closed, Action::Close)
            }
            (Phase::Starting | Phase::Resuming { .. }, Event::Held | Event::Resumed)
            | (Phase::Moving { .. }, Event::Resumed)
            | (Phase::Preparing, Event::MoveFailed) => (Phase::Served, Action::Nothing),
            (Phase::Served, Event::Disconnected | Event::Released) => (Phase::Unserved { since: now }, Action::Nothing),
            (Phase::Served | Phase::Preparing, Event::GivenUp) => (Phase::Closed, Action::AbortAndClose),
            (Phase::Served, Event::MoveStarted) => (Phase::Preparing, Action::Nothing),
            // The other mounter takes over from a dead one as well: its engine waits for the lock.
            (Phase::Preparing, Event::Released | Event::Disconnected) => {
                (Phase::Moving { since: now }, Action::Nothing)
            }
            (
                Phase::Resuming { since } | Phase::Moving { since },
                Event::ResumeFailed | Event::MoveFailed | Event::Disconnected | Event::GivenUp,
            ) => (Phase::Unserved { since }, Action::Nothing),
            (Phase::Unserved { .. } | Phase::Resuming { .. } | Phase::Moving { .. }, Event::Observed(seen)) => {
                self.observe(seen, now)
            }
            (phase, _) => (phase, Action::Nothing),
        };
        self.phase = phase;
        action
    }

    fn observe(&self, seen: Observation, now: Duration) -> (Phase, Action) {
        let Observation { is_connected, has_engine, has_mounter } = seen;
        if !is_connected {
            return (Phase::Closed, Action::Close);
        }
        match self.phase {
            // Callers do not wait, so neither does the clock run.
            Phase::Unserved { .. } if has_engine => (Phase::Unserved { since: now }, Action::Nothing),
            _ if self.deadline().is_some_and(|it| it <= now) => (Phase::Closed, Action::AbortAndClose),
            Phase::Unserved { since } if has_mounter => (Phase::Resuming { since }, Action::Resume),
            phase => (phase, Action::Nothing),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMIT: Duration = Duration::from_mins(2);
    const ALONE: Observation = Observation { is_connected: true, has_engine: false, has_mounter: false };
    const MOUNTER: Observation = Observation { has_mounter: true, ..ALONE };
    const ENGINE: Observation = Observation { has_engine: true, ..MOUNTER };
    const GONE: Observation = Observation { is_connected: false, ..MOUNTER };

    /// Applies one event per second and returns all actions that do something.
    #[track_caller]
    fn check(events: &[Event], expected: &[Action]) -> Hold {
        let mut hold = Hold::new(LIMIT);
        let actions = (0..).zip(events).map(|(second, event)| hold.on(*event, Duration::from_secs(second)));
        let actions: Vec<Action> = actions.filter(|it| *it != Action::Nothing).collect();
        assert_eq!(actions, expected);
        hold
    }

    #[test]
    fn a_mount_is_resumed_by_the_next_mounter() {
        let hold = check(
            &[Event::Held, Event::Disconnected, Event::Observed(ALONE), Event::Observed(MOUNTER), Event::Resumed],
            &[Action::Resume],
        );
        assert_eq!(hold.phase(), Phase::Served);
    }

    #[test]
    fn a_mount_moves_while_it_is_served() {
        let prepared = [Event::Held, Event::MoveStarted];
        let check_then = |events: &[Event], actions: &[Action], phase| {
            let events: Vec<Event> = prepared.iter().chain(events).copied().collect();
            assert_eq!(check(&events, actions).phase(), phase);
        };
        check_then(&[], &[], Phase::Preparing);
        check_then(&[Event::MoveFailed], &[], Phase::Served);
        check_then(&[Event::Released, Event::Resumed], &[], Phase::Served);
        check_then(&[Event::Disconnected, Event::Resumed], &[], Phase::Served);
        let since = Duration::from_secs(2);
        check_then(&[Event::Released], &[], Phase::Moving { since });
        check_then(&[Event::Released, Event::Observed(MOUNTER)], &[], Phase::Moving { since });
        check_then(&[Event::Released, Event::MoveFailed], &[], Phase::Unserved { since });
        check_then(&[Event::Released, Event::Observed(GONE)], &[Action::Close], Phase::Closed);
        check_then(&[Event::Ending], &[Action::Close], Phase::Closed);
        check_then(&[Event::GivenUp], &[Action::AbortAndClose], Phase::Closed);
    }

    #[test]
    fn a_move_that_does_not_end_is_given_up_at_the_limit() {
        let mut hold = check(&[Event::Held, Event::MoveStarted, Event::Released], &[]);
        assert_eq!(hold.deadline(), Some(Duration::from_secs(122)));
        assert_eq!(hold.on(Event::Observed(MOUNTER), Duration::from_secs(122)), Action::AbortAndClose);
    }

    #[test]
    fn only_a_served_mount_moves() {
        assert_eq!(check(&[Event::MoveStarted], &[]).phase(), Phase::Starting);
        let unserved = check(&[Event::Held, Event::Disconnected, Event::MoveStarted], &[]);
        assert_eq!(unserved.phase(), Phase::Unserved { since: Duration::from_secs(1) });
    }

    #[test]
    fn a_mounter_that_sends_no_state_is_not_held() {
        for event in [Event::NotHeld, Event::Disconnected, Event::Exited, Event::GivenUp] {
            assert_eq!(check(&[event], &[Action::Close]).phase(), Phase::Closed);
        }
    }

    #[test]
    fn a_mount_without_a_mounter_is_given_up_at_the_limit() {
        let mut hold = check(&[Event::Held, Event::Disconnected, Event::Observed(ALONE)], &[]);
        assert_eq!(hold.deadline(), Some(Duration::from_secs(121)));
        assert_eq!(hold.on(Event::Observed(ALONE), Duration::from_millis(120_999)), Action::Nothing);
        assert_eq!(hold.on(Event::Observed(MOUNTER), Duration::from_secs(121)), Action::AbortAndClose);
    }

    #[test]
    fn failed_attempts_do_not_extend_the_limit() {
        let attempt = [Event::Observed(MOUNTER), Event::ResumeFailed];
        let events: Vec<Event> =
            [Event::Held, Event::Disconnected].into_iter().chain(attempt.into_iter().cycle().take(10)).collect();
        assert_eq!(check(&events, &[Action::Resume; 5]).deadline(), Some(Duration::from_secs(121)));
    }

    #[test]
    fn an_engine_that_outlived_its_mounter_is_left_alone() {
        let mut hold = check(&[Event::Held, Event::Disconnected, Event::Observed(ENGINE)], &[]);
        assert_eq!(hold.on(Event::Observed(ENGINE), Duration::from_hours(1)), Action::Nothing);
        assert_eq!(hold.on(Event::Observed(MOUNTER), Duration::from_hours(1)), Action::Resume);
    }

    #[test]
    fn a_mount_that_is_served_has_no_limit() {
        for events in [&[][..], &[Event::Held], &[Event::Held, Event::MoveStarted]] {
            let mut hold = check(events, &[]);
            let before = hold.phase();
            for seen in [ALONE, MOUNTER, ENGINE] {
                assert_eq!(hold.on(Event::Observed(seen), Duration::from_hours(1)), Action::Nothing, "{before:?}");
            }
            assert_eq!(hold.phase(), before);
        }
    }

    #[test]
    fn wanted_ends_close_at_once() {
        check(&[Event::Held, Event::Exited], &[Action::Close]);
        check(&[Event::Held, Event::Ending], &[Action::Close]);
        check(&[Event::Held, Event::Disconnected, Event::Ending], &[Action::Close]);
        check(&[Event::Held, Event::Disconnected, Event::Observed(GONE)], &[Action::Close]);
        check(&[Event::Held, Event::GivenUp], &[Action::AbortAndClose]);
    }

    fn events() -> impl Strategy<Value = Event> {
        let observation = any::<(bool, bool, bool)>().prop_map(|(is_connected, has_engine, has_mounter)| {
            Event::Observed(Observation { is_connected, has_engine, has_mounter })
        });
        prop_oneof![
            1 => Just(Event::Held),
            1 => Just(Event::NotHeld),
            1 => Just(Event::Disconnected),
            1 => Just(Event::Exited),
            1 => Just(Event::GivenUp),
            3 => observation,
            1 => Just(Event::Resumed),
            1 => Just(Event::ResumeFailed),
            2 => Just(Event::MoveStarted),
            1 => Just(Event::Released),
            1 => Just(Event::MoveFailed),
            1 => Just(Event::Ending),
        ]
    }

    proptest! {
        #[test]
        fn descriptors_are_served_or_have_a_deadline_or_are_closed_once(
            steps in prop::collection::vec((events(), 0_u64..60), 0..60),
        ) {
            let mut hold = Hold::new(LIMIT);
            let mut now = Duration::ZERO;
            let mut closes = 0;
            for (event, seconds) in steps {
                now += Duration::from_secs(seconds);
                let was_closed = hold.phase() == Phase::Closed;
                let action = hold.on(event, now);
                closes += usize::from(matches!(action, Action::Close | Action::AbortAndClose));
                prop_assert!(!was_closed || action == Action::Nothing);
                prop_assert_eq!(closes, usize::from(hold.phase() == Phase::Closed));
                match hold.phase() {
                    Phase::Unserved { .. } | Phase::Resuming { .. } | Phase::Moving { .. } => {
                        let deadline = hold.deadline().expect("it waits");
                        prop_assert!(deadline <= now + LIMIT);
                        let mut later = hold.clone();
                        prop_assert_eq!(later.on(Event::Observed(ALONE), deadline), Action::AbortAndClose);
                    }
                    Phase::Starting | Phase::Served | Phase::Preparing | Phase::Closed => {
                        prop_assert_eq!(hold.deadline(), None);
                    }
                }
                let mut ending = hold.clone();
                ending.on(Event::Ending, now);
                prop_assert_eq!(ending.phase(), Phase::Closed);
            }
        }

        #[test]
        fn descriptors_are_sent_only_while_no_engine_serves(
            steps in prop::collection::vec((events(), 0_u64..60), 0..60),
        ) {
            let mut hold = Hold::new(LIMIT);
            let mut now = Duration::ZERO;
            for (event, seconds) in steps {
                now += Duration::from_secs(seconds);
                let before = hold.phase();
                if hold.on(event, now) == Action::Resume {
                    let is_unserved = matches!(before, Phase::Unserved { .. });
                    let is_free = matches!(event, Event::Observed(it) if it.has_mounter && !it.has_engine);
                    prop_assert!(is_unserved && is_free, "{before:?} {event:?}");
                }
            }
        }
    }
}
