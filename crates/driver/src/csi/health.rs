//! The health check of the node plugin: calls its own CSI socket, as a liveness sidecar would.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, UnixStream};
use tokio::sync::Mutex;
use tonic::transport::Endpoint;

use super::proto::ProbeRequest;
use super::proto::identity_client::IdentityClient;
use crate::health;
use crate::metrics::NodeMetrics;
use crate::node::mount_health::MountHealth;
use crate::node::reporter::Reporter;

/// Scrapes within this time share one measurement, however many there are and however long it takes.
const MEASURED_EVERY: Duration = Duration::from_millis(500);

pub async fn serve(listener: TcpListener, csi_socket: PathBuf, metrics_page: Arc<MetricsPage>) {
    health::serve(listener, move || metrics_page.clone().show(), move |_| probe(csi_socket.clone())).await;
}

/// The content of `/metrics`, and what is measured for it.
pub struct MetricsPage {
    metrics: Arc<NodeMetrics>,
    mount_health: Arc<MountHealth>,
    reporter: Arc<Reporter>,
    /// When the mounts were last measured. Held while they are: only one scrape at a time waits for them.
    measured: Mutex<Option<Instant>>,
}

impl MetricsPage {
    pub fn new(metrics: Arc<NodeMetrics>, mount_health: Arc<MountHealth>, reporter: Arc<Reporter>) -> Self {
        Self { metrics, mount_health, reporter, measured: Mutex::new(None) }
    }

    pub fn metrics(&self) -> &Arc<NodeMetrics> {
        &self.metrics
    }

    async fn show(self: Arc<Self>) -> Result<String, fmt::Error> {
        let mut measured = self.measured.lock().await;
        if measured.is_none_or(|it| MEASURED_EVERY <= it.elapsed()) {
            let page = self.clone();
            // It may wait two seconds for file systems; if it panics, the last values are served.
            let _ = tokio::task::spawn_blocking(move || page.mount_health.measure(&page.metrics)).await;
            *measured = Some(Instant::now());
        }
        drop(measured);
        self.reporter.measure();
        self.metrics.render()
    }
}

/// Checks that the CSI socket answers; the error says why it does not.
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
