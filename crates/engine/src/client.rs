//! What S3-compatible stores need and AWS's client does not do: moves that cannot lose data, empty files with every
//! checksum setting, small files as one request. A wrapper around any client; the file system does not notice it.

mod ahead;
mod budget;
mod listings;
mod moves;
mod upload;
mod values;

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures::FutureExt as _;
use futures::future::{self, Either};
use mountpoint_s3_client::error::{
    CopyObjectError, DeleteObjectError, GetObjectAttributesError, GetObjectError, HeadObjectError, ListObjectsError,
    ObjectClientError, PutObjectError, RenameObjectError,
};
use mountpoint_s3_client::types::{
    CopyObjectParams, CopyObjectResult, DeleteObjectResult, GetObjectAttributesResult, GetObjectParams,
    HeadObjectParams, HeadObjectResult, ListObjectsResult, ObjectAttribute, ObjectClientResult, PutObjectParams,
    PutObjectResult, PutObjectSingleParams, RenameObjectParams, RenameObjectResult,
};
use mountpoint_s3_client::{ObjectClient, PutObjectRequest};
use mountpoint_s3_crt::s3::client::BufferPoolUsageStats;

pub use ahead::{Ahead, Fetch, is_content_of};
pub use budget::MemoryBudget;
pub use listings::{BELIEVED as LISTING_BELIEVED, Listings};
pub use moves::Moves;
pub use upload::Upload;

/// A client for any S3-compatible store.
#[derive(Clone)]
pub struct StoreClient<C> {
    pub inner: C,
    pub moves: Arc<Moves>,
    /// Memory for small files until they are complete.
    pub buffers: Arc<MemoryBudget>,
    /// Small files that are fetched while they are looked up.
    pub ahead: Arc<Ahead>,
    /// Listings that say what is not there. Without them every look asks the server.
    pub listings: Option<Arc<Listings>>,
}

impl<C> StoreClient<C>
where
    C: ObjectClient + Clone + Send + Sync + 'static,
{
    /// The answer "absent" if a listing knows better or earlier than the server, else the server's.
    async fn unless_absent<T>(&self, key: &str, absent: impl FnOnce() -> T, ask: impl Future<Output = T>) -> T {
        let Some(listings) = &self.listings else { return ask.await };
        let coming = match listings.answer(Instant::now(), key) {
            listings::Answer::Absent => return absent(),
            listings::Answer::Unknown => return ask.await,
            listings::Answer::Coming(coming) => coming,
        };
        match future::select(coming, std::pin::pin!(ask)).await {
            Either::Left((_, ask)) => match listings.answer(Instant::now(), key) {
                listings::Answer::Absent => absent(),
                listings::Answer::Unknown | listings::Answer::Coming(_) => ask.await,
            },
            Either::Right((answer, _)) => answer,
        }
    }

    /// Notes a look at an object, and lists its directory if more are to come.
    fn note_look(&self, bucket: &str, key: &str, took: Option<Duration>) {
        let Some(listings) = &self.listings else { return };
        if let Some(directory) = listings.looked(Instant::now(), key, took) {
            let names = listings::list(self.inner.clone(), bucket, directory);
            listings.keep(Instant::now(), directory, names.clone());
            // This sends the request; whoever needs the answer will wait for it.
            let _ = names.now_or_never();
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
        let head = self.inner.head_object(bucket, key, params);
        if !self.ahead.expects_read(key) {
            return head.await;
        }
        let fetch = ahead::fetch(self.inner.clone(), bucket, key, &self.buffers);
        let (found, fetch) = match future::select(head, fetch).await {
            Either::Left((found, fetch)) => (found, fetch),
            Either::Right((content, head)) => (head.await, future::ready(content).boxed()),
        };
        match &found {
            Ok(object) if ahead::is_small(object.size) => {
                self.ahead.keep(Instant::now(), key, object.etag.as_str(), object.size, fetch);
            }
            Ok(_) | Err(_) => self.ahead.note_waste(Instant::now(), key),
        }
        found
    }
}

type Answer<T, E, C> = ObjectClientResult<T, E, <C as ObjectClient>::ClientError>;

#[async_trait]
impl<C> ObjectClient for StoreClient<C>
where
    C: ObjectClient + Clone + Send + Sync + 'static,
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
        self.inner.delete_object(bucket, key).await
    }

    async fn copy_object(
        &self,
        source_bucket: &str,
        source_key: &str,
        destination_bucket: &str,
        destination_key: &str,
        params: &CopyObjectParams,
    ) -> Answer<CopyObjectResult, CopyObjectError, C> {
        let copied =
            self.inner.copy_object(source_bucket, source_key, destination_bucket, destination_key, params).await;
        self.note_there(destination_key);
        copied
    }

    async fn get_object(
        &self,
        bucket: &str,
        key: &str,
        params: &GetObjectParams,
    ) -> Answer<Self::GetObjectResponse, GetObjectError, C> {
        self.inner.get_object(bucket, key, params).await
    }

    async fn list_objects(
        &self,
        bucket: &str,
        continuation_token: Option<&str>,
        delimiter: &str,
        max_keys: usize,
        prefix: &str,
    ) -> Answer<ListObjectsResult, ListObjectsError, C> {
        let ask = self.inner.list_objects(bucket, continuation_token, delimiter, max_keys, prefix);
        // This is how the file system looks for a directory.
        let is_look = max_keys == 1 && continuation_token.is_none() && delimiter == "/" && prefix.ends_with('/');
        if is_look {
            return self.unless_absent(prefix, || Ok(values::nothing_listed()), ask).await;
        }
        let page = ask.await;
        if let Some(listings) = &self.listings {
            listings.forget(prefix);
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
        let mut took = None;
        let ask = async {
            let start = Instant::now();
            let found = self.look_at_object(bucket, key, params).await;
            took = Some(start.elapsed());
            found
        };
        let found = self.unless_absent(key, absent, ask).await;
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
        let put = self.inner.put_object_single(bucket, key, params, contents).await;
        self.note_there(key);
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
        self.inner.get_object_attributes(bucket, key, max_parts, part_number_marker, object_attributes).await
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
        self.note_there(destination_key);
        renamed
    }
}
