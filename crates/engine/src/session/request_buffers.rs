//! The memory into which the kernel copies its requests, present before it is needed.
//!
//! If an engine is killed while the kernel copies a request for it, and the copy meets a page of the buffer that was never touched,
//! the kernel cannot bring that page in for a dying process: it fails the request with EIO instead of keeping it for the next
//! engine. The FUSE library allocates a buffer for each of its threads and has no hook, so the allocator knows them by their size.
//!
//! An engine that took over from a dead one may be killed again soon, while writers wait to go on, so it touches its buffers first. In
//! other engines the first requests do it, and idle ones stay small.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, Ordering};

/// As the library's largest write, which is most of a buffer.
const BUFFER: usize = 16 << 20;
/// What the kernel sends at most: a mebibyte of data, headers, and what the library leaves out to align the data.
const LARGEST_REQUEST: usize = (1 << 20) + (16 << 10);
/// Of the smallest pages that a processor has.
const PAGE: usize = 4096;

static IS_WANTED: AtomicBool = AtomicBool::new(false);

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

/// Buffers that are allocated from now on are touched.
pub fn touch_new_buffers() {
    IS_WANTED.store(true, Ordering::Relaxed);
}

/// The system's allocator.
struct Allocator;

#[expect(unsafe_code, reason = "an allocator hands out memory")]
// SAFETY: every call is passed on to the system's allocator with the same arguments.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps to the same contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps to the same contract.
        let memory = unsafe { System.alloc_zeroed(layout) };
        if BUFFER <= layout.size() && !memory.is_null() && IS_WANTED.load(Ordering::Relaxed) {
            for offset in (0..LARGEST_REQUEST).step_by(PAGE) {
                // SAFETY: the offset is within the memory, which is as long as `BUFFER` at least and belongs to no other thread yet. It
                // holds zeros before and after.
                unsafe { memory.add(offset).write_volatile(0) };
            }
        }
        memory
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller keeps to the same contract.
        unsafe { System.realloc(memory, layout, size) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps to the same contract.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Page faults of this thread.
    fn faults() -> usize {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        let (_, fields) = stat.rsplit_once(") ").unwrap();
        fields.split_whitespace().nth(7).unwrap().parse().unwrap()
    }

    #[test]
    fn a_wanted_buffer_is_present_and_empty() {
        touch_new_buffers();
        let mut buffer = vec![0_u8; BUFFER + PAGE];
        let before = faults();
        for offset in (0..LARGEST_REQUEST).step_by(PAGE) {
            buffer[offset] = 1;
        }
        let taken = faults() - before;
        assert!(taken < LARGEST_REQUEST / PAGE / 4, "{taken} pages were not present");
        assert!(
            buffer
                .iter()
                .enumerate()
                .all(|(offset, it)| *it == u8::from(offset < LARGEST_REQUEST && offset % PAGE == 0))
        );
    }
}
