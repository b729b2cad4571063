//! The flags that say where the driver's own keys come from, for node plugin and controller alike.

use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use s3csi_core::credentials::Keys;
use s3csi_core::environment::DriverSettings;

use crate::credentials::driver::{CredentialSource, DriverCredentials};
use crate::credentials::issuer::{Issuer, SecurityTokenService};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum SourceKind {
    /// Static keys: the files of --credentials-directory, or `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY` of the environment.
    Secret,
    /// Static keys of a profile in AWS's shared files, `credentials` and `config` in --credentials-directory.
    Profile,
    /// Temporary keys of the EC2 instance's role (IMDS version 2).
    InstanceProfile,
    /// Temporary keys that STS issues for a role and a token file (`AssumeRoleWithWebIdentity`).
    WebIdentity,
    /// Temporary keys of an agent for containers, such as that of EKS Pod Identity.
    Container,
}

#[derive(Args, Debug)]
pub struct CredentialArgs {
    /// Where the driver's own keys come from.
    #[arg(long, env = "CREDENTIALS_SOURCE", value_enum, default_value = "secret")]
    credentials_source: SourceKind,

    /// Source secret: directory with the files `access_key_id`, `secret_access_key` and (optional) `session_token`. Source profile:
    /// directory with the files `credentials` and `config`. A mounted Secret; changes take effect without a restart.
    #[arg(long, env = "CREDENTIALS_DIRECTORY", value_name = "DIRECTORY")]
    credentials_directory: Option<PathBuf>,

    /// Source profile: name of the profile.
    #[arg(long, env = "AWS_PROFILE", value_name = "NAME", default_value = "default")]
    credentials_profile: String,

    /// Source instance-profile: URL of the instance metadata service.
    #[arg(
        long,
        env = "AWS_EC2_METADATA_SERVICE_ENDPOINT",
        value_name = "URL",
        default_value = "http://169.254.169.254"
    )]
    instance_metadata_url: String,

    /// Source web-identity: ARN of the role.
    #[arg(long, env = "AWS_ROLE_ARN", value_name = "ARN")]
    role_arn: Option<String>,

    /// Source web-identity: file with the token, which is read for every request.
    #[arg(long, env = "AWS_WEB_IDENTITY_TOKEN_FILE", value_name = "FILE")]
    web_identity_token_file: Option<PathBuf>,

    /// Source web-identity: URL of the security token service [default: AWS's in the region of requests]
    #[arg(long, env = "AWS_ENDPOINT_URL_STS", value_name = "URL")]
    sts_endpoint_url: Option<String>,

    /// Source web-identity, and pod identity: file with CA certificates (PEM) that are trusted in addition to the system's.
    #[arg(long, env = "STS_CA_BUNDLE", value_name = "FILE")]
    sts_ca_bundle: Option<PathBuf>,

    /// Source container: URL of the agent.
    #[arg(long, env = "AWS_CONTAINER_CREDENTIALS_FULL_URI", value_name = "URL")]
    container_credentials_url: Option<String>,

    /// Source container: file with the token for the agent.
    #[arg(long, env = "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", value_name = "FILE")]
    container_token_file: Option<PathBuf>,
}

impl CredentialArgs {
    /// The certificate authorities of security token services.
    pub fn sts_ca_bundle(&self) -> Option<PathBuf> {
        self.sts_ca_bundle.clone().filter(|it| !it.as_os_str().is_empty())
    }

    /// The region of the settings chooses AWS's security token service.
    pub fn driver_credentials(self, settings: &DriverSettings) -> anyhow::Result<DriverCredentials> {
        // No `..`: an unused flag does not compile.
        let Self {
            credentials_source,
            credentials_directory,
            credentials_profile,
            instance_metadata_url,
            role_arn,
            web_identity_token_file,
            sts_endpoint_url,
            sts_ca_bundle,
            container_credentials_url,
            container_token_file,
        } = self;
        let path = |it: Option<PathBuf>| it.filter(|it| !it.as_os_str().is_empty());
        let text = |it: Option<String>| it.filter(|it| !it.is_empty());
        let directory = path(credentials_directory);
        let source = match credentials_source {
            SourceKind::Secret => CredentialSource::Secret { directory, environment: environment_keys()? },
            SourceKind::Profile => CredentialSource::Profile {
                directory: directory.context("--credentials-source profile needs --credentials-directory")?,
                profile: credentials_profile,
            },
            SourceKind::InstanceProfile => {
                CredentialSource::Issuer(Issuer::InstanceProfile { endpoint: instance_metadata_url })
            }
            SourceKind::WebIdentity => CredentialSource::Issuer(Issuer::WebIdentity {
                sts: SecurityTokenService::new(text(sts_endpoint_url), settings, path(sts_ca_bundle)),
                role: text(role_arn).context("--credentials-source web-identity needs --role-arn")?,
                token_file: path(web_identity_token_file)
                    .context("--credentials-source web-identity needs --web-identity-token-file")?,
            }),
            SourceKind::Container => CredentialSource::Issuer(Issuer::Container {
                url: text(container_credentials_url)
                    .context("--credentials-source container needs --container-credentials-url")?,
                token_file: path(container_token_file),
            }),
        };
        Ok(DriverCredentials::new(source))
    }
}

/// The keys of the environment; absent when neither variable is set, an error when only one is.
fn environment_keys() -> anyhow::Result<Option<Keys>> {
    let read = |name: &str| match std::env::var_os(name).filter(|it| !it.is_empty()).map(OsString::into_string) {
        None => Ok(None),
        Some(Ok(value)) => Ok(Some(value)),
        Some(Err(_)) => Err(anyhow::anyhow!("environment variable {name} is not valid text")),
    };
    let (id, secret, token) = (read("AWS_ACCESS_KEY_ID")?, read("AWS_SECRET_ACCESS_KEY")?, read("AWS_SESSION_TOKEN")?);
    match (id, secret) {
        (None, None) => Ok(None),
        (Some(id), Some(secret)) => {
            let keys = Keys::driver(&id, &secret, token.as_deref());
            keys.map(Some).context("the driver's credentials in the environment are invalid")
        }
        (Some(_), None) => anyhow::bail!("AWS_ACCESS_KEY_ID is set but AWS_SECRET_ACCESS_KEY is not"),
        (None, Some(_)) => anyhow::bail!("AWS_SECRET_ACCESS_KEY is set but AWS_ACCESS_KEY_ID is not"),
    }
}
