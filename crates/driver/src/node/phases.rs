//! How long the parts of one call took, for whoever measures.

use std::cell::RefCell;
use std::time::{Duration, Instant};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Waiting until a Mountpoint Pod is assigned and runs.
    Assignment,
    Credentials,
    /// FUSE mount, hand-over or unit, and the engine's first answer.
    Source,
    Bind,
    /// Of the target.
    Unmount,
    /// Of a source that nobody uses any more.
    Retire,
}

/// Filled while a call runs, on its one thread.
#[derive(Debug)]
pub struct Phases {
    start: Instant,
    parts: RefCell<Vec<(Phase, Duration)>>,
}

impl Phases {
    pub fn begin() -> Self {
        Self { start: Instant::now(), parts: RefCell::default() }
    }

    /// Does the work and notes how long it took, whatever came out of it.
    pub fn time<T>(&self, phase: Phase, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let outcome = work();
        self.parts.borrow_mut().push((phase, start.elapsed()));
        outcome
    }

    /// The parts so far, and all of it, by the names that figures have.
    pub fn end(&self) -> Vec<(&'static str, Duration)> {
        let parts = self.parts.borrow();
        let parts = parts.iter().map(|(phase, took)| (phase.label(), *took));
        parts.chain([("total", self.start.elapsed())]).collect()
    }
}

impl Phase {
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
