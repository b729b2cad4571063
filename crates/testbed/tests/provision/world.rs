//! What each rule starts with: a fixture and a server. The driver is started by the rule.

use s3csi_s3_server::{Config, S3Server, Transport};
use s3csi_testbed::store_world;
use s3csi_testbed::versitygw::{Versioning, Versitygw};
use tonic::{Code, Status};

pub use s3csi_testbed::store_world::StoreWorld as World;

pub const BUCKETS: &[&str] = &[];

pub fn in_process_with(rule: &str, config: Config) -> World<S3Server> {
    store_world::in_process_with(rule, BUCKETS, config)
}

pub fn versitygw_with(rule: &str, transport: Transport, versioning: Versioning) -> World<Versitygw> {
    store_world::versitygw_with(rule, BUCKETS, transport, versioning)
}

/// The answer's code, and a part of its message.
#[track_caller]
pub fn check_refused<T: std::fmt::Debug>(answer: Result<T, Status>, code: Code, message: &str) {
    s3csi_testbed::world::check_refused(answer, code, &[message]);
}
