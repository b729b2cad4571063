//! The steps of publish and unpublish by name, and a way to end right after one of them. A crash between any two steps
//! must be repaired by the next call; tests show that by asking for the crash. Nobody else asks, and then a step costs
//! one comparison.

use clap::ValueEnum;

/// What has just been done, in the order of a publish and then of an unpublish.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Step {
    Locked,
    PlaceMade,
    CredentialsWritten,
    Connected,
    FuseMounted,
    HandedOver,
    Served,
    Bound,
    Unbound,
    TargetRemoved,
    SourceUnmounted,
    SourceRemoved,
    EngineEnded,
    CredentialsRemoved,
}

/// Told about every step that was done.
#[derive(Clone, Copy, Debug, Default)]
pub struct Steps {
    stop_after: Option<Step>,
}

impl Steps {
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
