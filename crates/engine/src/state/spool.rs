//! Bytes that were written and are not in the bucket yet, so that a successor can write them once more.
//!
//! Each slot has a place of its own in the memory file, behind the slots; a place takes memory only where it was written
//! to. Reading and writing are system calls: what a dead engine has written is there, as far as its slot says so.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::FallocateFlags;

use super::memory;
use super::slots::MOST_SLOTS;

/// Maximum size of one file. Uploads of larger files cannot be restarted from memory.
pub const LONGEST: u64 = 8 << 20;
/// The most that is kept of all files together.
const BUDGET: u64 = 64 << 20;
const START: u64 = memory::LENGTH as u64;
pub const END: u64 = START + MOST_SLOTS as u64 * LONGEST;
/// Memory is taken by the page.
const PAGE: u64 = 4096;

pub struct Spool {
    file: File,
    /// Bytes of memory in use.
    taken: AtomicU64,
}

impl Spool {
    pub fn new(file: File) -> Self {
        Self { file, taken: AtomicU64::new(0) }
    }

    /// Locks the whole file for this process. The lock ends with the process, however it dies; it would also end if any other
    /// descriptor of the file were closed in this process.
    pub fn lock(&self) -> io::Result<()> {
        let lock = || rustix::fs::fcntl_lock(&self.file, rustix::fs::FlockOperation::LockExclusive);
        Ok(rustix::io::retry_on_intr(lock)?)
    }

    /// Keeps `data`, which follows the `length` bytes that are kept already. Answers whether there was room.
    pub fn append(&self, slot: u32, length: u64, data: &[u8]) -> bool {
        let longer = length.saturating_add(data.len() as u64);
        if longer > LONGEST || !self.take(pages(longer) - pages(length)) {
            return false;
        }
        match self.file.write_all_at(data, place(slot) + length) {
            Ok(()) => true,
            Err(error) => {
                tracing::debug!(%error, "cannot write to the spool");
                self.give_back(pages(longer) - pages(length));
                false
            }
        }
    }

    /// Writes `data` at `offset` of a file of `length` bytes. Answers whether there was room.
    pub fn write_at(&self, slot: u32, length: u64, offset: u64, data: &[u8]) -> bool {
        let longer = offset.saturating_add(data.len() as u64).max(length);
        if longer > LONGEST || !self.take(pages(longer) - pages(length)) {
            return false;
        }
        match self.file.write_all_at(data, place(slot) + offset) {
            Ok(()) => true,
            Err(error) => {
                tracing::debug!(%error, "cannot write to the spool");
                self.give_back(pages(longer) - pages(length));
                false
            }
        }
    }

    /// Changes the length of a file. What is cut off reads as zeros if the file grows again. Answers whether there was room.
    pub fn set_length(&self, slot: u32, length: u64, new: u64) -> bool {
        if new <= length {
            self.free(place(slot) + new, LONGEST - new);
            self.give_back(pages(length) - pages(new));
            return true;
        }
        new <= LONGEST && self.take(pages(new) - pages(length))
    }

    /// Reads kept bytes from `offset` on.
    pub fn read(&self, slot: u32, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(bytes, place(slot) + offset)
    }

    /// The `length` bytes that were kept for this slot are not needed any longer.
    pub fn clear(&self, slot: u32, length: u64) {
        if length > 0 {
            self.free(place(slot), LONGEST);
            self.give_back(pages(length));
        }
    }

    /// Learns what previous engines have kept, and frees everything else. `kept` are slots below `used` and the
    /// lengths of what they have, in the order of their numbers.
    pub fn load(&self, used: u32, kept: impl Iterator<Item = (u32, u64)>) {
        let mut taken = 0;
        let mut free_from = START;
        for (slot, length) in kept {
            self.free(free_from, place(slot) - free_from);
            // What is behind it was written or cut off without an answer to the kernel.
            free_from = place(slot) + length.min(LONGEST);
            taken += pages(length);
        }
        self.free(free_from, place(used) - free_from);
        self.taken.store(taken, Ordering::Release);
    }

    fn free(&self, start: u64, length: u64) {
        if length == 0 {
            return;
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if let Err(error) = rustix::fs::fallocate(&self.file, flags, start, length) {
            tracing::warn!(%error, "cannot free spool memory");
        }
    }

    fn take(&self, bytes: u64) -> bool {
        let more = |taken: u64| taken.checked_add(bytes).filter(|it| *it <= BUDGET);
        self.taken.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).is_ok()
    }

    fn give_back(&self, bytes: u64) {
        self.taken.fetch_sub(bytes, Ordering::AcqRel);
    }
}

fn place(slot: u32) -> u64 {
    START + u64::from(slot) * LONGEST
}

fn pages(bytes: u64) -> u64 {
    bytes.next_multiple_of(PAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spool() -> Spool {
        let file = tempfile::tempfile().unwrap();
        file.set_len(END.min(1 << 40)).unwrap();
        Spool::new(file)
    }

    fn read(spool: &Spool, slot: u32, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        spool.read(slot, 0, &mut bytes).unwrap();
        bytes
    }

    #[test]
    fn what_was_appended_is_read_back_and_neighbours_do_not_mix() {
        let spool = spool();
        assert!(spool.append(7, 0, b"one"));
        assert!(spool.append(8, 0, b"other"));
        assert!(spool.append(7, 3, b"two"));
        assert_eq!((read(&spool, 7, 6), read(&spool, 8, 5)), (b"onetwo".to_vec(), b"other".to_vec()));
        spool.clear(7, 6);
        assert_eq!((read(&spool, 7, 6), read(&spool, 8, 5)), (vec![0; 6], b"other".to_vec()));
    }

    #[test]
    fn a_file_and_all_files_together_have_a_limit() {
        let spool = spool();
        assert!(!spool.append(1, LONGEST, b"x"));
        let whole = vec![1; usize::try_from(LONGEST).unwrap()];
        let files = u32::try_from(BUDGET / LONGEST).unwrap();
        for slot in 0..files {
            assert!(spool.append(slot, 0, &whole));
        }
        assert!(!spool.append(files, 0, b"x"));
        spool.clear(0, LONGEST);
        assert!(spool.append(files, 0, b"x"));
    }

    #[test]
    fn a_file_is_written_anywhere_and_what_was_cut_off_reads_as_zeros() {
        let spool = spool();
        assert!(spool.write_at(3, 0, 5, b"tail"));
        assert_eq!(read(&spool, 3, 9), b"\0\0\0\0\0tail");
        assert!(spool.write_at(3, 9, 0, b"head"));
        assert!(spool.set_length(3, 9, 2) && spool.set_length(3, 2, 9));
        assert_eq!(read(&spool, 3, 9), b"he\0\0\0\0\0\0\0");
        assert!(!spool.set_length(3, 9, LONGEST + 1) && !spool.write_at(3, 9, LONGEST, b"x"));
        spool.clear(3, 9);
        assert_eq!(spool.taken.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_successor_counts_what_is_kept_and_frees_the_rest() {
        let spool = spool();
        for slot in 1..5 {
            assert!(spool.append(slot, 0, b"kept"));
        }
        let successor = Spool::new(spool.file.try_clone().unwrap());
        successor.load(5, [(2, 4), (4, 4)].into_iter());
        assert_eq!(successor.taken.load(Ordering::Relaxed), 2 * PAGE);
        assert_eq!([1, 2, 3, 4].map(|slot| read(&successor, slot, 1)[0]), [0, b'k', 0, b'k']);
        let third = Spool::new(spool.file.try_clone().unwrap());
        third.load(5, [(2, 2)].into_iter());
        assert_eq!(read(&third, 2, 4), b"ke\0\0");
    }
}
