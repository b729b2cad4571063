//! What S3-compatible stores need and AWS's client does not do: moves that cannot lose data, empty files with every
//! checksum setting, small files as one request. A wrapper around any client; the file system does not notice it.

mod budget;
mod digest;
mod first_pages;
mod get_headers;
mod lister;
mod listing_check;
mod listing_xml;
mod listings;
mod metadata;
mod moves;
mod next_pages;
mod pages;
mod raw;
mod removed_directories;
mod siblings;
mod small_files;
mod store_timeout;
mod upload;
mod values;
mod watchdog;

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use futures::future::{self, Either, FutureExt as _};
use mountpoint_s3_client::error::{
    CopyObjectError, DeleteObjectError, GetObjectAttributesError, GetObjectError, HeadObjectError, ListObjectsError,
    ObjectClientError, PutObjectError, RenameObjectError,
};
use mountpoint_s3_client::types::{
    CopyObjectParams, CopyObjectResult, DeleteObjectResult, GetObjectAttributesResult, GetObjectParams,
    HeadObjectParams, HeadObjectResult, ListObjectsResult, ObjectAttribute, ObjectClientResult, PutObjectParams,
    PutObjectResult, PutObjectSingleParams, RenameObjectParams, RenameObjectResult,
};
use mountpoint_s3_client::{ObjectClient, PutObjectRequest, S3RequestError};
use mountpoint_s3_crt::s3::client::BufferPoolUsageStats;
use mountpoint_s3_fs::Runtime;

pub use budget::MemoryBudget;
pub use digest::{PartsDigest, digest, digest_of_parts, is_content_of, is_digest_of};
pub use lister::Lister;
pub use listing_check::ListingCheck;
pub use listings::Listings;
pub use metadata::{MetadataCache, ObjectHeaders, UserMetadata};
pub use moves::{Moves, copy_verified, encoded};
pub use raw::{RawClient, RawConfig, RawError, RawRequest, RawResponse, Signing};
pub use removed_directories::RemovedDirectories;
pub use small_files::{Fetch, SmallFilePrefetch};
pub use store_timeout::StoreTimeout;
pub use upload::{Upload, single_params};
pub use watchdog::{Watchdog, WatchdogLimits};

use small_files::SmallFile;
use watchdog::AnswerKind;

/// Who uses a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientUsage {
    /// A file system that looks names up: a directory hides an object of the same name.
    Names,
    /// Code that knows which object it means.
    Objects,
}

/// In which order a store lists keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListingOrder {
    ByKey,
    Any,
}

/// A client for any S3-compatible store.
#[derive(Clone)]
pub struct StoreClient<C> {
    pub inner: C,
    pub usage: ClientUsage,
    pub order: ListingOrder,
    pub moves: Arc<Moves>,
    /// Memory for small files until they are complete.
    pub buffers: Arc<MemoryBudget>,
    /// Small files that are fetched while they are looked up.
    pub small_files: Arc<SmallFilePrefetch>,
    /// Listings that say what is not there. Without them every look asks the server.
    pub listings: Option<Arc<Listings>>,
    /// What objects say of themselves, and what is sent with the next upload.
    pub metadata: Arc<MetadataCache>,
    /// Ends requests that the store keeps open.
    pub watchdog: Watchdog,
    /// Repeats requests that the store does not answer.
    pub timeout: StoreTimeout,
    pub listing_check: Arc<ListingCheck>,
    pub lister: Arc<Lister>,
    pub removed: Arc<RemovedDirectories>,
    /// Works on requests that nothing waits for yet.
    pub runtime: Runtime,
}

impl<C> StoreClient<C>
where
    C: ObjectClient<ClientError = S3RequestError> + Clone + Send + Sync + 'static,
{
    /// Waits for an answer as long as the store keeps within bounds.
    async fn watched<T, E>(&self, kind: AnswerKind, answer: impl Future<Output = Answer<T, E, C>>) -> Answer<T, E, C> {
        self.watchdog.watch(kind, answer).await.unwrap_or_else(|cause| Err(internal(cause)))
    }

    /// The same for a request that may be sent more than once.
    async fn patient<T, E, F>(&self, kind: AnswerKind, ask: impl Fn() -> F) -> Answer<T, E, C>
    where
        F: Future<Output = Answer<T, E, C>>,
        E: std::error::Error + 'static,
    {
        self.timeout.repeat(|| self.watched(kind, ask())).await
    }

    /// The answer "absent" if a listing knows better or earlier than the server, else the server's.
    async fn unless_absent<T>(&self, key: &str, absent: impl FnOnce() -> T, ask: impl Future<Output = T>) -> T {
        let Some(listings) = self.listings.as_ref().filter(|_| self.usage == ClientUsage::Names) else {
            return ask.await;
        };
        let coming = match listings.answer(Instant::now(), key) {
            listings::KeyPresence::Absent => return absent(),
            listings::KeyPresence::Unknown => return ask.await,
            listings::KeyPresence::Coming(coming) => coming,
        };
        match future::select(coming, std::pin::pin!(ask)).await {
            Either::Left((_, ask)) => match listings.answer(Instant::now(), key) {
                listings::KeyPresence::Absent => absent(),
                listings::KeyPresence::Unknown | listings::KeyPresence::Coming(_) => ask.await,
            },
            Either::Right((answer, _)) => answer,
        }
    }

    /// Notes a look at an object, and lists its directory if more are to come.
    fn note_look(&self, bucket: &str, key: &str, took: Option<Duration>) {
        let Some(listings) = &self.listings else { return };
        if let Some(directory) = listings.looked(Instant::now(), key, took) {
            let names = listings::names(self.clone().page_of_names(bucket.to_owned(), directory.to_owned()));
            listings.keep(Instant::now(), directory, names.clone());
            self.drive(names);
        }
    }

    /// An object was changed by us, or may have been.
    fn note_changed(&self, key: &str) {
        if let Some(listings) = &self.listings {
            listings.note_changed(key);
        }
    }

    fn note_there(&self, key: &str) {
        if let Some(listings) = &self.listings {
            listings.note_there(key);
        }
    }

    async fn look_at_object(
        &self,
        bucket: &str,
        key: &str,
        params: &HeadObjectParams,
    ) -> Answer<HeadObjectResult, HeadObjectError, C> {
        if self.small_files.expects_read(key) {
            if let Some(found) = self.look_by_reading(bucket, key).await {
                return found;
            }
            self.small_files.note_waste(Instant::now(), key);
        }
        self.patient(AnswerKind::Short, || self.inner.head_object(bucket, key, params)).await
    }

    /// What HEAD would answer, from the response to a GET of the whole file, which is kept for its reader. None if that
    /// response does not tell enough.
    async fn look_by_reading(&self, bucket: &str, key: &str) -> Option<Answer<HeadObjectResult, HeadObjectError, C>> {
        let headers = self.metadata.gets.expect(key);
        let fetch = small_files::fetch(&self.inner, bucket, key, &self.buffers);
        match self.watchdog.watch(AnswerKind::Long, fetch).await.unwrap_or(SmallFile::Unknown) {
            SmallFile::Absent => Some(Err(ObjectClientError::ServiceError(HeadObjectError::NotFound))),
            SmallFile::Unknown => None,
            SmallFile::Content(content) => {
                let found = headers.found()?;
                let is_whole = small_files::is_small(found.size) && content.len() as u64 == found.size;
                if !is_whole || !is_content_of(&content, &found.etag) {
                    return None;
                }
                let content = future::ready(Some(content)).boxed();
                self.small_files.keep(Instant::now(), key, &found.etag, found.size, content);
                Some(Ok(values::head_result(&found)))
            }
        }
    }
}

type Answer<T, E, C> = ObjectClientResult<T, E, <C as ObjectClient>::ClientError>;

/// Input/output error for the application, and the cause in the log.
fn internal<E>(cause: impl std::error::Error + Send + Sync + 'static) -> ObjectClientError<E, S3RequestError> {
    ObjectClientError::ClientError(S3RequestError::InternalError(Box::new(cause)))
}

#[async_trait]
impl<C> ObjectClient for StoreClient<C>
where
    C: ObjectClient<ClientError = S3RequestError> + Clone + Send + Sync + 'static,
    C::PutObjectRequest: PutObjectRequest + Sync,
{
    type GetObjectResponse = C::GetObjectResponse;
    type PutObjectRequest = Upload<C>;
    type ClientError = C::ClientError;

    fn read_part_size(&self) -> usize {
        self.inner.read_part_size()
    }

    fn write_part_size(&self) -> usize {
        self.inner.write_part_size()
    }

    fn initial_read_window_size(&self) -> Option<usize> {
        self.inner.initial_read_window_size()
    }

    fn mem_usage_stats(&self) -> Option<BufferPoolUsageStats> {
        self.inner.mem_usage_stats()
    }

    async fn delete_object(&self, bucket: &str, key: &str) -> Answer<DeleteObjectResult, DeleteObjectError, C> {
        let deleted = self.patient(AnswerKind::Short, || self.inner.delete_object(bucket, key)).await;
        if let Some(listings) = &self.listings {
            listings.forget_pages(key);
        }
        deleted
    }

    async fn copy_object(
        &self,
        source_bucket: &str,
        source_key: &str,
        destination_bucket: &str,
        destination_key: &str,
        params: &CopyObjectParams,
    ) -> Answer<CopyObjectResult, CopyObjectError, C> {
        let copy = self.inner.copy_object(source_bucket, source_key, destination_bucket, destination_key, params);
        let copied = self.watched(AnswerKind::Long, copy).await;
        self.note_changed(destination_key);
        copied
    }

    async fn get_object(
        &self,
        bucket: &str,
        key: &str,
        params: &GetObjectParams,
    ) -> Answer<Self::GetObjectResponse, GetObjectError, C> {
        self.patient(AnswerKind::Long, || self.inner.get_object(bucket, key, params)).await
    }

    async fn list_objects(
        &self,
        bucket: &str,
        continuation_token: Option<&str>,
        delimiter: &str,
        max_keys: usize,
        prefix: &str,
    ) -> Answer<ListObjectsResult, ListObjectsError, C> {
        let ask = self.page(bucket, continuation_token, delimiter, max_keys, prefix);
        let is_first = continuation_token.is_none() && delimiter == "/" && prefix.ends_with('/');
        // This is how the file system looks for a directory.
        if is_first && max_keys == 1 {
            if self.removed.contains(prefix) {
                return Ok(values::nothing_listed());
            }
            let ask = async {
                if self.is_only_a_file(bucket, prefix).await {
                    return Ok(values::nothing_listed());
                }
                match self.look_by_listing(bucket, prefix).await {
                    Some(found) => Ok(found.one_name()),
                    None => ask.await,
                }
            };
            return self.unless_absent(prefix, || Ok(values::nothing_listed()), ask).await;
        }
        if is_first
            && let Some(requested) = self.listed_page(bucket, prefix)
            && let Some(found) = requested.await
        {
            // What this listing shows must not be contradicted by an older one.
            if let Some(listings) = &self.listings {
                listings.forget(prefix);
            }
            self.note_listed(bucket, delimiter, max_keys, prefix, &found.page);
            return Ok(found.whole());
        }
        if let Some(next) = self.next_page(prefix, continuation_token)
            && let Some(found) = next.await
        {
            self.note_listed(bucket, delimiter, max_keys, prefix, &found.page);
            return Ok(found.whole());
        }
        let changes = self.listings.as_ref().map_or(0, |it| it.first_pages.changes());
        let page = ask.await;
        if let Some(listings) = &self.listings {
            listings.forget(prefix);
        }
        if let Ok(page) = &page {
            self.note_listed(bucket, delimiter, max_keys, prefix, page);
            if is_first {
                self.keep_short(max_keys, prefix, page, changes);
            }
        }
        page
    }

    async fn head_object(
        &self,
        bucket: &str,
        key: &str,
        params: &HeadObjectParams,
    ) -> Answer<HeadObjectResult, HeadObjectError, C> {
        let absent = || Err(ObjectClientError::ServiceError(HeadObjectError::NotFound));
        if self.usage == ClientUsage::Names && self.removed.contains(key) {
            return absent();
        }
        let mut took = None;
        let ask = async {
            // A directory hides an object of the same name.
            let directory = format!("{key}/");
            if self.look_by_listing(bucket, &directory).await.is_some_and(|it| it.is_directory()) {
                return absent();
            }
            let start = Instant::now();
            let found = self.look_at_object(bucket, key, params).await;
            took = Some(start.elapsed());
            found
        };
        let is_expected = self.usage == ClientUsage::Names && self.small_files.expects_read(key);
        let look = self.listings.as_ref().filter(|_| is_expected).map(|it| it.siblings.look(key));
        let found = self.unless_absent(key, absent, ask).await;
        if let Some(look) = look {
            look.answer(found.is_ok());
        }
        if found.is_ok() {
            self.note_there(key);
        }
        self.note_look(bucket, key, took);
        found
    }

    async fn put_object(
        &self,
        bucket: &str,
        key: &str,
        params: &PutObjectParams,
    ) -> Answer<Self::PutObjectRequest, PutObjectError, C> {
        Ok(Upload::new(self, bucket, key, params.clone()))
    }

    async fn put_object_single(
        &self,
        bucket: &str,
        key: &str,
        params: &PutObjectSingleParams,
        contents: impl AsRef<[u8]> + Send + 'static,
    ) -> Answer<PutObjectResult, PutObjectError, C> {
        let contents = Bytes::from_owner(contents);
        let put = || self.inner.put_object_single(bucket, key, params, contents.clone());
        let put = self.patient(AnswerKind::Long, put).await;
        self.note_changed(key);
        put
    }

    async fn get_object_attributes(
        &self,
        bucket: &str,
        key: &str,
        max_parts: Option<usize>,
        part_number_marker: Option<usize>,
        object_attributes: &[ObjectAttribute],
    ) -> Answer<GetObjectAttributesResult, GetObjectAttributesError, C> {
        let ask = || self.inner.get_object_attributes(bucket, key, max_parts, part_number_marker, object_attributes);
        self.patient(AnswerKind::Short, ask).await
    }

    async fn rename_object(
        &self,
        bucket: &str,
        source_key: &str,
        destination_key: &str,
        params: &RenameObjectParams,
    ) -> Answer<RenameObjectResult, RenameObjectError, C> {
        let renamed = match &*self.moves {
            Moves::Native => self.inner.rename_object(bucket, source_key, destination_key, params).await,
            Moves::Copy(copy) => copy
                .move_object(&self.inner, bucket, source_key, destination_key, params)
                .await
                .map(|()| values::moved()),
            Moves::Refused => Err(ObjectClientError::ServiceError(RenameObjectError::NotImplementedError)),
        };
        self.note_changed(source_key);
        self.note_changed(destination_key);
        renamed
    }
}
