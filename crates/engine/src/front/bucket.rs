//! Object requests that the front makes by itself, blocking: for staged files, directories and metadata.

use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use futures::StreamExt as _;
use futures::executor::block_on;
use mountpoint_s3_client::checksums::{crc32c, crc64nvme};
use mountpoint_s3_client::error::{
    GetObjectError, HeadObjectError, ObjectClientError, PutObjectError, RenameObjectError,
};
use mountpoint_s3_client::types::{
    ChecksumAlgorithm, ClientBackpressureHandle as _, ETag, GetObjectParams, GetObjectResponse as _, HeadObjectParams,
    PutObjectParams, PutObjectSingleParams, PutObjectTrailingChecksums, UploadChecksum,
};
use mountpoint_s3_client::{ObjectClient, PutObjectRequest as _};
use mountpoint_s3_fs::content_type::{ContentTypeDetection, infer_content_type};
use mountpoint_s3_fs::fs::UploadChecksumAlgorithm;

use super::FsError;
use crate::client::{
    Listings, ObjectHeaders, PartsDigest, RawClient, RawConfig, StoreTimeout, UserMetadata, copy_verified, encoded,
    single_params,
};

#[derive(Clone, Debug, thiserror::Error)]
pub enum BucketError {
    #[error("the object was changed by another client")]
    Changed,

    #[error("{operation} of {key:?} failed: {reason}")]
    Failed { operation: &'static str, key: String, reason: String },
}

impl From<BucketError> for FsError {
    fn from(error: BucketError) -> Self {
        let errno = match &error {
            BucketError::Changed => libc::ESTALE,
            BucketError::Failed { .. } => libc::EIO,
        };
        FsError::new(errno, error.to_string())
    }
}

/// How new objects are stored, by the options of the mount.
#[derive(Clone, Debug)]
pub struct UploadSettings {
    pub checksum: Option<UploadChecksumAlgorithm>,
    pub storage_class: Option<String>,
    pub encryption: Option<String>,
    pub encryption_key: Option<String>,
    pub content_type: ContentTypeDetection,
}

/// What must be true of the object that is replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteCondition<'a> {
    None,
    /// It has this `ETag`.
    Matches(&'a str),
}

/// What HEAD says of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectFacts {
    pub size: u64,
    pub etag: String,
}

pub struct Bucket<C> {
    client: C,
    name: String,
    prefix: String,
    settings: UploadSettings,
    /// The store has refused a conditional write as not implemented.
    lacks_conditions: AtomicBool,
    /// Whether the store was seen to copy an object onto itself with other metadata.
    copies_metadata: OnceLock<bool>,
    raw: Raw,
    /// Of the client: what it listed before a change that it does not see is dropped.
    listings: Option<Arc<Listings>>,
    timeout: StoreTimeout,
}

/// A client for requests that the library has no method for, made when the first one is sent.
struct Raw {
    config: RawConfig,
    client: OnceLock<Option<RawClient>>,
}

impl<C> Bucket<C>
where
    C: ObjectClient + Clone + Send + Sync + 'static,
{
    pub fn new(
        client: C,
        name: String,
        prefix: String,
        settings: UploadSettings,
        raw: RawConfig,
        listings: Option<Arc<Listings>>,
        timeout: StoreTimeout,
    ) -> Self {
        Self {
            client,
            name,
            prefix,
            settings,
            lacks_conditions: AtomicBool::new(false),
            copies_metadata: OnceLock::new(),
            raw: Raw { config: raw, client: OnceLock::new() },
            listings,
            timeout,
        }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// An object was changed by the raw client, or may have been.
    pub fn note_changed(&self, key: &str) {
        if let Some(listings) = &self.listings {
            listings.note_changed(key);
        }
    }

    /// None if it cannot be made; the log says why.
    pub fn raw_client(&self) -> Option<&RawClient> {
        let make = || {
            RawClient::new(self.raw.config.clone())
                .inspect_err(|error| tracing::warn!(%error, "changed files are uploaded as a whole"))
                .ok()
        };
        self.raw.client.get_or_init(make).as_ref()
    }

    /// Headers of a new object, as `put` sends them.
    pub fn new_object_headers(&self, key: &str, metadata: &UserMetadata) -> Vec<(String, String)> {
        let settings = &self.settings;
        let mut headers: Vec<(String, String)> =
            metadata.iter().map(|(name, value)| (format!("x-amz-meta-{name}"), value.clone())).collect();
        let mut add = |name: &str, value: Option<String>| headers.extend(value.map(|it| (name.to_owned(), it)));
        add("Content-Type", self.content_type(key));
        add("x-amz-storage-class", settings.storage_class.clone());
        add("x-amz-server-side-encryption", settings.encryption.clone());
        add("x-amz-server-side-encryption-aws-kms-key-id", settings.encryption_key.clone());
        headers
    }

    /// The key of a path below the mount point.
    pub fn key(&self, path: &Path) -> Result<String, FsError> {
        let path = path.to_str().ok_or_else(|| FsError::new(libc::EINVAL, "the name is not valid UTF-8".into()))?;
        Ok(format!("{}{}", self.prefix, path.trim_start_matches('/')))
    }

    /// Reads a part of the object with this `ETag`.
    pub fn fetch(&self, key: &str, etag: &str, range: Range<u64>) -> Result<Bytes, BucketError> {
        let length = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        if length == 0 {
            return Ok(Bytes::new());
        }
        let params = GetObjectParams::new().range(Some(range)).if_match(Some(ETag::from(etag)));
        let failed_get = |error: ObjectClientError<GetObjectError, C::ClientError>| match &error {
            ObjectClientError::ServiceError(GetObjectError::PreconditionFailed(_)) => BucketError::Changed,
            error => failed("GetObject", key, error),
        };
        let ask = || async {
            let mut response = self.client.get_object(&self.name, key, &params).await?;
            if let Some(handle) = response.backpressure_handle() {
                handle.increment_read_window(length);
            }
            let mut response = std::pin::pin!(response);
            // All of it, if it is not longer than the library's parts.
            let first = response.next().await.transpose()?.map(|it| it.data).unwrap_or_default();
            let mut next = response.next().await.transpose()?;
            if next.is_none() {
                return Ok(first);
            }
            let mut content = Vec::with_capacity(length);
            content.extend_from_slice(&first);
            while let Some(part) = next.filter(|_| content.len() <= length) {
                content.extend_from_slice(&part.data);
                next = response.next().await.transpose()?;
            }
            Ok(content.into())
        };
        let content = block_on(self.timeout.repeat(ask)).map_err(failed_get)?;
        if content.len() != length {
            let reason = format!("the response has {} bytes instead of {length}", content.len());
            return Err(BucketError::Failed { operation: "GetObject", key: key.to_owned(), reason });
        }
        Ok(content)
    }

    /// Stores an object by one request. Answers its `ETag`.
    pub fn put(
        &self,
        key: &str,
        content: Vec<u8>,
        condition: WriteCondition<'_>,
        metadata: &UserMetadata,
    ) -> Result<String, BucketError> {
        let condition = if self.lacks_conditions.load(Ordering::Relaxed) { WriteCondition::None } else { condition };
        let mut params = single_params(self.upload_params(key, metadata)).checksum(self.checksum(&content));
        if let WriteCondition::Matches(etag) = condition {
            params = params.if_match(Some(ETag::from(etag)));
        }
        let retry = (condition != WriteCondition::None).then(|| content.clone());
        match block_on(self.client.put_object_single(&self.name, key, &params, content)) {
            Ok(stored) => Ok(stored.etag.as_str().to_owned()),
            Err(ObjectClientError::ServiceError(PutObjectError::PreconditionFailed)) => Err(BucketError::Changed),
            Err(ObjectClientError::ServiceError(PutObjectError::NotImplemented)) if retry.is_some() => {
                self.lacks_conditions.store(true, Ordering::Relaxed);
                tracing::warn!("this store does not support conditional writes: the last writer wins");
                self.put(key, retry.unwrap_or_default(), WriteCondition::None, metadata)
            }
            Err(error) => Err(failed("PutObject", key, &error)),
        }
    }

    /// Stores a large object as a multipart upload of these pieces. Answers its `ETag`. The digest of the object is noted before it
    /// can be in the bucket.
    pub fn upload(
        &self,
        key: &str,
        metadata: &UserMetadata,
        pieces: impl Iterator<Item = Result<Vec<u8>, FsError>>,
        note: impl FnOnce(String) -> Result<(), FsError>,
    ) -> Result<String, FsError> {
        let checksums = match self.settings.checksum {
            Some(UploadChecksumAlgorithm::Crc32c) => PutObjectTrailingChecksums::Composite(ChecksumAlgorithm::Crc32c),
            Some(UploadChecksumAlgorithm::Crc64nvme) | None => {
                PutObjectTrailingChecksums::ReviewOnly(ChecksumAlgorithm::Crc32c)
            }
        };
        let params = self.upload_params(key, metadata).trailing_checksums(checksums);
        let put = |error| FsError::from(failed("PutObject", key, &error));
        // Each piece is fetched, if need be, outside of what waits for the upload.
        let mut request = block_on(self.client.put_object(&self.name, key, &params)).map_err(put)?;
        let mut digest = PartsDigest::new(self.client.write_part_size());
        for piece in pieces {
            let piece = piece?;
            digest.update(&piece);
            block_on(request.write(&piece)).map_err(put)?;
        }
        note(digest.finish())?;
        Ok(block_on(request.complete()).map_err(put)?.etag.as_str().to_owned())
    }

    fn upload_params(&self, key: &str, metadata: &UserMetadata) -> PutObjectParams {
        let mut params = PutObjectParams::new()
            .server_side_encryption(self.settings.encryption.clone())
            .ssekms_key_id(self.settings.encryption_key.clone())
            .object_metadata(metadata.clone());
        if let Some(storage_class) = &self.settings.storage_class {
            params = params.storage_class(storage_class.clone());
        }
        if let Some(content_type) = self.content_type(key) {
            params = params.add_custom_header("Content-Type".into(), content_type);
        }
        params
    }

    pub fn head(&self, key: &str) -> Result<Option<ObjectFacts>, BucketError> {
        match block_on(self.client.head_object(&self.name, key, &HeadObjectParams::new())) {
            Ok(head) => Ok(Some(ObjectFacts { size: head.size, etag: head.etag.as_str().to_owned() })),
            Err(ObjectClientError::ServiceError(HeadObjectError::NotFound)) => Ok(None),
            Err(error) => Err(failed("HeadObject", key, &error)),
        }
    }

    /// Copies the object onto itself with other metadata.
    pub fn replace_metadata(&self, key: &str, metadata: &UserMetadata, headers: &ObjectHeaders) -> Result<(), FsError> {
        // A store that ignores the order to copy would replace the object by an empty one.
        if !*self.copies_metadata.get_or_init(|| self.prove_metadata_copy(key)) {
            return Err(FsError::new(libc::ENOTSUP, "this store does not copy objects with other metadata".into()));
        }
        self.copy_onto_itself(key, metadata, headers)
    }

    /// Tries it with a tiny object beside the key.
    fn prove_metadata_copy(&self, key: &str) -> bool {
        let directory = key.trim_end_matches('/').rfind('/').map_or("", |slash| &key[..=slash]);
        let scratch = format!("{directory}.s3csi-metadata-check-{}", std::process::id());
        let content = b"copy me".to_vec();
        let size = content.len() as u64;
        let proven = self.put(&scratch, content, WriteCondition::None, &UserMetadata::new()).is_ok()
            && self.copy_onto_itself(&scratch, &UserMetadata::new(), &ObjectHeaders::default()).is_ok()
            && self.head(&scratch).ok().flatten().is_some_and(|it| it.size == size);
        let _ = self.delete(&scratch);
        if !proven {
            tracing::warn!(
                "this store does not copy objects with other metadata; attributes of stored files cannot be changed"
            );
        }
        proven
    }

    fn copy_onto_itself(&self, key: &str, metadata: &UserMetadata, headers: &ObjectHeaders) -> Result<(), FsError> {
        let mut params = PutObjectSingleParams::new()
            .server_side_encryption(self.settings.encryption.clone())
            .ssekms_key_id(self.settings.encryption_key.clone())
            .object_metadata(metadata.clone())
            .add_custom_header("x-amz-copy-source".into(), format!("/{}/{}", self.name, encoded(key)))
            .add_custom_header("x-amz-metadata-directive".into(), "REPLACE".into());
        if !headers.etag.is_empty() {
            params = params.add_custom_header("x-amz-copy-source-if-match".into(), headers.etag.clone());
        }
        for (name, value) in &headers.others {
            params = params.add_custom_header(name.clone(), value.clone());
        }
        match block_on(self.client.put_object_single(&self.name, key, &params, Vec::new())) {
            // The library looks for the `ETag` among the headers; a copy has it in the body.
            Err(ObjectClientError::ClientError(error)) if chain(&error).contains("\"ETag\" not found") => Ok(()),
            Err(ObjectClientError::ServiceError(PutObjectError::PreconditionFailed)) => {
                Err(BucketError::Changed.into())
            }
            Ok(_) => Ok(()),
            Err(error) => Err(failed("CopyObject", key, &error).into()),
        }
    }

    /// Copies an object and compares the result. Answers the `ETag` of the copy.
    pub fn copy(&self, key: &str, copy: &str) -> Result<String, FsError> {
        block_on(copy_verified(&self.client, &self.name, key, copy)).map_err(|error| match error {
            ObjectClientError::ServiceError(RenameObjectError::NotImplementedError) => {
                FsError::new(libc::ENOTSUP, "this store does not copy objects".into())
            }
            error => failed("CopyObject", key, &error).into(),
        })
    }

    pub fn delete(&self, key: &str) -> Result<(), BucketError> {
        block_on(self.client.delete_object(&self.name, key))
            .map(drop)
            .map_err(|error| failed("DeleteObject", key, &error))
    }

    /// Up to `most` keys that start with `prefix`.
    pub fn list(&self, prefix: &str, most: usize) -> Result<Vec<String>, BucketError> {
        let mut keys = Vec::new();
        let mut next: Option<String> = None;
        while keys.len() < most {
            let page = block_on(self.client.list_objects(&self.name, next.as_deref(), "", most.min(1000), prefix))
                .map_err(|error| failed("ListObjectsV2", prefix, &error))?;
            keys.extend(page.objects.into_iter().map(|it| it.key));
            next = page.next_continuation_token;
            if next.is_none() {
                break;
            }
        }
        Ok(keys)
    }

    fn checksum(&self, content: &[u8]) -> Option<UploadChecksum> {
        match self.settings.checksum? {
            UploadChecksumAlgorithm::Crc32c => Some(UploadChecksum::Crc32c(crc32c::checksum(content))),
            UploadChecksumAlgorithm::Crc64nvme => Some(UploadChecksum::Crc64nvme(crc64nvme::checksum(content))),
        }
    }

    fn content_type(&self, key: &str) -> Option<String> {
        if key.ends_with('/') {
            return Some("application/x-directory".into());
        }
        infer_content_type(key, self.settings.content_type)
    }
}

fn failed<E, S>(operation: &'static str, key: &str, error: &ObjectClientError<E, S>) -> BucketError
where
    E: std::error::Error,
    S: std::error::Error,
{
    let reason = match error {
        ObjectClientError::ServiceError(error) => chain(error),
        ObjectClientError::ClientError(error) => chain(error),
    };
    BucketError::Failed { operation, key: key.to_owned(), reason }
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        next = cause.source();
    }
    text
}
