//! The gRPC front door: what kubelet and the sidecars talk to. The only room that names a gRPC code.

pub mod admission;
pub mod call;
pub mod controller;
pub mod health;
pub mod identity;
pub mod node;
mod provision_status;
pub mod provisioning;
pub mod registration;
pub mod server;
pub mod status;

/// Generated from `crates/driver/proto`; a test compares.
#[expect(clippy::allow_attributes_without_reason, clippy::pedantic, reason = "generated code")]
pub mod proto {
    include!("generated/csi.v1.rs");
}

/// Kubelet's plugin registration API, generated likewise.
#[expect(clippy::allow_attributes_without_reason, clippy::pedantic, reason = "generated code")]
pub mod registration_proto {
    include!("generated/pluginregistration.rs");
}
