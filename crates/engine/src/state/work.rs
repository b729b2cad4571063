//! Which requests of the kernel are being worked on, and by whom: for the keeper, who wants to see progress, and for a successor
//! on a kernel that does not send requests again.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::State;

/// As many as there can be threads that serve.
const MOST_WORKERS: usize = 1024;

/// What the threads of an engine are working on.
#[repr(C)]
pub struct Notes([Note; MOST_WORKERS]);

#[repr(C)]
struct Note {
    /// The number of the request; 0 if there is none. Stored last.
    unique: AtomicU64,
    handle: AtomicU64,
    loss: AtomicU32,
    padding: AtomicU32,
}

/// What it means if the engine dies during a request and the kernel does not send it again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Loss {
    /// Whoever waits may ask again, and the kernel does so by itself if it hears that something is stale.
    AskAgain = 1,
    /// Whoever waits hears of an error.
    Fail = 2,
    /// As above, and what was to be written through this handle is missing.
    Write = 3,
    /// Nobody waits, but it must be done.
    Release = 4,
}

/// A request that an engine had read and not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Noted {
    pub unique: u64,
    pub handle: u64,
    pub loss: Loss,
}

/// A request is worked on as long as this exists.
pub struct Working<'a> {
    state: &'a State,
    note: Option<&'a Note>,
}

thread_local! {
    static WORKER: usize = {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        usize::try_from(NEXT.fetch_add(1, Ordering::Relaxed)).unwrap_or(usize::MAX)
    };
}

impl State {
    /// Notes that this thread works on a request.
    pub fn begin(&self, unique: u64, handle: u64, loss: Loss) -> Working<'_> {
        self.head().begun.fetch_add(1, Ordering::Relaxed);
        let note = WORKER.with(|it| self.head().work.0.get(*it));
        if let Some(note) = note {
            note.handle.store(handle, Ordering::Relaxed);
            note.loss.store(loss as u32, Ordering::Relaxed);
            note.unique.store(unique, Ordering::Release);
        }
        Working { state: self, note }
    }

    /// What the engine before this one was working on when it died; it is forgotten now.
    pub fn take_noted(&self) -> Vec<Noted> {
        self.head().done.store(self.head().begun.load(Ordering::Acquire), Ordering::Release);
        self.head().work.0.iter().filter_map(Note::take).collect()
    }
}

impl Note {
    fn take(&self) -> Option<Noted> {
        let handle = self.handle.load(Ordering::Relaxed);
        let loss = match self.loss.load(Ordering::Relaxed) {
            1 => Loss::AskAgain,
            3 => Loss::Write,
            4 => Loss::Release,
            _ => Loss::Fail,
        };
        let unique = self.unique.swap(0, Ordering::AcqRel);
        (unique != 0).then_some(Noted { unique, handle, loss })
    }
}

impl Drop for Working<'_> {
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
        drop(state.begin(1, 0, Loss::AskAgain));
        std::mem::forget(state.begin(2, 77, Loss::Write));
        assert_eq!(state.take_noted(), [Noted { unique: 2, handle: 77, loss: Loss::Write }]);
        assert_eq!(state.take_noted(), []);
        assert_eq!(state.head().begun.load(Ordering::Relaxed), state.head().done.load(Ordering::Relaxed));
    }

    #[test]
    fn each_thread_has_a_note_of_its_own() {
        let state = State::private().unwrap();
        for unique in 1..4 {
            let state = state.clone();
            let work = move || std::mem::forget(state.begin(unique, 0, Loss::Fail));
            std::thread::spawn(work).join().unwrap();
        }
        let mut found: Vec<u64> = state.take_noted().iter().map(|it| it.unique).collect();
        found.sort_unstable();
        assert_eq!(found, [1, 2, 3]);
    }
}
