//! Wakes the accept loop: after a signal, or when an engine or a handshake has ended.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::net::{RecvFlags, SendFlags};

/// A socket pair that only wakes, and the requests that came by signal.
#[derive(Debug)]
pub struct Wake {
    reader: UnixStream,
    writer: UnixStream,
    is_stop_requested: Arc<AtomicBool>,
    is_upgrade_requested: Arc<AtomicBool>,
}

#[derive(Debug, thiserror::Error)]
pub enum WakeError {
    #[error("failed to create a socket pair")]
    Pair {
        #[source]
        cause: io::Error,
    },

    #[error("failed to register for signal {signal}")]
    Signal {
        signal: i32,
        #[source]
        cause: io::Error,
    },
}

impl Wake {
    pub fn new() -> Result<Self, WakeError> {
        let (reader, writer) = UnixStream::pair().map_err(|cause| WakeError::Pair { cause })?;
        Ok(Self { reader, writer, is_stop_requested: Arc::default(), is_upgrade_requested: Arc::default() })
    }

    /// Makes a signal request a shutdown instead of killing the process.
    pub fn stop_on(&self, signal: i32) -> Result<(), WakeError> {
        self.set_on(signal, &self.is_stop_requested)
    }

    /// Makes a signal request the replacement of all engines.
    pub fn upgrade_on(&self, signal: i32) -> Result<(), WakeError> {
        self.set_on(signal, &self.is_upgrade_requested)
    }

    fn set_on(&self, signal: i32, flag: &Arc<AtomicBool>) -> Result<(), WakeError> {
        let failed = |cause| WakeError::Signal { signal, cause };
        let writer = self.writer.try_clone().map_err(failed)?;
        // Handlers run in this order: the flag must be set before the loop wakes.
        signal_hook::flag::register(signal, Arc::clone(flag)).map_err(failed)?;
        signal_hook::low_level::pipe::register(signal, writer).map_err(failed)?;
        Ok(())
    }

    /// Whether a replacement was requested since the last call.
    pub fn take_upgrade(&self) -> bool {
        self.is_upgrade_requested.swap(false, Ordering::SeqCst)
    }

    pub fn is_stop_requested(&self) -> bool {
        self.is_stop_requested.load(Ordering::SeqCst)
    }

    pub fn wake(&self) {
        // A full buffer wakes as well as one more byte would.
        let _ = rustix::net::send(&self.writer, &[0], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }

    pub fn clear(&self) {
        let mut bytes = [0; 256];
        while let Ok((1.., _)) = rustix::net::recv(&self.reader, &mut bytes[..], RecvFlags::DONTWAIT) {}
    }
}

impl AsFd for Wake {
    /// Readable when the loop was woken.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.reader.as_fd()
    }
}
