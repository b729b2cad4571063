//! The configuration of an engine, for every strategy: its keys, its arguments, its environment.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use s3csi_core::credentials::Keys;
use s3csi_core::environment::{DriverSettings, ProfilePaths, engine_environment};
use s3csi_core::policy;
use s3csi_core::publish::{AuthenticationSource, Identity, Publish};
use s3csi_core::user_agent::user_agent;
use tokio::runtime::Handle;

use super::error::PublishError;
use crate::credentials::driver::DriverCredentials;
use crate::credentials::workload::WorkloadCredentials;
use crate::credentials::{self, EngineFiles};
use crate::host::FuseOptions;

/// The settings that all engines of this node share.
#[derive(Clone)]
pub struct EngineConfig {
    pub settings: DriverSettings,
    pub driver_credentials: Arc<DriverCredentials>,
    pub workload_credentials: Arc<WorkloadCredentials>,
    pub kubernetes_version: Option<String>,
    /// Certificates that engines trust in addition to the host's, where no mounter says so.
    pub ca_bundle: Option<PathBuf>,
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
    /// The keys of this volume as they are now, and its certificates: every publish writes them for the engine.
    pub fn keys(&self, publish: &Publish) -> Result<Keys, PublishError> {
        let own = publish.ca_certificates.as_ref();
        let driver = self.ca_bundle.as_deref().map(credentials::read_ca_bundle).transpose();
        let driver = driver.map_err(|cause| PublishError::CaBundle { bucket: publish.bucket.to_string(), cause })?;
        let all = driver.map(|it| it.and(own)).or_else(|| own.cloned());
        Ok(self.current_keys(publish)?.with_certificates(all))
    }

    fn current_keys(&self, publish: &Publish) -> Result<Keys, PublishError> {
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
        settings.proxy = settings.proxy.overridden_by(&publish.connection.proxy);
        let EngineFiles { config, credentials, ca_bundle } = credentials::paths(view);
        // The volume's Secret may bring certificates later. A volume with the driver's keys has none of its own.
        let may_have = self.ca_bundle.is_some() || publish.identity.source() != AuthenticationSource::Driver;
        let ca_bundle = Some(ca_bundle.as_str()).filter(|_| may_have);
        let profile = ProfilePaths { config: &config, credentials: &credentials, ca_bundle };
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
