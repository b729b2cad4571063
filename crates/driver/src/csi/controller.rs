//! CSI Controller: parses requests for volumes and maps the provisioner's errors to gRPC codes.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use s3csi_core::provision::{
    CreateRequest, ProvisionedId, ProvisionedVolume, RawCreateRequest, StoreIdentity, check_capability,
};
use s3csi_core::publish::{RawCapability, SingleNodeVolumes, context};
use tonic::{Request, Response, Status};

use super::node::{capability, guarded};
use super::proto::controller_server::Controller;
use super::proto::controller_service_capability::{Rpc, Type, rpc};
use super::proto::validate_volume_capabilities_response::Confirmed;
use super::proto::{
    CapacityRange, ControllerExpandVolumeRequest, ControllerExpandVolumeResponse, ControllerGetCapabilitiesRequest,
    ControllerGetCapabilitiesResponse, ControllerGetVolumeRequest, ControllerGetVolumeResponse,
    ControllerModifyVolumeRequest, ControllerModifyVolumeResponse, ControllerPublishVolumeRequest,
    ControllerPublishVolumeResponse, ControllerServiceCapability, ControllerUnpublishVolumeRequest,
    ControllerUnpublishVolumeResponse, CreateSnapshotRequest, CreateSnapshotResponse, CreateVolumeRequest,
    CreateVolumeResponse, DeleteSnapshotRequest, DeleteSnapshotResponse, DeleteVolumeRequest, DeleteVolumeResponse,
    GetCapacityRequest, GetCapacityResponse, ListSnapshotsRequest, ListSnapshotsResponse, ListVolumesRequest,
    ListVolumesResponse, ValidateVolumeCapabilitiesRequest, ValidateVolumeCapabilitiesResponse, Volume,
};
use super::{call, provision_status, status};
use crate::provision::{Provisioner, VolumeLookup};

pub struct ControllerService {
    pub provisioner: Arc<Provisioner>,
    pub single_node: SingleNodeVolumes,
}

#[tonic::async_trait]
impl Controller for ControllerService {
    async fn create_volume(
        &self,
        request: Request<CreateVolumeRequest>,
    ) -> Result<Response<CreateVolumeResponse>, Status> {
        let deadline = call::deadline(request.metadata());
        let request = request.into_inner();
        call::answer("CreateVolume", request.name.clone(), String::new(), async {
            let create = parse(request, self.single_node)?;
            self.provisioner.create(&create, deadline).await.map_err(|error| provision_status::of_create(&error))?;
            let volume = Volume {
                capacity_bytes: i64::try_from(create.record.capacity_bytes).unwrap_or(i64::MAX),
                volume_id: create.id.to_string(),
                volume_context: create.volume_context().into_iter().collect(),
                ..Volume::default()
            };
            Ok(CreateVolumeResponse { volume: Some(volume) })
        })
        .await
    }

    async fn delete_volume(
        &self,
        request: Request<DeleteVolumeRequest>,
    ) -> Result<Response<DeleteVolumeResponse>, Status> {
        let deadline = call::deadline(request.metadata());
        let DeleteVolumeRequest { volume_id, secrets } = request.into_inner();
        call::answer("DeleteVolume", volume_id.clone(), String::new(), async {
            if volume_id.is_empty() {
                return Err(provision_status::volume_id_missing());
            }
            let identity =
                StoreIdentity::parse(&guarded(secrets)).map_err(|cause| provision_status::of_secret(&cause))?;
            let deleted = match volume_id.parse::<ProvisionedId>() {
                Ok(id) => self.provisioner.delete(&id, &identity, deadline).await,
                Err(_) => self.provisioner.refuse_foreign(&volume_id, &identity, deadline).await,
            };
            deleted.map_err(|error| provision_status::of_delete(&error))?;
            Ok(DeleteVolumeResponse {})
        })
        .await
    }

    /// Confirms what the node would accept for an existing volume.
    async fn validate_volume_capabilities(
        &self,
        request: Request<ValidateVolumeCapabilitiesRequest>,
    ) -> Result<Response<ValidateVolumeCapabilitiesResponse>, Status> {
        let deadline = call::deadline(request.metadata());
        let request = request.into_inner();
        call::answer("ValidateVolumeCapabilities", request.volume_id.clone(), String::new(), async {
            let ValidateVolumeCapabilitiesRequest {
                volume_id,
                volume_context,
                volume_capabilities,
                parameters,
                secrets,
                mutable_parameters,
            } = request;
            if volume_id.is_empty() {
                return Err(provision_status::volume_id_missing());
            }
            if volume_capabilities.is_empty() {
                return Err(provision_status::capabilities_missing());
            }
            let id: ProvisionedId = volume_id.parse().map_err(|error| provision_status::not_found(&error))?;
            let identity =
                StoreIdentity::parse(&guarded(secrets)).map_err(|cause| provision_status::of_secret(&cause))?;
            let found = self.provisioner.lookup(&id, &identity, deadline).await;
            match found.map_err(|error| provision_status::of_lookup(&error))? {
                VolumeLookup::Found(_) | VolumeLookup::Legacy => {}
                VolumeLookup::NotFound => return Err(provision_status::no_such_volume(&volume_id)),
            }
            let is_prefix = matches!(id.data, ProvisionedVolume::Prefix { .. });
            let raw: Vec<RawCapability<'_>> =
                volume_capabilities.iter().map(|it| capability(it, self.single_node)).collect();
            let problem = raw.iter().find_map(|it| check_capability(it, is_prefix).err());
            let problem =
                problem.map(|it| s3csi_core::Chain(&it).to_string()).or_else(|| other_bucket(&volume_context, &id));
            Ok(match problem {
                Some(message) => ValidateVolumeCapabilitiesResponse { confirmed: None, message },
                None => ValidateVolumeCapabilitiesResponse {
                    confirmed: Some(Confirmed { volume_context, volume_capabilities, parameters, mutable_parameters }),
                    message: String::new(),
                },
            })
        })
        .await
    }

    async fn controller_get_capabilities(
        &self,
        _: Request<ControllerGetCapabilitiesRequest>,
    ) -> Result<Response<ControllerGetCapabilitiesResponse>, Status> {
        let mut types = vec![rpc::Type::CreateDeleteVolume];
        if self.single_node == SingleNodeVolumes::Enforced {
            types.push(rpc::Type::SingleNodeMultiWriter);
        }
        let capability =
            |it: rpc::Type| ControllerServiceCapability { r#type: Some(Type::Rpc(Rpc { r#type: it.into() })) };
        let capabilities = types.into_iter().map(capability).collect();
        Ok(Response::new(ControllerGetCapabilitiesResponse { capabilities }))
    }

    async fn controller_publish_volume(
        &self,
        _: Request<ControllerPublishVolumeRequest>,
    ) -> Result<Response<ControllerPublishVolumeResponse>, Status> {
        Err(status::unimplemented("ControllerPublishVolume"))
    }

    async fn controller_unpublish_volume(
        &self,
        _: Request<ControllerUnpublishVolumeRequest>,
    ) -> Result<Response<ControllerUnpublishVolumeResponse>, Status> {
        Err(status::unimplemented("ControllerUnpublishVolume"))
    }

    async fn list_volumes(&self, _: Request<ListVolumesRequest>) -> Result<Response<ListVolumesResponse>, Status> {
        Err(status::unimplemented("ListVolumes"))
    }

    /// S3 has no API for the available capacity.
    async fn get_capacity(&self, _: Request<GetCapacityRequest>) -> Result<Response<GetCapacityResponse>, Status> {
        Err(status::unimplemented("GetCapacity"))
    }

    async fn create_snapshot(
        &self,
        _: Request<CreateSnapshotRequest>,
    ) -> Result<Response<CreateSnapshotResponse>, Status> {
        Err(status::unimplemented("CreateSnapshot"))
    }

    async fn delete_snapshot(
        &self,
        _: Request<DeleteSnapshotRequest>,
    ) -> Result<Response<DeleteSnapshotResponse>, Status> {
        Err(status::unimplemented("DeleteSnapshot"))
    }

    async fn list_snapshots(
        &self,
        _: Request<ListSnapshotsRequest>,
    ) -> Result<Response<ListSnapshotsResponse>, Status> {
        Err(status::unimplemented("ListSnapshots"))
    }

    async fn controller_expand_volume(
        &self,
        _: Request<ControllerExpandVolumeRequest>,
    ) -> Result<Response<ControllerExpandVolumeResponse>, Status> {
        Err(status::unimplemented("ControllerExpandVolume"))
    }

    async fn controller_get_volume(
        &self,
        _: Request<ControllerGetVolumeRequest>,
    ) -> Result<Response<ControllerGetVolumeResponse>, Status> {
        Err(status::unimplemented("ControllerGetVolume"))
    }

    async fn controller_modify_volume(
        &self,
        _: Request<ControllerModifyVolumeRequest>,
    ) -> Result<Response<ControllerModifyVolumeResponse>, Status> {
        Err(status::unimplemented("ControllerModifyVolume"))
    }
}

fn parse(request: CreateVolumeRequest, single_node: SingleNodeVolumes) -> Result<CreateRequest, Status> {
    let CreateVolumeRequest {
        name,
        capacity_range,
        volume_capabilities,
        parameters,
        secrets,
        volume_content_source,
        mutable_parameters,
        // Topology is not announced: a bucket is accessible from every node.
        accessibility_requirements: _,
    } = request;
    let CapacityRange { required_bytes, limit_bytes } = capacity_range.unwrap_or_default();
    let parameters: BTreeMap<String, String> = parameters.into_iter().collect();
    let capabilities: Vec<RawCapability<'_>> =
        volume_capabilities.iter().map(|it| capability(it, single_node)).collect();
    let raw = RawCreateRequest {
        name: &name,
        capabilities: &capabilities,
        parameters: &parameters,
        secrets: &guarded(secrets),
        required_bytes,
        limit_bytes,
        has_content_source: volume_content_source.is_some(),
        has_mutable_parameters: !mutable_parameters.is_empty(),
    };
    CreateRequest::parse(&raw).map_err(|error| provision_status::of_invalid(&error))
}

/// A context that was edited by hand may name another bucket.
fn other_bucket(volume_context: &HashMap<String, String>, id: &ProvisionedId) -> Option<String> {
    let named = volume_context.get(context::BUCKET_NAME).filter(|it| *it != id.bucket().as_str())?;
    Some(format!("the volume is in bucket {:?}, and its context says {named:?}", id.bucket().as_str()))
}
