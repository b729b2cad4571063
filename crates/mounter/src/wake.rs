//! Wakes the accepting loop: a signal came, or an engine or a handshake ended.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::net::{RecvFlags, SendFlags};

/// A socket pair that carries nothing but the fact that something changed, and what was asked for by a signal.
#[derive(Debug)]
pub struct Wake {
    reader: UnixStream,
    writer: UnixStream,
    is_asked_to_stop: Arc<AtomicBool>,
    is_asked_to_upgrade: Arc<AtomicBool>,
}

#[derive(Debug, thiserror::Error)]
pub enum WakeError {
    #[error("failed to make a socket pair")]
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
        Ok(Self { reader, writer, is_asked_to_stop: Arc::default(), is_asked_to_upgrade: Arc::default() })
    }

    /// From now on this signal asks for the end instead of killing the process.
    pub fn stop_on(&self, signal: i32) -> Result<(), WakeError> {
        self.set_on(signal, &self.is_asked_to_stop)
    }

    /// From now on this signal asks for other engines.
    pub fn upgrade_on(&self, signal: i32) -> Result<(), WakeError> {
        self.set_on(signal, &self.is_asked_to_upgrade)
    }

    fn set_on(&self, signal: i32, flag: &Arc<AtomicBool>) -> Result<(), WakeError> {
        let failed = |cause| WakeError::Signal { signal, cause };
        let writer = self.writer.try_clone().map_err(failed)?;
        // Handlers run in this order: the reason must be there before the loop wakes.
        signal_hook::flag::register(signal, Arc::clone(flag)).map_err(failed)?;
        signal_hook::low_level::pipe::register(signal, writer).map_err(failed)?;
        Ok(())
    }

    /// Whether other engines were asked for since the last call.
    pub(crate) fn take_upgrade(&self) -> bool {
        self.is_asked_to_upgrade.swap(false, Ordering::SeqCst)
    }

    pub(crate) fn is_asked_to_stop(&self) -> bool {
        self.is_asked_to_stop.load(Ordering::SeqCst)
    }

    pub(crate) fn wake(&self) {
        // A full buffer wakes as well as one more byte would.
        let _ = rustix::net::send(&self.writer, &[0], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }

    pub(crate) fn clear(&self) {
        let mut bytes = [0; 256];
        while let Ok((1.., _)) = rustix::net::recv(&self.reader, &mut bytes[..], RecvFlags::DONTWAIT) {}
    }
}

impl AsFd for Wake {
    /// Readable when somebody woke the loop.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.reader.as_fd()
    }
}
