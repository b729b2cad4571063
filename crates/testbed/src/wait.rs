//! Waiting for a condition, with a deadline. Tests never sleep and hope.

use std::thread;
use std::time::{Duration, Instant};

/// Short enough not to be seen in a test's duration, long enough to leave the processor to those we wait for.
const PAUSE: Duration = Duration::from_millis(10);

/// For questions that cost the machine more than a look at one file.
const LONG_PAUSE: Duration = Duration::from_millis(100);

/// For conditions that are true within milliseconds on an idle machine; CI machines are not idle.
pub const SOON: Duration = Duration::from_mins(1);

/// Whether the condition came true before the deadline.
#[must_use]
pub fn wait_until(deadline: Instant, mut condition: impl FnMut() -> bool) -> bool {
    wait_for_some(deadline, || condition().then_some(())).is_some()
}

/// The same for conditions that are expensive to look at.
#[must_use]
pub fn wait_patiently_until(deadline: Instant, mut condition: impl FnMut() -> bool) -> bool {
    while !condition() {
        if deadline <= Instant::now() {
            return false;
        }
        thread::sleep(LONG_PAUSE);
    }
    true
}

/// What the question was answered with before the deadline.
pub fn wait_for_some<T>(deadline: Instant, mut question: impl FnMut() -> Option<T>) -> Option<T> {
    loop {
        if let Some(answer) = question() {
            return Some(answer);
        }
        if deadline <= Instant::now() {
            return None;
        }
        thread::sleep(PAUSE);
    }
}

/// Panics with the name of the condition when it does not come true within [`SOON`].
#[track_caller]
pub fn wait_for(what: &str, condition: impl FnMut() -> bool) {
    assert!(wait_until(Instant::now() + SOON, condition), "waited {SOON:?} in vain: {what}");
}

/// A process that is started while this one has a file open whose store is silent, say in another test: execve(2) closes the copy of
/// that file, and waits for its engine.
const STARTED: Duration = Duration::from_mins(4);

/// The same for what a process does first that was just started.
#[track_caller]
pub fn wait_for_start(what: &str, condition: impl FnMut() -> bool) {
    assert!(wait_until(Instant::now() + STARTED, condition), "waited {STARTED:?} in vain: {what}");
}

/// As `wait_for`, for async tests.
pub async fn wait_for_async(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + SOON;
    while !condition() {
        assert!(Instant::now() < deadline, "waited {SOON:?} in vain: {what}");
        tokio::time::sleep(PAUSE).await;
    }
}
