//! What each rule starts with: a fixture, a server and a bucket.

use std::io;

use s3csi_core::chain::Chain;
use s3csi_s3_server::store::Store as _;
use s3csi_s3_server::{Config, S3Server, Transport};
use s3csi_testbed::engine::EngineMount;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::store_world;
use s3csi_testbed::versitygw::Versitygw;

pub use s3csi_testbed::noise::noise;
pub use s3csi_testbed::store_world::StoreWorld as World;

pub const BUCKET: &str = "conformance";
pub const BUCKETS: &[&str] = &[BUCKET];

pub fn in_process_with(rule: &str, config: Config) -> World<S3Server> {
    store_world::in_process_with(rule, BUCKETS, config)
}

pub fn start_versitygw(fixture: &Fixture, transport: Transport) -> Box<Versitygw> {
    let store = Versitygw::start(fixture, transport).unwrap_or_else(|error| panic!("{}", Chain(&error)));
    store.create_bucket(BUCKET, store.account()).unwrap_or_else(|error| panic!("{}", Chain(&error)));
    Box::new(store)
}

/// Names in a directory, sorted.
#[track_caller]
pub fn listing(directory: &std::path::Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
    let mut names: Vec<String> = entries.map(|it| it.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// The most memory that the engine ever had, in mebibytes.
pub fn peak_memory(mount: &EngineMount<'_>) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", mount.process().unwrap().pid())).unwrap();
    let peak = status.lines().find_map(|it| it.strip_prefix("VmHWM:")).unwrap();
    peak.split_whitespace().next().unwrap().parse::<u64>().unwrap() >> 10
}

/// Expects a system call to fail with one of these error numbers.
#[track_caller]
pub fn check_errno<T>(result: io::Result<T>, expected: &[rustix::io::Errno]) {
    let Err(error) = result else {
        panic!("this should have been refused");
    };
    let is_expected = expected.iter().any(|it| error.raw_os_error() == Some(it.raw_os_error()));
    assert!(is_expected, "refused with {error}, expected one of {expected:?}");
}
