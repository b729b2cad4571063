//! A small HTTP server for `/healthz` and `/readyz`, kubelet's liveness and readiness probes, and `/metrics`.

use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

use crate::metrics;

/// kubelet's probe times out after 3 s in our chart; answer before.
const PROBE_DEADLINE: Duration = Duration::from_secs(2);

/// A client must have sent its request by then.
const REQUEST_DEADLINE: Duration = Duration::from_secs(3);

/// A client must have read its response by then.
const CONNECTION_DEADLINE: Duration = Duration::from_secs(15);

/// Connections at the same time: kubelet, Prometheus and people.
const CONNECTIONS: usize = 256;

/// Scrapes that wait for measurements at the same time. The other connections are for kubelet, which restarts a plugin that
/// does not answer its probes.
const SCRAPES: usize = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Question {
    Alive,
    Ready,
}

/// Serves until it is dropped. `check` returns what is unhealthy as the error.
pub async fn serve<Render, Rendered, Check, Answer>(listener: TcpListener, render: Render, check: Check)
where
    Render: Fn() -> Rendered + Clone + Send + Sync + 'static,
    Rendered: Future<Output = Result<String, fmt::Error>> + Send,
    Check: Fn(Question) -> Answer + Clone + Send + Sync + 'static,
    Answer: Future<Output = Result<(), String>> + Send,
{
    let room = Arc::new(Semaphore::new(CONNECTIONS));
    let scrapes = Arc::new(Semaphore::new(SCRAPES));
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        // Without room the connection is closed at once: the client may retry, and nothing queues up here.
        let Ok(permit) = room.clone().try_acquire_owned() else { continue };
        let (check, render, scrapes) = (check.clone(), render.clone(), scrapes.clone());
        tokio::spawn(async move {
            let _permit = permit;
            let service = service_fn(|request| answer(request, &render, &check, &scrapes));
            let connection = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(REQUEST_DEADLINE)
                .keep_alive(false)
                .serve_connection(TokioIo::new(stream), service);
            match tokio::time::timeout(CONNECTION_DEADLINE, connection).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::debug!(%error, "health connection ended"),
                Err(_) => tracing::debug!("health connection timed out"),
            }
        });
    }
}

async fn answer<Render, Rendered, Check, Answer>(
    request: Request<Incoming>,
    render: &Render,
    check: &Check,
    scrapes: &Semaphore,
) -> Result<Response<Full<Bytes>>, Infallible>
where
    Render: Fn() -> Rendered,
    Rendered: Future<Output = Result<String, fmt::Error>>,
    Check: Fn(Question) -> Answer,
    Answer: Future<Output = Result<(), String>>,
{
    let mut kind = "text/plain; charset=utf-8";
    let is_read = matches!(*request.method(), Method::GET | Method::HEAD);
    let (status, text) = match request.uri().path() {
        "/healthz" if is_read => probe(check(Question::Alive)).await,
        "/readyz" if is_read => probe(check(Question::Ready)).await,
        "/metrics" if is_read => match scrapes.try_acquire() {
            Err(_) => (StatusCode::SERVICE_UNAVAILABLE, format!("{SCRAPES} scrapes are already waiting\n")),
            Ok(_permit) => match render().await {
                Ok(text) => {
                    kind = metrics::CONTENT_TYPE;
                    (StatusCode::OK, text)
                }
                Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("failed to render the metrics: {error}\n")),
            },
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

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpStream;

    use super::*;

    async fn start() -> std::net::SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(serve(listener, || async { Ok("text\n".to_owned()) }, |_| async { Ok(()) }));
        address
    }

    #[tokio::test]
    async fn scrapes_that_wait_leave_room_for_probes() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(serve(listener, std::future::pending, |_| async { Ok(()) }));
        let scrapes = (0..=SCRAPES).map(|_| tokio::spawn(get(address, "/metrics")));
        let (refused, _, waiting) = futures::future::select_all(scrapes).await;
        assert!(refused.unwrap().starts_with("HTTP/1.1 503"));
        assert!(get(address, "/healthz").await.starts_with("HTTP/1.1 200"));
        assert!(waiting.iter().all(|it| !it.is_finished()));
    }

    /// What the server sends until it closes the connection.
    async fn get(address: std::net::SocketAddr, path: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n").as_bytes()).await.unwrap();
        let mut response = String::new();
        // A connection that is closed without an answer is an empty one, or a reset.
        let _ = stream.read_to_string(&mut response).await;
        response
    }

    #[tokio::test]
    async fn connections_are_bounded_and_slow_clients_are_disconnected() {
        let address = start().await;
        assert!(get(address, "/healthz").await.starts_with("HTTP/1.1 200"));
        let mut slow = Vec::new();
        for _ in 0..CONNECTIONS {
            slow.push(TcpStream::connect(address).await.unwrap());
        }
        // Accepted in order, so all of the slow ones are when this one is.
        assert_eq!(get(address, "/healthz").await, "");
        // The first of them is disconnected at the deadline for requests, and there is room again.
        let mut byte = [0; 1];
        let closed = tokio::time::timeout(REQUEST_DEADLINE * 3, slow[0].read(&mut byte)).await;
        assert!(closed.is_ok(), "a client that sends nothing stays connected");
        drop(slow);
        assert!(get(address, "/healthz").await.starts_with("HTTP/1.1 200"));
    }
}
