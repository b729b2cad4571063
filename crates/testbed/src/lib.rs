//! Never shipped: real S3 servers, a kubelet stand-in and fixtures, one import away from a test.
#![forbid(unsafe_code)]

pub mod certificates;
pub mod s3;
pub mod store;
