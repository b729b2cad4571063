//! What S3-compatible stores need and AWS's client does not do: moves that cannot lose data, empty files with every
//! checksum setting, small files as one request. A wrapper around any client; the file system does not notice it.

mod ahead;
mod budget;
mod moved;
mod moves;
mod upload;

use std::sync::Arc;
use std::time::Instant;

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
        self.inner.copy_object(source_bucket, source_key, destination_bucket, destination_key, params).await
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
        self.inner.list_objects(bucket, continuation_token, delimiter, max_keys, prefix).await
    }

    async fn head_object(
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

    async fn put_object(
        &self,
        bucket: &str,
        key: &str,
        params: &PutObjectParams,
    ) -> Answer<Self::PutObjectRequest, PutObjectError, C> {
        Ok(Upload::new(self.inner.clone(), bucket, key, params.clone(), &self.buffers))
    }

    async fn put_object_single(
        &self,
        bucket: &str,
        key: &str,
        params: &PutObjectSingleParams,
        contents: impl AsRef<[u8]> + Send + 'static,
    ) -> Answer<PutObjectResult, PutObjectError, C> {
        self.inner.put_object_single(bucket, key, params, contents).await
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
        match &*self.moves {
            Moves::Native => self.inner.rename_object(bucket, source_key, destination_key, params).await,
            Moves::Copy(copy) => {
                copy.move_object(&self.inner, bucket, source_key, destination_key, params).await?;
                Ok(moved::result())
            }
            Moves::Refused => Err(ObjectClientError::ServiceError(RenameObjectError::NotImplementedError)),
        }
    }
}
