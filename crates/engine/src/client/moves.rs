//! Moving an object on a server that may not know how.
//!
//! `RenameObject` is known to AWS's directory buckets only. Most other servers take the request for an upload of an empty
//! object and answer "done": the destination is destroyed and the file is gone. So here a file is moved by `CopyObject`, and
//! the source is deleted only after the copy was compared with it. It is not atomic: both names exist for a moment.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use mountpoint_s3_client::ObjectClient;
use mountpoint_s3_client::error::{CopyObjectError, HeadObjectError, ObjectClientError, RenameObjectError};
use mountpoint_s3_client::error_metadata::ProvideErrorMetadata;
use mountpoint_s3_client::types::{
    CopyObjectParams, HeadObjectParams, HeadObjectResult, PutObjectSingleParams, RenameObjectParams,
    RenamePreconditionTypes,
};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

/// How this mount moves files.
#[derive(Debug)]
pub enum Moves {
    Native,
    Copy(MoveByCopy),
    Refused,
}

/// Moves by copying. Remembers whether this server was seen to copy.
#[derive(Debug, Default)]
pub struct MoveByCopy {
    is_proven: AtomicBool,
}

impl Moves {
    pub fn by_copy() -> Self {
        Self::Copy(MoveByCopy::default())
    }
}

pub type MoveError<C> = ObjectClientError<RenameObjectError, <C as ObjectClient>::ClientError>;

impl MoveByCopy {
    pub async fn move_object<C: ObjectClient + Sync>(
        &self,
        client: &C,
        bucket: &str,
        source_key: &str,
        destination_key: &str,
        params: &RenameObjectParams,
    ) -> Result<(), MoveError<C>> {
        let source = facts(client, bucket, source_key).await?.ok_or(refuse(RenameObjectError::KeyNotFound))?;
        let replaced = facts(client, bucket, destination_key).await?;
        if replaced.is_some() {
            if params.if_none_match.is_some() {
                return Err(refuse(RenameObjectError::PreConditionFailed(RenamePreconditionTypes::IfNoneMatch)));
            }
            // What would be replaced cannot be brought back, so the server must have proved itself before.
            if source.size > 0 && !self.is_proven.load(Ordering::Relaxed) {
                self.prove(client, bucket, destination_key).await?;
            }
        }

        copy(client, bucket, source_key, destination_key).await?;
        match compare(&source, facts(client, bucket, destination_key).await?.as_ref()) {
            Comparison::Same if source.size > 0 => self.is_proven.store(true, Ordering::Relaxed),
            // An empty copy of an empty file is right, but proves nothing.
            Comparison::Same => {}
            Comparison::NotCopied => {
                tracing::warn!(
                    source_key,
                    destination_key,
                    "this server does not copy objects; moving files is refused from now on"
                );
                if replaced.is_none() {
                    remove(client, bucket, destination_key).await;
                }
                return Err(refuse(RenameObjectError::NotImplementedError));
            }
            Comparison::Different => {
                tracing::error!(source_key, destination_key, "the copy differs from the source, which is kept");
                return Err(refuse(RenameObjectError::InternalError));
            }
        }

        let Err(error) = client.delete_object(bucket, source_key).await else { return Ok(()) };
        tracing::warn!(source_key, destination_key, ?error, "the old object of a moved file was not deleted");
        // An error does not say that nothing happened: the copy may be the only one left. Look before it is taken back.
        if facts(client, bucket, source_key).await?.is_none() {
            return Ok(());
        }
        if replaced.is_none() {
            remove(client, bucket, destination_key).await;
        }
        Err(match error {
            ObjectClientError::ClientError(error) => ObjectClientError::ClientError(error),
            ObjectClientError::ServiceError(_) => refuse(RenameObjectError::AccessDenied),
        })
    }

    /// Copies a tiny object of our own beside the destination and looks at the result.
    async fn prove<C: ObjectClient + Sync>(
        &self,
        client: &C,
        bucket: &str,
        destination_key: &str,
    ) -> Result<(), MoveError<C>> {
        let [original, copied] = scratch_keys(destination_key);
        let params = PutObjectSingleParams::new();
        client.put_object_single(bucket, &original, &params, b"copy me").await.map_err(|error| match error {
            ObjectClientError::ClientError(error) => ObjectClientError::ClientError(error),
            ObjectClientError::ServiceError(_) => refuse(RenameObjectError::InternalError),
        })?;
        let outcome: Result<Comparison, MoveError<C>> = async {
            let source = facts(client, bucket, &original).await?.ok_or(refuse(RenameObjectError::InternalError))?;
            copy(client, bucket, &original, &copied).await?;
            Ok(compare(&source, facts(client, bucket, &copied).await?.as_ref()))
        }
        .await;
        remove(client, bucket, &copied).await;
        remove(client, bucket, &original).await;
        if outcome? == Comparison::Same {
            self.is_proven.store(true, Ordering::Relaxed);
            return Ok(());
        }
        tracing::warn!(destination_key, "this server does not copy objects; moving files is refused from now on");
        Err(refuse(RenameObjectError::NotImplementedError))
    }
}

/// Copies an object and compares the result with it. Answers the `ETag` of the copy.
pub async fn copy_verified<C: ObjectClient + Sync>(
    client: &C,
    bucket: &str,
    source_key: &str,
    destination_key: &str,
) -> Result<String, MoveError<C>> {
    let source = facts(client, bucket, source_key).await?.ok_or(refuse(RenameObjectError::KeyNotFound))?;
    copy(client, bucket, source_key, destination_key).await?;
    let copied = facts(client, bucket, destination_key).await?;
    match (compare(&source, copied.as_ref()), copied) {
        (Comparison::Same, Some(copied)) => Ok(format!("\"{}\"", copied.etag)),
        (Comparison::Different, _) => Err(refuse(RenameObjectError::InternalError)),
        (Comparison::NotCopied | Comparison::Same, _) => Err(refuse(RenameObjectError::NotImplementedError)),
    }
}

/// What can be known of an object without reading it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Facts {
    size: u64,
    etag: String,
    /// The `ETag` of such an object is no hash of its content.
    has_key_encryption: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Comparison {
    Same,
    /// The server ignored the order to copy and stored nothing, or the empty body of the request.
    NotCopied,
    Different,
}

fn compare(source: &Facts, copy: Option<&Facts>) -> Comparison {
    let Some(copy) = copy else { return Comparison::NotCopied };
    let is_same_size = source.size == copy.size;
    let are_hashes = [source, copy].iter().all(|it| !it.has_key_encryption && is_plain_hash(&it.etag));
    match (is_same_size, copy.size) {
        (true, _) if !are_hashes || source.etag == copy.etag => Comparison::Same,
        (false, 0) => Comparison::NotCopied,
        (true | false, _) => Comparison::Different,
    }
}

/// The MD5 of the content; objects of several parts have a dash in their `ETag` and get another one when they are copied.
fn is_plain_hash(etag: &str) -> bool {
    etag.len() == 32 && etag.bytes().all(|it| it.is_ascii_hexdigit())
}

impl From<HeadObjectResult> for Facts {
    fn from(head: HeadObjectResult) -> Self {
        Self {
            size: head.size,
            etag: head.etag.as_str().trim_matches('"').to_ascii_lowercase(),
            has_key_encryption: head.sse_type.is_some_and(|it| it.starts_with("aws:kms")),
        }
    }
}

async fn facts<C: ObjectClient>(client: &C, bucket: &str, key: &str) -> Result<Option<Facts>, MoveError<C>> {
    match client.head_object(bucket, key, &HeadObjectParams::new()).await {
        Ok(head) => Ok(Some(head.into())),
        Err(ObjectClientError::ServiceError(HeadObjectError::NotFound)) => Ok(None),
        Err(ObjectClientError::ServiceError(_)) => Err(refuse(RenameObjectError::InternalError)),
        Err(ObjectClientError::ClientError(error)) => Err(ObjectClientError::ClientError(error)),
    }
}

async fn copy<C: ObjectClient>(
    client: &C,
    bucket: &str,
    source_key: &str,
    destination_key: &str,
) -> Result<(), MoveError<C>> {
    let source_key = encoded(source_key);
    let params = CopyObjectParams::new();
    let Err(failure) = client.copy_object(bucket, &source_key, bucket, destination_key, &params).await else {
        return Ok(());
    };
    Err(match failure {
        ObjectClientError::ServiceError(CopyObjectError::NotFound) => refuse(RenameObjectError::KeyNotFound),
        ObjectClientError::ServiceError(_) => refuse(RenameObjectError::InternalError),
        // 405 Method Not Allowed and 501 Not Implemented: the server says itself that it cannot copy.
        ObjectClientError::ClientError(error) if matches!(error.meta().http_code, Some(405 | 501)) => {
            refuse(RenameObjectError::NotImplementedError)
        }
        ObjectClientError::ClientError(error) => ObjectClientError::ClientError(error),
    })
}

/// Takes back what we made ourselves. If that fails, too, a spare object stays, and the log says where.
async fn remove<C: ObjectClient>(client: &C, bucket: &str, key: &str) {
    if let Err(error) = client.delete_object(bucket, key).await {
        tracing::warn!(key, ?error, "could not remove an object that was made for moving a file");
    }
}

fn refuse<E>(reason: RenameObjectError) -> ObjectClientError<RenameObjectError, E> {
    ObjectClientError::ServiceError(reason)
}

/// The library puts the source into a header as it is; S3 wants it encoded like a path, and would take `%41` for `A`.
pub fn encoded(key: &str) -> String {
    const PATH: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b'/');
    utf8_percent_encode(key, PATH).to_string()
}

/// Two unique keys beside the destination, where the caller has write permission.
fn scratch_keys(destination_key: &str) -> [String; 2] {
    let directory = destination_key.rfind('/').map_or("", |slash| &destination_key[..=slash]);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let unique = format!("{directory}.s3csi-copy-check-{}-{now:x}", std::process::id());
    [format!("{unique}-a"), format!("{unique}-b")]
}

#[cfg(test)]
mod tests {
    use super::*;

    const HASH: &str = "0cc175b9c0f1b6a831c399e269772661";
    const OTHER_HASH: &str = "92eb5ffee6ae2fec3ad71c777531578f";

    fn facts(size: u64, etag: &str) -> Facts {
        Facts { size, etag: etag.into(), has_key_encryption: false }
    }

    fn check(source: &Facts, copy: Option<&Facts>, expected: Comparison) {
        assert_eq!(compare(source, copy), expected, "{source:?} against {copy:?}");
    }

    #[test]
    fn only_a_copy_of_the_same_size_and_hash_lets_the_source_go() {
        check(&facts(1, HASH), Some(&facts(1, HASH)), Comparison::Same);
        check(&facts(1, HASH), Some(&facts(1, OTHER_HASH)), Comparison::Different);
        check(&facts(1, HASH), Some(&facts(2, HASH)), Comparison::Different);
        check(&facts(1, HASH), Some(&facts(0, OTHER_HASH)), Comparison::NotCopied);
        check(&facts(1, HASH), None, Comparison::NotCopied);
        check(&facts(0, HASH), Some(&facts(0, HASH)), Comparison::Same);
        check(&facts(0, HASH), Some(&facts(7, OTHER_HASH)), Comparison::Different);
    }

    #[test]
    fn etags_that_are_no_hash_of_the_content_are_not_compared() {
        check(&facts(9, "0cc175b9c0f1b6a831c399e269772661-2"), Some(&facts(9, HASH)), Comparison::Same);
        let encrypted = Facts { has_key_encryption: true, ..facts(9, HASH) };
        check(&encrypted, Some(&facts(9, OTHER_HASH)), Comparison::Same);
    }

    #[test]
    fn the_source_of_a_copy_is_encoded_but_for_its_slashes() {
        assert_eq!(encoded("a b/%41+ü~"), "a%20b/%2541%2B%C3%BC~");
    }

    #[test]
    fn scratch_objects_lie_beside_the_destination() {
        for key in scratch_keys("logs/day/x") {
            assert!(key.starts_with("logs/day/.s3csi-copy-check-"), "{key}");
        }
        assert!(scratch_keys("x")[0].starts_with(".s3csi-copy-check-"));
    }
}
