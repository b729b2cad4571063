//! The socket of the Controller service, for the external-provisioner in the same Pod. It has its own leader election, so this
//! serves whether or not this process is the leader for Mountpoint Pods.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
use s3csi_core::publish::SingleNodeVolumes;
use tokio_stream::wrappers::UnixListenerStream;

use super::controller::ControllerService;
use super::identity::{IdentityService, Serves};
use super::proto::controller_server::ControllerServer;
use super::proto::identity_server::IdentityServer;
use super::server::{GRACE, MAX_REQUEST_BYTES, listen_at, remove_socket};
use crate::provision::Provisioner;

pub struct ProvisioningServer {
    pub driver_name: String,
    pub socket: PathBuf,
    pub provisioner: Arc<Provisioner>,
    pub single_node: SingleNodeVolumes,
}

impl ProvisioningServer {
    /// Serves until `shutdown` completes and the calls in flight have ended.
    pub async fn run(self, shutdown: impl Future<Output = ()> + Send) -> anyhow::Result<()> {
        let Self { driver_name, socket, provisioner, single_node } = self;
        let listener = listen_at(&socket)?;
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let ended = async { drop(stopped.await) };
        let serving = tokio::spawn(
            tonic::transport::Server::builder()
                .add_service(IdentityServer::new(IdentityService {
                    driver_name: driver_name.clone(),
                    serves: Serves::Controller,
                }))
                .add_service(
                    ControllerServer::new(ControllerService { provisioner, single_node })
                        .max_decoding_message_size(MAX_REQUEST_BYTES),
                )
                .serve_with_incoming_shutdown(UnixListenerStream::new(listener), ended),
        );
        tracing::info!(driver = %driver_name, ?socket, "serving CSI Controller requests");
        shutdown.await;
        drop(stop);
        if let Ok(ended) = tokio::time::timeout(GRACE, serving).await {
            ended.context("the CSI server panicked")?.context("the CSI server failed")?;
        } else {
            tracing::warn!(grace = ?GRACE, "calls still in flight after the grace period, stopping anyway");
        }
        remove_socket(&socket);
        Ok(())
    }
}
