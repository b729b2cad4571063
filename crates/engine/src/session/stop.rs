//! The end of a session: by an unmount, which the library notices itself, or by a signal, which is handled here.

use std::io;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use mountpoint_s3_fs::fuse::session::FuseSession;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};

use super::mount::Unmount;

/// How long files that are open when the signal comes may be finished. Most uploads end in less; whoever sends SIGTERM
/// usually sends SIGKILL after ten seconds or more.
const GRACE: Duration = Duration::from_secs(5);

/// Waits for SIGTERM and SIGINT as long as it exists.
pub struct Stop {
    signals: Handle,
}

impl Stop {
    pub fn on_signals(session: &FuseSession, unmount: Option<Unmount>) -> io::Result<Self> {
        let mut signals = Signals::new([SIGTERM, SIGINT])?;
        let handle = signals.handle();
        let end_session = session.shutdown_fn();
        let (sender, received) = channel();
        thread::Builder::new().name("signals".into()).spawn(move || {
            for signal in signals.forever() {
                // Nobody listens any more: the session has ended.
                let _ = sender.send(signal);
            }
        })?;
        thread::Builder::new().name("stop".into()).spawn(move || {
            let Ok(signal) = received.recv() else { return };
            tracing::info!(signal, "stopping");
            let is_detached = unmount
                .is_some_and(|it| it.detach().inspect_err(|error| tracing::warn!(%error, "could not unmount")).is_ok());
            if is_detached {
                // When the last file is closed, the kernel ends the connection, and with it this process. A second signal is
                // a wish to end now.
                match received.recv_timeout(GRACE) {
                    Ok(_) | Err(RecvTimeoutError::Timeout) => tracing::warn!("files were still open"),
                    Err(RecvTimeoutError::Disconnected) => return,
                }
            }
            end_session();
        })?;
        Ok(Self { signals: handle })
    }
}

impl Drop for Stop {
    fn drop(&mut self) {
        self.signals.close();
    }
}
