//! One upload: kept in memory while it is small and then sent as a single checksummed PUT, else as a multipart upload.
//!
//! AWS's client makes a multipart upload of everything: three round trips for a file of three bytes, and an empty file is
//! silently dropped when checksums are off. At a real round trip time a single PUT is twice as fast.

use std::fmt;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use async_trait::async_trait;
use bytes::Bytes;
use mountpoint_s3_client::checksums::{crc32c, crc64nvme};
use mountpoint_s3_client::error::{ObjectClientError, PutObjectError};
use mountpoint_s3_client::types::{
    ChecksumAlgorithm, ObjectClientResult, PutObjectParams, PutObjectResult, PutObjectSingleParams,
    PutObjectTrailingChecksums, UploadChecksum, UploadReview, UploadReviewOutcome, UploadReviewPart,
};
use mountpoint_s3_client::{ObjectClient, PutObjectRequest};

use super::budget::Buffer;
use super::{Listings, MetadataCache, ObjectHeaders, StoreClient, StoreTimeout, UserMetadata};

/// S3's smallest part. A longer file may need a second part, and then multipart is the way; a shorter one never does.
pub const SMALL_FILE: usize = 5 << 20;

pub struct Upload<C: ObjectClient> {
    client: C,
    timeout: StoreTimeout,
    listings: Option<Arc<Listings>>,
    metadata: Arc<MetadataCache>,
    bucket: String,
    key: String,
    params: PutObjectParams,
    /// What was sent with the begin of a multipart upload.
    sent: UserMetadata,
    /// When something was written last.
    written: SystemTime,
    progress: Progress<C::PutObjectRequest>,
}

enum Progress<R> {
    Small(Buffer),
    Multipart(R),
}

impl<C: ObjectClient> Upload<C> {
    pub fn new(store: &StoreClient<C>, bucket: &str, key: &str, params: PutObjectParams) -> Self
    where
        C: Clone,
    {
        Self {
            client: store.inner.clone(),
            timeout: store.timeout.clone(),
            listings: store.listings.clone(),
            metadata: Arc::clone(&store.metadata),
            bucket: bucket.to_owned(),
            key: key.to_owned(),
            params,
            sent: UserMetadata::new(),
            written: SystemTime::now(),
            progress: Progress::Small(Buffer::new(&store.buffers)),
        }
    }
}

impl<C: ObjectClient> fmt::Debug for Upload<C> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Upload").field("bucket", &self.bucket).field("key", &self.key).finish_non_exhaustive()
    }
}

type Answer<T, C> = ObjectClientResult<T, PutObjectError, <C as ObjectClient>::ClientError>;

#[async_trait]
impl<C> PutObjectRequest for Upload<C>
where
    C: ObjectClient + Clone + Send + Sync + 'static,
    C::PutObjectRequest: Sync,
{
    type ClientError = C::ClientError;

    async fn write(&mut self, data: &[u8]) -> Answer<(), C> {
        self.written = SystemTime::now();
        match &mut self.progress {
            Progress::Small(buffer) => {
                if buffer.try_append(data, SMALL_FILE) {
                    return Ok(());
                }
                let sent = self.metadata.take_outgoing(&self.key);
                self.sent = sent.clone().unwrap_or_default();
                let params = with_metadata(&self.params, sent);
                let mut request = self.client.put_object(&self.bucket, &self.key, &params).await?;
                if !buffer.as_ref().is_empty() {
                    request.write(buffer.as_ref()).await?;
                }
                request.write(data).await?;
                self.progress = Progress::Multipart(request);
                Ok(())
            }
            Progress::Multipart(request) => request.write(data).await,
        }
    }

    async fn complete(self) -> Answer<PutObjectResult, C> {
        self.review_and_complete(|_| UploadReviewOutcome::Proceed(None)).await
    }

    async fn review_and_complete(
        self,
        review_callback: impl FnOnce(UploadReview) -> UploadReviewOutcome + Send + 'static,
    ) -> Answer<PutObjectResult, C> {
        // Noted when this ends, however it ends: an upload that failed for us may have succeeded for the server.
        let _stored = Stored { listings: self.listings, key: self.key.clone() };
        let buffer = match self.progress {
            Progress::Multipart(request) => {
                let stored = request.review_and_complete(review_callback).await?;
                let headers = ObjectHeaders::new(stored.etag.as_str(), self.sent).written_at(self.written);
                self.metadata.insert(&self.key, headers);
                return Ok(stored);
            }
            Progress::Small(buffer) => buffer,
        };
        // The file system compares this with the checksum it kept while the application wrote, so what we send is what
        // was written, also through our buffer.
        let checksum = checksum(&self.params.trailing_checksums, buffer.as_ref());
        if let UploadReviewOutcome::Abort = review_callback(review(&checksum, buffer.as_ref().len())) {
            return Err(ObjectClientError::ServiceError(PutObjectError::BadChecksum));
        }
        let sent = self.metadata.take_outgoing(&self.key);
        let params = single(with_metadata(&self.params, sent.clone()), checksum);
        let content = Bytes::from_owner(buffer);
        let put = || self.client.put_object_single(&self.bucket, &self.key, &params, content.clone());
        let stored = self.timeout.repeat(put).await;
        if let Ok(stored) = &stored {
            let headers = ObjectHeaders::new(stored.etag.as_str(), sent.unwrap_or_default()).written_at(self.written);
            self.metadata.insert(&self.key, headers);
        }
        stored
    }
}

/// The upload with the attributes that programs have set meanwhile.
fn with_metadata(params: &PutObjectParams, metadata: Option<UserMetadata>) -> PutObjectParams {
    let params = params.clone();
    match metadata {
        Some(metadata) => params.object_metadata(metadata),
        None => params,
    }
}

/// Dropping it notes that the object is there.
struct Stored {
    listings: Option<Arc<Listings>>,
    key: String,
}

impl Drop for Stored {
    fn drop(&mut self) {
        if let Some(listings) = &self.listings {
            listings.stored(Instant::now(), &self.key);
        }
    }
}

fn checksum(wanted: &PutObjectTrailingChecksums, content: &[u8]) -> UploadChecksum {
    match wanted.algorithm() {
        Some(ChecksumAlgorithm::Crc64nvme) => UploadChecksum::Crc64nvme(crc64nvme::checksum(content)),
        // The file system knows no third kind; without one it reviews with CRC32C.
        _ => UploadChecksum::Crc32c(crc32c::checksum(content)),
    }
}

fn review(checksum: &UploadChecksum, length: usize) -> UploadReview {
    let part = UploadReviewPart { size: length as u64, checksum: Some(checksum.to_base64()) };
    UploadReview { parts: vec![part], checksum_algorithm: Some(checksum.checksum_algorithm()) }
}

fn single(params: PutObjectParams, checksum: UploadChecksum) -> PutObjectSingleParams {
    let is_sent = match params.trailing_checksums {
        PutObjectTrailingChecksums::Composite(_) | PutObjectTrailingChecksums::FullObject(_) => true,
        PutObjectTrailingChecksums::ReviewOnly(_) | PutObjectTrailingChecksums::Disabled => false,
    };
    single_params(params).checksum(is_sent.then_some(checksum))
}

/// The same settings for an upload by one request; its checksum is missing.
pub fn single_params(params: PutObjectParams) -> PutObjectSingleParams {
    let mut single = PutObjectSingleParams::new()
        .server_side_encryption(params.server_side_encryption)
        .ssekms_key_id(params.ssekms_key_id)
        .object_metadata(params.object_metadata);
    if let Some(storage_class) = params.storage_class {
        single = single.storage_class(storage_class);
    }
    for (name, value) in params.custom_headers {
        single = single.add_custom_header(name, value);
    }
    single
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(wanted: PutObjectTrailingChecksums, sent: Option<&str>) {
        let checksum = checksum(&wanted, b"123456789");
        let params = PutObjectParams::new()
            .trailing_checksums(wanted)
            .storage_class("COLD".into())
            .add_custom_header("Content-Type".into(), "text/plain".into());
        let single = single(params, checksum);
        assert_eq!(single.checksum.map(|it| it.to_base64()).as_deref(), sent);
        assert_eq!(single.storage_class.as_deref(), Some("COLD"));
        assert_eq!(single.custom_headers, [("Content-Type".to_owned(), "text/plain".to_owned())]);
    }

    #[test]
    fn the_checksum_is_sent_unless_it_is_only_for_review() {
        check(PutObjectTrailingChecksums::Composite(ChecksumAlgorithm::Crc32c), Some("4waSgw=="));
        check(PutObjectTrailingChecksums::FullObject(ChecksumAlgorithm::Crc64nvme), Some("rosUhgp5mIg="));
        check(PutObjectTrailingChecksums::ReviewOnly(ChecksumAlgorithm::Crc32c), None);
        check(PutObjectTrailingChecksums::Disabled, None);
    }

    #[test]
    fn an_empty_file_is_reviewed_as_one_empty_part_with_a_checksum() {
        let checksum = checksum(&PutObjectTrailingChecksums::ReviewOnly(ChecksumAlgorithm::Crc32c), b"");
        let review = review(&checksum, 0);
        assert_eq!(
            (review.parts.len(), review.parts[0].size, review.parts[0].checksum.as_deref()),
            (1, 0, Some("AAAAAA=="))
        );
    }
}
