//! Listens to the S3 client library's own log. The library retries a refused connection or an untrusted certificate for
//! minutes and says why only there; at start we want to know it at once.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use mountpoint_s3_client::config::{AWSCRT_LOG_TARGET, Allocator};
use mountpoint_s3_crt::common::logging::{Level, Logger, LoggerImpl, Subject};
use parking_lot::Mutex;

use super::redact::redacted;

/// How much of the library's log goes into ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verbosity {
    Quiet,
    Debug,
}

/// Why a connection to the server could not be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConnectionProblem {
    /// TLS failed, in the words of the TLS library.
    Tls(String),
    /// Anything before TLS, in the words of the client library.
    Connection(String),
}

/// Connection errors in the client library's log, between `listen` and `stop`.
#[derive(Clone)]
pub struct ConnectionErrors {
    subscriber: Arc<Mutex<Option<Sender<ConnectionProblem>>>>,
}

impl ConnectionErrors {
    pub fn listen(&self) -> Receiver<ConnectionProblem> {
        let (sender, receiver) = channel();
        *self.subscriber.lock() = Some(sender);
        receiver
    }

    pub fn stop(&self) {
        *self.subscriber.lock() = None;
    }
}

/// The library accepts one logger in the life of a process; a second call leaves the first in place.
pub fn install(verbosity: Verbosity) -> ConnectionErrors {
    let subscriber = Arc::new(Mutex::new(None));
    let logger = Logger::new(&Allocator::default(), CrtLogger { verbosity, subscriber: subscriber.clone() });
    if let Err(error) = logger.try_init() {
        tracing::debug!(%error, "the S3 client library keeps its earlier logger");
    }
    ConnectionErrors { subscriber }
}

struct CrtLogger {
    verbosity: Verbosity,
    subscriber: Arc<Mutex<Option<Sender<ConnectionProblem>>>>,
}

impl LoggerImpl for CrtLogger {
    fn log(&self, level: Level, subject: Subject, message: &str) {
        if let Some(problem) = connection_problem(message)
            && let Some(subscriber) = &*self.subscriber.lock()
        {
            // The receiver may be gone.
            let _ = subscriber.send(problem);
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
    let message = redacted(message);
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
fn connection_problem(message: &str) -> Option<ConnectionProblem> {
    if let Some((_, explanation)) = message.split_once("negotiation failed with error ") {
        let words = explanation.rsplit_once(" (").map_or(explanation, |(words, _)| words);
        return Some(ConnectionProblem::Tls(words.to_owned()));
    }
    let (_, explanation) = message.split_once("Could not acquire connection due to error code ")?;
    let words = explanation.split_once('(').map_or(explanation, |(_, words)| words.trim_end_matches(')'));
    Some(ConnectionProblem::Connection(words.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(message: &str, expected: Option<&ConnectionProblem>) {
        assert_eq!(connection_problem(message).as_ref(), expected, "{message}");
    }

    #[test]
    fn only_failed_connections_are_trouble() {
        check(
            "id=0x7f: negotiation failed with error Certificate is untrusted (Error encountered in s2n_x509.c:1)",
            Some(&ConnectionProblem::Tls("Certificate is untrusted".into())),
        );
        check(
            "id=0x7f: Could not acquire connection due to error code 1047 (socket connection refused.)",
            Some(&ConnectionProblem::Connection("socket connection refused.".into())),
        );
        check(
            "id=0x7f: Could not acquire connection due to error code 1047",
            Some(&ConnectionProblem::Connection("1047".into())),
        );
        check("id=0x7f: retry token acquired", None);
        check("", None);
    }
}
