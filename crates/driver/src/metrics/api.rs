//! Metrics of requests to the API server.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use super::{catalog, register};

/// Cheap to clone; all clones share their values.
#[derive(Clone, Debug, Default)]
pub struct ApiMetrics {
    requests: Family<[(&'static str, String); 3], Counter>,
}

impl ApiMetrics {
    pub(super) fn new(registry: &mut Registry) -> Self {
        Self { requests: register(registry, &catalog::API_REQUESTS, Family::default()) }
    }

    /// `code` is the status of the response, or `None` without a response.
    pub fn asked(&self, verb: &'static str, resource: &str, code: Option<u16>) {
        let code = code.map_or_else(|| "error".to_owned(), |it| it.to_string());
        let labels = [("verb", verb.to_owned()), ("resource", resource.to_owned()), ("code", code)];
        self.requests.get_or_create(&labels).inc();
    }
}
