//! The Helm chart, rendered and installed by the real Helm: its values, its objects, the arguments it passes, upgrades.
#![forbid(unsafe_code)]

mod chart;
mod install;
mod monitoring;
mod objects;
mod pod_identity;
mod programs;
mod schema;
mod takeover;
mod values;
