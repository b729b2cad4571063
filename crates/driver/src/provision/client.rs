//! Connections to stores: who is trusted, how long anything may take, and with whose keys.

use std::time::Duration;

use aws_sdk_s3::Client;
use aws_sdk_s3::config::retry::RetryConfig;
use aws_sdk_s3::config::timeout::TimeoutConfig;
use aws_sdk_s3::config::{
    AppName, BehaviorVersion, Config, Credentials, Region, RequestChecksumCalculation, ResponseChecksumValidation,
    SharedHttpClient, StalledStreamProtectionConfig,
};
use aws_smithy_http_client::tls::rustls_provider::CryptoMode;
use aws_smithy_http_client::tls::{Provider, TlsContext, TrustStore};
use s3csi_core::credentials::Keys;
use tokio_rustls::rustls::RootCertStore;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;

use super::store::Store;

/// The provisioner's own patience is a minute or two; a store that does not answer is said to be so long before.
const CONNECT: Duration = Duration::from_secs(5);
const ATTEMPT: Duration = Duration::from_secs(15);
const OPERATION: Duration = Duration::from_secs(30);
const ATTEMPTS: u32 = 3;

/// What signatures are made for where nobody names a region; the engine has the same.
const DEFAULT_REGION: &str = "us-east-1";

/// Whom to trust: the system's authorities, or those of a bundle instead.
#[derive(Clone, Debug, Default)]
pub struct Certificates(Option<Vec<u8>>);

#[derive(Debug, thiserror::Error)]
#[error("the CA bundle is not usable: {problem}")]
pub struct InvalidBundle {
    problem: String,
}

impl Certificates {
    /// The content of a bundle, checked: the client library would panic about a bad one at the first connection.
    pub fn from_pem(pem: &[u8]) -> Result<Self, InvalidBundle> {
        let invalid = |problem: String| InvalidBundle { problem };
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(pem) {
            let certificate = certificate.map_err(|error| invalid(format!("it is not PEM: {error}")))?;
            roots.add(certificate).map_err(|error| invalid(format!("one certificate is not understood: {error}")))?;
        }
        if roots.is_empty() {
            return Err(invalid("it holds no certificate".to_owned()));
        }
        Ok(Self(Some(pem.to_vec())))
    }
}

/// Connections that are shared by all calls, whoever's keys they bring.
pub struct Connections {
    http: SharedHttpClient,
}

impl Connections {
    pub fn new(Certificates(bundle): &Certificates) -> Result<Self, InvalidBundle> {
        let trusted = match bundle {
            None => TrustStore::default(),
            Some(pem) => TrustStore::empty().with_pem_certificate(pem.clone()),
        };
        let context = TlsContext::builder().with_trust_store(trusted).build();
        let context = context.map_err(|error| InvalidBundle { problem: error.to_string() })?;
        let builder = aws_smithy_http_client::Builder::new().tls_provider(Provider::Rustls(CryptoMode::Ring));
        Ok(Self { http: builder.tls_context(context).build_https() })
    }

    pub fn store(&self, keys: &Keys, endpoint: Option<&str>, region: Option<&str>) -> Store {
        let token = keys.session_token().map(|it| it.expose().clone());
        let credentials =
            Credentials::new(keys.access_key_id().expose(), keys.secret_access_key().expose(), token, None, "s3csi");
        let region = region.unwrap_or(DEFAULT_REGION);
        let timeouts = TimeoutConfig::builder()
            .connect_timeout(CONNECT)
            .operation_attempt_timeout(ATTEMPT)
            .operation_timeout(OPERATION)
            .build();
        let mut config = Config::builder()
            .behavior_version(BehaviorVersion::latest())
            .http_client(self.http.clone())
            .credentials_provider(credentials)
            .region(Region::new(region.to_owned()))
            .force_path_style(true)
            .timeout_config(timeouts)
            .retry_config(RetryConfig::standard().with_max_attempts(ATTEMPTS))
            // Other stores than AWS's need not know the newest checksums.
            .request_checksum_calculation(RequestChecksumCalculation::WhenRequired)
            .response_checksum_validation(ResponseChecksumValidation::WhenRequired)
            .stalled_stream_protection(StalledStreamProtectionConfig::disabled());
        config.set_endpoint_url(endpoint.map(str::to_owned));
        config.set_app_name(AppName::new(concat!("s3csi-", env!("CARGO_PKG_VERSION"))).ok());
        Store::new(Client::from_conf(config.build()), region.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(pem: &str, expected: &str) {
        assert_eq!(Certificates::from_pem(pem.as_bytes()).unwrap_err().to_string(), expected);
    }

    #[test]
    fn bundles_are_checked_before_they_are_used() {
        check("", "the CA bundle is not usable: it holds no certificate");
        check(
            "-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n",
            "the CA bundle is not usable: one certificate is not understood: invalid peer certificate: BadEncoding",
        );
    }
}
