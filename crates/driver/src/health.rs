//! A small HTTP server: `/healthz` (should it be restarted?) and `/readyz` (does it do its work?) for kubelet's probes, and
//! `/metrics` for Prometheus.

use std::convert::Infallible;
use std::fmt;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;

use crate::metrics;

/// Kubelet's own probe gives up after 3 s by default in our chart; answer before.
const PROBE_DEADLINE: Duration = Duration::from_secs(2);

/// Slow clients do not occupy a task for longer.
const REQUEST_DEADLINE: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Question {
    Alive,
    Ready,
}

/// Serves until it is dropped. An answer is nothing, or what is wrong.
pub async fn serve<Show, Figures, Ask, Answer>(listener: TcpListener, show: Show, ask: Ask)
where
    Show: Fn() -> Figures + Clone + Send + Sync + 'static,
    Figures: Future<Output = Result<String, fmt::Error>> + Send,
    Ask: Fn(Question) -> Answer + Clone + Send + Sync + 'static,
    Answer: Future<Output = Result<(), String>> + Send,
{
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let (ask, show) = (ask.clone(), show.clone());
        tokio::spawn(async move {
            let service = service_fn(|request| answer(request, &show, &ask));
            let connection = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(REQUEST_DEADLINE)
                .keep_alive(false)
                .serve_connection(TokioIo::new(stream), service);
            if let Err(error) = connection.await {
                tracing::debug!(%error, "health connection ended");
            }
        });
    }
}

async fn answer<Show, Figures, Ask, Answer>(
    request: Request<Incoming>,
    show: &Show,
    ask: &Ask,
) -> Result<Response<Full<Bytes>>, Infallible>
where
    Show: Fn() -> Figures,
    Figures: Future<Output = Result<String, fmt::Error>>,
    Ask: Fn(Question) -> Answer,
    Answer: Future<Output = Result<(), String>>,
{
    let mut kind = "text/plain; charset=utf-8";
    let is_question = matches!(*request.method(), Method::GET | Method::HEAD);
    let (status, text) = match request.uri().path() {
        "/healthz" if is_question => probe(ask(Question::Alive)).await,
        "/readyz" if is_question => probe(ask(Question::Ready)).await,
        "/metrics" if is_question => match show().await {
            Ok(text) => {
                kind = metrics::CONTENT_TYPE;
                (StatusCode::OK, text)
            }
            Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("the figures cannot be written: {error}\n")),
        },
        _ => (StatusCode::NOT_FOUND, "only GET /healthz, /readyz and /metrics are served here\n".to_owned()),
    };
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    Ok(response)
}

async fn probe(answer: impl Future<Output = Result<(), String>>) -> (StatusCode, String) {
    match tokio::time::timeout(PROBE_DEADLINE, answer).await {
        Ok(Ok(())) => (StatusCode::OK, "ok\n".to_owned()),
        Ok(Err(reason)) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")),
        Err(_) => (StatusCode::SERVICE_UNAVAILABLE, format!("no answer within {PROBE_DEADLINE:?}\n")),
    }
}
