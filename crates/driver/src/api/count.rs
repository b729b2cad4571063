//! Counts every request to the API server, whoever sends it: a layer around the client's connection.

use std::pin::Pin;
use std::task::{Context, Poll};

use hyper::{Method, Request, Response};
use tower::{Layer, Service};

use crate::metrics::ApiMetrics;

/// Wraps connections so that their requests are counted.
#[derive(Clone, Debug)]
pub struct Count(pub ApiMetrics);

#[derive(Clone, Debug)]
pub struct Counted<S> {
    inner: S,
    metrics: ApiMetrics,
}

impl<S> Layer<S> for Count {
    type Service = Counted<S>;

    fn layer(&self, inner: S) -> Counted<S> {
        Counted { inner, metrics: self.0.clone() }
    }
}

impl<S, B, A> Service<Request<B>> for Counted<S>
where
    S: Service<Request<B>, Response = Response<A>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<A>, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let Asked { verb, resource } = Asked::read(request.method(), request.uri().path(), request.uri().query());
        let metrics = self.metrics.clone();
        let answer = self.inner.call(request);
        Box::pin(async move {
            let answer = answer.await;
            metrics.asked(verb, &resource, answer.as_ref().ok().map(|it| it.status().as_u16()));
            answer
        })
    }
}

/// What a request is about, in the words of roles.
#[derive(Debug, PartialEq, Eq)]
struct Asked {
    verb: &'static str,
    /// With its subresource; names and namespaces are left out, there are too many of them.
    resource: String,
}

impl Asked {
    fn read(method: &Method, path: &str, query: Option<&str>) -> Self {
        let mut parts = path.split('/').filter(|it| !it.is_empty());
        match parts.next() {
            Some("api") => parts.nth(0),
            Some("apis") => parts.nth(1),
            _ => return Self { verb: verb(method, false, false), resource: "other".to_owned() },
        };
        let parts: Vec<&str> = parts.collect();
        let parts = match parts.as_slice() {
            ["namespaces", _, rest @ ..] if !rest.is_empty() => rest,
            all => all,
        };
        let (resource, is_named) = match parts {
            [] => ("discovery".to_owned(), true),
            [resource] => ((*resource).to_owned(), false),
            [resource, _] => ((*resource).to_owned(), true),
            [resource, _, subresource, ..] => (format!("{resource}/{subresource}"), true),
        };
        let is_watch = query.is_some_and(|it| it.split('&').any(|it| matches!(it, "watch=true" | "watch=1")));
        Self { verb: verb(method, is_named, is_watch), resource }
    }
}

fn verb(method: &Method, is_named: bool, is_watch: bool) -> &'static str {
    match *method {
        Method::GET if is_watch => "watch",
        Method::GET if is_named => "get",
        Method::GET => "list",
        Method::POST => "create",
        Method::PUT => "update",
        Method::PATCH => "patch",
        Method::DELETE if is_named => "delete",
        Method::DELETE => "deletecollection",
        _ => "other",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(method: &Method, path: &str, query: Option<&str>, expected: (&'static str, &str)) {
        let (verb, resource) = expected;
        assert_eq!(Asked::read(method, path, query), Asked { verb, resource: resource.to_owned() });
    }

    #[test]
    fn requests_are_told_apart_as_roles_do() {
        check(&Method::GET, "/api/v1/nodes", Some("fieldSelector=x&watch=true"), ("watch", "nodes"));
        check(&Method::GET, "/api/v1/nodes", Some("limit=500"), ("list", "nodes"));
        check(&Method::GET, "/api/v1/namespaces", None, ("list", "namespaces"));
        check(&Method::GET, "/api/v1/namespaces/mount-s3", None, ("get", "namespaces"));
        check(&Method::GET, "/api/v1/namespaces/mount-s3/pods/mp-1", None, ("get", "pods"));
        check(&Method::PATCH, "/api/v1/namespaces/mount-s3/pods/mp-1/status", None, ("patch", "pods/status"));
        check(&Method::POST, "/apis/events.k8s.io/v1/namespaces/default/events", None, ("create", "events"));
        check(&Method::PUT, "/apis/coordination.k8s.io/v1/namespaces/a/leases/b", None, ("update", "leases"));
        check(&Method::DELETE, "/apis/x.example.com/v2/things/a", None, ("delete", "things"));
        check(&Method::GET, "/apis", None, ("get", "discovery"));
        check(&Method::GET, "/version", None, ("list", "other"));
    }
}
