//! The S3 operations over `Data`: translates requests and answers, nothing else.
//! What is not here answers 501, as a real server does with what it does not know.

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::SystemTime;

use bytes::Bytes;
use s3s::dto::{
    AbortMultipartUploadInput, AbortMultipartUploadOutput, Checksum, ChecksumType, CommonPrefix,
    CompleteMultipartUploadInput, CompleteMultipartUploadOutput, CopyObjectInput, CopyObjectOutput, CopyObjectResult,
    CopySource, CreateBucketInput, CreateBucketOutput, CreateMultipartUploadInput, CreateMultipartUploadOutput,
    DeleteBucketInput, DeleteBucketOutput, DeleteObjectInput, DeleteObjectOutput, DeleteObjectsInput,
    DeleteObjectsOutput, DeletedObject, ETag, GetBucketTaggingInput, GetBucketTaggingOutput, GetObjectInput,
    GetObjectOutput, HeadBucketInput, HeadBucketOutput, HeadObjectInput, HeadObjectOutput, ListBucketsInput,
    ListBucketsOutput, ListMultipartUploadsInput, ListMultipartUploadsOutput, ListObjectVersionsInput,
    ListObjectVersionsOutput, ListObjectsInput, ListObjectsOutput, ListObjectsV2Input, ListObjectsV2Output,
    ListPartsInput, ListPartsOutput, MetadataDirective, Object as Listed, ObjectStorageClass, Owner,
    PutBucketTaggingInput, PutBucketTaggingOutput, PutObjectInput, PutObjectOutput, StreamingBlob, UploadPartCopyInput,
    UploadPartCopyOutput, UploadPartInput, UploadPartOutput,
};
use s3s::{S3, S3Request, S3Response, S3Result, s3_error};

use crate::buckets::encoded;
use crate::conditions::RequestConditions;
use crate::data::{Data, Listing, ListingPage, ObjectAttributes, StoredObject, StoredPart};
use crate::upload::receive;
use crate::{CopySupport, RenameSupport, TaggingSupport};

/// The checksums that the client sent along. Requests of different operations have these fields and no common type.
macro_rules! claimed_checksum {
    ($input:ident) => {
        Checksum {
            checksum_crc32: $input.checksum_crc32,
            checksum_crc32c: $input.checksum_crc32c,
            checksum_crc64nvme: $input.checksum_crc64nvme,
            checksum_sha1: $input.checksum_sha1,
            checksum_sha256: $input.checksum_sha256,
            checksum_type: None,
        }
    };
}

pub(crate) struct Operations {
    pub data: Arc<RwLock<Data>>,
    pub copy: CopySupport,
    pub rename: RenameSupport,
    pub tagging: TaggingSupport,
}

impl Operations {
    pub(crate) fn read(&self) -> RwLockReadGuard<'_, Data> {
        self.data.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, Data> {
        self.data.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn object(&self, bucket: &str, key: &str) -> S3Result<StoredObject> {
        self.read().bucket(bucket)?.objects.get(key).cloned().ok_or_else(no_such_key)
    }

    fn rename(&self, request: &S3Request<PutObjectInput>) -> S3Result<Option<S3Response<PutObjectOutput>>> {
        let is_rename = request.uri.query().is_some_and(|it| it.split('&').any(|it| it.starts_with("renameObject")));
        if !is_rename {
            return Ok(None);
        }
        match self.rename {
            RenameSupport::Ignored => Ok(None),
            RenameSupport::Refused => Err(s3_error!(NotImplemented)),
            RenameSupport::Supported => {
                let source = request.headers.get("x-amz-rename-source").and_then(|it| it.to_str().ok());
                let Some(Ok(CopySource::Bucket { key, .. })) = source.map(CopySource::parse) else {
                    return Err(s3_error!(InvalidArgument));
                };
                let mut data = self.write();
                let bucket = data.bucket_mut(&request.input.bucket)?;
                let is_forbidden =
                    request.input.if_none_match.is_some() && bucket.objects.contains_key(&request.input.key);
                if is_forbidden {
                    return Err(s3_error!(PreconditionFailed));
                }
                let object = bucket.objects.remove(key.as_ref()).ok_or_else(no_such_key)?;
                bucket.objects.insert(request.input.key.clone(), object);
                Ok(Some(S3Response::new(PutObjectOutput::default())))
            }
        }
    }
}

fn no_such_key() -> s3s::S3Error {
    s3_error!(NoSuchKey, "The specified key does not exist.")
}

pub(crate) fn tag(object: &StoredObject) -> ETag {
    ETag::Strong(object.entity_tag.clone())
}

pub(crate) fn signed(number: impl TryInto<i64>) -> i64 {
    number.try_into().unwrap_or(i64::MAX)
}

pub(crate) fn small(number: usize) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

pub(crate) fn limit(max_keys: Option<i32>) -> usize {
    usize::try_from(max_keys.unwrap_or(1000)).unwrap_or(0).min(1000)
}

fn listed(page: &ListingPage<'_>) -> (Vec<Listed>, Vec<CommonPrefix>) {
    let objects = page.objects.iter().map(|(key, object)| Listed {
        key: Some((*key).to_owned()),
        size: Some(signed(object.size)),
        last_modified: Some(object.modified.into()),
        e_tag: Some(tag(object)),
        storage_class: Some(ObjectStorageClass::from_static(ObjectStorageClass::STANDARD)),
        ..Listed::default()
    });
    let prefixes = page.common_prefixes.iter().map(|it| CommonPrefix { prefix: Some(it.clone()) });
    (objects.collect(), prefixes.collect())
}

#[async_trait::async_trait]
impl S3 for Operations {
    async fn create_bucket(&self, request: S3Request<CreateBucketInput>) -> S3Result<S3Response<CreateBucketOutput>> {
        self.make_bucket(request)
    }

    async fn head_bucket(&self, request: S3Request<HeadBucketInput>) -> S3Result<S3Response<HeadBucketOutput>> {
        self.read().bucket(&request.input.bucket)?;
        Ok(S3Response::new(HeadBucketOutput::default()))
    }

    async fn delete_bucket(&self, request: S3Request<DeleteBucketInput>) -> S3Result<S3Response<DeleteBucketOutput>> {
        self.end_bucket(&request)
    }

    async fn get_bucket_tagging(
        &self,
        request: S3Request<GetBucketTaggingInput>,
    ) -> S3Result<S3Response<GetBucketTaggingOutput>> {
        self.tags(&request)
    }

    async fn put_bucket_tagging(
        &self,
        request: S3Request<PutBucketTaggingInput>,
    ) -> S3Result<S3Response<PutBucketTaggingOutput>> {
        self.tag(request)
    }

    async fn list_object_versions(
        &self,
        request: S3Request<ListObjectVersionsInput>,
    ) -> S3Result<S3Response<ListObjectVersionsOutput>> {
        self.versions(request)
    }

    async fn list_buckets(&self, request: S3Request<ListBucketsInput>) -> S3Result<S3Response<ListBucketsOutput>> {
        let access_key = request.credentials.map(|it| it.access_key).unwrap_or_default();
        let data = self.read();
        let owner = data.account_of(&access_key).to_owned();
        let own = data.buckets.iter().filter(|(_, bucket)| bucket.owner == owner);
        let buckets = own.map(|(name, bucket)| s3s::dto::Bucket {
            name: Some(name.clone()),
            creation_date: Some(bucket.created.into()),
            ..s3s::dto::Bucket::default()
        });
        Ok(S3Response::new(ListBucketsOutput {
            buckets: Some(buckets.collect()),
            owner: Some(Owner { id: Some(owner.clone()), display_name: Some(owner) }),
            ..ListBucketsOutput::default()
        }))
    }

    async fn list_objects_v2(
        &self,
        request: S3Request<ListObjectsV2Input>,
    ) -> S3Result<S3Response<ListObjectsV2Output>> {
        let input = request.input;
        let data = self.read();
        let page = data.bucket(&input.bucket)?.page(&Listing {
            prefix: input.prefix.as_deref().unwrap_or_default(),
            // The engine's first request carries an empty delimiter.
            delimiter: input.delimiter.as_deref().filter(|it| !it.is_empty()),
            after: input.continuation_token.as_deref().or(input.start_after.as_deref()).unwrap_or_default(),
            limit: limit(input.max_keys),
        });
        let (mut contents, common_prefixes) = listed(&page);
        let encoding = input.encoding_type;
        for object in &mut contents {
            object.key = object.key.as_ref().map(|it| encoded(it, encoding.as_ref()));
        }
        Ok(S3Response::new(ListObjectsV2Output {
            encoding_type: encoding,
            key_count: Some(small(contents.len() + common_prefixes.len())),
            max_keys: Some(small(limit(input.max_keys))),
            is_truncated: Some(page.next.is_some()),
            next_continuation_token: page.next,
            contents: Some(contents),
            common_prefixes: Some(common_prefixes),
            name: Some(input.bucket),
            prefix: input.prefix,
            delimiter: input.delimiter,
            start_after: input.start_after,
            continuation_token: input.continuation_token,
            ..ListObjectsV2Output::default()
        }))
    }

    async fn list_objects(&self, request: S3Request<ListObjectsInput>) -> S3Result<S3Response<ListObjectsOutput>> {
        let input = request.input;
        let data = self.read();
        let page = data.bucket(&input.bucket)?.page(&Listing {
            prefix: input.prefix.as_deref().unwrap_or_default(),
            delimiter: input.delimiter.as_deref().filter(|it| !it.is_empty()),
            after: input.marker.as_deref().unwrap_or_default(),
            limit: limit(input.max_keys),
        });
        let (contents, common_prefixes) = listed(&page);
        Ok(S3Response::new(ListObjectsOutput {
            max_keys: Some(small(limit(input.max_keys))),
            is_truncated: Some(page.next.is_some()),
            next_marker: page.next,
            contents: Some(contents),
            common_prefixes: Some(common_prefixes),
            name: Some(input.bucket),
            prefix: input.prefix,
            delimiter: input.delimiter,
            marker: input.marker,
            ..ListObjectsOutput::default()
        }))
    }

    async fn head_object(&self, request: S3Request<HeadObjectInput>) -> S3Result<S3Response<HeadObjectOutput>> {
        let input = request.input;
        let object = self.object(&input.bucket, &input.key)?;
        RequestConditions { if_match: input.if_match.as_ref(), ..RequestConditions::default() }.check(Some(&object))?;
        let checksum = if input.checksum_mode.is_some() { object.checksum.clone() } else { Checksum::default() };
        Ok(S3Response::new(HeadObjectOutput {
            accept_ranges: Some("bytes".to_owned()),
            content_length: Some(signed(object.size)),
            last_modified: Some(object.modified.into()),
            e_tag: Some(tag(&object)),
            checksum_crc32c: checksum.checksum_crc32c,
            checksum_crc64nvme: checksum.checksum_crc64nvme,
            metadata: object.attributes.metadata,
            content_type: object.attributes.content_type,
            storage_class: object.attributes.storage_class.map(Into::into),
            ..HeadObjectOutput::default()
        }))
    }

    async fn get_object(&self, request: S3Request<GetObjectInput>) -> S3Result<S3Response<GetObjectOutput>> {
        let input = request.input;
        let object = self.object(&input.bucket, &input.key)?;
        RequestConditions { if_match: input.if_match.as_ref(), if_none_match: input.if_none_match.as_ref() }
            .check(Some(&object))?;
        let range = match &input.range {
            Some(range) => range.check(object.size)?,
            None => 0..object.size,
        };
        let content_range = input.range.map(|_| format!("bytes {}-{}/{}", range.start, range.end - 1, object.size));
        let slices = object.slices(range.start, range.end).into_iter().map(Ok::<_, std::io::Error>);
        Ok(S3Response::new(GetObjectOutput {
            body: Some(StreamingBlob::wrap(futures::stream::iter(slices))),
            accept_ranges: Some("bytes".to_owned()),
            content_length: Some(signed(range.end - range.start)),
            content_range,
            last_modified: Some(object.modified.into()),
            e_tag: Some(tag(&object)),
            metadata: object.attributes.metadata,
            content_type: object.attributes.content_type,
            ..GetObjectOutput::default()
        }))
    }

    async fn put_object(&self, request: S3Request<PutObjectInput>) -> S3Result<S3Response<PutObjectOutput>> {
        if let Some(answer) = self.rename(&request)? {
            return Ok(answer);
        }
        if request.input.write_offset_bytes.is_some() {
            return Err(s3_error!(NotImplemented));
        }
        let input = request.input;
        let (content, checksum) = receive(input.body, claimed_checksum!(input), request.trailing_headers).await?;
        let attributes = ObjectAttributes {
            metadata: input.metadata,
            content_type: input.content_type,
            storage_class: input.storage_class.map(|it| it.as_str().to_owned()),
        };
        let object = StoredObject::whole(content, attributes, checksum.clone());
        let e_tag = Some(tag(&object));
        let when = RequestConditions { if_match: input.if_match.as_ref(), if_none_match: input.if_none_match.as_ref() };
        self.write().store(&input.bucket, input.key, object, &when)?;
        let is_checked = checksum != Checksum::default();
        Ok(S3Response::new(PutObjectOutput {
            e_tag,
            checksum_crc32c: checksum.checksum_crc32c,
            checksum_crc64nvme: checksum.checksum_crc64nvme,
            checksum_type: is_checked.then(|| ChecksumType::from_static(ChecksumType::FULL_OBJECT)),
            ..PutObjectOutput::default()
        }))
    }

    async fn delete_object(&self, request: S3Request<DeleteObjectInput>) -> S3Result<S3Response<DeleteObjectOutput>> {
        self.write().bucket_mut(&request.input.bucket)?.objects.remove(&request.input.key);
        Ok(S3Response::new(DeleteObjectOutput::default()))
    }

    async fn delete_objects(
        &self,
        request: S3Request<DeleteObjectsInput>,
    ) -> S3Result<S3Response<DeleteObjectsOutput>> {
        let mut data = self.write();
        let bucket = data.bucket_mut(&request.input.bucket)?;
        let mut deleted = Vec::new();
        for object in request.input.delete.objects {
            bucket.objects.remove(&object.key);
            deleted.push(DeletedObject { key: Some(object.key), ..DeletedObject::default() });
        }
        Ok(S3Response::new(DeleteObjectsOutput { deleted: Some(deleted), ..DeleteObjectsOutput::default() }))
    }

    async fn copy_object(&self, request: S3Request<CopyObjectInput>) -> S3Result<S3Response<CopyObjectOutput>> {
        let input = request.input;
        let CopySource::Bucket { bucket, key, .. } = &input.copy_source else {
            return Err(s3_error!(InvalidArgument));
        };
        let access_key = request.credentials.map(|it| it.access_key).unwrap_or_default();
        let data = self.read();
        data.allow(data.account_of(&access_key), bucket)?;
        drop(data);
        let mut object = match self.copy {
            CopySupport::Supported => self.object(bucket, key)?,
            CopySupport::Refused => return Err(s3_error!(NotImplemented)),
            CopySupport::Ignored => StoredObject::whole(Bytes::new(), ObjectAttributes::default(), Checksum::default()),
        };
        RequestConditions { if_match: input.copy_source_if_match.as_ref(), ..RequestConditions::default() }
            .check(Some(&object))?;
        let is_replaced = input.metadata_directive.is_some_and(|it| it.as_str() == MetadataDirective::REPLACE);
        if is_replaced {
            object.attributes.metadata = input.metadata;
            object.attributes.content_type = input.content_type;
        }
        object.modified = SystemTime::now();
        let result = CopyObjectResult {
            e_tag: Some(tag(&object)),
            last_modified: Some(object.modified.into()),
            ..CopyObjectResult::default()
        };
        self.write().store(&input.bucket, input.key, object, &RequestConditions::default())?;
        Ok(S3Response::new(CopyObjectOutput { copy_object_result: Some(result), ..CopyObjectOutput::default() }))
    }

    async fn create_multipart_upload(
        &self,
        request: S3Request<CreateMultipartUploadInput>,
    ) -> S3Result<S3Response<CreateMultipartUploadOutput>> {
        self.begin_upload(request)
    }

    async fn upload_part(&self, request: S3Request<UploadPartInput>) -> S3Result<S3Response<UploadPartOutput>> {
        let input = request.input;
        let (content, checksum) = receive(input.body, claimed_checksum!(input), request.trailing_headers).await?;
        let part = StoredPart::new(content);
        let e_tag = Some(ETag::Strong(part.entity_tag()));
        let mut data = self.write();
        let upload = data.uploads.get_mut(&input.upload_id).ok_or_else(|| s3_error!(NoSuchUpload))?;
        upload.parts.insert(input.part_number, part);
        Ok(S3Response::new(UploadPartOutput {
            e_tag,
            checksum_crc32c: checksum.checksum_crc32c,
            checksum_crc64nvme: checksum.checksum_crc64nvme,
            ..UploadPartOutput::default()
        }))
    }

    async fn upload_part_copy(
        &self,
        request: S3Request<UploadPartCopyInput>,
    ) -> S3Result<S3Response<UploadPartCopyOutput>> {
        self.copy_part(request)
    }

    async fn complete_multipart_upload(
        &self,
        request: S3Request<CompleteMultipartUploadInput>,
    ) -> S3Result<S3Response<CompleteMultipartUploadOutput>> {
        self.complete_upload(request)
    }

    async fn abort_multipart_upload(
        &self,
        request: S3Request<AbortMultipartUploadInput>,
    ) -> S3Result<S3Response<AbortMultipartUploadOutput>> {
        match self.write().uploads.remove(&request.input.upload_id) {
            Some(_) => Ok(S3Response::new(AbortMultipartUploadOutput::default())),
            None => Err(s3_error!(NoSuchUpload)),
        }
    }

    async fn list_multipart_uploads(
        &self,
        request: S3Request<ListMultipartUploadsInput>,
    ) -> S3Result<S3Response<ListMultipartUploadsOutput>> {
        self.list_uploads(request)
    }

    async fn list_parts(&self, request: S3Request<ListPartsInput>) -> S3Result<S3Response<ListPartsOutput>> {
        self.list_upload_parts(request)
    }
}
