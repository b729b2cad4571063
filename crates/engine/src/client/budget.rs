//! How much memory small files may take while they are being written.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use mountpoint_s3_fs::memory::data_buffer_budget_for;

/// A number of bytes that many buffers share.
#[derive(Debug)]
pub struct MemoryBudget {
    limit: usize,
    used: AtomicUsize,
}

impl MemoryBudget {
    pub fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit, used: AtomicUsize::new(0) })
    }

    /// The file system keeps an eighth of its memory target (at least 128 MiB) free of data, for whatever is not counted.
    /// Our buffers are counted, and may take half of that.
    pub fn within_target(memory_target: usize) -> Arc<Self> {
        Self::new((memory_target - data_buffer_budget_for(memory_target)) / 2)
    }

    fn try_take(&self, bytes: usize) -> bool {
        self.used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
                used.checked_add(bytes).filter(|it| *it <= self.limit)
            })
            .is_ok()
    }
}

/// Bytes kept in memory, each of them taken from the budget until the buffer is dropped.
#[derive(Debug)]
pub struct Buffer {
    bytes: Vec<u8>,
    taken: usize,
    budget: Arc<MemoryBudget>,
}

impl Buffer {
    pub fn new(budget: &Arc<MemoryBudget>) -> Self {
        Self { bytes: Vec::new(), taken: 0, budget: budget.clone() }
    }

    /// Appends, unless the buffer would become longer than `limit` or the budget is used up.
    pub fn try_append(&mut self, data: &[u8], limit: usize) -> bool {
        let length = self.bytes.len() + data.len();
        if limit < length {
            return false;
        }
        if self.taken < length {
            // Doubling keeps the copying linear; the budget counts what is allocated, not what is used of it.
            let capacity = length.next_power_of_two().min(limit);
            if !self.budget.try_take(capacity - self.taken) {
                return false;
            }
            self.taken = capacity;
            self.bytes.reserve_exact(capacity - self.bytes.len());
        }
        self.bytes.extend_from_slice(data);
        true
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.taken, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMIT: usize = 100;

    #[test]
    fn a_buffer_is_refused_when_the_budget_is_used_up_and_fits_again_when_another_is_dropped() {
        let budget = MemoryBudget::new(LIMIT);
        let mut first = Buffer::new(&budget);
        let mut second = Buffer::new(&budget);
        assert!(first.try_append(&[1; 60], LIMIT));
        assert!(!second.try_append(&[2; 60], LIMIT));
        drop(first);
        assert!(second.try_append(&[2; 60], LIMIT));
        assert_eq!(second.as_ref(), [2; 60]);
    }

    #[test]
    fn the_smallest_memory_target_leaves_room_for_a_dozen_small_files() {
        assert_eq!(MemoryBudget::within_target(512 << 20).limit, 64 << 20);
    }

    proptest! {
        #[test]
        fn nothing_is_lost_and_the_budget_is_whole_again_at_the_end(chunks in prop::collection::vec(0_usize..40, 0..10)) {
            let budget = MemoryBudget::new(LIMIT);
            let mut buffer = Buffer::new(&budget);
            let mut expected = Vec::new();
            for (number, length) in (0_u8..).zip(chunks) {
                let chunk = vec![number; length];
                let fits = expected.len() + length <= 50;
                prop_assert_eq!(buffer.try_append(&chunk, 50), fits);
                if fits {
                    expected.extend(chunk);
                }
                prop_assert!(budget.used.load(Ordering::Relaxed) <= LIMIT);
            }
            prop_assert_eq!(buffer.as_ref(), &expected[..]);
            drop(buffer);
            prop_assert_eq!(budget.used.load(Ordering::Relaxed), 0);
        }
    }
}
