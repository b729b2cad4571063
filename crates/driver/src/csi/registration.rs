//! Kubelet's plugin registration: kubelet finds our socket in `plugins_registry` and asks who we are. No sidecar needed.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::watch;
use tonic::{Request, Response, Status};

use super::registration_proto::registration_server::Registration as Service;
use super::registration_proto::{InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};
use crate::metrics::NodeMetrics;

/// The answers to kubelet's plugin registration.
#[derive(Clone)]
pub struct Registration {
    pub socket: PathBuf,
    pub driver_name: String,
    /// The CSI socket as kubelet sees it.
    pub endpoint: PathBuf,
    /// Set when kubelet has registered the driver.
    pub acknowledged: watch::Sender<bool>,
    pub metrics: Arc<NodeMetrics>,
}

#[tonic::async_trait]
impl Service for Registration {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        tracing::debug!("kubelet asked for the plugin's registration");
        Ok(Response::new(plugin_info(&self.driver_name, &self.endpoint)))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let RegistrationStatus { plugin_registered, error } = request.into_inner();
        self.acknowledged.send_replace(plugin_registered);
        self.metrics.registered(plugin_registered);
        if plugin_registered {
            tracing::info!(driver = %self.driver_name, "registered with kubelet");
        } else {
            // kubelet retries; until then this line says why the driver is missing from the CSINode object.
            tracing::error!(driver = %self.driver_name, %error, "kubelet refused the registration");
        }
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

/// What kubelet's plugin manager expects of a CSI driver.
pub fn plugin_info(driver_name: &str, endpoint: &Path) -> PluginInfo {
    PluginInfo {
        r#type: "CSIPlugin".to_owned(),
        name: driver_name.to_owned(),
        endpoint: endpoint.display().to_string(),
        supported_versions: vec!["1.0.0".to_owned()],
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use tonic::transport::Uri;

    use crate::node::Layout;

    #[test]
    fn kubelet_may_name_the_socket_as_the_host_of_its_requests() {
        let socket = Layout::new(Path::new("/var/lib/kubelet"), "s3.csi.example.com").registration_socket();
        let host = socket.display().to_string().replace('/', "%2F");
        Uri::builder().scheme("http").authority(host).path_and_query("/").build().unwrap();
    }
}
