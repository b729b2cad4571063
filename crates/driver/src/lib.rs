//! The modules of the CSI driver. `cli` connects them; docs/ARCHITECTURE.md says which may depend on what.
#![forbid(unsafe_code)]

pub mod api;
pub mod cli;
pub mod controller;
pub mod credentials;
pub mod csi;
pub mod failpoints;
pub mod health;
pub mod host;
pub mod install;
pub mod keyed_locks;
pub mod metrics;
pub mod node;
pub mod provision;
pub mod systemd;
