//! The flags for volumes with `authenticationSource: pod`.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;
use kube::Client;
use s3csi_core::environment::DriverSettings;
use s3csi_core::role::RoleArn;

use super::Switch;
use crate::api::ServiceAccounts;
use crate::credentials::issuer::SecurityTokenService;
use crate::credentials::workload::{AgentSettings, PodIdentitySettings};

#[expect(clippy::struct_field_names, reason = "the flags are named after the fields")]
#[derive(Args, Debug)]
pub struct PodIdentityArgs {
    /// Whether volumes with `authenticationSource: pod` are mounted: the token of the workload's service account is exchanged for
    /// temporary keys.
    #[arg(long, env = "POD_IDENTITY", value_enum, default_value = "off")]
    pod_identity: Switch,

    /// Pod identity: audience of the tokens that the security token service gets; `tokenRequests` of the `CSIDriver` object must list it.
    #[arg(long, env = "POD_IDENTITY_AUDIENCE", value_name = "AUDIENCE", default_value = "sts.amazonaws.com")]
    pod_identity_audience: String,

    /// Pod identity: URL of the security token service [default: AWS's in the region of requests]
    #[arg(long, env = "POD_IDENTITY_STS_ENDPOINT_URL", value_name = "URL")]
    pod_identity_sts_endpoint_url: Option<String>,

    /// Pod identity: whether the annotation `eks.amazonaws.com/role-arn` of the service account names the role. The API server is
    /// asked for it when keys are issued.
    #[arg(long, env = "POD_IDENTITY_SERVICE_ACCOUNT_ROLES", value_enum, default_value = "on")]
    pod_identity_service_account_roles: Switch,

    /// Pod identity: ARN of the role, if neither service account nor volume name one.
    #[arg(long, env = "POD_IDENTITY_ROLE_ARN", value_name = "ARN")]
    pod_identity_role_arn: Option<String>,

    /// Pod identity: URL of the agent for containers, which issues the keys if no role is named.
    #[arg(long, env = "POD_IDENTITY_AGENT_URL", value_name = "URL")]
    pod_identity_agent_url: Option<String>,

    /// Pod identity: audience of the tokens that the agent gets.
    #[arg(
        long,
        env = "POD_IDENTITY_AGENT_AUDIENCE",
        value_name = "AUDIENCE",
        default_value = "pods.eks.amazonaws.com"
    )]
    pod_identity_agent_audience: String,
}

impl PodIdentityArgs {
    /// Whether the API server is needed.
    pub fn reads_service_accounts(&self) -> bool {
        self.pod_identity == Switch::On && self.pod_identity_service_account_roles == Switch::On
    }

    /// `None` if it is off. `authorities` are trusted beside the system's.
    pub fn settings(
        self,
        driver: &DriverSettings,
        authorities: Option<PathBuf>,
        client: Option<&Client>,
    ) -> anyhow::Result<Option<PodIdentitySettings>> {
        let reads_service_accounts = self.reads_service_accounts();
        // No `..`: an unused flag does not compile.
        let Self {
            pod_identity,
            pod_identity_audience: audience,
            pod_identity_sts_endpoint_url,
            pod_identity_service_account_roles: _,
            pod_identity_role_arn,
            pod_identity_agent_url,
            pod_identity_agent_audience,
        } = self;
        if pod_identity == Switch::Off {
            return Ok(None);
        }
        let text = |it: Option<String>| it.filter(|it| !it.is_empty());
        let default_role: Option<RoleArn> = text(pod_identity_role_arn)
            .map(|it| it.parse())
            .transpose()
            .context("--pod-identity-role-arn is invalid")?;
        Ok(Some(PodIdentitySettings {
            sts: SecurityTokenService::new(text(pod_identity_sts_endpoint_url), driver, authorities),
            audience,
            default_role,
            agent: text(pod_identity_agent_url).map(|url| AgentSettings { url, audience: pod_identity_agent_audience }),
            service_accounts: client.filter(|_| reads_service_accounts).cloned().map(ServiceAccounts::new),
        }))
    }
}
