//! Whole buckets: who makes and ends them, what is noted on them, and everything that is in one, version by version.

use std::collections::BTreeMap;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use s3s::dto::{
    CreateBucketInput, CreateBucketOutput, DeleteBucketInput, DeleteBucketOutput, EncodingType, GetBucketTaggingInput,
    GetBucketTaggingOutput, ListObjectVersionsInput, ListObjectVersionsOutput, ObjectVersion, PutBucketTaggingInput,
    PutBucketTaggingOutput, Tag,
};
use s3s::{S3Request, S3Response, S3Result, s3_error};

use crate::TaggingSupport;
use crate::data::{Listing, StoredBucket};
use crate::operations::{Operations, limit, signed, small, tag};

impl Operations {
    pub(crate) fn make_bucket(
        &self,
        request: S3Request<CreateBucketInput>,
    ) -> S3Result<S3Response<CreateBucketOutput>> {
        let access_key = request.credentials.map(|it| it.access_key).unwrap_or_default();
        let mut data = self.write();
        let owner = data.account_of(&access_key).to_owned();
        match data.buckets.get(&request.input.bucket) {
            Some(it) if it.owner == owner => return Err(s3_error!(BucketAlreadyOwnedByYou)),
            Some(_) => {
                return Err(s3_error!(BucketAlreadyExists, "The requested bucket name is not available."));
            }
            None => {}
        }
        let configuration = request.input.create_bucket_configuration;
        let constraint = configuration.and_then(|it| it.location_constraint).map(|it| it.as_str().to_owned());
        let location = Some(format!("/{}", request.input.bucket));
        let bucket = StoredBucket { location: constraint, ..StoredBucket::new(&owner) };
        data.buckets.insert(request.input.bucket, bucket);
        Ok(S3Response::new(CreateBucketOutput { location }))
    }

    pub(crate) fn end_bucket(
        &self,
        request: &S3Request<DeleteBucketInput>,
    ) -> S3Result<S3Response<DeleteBucketOutput>> {
        let name = &request.input.bucket;
        let mut data = self.write();
        if !data.bucket(name)?.objects.is_empty() {
            return Err(s3_error!(BucketNotEmpty, "The bucket you tried to delete is not empty"));
        }
        data.buckets.remove(name);
        data.uploads.retain(|_, it| it.bucket != *name);
        Ok(S3Response::new(DeleteBucketOutput::default()))
    }

    pub(crate) fn tags(
        &self,
        request: &S3Request<GetBucketTaggingInput>,
    ) -> S3Result<S3Response<GetBucketTaggingOutput>> {
        self.check_tagging()?;
        let data = self.read();
        let tags = &data.bucket(&request.input.bucket)?.tags;
        if tags.is_empty() {
            return Err(s3_error!(NoSuchTagSet, "The TagSet does not exist"));
        }
        let tag_set = tags.iter().map(|(key, value)| Tag { key: Some(key.clone()), value: Some(value.clone()) });
        Ok(S3Response::new(GetBucketTaggingOutput { tag_set: tag_set.collect() }))
    }

    pub(crate) fn tag(
        &self,
        request: S3Request<PutBucketTaggingInput>,
    ) -> S3Result<S3Response<PutBucketTaggingOutput>> {
        self.check_tagging()?;
        let tags = request.input.tagging.tag_set.into_iter();
        let tags: BTreeMap<String, String> = tags.filter_map(|it| Some((it.key?, it.value?))).collect();
        // What AWS documents: 128 and 256 characters of letters, digits, spaces and a few signs.
        let is_allowed = |text: &str| text.chars().all(|it| it.is_alphanumeric() || " +-=._:/@".contains(it));
        let is_fine = |(key, value): (&String, &String)| {
            key.len() <= 128 && value.len() <= 256 && is_allowed(key) && is_allowed(value)
        };
        if !tags.iter().all(is_fine) {
            return Err(s3_error!(InvalidTag));
        }
        self.write().bucket_mut(&request.input.bucket)?.tags = tags;
        Ok(S3Response::new(PutBucketTaggingOutput::default()))
    }

    fn check_tagging(&self) -> S3Result<()> {
        match self.tagging {
            TaggingSupport::Supported => Ok(()),
            TaggingSupport::Refused => Err(s3_error!(NotImplemented)),
        }
    }

    /// Nothing here is versioned, so that each object has the one version that S3 calls `null`.
    pub(crate) fn versions(
        &self,
        request: S3Request<ListObjectVersionsInput>,
    ) -> S3Result<S3Response<ListObjectVersionsOutput>> {
        let input = request.input;
        let data = self.read();
        let page = data.bucket(&input.bucket)?.page(&Listing {
            prefix: input.prefix.as_deref().unwrap_or_default(),
            delimiter: None,
            after: input.key_marker.as_deref().unwrap_or_default(),
            limit: limit(input.max_keys),
        });
        let encoding = input.encoding_type;
        let versions = page.objects.iter().map(|(key, object)| ObjectVersion {
            key: Some(encoded(key, encoding.as_ref())),
            version_id: Some("null".to_owned()),
            is_latest: Some(true),
            e_tag: Some(tag(object)),
            size: Some(signed(object.size)),
            last_modified: Some(object.modified.into()),
            ..ObjectVersion::default()
        });
        Ok(S3Response::new(ListObjectVersionsOutput {
            versions: Some(versions.collect()),
            is_truncated: Some(page.next.is_some()),
            next_key_marker: page.next.clone(),
            next_version_id_marker: page.next.as_ref().map(|_| "null".to_owned()),
            max_keys: Some(small(limit(input.max_keys))),
            name: Some(input.bucket),
            prefix: input.prefix,
            key_marker: input.key_marker,
            encoding_type: encoding.clone(),
            ..ListObjectVersionsOutput::default()
        }))
    }
}

/// Keys may contain characters that XML cannot carry: clients ask for them URL-encoded.
pub(crate) fn encoded(key: &str, encoding: Option<&EncodingType>) -> String {
    const RESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'/').remove(b' ');
    match encoding.map(EncodingType::as_str) {
        Some(EncodingType::URL) => utf8_percent_encode(key, RESERVED).to_string().replace(' ', "+"),
        Some(_) | None => key.to_owned(),
    }
}
