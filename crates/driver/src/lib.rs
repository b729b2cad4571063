//! The CSI driver's rooms. `cli` wires them together; docs/ARCHITECTURE.md says who may touch what.
#![forbid(unsafe_code)]

pub mod api;
pub mod cli;
pub mod controller;
pub mod credentials;
pub mod csi;
pub mod health;
pub mod host;
pub mod install;
pub mod metrics;
pub mod node;
pub mod provision;
pub mod steps;
pub mod systemd;
