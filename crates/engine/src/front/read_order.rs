//! Serves the reads of one handle in file order.
//!
//! Kernel readahead sends several READ requests at once and the threads that pick them up overtake each other. Served in that
//! order they would look like random access, and the prefetcher would discard its window and restart. Waiting costs nothing:
//! `S3Filesystem` serves one read per handle at a time anyway.

use std::collections::BTreeMap;

use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

/// How long a read waits for the one before it, which another thread has already taken from the kernel. Usually that thread is
/// microseconds late, longer only on a busy machine.
const REORDER_WAIT: Duration = Duration::from_millis(2);

/// After this many consecutive sequential reads the reader is considered sequential.
const SEQUENTIAL_READS: u32 = 4;

/// A read waits for at most this many others: several threads may read different parts of the file through one handle.
const MAX_OVERTAKEN: u64 = 8;

/// A read farther ahead than this is a seek: kernel readahead is smaller.
const MAX_READAHEAD: u64 = 8 << 20;

#[derive(Debug)]
pub struct ReadOrder {
    reorder_wait: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

impl Default for ReadOrder {
    fn default() -> Self {
        Self { reorder_wait: REORDER_WAIT, state: Mutex::default(), changed: Condvar::new() }
    }
}

#[derive(Debug, Default)]
struct State {
    is_busy: bool,
    /// Where the last read ended.
    next: u64,
    /// Consecutive reads that each started where the previous one ended.
    streak: u32,
    /// Reads served so far.
    served: u64,
    /// Offsets of waiting reads.
    wanted: BTreeMap<u64, PendingReads>,
}

#[derive(Debug)]
struct PendingReads {
    /// Waiting reads at this offset.
    count: usize,
    /// Value of `served` when the first of them arrived.
    since: u64,
}

/// Permission to read; released on drop.
#[must_use]
pub struct ReadPermit<'a>(&'a ReadOrder);

impl ReadOrder {
    /// Blocks until the read at `offset` is next.
    pub fn enter(&self, offset: u64, size: u64) -> ReadPermit<'_> {
        let mut state = self.state();
        state.want(offset);
        let give_up = Instant::now() + self.reorder_wait;
        loop {
            if state.is_busy || state.first_wanted() != Some(offset) {
                self.changed.wait(&mut state);
                continue;
            }
            let left = give_up.saturating_duration_since(Instant::now());
            if !state.may_be_early(offset) || left.is_zero() {
                break;
            }
            self.changed.wait_for(&mut state, left);
        }
        state.begin(offset, size);
        ReadPermit(self)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

impl Drop for ReadPermit<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.is_busy = false;
        if !state.wanted.is_empty() {
            self.0.changed.notify_all();
        }
    }
}

impl State {
    fn want(&mut self, offset: u64) {
        let since = self.served;
        self.wanted.entry(offset).or_insert(PendingReads { count: 0, since }).count += 1;
    }

    /// An overdue read; else the one closest after the end of the last read; else the lowest offset.
    fn first_wanted(&self) -> Option<u64> {
        let is_overdue = |(_, it): &(&u64, &PendingReads)| MAX_OVERTAKEN <= self.served - it.since;
        let overdue = self.wanted.iter().filter(is_overdue).min_by_key(|(_, it)| it.since);
        let ahead = || self.wanted.range(self.next..).next();
        overdue.or_else(ahead).or_else(|| self.wanted.first_key_value()).map(|(offset, _)| *offset)
    }

    fn may_be_early(&self, offset: u64) -> bool {
        SEQUENTIAL_READS <= self.streak && self.next < offset && offset - self.next <= MAX_READAHEAD
    }

    fn begin(&mut self, offset: u64, size: u64) {
        self.is_busy = true;
        self.served += 1;
        self.streak = if offset == self.next { self.streak.saturating_add(1) } else { 0 };
        self.next = offset.saturating_add(size);
        if let Some(wanted) = self.wanted.get_mut(&offset) {
            wanted.count -= 1;
            if wanted.count == 0 {
                self.wanted.remove(&offset);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread;

    use super::*;

    const STEP: u64 = 1000;

    /// An order after `reads` sequential reads.
    fn used(reads: u64, reorder_wait: Duration) -> ReadOrder {
        let order = ReadOrder { reorder_wait, ..ReadOrder::default() };
        for number in 0..reads {
            drop(order.enter(number * STEP, STEP));
        }
        order
    }

    /// Queues reads of these steps behind a running one and returns the order in which they are served.
    fn served(order: &ReadOrder, current: u64, wanted: &[u64]) -> Vec<u64> {
        let (sender, served) = channel();
        thread::scope(|scope| {
            let turn = order.enter(current * STEP, STEP);
            for &number in wanted {
                let sender = sender.clone();
                scope.spawn(move || {
                    let _turn = order.enter(number * STEP, STEP);
                    sender.send(number).unwrap();
                });
            }
            while order.state().wanted.len() < wanted.len() {
                thread::yield_now();
            }
            drop(turn);
        });
        drop(sender);
        served.iter().collect()
    }

    #[test]
    fn waiting_reads_are_served_in_file_order() {
        assert_eq!(served(&used(9, REORDER_WAIT), 9, &[13, 10, 12, 11]), [10, 11, 12, 13]);
        assert_eq!(served(&used(0, REORDER_WAIT), 0, &[3, 1, 2]), [1, 2, 3]);
    }

    #[test]
    fn backward_reads_are_served_last() {
        assert_eq!(served(&used(9, REORDER_WAIT), 9, &[2, 11, 10]), [10, 11, 2]);
    }

    #[test]
    fn a_waiting_read_is_not_starved_by_sequential_reads() {
        let mut state = State { next: 100 * STEP, ..State::default() };
        state.want(0);
        for number in 100.. {
            state.want(number * STEP);
            let first = state.first_wanted().unwrap();
            if first == 0 {
                assert_eq!(number, 100 + MAX_OVERTAKEN);
                break;
            }
            assert_eq!(first, number * STEP);
            state.begin(first, STEP);
        }
    }

    #[test]
    fn an_early_read_waits_for_the_one_before_it() {
        let order = used(9, Duration::from_mins(1));
        let (sender, served) = channel();
        let early = sender.clone();
        thread::scope(|scope| {
            scope.spawn(|| {
                let _turn = order.enter(10 * STEP, STEP);
                early.send(10).unwrap();
            });
            while order.state().wanted.is_empty() {
                thread::yield_now();
            }
            let _turn = order.enter(9 * STEP, STEP);
            sender.send(9).unwrap();
        });
        assert_eq!(served.try_iter().collect::<Vec<u64>>(), [9, 10]);
    }

    #[test]
    fn random_reads_do_not_wait() {
        let order = used(SEQUENTIAL_READS.into(), Duration::ZERO);
        assert!(order.state().may_be_early(9 * STEP));
        assert!(!order.state().may_be_early(9 * STEP + MAX_READAHEAD));
        drop(order.enter(9 * STEP, STEP));
        assert_eq!(order.state().streak, 0);
        assert!(!order.state().may_be_early(99 * STEP));
        drop(order.enter(0, STEP));
        assert_eq!(order.state().next, STEP);
        assert!(order.state().wanted.is_empty());
    }
}
