//! Pages of listings: that the file system can use them, whatever the store sends, and what they tell of directories.

use std::sync::Arc;
use std::time::Instant;

use futures::future::{BoxFuture, Shared};
use futures::task::SpawnExt as _;
use futures::{FutureExt as _, StreamExt as _, stream};
use mountpoint_s3_client::error::{ListObjectsError, ObjectClientError};
use mountpoint_s3_client::types::{HeadObjectParams, ListObjectsResult};
use mountpoint_s3_client::{ObjectClient, S3RequestError};

use super::first_pages::{self, FirstPage, ReceivedPage};
use super::lister::ListError;
use super::raw::RawError;
use super::siblings::ListedSiblings;
use super::watchdog::AnswerKind;
use super::{
    Answer, ClientUsage, ListingOrder, StoreClient, internal, listing_check, listing_xml, listings, store_timeout,
};

/// How many objects of a page without `ETag` are asked about at once.
const COMPLETED_AT_ONCE: usize = 16;

impl<C> StoreClient<C>
where
    C: ObjectClient<ClientError = S3RequestError> + Clone + Send + Sync + 'static,
{
    /// Requests the page now and sees it through: the watchdog cannot end a request that nothing polls.
    pub(super) fn drive<T: Send + Sync + 'static>(&self, page: Shared<BoxFuture<'static, Option<Arc<T>>>>) {
        // If that fails, the page is requested when something waits for it.
        let _ = self.runtime.spawn(page.map(drop));
    }

    /// Asks for each `ETag` that a listing lacks. An object without any stays listed, and cannot be opened.
    async fn complete(&self, bucket: &str, page: &mut ListObjectsResult) {
        let (client, params) = (&self.inner, &HeadObjectParams::new());
        let lacking = page.objects.iter_mut().filter(|it| it.etag == listing_xml::NO_ETAG);
        let completed = stream::iter(lacking).for_each_concurrent(COMPLETED_AT_ONCE, |object| async move {
            let head = client.head_object(bucket, &object.key, params);
            if let Ok(Ok(found)) = self.watchdog.watch(AnswerKind::Short, head).await {
                found.etag.as_str().clone_into(&mut object.etag);
            }
        });
        completed.await;
    }

    /// The next page with entries. The file system takes a page without entries for the last one and would cut the listing there.
    pub(super) async fn page(
        &self,
        bucket: &str,
        token: Option<&str>,
        delimiter: &str,
        max_keys: usize,
        prefix: &str,
    ) -> Answer<ListObjectsResult, ListObjectsError, C> {
        let mut page = self.checked_page(bucket, token, delimiter, max_keys, prefix).await?;
        while 1 < max_keys && page.objects.is_empty() && page.common_prefixes.is_empty() {
            let Some(next) = page.next_continuation_token.take() else { break };
            page = self.checked_page(bucket, Some(&next), delimiter, max_keys, prefix).await?;
        }
        Ok(page)
    }

    /// A page that the file system can use, whatever the store sends.
    async fn checked_page(
        &self,
        bucket: &str,
        token: Option<&str>,
        delimiter: &str,
        max_keys: usize,
        prefix: &str,
    ) -> Answer<ListObjectsResult, ListObjectsError, C> {
        let mut page = self.fetch_page(bucket, token, delimiter, max_keys, prefix).await?;
        // One name is requested to see whether there is any, and never the next page.
        if 1 < max_keys {
            self.complete(bucket, &mut page).await;
            remove_marker(prefix, delimiter, &mut page);
            self.listing_check.check(token, &page).map_err(internal)?;
        }
        Ok(page)
    }

    /// A page as the store sends it.
    async fn raw_page(
        &self,
        bucket: &str,
        token: Option<&str>,
        delimiter: &str,
        max_keys: usize,
        prefix: &str,
    ) -> Answer<ListObjectsResult, ListObjectsError, C> {
        let ask_library = self.inner.list_objects(bucket, token, delimiter, max_keys, prefix);
        if !self.lister.is_understood() {
            return ask_library.await;
        }
        match self.lister.list(token, delimiter, max_keys, prefix).await {
            Ok(page) => Ok(page),
            Err(ListError::Request(RawError::Unanswered { cause, .. })) if store_timeout::is_silent(cause) => {
                Err(ObjectClientError::ClientError(S3RequestError::CrtError(cause)))
            }
            Err(error) => {
                // The library has an error for each cause, so it may fail, too.
                tracing::debug!(%error, prefix, "cannot list, the client library tries");
                let is_refused = matches!(error, ListError::Request(RawError::Refused { .. }));
                ask_library.await.inspect(|_| {
                    if is_refused {
                        self.lister.note_refused_alone();
                    }
                })
            }
        }
    }

    /// A page as the store has it, without what does not belong there. Objects may lack their `ETag`.
    async fn fetch_page(
        &self,
        bucket: &str,
        token: Option<&str>,
        delimiter: &str,
        max_keys: usize,
        prefix: &str,
    ) -> Answer<ListObjectsResult, ListObjectsError, C> {
        let ask = || self.raw_page(bucket, token, delimiter, max_keys, prefix);
        let mut page = self.patient(AnswerKind::Short, ask).await?;
        listing_check::remove_foreign(prefix, delimiter, &mut page);
        let is_first = token.is_none() && delimiter == "/" && prefix.ends_with('/');
        let is_whole = page.next_continuation_token.is_none() || self.order == ListingOrder::ByKey;
        // A marker has the shortest key.
        if is_first && is_whole && page.objects.iter().all(|it| it.key != prefix) {
            self.metadata.note_missing_marker(prefix);
        }
        Ok(page)
    }

    /// The first page of names in a directory that is looked up, if it will probably be listed right after.
    fn expected_page(&self, bucket: &str, directory: &str) -> Option<FirstPage> {
        if self.usage == ClientUsage::Objects {
            return None;
        }
        self.listings.as_ref()?.first_pages.page(Instant::now(), directory, |it| self.requested_page(bucket, it))
    }

    /// The first page of names in a directory that is listed, if it was requested before.
    pub(super) fn listed_page(&self, bucket: &str, directory: &str) -> Option<FirstPage> {
        if self.usage == ClientUsage::Objects {
            return None;
        }
        self.listings.as_ref()?.first_pages.listed(Instant::now(), directory, |it| self.requested_page(bucket, it))
    }

    fn requested_page(&self, bucket: &str, directory: &str) -> FirstPage {
        let (store, bucket, directory) = (self.clone(), bucket.to_owned(), directory.to_owned());
        let page = async move { store.first_page(&bucket, &directory).await }.boxed().shared();
        self.drive(page.clone());
        page
    }

    /// Notes what a listing tells of those to come, and requests the next page.
    pub(super) fn note_listed(
        &self,
        bucket: &str,
        delimiter: &str,
        max_keys: usize,
        prefix: &str,
        page: &ListObjectsResult,
    ) {
        let Some(listings) = self.listings.as_ref().filter(|_| self.usage == ClientUsage::Names) else { return };
        if delimiter != "/" || max_keys < first_pages::PAGE {
            return;
        }
        listings.first_pages.note_order(prefix, &page.common_prefixes);
        let keys = page.objects.iter().map(|it| &it.key).chain(&page.common_prefixes);
        let (Some(token), Some(last)) = (&page.next_continuation_token, keys.max()) else { return };
        if self.order != ListingOrder::ByKey {
            return;
        }
        let (store, bucket, name, next) = (self.clone(), bucket.to_owned(), prefix.to_owned(), token.clone());
        let requested = async move {
            let page = store.page(&bucket, Some(&next), "/", max_keys, &name).await.ok()?;
            Some(Arc::new(ReceivedPage { page, marker: None, received: Instant::now() }))
        };
        let requested = requested.boxed().shared();
        listings.next_pages.keep(Instant::now(), prefix, token, last.clone(), requested.clone());
        self.drive(requested);
    }

    /// Keeps the listing of a directory that has one page, for those who list it once more at once.
    pub(super) fn keep_short(&self, max_keys: usize, directory: &str, page: &ListObjectsResult, changes: u64) {
        let is_whole = first_pages::PAGE <= max_keys && page.next_continuation_token.is_none();
        // An empty one does not tell whether there is a marker.
        let has_names = !page.objects.is_empty() || !page.common_prefixes.is_empty();
        let Some(listings) = self.listings.as_ref().filter(|_| is_whole && has_names) else { return };
        if self.usage != ClientUsage::Names {
            return;
        }
        let now = Instant::now();
        let page = ReceivedPage { page: first_pages::copy(page), marker: None, received: now };
        let page = futures::future::ready(Some(Arc::new(page))).boxed().shared();
        listings.first_pages.keep(now, directory, page, changes);
    }

    /// The page that was requested after the one before it.
    pub(super) fn next_page(&self, prefix: &str, token: Option<&str>) -> Option<FirstPage> {
        let listings = self.listings.as_ref().filter(|_| self.usage == ClientUsage::Names)?;
        listings.next_pages.take(Instant::now(), prefix, token?)
    }

    pub(super) async fn page_of_names(self, bucket: String, directory: String) -> Option<ListObjectsResult> {
        self.fetch_page(&bucket, None, "/", listings::PAGE, &directory).await.ok()
    }

    async fn first_page(&self, bucket: &str, directory: &str) -> Option<Arc<ReceivedPage>> {
        let mut page = self.fetch_page(bucket, None, "/", first_pages::PAGE, directory).await.ok()?;
        self.complete(bucket, &mut page).await;
        let marker = page.objects.iter().find(|it| it.key == directory).cloned();
        remove_marker(directory, "/", &mut page);
        let is_empty = page.objects.is_empty() && page.common_prefixes.is_empty();
        if is_empty && page.next_continuation_token.is_some() {
            return None;
        }
        self.listing_check.check(None, &page).ok()?;
        Some(Arc::new(ReceivedPage { page, marker, received: Instant::now() }))
    }

    /// Whether the file that is looked up beside others was found, and a listing says that no directory has its name.
    pub(super) async fn is_only_a_file(&self, bucket: &str, directory: &str) -> bool {
        let Some(listings) = self.listings.as_ref().filter(|_| self.usage == ClientUsage::Names) else { return false };
        if !self.small_files.expects_read(directory.trim_end_matches('/')) {
            return false;
        }
        let list = |parent: &str| {
            let (store, bucket, parent) = (self.clone(), bucket.to_owned(), parent.to_owned());
            let listed = async move { store.list_siblings(&bucket, &parent).await }.boxed().shared();
            self.drive(listed.clone());
            listed
        };
        match listings.siblings.object(Instant::now(), directory, list) {
            Some(found) => found.await,
            None => false,
        }
    }

    async fn list_siblings(&self, bucket: &str, directory: &str) -> Option<Arc<ListedSiblings>> {
        let page = self.fetch_page(bucket, None, "/", first_pages::PAGE, directory).await.ok()?;
        let keys = page.objects.iter().map(|it| &it.key).chain(&page.common_prefixes);
        let last = page.next_continuation_token.as_ref().and(keys.max()).cloned();
        let is_usable = page.next_continuation_token.is_none() || self.order == ListingOrder::ByKey;
        let names = page.objects.len() + page.common_prefixes.len();
        let directories = page.common_prefixes.into_iter().collect();
        is_usable.then(|| Arc::new(ListedSiblings { directories, names, last }))
    }

    /// Whether there is a directory, if its first page of names tells.
    pub(super) async fn look_by_listing(&self, bucket: &str, directory: &str) -> Option<Arc<ReceivedPage>> {
        self.expected_page(bucket, directory)?.await
    }
}

/// Removes the marker of the directory itself, of whose empty name the file system would warn at each listing.
fn remove_marker(prefix: &str, delimiter: &str, page: &mut ListObjectsResult) {
    page.objects.retain(|it| delimiter.is_empty() || it.key != prefix);
}
