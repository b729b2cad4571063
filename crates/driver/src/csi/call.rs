//! What all calls share: their deadline, a thread for their blocking work, and their one line in the log.

use std::time::{Duration, Instant};

use tonic::metadata::MetadataMap;
use tonic::{Code, Response, Status};

/// kubelet gives up on a call after two minutes; answer before that, so that our message is the one users see.
const LONGEST: Duration = Duration::from_secs(110);

/// Left for the answer itself when the caller names a deadline.
const MARGIN: Duration = Duration::from_millis(500);

/// When this call must have been answered.
pub fn deadline(metadata: &MetadataMap) -> Instant {
    let asked = metadata.get("grpc-timeout").and_then(|it| it.to_str().ok()).and_then(timeout);
    Instant::now() + asked.map_or(LONGEST, |it| it.saturating_sub(MARGIN).min(LONGEST))
}

/// `grpc-timeout`: at most eight digits and a unit.
fn timeout(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let count: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(count.saturating_mul(3600))),
        "M" => Some(Duration::from_secs(count.saturating_mul(60))),
        "S" => Some(Duration::from_secs(count)),
        "m" => Some(Duration::from_millis(count)),
        "u" => Some(Duration::from_micros(count)),
        "n" => Some(Duration::from_nanos(count)),
        _ => None,
    }
}

/// Runs `work` where it may block and logs its outcome.
pub async fn run<T: Send + 'static>(
    method: &'static str,
    volume: String,
    target: String,
    work: impl FnOnce() -> Result<T, Status> + Send + 'static,
) -> Result<Response<T>, Status> {
    let work = async {
        let unexpected = || Status::internal(format!("{method} failed unexpectedly; the driver's log says more"));
        tokio::task::spawn_blocking(work).await.unwrap_or_else(|_| Err(unexpected()))
    };
    answer(method, volume, target, work).await
}

/// Waits for `work` and logs its outcome.
pub async fn answer<T>(
    method: &'static str,
    volume: String,
    target: String,
    work: impl Future<Output = Result<T, Status>>,
) -> Result<Response<T>, Status> {
    let start = Instant::now();
    let outcome = work.await;
    let seconds = start.elapsed().as_secs_f64();
    match &outcome {
        Ok(_) => tracing::info!(method, volume, target, seconds, "done"),
        Err(status) if is_our_fault(status.code()) => {
            tracing::error!(method, volume, target, seconds, code = ?status.code(), error = status.message(), "failed");
        }
        Err(status) => {
            tracing::warn!(method, volume, target, seconds, code = ?status.code(), error = status.message(), "refused");
        }
    }
    outcome.map(Response::new)
}

fn is_our_fault(code: Code) -> bool {
    matches!(code, Code::Internal | Code::Unknown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts() {
        check("2M", Some(Duration::from_mins(2)));
        check("1500m", Some(Duration::from_millis(1500)));
        check("99999999H", Some(Duration::from_hours(99_999_999)));
        check("", None);
        check("5", None);
        check("5x", None);
        check("é", None);
    }

    fn check(text: &str, expected: Option<Duration>) {
        assert_eq!(timeout(text), expected, "{text}");
    }
}
