//! CSI Node: parses requests and maps errors to gRPC codes.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use s3csi_core::publish::{
    AccessMode, AccessType, RawCapability, RawPublish, SingleNodeVolumes, guard_tokens, is_inline,
};
use s3csi_core::secret::Secret;
use tonic::{Request, Response, Status};

use super::admission::Admission;
use super::call::{CallSpec, CallThread};
use super::proto::node_server::Node as Service;
use super::proto::node_service_capability::{Rpc, Type, rpc};
use super::proto::volume_capability::access_mode::Mode;
use super::proto::volume_capability::{self, MountVolume};
use super::proto::{
    NodeExpandVolumeRequest, NodeExpandVolumeResponse, NodeGetCapabilitiesRequest, NodeGetCapabilitiesResponse,
    NodeGetInfoRequest, NodeGetInfoResponse, NodeGetVolumeStatsRequest, NodeGetVolumeStatsResponse,
    NodePublishVolumeRequest, NodePublishVolumeResponse, NodeServiceCapability, NodeStageVolumeRequest,
    NodeStageVolumeResponse, NodeUnpublishVolumeRequest, NodeUnpublishVolumeResponse, NodeUnstageVolumeRequest,
    NodeUnstageVolumeResponse, VolumeCapability, VolumeCondition, VolumeUsage, volume_usage,
};
use super::{call, status};
use crate::metrics::NodeMetrics;
use crate::node::health::VolumeHealth;
use crate::node::timing::{CallPhase, CallTimer};
use crate::node::{Node, WORKLOAD_NAMESPACE};

pub struct NodeService {
    pub node_id: String,
    pub node: Arc<Node>,
    pub metrics: Arc<NodeMetrics>,
    pub admission: Admission,
}

#[tonic::async_trait]
impl Service for NodeService {
    async fn node_publish_volume(
        &self,
        request: Request<NodePublishVolumeRequest>,
    ) -> Result<Response<NodePublishVolumeResponse>, Status> {
        let deadline = call::deadline(request.metadata());
        let mut request = request.into_inner();
        let mut context: BTreeMap<String, String> = std::mem::take(&mut request.volume_context).into_iter().collect();
        let (node, metrics) = (self.node.clone(), self.metrics.clone());
        // An inline volume belongs to one Pod. kubelet calls that a volume for one node.
        let single_node =
            if is_inline(&context) { SingleNodeVolumes::Enforced } else { self.node.single_node_volumes() };
        let (volume, target) = (request.volume_id.clone(), request.target_path.clone());
        let namespace = context.get(WORKLOAD_NAMESPACE).cloned().unwrap_or_default();
        let start = Instant::now();
        // Waiting for a Mountpoint Pod costs no thread. What is missing then is the call's own error.
        let assigned = node.wait_until_assigned(&volume, &target, &context, deadline).await;
        let room = self.admission.publish(&namespace, deadline);
        let call = CallSpec { method: "NodePublishVolume", volume, target, thread: CallThread::BlockingPool };
        call::run(call, room, move || {
            let NodePublishVolumeRequest { volume_id, target_path, volume_capability, readonly, secrets, .. } = request;
            let mut secrets = guarded(secrets);
            guard_tokens(&mut context, &mut secrets);
            let raw = RawPublish {
                volume_id: &volume_id,
                target_path: &target_path,
                volume_context: &context,
                capability: volume_capability.as_ref().map(|it| capability(it, single_node)),
                readonly,
                secrets: &secrets,
            };
            let timer = CallTimer::begin_at(start);
            if let Some(waited) = assigned {
                timer.record(CallPhase::Assignment, waited);
            }
            let outcome = node.publish(&raw, deadline, &timer).map_err(|error| status::of_publish(&error));
            metrics.published(&timer.end(), status::name(outcome.as_ref().err()));
            outcome.map(|()| NodePublishVolumeResponse {})
        })
        .await
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<NodeUnpublishVolumeRequest>,
    ) -> Result<Response<NodeUnpublishVolumeResponse>, Status> {
        let deadline = call::deadline(request.metadata());
        let NodeUnpublishVolumeRequest { volume_id, target_path } = request.into_inner();
        let (node, metrics) = (self.node.clone(), self.metrics.clone());
        let start = Instant::now();
        let room = self.admission.unpublish(deadline);
        let (volume, target) = (volume_id.clone(), target_path.clone());
        let call = CallSpec { method: "NodeUnpublishVolume", volume, target, thread: CallThread::Own };
        call::run(call, room, move || {
            let timer = CallTimer::begin_at(start);
            let outcome = node
                .unpublish(&volume_id, Path::new(&target_path), deadline, &timer)
                .map_err(|error| status::of_unpublish(&error));
            metrics.unpublished(&timer.end(), status::name(outcome.as_ref().err()));
            outcome.map(|()| NodeUnpublishVolumeResponse {})
        })
        .await
    }

    async fn node_get_info(&self, _: Request<NodeGetInfoRequest>) -> Result<Response<NodeGetInfoResponse>, Status> {
        Ok(Response::new(NodeGetInfoResponse {
            node_id: self.node_id.clone(),
            max_volumes_per_node: 0,
            accessible_topology: None,
        }))
    }

    /// `VOLUME_MOUNT_GROUP`: kubelet passes the Pod's fsGroup instead of changing owners of a whole bucket.
    /// `SINGLE_NODE_MULTI_WRITER`: kubelet distinguishes `ReadWriteOncePod` from `ReadWriteOnce`.
    /// `VOLUME_CONDITION`: whether the engine answers, as part of the statistics.
    async fn node_get_capabilities(
        &self,
        _: Request<NodeGetCapabilitiesRequest>,
    ) -> Result<Response<NodeGetCapabilitiesResponse>, Status> {
        let mut types = vec![rpc::Type::VolumeMountGroup, rpc::Type::GetVolumeStats, rpc::Type::VolumeCondition];
        if self.node.single_node_volumes() == SingleNodeVolumes::Enforced {
            types.push(rpc::Type::SingleNodeMultiWriter);
        }
        let capability = |it: rpc::Type| NodeServiceCapability { r#type: Some(Type::Rpc(Rpc { r#type: it.into() })) };
        Ok(Response::new(NodeGetCapabilitiesResponse { capabilities: types.into_iter().map(capability).collect() }))
    }

    async fn node_stage_volume(
        &self,
        _: Request<NodeStageVolumeRequest>,
    ) -> Result<Response<NodeStageVolumeResponse>, Status> {
        Err(status::unimplemented("NodeStageVolume"))
    }

    async fn node_unstage_volume(
        &self,
        _: Request<NodeUnstageVolumeRequest>,
    ) -> Result<Response<NodeUnstageVolumeResponse>, Status> {
        Err(status::unimplemented("NodeUnstageVolume"))
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<NodeGetVolumeStatsRequest>,
    ) -> Result<Response<NodeGetVolumeStatsResponse>, Status> {
        let deadline = call::deadline(request.metadata());
        let NodeGetVolumeStatsRequest { volume_id, volume_path, staging_target_path: _ } = request.into_inner();
        let node = self.node.clone();
        let room = self.admission.unpublish(deadline);
        let (volume, target) = (volume_id.clone(), volume_path.clone());
        let call = CallSpec { method: "NodeGetVolumeStats", volume, target, thread: CallThread::Own };
        call::run(call, room, move || {
            let health = node.volume_health(&volume_id, Path::new(&volume_path), deadline);
            let VolumeHealth { is_abnormal, message } = health.map_err(|error| status::of_health(&error))?;
            Ok(NodeGetVolumeStatsResponse {
                usage: vec![UNLIMITED],
                volume_condition: Some(VolumeCondition { abnormal: is_abnormal, message }),
            })
        })
        .await
    }

    async fn node_expand_volume(
        &self,
        _: Request<NodeExpandVolumeRequest>,
    ) -> Result<Response<NodeExpandVolumeResponse>, Status> {
        Err(status::unimplemented("NodeExpandVolume"))
    }
}

/// A bucket has no capacity, and its use is known to the store only, which is not asked. kubelet discards a response without usage.
const UNLIMITED: VolumeUsage =
    VolumeUsage { available: 1 << 60, total: 1 << 60, used: 0, unit: volume_usage::Unit::Bytes as i32 };

/// From here on no secret can be printed.
pub(super) fn guarded(secrets: HashMap<String, String>) -> BTreeMap<String, Secret<String>> {
    secrets.into_iter().map(|(key, value)| (key, Secret::new(value))).collect()
}

pub(super) fn capability(capability: &VolumeCapability, single_node: SingleNodeVolumes) -> RawCapability<'_> {
    let access_mode = capability.access_mode.as_ref().map(|it| match (it.mode(), single_node) {
        (Mode::MultiNodeMultiWriter, _) => AccessMode::MultiNodeMultiWriter,
        (Mode::MultiNodeReaderOnly, _) => AccessMode::MultiNodeReaderOnly,
        (Mode::SingleNodeSingleWriter, SingleNodeVolumes::Enforced) => AccessMode::SingleNodeSingleWriter,
        // The second is what callers send that do not know the first.
        (Mode::SingleNodeMultiWriter | Mode::SingleNodeWriter, SingleNodeVolumes::Enforced) => {
            AccessMode::SingleNodeMultiWriter
        }
        (other, _) => AccessMode::Other(other.as_str_name().to_owned()),
    });
    let access_type = match &capability.access_type {
        Some(volume_capability::AccessType::Mount(MountVolume { fs_type, mount_flags, volume_mount_group })) => {
            AccessType::Mount { fs_type, mount_flags, volume_mount_group }
        }
        Some(volume_capability::AccessType::Block(_)) => AccessType::Block,
        None => AccessType::Unset,
    };
    RawCapability { access_mode, access_type }
}
