//! The calls to S3, each bounded in time, and their failures as kinds that we act upon.

use aws_sdk_s3::Client;
use aws_sdk_s3::config::http::HttpResponse;
use aws_sdk_s3::error::{ProvideErrorMetadata, SdkError};
use aws_sdk_s3::primitives::ByteStream;
use aws_sdk_s3::types::{BucketLocationConstraint, CreateBucketConfiguration, Delete, ObjectIdentifier, Tag, Tagging};
use md5::{Digest as _, Md5};
use s3csi_core::bucket::BucketName;

use super::error::{Kind, S3Error};

/// A store in the name of one account.
pub struct Store {
    client: Client,
    /// The region that requests are signed for: the store's own.
    region: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Made {
    Now,
    /// It was there, and it is ours by the store's own account of owners.
    Before,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    Done,
    /// Something is there already.
    Taken,
}

/// One object to delete; without a version the newest is meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Doomed {
    pub key: String,
    pub version: Option<String>,
}

/// A part of a listing, and where the next one begins.
pub struct Page<T> {
    pub items: Vec<T>,
    pub is_last: bool,
}

/// What S3 takes in one request.
pub const BATCH: usize = 1000;

impl Store {
    pub fn new(client: Client, region: String) -> Self {
        Self { client, region }
    }

    pub async fn create_bucket(&self, bucket: &BucketName, region: Option<&str>) -> Result<Made, S3Error> {
        let mut request = self.client.create_bucket().bucket(bucket.as_str());
        // AWS refuses the region of its own endpoint as a constraint; other stores have buckets there without one.
        if let Some(region) = region.filter(|it| *it != self.region) {
            let constraint = BucketLocationConstraint::from(region);
            let configuration = CreateBucketConfiguration::builder().location_constraint(constraint).build();
            request = request.create_bucket_configuration(configuration);
        }
        match request.send().await.map_err(|error| failed("CreateBucket", bucket, &error)) {
            Ok(_) => Ok(Made::Now),
            Err(error) if error.kind == Kind::OwnedBefore => Ok(Made::Before),
            Err(error) => Err(error),
        }
    }

    pub async fn delete_bucket(&self, bucket: &BucketName) -> Result<(), S3Error> {
        let sent = self.client.delete_bucket().bucket(bucket.as_str()).send().await;
        match sent.map_err(|error| failed("DeleteBucket", bucket, &error)) {
            Ok(_) => Ok(()),
            Err(error) if error.kind == Kind::NoSuchBucket => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Whether there is such a bucket, whoever it belongs to.
    pub async fn exists(&self, bucket: &BucketName) -> Result<bool, S3Error> {
        let sent = self.client.list_objects_v2().bucket(bucket.as_str()).max_keys(1).send().await;
        match sent.map_err(|error| failed("ListObjectsV2", bucket, &error)) {
            Ok(_) => Ok(true),
            Err(error) if error.kind == Kind::NoSuchBucket => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// `None` if the store knows no tags of buckets.
    pub async fn bucket_tags(&self, bucket: &BucketName) -> Result<Option<Vec<(String, String)>>, S3Error> {
        let sent = self.client.get_bucket_tagging().bucket(bucket.as_str()).send().await;
        match sent.map_err(|error| failed("GetBucketTagging", bucket, &error)) {
            Ok(answer) => Ok(Some(answer.tag_set.into_iter().map(|it| (it.key, it.value)).collect())),
            Err(error) if error.code() == Some("NoSuchTagSet") => Ok(Some(Vec::new())),
            Err(error) if error.kind == Kind::NotSupported => Ok(None),
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

    /// A small object of ours.
    pub async fn read(&self, bucket: &BucketName, key: &str) -> Result<Option<String>, S3Error> {
        /// No note of ours is longer; what is, is none.
        const LONGEST_BYTES: &str = "bytes=0-16383";
        let sent = self.client.get_object().bucket(bucket.as_str()).key(key).range(LONGEST_BYTES).send().await;
        let answer = match sent.map_err(|error| failed("GetObject", bucket, &error)) {
            Ok(answer) => answer,
            Err(error) if error.kind == Kind::NoSuchKey => return Ok(None),
            Err(error) => return Err(error),
        };
        let content = answer.body.collect().await.map_err(|error| S3Error {
            operation: "GetObject",
            bucket: bucket.to_string(),
            kind: Kind::Unreachable,
            said: format!("the answer broke off: {error}"),
            code: None,
        })?;
        Ok(Some(String::from_utf8_lossy(&content.into_bytes()).into_owned()))
    }

    /// Writes a small object, unless there is one of that name.
    pub async fn put_new(&self, bucket: &BucketName, key: &str, content: &str) -> Result<Put, S3Error> {
        let body = ByteStream::from(content.as_bytes().to_vec());
        let request = self.client.put_object().bucket(bucket.as_str()).key(key).body(body);
        let sent = request.if_none_match("*").content_type("text/plain").send().await;
        match sent.map_err(|error| failed("PutObject", bucket, &error)) {
            Ok(_) => Ok(Put::Done),
            Err(error) if error.kind == Kind::Taken => Ok(Put::Taken),
            Err(error) => Err(error),
        }
    }

    /// The first objects under `prefix`, with their versions and delete markers where the store keeps any.
    pub async fn versions(&self, bucket: &BucketName, prefix: &str, limit: usize) -> Result<Page<Doomed>, S3Error> {
        let limit = i32::try_from(limit).unwrap_or(i32::MAX);
        let request = self.client.list_object_versions().bucket(bucket.as_str()).prefix(prefix).max_keys(limit);
        let answer = match request.send().await.map_err(|error| failed("ListObjectVersions", bucket, &error)) {
            Ok(answer) => answer,
            Err(error) if error.kind == Kind::NotSupported => return self.objects(bucket, prefix, limit).await,
            Err(error) => return Err(error),
        };
        let versions = answer.versions.into_iter().flatten().map(|it| (it.key, it.version_id));
        let markers = answer.delete_markers.into_iter().flatten().map(|it| (it.key, it.version_id));
        let items = versions.chain(markers).filter_map(|(key, version)| Some(Doomed { key: key?, version }));
        Ok(Page { items: items.collect(), is_last: !answer.is_truncated.unwrap_or(false) })
    }

    async fn objects(&self, bucket: &BucketName, prefix: &str, limit: i32) -> Result<Page<Doomed>, S3Error> {
        let request = self.client.list_objects_v2().bucket(bucket.as_str()).prefix(prefix).max_keys(limit);
        let answer = request.send().await.map_err(|error| failed("ListObjectsV2", bucket, &error))?;
        let keys = answer.contents.into_iter().flatten().filter_map(|it| it.key);
        let items = keys.map(|key| Doomed { key, version: None }).collect();
        Ok(Page { items, is_last: !answer.is_truncated.unwrap_or(false) })
    }

    /// At most [`BATCH`] at once.
    pub async fn delete_objects(&self, bucket: &BucketName, doomed: &[Doomed]) -> Result<(), S3Error> {
        let objects = doomed.iter().filter_map(|it| {
            // "null" is the version of what was written without versioning; stores without any need not understand it.
            let version = it.version.clone().filter(|it| it != "null" && !it.is_empty());
            ObjectIdentifier::builder().key(&it.key).set_version_id(version).build().ok()
        });
        let Ok(delete) = Delete::builder().set_objects(Some(objects.collect())).quiet(true).build() else {
            return Ok(());
        };
        let request = self.client.delete_objects().bucket(bucket.as_str()).delete(delete);
        let sent = request.customize().mutate_request(add_digest).send().await;
        let answer = sent.map_err(|error| failed("DeleteObjects", bucket, &error))?;
        match answer.errors.into_iter().flatten().next() {
            None => Ok(()),
            Some(error) => {
                let code = error.code.unwrap_or_default();
                let (key, message) = (error.key.unwrap_or_default(), error.message.unwrap_or_default());
                Err(S3Error {
                    operation: "DeleteObjects",
                    bucket: bucket.to_string(),
                    kind: Kind::of(Some(&code), None),
                    said: format!("{code} for {key:?}: {message}"),
                    code: Some(code),
                })
            }
        }
    }

    /// Key and ID of the first uploads in progress under `prefix`.
    pub async fn uploads(&self, bucket: &BucketName, prefix: &str) -> Result<Vec<(String, String)>, S3Error> {
        let sent = self.client.list_multipart_uploads().bucket(bucket.as_str()).prefix(prefix).send().await;
        match sent.map_err(|error| failed("ListMultipartUploads", bucket, &error)) {
            Ok(answer) => {
                let uploads = answer.uploads.into_iter().flatten();
                Ok(uploads.filter_map(|it| Some((it.key?, it.upload_id?))).collect())
            }
            Err(error) if error.kind == Kind::NotSupported => Ok(Vec::new()),
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

/// S3 asks for a digest with these requests. Newer checksums are sent by the library; older stores only know this one.
fn add_digest(request: &mut aws_sdk_s3::config::http::HttpRequest) {
    if let Some(body) = request.body().bytes() {
        let digest = base64(&Md5::digest(body));
        request.headers_mut().insert("content-md5", digest);
    }
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let bits = chunk.iter().fold(0_u32, |bits, byte| (bits << 8) | u32::from(*byte)) << (8 * (3 - chunk.len()));
        for position in 0..4 {
            let digit = DIGITS[((bits >> (18 - 6 * position)) & 63) as usize];
            text.push(if position <= chunk.len() { char::from(digit) } else { '=' });
        }
    }
    text
}

fn failed<E>(operation: &'static str, bucket: &BucketName, error: &SdkError<E, HttpResponse>) -> S3Error
where
    E: ProvideErrorMetadata + std::error::Error + 'static,
{
    let bucket = bucket.to_string();
    let of_transport = |kind, error: &dyn std::error::Error| S3Error {
        operation,
        bucket: bucket.clone(),
        kind,
        said: s3csi_core::chain::Chain(error).to_string(),
        code: None,
    };
    match error {
        SdkError::ServiceError(answer) => {
            let (code, status) = (answer.err().code(), answer.raw().status().as_u16());
            let message = answer.err().message().unwrap_or_default();
            let said = match code {
                Some(code) => format!("S3 answered {code} ({status}): {message}"),
                None => format!("S3 answered {status}"),
            };
            let kind = Kind::of(code, Some(status));
            S3Error { operation, bucket, kind, said, code: code.map(str::to_owned) }
        }
        SdkError::TimeoutError(_) => of_transport(Kind::Late, error),
        SdkError::DispatchFailure(failure) if failure.is_timeout() => of_transport(Kind::Late, error),
        SdkError::DispatchFailure(_) | SdkError::ResponseError(_) => of_transport(Kind::Unreachable, error),
        _ => of_transport(Kind::Other, error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_as_everybody_writes_it() {
        for (bytes, expected) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("\u{ff}\u{fe}", "w7/Dvg=="),
        ] {
            assert_eq!(base64(bytes.as_bytes()), expected);
        }
    }
}
