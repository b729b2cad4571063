//! Durations of the phases of one call, for metrics.

use std::cell::RefCell;
use std::time::{Duration, Instant};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallPhase {
    /// Waiting for an assigned and running Mountpoint Pod.
    Assignment,
    Credentials,
    /// FUSE mount, hand-over or unit start, and the first answer of the engine.
    Source,
    Bind,
    /// Of the target.
    Unmount,
    /// Of an unused source.
    Retire,
}

/// Records the phases of a call on its thread.
#[derive(Debug)]
pub struct CallTimer {
    start: Instant,
    phases: RefCell<Vec<(CallPhase, Duration)>>,
}

impl CallTimer {
    /// `start` is when the call arrived.
    pub fn begin_at(start: Instant) -> Self {
        Self { start, phases: RefCell::default() }
    }

    pub fn record(&self, phase: CallPhase, duration: Duration) {
        self.phases.borrow_mut().push((phase, duration));
    }

    /// Runs `work` and records its duration, whatever its outcome.
    pub fn time<T>(&self, phase: CallPhase, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let outcome = work();
        self.record(phase, start.elapsed());
        outcome
    }

    /// The durations so far and the total, by metric label.
    pub fn end(&self) -> Vec<(&'static str, Duration)> {
        let phases = self.phases.borrow();
        let phases = phases.iter().map(|(phase, took)| (phase.label(), *took));
        phases.chain([("total", self.start.elapsed())]).collect()
    }
}

impl CallPhase {
    const fn label(self) -> &'static str {
        match self {
            Self::Assignment => "assignment",
            Self::Credentials => "credentials",
            Self::Source => "source",
            Self::Bind => "bind",
            Self::Unmount => "unmount",
            Self::Retire => "retire",
        }
    }
}
