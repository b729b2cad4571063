//! Who may do what: secret keys by access key, and a bucket belongs to one account only.

use std::sync::{Arc, RwLock};

use s3s::access::{S3Access, S3AccessContext};
use s3s::auth::{S3Auth, SecretKey};
use s3s::dto::{
    AbortMultipartUploadInput, CompleteMultipartUploadInput, CreateMultipartUploadInput, DeleteObjectInput,
    GetObjectAttributesInput, GetObjectInput, HeadBucketInput, HeadObjectInput, ListMultipartUploadsInput,
    ListObjectsInput, ListObjectsV2Input, PutObjectInput, UploadPartInput,
};
use s3s::{S3Request, S3Result, s3_error};

use crate::data::Data;
use crate::tenants::NamesBucket;

/// Looks accounts and owners up in the live data, so that both may change while the server runs.
#[derive(Clone)]
pub(crate) struct Accounts(pub Arc<RwLock<Data>>);

#[async_trait::async_trait]
impl S3Auth for Accounts {
    async fn get_secret_key(&self, access_key: &str) -> S3Result<SecretKey> {
        let data = self.0.read().map_err(|_| s3_error!(InternalError))?;
        let secret = data.accounts.get(access_key).ok_or_else(|| {
            s3_error!(InvalidAccessKeyId, "The AWS Access Key Id you provided does not exist in our records.")
        })?;
        Ok(SecretKey::from(secret.as_str()))
    }
}

#[async_trait::async_trait]
impl S3Access for Accounts {
    async fn check(&self, context: &mut S3AccessContext<'_>) -> S3Result<()> {
        let Some(credentials) = context.credentials() else {
            return Err(s3_error!(AccessDenied, "Access Denied"));
        };
        let data = self.0.read().map_err(|_| s3_error!(InternalError))?;
        let token = context.headers().get("x-amz-security-token").and_then(|it| it.to_str().ok());
        let account = data.acting_account(&credentials.access_key, token)?;
        match context.s3_path().get_bucket_name() {
            // Whether the name is taken is the operation's answer, and a clearer one.
            Some(_) if context.s3_op().name() == "CreateBucket" => Ok(()),
            Some(bucket) => data.allow(account, bucket),
            None => Ok(()),
        }
    }

    async fn abort_multipart_upload(&self, request: &mut S3Request<AbortMultipartUploadInput>) -> S3Result<()> {
        self.find_bucket(request)
    }

    async fn complete_multipart_upload(&self, request: &mut S3Request<CompleteMultipartUploadInput>) -> S3Result<()> {
        self.find_bucket(request)
    }

    async fn create_multipart_upload(&self, request: &mut S3Request<CreateMultipartUploadInput>) -> S3Result<()> {
        self.find_bucket(request)
    }

    async fn delete_object(&self, request: &mut S3Request<DeleteObjectInput>) -> S3Result<()> {
        self.find_bucket(request)
    }

    async fn get_object(&self, request: &mut S3Request<GetObjectInput>) -> S3Result<()> {
        self.find_bucket(request)
    }

    async fn get_object_attributes(&self, request: &mut S3Request<GetObjectAttributesInput>) -> S3Result<()> {
        self.find_bucket(request)
    }

    async fn head_bucket(&self, request: &mut S3Request<HeadBucketInput>) -> S3Result<()> {
        self.find_bucket(request)
    }

    async fn head_object(&self, request: &mut S3Request<HeadObjectInput>) -> S3Result<()> {
        self.find_bucket(request)
    }

    async fn list_multipart_uploads(&self, request: &mut S3Request<ListMultipartUploadsInput>) -> S3Result<()> {
        self.find_bucket(request)
    }

    async fn list_objects(&self, request: &mut S3Request<ListObjectsInput>) -> S3Result<()> {
        self.find_bucket(request)
    }

    async fn list_objects_v2(&self, request: &mut S3Request<ListObjectsV2Input>) -> S3Result<()> {
        self.find_bucket(request)
    }

    async fn put_object(&self, request: &mut S3Request<PutObjectInput>) -> S3Result<()> {
        self.find_bucket(request)
    }

    async fn upload_part(&self, request: &mut S3Request<UploadPartInput>) -> S3Result<()> {
        self.find_bucket(request)
    }
}

impl Accounts {
    /// Names the bucket that the acting account means.
    fn find_bucket<I: NamesBucket>(&self, request: &mut S3Request<I>) -> S3Result<()> {
        let access_key = request.credentials.as_ref().map(|it| it.access_key.clone()).unwrap_or_default();
        let data = self.0.read().map_err(|_| s3_error!(InternalError))?;
        let bucket = request.input.bucket();
        *bucket = data.stored_name(data.account_of(&access_key), bucket);
        Ok(())
    }
}

impl Data {
    /// A bucket that does not exist is allowed here: the operation knows the better answer.
    pub fn allow(&self, access_key: &str, bucket: &str) -> S3Result<()> {
        match self.buckets.get(&self.stored_name(access_key, bucket)) {
            Some(it) if it.owner != access_key => Err(s3_error!(AccessDenied, "Access Denied")),
            _ => Ok(()),
        }
    }
}
