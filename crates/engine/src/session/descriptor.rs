//! The two things that can only be said with raw descriptor numbers.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

/// Takes over a descriptor that our parent opened for us and named on the command line or in the environment.
#[expect(unsafe_code, reason = "an inherited descriptor is known by its number only")]
pub fn inherited(number: RawFd) -> io::Result<OwnedFd> {
    // A number that is not open must be an error here, not later.
    if number < 0 || !std::fs::exists(format!("/proc/self/fd/{number}"))? {
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    // SAFETY: the descriptor is open (checked above). It was handed to this process to own; each number is taken over once,
    // before anything else was opened that could have got the same number.
    let descriptor = unsafe { OwnedFd::from_raw_fd(number) };
    // It was inheritable so that we could get it. A child of ours, such as a credential process, must not.
    rustix::io::fcntl_setfd(&descriptor, rustix::io::FdFlags::CLOEXEC)?;
    Ok(descriptor)
}

/// Makes the descriptor behind `target`, which others hold by its number, mean the device from now on.
#[expect(unsafe_code, reason = "the FUSE library owns the descriptor and cannot be asked to exchange it")]
pub fn replace(target: &impl AsFd, device: &File) -> io::Result<()> {
    let number = target.as_fd().as_raw_fd();
    // SAFETY: both numbers are open descriptors, borrowed from their owners for the time of the call. The owner of `target`
    // goes on to own the same number; only what it refers to changes, as the caller intends.
    let result = unsafe { libc::dup3(device.as_raw_fd(), number, libc::O_CLOEXEC) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
