//! Provides csi-sanity with volumes: a bucket each. Not under test, and nothing but that.

use std::collections::HashMap;
use std::hash::{Hash as _, Hasher as _};

use s3csi_driver::csi::proto::controller_server::Controller;
use s3csi_driver::csi::proto::controller_service_capability::{Rpc, Type, rpc};
use s3csi_driver::csi::proto::{
    ControllerExpandVolumeRequest, ControllerExpandVolumeResponse, ControllerGetCapabilitiesRequest,
    ControllerGetCapabilitiesResponse, ControllerGetVolumeRequest, ControllerGetVolumeResponse,
    ControllerModifyVolumeRequest, ControllerModifyVolumeResponse, ControllerPublishVolumeRequest,
    ControllerPublishVolumeResponse, ControllerServiceCapability, ControllerUnpublishVolumeRequest,
    ControllerUnpublishVolumeResponse, CreateSnapshotRequest, CreateSnapshotResponse, CreateVolumeRequest,
    CreateVolumeResponse, DeleteSnapshotRequest, DeleteSnapshotResponse, DeleteVolumeRequest, DeleteVolumeResponse,
    GetCapacityRequest, GetCapacityResponse, ListSnapshotsRequest, ListSnapshotsResponse, ListVolumesRequest,
    ListVolumesResponse, ValidateVolumeCapabilitiesRequest, ValidateVolumeCapabilitiesResponse, Volume,
};
use s3csi_testbed::s3::S3Server;
use s3csi_testbed::store::Store as _;
use tonic::{Request, Response, Status};

pub struct Provisioner {
    pub store: S3Server,
}

#[tonic::async_trait]
impl Controller for Provisioner {
    async fn create_volume(
        &self,
        request: Request<CreateVolumeRequest>,
    ) -> Result<Response<CreateVolumeResponse>, Status> {
        // Volume names are longer than bucket names may be, and the same name must mean the same bucket.
        let mut hash = std::hash::DefaultHasher::new();
        request.into_inner().name.hash(&mut hash);
        let bucket = format!("sanity-{:016x}", hash.finish());
        self.store
            .create_bucket(&bucket, self.store.account())
            .map_err(|error| Status::internal(format!("no bucket: {error}")))?;
        let volume = Volume {
            volume_id: bucket.clone(),
            volume_context: HashMap::from([("bucketName".to_owned(), bucket)]),
            ..Volume::default()
        };
        Ok(Response::new(CreateVolumeResponse { volume: Some(volume) }))
    }

    async fn delete_volume(&self, _: Request<DeleteVolumeRequest>) -> Result<Response<DeleteVolumeResponse>, Status> {
        // The store ends with the test.
        Ok(Response::new(DeleteVolumeResponse {}))
    }

    async fn controller_get_capabilities(
        &self,
        _: Request<ControllerGetCapabilitiesRequest>,
    ) -> Result<Response<ControllerGetCapabilitiesResponse>, Status> {
        let create_delete = Rpc { r#type: rpc::Type::CreateDeleteVolume.into() };
        let capabilities = vec![ControllerServiceCapability { r#type: Some(Type::Rpc(create_delete)) }];
        Ok(Response::new(ControllerGetCapabilitiesResponse { capabilities }))
    }

    async fn controller_publish_volume(
        &self,
        _: Request<ControllerPublishVolumeRequest>,
    ) -> Result<Response<ControllerPublishVolumeResponse>, Status> {
        Err(not_announced())
    }

    async fn controller_unpublish_volume(
        &self,
        _: Request<ControllerUnpublishVolumeRequest>,
    ) -> Result<Response<ControllerUnpublishVolumeResponse>, Status> {
        Err(not_announced())
    }

    async fn validate_volume_capabilities(
        &self,
        _: Request<ValidateVolumeCapabilitiesRequest>,
    ) -> Result<Response<ValidateVolumeCapabilitiesResponse>, Status> {
        Err(not_announced())
    }

    async fn list_volumes(&self, _: Request<ListVolumesRequest>) -> Result<Response<ListVolumesResponse>, Status> {
        Err(not_announced())
    }

    async fn get_capacity(&self, _: Request<GetCapacityRequest>) -> Result<Response<GetCapacityResponse>, Status> {
        Err(not_announced())
    }

    async fn create_snapshot(
        &self,
        _: Request<CreateSnapshotRequest>,
    ) -> Result<Response<CreateSnapshotResponse>, Status> {
        Err(not_announced())
    }

    async fn delete_snapshot(
        &self,
        _: Request<DeleteSnapshotRequest>,
    ) -> Result<Response<DeleteSnapshotResponse>, Status> {
        Err(not_announced())
    }

    async fn list_snapshots(
        &self,
        _: Request<ListSnapshotsRequest>,
    ) -> Result<Response<ListSnapshotsResponse>, Status> {
        Err(not_announced())
    }

    async fn controller_expand_volume(
        &self,
        _: Request<ControllerExpandVolumeRequest>,
    ) -> Result<Response<ControllerExpandVolumeResponse>, Status> {
        Err(not_announced())
    }

    async fn controller_get_volume(
        &self,
        _: Request<ControllerGetVolumeRequest>,
    ) -> Result<Response<ControllerGetVolumeResponse>, Status> {
        Err(not_announced())
    }

    async fn controller_modify_volume(
        &self,
        _: Request<ControllerModifyVolumeRequest>,
    ) -> Result<Response<ControllerModifyVolumeResponse>, Status> {
        Err(not_announced())
    }
}

fn not_announced() -> Status {
    Status::unimplemented("not announced")
}
