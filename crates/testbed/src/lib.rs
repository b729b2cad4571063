//! Never shipped: real S3 servers, a kubelet stand-in and fixtures, one import away from a test.
#![forbid(unsafe_code)]

pub mod bench;
pub mod certificates;
pub mod chart;
pub mod cluster;
pub mod demo;
pub mod engine;
pub mod environment;
pub mod fixture;
pub mod http;
pub mod image;
pub mod kubelet;
pub mod leftovers;
pub mod plugin;
pub mod process;
pub mod processes;
pub mod provisioning;
pub mod s3;
pub mod s3_client;
pub mod store;
pub mod systemd;
pub mod versitygw;
pub mod wait;
pub mod world;
