//! Dynamic provisioning: a part of `s3csi controller`.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
use clap::Args;
use s3csi_core::environment::DriverSettings;
use s3csi_core::provision::is_signing_region;
use s3csi_core::publish::SingleNodeVolumes;

use super::credentials::CredentialArgs;
use super::proxy::ProxyArgs;
use crate::csi::provisioning::ProvisioningServer;
use crate::csi::server::Endpoint;
use crate::provision::failpoints::{Failpoint, Failpoints};
use crate::provision::{Provisioner, TrustedCertificates};

#[derive(Args, Debug)]
pub struct ProvisioningArgs {
    /// URL of the CSI socket for the external-provisioner, `unix:/path`; enables dynamic provisioning [default: not served]
    #[arg(long, env = "CSI_ENDPOINT", value_name = "URL")]
    csi_endpoint: Option<String>,

    /// S3 endpoint of provisioned volumes, unless their StorageClass sets another.
    #[arg(long, env = "AWS_ENDPOINT_URL", value_name = "URL")]
    s3_endpoint_url: Option<String>,

    /// Region for signing requests.
    #[arg(long, env = "AWS_REGION", value_name = "REGION")]
    s3_region: Option<String>,

    /// File with CA certificates (PEM) that provisioning trusts in addition to the system's.
    #[arg(long, env = "AWS_CA_BUNDLE", value_name = "FILE")]
    s3_ca_bundle: Option<PathBuf>,

    #[command(flatten)]
    proxy: ProxyArgs,

    #[command(flatten)]
    credentials: CredentialArgs,

    /// For tests of crashes: end right after the first change of this kind in the store.
    #[arg(long, hide = true, value_enum, value_name = "STEP")]
    stop_after_change: Option<Failpoint>,
}

impl ProvisioningArgs {
    pub fn is_asked_for(&self) -> bool {
        self.csi_endpoint.as_deref().is_some_and(|it| !it.is_empty())
    }

    /// None if provisioning is disabled.
    pub fn server(
        self,
        driver_name: &str,
        single_node: SingleNodeVolumes,
    ) -> anyhow::Result<Option<ProvisioningServer>> {
        let Self { csi_endpoint, s3_endpoint_url, s3_region, s3_ca_bundle, proxy, credentials, stop_after_change } =
            self;
        let Some(endpoint) = csi_endpoint.filter(|it| !it.is_empty()) else {
            return Ok(None);
        };
        let socket = endpoint.parse::<Endpoint>()?.into_path();
        let endpoint_url = s3_endpoint_url
            .filter(|it| !it.is_empty())
            .context("AWS_ENDPOINT_URL environment variable must be set (or --s3-endpoint-url), for example to http://s3.example.com:8000")?;
        let s3_region = s3_region.filter(|it| !it.is_empty());
        anyhow::ensure!(
            s3_region.as_deref().is_none_or(is_signing_region),
            "AWS_REGION {s3_region:?} is not the name of a region, such as us-east-1"
        );
        let settings = DriverSettings { endpoint_url: Some(endpoint_url), region: s3_region, proxy: proxy.settings()? };
        let certificates = match s3_ca_bundle.filter(|it| !it.as_os_str().is_empty()) {
            None => TrustedCertificates::default(),
            Some(path) => {
                let unusable = || format!("failed to use the CA bundle {}", path.display());
                TrustedCertificates::from_pem(&std::fs::read(&path).with_context(unusable)?).with_context(unusable)?
            }
        };
        let failpoints = Failpoints::stop_after(stop_after_change);
        let credentials = Arc::new(credentials.driver_credentials(&settings)?);
        let provisioner = Arc::new(Provisioner::new(settings, credentials, &certificates, failpoints)?);
        Ok(Some(ProvisioningServer { driver_name: driver_name.to_owned(), socket, provisioner, single_node }))
    }
}
