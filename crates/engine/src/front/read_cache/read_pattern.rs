//! Tells random reads from sequential ones, for one handle.

use parking_lot::Mutex;

/// How far before the end of the last read a sequential reader may go back.
const BACKWARD: u64 = 1 << 20;
/// How far beyond it a sequential reader may skip. Kernel readahead is smaller.
const FORWARD: u64 = 8 << 20;
/// A random reader that has read this much in a row is sequential: from here on reading ahead pays.
const SEQUENTIAL_RUN: u64 = 2 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadKind {
    Sequential,
    /// Not where the read before it ended.
    Jump,
    /// Goes on after a jump, not for long enough yet to be sequential.
    AfterJump,
}

#[derive(Debug, Default)]
pub struct ReadPattern(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    is_random: bool,
    has_jumped: bool,
    /// Where the next read of a sequential reader begins.
    next: u64,
    /// How much was read in a row since the last jump.
    run: u64,
}

impl ReadPattern {
    /// Takes note of a read and says what the reader does.
    pub fn note(&self, offset: u64, size: u64) -> ReadKind {
        let mut state = self.0.lock();
        match (state.note(offset, size), state.run) {
            (false, _) => ReadKind::Sequential,
            (true, 0) => ReadKind::Jump,
            (true, _) => ReadKind::AfterJump,
        }
    }

    /// Whether the handle was ever read at random, or not from the beginning.
    pub fn has_jumped(&self) -> bool {
        self.0.lock().has_jumped
    }
}

impl State {
    fn note(&mut self, offset: u64, size: u64) -> bool {
        let end = offset.saturating_add(size);
        let is_near = |forward| self.next <= offset.saturating_add(BACKWARD) && offset <= self.next + forward;
        if !self.is_random {
            if is_near(FORWARD) {
                self.next = self.next.max(end);
                return false;
            }
            *self = Self { is_random: true, has_jumped: true, next: end, run: 0 };
            return true;
        }
        // Requests of one readahead overtake each other.
        let continues = offset == self.next || (0 < self.run && is_near(BACKWARD));
        self.run = if continues { self.run + size } else { 0 };
        self.next = end;
        self.is_random = self.run < SEQUENTIAL_RUN;
        self.is_random
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIECE: u64 = 128 << 10;

    #[track_caller]
    fn check(reads: impl IntoIterator<Item = u64>, expected: ReadKind) -> ReadPattern {
        let pattern = ReadPattern::default();
        let last = reads.into_iter().map(|offset| pattern.note(offset, PIECE)).last();
        assert_eq!(last, Some(expected));
        pattern
    }

    #[test]
    fn readers_in_order_are_sequential_also_if_their_requests_overtake_each_other() {
        check((0..100).map(|it| it * PIECE), ReadKind::Sequential);
        check([0, 3, 1, 2, 7, 5, 6, 4].map(|it| it * PIECE), ReadKind::Sequential);
        check([0, 4 << 20, 8 << 20], ReadKind::Sequential);
    }

    #[test]
    fn a_jump_makes_a_reader_random() {
        check([100 << 20], ReadKind::Jump);
        check([0, 50 << 20, 10 << 20], ReadKind::Jump);
        check([0, PIECE, 20 * PIECE, 2 * PIECE], ReadKind::Jump);
    }

    #[test]
    fn a_random_reader_that_goes_on_in_order_is_sequential_again() {
        let start = 100 << 20;
        let order = |count: u64| (0..count).map(move |it| start + it * PIECE);
        check(order(16), ReadKind::AfterJump);
        let pattern = check(order(17), ReadKind::Sequential);
        assert_eq!(pattern.note(start + 17 * PIECE, PIECE), ReadKind::Sequential);
        assert_eq!(pattern.note(0, PIECE), ReadKind::Jump);
        assert!(pattern.has_jumped());
    }
}
