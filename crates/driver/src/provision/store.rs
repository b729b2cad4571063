//! Requests to S3, each with a deadline, and typed errors.

use aws_sdk_s3::Client;
use aws_sdk_s3::config::http::HttpResponse;
use aws_sdk_s3::error::{ProvideErrorMetadata, SdkError};
use aws_sdk_s3::primitives::ByteStream;
use aws_sdk_s3::types::{
    BucketLocationConstraint, CreateBucketConfiguration, Delete, EncodingType, ObjectIdentifier, Tag, Tagging,
};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use md5::{Digest as _, Md5};
use percent_encoding::percent_decode_str;
use s3csi_core::Chain;
use s3csi_core::bucket::BucketName;
use s3csi_core::publish::AuthenticationSource;
use s3csi_core::text::shortened;

use super::error::{S3Error, S3ErrorKind};

/// A store, accessed with one set of credentials.
pub struct S3Store {
    client: Client,
    /// Whose keys these are.
    source: AuthenticationSource,
    /// The region that requests are signed for.
    region: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BucketCreation {
    Created,
    /// It existed, and the store says that this account owns it.
    AlreadyOwned,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutOutcome {
    Created,
    /// There is an object with this key already.
    Exists,
}

/// An object to delete; without a version the current one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ObjectToDelete {
    pub key: String,
    pub version: Option<String>,
}

/// Whether a bucket has versions to name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BucketVersioning {
    /// Versioning is or was enabled. What was written before has the version `null`.
    Used,
    /// Never enabled, or not supported: stores without versions need not understand any.
    NeverUsed,
}

/// A page of a listing.
pub struct Page<T> {
    pub items: Vec<T>,
}

/// S3's limit for one request.
pub const BATCH: usize = 1000;

/// Answers of a store are not trusted: their messages end up in the log, in Events and in gRPC statuses.
const MAX_MESSAGE_BYTES: usize = 1024;
const MAX_CODE_BYTES: usize = 64;

/// More buckets than accounts have; the list of a hostile store is endless.
const MAX_BUCKETS: usize = 100_000;

impl S3Store {
    pub fn new(client: Client, source: AuthenticationSource, region: String) -> Self {
        Self { client, source, region }
    }

    pub const fn source(&self) -> AuthenticationSource {
        self.source
    }

    pub async fn create_bucket(&self, bucket: &BucketName, region: Option<&str>) -> Result<BucketCreation, S3Error> {
        // AWS rejects the region of its own endpoint as a constraint; other stores create buckets there without one.
        let constraint = region.filter(|it| *it != self.region);
        match self.try_create_bucket(bucket, constraint).await {
            // Earlier drivers ignored the region of a StorageClass, so classes exist whose region the store has never heard of.
            Err(error) if constraint.is_some() && error.code() == Some("InvalidLocationConstraint") => {
                tracing::warn!(%bucket, region, %error, "location constraint refused, creating the bucket without it");
                self.try_create_bucket(bucket, None).await
            }
            outcome => outcome,
        }
    }

    async fn try_create_bucket(
        &self,
        bucket: &BucketName,
        constraint: Option<&str>,
    ) -> Result<BucketCreation, S3Error> {
        let mut request = self.client.create_bucket().bucket(bucket.as_str());
        if let Some(region) = constraint {
            let constraint = BucketLocationConstraint::from(region);
            let configuration = CreateBucketConfiguration::builder().location_constraint(constraint).build();
            request = request.create_bucket_configuration(configuration);
        }
        match request.send().await.map_err(|error| failed("CreateBucket", bucket, &error)) {
            Ok(_) => Ok(BucketCreation::Created),
            Err(error) if error.kind == S3ErrorKind::AlreadyOwned => Ok(BucketCreation::AlreadyOwned),
            Err(error) => Err(error),
        }
    }

    pub async fn delete_bucket(&self, bucket: &BucketName) -> Result<(), S3Error> {
        let sent = self.client.delete_bucket().bucket(bucket.as_str()).send().await;
        match sent.map_err(|error| failed("DeleteBucket", bucket, &error)) {
            Ok(_) => Ok(()),
            Err(error) if error.kind == S3ErrorKind::NoSuchBucket => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Whether there is such a bucket, of any account.
    pub async fn exists(&self, bucket: &BucketName) -> Result<bool, S3Error> {
        let sent = self.client.list_objects_v2().bucket(bucket.as_str()).max_keys(1).send().await;
        match sent.map_err(|error| failed("ListObjectsV2", bucket, &error)) {
            Ok(_) => Ok(true),
            Err(error) if error.kind == S3ErrorKind::NoSuchBucket => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Names of all buckets of this account.
    pub async fn owned_buckets(&self) -> Result<Vec<String>, S3Error> {
        let mut names = Vec::new();
        let mut continuation = None;
        loop {
            let sent = self.client.list_buckets().set_continuation_token(continuation).send().await;
            let answer = sent.map_err(|error| failed_for("ListBuckets", String::new(), &error))?;
            names.extend(answer.buckets.into_iter().flatten().filter_map(|it| it.name));
            continuation = answer.continuation_token.filter(|it| !it.is_empty());
            if continuation.is_none() || MAX_BUCKETS <= names.len() {
                return Ok(names);
            }
        }
    }

    /// `None` if the store does not support bucket tags.
    pub async fn bucket_tags(&self, bucket: &BucketName) -> Result<Option<Vec<(String, String)>>, S3Error> {
        let sent = self.client.get_bucket_tagging().bucket(bucket.as_str()).send().await;
        match sent.map_err(|error| failed("GetBucketTagging", bucket, &error)) {
            Ok(answer) => Ok(Some(answer.tag_set.into_iter().map(|it| (it.key, it.value)).collect())),
            Err(error) if error.code() == Some("NoSuchTagSet") => Ok(Some(Vec::new())),
            Err(error) if error.kind == S3ErrorKind::NotSupported => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub async fn tag_bucket(&self, bucket: &BucketName, tags: &[(&'static str, String)]) -> Result<(), S3Error> {
        let tags = tags.iter().filter_map(|(key, value)| Tag::builder().key(*key).value(value).build().ok());
        let Ok(tagging) = Tagging::builder().set_tag_set(Some(tags.collect())).build() else {
            return Ok(());
        };
        let request = self.client.put_bucket_tagging().bucket(bucket.as_str()).tagging(tagging);
        let sent = request.customize().mutate_request(add_digest).send().await;
        sent.map(drop).map_err(|error| failed("PutBucketTagging", bucket, &error))
    }

    /// Reads a small object of ours.
    pub async fn read(&self, bucket: &BucketName, key: &str) -> Result<Option<String>, S3Error> {
        /// No metadata of ours are longer.
        const LONGEST_BYTES: &str = "bytes=0-16383";
        let sent = self.client.get_object().bucket(bucket.as_str()).key(key).range(LONGEST_BYTES).send().await;
        let answer = match sent.map_err(|error| failed("GetObject", bucket, &error)) {
            Ok(answer) => answer,
            Err(error) if error.kind == S3ErrorKind::NoSuchKey => return Ok(None),
            Err(error) => return Err(error),
        };
        let content = answer.body.collect().await.map_err(|error| S3Error {
            operation: "GetObject",
            bucket: bucket.to_string(),
            kind: S3ErrorKind::Unreachable,
            message: shortened(&format!("the response was interrupted: {}", Chain(&error)), MAX_MESSAGE_BYTES),
            code: None,
        })?;
        Ok(Some(String::from_utf8_lossy(&content.into_bytes()).into_owned()))
    }

    /// Writes a small object unless the key exists.
    pub async fn put_new(&self, bucket: &BucketName, key: &str, content: &str) -> Result<PutOutcome, S3Error> {
        let body = ByteStream::from(content.as_bytes().to_vec());
        let request = self.client.put_object().bucket(bucket.as_str()).key(key).body(body);
        let sent = request.if_none_match("*").content_type("text/plain").send().await;
        match sent.map_err(|error| failed("PutObject", bucket, &error)) {
            Ok(_) => Ok(PutOutcome::Created),
            Err(error) if error.kind == S3ErrorKind::KeyExists => Ok(PutOutcome::Exists),
            Err(error) => Err(error),
        }
    }

    pub async fn versioning(&self, bucket: &BucketName) -> Result<BucketVersioning, S3Error> {
        let sent = self.client.get_bucket_versioning().bucket(bucket.as_str()).send().await;
        match sent.map_err(|error| failed("GetBucketVersioning", bucket, &error)) {
            Ok(answer) if answer.status.is_some() => Ok(BucketVersioning::Used),
            Ok(_) => Ok(BucketVersioning::NeverUsed),
            Err(error) if error.kind == S3ErrorKind::NotSupported => Ok(BucketVersioning::NeverUsed),
            // Where it is supported but not allowed, naming a version is understood.
            Err(error) if error.kind == S3ErrorKind::Denied => Ok(BucketVersioning::Used),
            Err(error) => Err(error),
        }
    }

    /// The first objects under `prefix`, with versions and delete markers if the store has any.
    pub async fn versions(
        &self,
        bucket: &BucketName,
        prefix: &str,
        limit: usize,
    ) -> Result<Page<ObjectToDelete>, S3Error> {
        let limit = i32::try_from(limit).unwrap_or(i32::MAX);
        let request = self.client.list_object_versions().bucket(bucket.as_str()).prefix(prefix).max_keys(limit);
        // XML cannot carry every character that keys may contain.
        let request = request.encoding_type(EncodingType::Url);
        let answer = match request.send().await.map_err(|error| failed("ListObjectVersions", bucket, &error)) {
            Ok(answer) => answer,
            Err(error) if error.kind == S3ErrorKind::NotSupported => return self.objects(bucket, prefix, limit).await,
            Err(error) => return Err(error),
        };
        let decode = decoder(answer.encoding_type.as_ref());
        let versions = answer.versions.into_iter().flatten().map(|it| (it.key, it.version_id));
        let markers = answer.delete_markers.into_iter().flatten().map(|it| (it.key, it.version_id));
        let items = versions.chain(markers).filter_map(|(key, version)| {
            Some(ObjectToDelete { key: decode(key?), version: version.filter(|it| !it.is_empty()) })
        });
        Ok(Page { items: items.collect() })
    }

    async fn objects(&self, bucket: &BucketName, prefix: &str, limit: i32) -> Result<Page<ObjectToDelete>, S3Error> {
        let (keys, _) = self.keys(bucket, prefix, limit, None).await?;
        Ok(Page { items: keys.into_iter().map(|key| ObjectToDelete { key, version: None }).collect() })
    }

    /// Keys of current objects under `prefix`, and where the next page begins.
    pub async fn keys(
        &self,
        bucket: &BucketName,
        prefix: &str,
        limit: i32,
        continuation: Option<String>,
    ) -> Result<(Vec<String>, Option<String>), S3Error> {
        let request = self.client.list_objects_v2().bucket(bucket.as_str()).prefix(prefix).max_keys(limit);
        let request = request.encoding_type(EncodingType::Url).set_continuation_token(continuation);
        let answer = request.send().await.map_err(|error| failed("ListObjectsV2", bucket, &error))?;
        let decode = decoder(answer.encoding_type.as_ref());
        let keys = answer.contents.into_iter().flatten().filter_map(|it| it.key).map(decode).collect();
        let next = answer.next_continuation_token.filter(|_| answer.is_truncated == Some(true));
        Ok((keys, next))
    }

    /// At most [`BATCH`] at once.
    pub async fn delete_objects(&self, bucket: &BucketName, objects: &[ObjectToDelete]) -> Result<(), S3Error> {
        let (in_batch, alone): (Vec<_>, Vec<_>) = objects.iter().partition(|it| fits_into_xml(&it.key));
        for ObjectToDelete { key, version } in alone {
            let request = self.client.delete_object().bucket(bucket.as_str()).key(key);
            let sent = request.set_version_id(version.clone()).send().await;
            match sent.map_err(|error| failed("DeleteObject", bucket, &error)) {
                Ok(_) => {}
                Err(error) if error.kind == S3ErrorKind::NoSuchKey => {}
                Err(error) => return Err(error),
            }
        }
        self.delete_batch(bucket, &in_batch).await
    }

    async fn delete_batch(&self, bucket: &BucketName, objects: &[&ObjectToDelete]) -> Result<(), S3Error> {
        let identifiers = objects
            .iter()
            .filter_map(|it| ObjectIdentifier::builder().key(&it.key).set_version_id(it.version.clone()).build().ok());
        let Ok(delete) = Delete::builder().set_objects(Some(identifiers.collect())).quiet(true).build() else {
            return Ok(());
        };
        if objects.is_empty() {
            return Ok(());
        }
        let request = self.client.delete_objects().bucket(bucket.as_str()).delete(delete);
        let sent = request.customize().mutate_request(add_digest).send().await;
        let answer = sent.map_err(|error| failed("DeleteObjects", bucket, &error))?;
        match answer.errors.into_iter().flatten().next() {
            None => Ok(()),
            Some(error) => {
                let code = shortened(&error.code.unwrap_or_default(), MAX_CODE_BYTES);
                let (key, message) = (error.key.unwrap_or_default(), error.message.unwrap_or_default());
                Err(S3Error {
                    operation: "DeleteObjects",
                    bucket: bucket.to_string(),
                    kind: S3ErrorKind::of(Some(&code), None),
                    message: shortened(&format!("{code} for {key:?}: {message}"), MAX_MESSAGE_BYTES),
                    code: Some(code),
                })
            }
        }
    }

    /// Key and ID of the first uploads in progress under `prefix`.
    pub async fn uploads(&self, bucket: &BucketName, prefix: &str) -> Result<Vec<(String, String)>, S3Error> {
        let request = self.client.list_multipart_uploads().bucket(bucket.as_str()).prefix(prefix);
        let sent = request.encoding_type(EncodingType::Url).send().await;
        match sent.map_err(|error| failed("ListMultipartUploads", bucket, &error)) {
            Ok(answer) => {
                let decode = decoder(answer.encoding_type.as_ref());
                let uploads = answer.uploads.into_iter().flatten();
                Ok(uploads.filter_map(|it| Some((decode(it.key?), it.upload_id?))).collect())
            }
            Err(error) if error.kind == S3ErrorKind::NotSupported => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    pub async fn abort_upload(&self, bucket: &BucketName, key: &str, upload: &str) -> Result<(), S3Error> {
        let request = self.client.abort_multipart_upload().bucket(bucket.as_str()).key(key).upload_id(upload);
        match request.send().await.map_err(|error| failed("AbortMultipartUpload", bucket, &error)) {
            Ok(_) => Ok(()),
            Err(error) if error.code() == Some("NoSuchUpload") => Ok(()),
            Err(error) => Err(error),
        }
    }
}

/// Decodes keys if the store encoded them, which it says in its answer. A space is encoded as `+` or `%20`, a plus sign as `%2B`.
fn decoder(encoding: Option<&EncodingType>) -> fn(String) -> String {
    match encoding {
        Some(EncodingType::Url) => |key| percent_decode_str(&key.replace('+', " ")).decode_utf8_lossy().into_owned(),
        Some(_) | None => |key| key,
    }
}

/// Whether the body of `DeleteObjects` can name this key: XML 1.0 has no control characters, and parsers may change line breaks
/// and white space at the ends.
fn fits_into_xml(key: &str) -> bool {
    let is_allowed = |it: char| !it.is_control() && !matches!(it, '\u{fffe}' | '\u{ffff}');
    key.chars().all(is_allowed) && key.trim() == key
}

/// S3 requires a digest with these requests. The library sends newer checksums; older stores support only this one.
fn add_digest(request: &mut aws_sdk_s3::config::http::HttpRequest) {
    if let Some(body) = request.body().bytes() {
        let digest = BASE64_STANDARD.encode(Md5::digest(body));
        request.headers_mut().insert("content-md5", digest);
    }
}

fn failed<E>(operation: &'static str, bucket: &BucketName, error: &SdkError<E, HttpResponse>) -> S3Error
where
    E: ProvideErrorMetadata + std::error::Error + 'static,
{
    failed_for(operation, bucket.to_string(), error)
}

fn failed_for<E>(operation: &'static str, bucket: String, error: &SdkError<E, HttpResponse>) -> S3Error
where
    E: ProvideErrorMetadata + std::error::Error + 'static,
{
    let (kind, code, message) = match error {
        SdkError::ServiceError(answer) => {
            let (code, status) = (answer.err().code(), answer.raw().status().as_u16());
            let code = code.map(|it| shortened(it, MAX_CODE_BYTES));
            let message = answer.err().message().unwrap_or_default();
            let message = match &code {
                Some(code) => format!("S3 answered {code} ({status}): {message}"),
                None => format!("S3 answered {status}"),
            };
            (S3ErrorKind::of(code.as_deref(), Some(status)), code, message)
        }
        SdkError::TimeoutError(_) => (S3ErrorKind::Timeout, None, Chain(error).to_string()),
        SdkError::DispatchFailure(failure) if failure.is_timeout() => {
            (S3ErrorKind::Timeout, None, Chain(error).to_string())
        }
        SdkError::DispatchFailure(_) | SdkError::ResponseError(_) => {
            (S3ErrorKind::Unreachable, None, Chain(error).to_string())
        }
        _ => (S3ErrorKind::Other, None, Chain(error).to_string()),
    };
    S3Error { operation, bucket, kind, message: shortened(&message, MAX_MESSAGE_BYTES), code }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn keys_that_xml_cannot_carry_are_deleted_one_by_one() {
        for key in ["a", "dir/file name", "ä", "a&b<c>"] {
            assert!(fits_into_xml(key), "{key:?}");
        }
        for key in ["a\nb", "\u{1}", "a\r", " a", "a ", "\u{ffff}", "\u{85}"] {
            assert!(!fits_into_xml(key), "{key:?}");
        }
    }

    #[test]
    fn keys_are_decoded_if_the_store_encoded_them() {
        let encoded = "a+b%2Bc%20d/%01%C3%A4".to_owned();
        assert_eq!(decoder(Some(&EncodingType::Url))(encoded.clone()), "a b+c d/\u{1}ä");
        assert_eq!(decoder(None)(encoded.clone()), encoded);
    }

    proptest! {
        #[test]
        fn decoding_never_panics(key in any::<String>()) {
            let _ = decoder(Some(&EncodingType::Url))(key);
        }
    }
}
