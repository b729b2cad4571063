//! Failpoints: named points at which a test can crash the process, to show that the next call repairs what a crash leaves.
//!
//! The `fail` crate is not used: it is configured through global state and the environment, while these are typed, listed in
//! `--help` of the hidden flag `--stop-after`, and cost one comparison.

use std::fmt::Debug;

/// The one failpoint to crash at, if any.
#[derive(Clone, Copy, Debug)]
pub struct Failpoints<Point> {
    stop_after: Option<Point>,
}

impl<Point> Default for Failpoints<Point> {
    fn default() -> Self {
        Self { stop_after: None }
    }
}

impl<Point: Copy + Debug + PartialEq> Failpoints<Point> {
    pub const fn stop_after(point: Option<Point>) -> Self {
        Self { stop_after: point }
    }

    /// Crashes the process if it is to stop at this point.
    pub fn hit(self, point: Point) {
        if self.stop_after == Some(point) {
            tracing::warn!(?point, "failpoint reached, aborting the process");
            // Like SIGKILL: nothing is unwound, flushed or unlocked.
            std::process::abort();
        }
    }
}
