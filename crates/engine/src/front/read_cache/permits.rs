//! A counting semaphore for threads.

use std::ops::Deref;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

pub struct Permits {
    free: Mutex<usize>,
    freed: Condvar,
}

/// Given back when it is dropped.
#[must_use]
pub struct Permit<P: Deref<Target = Permits>>(P);

impl Permits {
    pub fn new(count: usize) -> Self {
        Self { free: Mutex::new(count), freed: Condvar::new() }
    }

    pub fn acquire(&self) -> Permit<&Self> {
        let mut free = self.free.lock();
        self.freed.wait_while(&mut free, |it| *it == 0);
        *free -= 1;
        Permit(self)
    }

    /// Without waiting.
    pub fn try_acquire(self: &Arc<Self>) -> Option<Permit<Arc<Self>>> {
        let mut free = self.free.lock();
        *free = free.checked_sub(1)?;
        Some(Permit(Arc::clone(self)))
    }
}

impl<P: Deref<Target = Permits>> Drop for Permit<P> {
    fn drop(&mut self) {
        *self.0.free.lock() += 1;
        self.0.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    use super::*;

    #[test]
    fn no_more_than_allowed_run_at_once() {
        let (permits, running, most) = (Permits::new(3), AtomicUsize::new(0), AtomicUsize::new(0));
        thread::scope(|scope| {
            for _ in 0..20 {
                scope.spawn(|| {
                    let _permit = permits.acquire();
                    most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    thread::yield_now();
                    running.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        assert!((1..=3).contains(&most.load(Ordering::SeqCst)));
        assert_eq!(*permits.free.lock(), 3);
    }

    #[test]
    fn who_does_not_wait_gets_none_if_all_are_taken() {
        let permits = Arc::new(Permits::new(1));
        let permit = permits.try_acquire();
        assert!(permit.is_some() && permits.try_acquire().is_none());
        drop(permit);
        assert!(permits.try_acquire().is_some());
    }
}
