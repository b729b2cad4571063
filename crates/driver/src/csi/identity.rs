//! CSI Identity: who we are.

use std::collections::HashMap;

use tonic::{Request, Response, Status};

use super::proto::identity_server::Identity;
use super::proto::plugin_capability::{Service, Type, service};
use super::proto::{
    GetPluginCapabilitiesRequest, GetPluginCapabilitiesResponse, GetPluginInfoRequest, GetPluginInfoResponse,
    PluginCapability, ProbeRequest, ProbeResponse,
};

pub struct IdentityService {
    pub driver_name: String,
    pub serves: Serves,
}

/// What else is on the same socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Serves {
    Node,
    Controller,
}

#[tonic::async_trait]
impl Identity for IdentityService {
    async fn get_plugin_info(
        &self,
        _: Request<GetPluginInfoRequest>,
    ) -> Result<Response<GetPluginInfoResponse>, Status> {
        Ok(Response::new(GetPluginInfoResponse {
            name: self.driver_name.clone(),
            vendor_version: env!("CARGO_PKG_VERSION").to_owned(),
            manifest: HashMap::new(),
        }))
    }

    /// The Controller service is announced where it runs.
    async fn get_plugin_capabilities(
        &self,
        _: Request<GetPluginCapabilitiesRequest>,
    ) -> Result<Response<GetPluginCapabilitiesResponse>, Status> {
        let services = match self.serves {
            Serves::Node => Vec::new(),
            Serves::Controller => vec![service::Type::ControllerService],
        };
        let capability =
            |it: service::Type| PluginCapability { r#type: Some(Type::Service(Service { r#type: it.into() })) };
        Ok(Response::new(GetPluginCapabilitiesResponse {
            capabilities: services.into_iter().map(capability).collect(),
        }))
    }

    /// Passes through the pool that calls run in: without a free thread kubelet would get no other answer either.
    async fn probe(&self, _: Request<ProbeRequest>) -> Result<Response<ProbeResponse>, Status> {
        let is_ready = tokio::task::spawn_blocking(|| true).await.unwrap_or(false);
        Ok(Response::new(ProbeResponse { ready: Some(is_ready) }))
    }
}
