//! Counts every request to the API server: a tower layer around the client's connection.

use std::pin::Pin;
use std::task::{Context, Poll};

use hyper::{Method, Request, Response};
use tower::{Layer, Service};

use crate::metrics::ApiMetrics;

/// Wraps a service so that its requests are counted.
#[derive(Clone, Debug)]
pub struct CountRequests(pub ApiMetrics);

#[derive(Clone, Debug)]
pub struct CountedService<S> {
    inner: S,
    metrics: ApiMetrics,
}

impl<S> Layer<S> for CountRequests {
    type Service = CountedService<S>;

    fn layer(&self, inner: S) -> CountedService<S> {
        CountedService { inner, metrics: self.0.clone() }
    }
}

impl<S, B, A> Service<Request<B>> for CountedService<S>
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
        let RequestKind { verb, resource } =
            RequestKind::read(request.method(), request.uri().path(), request.uri().query());
        let metrics = self.metrics.clone();
        let answer = self.inner.call(request);
        Box::pin(async move {
            let answer = answer.await;
            metrics.asked(verb, &resource, answer.as_ref().ok().map(|it| it.status().as_u16()));
            answer
        })
    }
}

/// Verb and resource of a request, as in RBAC rules.
#[derive(Debug, PartialEq, Eq)]
struct RequestKind {
    verb: &'static str,
    /// With its subresource, without names and namespaces: they would be too many labels.
    resource: String,
}

impl RequestKind {
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
        assert_eq!(RequestKind::read(method, path, query), RequestKind { verb, resource: resource.to_owned() });
    }

    #[test]
    fn requests_are_classified_as_in_rbac_rules() {
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
