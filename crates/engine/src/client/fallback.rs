//! Lists a directory that the client library cannot list because the store sends objects without an `ETag`.

use std::sync::OnceLock;

use mountpoint_s3_client::S3RequestError;
use mountpoint_s3_client::error::ObjectClientError;
use mountpoint_s3_client::types::ListObjectsResult;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use super::listing_xml::{self, ListingError};
use super::raw::{RawClient, RawConfig, RawError, RawRequest};

/// As the client library encodes a query.
const QUERY: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

#[derive(Debug, thiserror::Error)]
pub enum FallbackError {
    #[error("the client for listings without ETag cannot be made")]
    Client,

    #[error(transparent)]
    Request(RawError),

    #[error(transparent)]
    Listing(ListingError),
}

/// A client of its own, made when the first such listing is met.
pub struct FallbackLister {
    config: RawConfig,
    client: OnceLock<Option<RawClient>>,
}

impl FallbackLister {
    pub fn new(config: RawConfig) -> Self {
        Self { config, client: OnceLock::new() }
    }

    /// Blocks until the page is there.
    pub fn list(
        &self,
        token: Option<&str>,
        delimiter: &str,
        max_keys: usize,
        prefix: &str,
    ) -> Result<ListObjectsResult, FallbackError> {
        let make = || {
            tracing::warn!("the store lists objects without ETag; each is looked up when it is used");
            RawClient::new(self.config.clone())
                .inspect_err(|error| tracing::warn!(%error, "listings without ETag cannot be read"))
                .ok()
        };
        let client = self.client.get_or_init(make).as_ref().ok_or(FallbackError::Client)?;
        let encoded = |text: &str| utf8_percent_encode(text, QUERY).to_string();
        let mut query =
            format!("list-type=2&delimiter={}&max-keys={max_keys}&prefix={}", encoded(delimiter), encoded(prefix));
        if let Some(token) = token {
            query.push_str("&continuation-token=");
            query.push_str(&encoded(token));
        }
        let request = RawRequest {
            operation: "ListObjectsV2",
            method: "GET",
            key: "",
            query,
            headers: vec![("x-amz-optional-object-attributes".to_owned(), "RestoreStatus".to_owned())],
            body: Vec::new(),
        };
        let response = client.send(request).map_err(FallbackError::Request)?;
        listing_xml::parse(&response.body).map_err(FallbackError::Listing)
    }
}

/// Whether the client library could not read a listing because an object has no `ETag`. It has no type for that.
pub fn lacks_etag<E>(error: &ObjectClientError<E, S3RequestError>) -> bool {
    let ObjectClientError::ClientError(S3RequestError::InternalError(cause)) = error else { return false };
    let words = cause.to_string();
    words.starts_with("Missing field ETag") || (words.contains("field has no text") && words.contains("\"ETag\""))
}
