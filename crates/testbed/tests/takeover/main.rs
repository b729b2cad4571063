//! Clusters of an earlier driver are upgraded in place to ours while workloads read and write. "Before" is a program that was not written
//! here: AWS's driver, from which Scality's 1.x and 2.x were forked.
//!
//! Needs root, the tools and Kubernetes: `make test-takeover`.
#![forbid(unsafe_code)]

mod legacy_v1;
mod mountpoint_pods;
mod rollback;
mod strategies;
mod world;
