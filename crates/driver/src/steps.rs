//! Steps by name, and a way to end right after one of them. A crash between any two steps must be repaired by the next
//! call; tests show that by asking for the crash. Nobody else asks, and then a step costs one comparison.

use std::fmt::Debug;

/// Told about every step that was done.
#[derive(Clone, Copy, Debug)]
pub struct Steps<Step> {
    stop_after: Option<Step>,
}

impl<Step> Default for Steps<Step> {
    fn default() -> Self {
        Self { stop_after: None }
    }
}

impl<Step: Copy + Debug + PartialEq> Steps<Step> {
    pub const fn stop_after(step: Option<Step>) -> Self {
        Self { stop_after: step }
    }

    pub fn done(self, step: Step) {
        if self.stop_after == Some(step) {
            tracing::warn!(?step, "ending without cleaning up, as --stop-after asked for");
            // Like SIGKILL: nothing is unwound, flushed or unlocked.
            std::process::abort();
        }
    }
}
