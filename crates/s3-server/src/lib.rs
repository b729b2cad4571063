//! An S3 server in this process: real HTTP, real signatures, several accounts, and faults on demand. Never shipped.
//!
//! It holds everything in memory and is for tests, the demo and benchmarks only.
#![forbid(unsafe_code)]

mod access;
mod buckets;
pub mod certificates;
mod conditions;
mod config;
mod data;
mod faults;
mod front;
mod multipart;
mod operation;
mod operations;
mod server;
mod sessions;
pub mod store;
mod tenants;
#[cfg(test)]
mod tests;
mod upload;

pub use config::{Config, CopySupport, RenameSupport, TaggingSupport, Transport};
pub use data::hex;
pub use faults::{Effect, Fault, InjectedFault};
pub use operation::{RecordedRequest, S3Operation};
pub use server::{S3Server, S3ServerError};
pub use sessions::Sessions;
