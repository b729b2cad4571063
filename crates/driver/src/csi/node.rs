//! CSI Node: turns requests into the node's words and its errors into codes.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

use s3csi_core::publish::{AccessMode, AccessType, RawCapability, RawPublish};
use s3csi_core::secret::Secret;
use tonic::{Request, Response, Status};

use super::proto::node_server::Node as Service;
use super::proto::node_service_capability::{Rpc, Type, rpc};
use super::proto::volume_capability::access_mode::Mode;
use super::proto::volume_capability::{self, MountVolume};
use super::proto::{
    NodeExpandVolumeRequest, NodeExpandVolumeResponse, NodeGetCapabilitiesRequest, NodeGetCapabilitiesResponse,
    NodeGetInfoRequest, NodeGetInfoResponse, NodeGetVolumeStatsRequest, NodeGetVolumeStatsResponse,
    NodePublishVolumeRequest, NodePublishVolumeResponse, NodeServiceCapability, NodeStageVolumeRequest,
    NodeStageVolumeResponse, NodeUnpublishVolumeRequest, NodeUnpublishVolumeResponse, NodeUnstageVolumeRequest,
    NodeUnstageVolumeResponse, VolumeCapability,
};
use super::{call, status};
use crate::metrics::NodeMetrics;
use crate::node::Node;
use crate::node::phases::Phases;

pub struct NodeService {
    pub node_id: String,
    pub node: Arc<Node>,
    pub metrics: Arc<NodeMetrics>,
}

#[tonic::async_trait]
impl Service for NodeService {
    async fn node_publish_volume(
        &self,
        request: Request<NodePublishVolumeRequest>,
    ) -> Result<Response<NodePublishVolumeResponse>, Status> {
        let deadline = call::deadline(request.metadata());
        let request = request.into_inner();
        let (node, metrics) = (self.node.clone(), self.metrics.clone());
        call::run("NodePublishVolume", request.volume_id.clone(), request.target_path.clone(), move || {
            let NodePublishVolumeRequest {
                volume_id,
                target_path,
                volume_capability,
                readonly,
                secrets,
                volume_context,
                ..
            } = request;
            let context: BTreeMap<String, String> = volume_context.into_iter().collect();
            let secrets = guarded(secrets);
            let raw = RawPublish {
                volume_id: &volume_id,
                target_path: &target_path,
                volume_context: &context,
                capability: volume_capability.as_ref().map(capability),
                readonly,
                secrets: &secrets,
            };
            let phases = Phases::begin();
            let outcome = node.publish(&raw, deadline, &phases).map_err(|error| status::of_publish(&error));
            metrics.published(&phases.end(), status::name(outcome.as_ref().err()));
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
        call::run("NodeUnpublishVolume", volume_id.clone(), target_path.clone(), move || {
            let phases = Phases::begin();
            let outcome = node
                .unpublish(&volume_id, Path::new(&target_path), deadline, &phases)
                .map_err(|error| status::of_unpublish(&error));
            metrics.unpublished(&phases.end(), status::name(outcome.as_ref().err()));
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

    /// `VOLUME_MOUNT_GROUP`: kubelet hands us the Pod's fsGroup instead of changing owners of a whole bucket.
    async fn node_get_capabilities(
        &self,
        _: Request<NodeGetCapabilitiesRequest>,
    ) -> Result<Response<NodeGetCapabilitiesResponse>, Status> {
        let mount_group = Rpc { r#type: rpc::Type::VolumeMountGroup.into() };
        Ok(Response::new(NodeGetCapabilitiesResponse {
            capabilities: vec![NodeServiceCapability { r#type: Some(Type::Rpc(mount_group)) }],
        }))
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
        _: Request<NodeGetVolumeStatsRequest>,
    ) -> Result<Response<NodeGetVolumeStatsResponse>, Status> {
        Err(status::unimplemented("NodeGetVolumeStats"))
    }

    async fn node_expand_volume(
        &self,
        _: Request<NodeExpandVolumeRequest>,
    ) -> Result<Response<NodeExpandVolumeResponse>, Status> {
        Err(status::unimplemented("NodeExpandVolume"))
    }
}

/// From here on no secret can be printed.
pub(super) fn guarded(secrets: HashMap<String, String>) -> BTreeMap<String, Secret<String>> {
    secrets.into_iter().map(|(key, value)| (key, Secret::new(value))).collect()
}

pub(super) fn capability(capability: &VolumeCapability) -> RawCapability<'_> {
    let access_mode = capability.access_mode.as_ref().map(|it| match it.mode() {
        Mode::MultiNodeMultiWriter => AccessMode::MultiNodeMultiWriter,
        Mode::MultiNodeReaderOnly => AccessMode::MultiNodeReaderOnly,
        other => AccessMode::Other(other.as_str_name().to_owned()),
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
