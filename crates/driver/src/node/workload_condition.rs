//! Strategy `pod`: the condition `<driver>/Mounted` of a workload whose unit, of version 1 or of strategy `systemd`, has died. Only the
//! node knows that, and only the controller can assign a Mountpoint Pod, which it does for such workloads. Other workloads have no
//! condition.
//!
//! Without the permission to write it, a dead unit is replaced when the workload is not ready.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use s3csi_core::chain::Chain;
use serde_json::json;
use tokio::runtime::Handle;

use crate::api::PodCondition;
use crate::api::call::call;
use crate::api::recorder::PodReference;

pub struct WorkloadConditions {
    client: Client,
    runtime: Handle,
    driver_name: String,
}

impl WorkloadConditions {
    pub fn new(client: Client, runtime: &Handle, driver_name: &str) -> Self {
        Self { client, runtime: runtime.clone(), driver_name: driver_name.to_owned() }
    }

    pub fn mount_died(&self, workload: &PodReference, volume: &str) {
        let message = format!("the unit that served volume {volume} is dead; a Mountpoint Pod replaces it");
        self.write(workload, "False", "EngineDied", &message);
    }

    pub fn remounted(&self, workload: &PodReference, volume: &str) {
        let message = format!(
            "a Mountpoint Pod serves volume {volume}; running containers keep the dead mount until they restart"
        );
        self.write(workload, "True", "VolumeRemounted", &message);
    }

    /// A failure fails no call: kubelet repeats the call, and the condition is written again.
    fn write(&self, workload: &PodReference, status: &str, reason: &str, message: &str) {
        let PodReference { namespace, name, uid } = workload;
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        let now = Timestamp::from_second(Timestamp::now().as_second()).unwrap_or_default();
        let condition = json!({
            "type": PodCondition::mounted(&self.driver_name),
            "status": status, "reason": reason, "message": message, "lastTransitionTime": now,
        });
        // Conditions are merged by type. The UID is a precondition: a Pod created again under this name is another Pod.
        let patch = json!({ "metadata": { "uid": uid }, "status": { "conditions": [condition] } });
        let parameters = PatchParams::default();
        let patch = Patch::Strategic(patch);
        if let Err(error) = self.runtime.block_on(call(pods.patch_status(name, &parameters, &patch))) {
            tracing::warn!(namespace, pod = name, error = %Chain(&error), "failed to write the condition of a workload");
        }
    }
}
