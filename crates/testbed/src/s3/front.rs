//! The connections: accepts them, plain or TLS, and acts faults out on them. Everything else goes to the S3 service.

use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt as _;
use http_body_util::{BodyExt, BodyStream, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use rustix::net::{Shutdown, shutdown};
use s3s::service::S3Service;
use s3s::{Body, HttpError};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use super::faults::{Effect, Faults};
use super::operation::Asked;

/// How long a truncated answer pauses before its connection is closed.
const FLUSH_PAUSE: Duration = Duration::from_millis(50);

#[derive(Clone)]
pub(super) struct Front {
    pub service: S3Service,
    pub faults: Arc<Faults>,
    pub tls: Option<TlsAcceptor>,
}

impl Front {
    /// Runs until its runtime is shut down.
    pub async fn serve(self, listener: TcpListener) {
        loop {
            let Ok((stream, _)) = listener.accept().await else {
                continue;
            };
            let _ = stream.set_nodelay(true);
            let Ok(connection) = stream.as_fd().try_clone_to_owned() else {
                continue;
            };
            let front = self.clone();
            tokio::spawn(async move {
                match &front.tls {
                    None => front.converse(stream).await,
                    Some(tls) => {
                        if let Ok(stream) = tls.accept(stream).await {
                            front.converse(stream).await;
                        }
                    }
                }
                // Closing is not enough to end a connection: a child that this process is just starting has a copy of
                // it, and may be waiting, inside exec, for a file system that waits for the end of this connection.
                let _ = shutdown(&connection, Shutdown::Both);
            });
        }
    }

    async fn converse(&self, stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) {
        let answer = service_fn(|request| self.answer(request));
        // An error is a connection that ended early: faults do that, and clients that are killed.
        let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), answer).await;
    }

    async fn answer(&self, request: Request<Incoming>) -> Result<Response<Body>, HttpError> {
        let asked = Asked::of(&request);
        let names_key = !asked.key.is_empty();
        let Some(met) = self.faults.meet(asked) else {
            return self.service.call(request.map(Body::from)).await;
        };
        match met.effect {
            Effect::Denied => refuse(request, StatusCode::FORBIDDEN, "AccessDenied", "Access Denied").await,
            Effect::NotFound if names_key => {
                refuse(request, StatusCode::NOT_FOUND, "NoSuchKey", "The specified key does not exist.").await
            }
            Effect::NotFound => {
                refuse(request, StatusCode::NOT_FOUND, "NoSuchBucket", "The specified bucket does not exist").await
            }
            Effect::Unavailable => {
                refuse(request, StatusCode::SERVICE_UNAVAILABLE, "SlowDown", "Please reduce your request rate.").await
            }
            Effect::Slow(delay) => {
                tokio::time::sleep(delay).await;
                self.service.call(request.map(Body::from)).await
            }
            Effect::Frozen => {
                met.released().await;
                self.service.call(request.map(Body::from)).await
            }
            Effect::Dropped => Err(cut()),
            Effect::Truncated { after } => {
                let response = self.service.call(request.map(Body::from)).await?;
                let (head, body) = response.into_parts();
                Ok(Response::from_parts(head, truncate(body, after).await))
            }
        }
    }
}

/// The request's body is read first: a client that is still sending would see a reset instead of the answer.
async fn refuse(
    request: Request<Incoming>,
    status: StatusCode,
    code: &str,
    message: &str,
) -> Result<Response<Body>, HttpError> {
    let mut frames = BodyStream::new(request.into_body());
    while let Some(Ok(_)) = frames.next().await {}
    let text = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
    );
    let mut response = Response::new(Body::from(text));
    *response.status_mut() = status;
    response.headers_mut().insert("content-type", hyper::header::HeaderValue::from_static("application/xml"));
    Ok(response)
}

/// Reads the whole answer, which is in memory anyway, and gives only its beginning.
async fn truncate(body: Body, after: usize) -> Body {
    let whole: Bytes = BodyExt::collect(body).await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
    let kept = whole.slice(..whole.len().min(after));
    let end = futures::stream::once(async {
        // hyper forgets what it has not sent yet when a body fails; a moment without data makes it send.
        tokio::time::sleep(FLUSH_PAUSE).await;
        Err(std::io::Error::other("truncated on purpose"))
    });
    Body::http_body_unsync(StreamBody::new(futures::stream::iter([Ok(Frame::data(kept))]).chain(end)))
}

/// hyper closes the connection when the service fails.
fn cut() -> HttpError {
    HttpError::new(Box::new(std::io::Error::other("dropped on purpose")))
}
