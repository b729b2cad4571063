//! Real Kubernetes for tests. [`ControlPlane`] is etcd and an API server, for tests that only talk to the API;
//! [`Cluster`] has nodes too. Both are gone with the process that started them, however it ends.

mod administrator;
mod audit;
mod control_plane;
mod controller;
mod kube;
mod lifetime;
mod nodes;
mod ports;

pub use administrator::{Administrator, AttachmentTemplate, VolumeTemplate, WorkloadTemplate, attachment_name};
pub use audit::AuditEvent;
pub use control_plane::{ControlPlane, ControlPlaneError};
pub use controller::{CONTROLLER_ACCOUNT, ControllerOptions};
pub use kube::KubectlError;
pub use nodes::{Cluster, ClusterError, ClusterHost, STORE_ADMINISTRATOR, STORE_ENDPOINT, ServiceAction};
