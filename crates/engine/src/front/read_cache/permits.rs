//! A counting semaphore for threads.

use parking_lot::{Condvar, Mutex};

pub struct Permits {
    free: Mutex<usize>,
    freed: Condvar,
}

/// Given back when it is dropped.
#[must_use]
pub struct FetchPermit<'a>(&'a Permits);

impl Permits {
    pub fn new(count: usize) -> Self {
        Self { free: Mutex::new(count), freed: Condvar::new() }
    }

    pub fn acquire(&self) -> FetchPermit<'_> {
        let mut free = self.free.lock();
        self.freed.wait_while(&mut free, |it| *it == 0);
        *free -= 1;
        FetchPermit(self)
    }
}

impl Drop for FetchPermit<'_> {
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
}
