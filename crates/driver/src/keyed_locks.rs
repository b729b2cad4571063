//! Locks by name, with a deadline: one call per target, one change per source or volume at a time.

use std::collections::BTreeSet;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

#[derive(Debug, Default)]
pub struct KeyedLocks {
    held: Mutex<BTreeSet<String>>,
    released: Condvar,
}

/// A held lock, released when dropped.
#[derive(Debug)]
#[must_use = "the lock is released when this is dropped"]
pub struct Held<'a> {
    locks: &'a KeyedLocks,
    name: String,
}

impl KeyedLocks {
    /// Takes the lock unless it is held.
    pub fn try_lock(&self, name: &str) -> Option<Held<'_>> {
        self.held.lock().insert(name.to_owned()).then(|| self.guard(name))
    }

    /// Waits for the lock; `None` at the deadline.
    pub fn lock(&self, name: &str, deadline: Instant) -> Option<Held<'_>> {
        let mut held = self.held.lock();
        self.released.wait_while_until(&mut held, |it| it.contains(name), deadline);
        held.insert(name.to_owned()).then(|| self.guard(name))
    }

    fn guard(&self, name: &str) -> Held<'_> {
        Held { locks: self, name: name.to_owned() }
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.locks.held.lock().remove(&self.name);
        self.locks.released.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_name_is_held_once_and_free_after_the_guard() {
        let locks = KeyedLocks::default();
        let first = locks.try_lock("a").unwrap();
        assert!(locks.try_lock("a").is_none());
        assert!(locks.try_lock("b").is_some());
        drop(first);
        assert!(locks.try_lock("a").is_some());
    }

    #[test]
    fn waiting_ends_at_the_deadline_or_with_the_lock() {
        let locks = KeyedLocks::default();
        // Often enough that the waiter comes before and after the release.
        for _ in 0..200 {
            let first = locks.try_lock("a").unwrap();
            assert!(locks.lock("a", Instant::now()).is_none());
            let (started, starts) = std::sync::mpsc::channel();
            std::thread::scope(|scope| {
                let waiter = scope.spawn(|| {
                    started.send(()).unwrap();
                    locks.lock("a", Instant::now() + Duration::from_mins(1)).is_some()
                });
                starts.recv().unwrap();
                drop(first);
                assert!(waiter.join().unwrap());
            });
        }
    }
}
