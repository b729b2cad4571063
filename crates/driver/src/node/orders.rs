//! What an engine is told, whoever runs it: whose keys it has, which options are passed on, its whole environment.

use std::path::Path;

use s3csi_core::credentials::Keys;
use s3csi_core::environment::{DriverSettings, ProfilePaths, engine_environment};
use s3csi_core::policy;
use s3csi_core::publish::{Identity, Publish};
use s3csi_core::user_agent::user_agent;

use super::error::PublishError;
use crate::credentials;
use crate::host::FuseOptions;

/// What holds for all engines of this node.
#[derive(Debug)]
pub struct Orders {
    pub settings: DriverSettings,
    pub driver_keys: Option<Keys>,
    pub kubernetes_version: Option<String>,
}

/// What one engine is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// Rendered and sorted, without bucket and mount point.
    pub arguments: Vec<String>,
    /// `KEY=VALUE` each; nothing else is inherited.
    pub environment: Vec<String>,
}

impl Orders {
    pub fn keys<'a>(&'a self, publish: &'a Publish) -> Result<&'a Keys, PublishError> {
        match &publish.identity {
            Identity::Secret(keys) => Ok(keys),
            Identity::Driver => {
                let missing = || PublishError::NoDriverKeys { bucket: publish.bucket.to_string() };
                self.driver_keys.as_ref().ok_or_else(missing)
            }
        }
    }

    /// `view` is the directory above the credentials, as the engine sees it. Wrong options are an error, and forbidden
    /// ones are left out with a line in the log.
    pub fn order(&self, publish: &Publish, view: &Path) -> Result<Order, PublishError> {
        let agent = user_agent(
            env!("CARGO_PKG_VERSION"),
            publish.identity.source().as_str(),
            self.kubernetes_version.as_deref(),
        );
        let applied = policy::apply(publish.arguments.clone(), &agent)
            .map_err(|cause| PublishError::Options { bucket: publish.bucket.to_string(), cause })?;
        for removed in &applied.removed {
            let (option, reason) = (&removed.option, removed.reason);
            tracing::warn!(volume = %publish.volume_id, option, reason, "mount option not passed on");
        }
        let mut settings = self.settings.clone();
        if let Some(endpoint) = &publish.endpoint {
            settings.endpoint_url = Some(endpoint.to_string());
        }
        let (config, credentials) = credentials::paths(view);
        let profile = ProfilePaths { config: &config, credentials: &credentials };
        Ok(Order {
            arguments: applied.arguments.render(),
            environment: engine_environment(&settings, profile, &applied.environment),
        })
    }
}

/// How the FUSE connection of a volume is mounted.
pub fn fuse_options(publish: &Publish) -> FuseOptions {
    let allow_other = publish.arguments.has("--allow-other") || publish.arguments.has("--allow-root");
    FuseOptions { access: publish.volume_access, allow_other }
}
