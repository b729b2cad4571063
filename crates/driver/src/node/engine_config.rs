//! The configuration of an engine, for every strategy: its keys, its arguments, its environment.

use std::path::Path;
use std::sync::Arc;

use s3csi_core::credentials::Keys;
use s3csi_core::environment::{DriverSettings, ProfilePaths, engine_environment};
use s3csi_core::policy;
use s3csi_core::publish::{Identity, Publish};
use s3csi_core::user_agent::user_agent;
use tokio::runtime::Handle;

use super::error::PublishError;
use crate::credentials;
use crate::credentials::driver::DriverCredentials;
use crate::credentials::workload::WorkloadCredentials;
use crate::host::FuseOptions;

/// The settings that all engines of this node share.
#[derive(Clone)]
pub struct EngineConfig {
    pub settings: DriverSettings,
    pub driver_credentials: Arc<DriverCredentials>,
    pub workload_credentials: Arc<WorkloadCredentials>,
    pub kubernetes_version: Option<String>,
    /// Waits for issuers of keys.
    pub runtime: Handle,
}

/// The command line and environment of one engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineCommand {
    /// Rendered and sorted, without bucket and mount point.
    pub arguments: Vec<String>,
    /// `KEY=VALUE` each; the engine inherits nothing else.
    pub environment: Vec<String>,
}

impl EngineConfig {
    /// The keys of this volume as they are now: every publish writes them for the engine.
    pub fn keys(&self, publish: &Publish) -> Result<Keys, PublishError> {
        let bucket = || publish.bucket.to_string();
        match &publish.identity {
            Identity::Secret(keys) => Ok(keys.clone()),
            Identity::Driver => {
                let unusable = |cause| PublishError::DriverKeys { bucket: bucket(), cause };
                let missing = || PublishError::NoDriverKeys { bucket: bucket() };
                let current = self.runtime.block_on(self.driver_credentials.current());
                current.map_err(unusable)?.ok_or_else(missing)
            }
            Identity::Workload(workload) => {
                let current = self.runtime.block_on(self.workload_credentials.current(workload));
                current.map(|it| it.keys).map_err(|cause| PublishError::WorkloadKeys { bucket: bucket(), cause })
            }
        }
    }

    /// `view` is the parent of the credentials directory, as the engine sees it. Invalid options are an error; forbidden
    /// ones are left out and logged.
    pub fn command(&self, publish: &Publish, view: &Path) -> Result<EngineCommand, PublishError> {
        let agent = user_agent(
            env!("CARGO_PKG_VERSION"),
            publish.identity.source().as_str(),
            self.kubernetes_version.as_deref(),
        );
        let applied = policy::apply(publish.arguments.clone(), &agent)
            .map_err(|cause| PublishError::Options { bucket: publish.bucket.to_string(), cause })?;
        for removed in &applied.removed {
            let (option, reason) = (&removed.option, removed.reason);
            tracing::warn!(volume = %publish.volume_id, option, reason, "mount option ignored");
        }
        let mut settings = self.settings.clone();
        if let Some(endpoint) = &publish.endpoint {
            settings.endpoint_url = Some(endpoint.to_string());
        }
        let (config, credentials) = credentials::paths(view);
        let profile = ProfilePaths { config: &config, credentials: &credentials };
        Ok(EngineCommand {
            arguments: applied.arguments.render(),
            environment: engine_environment(&settings, profile, &applied.environment),
        })
    }
}

/// The FUSE mount options of a volume.
pub fn fuse_options(publish: &Publish) -> FuseOptions {
    let allow_other = publish.arguments.has("--allow-other") || publish.arguments.has("--allow-root");
    FuseOptions { access: publish.volume_access, allow_other }
}
