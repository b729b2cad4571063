//! Requests pages of listings and parses them, both without the client library.
//!
//! The library rejects a page with an object that has no `ETag`, and takes longer to parse a page than a store to send it: it builds a
//! tree of all elements, and moves the rest of it for each entry that it takes out.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use mountpoint_s3_client::types::ListObjectsResult;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use super::listing_xml::{self, ListingError};
use super::raw::{RawClient, RawConfig, RawError, RawRequest};

/// As the client library encodes a query.
const QUERY: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

#[derive(Debug, thiserror::Error)]
pub enum ListError {
    #[error("the client for listings cannot be made")]
    Client,

    #[error(transparent)]
    Request(RawError),

    #[error(transparent)]
    Listing(ListingError),
}

/// So many of our requests in a row must have been refused where those of the library were not, before only the library is used.
const MOST_REFUSED_ALONE: u32 = 3;

/// A client of its own, made for the first listing.
pub struct Lister {
    config: RawConfig,
    client: OnceLock<Option<RawClient>>,
    /// Our requests in a row that were refused where those of the library were not.
    refused_alone: AtomicU32,
}

impl Lister {
    pub fn new(config: RawConfig) -> Self {
        Self { config, client: OnceLock::new(), refused_alone: AtomicU32::new(0) }
    }

    /// Whether the store, or something before it, understands our requests as well as those of the library.
    pub fn is_understood(&self) -> bool {
        self.refused_alone.load(Ordering::Relaxed) < MOST_REFUSED_ALONE
    }

    /// Notes that our request was refused, and that the library's was not.
    pub fn note_refused_alone(&self) {
        if self.refused_alone.fetch_add(1, Ordering::Relaxed) + 1 == MOST_REFUSED_ALONE {
            tracing::warn!(
                "the store refuses our requests for listings, only the client library sends them from now on"
            );
        }
    }

    /// A page of a listing. Objects without an `ETag` have `listing_xml::NO_ETAG`.
    pub async fn list(
        &self,
        token: Option<&str>,
        delimiter: &str,
        max_keys: usize,
        prefix: &str,
    ) -> Result<ListObjectsResult, ListError> {
        let make = || {
            RawClient::new(self.config.clone())
                .inspect_err(|error| tracing::warn!(%error, "the client for listings cannot be made"))
                .ok()
        };
        let client = self.client.get_or_init(make).as_ref().ok_or(ListError::Client)?;
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
        let response = client.request(request).await.map_err(ListError::Request)?;
        let page = listing_xml::parse(&response.body).map_err(ListError::Listing)?;
        self.refused_alone.store(0, Ordering::Relaxed);
        Ok(page)
    }
}
