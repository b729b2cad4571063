//! Buckets of the same name in different accounts, as stores with tenants have them: a bucket that is stored as `account:name` is what
//! this account finds under `name`.

use s3s::dto::{
    AbortMultipartUploadInput, CompleteMultipartUploadInput, CreateMultipartUploadInput, DeleteObjectInput,
    GetObjectAttributesInput, GetObjectInput, HeadBucketInput, HeadObjectInput, ListMultipartUploadsInput,
    ListObjectsInput, ListObjectsV2Input, PutObjectInput, UploadPartInput,
};

use crate::data::Data;

impl Data {
    /// The name under which a bucket is stored that `account` asks for.
    pub fn stored_name(&self, account: &str, bucket: &str) -> String {
        let own = format!("{account}:{bucket}");
        if self.buckets.contains_key(&own) { own } else { bucket.to_owned() }
    }
}

/// A request for one bucket.
pub(crate) trait NamesBucket {
    fn bucket(&mut self) -> &mut String;
}

macro_rules! names_bucket {
    ($($input:ty),* $(,)?) => {
        $(impl NamesBucket for $input {
            fn bucket(&mut self) -> &mut String {
                &mut self.bucket
            }
        })*
    };
}

names_bucket!(
    AbortMultipartUploadInput,
    CompleteMultipartUploadInput,
    CreateMultipartUploadInput,
    DeleteObjectInput,
    GetObjectAttributesInput,
    GetObjectInput,
    HeadBucketInput,
    HeadObjectInput,
    ListMultipartUploadsInput,
    ListObjectsInput,
    ListObjectsV2Input,
    PutObjectInput,
    UploadPartInput,
);
