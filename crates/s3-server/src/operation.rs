//! Names an HTTP request by the S3 operation it asks for, before its signature is checked.
//! Faults and counters work on this name. It does not decide how a request is answered: that is the service's business.

use hyper::{Method, Request};
use percent_encoding::percent_decode_str;

/// The operations this server tells apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum S3Operation {
    AbortMultipartUpload,
    CompleteMultipartUpload,
    CopyObject,
    CreateBucket,
    CreateMultipartUpload,
    DeleteBucket,
    DeleteObject,
    DeleteObjects,
    GetBucketTagging,
    GetObject,
    HeadBucket,
    HeadObject,
    ListBuckets,
    ListMultipartUploads,
    ListObjectVersions,
    ListObjects,
    ListObjectsV2,
    ListParts,
    PutBucketTagging,
    PutObject,
    RenameObject,
    UploadPart,
    UploadPartCopy,
    /// Sub-resources such as `?policy` or `?acl`, and whatever S3 invents next.
    Other,
}

/// What one request was about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedRequest {
    pub operation: S3Operation,
    pub method: Method,
    /// Empty for the list of buckets.
    pub bucket: String,
    /// Empty for requests about a bucket.
    pub key: String,
}

impl RecordedRequest {
    pub fn of<B>(request: &Request<B>) -> Self {
        let path = percent_decode_str(request.uri().path()).decode_utf8_lossy().into_owned();
        let path = path.trim_start_matches('/');
        let (bucket, key) = path.split_once('/').unwrap_or((path, ""));
        let query = Query(request.uri().query().unwrap_or_default());
        let is_copy = request.headers().contains_key("x-amz-copy-source");
        let operation = match (bucket.is_empty(), key.is_empty()) {
            (true, _) => S3Operation::ListBuckets,
            (false, true) => on_bucket(request.method(), query),
            (false, false) => on_object(request.method(), query, is_copy),
        };
        Self { operation, method: request.method().clone(), bucket: bucket.to_owned(), key: key.to_owned() }
    }
}

fn on_bucket(method: &Method, query: Query<'_>) -> S3Operation {
    match *method {
        Method::GET if query.has("tagging") => S3Operation::GetBucketTagging,
        Method::PUT if query.has("tagging") => S3Operation::PutBucketTagging,
        Method::GET if query.has("versions") => S3Operation::ListObjectVersions,
        _ if query.has_subresource() => S3Operation::Other,
        Method::PUT => S3Operation::CreateBucket,
        Method::HEAD => S3Operation::HeadBucket,
        Method::DELETE => S3Operation::DeleteBucket,
        Method::POST if query.has("delete") => S3Operation::DeleteObjects,
        Method::GET if query.has("uploads") => S3Operation::ListMultipartUploads,
        Method::GET if query.has("list-type") => S3Operation::ListObjectsV2,
        Method::GET => S3Operation::ListObjects,
        _ => S3Operation::Other,
    }
}

fn on_object(method: &Method, query: Query<'_>, is_copy: bool) -> S3Operation {
    match *method {
        _ if query.has_subresource() => S3Operation::Other,
        Method::PUT if query.has("renameObject") => S3Operation::RenameObject,
        Method::PUT if query.has("partNumber") && is_copy => S3Operation::UploadPartCopy,
        Method::PUT if query.has("partNumber") => S3Operation::UploadPart,
        Method::PUT if is_copy => S3Operation::CopyObject,
        Method::PUT => S3Operation::PutObject,
        Method::HEAD => S3Operation::HeadObject,
        Method::GET if query.has("uploadId") => S3Operation::ListParts,
        Method::GET => S3Operation::GetObject,
        Method::POST if query.has("uploads") => S3Operation::CreateMultipartUpload,
        Method::POST if query.has("uploadId") => S3Operation::CompleteMultipartUpload,
        Method::DELETE if query.has("uploadId") => S3Operation::AbortMultipartUpload,
        Method::DELETE => S3Operation::DeleteObject,
        _ => S3Operation::Other,
    }
}

#[derive(Clone, Copy)]
struct Query<'a>(&'a str);

impl Query<'_> {
    fn has(self, name: &str) -> bool {
        self.0.split('&').any(|it| it.split('=').next() == Some(name))
    }

    fn has_subresource(self) -> bool {
        ["acl", "attributes", "location", "policy", "tagging", "versioning", "versions"]
            .into_iter()
            .any(|it| self.has(it))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(method: &str, uri: &str, operation: S3Operation, bucket: &str, key: &str) {
        let request = Request::builder().method(method).uri(uri).body(()).unwrap();
        let asked = RecordedRequest::of(&request);
        assert_eq!(
            (asked.operation, asked.bucket.as_str(), asked.key.as_str()),
            (operation, bucket, key),
            "{method} {uri}"
        );
    }

    #[test]
    fn requests_are_named_by_method_path_and_query() {
        check("GET", "/", S3Operation::ListBuckets, "", "");
        check("GET", "/b?list-type=2&prefix=", S3Operation::ListObjectsV2, "b", "");
        check("GET", "/b/?marker=x", S3Operation::ListObjects, "b", "");
        check("GET", "/b/?uploads", S3Operation::ListMultipartUploads, "b", "");
        check("PUT", "/b", S3Operation::CreateBucket, "b", "");
        check("PUT", "/b?tagging", S3Operation::PutBucketTagging, "b", "");
        check("GET", "/b?versions&prefix=", S3Operation::ListObjectVersions, "b", "");
        check("PUT", "/b?policy", S3Operation::Other, "b", "");
        check("POST", "/b?delete=", S3Operation::DeleteObjects, "b", "");
        check("GET", "/b/a/c%20d", S3Operation::GetObject, "b", "a/c d");
        check("PUT", "/b/x?renameObject", S3Operation::RenameObject, "b", "x");
        check("PUT", "/b/x?partNumber=1&uploadId=u", S3Operation::UploadPart, "b", "x");
        check("POST", "/b/x?uploads", S3Operation::CreateMultipartUpload, "b", "x");
        check("POST", "/b/x?uploadId=u", S3Operation::CompleteMultipartUpload, "b", "x");
        check("DELETE", "/b/x?uploadId=u", S3Operation::AbortMultipartUpload, "b", "x");
        check("DELETE", "/b/x", S3Operation::DeleteObject, "b", "x");
    }
}
