//! The relay's way to the controller.

use s3csi_driver::csi::proto::controller_server::Controller;
use s3csi_driver::csi::proto::{
    ControllerExpandVolumeRequest, ControllerExpandVolumeResponse, ControllerGetCapabilitiesRequest,
    ControllerGetCapabilitiesResponse, ControllerGetVolumeRequest, ControllerGetVolumeResponse,
    ControllerModifyVolumeRequest, ControllerModifyVolumeResponse, ControllerPublishVolumeRequest,
    ControllerPublishVolumeResponse, ControllerUnpublishVolumeRequest, ControllerUnpublishVolumeResponse,
    CreateSnapshotRequest, CreateSnapshotResponse, CreateVolumeRequest, CreateVolumeResponse, DeleteSnapshotRequest,
    DeleteSnapshotResponse, DeleteVolumeRequest, DeleteVolumeResponse, GetCapacityRequest, GetCapacityResponse,
    ListSnapshotsRequest, ListSnapshotsResponse, ListVolumesRequest, ListVolumesResponse,
    ValidateVolumeCapabilitiesRequest, ValidateVolumeCapabilitiesResponse,
};
use tonic::{Request, Response, Status};

use crate::relay::{Forward, for_many};

/// Everything that is passed on as it is.
macro_rules! passed_on {
    ($($method:ident($request:ty) -> $response:ty),* $(,)?) => {
        #[tonic::async_trait]
        impl Controller for Forward {
            async fn create_volume(
                &self,
                mut request: Request<CreateVolumeRequest>,
            ) -> Result<Response<CreateVolumeResponse>, Status> {
                request.get_mut().volume_capabilities.iter_mut().for_each(for_many);
                self.controller.clone().create_volume(request).await
            }

            async fn validate_volume_capabilities(
                &self,
                mut request: Request<ValidateVolumeCapabilitiesRequest>,
            ) -> Result<Response<ValidateVolumeCapabilitiesResponse>, Status> {
                request.get_mut().volume_capabilities.iter_mut().for_each(for_many);
                self.controller.clone().validate_volume_capabilities(request).await
            }

            $(async fn $method(&self, request: Request<$request>) -> Result<Response<$response>, Status> {
                self.controller.clone().$method(request).await
            })*
        }
    };
}

passed_on!(
    delete_volume(DeleteVolumeRequest) -> DeleteVolumeResponse,
    controller_get_capabilities(ControllerGetCapabilitiesRequest) -> ControllerGetCapabilitiesResponse,
    controller_publish_volume(ControllerPublishVolumeRequest) -> ControllerPublishVolumeResponse,
    controller_unpublish_volume(ControllerUnpublishVolumeRequest) -> ControllerUnpublishVolumeResponse,
    list_volumes(ListVolumesRequest) -> ListVolumesResponse,
    get_capacity(GetCapacityRequest) -> GetCapacityResponse,
    create_snapshot(CreateSnapshotRequest) -> CreateSnapshotResponse,
    delete_snapshot(DeleteSnapshotRequest) -> DeleteSnapshotResponse,
    list_snapshots(ListSnapshotsRequest) -> ListSnapshotsResponse,
    controller_expand_volume(ControllerExpandVolumeRequest) -> ControllerExpandVolumeResponse,
    controller_get_volume(ControllerGetVolumeRequest) -> ControllerGetVolumeResponse,
    controller_modify_volume(ControllerModifyVolumeRequest) -> ControllerModifyVolumeResponse,
);
