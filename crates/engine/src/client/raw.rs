//! Requests that the client library has no method for, or a slow one, sent by the same runtime: multipart uploads of which parts
//! are copied on the server, and listings.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use futures::channel::oneshot;
use mountpoint_s3_client::config::{Allocator, EndpointConfig};
use mountpoint_s3_crt::auth::credentials::{
    CredentialsProvider, CredentialsProviderChainDefaultOptions, CredentialsProviderProfileOptions,
};
use mountpoint_s3_crt::common::error::Error as CrtError;
use mountpoint_s3_crt::http::request_response::{Header, Message};
use mountpoint_s3_crt::io::channel_bootstrap::{ClientBootstrap, ClientBootstrapOptions};
use mountpoint_s3_crt::io::event_loop::EventLoopGroup;
use mountpoint_s3_crt::io::host_resolver::{HostResolver, HostResolverDefaultOptions};
use mountpoint_s3_crt::io::retry_strategy::{RetryStrategy, StandardRetryOptions};
use mountpoint_s3_crt::io::tls::{TlsConnectionOptions, TlsContext, TlsContextOptions};
use mountpoint_s3_crt::s3::client::{
    Client, ClientConfig, MetaRequest, MetaRequestOptions, MetaRequestResult, MetaRequestType, init_signing_config,
};
use parking_lot::Mutex;

use super::encoded;

/// A part of an upload may take long; one that takes longer is hopeless.
const LONGEST: Duration = Duration::from_mins(10);

#[derive(Debug, thiserror::Error)]
pub enum RawError {
    #[error("cannot prepare {operation}: {reason}")]
    Prepare { operation: &'static str, reason: String },

    #[error("{operation} failed with HTTP status {status}: {message}")]
    Refused { operation: &'static str, status: i32, message: String },

    #[error("{operation} got no response")]
    Unanswered {
        operation: &'static str,
        #[source]
        cause: CrtError,
    },
}

/// Whose keys sign the requests.
#[derive(Clone, Debug)]
pub enum Signing {
    None,
    Default,
    Profile(String),
}

/// What a raw client is made of.
#[derive(Clone)]
pub struct RawConfig {
    pub events: EventLoopGroup,
    pub endpoints: EndpointConfig,
    pub bucket: String,
    pub signing: Signing,
    pub ca_bundle: Option<PathBuf>,
    /// The network interfaces to use, if not all.
    pub interfaces: Option<Vec<String>>,
    /// Sent with every request.
    pub headers: Vec<(String, String)>,
}

pub struct RawClient {
    client: Client,
    provider: CredentialsProvider,
    config: RawConfig,
}

pub struct RawRequest<'a> {
    pub operation: &'static str,
    pub method: &'a str,
    pub key: &'a str,
    /// Without the question mark.
    pub query: String,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

#[derive(Clone, Debug, Default)]
pub struct RawResponse {
    pub headers: Vec<(String, String)>,
    pub body: String,
}

impl RawResponse {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(it, _)| it.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }

    /// The text of the first XML element with that name.
    pub fn element(&self, name: &str) -> Option<String> {
        let (_, rest) = self.body.split_once(&format!("<{name}>"))?;
        let (text, _) = rest.split_once(&format!("</{name}>"))?;
        Some(text.replace("&quot;", "\"").replace("&#34;", "\"").replace("&lt;", "<").replace("&amp;", "&"))
    }
}

impl RawClient {
    pub fn new(config: RawConfig) -> Result<Self, RawError> {
        let failed =
            |error: &dyn std::fmt::Display| RawError::Prepare { operation: "the client", reason: error.to_string() };
        let allocator = Allocator::default();
        let mut events = config.events.clone();
        let mut resolver = HostResolver::new_default(
            &allocator,
            &HostResolverDefaultOptions { max_entries: 8, event_loop_group: &mut events },
        )
        .map_err(|error| failed(&error))?;
        let options = ClientBootstrapOptions { event_loop_group: &mut events, host_resolver: &mut resolver };
        let mut bootstrap = ClientBootstrap::new(&allocator, &options).map_err(|error| failed(&error))?;
        let tls = config.ca_bundle.as_ref().map(|path| tls_context(path)).transpose()?;
        let provider = match &config.signing {
            Signing::None => CredentialsProvider::new_anonymous(&allocator),
            Signing::Default => CredentialsProvider::new_chain_default(
                &allocator,
                CredentialsProviderChainDefaultOptions { bootstrap: &mut bootstrap, tls_ctx: tls.as_ref() },
            ),
            Signing::Profile(profile) => CredentialsProvider::new_profile(
                &allocator,
                CredentialsProviderProfileOptions {
                    bootstrap: &mut bootstrap,
                    profile_name_override: profile,
                    tls_ctx: tls.as_ref(),
                },
            ),
        }
        .map_err(|error| failed(&error))?;
        let retry = RetryStrategy::standard(&allocator, &StandardRetryOptions::default(&mut events))
            .map_err(|error| failed(&error))?;
        let mut settings = ClientConfig::new();
        settings.region(config.endpoints.get_region());
        settings.signing_config(init_signing_config(config.endpoints.get_region(), provider.clone(), None, None, None));
        settings.client_bootstrap(bootstrap).retry_strategy(retry);
        settings.express_support(true);
        if let Some(interfaces) = &config.interfaces {
            settings.network_interface_names(interfaces.clone());
        }
        if let Some(context) = &tls {
            settings.tls_connection_options(TlsConnectionOptions::new(context));
        }
        let client = Client::new(&allocator, settings).map_err(|error| failed(&error))?;
        Ok(Self { client, provider, config })
    }

    /// Sends a request and waits for the whole response. A status other than 2xx is an error.
    pub fn send(&self, request: RawRequest<'_>) -> Result<RawResponse, RawError> {
        let operation = request.operation;
        let prepare = |reason: String| RawError::Prepare { operation, reason };
        let (done, finished) = channel();
        // The receiver waits for exactly this.
        let sent = self.begin(request, move |result| drop(done.send(result))).map_err(prepare)?;
        let result = finished.recv_timeout(LONGEST).map_err(|it| prepare(it.to_string()))?;
        sent.response(&result)
    }

    /// The same without blocking, for as long as the caller waits.
    pub async fn request(&self, request: RawRequest<'_>) -> Result<RawResponse, RawError> {
        let operation = request.operation;
        let prepare = |reason: String| RawError::Prepare { operation, reason };
        let (done, finished) = oneshot::channel();
        let sent = self.begin(request, move |result| drop(done.send(result))).map_err(prepare)?;
        let result = finished.await.map_err(|it| prepare(it.to_string()))?;
        sent.response(&result)
    }

    fn begin(
        &self,
        request: RawRequest<'_>,
        on_finish: impl FnOnce(MetaRequestResult) + Send + 'static,
    ) -> Result<SentRequest, String> {
        let text = |error: &dyn std::fmt::Display| error.to_string();
        let endpoint = self.config.endpoints.resolve_for_bucket(&self.config.bucket).map_err(|it| text(&it))?;
        let uri = endpoint.uri().map_err(|it| text(&it))?;
        let scheme = endpoint.auth_scheme().map_err(|it| text(&it))?;
        let host = uri.host_name().to_string_lossy().into_owned();
        let host = if uri.host_port() > 0 { format!("{host}:{}", uri.host_port()) } else { host };
        let path = format!(
            "{}/{}?{}",
            uri.path().to_string_lossy().trim_end_matches('/'),
            encoded(request.key),
            request.query
        );
        let mut message = Message::new_request(&Allocator::default()).map_err(|it| text(&it))?;
        message.set_request_method(request.method).map_err(|it| text(&it))?;
        message.set_request_path(path).map_err(|it| text(&it))?;
        let host = ("Host".to_owned(), host);
        // Proxies may remove this header from requests that have no body, and it is signed.
        let length = (request.method != "GET").then(|| ("Content-Length".to_owned(), request.body.len().to_string()));
        let headers = std::iter::once(&host).chain(&length).chain(&self.config.headers).chain(&request.headers);
        for (name, value) in headers {
            message.add_header(&Header::new(name, value)).map_err(|it| text(&it))?;
        }
        let mut options = MetaRequestOptions::new();
        options.signing_config(init_signing_config(
            scheme.signing_region(),
            self.provider.clone(),
            Some(scheme.scheme_name()),
            Some(scheme.signing_name()),
            Some(!scheme.disable_double_encoding()),
        ));
        options.message(message).endpoint(uri).request_type(MetaRequestType::Default).operation_name(request.operation);
        if !request.body.is_empty() {
            options.request_body(request.body);
        }
        let received = Arc::new(Mutex::new(Received::default()));
        let (headers, body) = (Arc::clone(&received), Arc::clone(&received));
        options.on_headers(move |found, _| {
            headers.lock().headers = found
                .iter()
                .map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()))
                .collect();
        });
        options.on_body(move |_, data| body.lock().body.extend_from_slice(&data[..]));
        options.on_finish(on_finish);
        let operation = request.operation;
        let request = self.client.make_meta_request(options).map_err(|it| text(&it))?;
        Ok(SentRequest { request, operation, received })
    }
}

/// A request that was sent. Dropped before its end, it is cancelled.
struct SentRequest {
    request: MetaRequest,
    operation: &'static str,
    received: Arc<Mutex<Received>>,
}

#[derive(Default)]
struct Received {
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

impl SentRequest {
    /// What was received when the request has ended.
    fn response(&self, result: &MetaRequestResult) -> Result<RawResponse, RawError> {
        let (operation, status) = (self.operation, result.response_status);
        if status == 0 {
            return Err(RawError::Unanswered { operation, cause: result.crt_error });
        }
        let Received { headers, body } = std::mem::take(&mut *self.received.lock());
        let body = match &result.error_response_body {
            Some(error) => error.to_string_lossy().into_owned(),
            None => String::from_utf8(body).unwrap_or_else(|it| String::from_utf8_lossy(it.as_bytes()).into_owned()),
        };
        let response = RawResponse { headers, body };
        // Some stores answer 200 and describe the error in the body.
        if !(200..300).contains(&status) || response.body.contains("<Error>") {
            let message = response.element("Message").or_else(|| response.element("Code")).unwrap_or_default();
            return Err(RawError::Refused { operation, status, message });
        }
        if result.crt_error.is_err() {
            // The rest of the response is missing.
            return Err(RawError::Unanswered { operation, cause: result.crt_error });
        }
        Ok(response)
    }
}

impl Drop for SentRequest {
    fn drop(&mut self) {
        self.request.cancel();
    }
}

fn tls_context(path: &std::path::Path) -> Result<TlsContext, RawError> {
    let failed = |reason: String| RawError::Prepare { operation: "TLS", reason };
    let allocator = Allocator::default();
    let mut options = TlsContextOptions::new_default_client(&allocator);
    options.override_default_trust_store_from_path(None, Some(path)).map_err(|error| failed(format!("{error:?}")))?;
    TlsContext::new(&allocator, &options).map_err(|error| failed(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_and_headers_are_found() {
        let response = RawResponse {
            headers: vec![("ETag".into(), "\"1\"".into())],
            body: "<A><UploadId>x&amp;y</UploadId><ETag>&quot;2&quot;</ETag></A>".into(),
        };
        assert_eq!(response.header("etag"), Some("\"1\""));
        assert_eq!(response.element("UploadId").as_deref(), Some("x&y"));
        assert_eq!(response.element("ETag").as_deref(), Some("\"2\""));
        assert_eq!(response.element("Missing"), None);
    }
}
