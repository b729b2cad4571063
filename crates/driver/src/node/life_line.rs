//! The open hand-over connection: it tells how the engine's start went, and later that the engine ended.

use std::io::{self, BufRead as _, BufReader, Read as _};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use s3csi_mounter::handoff::{self, Answer};

use super::source::shortened;
use super::teller::{Teller, Turn};
use crate::host::Beneath;

/// Longer answers are cut: the mounter bounds its words, a hostile one does not.
const LONGEST_ANSWER_BYTES: u64 = 64 << 10;

/// The mounter gives an engine five seconds to end with its mount before it kills it.
const ENDS_WITHIN: Duration = Duration::from_secs(8);

/// Enough to hand the request over when there is no time to wait for the answer: the mounter then ends the engine alone.
const ASKED_WITHIN: Duration = Duration::from_millis(100);

/// A mounter sends a handful in its life. One that sends more is not listened to any longer.
const MOST_ANSWERS: usize = 10_000;

/// The thread only reads lines.
const STACK_BYTES: usize = 128 << 10;

#[derive(Debug)]
pub enum News {
    Answered(Answer),
    /// The mounter closed the connection.
    Gone,
}

/// Reads answers until the mounter closes; `events` hears all of them while somebody listens, the log and `teller` hear of deaths.
pub fn watch<E: Send + 'static>(
    source: String,
    connection: UnixStream,
    teller: Arc<Teller>,
    events: mpsc::Sender<E>,
    wrap: impl Fn(News) -> E + Send + 'static,
) -> io::Result<()> {
    // A clone of the connection must not time out because the sender set a deadline for the hand-over.
    connection.set_read_timeout(None)?;
    let read = move || {
        let mut lines = BufReader::new(connection);
        let mut is_serving = false;
        let answers = std::iter::from_fn(|| next(&mut lines)).take(MOST_ANSWERS);
        for answer in answers {
            match &answer {
                Answer::Ready => is_serving = true,
                Answer::Resumed { cause, stall_milliseconds } => {
                    tracing::warn!(
                        source,
                        cause,
                        stall_milliseconds,
                        "engine died; another one has taken its place and its mounts live on"
                    );
                    let stall = Duration::from_millis(*stall_milliseconds);
                    teller.turned(&source, Turn::Resumed { cause: shortened(cause), stall });
                }
                Answer::Replaced { reason, stall_milliseconds } => {
                    tracing::info!(source, reason, stall_milliseconds, "engine was replaced and its mounts live on");
                    let stall = Duration::from_millis(*stall_milliseconds);
                    teller.turned(&source, Turn::Replaced { reason: shortened(reason), stall });
                }
                Answer::Exited { code: Some(0), .. } => {
                    tracing::debug!(source, "engine ended");
                    is_serving = false;
                }
                Answer::Exited { code, signal, error } if is_serving => {
                    tracing::warn!(
                        source,
                        code,
                        signal,
                        error,
                        "engine died; the next publish of its volumes mounts it anew"
                    );
                    is_serving = false;
                    teller.turned(&source, Turn::Died { words: shortened(error) });
                }
                Answer::Exited { .. } | Answer::Failed { .. } => {}
            }
            // Nobody listens any more once the publish call has ended.
            let _ = events.send(wrap(News::Answered(answer)));
        }
        if is_serving {
            tracing::warn!(source, "the mounter is gone, and its engine with it");
            teller.turned(&source, Turn::Died { words: "its mounter ended".to_owned() });
        }
        let _ = events.send(wrap(News::Gone));
    };
    thread::Builder::new().name("life-line".to_owned()).stack_size(STACK_BYTES).spawn(read).map(drop)
}

/// The next answer that we understand; unknown kinds of a newer mounter are passed over.
pub fn next(lines: &mut BufReader<UnixStream>) -> Option<Answer> {
    for _ in 0..MOST_ANSWERS {
        let mut line = String::new();
        match lines.by_ref().take(LONGEST_ANSWER_BYTES).read_line(&mut line) {
            Ok(0) | Err(_) => return None,
            Ok(_) => {
                if let Ok(answer) = Answer::from_line(line.trim_end()) {
                    return Some(answer);
                }
            }
        }
    }
    None
}

/// Sees to it that no engine serves a source whose mount is gone. A mounter that cannot be asked has no engines.
pub fn end(mounter: &Beneath, source: &str, deadline: Instant) {
    let left = deadline.saturating_duration_since(Instant::now()).clamp(ASKED_WITHIN, ENDS_WITHIN);
    let Ok(connection) = mounter.connect(s3csi_mounter::SOCKET) else { return };
    let is_asked = connection.set_read_timeout(Some(left)).is_ok()
        && connection.set_write_timeout(Some(left)).is_ok()
        && handoff::send_stop(&connection, source).is_ok();
    if !is_asked || next(&mut BufReader::new(connection)).is_none() {
        tracing::warn!(source, "the mounter did not confirm that the engine has ended");
    }
}
