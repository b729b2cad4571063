//! What all calls share: their deadline, a thread for their blocking work, and their one line in the log.

use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use tonic::metadata::MetadataMap;
use tonic::{Code, Response, Status};

use super::admission::Admitted;

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

/// A call: what the log says of it, and where its work runs.
pub struct CallSpec {
    pub method: &'static str,
    pub volume: String,
    pub target: String,
    pub thread: CallThread,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallThread {
    BlockingPool,
    /// Outside of the blocking pool, which may be full of calls that wait.
    Own,
}

/// Runs `work` as soon as there is room, and logs its outcome.
pub async fn run<T: Send + 'static>(
    CallSpec { method, volume, target, thread }: CallSpec,
    room: impl Future<Output = Result<Admitted, Status>>,
    work: impl FnOnce() -> Result<T, Status> + Send + 'static,
) -> Result<Response<T>, Status> {
    let work = async {
        let admitted = room.await?;
        let (sender, outcome) = oneshot::channel();
        let run = move || {
            // The caller may have gone away meanwhile.
            drop(sender.send(work()));
            drop(admitted);
        };
        match thread {
            CallThread::BlockingPool => drop(tokio::task::spawn_blocking(run)),
            CallThread::Own => {
                let started = thread::Builder::new().name("call".to_owned()).spawn(run);
                let refused =
                    |cause| Status::unavailable(format!("no thread for {method}: {cause}; kubelet will retry"));
                started.map_err(refused)?;
            }
        }
        outcome.await.unwrap_or_else(|_| Err(unexpected(method)))
    };
    answer(method, volume, target, work).await
}

fn unexpected(method: &str) -> Status {
    Status::internal(format!("{method} failed unexpectedly; the driver's log says more"))
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
