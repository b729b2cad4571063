//! The end of a session: by an unmount, which the library notices itself, or by a signal, which is handled here.

use std::io;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use mountpoint_s3_fs::fuse::session::FuseSession;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};

use super::mount::Unmount;

/// Time for open files to be completed after the signal. Most uploads need less; SIGKILL usually follows SIGTERM after ten
/// seconds or more.
const GRACE: Duration = Duration::from_secs(5);

/// Waits for SIGTERM and SIGINT as long as it exists.
pub struct Shutdown {
    signals: Handle,
}

impl Shutdown {
    pub fn on_signals(session: &FuseSession, unmount: Option<Unmount>) -> io::Result<Self> {
        let mut signals = Signals::new([SIGTERM, SIGINT])?;
        let handle = signals.handle();
        let end_session = session.shutdown_fn();
        let (sender, received) = channel();
        thread::Builder::new().name("signals".into()).spawn(move || {
            for signal in signals.forever() {
                // The session may have ended already.
                let _ = sender.send(signal);
            }
        })?;
        thread::Builder::new().name("stop".into()).spawn(move || {
            let Ok(signal) = received.recv() else { return };
            tracing::info!(signal, "stopping");
            let is_detached = unmount
                .is_some_and(|it| it.detach().inspect_err(|error| tracing::warn!(%error, "unmount failed")).is_ok());
            if is_detached {
                // When the last file is closed, the kernel ends the connection, and with it this process. A second signal
                // ends it at once.
                match received.recv_timeout(GRACE) {
                    Ok(_) | Err(RecvTimeoutError::Timeout) => tracing::warn!("stopping with open files"),
                    Err(RecvTimeoutError::Disconnected) => return,
                }
            }
            end_session();
        })?;
        Ok(Self { signals: handle })
    }
}

impl Drop for Shutdown {
    fn drop(&mut self) {
        self.signals.close();
    }
}
