//! Stores a large file of which only some parts were changed: the server copies the rest from the old object.

use std::fmt::Write as _;
use std::ops::Range;

use mountpoint_s3_client::ObjectClient;

use super::bucket::{Bucket, BucketError};
use super::{FsError, FsResult};
use crate::client::{RawError, RawRequest, RawResponse, UserMetadata, digest_of_parts, encoded};

/// S3 copies no larger part.
const LARGEST_COPY: u64 = 5 << 30;
const PRECONDITION_FAILED: i32 = 412;

/// One part of the new object.
pub enum Part {
    /// This range of the old object.
    Copy(Range<u64>),
    /// This range of the local copy.
    Upload(Range<u64>),
}

/// The object that is replaced.
pub struct OldObject<'a> {
    pub key: &'a str,
    pub etag: &'a str,
}

/// Why an object was not composed.
pub enum ComposeError {
    /// The store cannot do it: upload the file as a whole.
    Unsupported(String),
    Failed(FsError),
}

impl<C: ObjectClient + Clone + Send + Sync + 'static> Bucket<C> {
    /// Answers the `ETag` of the new object. Its digest is noted before it can be in the bucket.
    pub fn compose(
        &self,
        key: &str,
        old: &OldObject<'_>,
        metadata: &UserMetadata,
        parts: Vec<Part>,
        read: impl Fn(&Range<u64>) -> FsResult<Vec<u8>>,
        note: impl FnOnce(String) -> FsResult<()>,
    ) -> Result<String, ComposeError> {
        let created = self.raw(
            "CreateMultipartUpload",
            "POST",
            key,
            "uploads=".into(),
            self.new_object_headers(key, metadata),
            Vec::new(),
        )?;
        let upload = created.element("UploadId").ok_or_else(|| unsupported("the store names no upload"))?;
        let composed = self.compose_parts(key, old, &upload, parts, read, note);
        self.note_changed(key);
        if composed.is_err() {
            let _ = self.raw(
                "AbortMultipartUpload",
                "DELETE",
                key,
                format!("uploadId={}", encoded(&upload)),
                Vec::new(),
                Vec::new(),
            );
        }
        composed
    }

    fn compose_parts(
        &self,
        key: &str,
        old: &OldObject<'_>,
        upload: &str,
        parts: Vec<Part>,
        read: impl Fn(&Range<u64>) -> FsResult<Vec<u8>>,
        note: impl FnOnce(String) -> FsResult<()>,
    ) -> Result<String, ComposeError> {
        let mut etags: Vec<String> = Vec::new();
        let mut list = String::from("<CompleteMultipartUpload xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">");
        for (number, part) in (1..).zip(parts.into_iter().flat_map(split)) {
            let query = format!("partNumber={number}&uploadId={}", encoded(upload));
            let etag = match part {
                Part::Copy(range) => {
                    let headers = vec![
                        ("x-amz-copy-source".into(), format!("/{}/{}", self.name(), encoded(old.key))),
                        ("x-amz-copy-source-range".into(), format!("bytes={}-{}", range.start, range.end - 1)),
                        ("x-amz-copy-source-if-match".into(), old.etag.to_owned()),
                    ];
                    self.raw("UploadPartCopy", "PUT", key, query, headers, Vec::new())?.element("ETag")
                }
                Part::Upload(range) => {
                    let body = read(&range).map_err(ComposeError::Failed)?;
                    self.raw("UploadPart", "PUT", key, query, Vec::new(), body)?.header("ETag").map(str::to_owned)
                }
            };
            let etag = etag.ok_or_else(|| unsupported("the store answers a part without ETag"))?;
            let etag = etag.trim_matches('"');
            let _ = write!(list, "<Part><PartNumber>{number}</PartNumber><ETag>\"{etag}\"</ETag></Part>");
            etags.push(etag.to_owned());
        }
        list.push_str("</CompleteMultipartUpload>");
        if let Some(digest) = digest_of_parts(etags.iter().map(String::as_str)) {
            note(digest).map_err(ComposeError::Failed)?;
        }
        let headers = vec![("If-Match".into(), old.etag.to_owned())];
        let query = format!("uploadId={}", encoded(upload));
        let completed = self.raw("CompleteMultipartUpload", "POST", key, query, headers, list.into_bytes())?;
        completed.element("ETag").ok_or_else(|| unsupported("the store names no ETag"))
    }

    fn raw(
        &self,
        operation: &'static str,
        method: &str,
        key: &str,
        query: String,
        headers: Vec<(String, String)>,
        body: Vec<u8>,
    ) -> Result<RawResponse, ComposeError> {
        let client = self.raw_client().ok_or_else(|| unsupported("there is no client for it"))?;
        client.send(RawRequest { operation, method, key, query, headers, body }).map_err(|error| match &error {
            RawError::Refused { status: PRECONDITION_FAILED, .. } => ComposeError::Failed(BucketError::Changed.into()),
            RawError::Refused { .. } | RawError::Prepare { .. } | RawError::Unanswered { .. } => {
                ComposeError::Unsupported(error.to_string())
            }
        })
    }
}

fn split(part: Part) -> Vec<Part> {
    match part {
        Part::Copy(Range { start, end }) => {
            let mut parts = Vec::new();
            let mut at = start;
            while at < end {
                let next = (at + LARGEST_COPY).min(end);
                parts.push(Part::Copy(at..next));
                at = next;
            }
            parts
        }
        Part::Upload(range) => vec![Part::Upload(range)],
    }
}

fn unsupported(reason: &str) -> ComposeError {
    ComposeError::Unsupported(reason.to_owned())
}
