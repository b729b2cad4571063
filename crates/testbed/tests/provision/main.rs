//! Volumes on demand: `s3csi controller` as a process with its CSI socket, against two S3 servers, ours in process and
//! versitygw, which we did not write. One body per rule; `on_both_servers!` makes a test of it for each server.
//!
//! Needs root and a mount namespace of its own, as everything with a fixture: `make test-provision`.
#![forbid(unsafe_code)]

mod crashes;
mod deletion;
mod hostile;
mod idempotency;
mod ownership;
mod prefixes;
mod refusals;
mod service;
mod world;

/// `on_both_servers!(rule, …)` where each rule is a `fn(&World)` of the same module.
macro_rules! on_both_servers {
    ($($rule:ident),* $(,)?) => {
        s3csi_testbed::on_both_servers!(crate::world::BUCKETS; $($rule),*);
    };
}
pub(crate) use on_both_servers;
