//! Waits for a store that answers nothing. The client library gives up a silent connection after half a minute, and repeats a
//! request only a few times if many wait. Applications do not expect that of a file system: here a request is repeated until the
//! store answers, or until the store timeout is over.
//!
//! A store that answers with an error, or refuses connections, is not silent.

use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mountpoint_s3_client::S3RequestError;
use mountpoint_s3_crt::common::error::Error as CrtError;
use parking_lot::Mutex;

use super::watchdog::Interrupted;

/// Errors of the client library that mean that nothing was received in time: a connection, its TLS handshake, an answer, the rest
/// of an answer.
const SILENCES: [i32; 5] = [
    1048,  // AWS_IO_SOCKET_TIMEOUT
    1067,  // AWS_IO_TLS_NEGOTIATION_TIMEOUT
    2073,  // AWS_ERROR_HTTP_CHANNEL_THROUGHPUT_FAILURE
    2092,  // AWS_ERROR_HTTP_RESPONSE_FIRST_BYTE_TIMEOUT
    14369, // AWS_ERROR_S3_REQUEST_TIMEOUT
];

/// All requests of a mount wait for the same store, so one line is enough for all of them.
const LOG_INTERVAL: Duration = Duration::from_secs(30);

/// How long requests wait for a silent store.
#[derive(Clone)]
pub struct StoreTimeout {
    limit: Duration,
    /// Called whenever a request is repeated: the engine waits, and is not stuck.
    on_repeat: Arc<dyn Fn() + Send + Sync>,
    logged: Arc<Mutex<Option<Instant>>>,
}

impl StoreTimeout {
    pub fn new(limit: Duration, on_repeat: impl Fn() + Send + Sync + 'static) -> Self {
        Self { limit, on_repeat: Arc::new(on_repeat), logged: Arc::default() }
    }

    /// The answer to a request that may be sent more than once.
    pub async fn repeat<T, E, F>(&self, mut ask: impl FnMut() -> F) -> Result<T, E>
    where
        F: Future<Output = Result<T, E>>,
        E: Error + 'static,
    {
        let begun = Instant::now();
        loop {
            match ask().await {
                Err(error) if is_silence(&error) && self.repeats_after(begun) => {}
                answer => return answer,
            }
        }
    }

    fn repeats_after(&self, begun: Instant) -> bool {
        let (waited, now) = (begun.elapsed(), Instant::now());
        let is_repeated = waited < self.limit;
        let mut logged = self.logged.lock();
        if logged.is_none_or(|it| LOG_INTERVAL <= now.saturating_duration_since(it)) {
            *logged = Some(now);
            let (waited, store_timeout) = (waited.as_secs(), self.limit.as_secs());
            if is_repeated {
                tracing::warn!(waited, store_timeout, "the store does not answer; calls wait for it");
            } else {
                tracing::warn!(waited, store_timeout, "the store does not answer; calls fail (see --store-timeout)");
            }
        }
        drop(logged);
        if is_repeated {
            (self.on_repeat)();
        }
        is_repeated
    }
}

impl fmt::Debug for StoreTimeout {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("StoreTimeout").field("limit", &self.limit).finish_non_exhaustive()
    }
}

/// Whether the client library got nothing from the store in time.
pub fn is_silent(error: CrtError) -> bool {
    SILENCES.contains(&error.raw_error())
}

/// Whether an error, or what caused it, says that the store sent nothing.
fn is_silence(error: &(dyn Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        let found = error.downcast_ref::<CrtError>().is_some_and(|it| is_silent(*it))
            || matches!(error.downcast_ref(), Some(Interrupted::TooSlow(_)))
            // The answer began, and the rest of it is missing.
            || matches!(error.downcast_ref(), Some(S3RequestError::ResponseError(it)) if is_silent(it.crt_error));
        if found {
            return true;
        }
        next = error.source();
    }
    false
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::atomic::{AtomicU32, Ordering};

    use futures::executor::block_on;
    use mountpoint_s3_client::error::{HeadObjectError, ObjectClientError};

    use super::*;

    type HeadError = ObjectClientError<HeadObjectError, S3RequestError>;

    fn crt(code: i32) -> HeadError {
        ObjectClientError::ClientError(S3RequestError::CrtError(code.into()))
    }

    fn too_slow() -> HeadError {
        let cause = Interrupted::TooSlow(Duration::from_secs(1));
        ObjectClientError::ClientError(S3RequestError::InternalError(Box::new(cause)))
    }

    #[test]
    fn only_missing_answers_are_silence() {
        let silent = SILENCES.map(crt).into_iter().chain([too_slow()]);
        assert!(silent.into_iter().all(|it| is_silence(&it)));
        let refused = crt(1047);
        let too_much = S3RequestError::InternalError(Box::new(Interrupted::TooMuch));
        let absent = ObjectClientError::ServiceError(HeadObjectError::NotFound);
        for error in [refused, ObjectClientError::ClientError(too_much), absent] {
            assert!(!is_silence(&error), "{error:?}");
        }
    }

    /// Asks a store whose answers are these, the last one for ever; answers how often it was asked and what it said.
    fn ask(limit: Duration, answers: &[fn() -> Result<u8, HeadError>]) -> (usize, Option<u8>, u32) {
        let repeats = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&repeats);
        let timeout = StoreTimeout::new(limit, move || {
            counted.fetch_add(1, Ordering::Relaxed);
        });
        let asked = Cell::new(0);
        let answer = block_on(timeout.repeat(|| {
            let answer = answers[asked.get().min(answers.len() - 1)]();
            asked.set(asked.get() + 1);
            std::future::ready(answer)
        }));
        (asked.get(), answer.ok(), repeats.load(Ordering::Relaxed))
    }

    #[test]
    fn a_request_is_repeated_until_the_store_answers() {
        let hour = Duration::from_hours(1);
        assert_eq!(ask(hour, &[|| Err(crt(2073)), || Err(too_slow()), || Ok(7)]), (3, Some(7), 2));
        assert_eq!(ask(hour, &[|| Err(crt(2073)), || Err(crt(1047)), || Ok(7)]), (2, None, 1));
    }

    #[test]
    fn a_request_is_not_repeated_after_the_timeout() {
        assert_eq!(ask(Duration::ZERO, &[|| Err(crt(2073)), || Ok(7)]), (1, None, 0));
    }
}
