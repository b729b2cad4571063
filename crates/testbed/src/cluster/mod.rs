//! Real Kubernetes for tests. [`ControlPlane`] is etcd and an API server, for whoever only talks to the API;
//! [`Cluster`] has nodes too. Both are gone with the process that started them, however it ends.

mod administrator;
mod audit;
mod control_plane;
mod controller;
mod kube;
mod leash;
mod nodes;
mod ports;

pub use administrator::{Administrator, AttachmentOrder, VolumeOrder, WorkloadOrder, attachment_name};
pub use audit::AuditEvent;
pub use control_plane::{ControlPlane, StartError};
pub use controller::{CONTROLLER_ACCOUNT, ControllerOrder};
pub use kube::KubectlError;
pub use nodes::{Change, Cluster, ClusterError, Place};
