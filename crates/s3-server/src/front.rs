//! The connections: accepts them, plain or TLS, and acts faults out on them. Everything else goes to the S3 service.

use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt as _;
use http_body_util::{BodyExt, BodyStream, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderValue};
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

use crate::faults::{Effect, Faults};
use crate::operation::RecordedRequest;

/// How long a truncated answer pauses before its connection is closed.
const FLUSH_PAUSE: Duration = Duration::from_millis(50);

/// What an endless answer sends at once.
const ENDLESS_CHUNK: usize = 64 << 10;

#[derive(Clone)]
pub(crate) struct HttpFrontend {
    pub service: S3Service,
    pub faults: Arc<Faults>,
    pub tls: Option<TlsAcceptor>,
}

impl HttpFrontend {
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
        let asked = RecordedRequest::of(&request);
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
            Effect::AnswerDropped => self.service.call(request.map(Body::from)).await.and_then(|_| Err(cut())),
            Effect::Truncated { after } => {
                let response = self.service.call(request.map(Body::from)).await?;
                let (head, body) = response.into_parts();
                Ok(Response::from_parts(head, truncate(body, after).await))
            }
            Effect::Endless { status } => Ok(endless(status, None)),
            Effect::Dripping { interval } => Ok(endless(200, Some(interval))),
            Effect::HugeHeader { bytes } => {
                let mut response = self.service.call(request.map(Body::from)).await?;
                if let Ok(value) = HeaderValue::from_str(&"x".repeat(bytes)) {
                    response.headers_mut().insert("x-amz-meta-huge", value);
                }
                Ok(response)
            }
            Effect::WebPage => Ok(Response::new(Body::from("<html><body>It works!</body></html>".to_owned()))),
            Effect::EmptyEtags => self.rewritten(request, |text| empty_etags(&text)).await,
            Effect::RepeatedPages { tokens } => {
                let token = met.earlier % tokens;
                self.rewritten(request, |text| {
                    let more = format!(
                        "<IsTruncated>true</IsTruncated><NextContinuationToken>again-{token}</NextContinuationToken>"
                    );
                    text.replace("<IsTruncated>false</IsTruncated>", &more)
                })
                .await
            }
            Effect::EmptyPages => {
                let text = format!(
                    "<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>page-{}</NextContinuationToken>\
                     </ListBucketResult>",
                    met.earlier
                );
                Ok(Response::new(Body::from(text)))
            }
        }
    }

    /// The right answer with another body.
    async fn rewritten(
        &self,
        request: Request<Incoming>,
        rewrite: impl FnOnce(String) -> String,
    ) -> Result<Response<Body>, HttpError> {
        let (mut head, body) = self.service.call(request.map(Body::from)).await?.into_parts();
        let text = String::from_utf8_lossy(&whole(body).await).into_owned();
        head.headers.remove(CONTENT_LENGTH);
        Ok(Response::from_parts(head, Body::from(rewrite(text))))
    }
}

/// The text with nothing in its `ETag` elements.
fn empty_etags(text: &str) -> String {
    let mut pieces = text.split("<ETag>");
    let first = pieces.next().unwrap_or_default().to_owned();
    pieces.fold(first, |text, piece| text + "<ETag></ETag>" + piece.split_once("</ETag>").map_or("", |(_, rest)| rest))
}

/// As fast as the client reads, or a byte from time to time, until the client has enough.
fn endless(status: u16, interval: Option<Duration>) -> Response<Body> {
    let chunk = Bytes::from(vec![b' '; if interval.is_some() { 1 } else { ENDLESS_CHUNK }]);
    let chunks = futures::stream::repeat(chunk).then(move |chunk| async move {
        if let Some(interval) = interval {
            tokio::time::sleep(interval).await;
        }
        Ok::<_, std::io::Error>(Frame::data(chunk))
    });
    let mut response = Response::new(Body::http_body_unsync(StreamBody::new(chunks)));
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::IM_A_TEAPOT);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/xml"));
    response
}

async fn whole(body: Body) -> Bytes {
    BodyExt::collect(body).await.map(http_body_util::Collected::to_bytes).unwrap_or_default()
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
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/xml"));
    Ok(response)
}

/// Reads the whole answer, which is in memory anyway, and gives only its beginning.
async fn truncate(body: Body, after: usize) -> Body {
    let whole = whole(body).await;
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
