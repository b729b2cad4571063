//! S3 clients: trusted certificates, timeouts, credentials.

use std::time::Duration;

use aws_sdk_s3::Client;
use aws_sdk_s3::config::interceptors::BeforeDeserializationInterceptorContextMut;
use aws_sdk_s3::config::retry::RetryConfig;
use aws_sdk_s3::config::timeout::TimeoutConfig;
use aws_sdk_s3::config::{
    AppName, BehaviorVersion, Config, ConfigBag, Credentials, Intercept, Region, RequestChecksumCalculation,
    ResponseChecksumValidation, RuntimeComponents, SharedHttpClient, StalledStreamProtectionConfig,
};
use aws_sdk_s3::error::BoxError;
use aws_sdk_s3::primitives::SdkBody;
use aws_smithy_http_client::proxy::ProxyConfig;
use aws_smithy_http_client::tls::rustls_provider::CryptoMode;
use aws_smithy_http_client::tls::{Provider, TlsContext, TrustStore};
use aws_smithy_http_client::{Builder, Connector};
use http_body_util::Limited;
use s3csi_core::credentials::Keys;
use s3csi_core::proxy::{ProxySettings, ProxyUrl, Scheme};
use s3csi_core::publish::AuthenticationSource;
use tokio_rustls::rustls::RootCertStore;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;

use super::store::S3Store;

/// The external-provisioner's deadline is a minute or two; a store that does not answer is reported well before.
const CONNECT: Duration = Duration::from_secs(5);
const ATTEMPT: Duration = Duration::from_secs(15);
const OPERATION: Duration = Duration::from_secs(30);
const ATTEMPTS: u32 = 3;

/// The longest answer is a page of 1000 keys of 1024 bytes each, URL-encoded, with versions and owners.
const MAX_BODY_BYTES: usize = 8 << 20;

/// The region of signatures if none is set; the engine's default is the same.
const DEFAULT_REGION: &str = "us-east-1";

/// The system's certificate authorities, and those of a bundle.
#[derive(Clone, Debug, Default)]
pub struct TrustedCertificates(Option<Vec<u8>>);

#[derive(Debug, thiserror::Error)]
#[error("the CA bundle is not usable: {problem}")]
pub struct InvalidCaBundle {
    problem: String,
}

impl TrustedCertificates {
    /// Parses the content of a bundle: the client library would panic on a bad one at the first connection.
    pub fn from_pem(pem: &[u8]) -> Result<Self, InvalidCaBundle> {
        let invalid = |problem: String| InvalidCaBundle { problem };
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(pem) {
            let certificate = certificate.map_err(|error| invalid(format!("it is not PEM: {error}")))?;
            roots.add(certificate).map_err(|error| invalid(format!("a certificate is invalid: {error}")))?;
        }
        if roots.is_empty() {
            return Err(invalid("it contains no certificate".to_owned()));
        }
        Ok(Self(Some(pem.to_vec())))
    }
}

/// Connections that all calls share, with different keys.
pub struct S3Clients {
    direct: SharedHttpClient,
    https_proxy: Option<SharedHttpClient>,
    http_proxy: Option<SharedHttpClient>,
    proxies: ProxySettings,
}

impl S3Clients {
    pub fn new(
        TrustedCertificates(bundle): &TrustedCertificates,
        proxies: &ProxySettings,
    ) -> Result<Self, InvalidCaBundle> {
        // The default are the system's.
        let trusted = match bundle {
            None => TrustStore::default(),
            Some(pem) => TrustStore::default().with_pem_certificate(pem.clone()),
        };
        let context = TlsContext::builder().with_trust_store(trusted).build();
        let context = context.map_err(|error| InvalidCaBundle { problem: error.to_string() })?;
        let through = |proxy: Option<&ProxyUrl>| proxy.map(|it| proxied_client(&context, it)).transpose();
        let builder = Builder::new().tls_provider(Provider::Rustls(CryptoMode::Ring));
        Ok(Self {
            https_proxy: through(proxies.https.as_ref())?,
            http_proxy: through(proxies.http.as_ref())?,
            direct: builder.tls_context(context).build_https(),
            proxies: proxies.clone(),
        })
    }

    fn client_for(&self, endpoint: Option<&str>) -> SharedHttpClient {
        // AWS's own endpoints are known to the SDK alone, and speak TLS.
        let endpoint = endpoint.unwrap_or("https://amazonaws.com");
        let uri: Option<hyper::Uri> = endpoint.parse().ok();
        let host = uri.as_ref().and_then(hyper::Uri::host).unwrap_or_default();
        let (scheme, client) = match uri.as_ref().and_then(hyper::Uri::scheme_str) {
            Some("http") => (Scheme::Http, &self.http_proxy),
            Some(_) | None => (Scheme::Https, &self.https_proxy),
        };
        let client = client.as_ref().filter(|_| self.proxies.proxy_for(scheme, host).is_some());
        client.unwrap_or(&self.direct).clone()
    }

    pub fn store(
        &self,
        keys: &Keys,
        source: AuthenticationSource,
        endpoint: Option<&str>,
        region: Option<&str>,
    ) -> S3Store {
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
            .http_client(self.client_for(endpoint))
            .credentials_provider(credentials)
            .region(Region::new(region.to_owned()))
            .force_path_style(true)
            .timeout_config(timeouts)
            .retry_config(RetryConfig::standard().with_max_attempts(ATTEMPTS))
            // Stores other than AWS need not support the newest checksums.
            .request_checksum_calculation(RequestChecksumCalculation::WhenRequired)
            .response_checksum_validation(ResponseChecksumValidation::WhenRequired)
            .stalled_stream_protection(StalledStreamProtectionConfig::disabled())
            .interceptor(BoundedBodies);
        config.set_endpoint_url(endpoint.map(str::to_owned));
        config.set_app_name(AppName::new(concat!("s3csi-", env!("CARGO_PKG_VERSION"))).ok());
        S3Store::new(Client::from_conf(config.build()), source, region.to_owned())
    }
}

/// Sends everything through the proxy: which hosts are reached directly is decided before.
fn proxied_client(context: &TlsContext, proxy: &ProxyUrl) -> Result<SharedHttpClient, InvalidCaBundle> {
    let proxy = ProxyConfig::all(proxy.as_str()).map_err(|error| InvalidCaBundle { problem: error.to_string() })?;
    let context = context.clone();
    Ok(Builder::new().build_with_connector_fn(move |settings, components| {
        let mut builder = Connector::builder();
        builder.set_connector_settings(settings.cloned());
        builder.set_sleep_impl(components.and_then(RuntimeComponents::sleep_impl));
        builder.set_proxy_config(Some(proxy.clone()));
        builder.tls_provider(Provider::Rustls(CryptoMode::Ring)).tls_context(context.clone()).build()
    }))
}

/// Ends answers that are longer than any we ask for: a hostile store could send an endless one.
#[derive(Debug)]
struct BoundedBodies;

impl Intercept for BoundedBodies {
    fn name(&self) -> &'static str {
        "BoundedBodies"
    }

    fn modify_before_deserialization(
        &self,
        context: &mut BeforeDeserializationInterceptorContextMut<'_>,
        _: &RuntimeComponents,
        _: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        let body = context.response_mut().take_body();
        *context.response_mut().body_mut() = SdkBody::from_body_1_x(Limited::new(body, MAX_BODY_BYTES));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(pem: &str, expected: &str) {
        assert_eq!(TrustedCertificates::from_pem(pem.as_bytes()).unwrap_err().to_string(), expected);
    }

    #[test]
    fn bundles_are_checked_before_they_are_used() {
        check("", "the CA bundle is not usable: it contains no certificate");
        check(
            "-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n",
            "the CA bundle is not usable: a certificate is invalid: invalid peer certificate: BadEncoding",
        );
    }
}
