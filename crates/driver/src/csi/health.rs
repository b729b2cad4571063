//! `/healthz`: asks our own CSI socket whether it answers, as a liveness sidecar would. And `/metrics`, for Prometheus.

use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, UnixStream};
use tonic::transport::Endpoint;

use super::proto::ProbeRequest;
use super::proto::identity_client::IdentityClient;
use crate::metrics::{self, Metrics};

/// Kubelet's own probe gives up after 3 s by default in our chart; answer before.
const PROBE_DEADLINE: Duration = Duration::from_secs(2);

/// Slow clients do not occupy a task for longer.
const REQUEST_DEADLINE: Duration = Duration::from_secs(10);

pub async fn serve(listener: TcpListener, csi_socket: PathBuf, metrics: Arc<Metrics>) {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let (csi_socket, metrics) = (csi_socket.clone(), metrics.clone());
        tokio::spawn(async move {
            let answer = service_fn(|request| answer(request, csi_socket.clone(), metrics.clone()));
            let connection = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(REQUEST_DEADLINE)
                .keep_alive(false)
                .serve_connection(TokioIo::new(stream), answer);
            if let Err(error) = connection.await {
                tracing::debug!(%error, "health connection ended");
            }
        });
    }
}

async fn answer(
    request: Request<Incoming>,
    csi_socket: PathBuf,
    metrics: Arc<Metrics>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let mut kind = "text/plain; charset=utf-8";
    let (status, text) = match (request.method(), request.uri().path()) {
        (&Method::GET | &Method::HEAD, "/healthz") => match tokio::time::timeout(PROBE_DEADLINE, probe(csi_socket))
            .await
        {
            Ok(Ok(())) => (StatusCode::OK, "ok\n".to_owned()),
            Ok(Err(reason)) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")),
            Err(_) => {
                (StatusCode::SERVICE_UNAVAILABLE, format!("the CSI socket did not answer within {PROBE_DEADLINE:?}\n"))
            }
        },
        (&Method::GET | &Method::HEAD, "/metrics") => match metrics.render() {
            Ok(text) => {
                kind = metrics::CONTENT_TYPE;
                (StatusCode::OK, text)
            }
            Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("the figures cannot be written: {error}\n")),
        },
        _ => (StatusCode::NOT_FOUND, "only GET /healthz and GET /metrics are served here\n".to_owned()),
    };
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    Ok(response)
}

async fn probe(csi_socket: PathBuf) -> Result<(), String> {
    let connect = tower::service_fn(move |_| {
        let csi_socket = csi_socket.clone();
        async move { UnixStream::connect(csi_socket).await.map(TokioIo::new) }
    });
    // The URI is never resolved: the connector above always takes the Unix socket.
    let channel = Endpoint::from_static("http://csi.sock")
        .connect_with_connector(connect)
        .await
        .map_err(|error| format!("the CSI socket cannot be reached: {error}"))?;
    IdentityClient::new(channel)
        .probe(ProbeRequest {})
        .await
        .map_err(|status| format!("the CSI socket answered: {}", status.message()))?;
    Ok(())
}
