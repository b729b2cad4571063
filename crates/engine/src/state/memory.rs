//! A file in memory, mapped: the only place that turns an address into what is there.
//!
//! Everything in it is made of atomic integers, for which every bit pattern is valid. So whatever another engine wrote, or
//! was about to write when it died, can be read.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

use super::Head;
use super::slots::{MOST_SLOTS, Slot};
use super::spool;

/// Slots start here.
const HEAD_BYTES: usize = 64 << 10;
/// What is mapped. The spool follows.
pub const LENGTH: usize = HEAD_BYTES + MOST_SLOTS as usize * size_of::<Slot>();

const _: () = assert!(size_of::<Head>() <= HEAD_BYTES, "the head must end before the first slot");

pub struct Memory {
    base: NonNull<u8>,
}

// SAFETY: the address is valid in every thread for as long as the value exists, and all that is there is atomic.
#[expect(unsafe_code, reason = "a pointer is not shared between threads unless told so")]
unsafe impl Send for Memory {}
// SAFETY: as above.
#[expect(unsafe_code, reason = "a pointer is not shared between threads unless told so")]
unsafe impl Sync for Memory {}

impl Memory {
    /// Maps the file up to the spool. A new one gets its length first; it takes memory only where it was written to.
    #[expect(unsafe_code, reason = "the standard library has no shared memory")]
    pub fn map(file: &File) -> io::Result<Self> {
        let length = file.metadata()?.len();
        if length == 0 {
            file.set_len(spool::END)?;
        } else if length != spool::END {
            return Err(io::Error::other("the file has another length"));
        }
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory. The file is longer than what
        // is mapped, and no process ever truncates it.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), LENGTH, access, flags, file.as_raw_fd(), 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        NonNull::new(base.cast()).map(|base| Self { base }).ok_or_else(|| io::Error::other("mapped at no address"))
    }

    #[expect(unsafe_code, reason = "the mapping has no type of its own")]
    pub fn head(&self) -> &Head {
        // SAFETY: the mapping starts at a page, is longer than a head, lives as long as `self`, and a head consists of
        // atomic integers only.
        unsafe { self.base.cast::<Head>().as_ref() }
    }

    #[expect(unsafe_code, reason = "the mapping has no type of its own")]
    pub fn slot(&self, number: u32) -> Option<&Slot> {
        if number >= MOST_SLOTS {
            return None;
        }
        // SAFETY: the slot with this number is inside the mapping (checked above), its address is a multiple of its size, it
        // lives as long as `self`, and it consists of atomic integers only.
        let slot = unsafe { self.base.add(HEAD_BYTES).cast::<Slot>().add(number as usize).as_ref() };
        Some(slot)
    }
}

impl Drop for Memory {
    #[expect(unsafe_code, reason = "the counterpart of the mapping")]
    fn drop(&mut self) {
        // SAFETY: mapped with this length by `map`, and every reference into it has ended with `self`.
        unsafe { libc::munmap(self.base.as_ptr().cast(), LENGTH) };
    }
}
