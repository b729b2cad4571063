//! Stands between csi-sanity and the driver, as kubelet and the external-provisioner do in a cluster. csi-sanity knows one
//! socket and asks for a disk: a target path without kubelet's shape, and one writer. The relay sends each call to the node plugin
//! or to the controller, turns path and access mode into what they get for our volumes, and passes everything else on as it is.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use s3csi_driver::csi::proto::controller_client::ControllerClient;
use s3csi_driver::csi::proto::controller_server::ControllerServer;
use s3csi_driver::csi::proto::identity_client::IdentityClient;
use s3csi_driver::csi::proto::identity_server::{Identity, IdentityServer};
use s3csi_driver::csi::proto::node_server::{Node, NodeServer};
use s3csi_driver::csi::proto::volume_capability::access_mode::Mode;
use s3csi_driver::csi::proto::{
    GetPluginCapabilitiesRequest, GetPluginCapabilitiesResponse, GetPluginInfoRequest, GetPluginInfoResponse,
    NodeExpandVolumeRequest, NodeExpandVolumeResponse, NodeGetCapabilitiesRequest, NodeGetCapabilitiesResponse,
    NodeGetInfoRequest, NodeGetInfoResponse, NodeGetVolumeStatsRequest, NodeGetVolumeStatsResponse,
    NodePublishVolumeRequest, NodePublishVolumeResponse, NodeStageVolumeRequest, NodeStageVolumeResponse,
    NodeUnpublishVolumeRequest, NodeUnpublishVolumeResponse, NodeUnstageVolumeRequest, NodeUnstageVolumeResponse,
    ProbeRequest, ProbeResponse, VolumeCapability,
};
use s3csi_testbed::kubelet::{Kubelet, channel};
use s3csi_testbed::leftovers::mounts_beneath;
use tokio::net::UnixListener;
use tokio::runtime::Runtime;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Channel;
use tonic::{Request, Response, Status};

/// A running relay. Dropping it ends it.
pub struct Relay {
    socket: PathBuf,
    mounted: Arc<AtomicUsize>,
    _runtime: Runtime,
}

impl Relay {
    pub fn start(socket: &Path, plugin: &Path, controller: &Path) -> Self {
        let runtime = Runtime::new().unwrap();
        let mounted = Arc::<AtomicUsize>::default();
        let kubelet = runtime.block_on(async { Kubelet::new(Path::new("/"), plugin) });
        let channel = runtime.block_on(async { channel(controller) });
        let forward = Forward {
            kubelet,
            controller: ControllerClient::new(channel.clone()),
            controller_identity: IdentityClient::new(channel),
            mounted: Arc::clone(&mounted),
        };
        let listener = runtime.block_on(async { UnixListener::bind(socket) }).unwrap();
        runtime.spawn(
            tonic::transport::Server::builder()
                .add_service(IdentityServer::new(forward.clone()))
                .add_service(NodeServer::new(forward.clone()))
                .add_service(ControllerServer::new(forward))
                .serve_with_incoming(UnixListenerStream::new(listener)),
        );
        Self { socket: socket.to_owned(), mounted, _runtime: runtime }
    }

    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// How many publishes left a mount at their target.
    pub fn mounted(&self) -> usize {
        self.mounted.load(Ordering::Relaxed)
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.socket);
    }
}

#[derive(Clone)]
pub struct Forward {
    kubelet: Kubelet,
    pub(crate) controller: ControllerClient<Channel>,
    controller_identity: IdentityClient<Channel>,
    mounted: Arc<AtomicUsize>,
}

/// Only many nodes can use a bucket, which one writer can do as well.
pub(crate) fn for_many(capability: &mut VolumeCapability) {
    let one = [Mode::SingleNodeWriter, Mode::SingleNodeSingleWriter].map(i32::from);
    if let Some(mode) = capability.access_mode.as_mut().filter(|it| one.contains(&it.mode)) {
        mode.mode = Mode::MultiNodeMultiWriter.into();
    }
}

/// `…/target`, as csi-sanity calls it, is kubelet's `…/mount`.
fn kubelet_path(path: &str) -> String {
    path.strip_suffix("/target").map_or_else(|| path.to_owned(), |parent| format!("{parent}/mount"))
}

#[tonic::async_trait]
impl Identity for Forward {
    async fn get_plugin_info(
        &self,
        request: Request<GetPluginInfoRequest>,
    ) -> Result<Response<GetPluginInfoResponse>, Status> {
        self.kubelet.identity().get_plugin_info(request.into_inner()).await
    }

    async fn get_plugin_capabilities(
        &self,
        request: Request<GetPluginCapabilitiesRequest>,
    ) -> Result<Response<GetPluginCapabilitiesResponse>, Status> {
        self.controller_identity.clone().get_plugin_capabilities(request).await
    }

    async fn probe(&self, request: Request<ProbeRequest>) -> Result<Response<ProbeResponse>, Status> {
        self.kubelet.identity().probe(request.into_inner()).await
    }
}

#[tonic::async_trait]
impl Node for Forward {
    async fn node_publish_volume(
        &self,
        request: Request<NodePublishVolumeRequest>,
    ) -> Result<Response<NodePublishVolumeResponse>, Status> {
        let mut request = request.into_inner();
        request.target_path = kubelet_path(&request.target_path);
        if let Some(capability) = &mut request.volume_capability {
            for_many(capability);
        }
        let target = PathBuf::from(&request.target_path);
        let response = self.kubelet.node().node_publish_volume(request).await?;
        if mounts_beneath(&target).len() != 1 {
            return Err(Status::internal(format!("published, but not mounted: {}", target.display())));
        }
        self.mounted.fetch_add(1, Ordering::Relaxed);
        Ok(response)
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<NodeUnpublishVolumeRequest>,
    ) -> Result<Response<NodeUnpublishVolumeResponse>, Status> {
        let mut request = request.into_inner();
        request.target_path = kubelet_path(&request.target_path);
        self.kubelet.node().node_unpublish_volume(request).await
    }

    async fn node_get_info(
        &self,
        request: Request<NodeGetInfoRequest>,
    ) -> Result<Response<NodeGetInfoResponse>, Status> {
        self.kubelet.node().node_get_info(request.into_inner()).await
    }

    async fn node_get_capabilities(
        &self,
        request: Request<NodeGetCapabilitiesRequest>,
    ) -> Result<Response<NodeGetCapabilitiesResponse>, Status> {
        self.kubelet.node().node_get_capabilities(request.into_inner()).await
    }

    async fn node_stage_volume(
        &self,
        request: Request<NodeStageVolumeRequest>,
    ) -> Result<Response<NodeStageVolumeResponse>, Status> {
        self.kubelet.node().node_stage_volume(request.into_inner()).await
    }

    async fn node_unstage_volume(
        &self,
        request: Request<NodeUnstageVolumeRequest>,
    ) -> Result<Response<NodeUnstageVolumeResponse>, Status> {
        self.kubelet.node().node_unstage_volume(request.into_inner()).await
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<NodeGetVolumeStatsRequest>,
    ) -> Result<Response<NodeGetVolumeStatsResponse>, Status> {
        let mut request = request.into_inner();
        request.volume_path = kubelet_path(&request.volume_path);
        self.kubelet.node().node_get_volume_stats(request).await
    }

    async fn node_expand_volume(
        &self,
        request: Request<NodeExpandVolumeRequest>,
    ) -> Result<Response<NodeExpandVolumeResponse>, Status> {
        self.kubelet.node().node_expand_volume(request.into_inner()).await
    }
}
