//! Reads of one open file, in the order of the file.
//!
//! The kernel reads ahead with several requests at once, and the threads that take them overtake each other. Whoever reads ahead
//! from the server would see a reader that jumps to and fro, throw away what it has and start anew. Nothing is lost by waiting:
//! the file system beneath serves one read of a handle at a time anyway.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a read waits for the one before it, which another thread has taken from the kernel already. A thread comes a few
/// microseconds late, unless the machine is busy.
const PATIENCE: Duration = Duration::from_millis(2);

/// So many reads one after the other make a reader who will probably not jump now.
const STREAK: u32 = 4;

/// Nobody waits while more than so many others are served: several may read different parts of the file through one handle.
const MOST_OTHERS: u64 = 8;

/// Whoever is farther ahead has jumped: the kernel reads ahead by less.
const FARTHEST: u64 = 8 << 20;

#[derive(Debug)]
pub struct ReadOrder {
    patience: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

impl Default for ReadOrder {
    fn default() -> Self {
        Self { patience: PATIENCE, state: Mutex::default(), changed: Condvar::new() }
    }
}

#[derive(Debug, Default)]
struct State {
    is_busy: bool,
    /// Where the last read ended.
    next: u64,
    /// Reads that each began where the one before ended.
    streak: u32,
    /// How many reads there were.
    turns: u64,
    /// Offsets that somebody wants to read at.
    wanted: BTreeMap<u64, Wanted>,
}

#[derive(Debug)]
struct Wanted {
    /// By how many.
    count: usize,
    /// How many reads there had been when the first one came.
    since: u64,
}

/// The right to read; ends when it is dropped.
#[must_use]
pub struct Turn<'a>(&'a ReadOrder);

impl ReadOrder {
    /// Waits for one's turn.
    pub fn enter(&self, offset: u64, size: u64) -> Turn<'_> {
        let mut state = self.state();
        state.want(offset);
        let give_up = Instant::now() + self.patience;
        loop {
            if state.is_busy || state.first_wanted() != Some(offset) {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let left = give_up.saturating_duration_since(Instant::now());
            if !state.may_be_early(offset) || left.is_zero() {
                break;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.begin(offset, size);
        Turn(self)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Turn<'_> {
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
        let since = self.turns;
        self.wanted.entry(offset).or_insert(Wanted { count: 0, since }).count += 1;
    }

    /// Whoever has waited too long; else who goes on where the last one ended, or comes next after that; then those who look back.
    fn first_wanted(&self) -> Option<u64> {
        let is_overdue = |(_, it): &(&u64, &Wanted)| MOST_OTHERS <= self.turns - it.since;
        let overdue = self.wanted.iter().filter(is_overdue).min_by_key(|(_, it)| it.since);
        let ahead = || self.wanted.range(self.next..).next();
        overdue.or_else(ahead).or_else(|| self.wanted.first_key_value()).map(|(offset, _)| *offset)
    }

    fn may_be_early(&self, offset: u64) -> bool {
        STREAK <= self.streak && self.next < offset && offset - self.next <= FARTHEST
    }

    fn begin(&mut self, offset: u64, size: u64) {
        self.is_busy = true;
        self.turns += 1;
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

    /// An order in which `reads` were made one after the other.
    fn used(reads: u64, patience: Duration) -> ReadOrder {
        let order = ReadOrder { patience, ..ReadOrder::default() };
        for number in 0..reads {
            drop(order.enter(number * STEP, STEP));
        }
        order
    }

    /// Lets threads want these steps while somebody else reads; in which order they get them.
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
    fn those_who_wait_are_served_in_the_order_of_the_file() {
        assert_eq!(served(&used(9, PATIENCE), 9, &[13, 10, 12, 11]), [10, 11, 12, 13]);
        assert_eq!(served(&used(0, PATIENCE), 0, &[3, 1, 2]), [1, 2, 3]);
    }

    #[test]
    fn those_who_look_back_come_last_and_are_not_forgotten() {
        assert_eq!(served(&used(9, PATIENCE), 9, &[2, 11, 10]), [10, 11, 2]);
    }

    #[test]
    fn nobody_waits_for_ever_behind_those_who_read_on() {
        let mut state = State { next: 100 * STEP, ..State::default() };
        state.want(0);
        for number in 100.. {
            state.want(number * STEP);
            let first = state.first_wanted().unwrap();
            if first == 0 {
                assert_eq!(number, 100 + MOST_OTHERS);
                break;
            }
            assert_eq!(first, number * STEP);
            state.begin(first, STEP);
        }
    }

    #[test]
    fn a_read_that_came_too_early_waits_for_the_one_before() {
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
    fn a_reader_who_jumps_waits_for_nobody_or_not_for_long() {
        let order = used(STREAK.into(), Duration::ZERO);
        assert!(order.state().may_be_early(9 * STEP));
        assert!(!order.state().may_be_early(9 * STEP + FARTHEST));
        drop(order.enter(9 * STEP, STEP));
        assert_eq!(order.state().streak, 0);
        assert!(!order.state().may_be_early(99 * STEP));
        drop(order.enter(0, STEP));
        assert_eq!(order.state().next, STEP);
        assert!(order.state().wanted.is_empty());
    }
}
