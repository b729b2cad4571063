//! Listens to the S3 client library's own log. The library retries a refused connection or an untrusted certificate for
//! minutes and says why only there; at start we want to know it at once.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use mountpoint_s3_client::config::{AWSCRT_LOG_TARGET, Allocator};
use mountpoint_s3_crt::common::logging::{Level, Logger, LoggerImpl, Subject};

/// How much of the library's log goes into ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verbosity {
    Quiet,
    Debug,
}

/// Why a connection to the server could not be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// TLS failed, in the words of the TLS library.
    Tls(String),
    /// Anything before TLS, in the words of the client library.
    Connection(String),
}

/// Hears of trouble from the moment it is asked until it is told to stop.
#[derive(Clone)]
pub struct Witness {
    listener: Arc<Mutex<Option<Sender<Trouble>>>>,
}

impl Witness {
    pub fn listen(&self) -> Receiver<Trouble> {
        let (sender, receiver) = channel();
        *self.listener.lock().unwrap_or_else(PoisonError::into_inner) = Some(sender);
        receiver
    }

    pub fn stop(&self) {
        *self.listener.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// The library accepts one logger in the life of a process; a second call leaves the first in place.
pub fn install(verbosity: Verbosity) -> Witness {
    let listener = Arc::new(Mutex::new(None));
    let logger = Logger::new(&Allocator::default(), Listener { verbosity, listener: listener.clone() });
    if let Err(error) = logger.try_init() {
        tracing::debug!(%error, "the S3 client library keeps its earlier logger");
    }
    Witness { listener }
}

struct Listener {
    verbosity: Verbosity,
    listener: Arc<Mutex<Option<Sender<Trouble>>>>,
}

impl LoggerImpl for Listener {
    fn log(&self, level: Level, subject: Subject, message: &str) {
        if let Some(trouble) = trouble_in(message)
            && let Some(listener) = &*self.listener.lock().unwrap_or_else(PoisonError::into_inner)
        {
            // Nobody waits for it any more: then it is not needed.
            let _ = listener.send(trouble);
        }
        if self.verbosity == Verbosity::Debug {
            forward(level, subject.name(), message);
        }
    }

    fn get_log_level(&self, _: Subject) -> Level {
        match self.verbosity {
            // Warnings are rare, so hearing them costs nothing.
            Verbosity::Quiet => Level::Warn,
            Verbosity::Debug => Level::Debug,
        }
    }
}

fn forward(level: Level, subject: &str, message: &str) {
    match level {
        Level::Fatal => tracing::error!(target: AWSCRT_LOG_TARGET, subject, "{message}"),
        // The library calls errors what it then recovers from.
        Level::Error | Level::Warn => tracing::warn!(target: AWSCRT_LOG_TARGET, subject, "{message}"),
        Level::Info => tracing::info!(target: AWSCRT_LOG_TARGET, subject, "{message}"),
        Level::Debug => tracing::debug!(target: AWSCRT_LOG_TARGET, subject, "{message}"),
        Level::Trace | Level::None => tracing::trace!(target: AWSCRT_LOG_TARGET, subject, "{message}"),
    }
}

/// The two sentences of the library that explain why it will now retry.
fn trouble_in(message: &str) -> Option<Trouble> {
    if let Some((_, explanation)) = message.split_once("negotiation failed with error ") {
        let words = explanation.rsplit_once(" (").map_or(explanation, |(words, _)| words);
        return Some(Trouble::Tls(words.to_owned()));
    }
    let (_, explanation) = message.split_once("Could not acquire connection due to error code ")?;
    let words = explanation.split_once('(').map_or(explanation, |(_, words)| words.trim_end_matches(')'));
    Some(Trouble::Connection(words.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(message: &str, expected: Option<&Trouble>) {
        assert_eq!(trouble_in(message).as_ref(), expected, "{message}");
    }

    #[test]
    fn only_failed_connections_are_trouble() {
        check(
            "id=0x7f: negotiation failed with error Certificate is untrusted (Error encountered in s2n_x509.c:1)",
            Some(&Trouble::Tls("Certificate is untrusted".into())),
        );
        check(
            "id=0x7f: Could not acquire connection due to error code 1047 (socket connection refused.)",
            Some(&Trouble::Connection("socket connection refused.".into())),
        );
        check(
            "id=0x7f: Could not acquire connection due to error code 1047",
            Some(&Trouble::Connection("1047".into())),
        );
        check("id=0x7f: retry token acquired", None);
        check("", None);
    }
}
