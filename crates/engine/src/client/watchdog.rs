//! Gives up requests that a hostile or broken store keeps open. The client library collects headers, errors and listings in memory
//! however long they become, and takes one byte per second for progress; it offers no limit for either. But a request whose
//! future is dropped is cancelled, its connection closed and its memory freed.
//!
//! That takes a moment, which grows with the load of the machine. A program that got an error and tries again would begin with that
//! memory as the usual one, and could take as much once more: the error is therefore passed on when the memory is free.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use std::{fs, io, thread};

use futures::channel::oneshot;
use futures::future::{AbortHandle, Abortable};
use parking_lot::{Condvar, Mutex};

/// The library gives up a silent connection after half a minute, and repeats the request nine times at most. A supervisor waits
/// five minutes for an engine that answers nothing.
const LONGEST_ANSWER: Duration = Duration::from_mins(4);

/// How much the process may grow while a request is open, in addition to the buffers for the content of files. A page of a listing
/// has less than a mebibyte.
const GROWTH: u64 = 256 << 20;

/// How often open requests are looked at: a store on the same machine sends a hundred mebibytes in this time.
const INTERVAL: Duration = Duration::from_millis(20);

/// How long an error waits for the memory of its request, which may be in use for something else meanwhile.
const FREED_WITHIN: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, Debug)]
pub struct WatchdogLimits {
    /// For answers without content, from the first byte sent to the last byte received, with all repetitions.
    pub longest_answer: Duration,
    pub most_growth: u64,
}

/// What is expected of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerKind {
    /// Some headers, or a page of a listing.
    Short,
    /// It depends on how much is read, written or copied.
    Long,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Interrupted {
    #[error("the store did not complete its answer within {} seconds", .0.as_secs())]
    TooSlow(Duration),

    #[error("the store's answer does not end, and took too much memory")]
    TooMuch,
}

#[derive(Clone, Debug)]
pub struct Watchdog(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    limits: WatchdogLimits,
    open: Mutex<OpenRequests>,
    begun: Condvar,
}

#[derive(Debug, Default)]
struct OpenRequests {
    next: u64,
    requests: HashMap<u64, OpenRequest>,
    /// Requests that took too much memory.
    unfreed: Vec<UnfreedMemory>,
}

impl OpenRequests {
    fn is_empty(&self) -> bool {
        self.requests.is_empty() && self.unfreed.is_empty()
    }
}

#[derive(Debug)]
struct OpenRequest {
    kind: AnswerKind,
    begun: Instant,
    /// The memory of the process when the request was first looked at.
    memory: Option<u64>,
    given_up: Arc<OnceLock<GivenUp>>,
    abort: AbortHandle,
}

#[derive(Clone, Copy, Debug)]
struct GivenUp {
    cause: Interrupted,
    /// As in the request.
    memory: u64,
}

#[derive(Debug)]
struct UnfreedMemory {
    since: Instant,
    /// The process has less when it is free.
    most: u64,
    _freed: oneshot::Sender<()>,
}

impl WatchdogLimits {
    /// `buffers` is what the content of files may take.
    pub fn new(buffers: usize) -> Self {
        Self { longest_answer: LONGEST_ANSWER, most_growth: GROWTH.saturating_add(buffers as u64) }
    }
}

impl Watchdog {
    /// Starts a thread that works while requests are open.
    pub fn start(limits: WatchdogLimits) -> io::Result<Self> {
        let watchdog = Self::idle(limits);
        let shared = Arc::clone(&watchdog.0);
        thread::Builder::new().name("watchdog".into()).spawn(move || shared.run())?;
        Ok(watchdog)
    }

    fn idle(limits: WatchdogLimits) -> Self {
        Self(Arc::new(Shared { limits, open: Mutex::default(), begun: Condvar::new() }))
    }

    /// Waits for an answer as long as it keeps within the limits.
    pub async fn watch<T>(&self, kind: AnswerKind, answer: impl Future<Output = T>) -> Result<T, Interrupted> {
        let (abort, registration) = AbortHandle::new_pair();
        let given_up = Arc::new(OnceLock::new());
        let request = OpenRequest { kind, begun: Instant::now(), memory: None, given_up: Arc::clone(&given_up), abort };
        let open = self.0.open(request);
        if let Ok(answer) = Abortable::new(answer, registration).await {
            return Ok(answer);
        }
        drop(open);
        let Some(GivenUp { cause, memory }) = given_up.get().copied() else { return Err(Interrupted::TooMuch) };
        if cause == Interrupted::TooMuch {
            // Dropped, not sent.
            let _ = self.0.freed(memory).await;
        }
        Err(cause)
    }
}

/// Ends with the request, also if its future is dropped.
struct Open<'a> {
    shared: &'a Shared,
    number: u64,
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.shared.open.lock().requests.remove(&self.number);
    }
}

impl Shared {
    fn open(&self, request: OpenRequest) -> Open<'_> {
        let mut open = self.open.lock();
        let number = open.next;
        open.next += 1;
        if open.is_empty() {
            self.begun.notify_one();
        }
        open.requests.insert(number, request);
        Open { shared: self, number }
    }

    /// Ends when most of what the process has more than this is free, or is not within some seconds.
    fn freed(&self, memory: u64) -> oneshot::Receiver<()> {
        let (freed, receiver) = oneshot::channel();
        let most = memory.saturating_add(self.limits.most_growth / 2);
        let mut open = self.open.lock();
        if open.is_empty() {
            self.begun.notify_one();
        }
        open.unfreed.push(UnfreedMemory { since: Instant::now(), most, _freed: freed });
        receiver
    }

    fn run(&self) {
        loop {
            let mut open = self.open.lock();
            self.begun.wait_while(&mut open, |it| it.is_empty());
            drop(open);
            thread::sleep(INTERVAL);
            self.look(Instant::now(), memory());
        }
    }

    fn look(&self, now: Instant, memory: Option<u64>) {
        let WatchdogLimits { longest_answer, most_growth } = self.limits;
        let mut open = self.open.lock();
        open.unfreed.retain(|it| {
            memory.is_some_and(|memory| it.most < memory) && now.saturating_duration_since(it.since) < FREED_WITHIN
        });
        for request in open.requests.values_mut() {
            let before = *request.memory.get_or_insert(memory.unwrap_or(u64::MAX));
            let cause = if memory.is_some_and(|it| most_growth < it.saturating_sub(before)) {
                Interrupted::TooMuch
            } else if request.kind == AnswerKind::Short
                && longest_answer <= now.saturating_duration_since(request.begun)
            {
                Interrupted::TooSlow(longest_answer)
            } else {
                continue;
            };
            // The first cause counts.
            let _ = request.given_up.set(GivenUp { cause, memory: before });
            request.abort.abort();
        }
    }
}

/// The memory that this process has in RAM, in bytes.
fn memory() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let kibibytes = status.lines().find_map(|it| it.strip_prefix("VmRSS:"))?.split_whitespace().next()?;
    kibibytes.parse::<u64>().ok().map(|it| it << 10)
}

#[cfg(test)]
mod tests {
    use std::future;

    use futures::FutureExt as _;
    use futures::executor::block_on;

    use super::*;

    const LIMITS: WatchdogLimits = WatchdogLimits { longest_answer: Duration::from_secs(9), most_growth: 100 };

    /// Looks at a request that never ends after this time and growth.
    fn look(kind: AnswerKind, after: Duration, memory: [Option<u64>; 2]) -> Option<Result<(), Interrupted>> {
        let watchdog = Watchdog::idle(LIMITS);
        let mut request = std::pin::pin!(watchdog.watch(kind, future::pending::<()>()));
        assert_eq!(request.as_mut().now_or_never(), None);
        watchdog.0.look(Instant::now(), memory[0]);
        watchdog.0.look(Instant::now() + after, memory[1]);
        let answer = request.as_mut().now_or_never();
        if answer.is_some() {
            return answer;
        }
        watchdog.0.look(Instant::now() + after, memory[0]);
        request.now_or_never()
    }

    #[test]
    fn a_short_answer_has_a_deadline() {
        let memory = [Some(50), Some(50)];
        assert_eq!(look(AnswerKind::Short, Duration::from_secs(8), memory), None);
        let slow = Some(Err(Interrupted::TooSlow(LIMITS.longest_answer)));
        assert_eq!(look(AnswerKind::Short, LIMITS.longest_answer, memory), slow);
        assert_eq!(look(AnswerKind::Long, Duration::from_hours(9), memory), None);
    }

    #[test]
    fn no_answer_may_take_too_much_memory() {
        for kind in [AnswerKind::Short, AnswerKind::Long] {
            assert_eq!(look(kind, Duration::ZERO, [Some(50), Some(150)]), None);
            assert_eq!(look(kind, Duration::ZERO, [Some(50), Some(151)]), Some(Err(Interrupted::TooMuch)));
            assert_eq!(look(kind, Duration::ZERO, [None, Some(151)]), None);
            assert_eq!(look(kind, Duration::ZERO, [Some(50), None]), None);
        }
    }

    #[test]
    fn an_error_is_passed_on_when_the_memory_is_free() {
        let watchdog = Watchdog::idle(LIMITS);
        let mut request = std::pin::pin!(watchdog.watch(AnswerKind::Short, future::pending::<()>()));
        for memory in [50, 500, 500, 101, 100] {
            assert_eq!(request.as_mut().now_or_never(), None);
            watchdog.0.look(Instant::now(), Some(memory));
        }
        assert_eq!(request.now_or_never(), Some(Err(Interrupted::TooMuch)));
        assert!(watchdog.0.open.lock().is_empty());
    }

    #[test]
    fn an_error_does_not_wait_for_ever() {
        let watchdog = Watchdog::idle(LIMITS);
        let mut request = std::pin::pin!(watchdog.watch(AnswerKind::Short, future::pending::<()>()));
        for memory in [50, 500] {
            assert_eq!(request.as_mut().now_or_never(), None);
            watchdog.0.look(Instant::now(), Some(memory));
        }
        assert_eq!(request.as_mut().now_or_never(), None);
        watchdog.0.look(Instant::now() + FREED_WITHIN, Some(500));
        assert_eq!(request.now_or_never(), Some(Err(Interrupted::TooMuch)));
    }

    #[test]
    fn an_answer_in_time_is_passed_on_and_forgotten() {
        let watchdog = Watchdog::start(LIMITS).unwrap();
        assert_eq!(block_on(watchdog.watch(AnswerKind::Short, future::ready(7))), Ok(7));
        assert_eq!(watchdog.watch(AnswerKind::Short, future::pending::<()>()).now_or_never(), None);
        assert!(watchdog.0.open.lock().is_empty());
        assert!(0 < memory().unwrap());
    }

    #[test]
    fn the_thread_ends_a_request_that_takes_too_long() {
        let limits = WatchdogLimits { longest_answer: Duration::from_millis(10), ..LIMITS };
        let watchdog = Watchdog::start(limits).unwrap();
        for _ in 0..2 {
            let answer = block_on(watchdog.watch(AnswerKind::Short, future::pending::<()>()));
            assert_eq!(answer, Err(Interrupted::TooSlow(limits.longest_answer)));
        }
    }
}
