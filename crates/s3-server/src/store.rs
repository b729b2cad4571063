//! What the tests need from an S3 server, whichever it is: where it is, who may use it, and a look at what it holds that
//! does not go through the code under test.

use std::fmt;
use std::path::PathBuf;

use bytes::Bytes;

/// An S3 server that tests run against. Its objects are read behind its back.
pub trait Store: Send + Sync {
    /// `http://127.0.0.1:PORT`, or `https`.
    fn endpoint(&self) -> String;

    /// The region its signatures are made for.
    fn region(&self) -> &str;

    /// The account for tests that need only one.
    fn account(&self) -> &Account;

    /// The certificate that a client must trust, when the server speaks TLS.
    fn authority_pem(&self) -> Option<&str>;

    fn add_account(&self, account: &Account) -> Result<(), StoreError>;

    /// The bucket belongs to `owner`; other accounts get 403.
    fn create_bucket(&self, name: &str, owner: &Account) -> Result<(), StoreError>;

    fn put_object(&self, bucket: &str, key: &str, content: &[u8]) -> Result<(), StoreError>;

    fn object(&self, bucket: &str, key: &str) -> Option<Bytes>;

    /// All buckets by name, and the access keys of their owners.
    fn buckets(&self) -> Vec<(String, String)>;

    /// All keys of a bucket, sorted. A bucket that does not exist has none.
    fn keys(&self, bucket: &str) -> Vec<String>;

    /// This store for callers that do not care which one it is.
    fn as_dyn(&self) -> &dyn Store;
}

/// Part of every secret made here. A search for it through all logs of the suite must find nothing.
pub const SECRET_MARK: &str = "NeverPrintThis";

/// A pair of keys.
#[derive(Clone, PartialEq, Eq)]
pub struct Account {
    pub access_key: String,
    pub secret_key: String,
}

impl Account {
    pub fn new(access_key: &str, secret_key: &str) -> Self {
        Self { access_key: access_key.to_owned(), secret_key: secret_key.to_owned() }
    }

    /// With a secret that is found when it is printed somewhere.
    pub fn named(access_key: &str) -> Self {
        Self::new(access_key, &format!("{access_key}-{SECRET_MARK}"))
    }
}

impl fmt::Debug for Account {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("Account").field(&self.access_key).finish()
    }
}

#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("bucket {bucket:?} does not exist")]
    NoSuchBucket { bucket: String },
    #[error("failed to write {path:?}")]
    Write {
        path: PathBuf,
        #[source]
        cause: std::io::Error,
    },
    #[error("failed to run {command}")]
    Run {
        command: String,
        #[source]
        cause: std::io::Error,
    },
    #[error("{command} failed: {output}")]
    Refused { command: String, output: String },
}
