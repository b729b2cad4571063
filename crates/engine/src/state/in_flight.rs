//! Requests in flight: lets the supervisor see progress, and lets a successor answer them on kernels without `FUSE_NOTIFY_RESEND`.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::State;

/// As many as there can be threads that serve.
const MOST_WORKERS: usize = 1024;

/// What the threads of an engine are working on.
#[repr(C)]
pub struct InFlightTable([InFlightSlot; MOST_WORKERS]);

#[repr(C)]
struct InFlightSlot {
    /// The number of the request; 0 if there is none. Stored last.
    unique: AtomicU64,
    handle: AtomicU64,
    class: AtomicU32,
    padding: AtomicU32,
}

/// What it means if the engine dies during a request and the kernel does not send it again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum RequestClass {
    /// Answered with ESTALE: the kernel retries path operations by itself.
    Retryable = 1,
    /// Answered with EIO.
    Failing = 2,
    /// As above, and what was to be written through this handle is missing.
    Write = 3,
    /// No caller waits for it, but it must be done.
    Release = 4,
}

/// A request that an engine had read and not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InFlight {
    pub unique: u64,
    pub handle: u64,
    pub class: RequestClass,
}

/// A request is worked on as long as this exists.
pub struct InFlightGuard<'a> {
    state: &'a State,
    note: Option<&'a InFlightSlot>,
}

thread_local! {
    static WORKER: usize = {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        usize::try_from(NEXT.fetch_add(1, Ordering::Relaxed)).unwrap_or(usize::MAX)
    };
}

impl State {
    /// Records that this thread works on a request.
    pub fn begin(&self, unique: u64, handle: u64, class: RequestClass) -> InFlightGuard<'_> {
        self.head().begun.fetch_add(1, Ordering::Relaxed);
        let note = WORKER.with(|it| self.head().work.0.get(*it));
        if let Some(note) = note {
            note.handle.store(handle, Ordering::Relaxed);
            note.class.store(class as u32, Ordering::Relaxed);
            note.unique.store(unique, Ordering::Release);
        }
        InFlightGuard { state: self, note }
    }

    /// Lets the supervisor see progress while requests wait for the store.
    pub fn note_waiting(&self) {
        self.head().begun.fetch_add(1, Ordering::Relaxed);
        self.head().done.fetch_add(1, Ordering::Release);
    }

    /// What the previous engine was working on when it died; it is forgotten now.
    pub fn take_in_flight(&self) -> Vec<InFlight> {
        self.head().done.store(self.head().begun.load(Ordering::Acquire), Ordering::Release);
        self.head().work.0.iter().filter_map(InFlightSlot::take).collect()
    }
}

impl InFlightSlot {
    fn take(&self) -> Option<InFlight> {
        let handle = self.handle.load(Ordering::Relaxed);
        let class = match self.class.load(Ordering::Relaxed) {
            1 => RequestClass::Retryable,
            3 => RequestClass::Write,
            4 => RequestClass::Release,
            _ => RequestClass::Failing,
        };
        let unique = self.unique.swap(0, Ordering::AcqRel);
        (unique != 0).then_some(InFlight { unique, handle, class })
    }
}

impl Drop for InFlightGuard<'_> {
    fn drop(&mut self) {
        if let Some(note) = self.note {
            note.unique.store(0, Ordering::Release);
        }
        self.state.head().done.fetch_add(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_successor_finds_what_was_begun_and_not_done() {
        let state = State::private().unwrap();
        drop(state.begin(1, 0, RequestClass::Retryable));
        std::mem::forget(state.begin(2, 77, RequestClass::Write));
        assert_eq!(state.take_in_flight(), [InFlight { unique: 2, handle: 77, class: RequestClass::Write }]);
        assert_eq!(state.take_in_flight(), []);
        assert_eq!(state.head().begun.load(Ordering::Relaxed), state.head().done.load(Ordering::Relaxed));
    }

    #[test]
    fn each_thread_has_a_note_of_its_own() {
        let state = State::private().unwrap();
        for unique in 1..4 {
            let state = state.clone();
            let work = move || std::mem::forget(state.begin(unique, 0, RequestClass::Failing));
            std::thread::spawn(work).join().unwrap();
        }
        let mut found: Vec<u64> = state.take_in_flight().iter().map(|it| it.unique).collect();
        found.sort_unstable();
        assert_eq!(found, [1, 2, 3]);
    }
}
