//! Whether we are healthy: asks our own CSI socket whether it answers, as a liveness sidecar would.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, UnixStream};
use tonic::transport::Endpoint;

use super::proto::ProbeRequest;
use super::proto::identity_client::IdentityClient;
use crate::health;
use crate::metrics::NodeMetrics;
use crate::node::census::Census;
use crate::node::teller::Teller;

pub async fn serve(listener: TcpListener, csi_socket: PathBuf, figures: Arc<Figures>) {
    health::serve(listener, move || figures.clone().show(), move |_| probe(csi_socket.clone())).await;
}

/// What is shown at `/metrics`, and who looks at the node for it.
pub struct Figures {
    pub metrics: Arc<NodeMetrics>,
    pub census: Arc<Census>,
    pub teller: Arc<Teller>,
}

impl Figures {
    async fn show(self: Arc<Self>) -> Result<String, fmt::Error> {
        let figures = self.clone();
        // It may wait for file systems, for two seconds; if it panics, the figures of the last time are shown.
        let _ = tokio::task::spawn_blocking(move || figures.census.measure(&figures.metrics)).await;
        self.teller.measure();
        self.metrics.render()
    }
}

/// Nothing, or why the socket is of no use.
pub async fn probe(csi_socket: PathBuf) -> Result<(), String> {
    let connect = tower::service_fn(move |_| {
        let csi_socket = csi_socket.clone();
        async move { UnixStream::connect(csi_socket).await.map(TokioIo::new) }
    });
    // The URI is never resolved: the connector above always takes the Unix socket.
    let channel = Endpoint::from_static("http://csi.sock")
        .connect_with_connector(connect)
        .await
        .map_err(|error| format!("the CSI socket cannot be reached: {error}"))?;
    IdentityClient::new(channel)
        .probe(ProbeRequest {})
        .await
        .map_err(|status| format!("the CSI socket answered: {}", status.message()))?;
    Ok(())
}
