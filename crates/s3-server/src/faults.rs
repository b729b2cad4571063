//! What the server does wrong on purpose, and what it was asked: rules that match requests, and a log of all of them.
//! How a fault is acted out on the connection is in `front`.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hyper::Method;
use tokio::sync::watch;

use crate::operation::{RecordedRequest, S3Operation};

/// One way in which a server misbehaves, and for which requests.
#[derive(Clone, Debug)]
pub struct Fault {
    effect: Effect,
    operation: Option<S3Operation>,
    method: Option<Method>,
    bucket: Option<String>,
    key_prefix: Option<String>,
    times: Option<u64>,
}

/// What a request that met a fault gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// 403 `AccessDenied`.
    Denied,
    /// 404 `NoSuchKey`, or `NoSuchBucket` where no key is named.
    NotFound,
    /// 503 `SlowDown`.
    Unavailable,
    /// The right answer, late.
    Slow(Duration),
    /// No answer until the fault is released; then the right one.
    Frozen,
    /// The connection is closed without an answer.
    Dropped,
    /// The request is carried out, then the connection is closed without an answer.
    AnswerDropped,
    /// The right answer's head, then only this many bytes of its body, then a closed connection.
    Truncated { after: usize },
    /// This status and a body that does not end.
    Endless { status: u16 },
    /// A body that does not end, one byte at a time.
    Dripping { interval: Duration },
    /// The right answer with a header of this many bytes.
    HugeHeader { bytes: usize },
    /// The right listing, but each `ETag` in it is empty.
    EmptyEtags,
    /// The right listing, but there is always another page, with one of so many tokens, in turns.
    RepeatedPages { tokens: u64 },
    /// A web page.
    WebPage,
    /// A listing of nothing, with a new token for another page.
    EmptyPages,
}

impl Fault {
    /// Meets every request, until released.
    pub fn new(effect: Effect) -> Self {
        Self { effect, operation: None, method: None, bucket: None, key_prefix: None, times: None }
    }

    #[must_use]
    pub fn operation(self, operation: S3Operation) -> Self {
        Self { operation: Some(operation), ..self }
    }

    #[must_use]
    pub fn method(self, method: Method) -> Self {
        Self { method: Some(method), ..self }
    }

    #[must_use]
    pub fn bucket(self, bucket: &str) -> Self {
        Self { bucket: Some(bucket.to_owned()), ..self }
    }

    #[must_use]
    pub fn key_prefix(self, prefix: &str) -> Self {
        Self { key_prefix: Some(prefix.to_owned()), ..self }
    }

    /// Only the first `times` matching requests.
    #[must_use]
    pub fn times(self, times: u64) -> Self {
        Self { times: Some(times), ..self }
    }

    fn matches(&self, asked: &RecordedRequest) -> bool {
        self.operation.is_none_or(|it| it == asked.operation)
            && self.method.as_ref().is_none_or(|it| *it == asked.method)
            && self.bucket.as_ref().is_none_or(|it| *it == asked.bucket)
            && self.key_prefix.as_ref().is_none_or(|it| asked.key.starts_with(it.as_str()))
    }
}

/// An injected fault: tells how often it was met, and ends it.
#[derive(Clone)]
pub struct InjectedFault {
    rule: Arc<Rule>,
}

impl InjectedFault {
    /// How many requests met this fault so far.
    pub fn hits(&self) -> u64 {
        *lock(&self.rule.hits)
    }

    /// From now on requests are answered as if the fault had never been; frozen ones go on.
    pub fn release(&self) {
        self.rule.released.send_replace(true);
    }
}

struct Rule {
    fault: Fault,
    hits: Mutex<u64>,
    released: watch::Sender<bool>,
}

/// A fault that a request has met.
pub(crate) struct Met {
    pub effect: Effect,
    /// How often it was met before.
    pub earlier: u64,
    released: watch::Receiver<bool>,
}

impl Met {
    pub async fn released(mut self) {
        // An error means that the server is being dropped; the request ends with it.
        let _ = self.released.wait_for(|it| *it).await;
    }
}

/// All rules and the log of requests. Shared by the front and the server's handle.
#[derive(Default)]
pub(crate) struct Faults {
    rules: Mutex<Vec<Arc<Rule>>>,
    log: Mutex<Vec<RecordedRequest>>,
}

impl Faults {
    pub fn inject(&self, fault: Fault) -> InjectedFault {
        let rule = Arc::new(Rule { fault, hits: Mutex::new(0), released: watch::Sender::new(false) });
        lock(&self.rules).push(Arc::clone(&rule));
        InjectedFault { rule }
    }

    pub fn release_all(&self) {
        for rule in lock(&self.rules).drain(..) {
            rule.released.send_replace(true);
        }
    }

    /// Notes the request and says which fault it meets; the first rule that still has hits left wins.
    pub fn meet(&self, asked: RecordedRequest) -> Option<Met> {
        let met = lock(&self.rules).iter().find_map(|rule| {
            if *rule.released.borrow() || !rule.fault.matches(&asked) {
                return None;
            }
            let mut hits = lock(&rule.hits);
            if rule.fault.times.is_some_and(|times| times <= *hits) {
                return None;
            }
            *hits += 1;
            Some(Met { effect: rule.fault.effect, earlier: *hits - 1, released: rule.released.subscribe() })
        });
        lock(&self.log).push(asked);
        met
    }

    pub fn log(&self) -> Vec<RecordedRequest> {
        lock(&self.log).clone()
    }

    pub fn forget_log(&self) {
        lock(&self.log).clear();
    }
}

/// A panicking test must not hide behind a poisoned lock: the data is only counters and lists.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(operation: S3Operation, bucket: &str, key: &str) -> RecordedRequest {
        RecordedRequest { operation, method: Method::GET, bucket: bucket.to_owned(), key: key.to_owned() }
    }

    fn check(faults: &Faults, request: RecordedRequest, expected: Option<&Effect>) {
        assert_eq!(faults.meet(request).map(|it| it.effect).as_ref(), expected);
    }

    #[test]
    fn a_fault_meets_only_what_it_names_and_only_so_often() {
        let faults = Faults::default();
        let injected = faults
            .inject(Fault::new(Effect::Denied).operation(S3Operation::GetObject).bucket("b").key_prefix("a/").times(2));
        check(&faults, asked(S3Operation::PutObject, "b", "a/1"), None);
        check(&faults, asked(S3Operation::GetObject, "c", "a/1"), None);
        check(&faults, asked(S3Operation::GetObject, "b", "b/1"), None);
        check(&faults, asked(S3Operation::GetObject, "b", "a/1"), Some(&Effect::Denied));
        check(&faults, asked(S3Operation::GetObject, "b", "a/2"), Some(&Effect::Denied));
        check(&faults, asked(S3Operation::GetObject, "b", "a/3"), None);
        assert_eq!(injected.hits(), 2);
        assert_eq!(faults.log().len(), 6);
    }

    #[test]
    fn a_released_fault_meets_nothing() {
        let faults = Faults::default();
        let injected = faults.inject(Fault::new(Effect::Unavailable));
        check(&faults, asked(S3Operation::GetObject, "b", "a"), Some(&Effect::Unavailable));
        injected.release();
        check(&faults, asked(S3Operation::GetObject, "b", "a"), None);
    }
}
