//! One control plane for all tests of this program, and the objects that a controller and a kubelet would write.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use s3csi_testbed::cluster::{Administrator, AttachmentOrder, ControlPlane};
use s3csi_testbed::plugin::DRIVER_NAME;

pub use s3csi_testbed::cluster::attachment_name;

pub const NAMESPACE: &str = "mount-s3";

/// Started with the first test; it ends with this process.
pub fn control_plane() -> &'static ControlPlane {
    static SHARED: OnceLock<ControlPlane> = OnceLock::new();
    SHARED.get_or_init(|| {
        let control_plane = ControlPlane::start("pod-node").unwrap_or_else(|error| {
            panic!("{}", s3csi_core::chain::Chain(&error));
        });
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(async {
            let administrator = Administrator::of(&control_plane).await.unwrap();
            administrator.prepare_for_nodes(DRIVER_NAME, NAMESPACE).await.unwrap();
        });
        control_plane
    })
}

/// A client of the control plane.
#[derive(Clone)]
pub struct Cluster(Administrator);

impl Cluster {
    pub async fn connect(control_plane: &ControlPlane) -> Self {
        Self(Administrator::of(control_plane).await.unwrap())
    }

    /// Answers the UID. Without a node it is not scheduled.
    pub async fn create_pod(&self, name: &str, node: Option<&str>) -> String {
        self.0.create_mountpoint_pod(NAMESPACE, name, node).await.unwrap()
    }

    /// As kubelet reports it.
    pub async fn set_status(&self, name: &str, status: serde_json::Value) {
        self.0.set_pod_status(NAMESPACE, name, status).await.unwrap();
    }

    pub async fn annotate(&self, name: &str, key: &str, value: &str) {
        self.0.annotate_pod(NAMESPACE, name, key, value).await.unwrap();
    }

    /// At once, as if its containers had ended.
    pub async fn delete_pod(&self, name: &str) {
        self.0.remove_pod(NAMESPACE, name).await.unwrap();
    }

    /// Makes the attachment of one PV on one node, or changes who is served by whom.
    pub async fn attach(&self, node: &str, pv: &str, entries: &BTreeMap<String, Vec<String>>) {
        let order = AttachmentOrder { driver: DRIVER_NAME, node, persistent_volume: pv, entries };
        self.0.attach(order).await.unwrap();
    }
}
