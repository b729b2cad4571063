//! Multipart uploads: begun, filled part by part, completed and listed.

use std::collections::BTreeMap;
use std::time::SystemTime;

use bytes::Bytes;
use s3s::dto::{
    CompleteMultipartUploadInput, CompleteMultipartUploadOutput, CopyPartResult, CopySource,
    CreateMultipartUploadInput, CreateMultipartUploadOutput, ETag, ListMultipartUploadsInput,
    ListMultipartUploadsOutput, ListPartsInput, ListPartsOutput, MultipartUpload, UploadPartCopyInput,
    UploadPartCopyOutput,
};
use s3s::{S3Request, S3Response, S3Result, s3_error};

use crate::buckets::encoded;
use crate::conditions::RequestConditions;
use crate::data::{ObjectAttributes, StoredObject, StoredPart, StoredUpload};
use crate::operations::{Operations, signed, tag};

/// S3 refuses smaller parts, but for the last one.
const SMALLEST_PART: usize = 5 * 1024 * 1024;

impl Operations {
    pub(crate) fn begin_upload(
        &self,
        request: S3Request<CreateMultipartUploadInput>,
    ) -> S3Result<S3Response<CreateMultipartUploadOutput>> {
        let input = request.input;
        let mut data = self.write();
        data.bucket(&input.bucket)?;
        data.uploads_ever += 1;
        let upload_id = format!("upload-{}", data.uploads_ever);
        let upload = StoredUpload {
            bucket: input.bucket.clone(),
            key: input.key.clone(),
            initiated: SystemTime::now(),
            attributes: ObjectAttributes {
                metadata: input.metadata,
                content_type: input.content_type,
                storage_class: input.storage_class.map(|it| it.as_str().to_owned()),
            },
            parts: BTreeMap::new(),
        };
        data.uploads.insert(upload_id.clone(), upload);
        Ok(S3Response::new(CreateMultipartUploadOutput {
            upload_id: Some(upload_id),
            bucket: Some(input.bucket),
            key: Some(input.key),
            checksum_algorithm: input.checksum_algorithm,
            checksum_type: input.checksum_type,
            ..CreateMultipartUploadOutput::default()
        }))
    }

    pub(crate) fn copy_part(
        &self,
        request: S3Request<UploadPartCopyInput>,
    ) -> S3Result<S3Response<UploadPartCopyOutput>> {
        let input = request.input;
        let CopySource::Bucket { bucket, key, .. } = &input.copy_source else {
            return Err(s3_error!(InvalidArgument));
        };
        let access_key = request.credentials.map(|it| it.access_key).unwrap_or_default();
        self.read().allow(&access_key, bucket)?;
        let object = self.object(bucket, key)?;
        RequestConditions { if_match: input.copy_source_if_match.as_ref(), ..RequestConditions::default() }
            .check(Some(&object))?;
        let content = Bytes::from(object.parts.concat());
        let range = input.copy_source_range.as_deref().and_then(|it| it.strip_prefix("bytes=")?.split_once('-'));
        let part = match range {
            Some((first, last)) => {
                let parse = |it: &str| it.parse::<usize>().map_err(|_| s3_error!(InvalidArgument));
                let (first, last) = (parse(first)?, parse(last)?);
                if content.len() <= last || last < first {
                    return Err(s3_error!(InvalidArgument));
                }
                StoredPart::new(content.slice(first..=last))
            }
            None => StoredPart::new(content),
        };
        let e_tag = Some(ETag::Strong(part.entity_tag()));
        let mut data = self.write();
        let upload = data.uploads.get_mut(&input.upload_id).ok_or_else(|| s3_error!(NoSuchUpload))?;
        upload.parts.insert(input.part_number, part);
        let copy_part_result = Some(CopyPartResult { e_tag, ..CopyPartResult::default() });
        Ok(S3Response::new(UploadPartCopyOutput { copy_part_result, ..UploadPartCopyOutput::default() }))
    }

    pub(crate) fn complete_upload(
        &self,
        request: S3Request<CompleteMultipartUploadInput>,
    ) -> S3Result<S3Response<CompleteMultipartUploadOutput>> {
        let input = request.input;
        let mut data = self.write();
        let upload = data.uploads.get(&input.upload_id).ok_or_else(|| s3_error!(NoSuchUpload))?;
        let wanted = input.multipart_upload.and_then(|it| it.parts).unwrap_or_default();
        if wanted.is_empty() {
            return Err(s3_error!(MalformedXML));
        }
        let mut parts = Vec::new();
        for (position, wanted_part) in wanted.iter().enumerate() {
            let part =
                wanted_part.part_number.and_then(|it| upload.parts.get(&it)).ok_or_else(|| s3_error!(InvalidPart))?;
            if wanted_part.e_tag.as_ref().is_some_and(|it| it.value() != part.entity_tag()) {
                return Err(s3_error!(InvalidPart));
            }
            if position + 1 < wanted.len() && part.content.len() < SMALLEST_PART {
                return Err(s3_error!(EntityTooSmall));
            }
            parts.push(part.clone());
        }
        let object = StoredObject::assembled(parts, upload.attributes.clone());
        let e_tag = Some(tag(&object));
        let when = RequestConditions { if_match: input.if_match.as_ref(), if_none_match: input.if_none_match.as_ref() };
        data.store(&input.bucket, input.key.clone(), object, &when)?;
        data.uploads.remove(&input.upload_id);
        Ok(S3Response::new(CompleteMultipartUploadOutput {
            bucket: Some(input.bucket),
            key: Some(input.key),
            e_tag,
            ..CompleteMultipartUploadOutput::default()
        }))
    }

    pub(crate) fn list_uploads(
        &self,
        request: S3Request<ListMultipartUploadsInput>,
    ) -> S3Result<S3Response<ListMultipartUploadsOutput>> {
        let input = request.input;
        let prefix = input.prefix.clone().unwrap_or_default();
        let data = self.read();
        data.bucket(&input.bucket)?;
        let own = data.uploads.iter().filter(|(_, it)| it.bucket == input.bucket && it.key.starts_with(&prefix));
        let encoding = input.encoding_type;
        let uploads = own.map(|(id, upload)| MultipartUpload {
            key: Some(encoded(&upload.key, encoding.as_ref())),
            upload_id: Some(id.clone()),
            initiated: Some(upload.initiated.into()),
            ..MultipartUpload::default()
        });
        Ok(S3Response::new(ListMultipartUploadsOutput {
            uploads: Some(uploads.collect()),
            bucket: Some(input.bucket),
            prefix: input.prefix,
            is_truncated: Some(false),
            encoding_type: encoding.clone(),
            ..ListMultipartUploadsOutput::default()
        }))
    }

    pub(crate) fn list_upload_parts(
        &self,
        request: S3Request<ListPartsInput>,
    ) -> S3Result<S3Response<ListPartsOutput>> {
        let input = request.input;
        let data = self.read();
        let upload = data.uploads.get(&input.upload_id).ok_or_else(|| s3_error!(NoSuchUpload))?;
        let parts = upload.parts.iter().map(|(number, part)| s3s::dto::Part {
            part_number: Some(*number),
            size: Some(signed(part.content.len())),
            e_tag: Some(ETag::Strong(part.entity_tag())),
            last_modified: Some(part.modified.into()),
            ..s3s::dto::Part::default()
        });
        Ok(S3Response::new(ListPartsOutput {
            parts: Some(parts.collect()),
            bucket: Some(input.bucket),
            key: Some(input.key),
            upload_id: Some(input.upload_id),
            is_truncated: Some(false),
            ..ListPartsOutput::default()
        }))
    }
}
