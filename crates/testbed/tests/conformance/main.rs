//! What the engine promises its users, on a real kernel and against two S3 servers: ours in process and versitygw, which
//! we did not write. One body per rule; `on_both_servers!` makes a test of it for each server.
//!
//! Needs root, /dev/fuse and a mount namespace of its own: `make test-engine`.
#![forbid(unsafe_code)]

mod access;
mod attributes;
mod content;
mod disk_cache;
mod editing;
mod errors;
mod faults;
mod fsx;
mod hostile;
mod lookups;
mod modes;
mod moves;
mod names;
mod page_cache;
mod programs;
mod random_reads;
mod staging;
mod uploads;
mod world;
mod xattrs;

/// `on_both_servers!(rule, …)` where each rule is a `fn(&World)` of the same module.
macro_rules! on_both_servers {
    ($($rule:ident),* $(,)?) => {
        s3csi_testbed::on_both_servers!(crate::world::BUCKETS; $($rule),*);
    };
}
pub(crate) use on_both_servers;
