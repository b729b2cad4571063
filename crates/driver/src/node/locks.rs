//! Locks by name: one call per target, one change per source. Concurrency only; what is mounted is asked of the kernel.

use std::collections::BTreeSet;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

#[derive(Debug, Default)]
pub struct Locks {
    held: Mutex<BTreeSet<String>>,
    released: Condvar,
}

/// Released when dropped.
#[derive(Debug)]
#[must_use = "the lock is released when this is dropped"]
pub struct Held<'a> {
    locks: &'a Locks,
    name: String,
}

impl Locks {
    /// The lock, unless somebody has it.
    pub fn try_lock(&self, name: &str) -> Option<Held<'_>> {
        self.held().insert(name.to_owned()).then(|| self.guard(name))
    }

    /// The lock, once it is free, or `None` at the deadline.
    pub fn lock(&self, name: &str, deadline: Instant) -> Option<Held<'_>> {
        let mut held = self.held();
        while held.contains(name) {
            let left = deadline.checked_duration_since(Instant::now())?;
            held = self.released.wait_timeout(held, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        held.insert(name.to_owned());
        Some(self.guard(name))
    }

    fn guard(&self, name: &str) -> Held<'_> {
        Held { locks: self, name: name.to_owned() }
    }

    /// The set is changed by single calls that cannot panic half-way, so a poisoned mutex still holds a sound set.
    fn held(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.locks.held().remove(&self.name);
        self.locks.released.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_name_is_held_once_and_free_after_the_guard() {
        let locks = Locks::default();
        let first = locks.try_lock("a").unwrap();
        assert!(locks.try_lock("a").is_none());
        assert!(locks.try_lock("b").is_some());
        drop(first);
        assert!(locks.try_lock("a").is_some());
    }

    #[test]
    fn waiting_ends_at_the_deadline_or_with_the_lock() {
        let locks = Locks::default();
        let first = locks.try_lock("a").unwrap();
        assert!(locks.lock("a", Instant::now()).is_none());
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| locks.lock("a", Instant::now() + Duration::from_mins(1)).is_some());
            drop(first);
            assert!(waiter.join().unwrap());
        });
    }
}
