//! One HTTP request to an issuer of credentials: bounded in time and size, never redirected, through a proxy if there is one.

use std::error::Error;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::header::HOST;
use hyper::{Request, Uri};
use hyper_util::rt::TokioIo;
use s3csi_core::proxy::{ProxySettings, ProxyUrl, Scheme};
use s3csi_core::secret::Secret;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

/// A publish waits for the answer, and kubelet gives it two minutes.
const DEADLINE: Duration = Duration::from_secs(10);

/// Answers have a few kilobytes.
const LONGEST_ANSWER_BYTES: usize = 64 << 10;

/// A proxy's answer to CONNECT has a few headers.
const LONGEST_PROXY_ANSWER_BYTES: usize = 8 << 10;

/// What is sent. Headers and body may be secret.
pub struct IssuerRequest<'a> {
    pub method: &'static str,
    pub url: &'a str,
    pub headers: &'a [(&'static str, &'a str)],
    pub body: String,
}

pub struct IssuerResponse {
    pub status: u16,
    pub body: Secret<String>,
}

/// Names the host, never what was sent.
#[derive(Debug, thiserror::Error)]
pub enum IssuerHttpError {
    #[error("{url:?} is not a URL like https://sts.example.com")]
    Url { url: String },

    #[error("failed to connect to {host}")]
    Connect {
        host: String,
        #[source]
        cause: io::Error,
    },

    #[error("proxy {proxy} does not connect to {host}: {problem}")]
    Proxy { proxy: String, host: String, problem: String },

    #[error("the CA certificates for {host} cannot be used: {problem}")]
    Certificates { host: String, problem: String },

    #[error("{host} did not answer as an HTTP server does")]
    Exchange {
        host: String,
        #[source]
        cause: Box<dyn Error + Send + Sync>,
    },

    #[error("{host} did not answer within {} s", DEADLINE.as_secs())]
    Timeout { host: String },
}

/// Sends a request without a proxy: to services of the machine itself.
pub async fn send(request: IssuerRequest<'_>, authorities: Option<&Path>) -> Result<IssuerResponse, IssuerHttpError> {
    send_through(&ProxySettings::default(), request, authorities).await
}

/// Sends a request and reads the whole answer. `authorities` are certificates in PEM that are trusted beside the system's.
pub async fn send_through(
    proxies: &ProxySettings,
    request: IssuerRequest<'_>,
    authorities: Option<&Path>,
) -> Result<IssuerResponse, IssuerHttpError> {
    let invalid = || IssuerHttpError::Url { url: request.url.to_owned() };
    let uri: Uri = request.url.parse().map_err(|_| invalid())?;
    let host = uri.host().filter(|it| !it.is_empty()).ok_or_else(invalid)?.to_owned();
    let is_tls = match uri.scheme_str() {
        Some("https") => true,
        Some("http") => false,
        _ => return Err(invalid()),
    };
    let address = host.trim_matches(['[', ']']).to_owned();
    let port = uri.port_u16().unwrap_or(if is_tls { 443 } else { 80 });
    let proxy = proxies.proxy_for(if is_tls { Scheme::Https } else { Scheme::Http }, &host);
    let work = async {
        let connected = match proxy {
            Some(proxy) => TcpStream::connect(proxy.authority()).await,
            None => TcpStream::connect((address.as_str(), port)).await,
        };
        let reached = proxy.map_or_else(|| host.clone(), |it| format!("proxy {it}"));
        let mut stream = connected.map_err(|cause| IssuerHttpError::Connect { host: reached, cause })?;
        if !is_tls {
            // A proxy gets the whole URL.
            let path = uri.path_and_query().map_or("/", |it| it.as_str());
            let target = if proxy.is_some() { request.url } else { path };
            return exchange(stream, target, &uri, &host, &request).await;
        }
        if let Some(proxy) = proxy {
            open_tunnel(&mut stream, proxy, &host, port).await?;
        }
        let unusable = |problem: String| IssuerHttpError::Certificates { host: host.clone(), problem };
        let name = ServerName::try_from(address.clone()).map_err(|error| unusable(error.to_string()))?;
        let connector = TlsConnector::from(Arc::new(tls_config(authorities).map_err(unusable)?));
        let connected = connector.connect(name, stream).await;
        let stream = connected.map_err(|cause| IssuerHttpError::Connect { host: host.clone(), cause })?;
        let path = uri.path_and_query().map_or("/", |it| it.as_str());
        exchange(stream, path, &uri, &host, &request).await
    };
    let late = |_| IssuerHttpError::Timeout { host: host.clone() };
    tokio::time::timeout(DEADLINE, work).await.map_err(late)?
}

async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    target: &str,
    uri: &Uri,
    host: &str,
    request: &IssuerRequest<'_>,
) -> Result<IssuerResponse, IssuerHttpError> {
    let failed = |cause: Box<dyn Error + Send + Sync>| IssuerHttpError::Exchange { host: host.to_owned(), cause };
    let authority = uri.authority().map_or(host, |it| it.as_str());
    let mut builder = Request::builder().method(request.method).uri(target).header(HOST, authority);
    for (name, value) in request.headers {
        builder = builder.header(*name, *value);
    }
    let body = Full::new(Bytes::from(request.body.clone()));
    let message = builder.body(body).map_err(|cause| failed(Box::new(cause)))?;
    let handshake = http1::handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = handshake.map_err(|cause| failed(Box::new(cause)))?;
    // It ends with its sender; an error shows in the answer.
    tokio::spawn(async { drop(connection.await) });
    let response = sender.send_request(message).await.map_err(|cause| failed(Box::new(cause)))?;
    let status = response.status().as_u16();
    let body = Limited::new(response.into_body(), LONGEST_ANSWER_BYTES).collect().await.map_err(failed)?;
    let body = Secret::new(String::from_utf8_lossy(&body.to_bytes()).into_owned());
    Ok(IssuerResponse { status, body })
}

/// Asks a proxy for a connection to the host, over which TLS is spoken then.
async fn open_tunnel(stream: &mut TcpStream, proxy: &ProxyUrl, host: &str, port: u16) -> Result<(), IssuerHttpError> {
    let refused = |problem: String| IssuerHttpError::Proxy { proxy: proxy.to_string(), host: host.to_owned(), problem };
    let failed = |cause: io::Error| refused(cause.to_string());
    let question = format!("CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n");
    stream.write_all(question.as_bytes()).await.map_err(failed)?;
    let mut answer = Vec::new();
    // Byte by byte: what follows the headers is the host's.
    while !answer.ends_with(b"\r\n\r\n") {
        if LONGEST_PROXY_ANSWER_BYTES < answer.len() {
            return Err(refused("its answer is too long".to_owned()));
        }
        answer.push(stream.read_u8().await.map_err(failed)?);
    }
    let answer = String::from_utf8_lossy(&answer);
    let status = answer.lines().next().unwrap_or_default();
    if status.split_whitespace().nth(1) == Some("200") { Ok(()) } else { Err(refused(status.to_owned())) }
}

/// Read for every request, about once an hour: changed certificates need no restart.
fn tls_config(authorities: Option<&Path>) -> Result<ClientConfig, String> {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if let Some(path) = authorities {
        let pem = fs::read(path).map_err(|error| format!("failed to read {}: {error}", path.display()))?;
        for certificate in CertificateDer::pem_slice_iter(&pem) {
            let certificate = certificate.map_err(|error| format!("{} is not PEM: {error}", path.display()))?;
            roots
                .add(certificate)
                .map_err(|error| format!("a certificate in {} is invalid: {error}", path.display()))?;
        }
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().map_err(|error| error.to_string())?;
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}
