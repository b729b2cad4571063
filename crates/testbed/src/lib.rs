//! Never shipped: real clusters, a kubelet stand-in and fixtures, one import away from a test.
#![forbid(unsafe_code)]

pub mod chart;
pub mod cluster;
pub mod compatibility;
pub mod credential_issuer;
pub mod credential_matrix;
pub mod demo;
pub mod earlier_driver;
pub mod engine;
pub mod environment;
pub mod fixture;
pub mod forward_proxy;
pub mod fsx;
pub mod http;
pub mod image;
mod input;
pub mod kill_matrix;
pub mod kubelet;
pub mod leftovers;
pub mod noise;
pub mod peers;
pub mod plugin;
pub mod process;
pub mod processes;
pub mod programs;
pub mod provisioning;
pub mod s3_client;
pub mod steady_reader;
pub mod steady_script;
pub mod store_world;
pub mod systemd;
pub mod test_node;
pub mod versitygw;
pub mod wait;
pub mod workload_identity;
pub mod world;
