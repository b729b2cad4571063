//! Pages of listings: that the file system can use them, whatever the store sends, and what they tell of directories.

use std::sync::Arc;
use std::time::Instant;

use futures::{FutureExt as _, StreamExt as _, stream};
use mountpoint_s3_client::error::ListObjectsError;
use mountpoint_s3_client::types::{HeadObjectParams, ListObjectsResult};
use mountpoint_s3_client::{ObjectClient, S3RequestError};

use super::first_pages::{self, FirstPage, ReceivedPage};
use super::siblings::ListedSiblings;
use super::watchdog::AnswerKind;
use super::{Answer, ClientUsage, ListingOrder, StoreClient, internal, lacks_etag, listing_check, listing_xml};

/// How many objects of a page without `ETag` are asked about at once.
const COMPLETED_AT_ONCE: usize = 16;

impl<C> StoreClient<C>
where
    C: ObjectClient<ClientError = S3RequestError> + Clone + Send + Sync + 'static,
{
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
            remove_marker(prefix, delimiter, &mut page);
            self.listing_check.check(token, &page).map_err(internal)?;
        }
        Ok(page)
    }

    /// A page as the store has it, without what does not belong there.
    async fn fetch_page(
        &self,
        bucket: &str,
        token: Option<&str>,
        delimiter: &str,
        max_keys: usize,
        prefix: &str,
    ) -> Answer<ListObjectsResult, ListObjectsError, C> {
        let ask = || self.inner.list_objects(bucket, token, delimiter, max_keys, prefix);
        let mut page = match self.patient(AnswerKind::Short, ask).await {
            Err(error) if lacks_etag(&error) => {
                let mut page = self.fallback.list(token, delimiter, max_keys, prefix).map_err(internal)?;
                self.complete(bucket, &mut page).await;
                page
            }
            answer => answer?,
        };
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
        self.listings.as_ref()?.first_pages.page(Instant::now(), directory, || {
            let (store, bucket, directory) = (self.clone(), bucket.to_owned(), directory.to_owned());
            async move { store.first_page(&bucket, &directory).await }.boxed().shared()
        })
    }

    async fn first_page(&self, bucket: &str, directory: &str) -> Option<Arc<ReceivedPage>> {
        let mut page = self.fetch_page(bucket, None, "/", first_pages::PAGE, directory).await.ok()?;
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
            async move { store.list_siblings(&bucket, &parent).await }.boxed().shared()
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
