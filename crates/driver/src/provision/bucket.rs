//! Volumes that are a bucket of their own.

use s3csi_core::bucket::BucketName;
use s3csi_core::chain::Chain;
use s3csi_core::provision::{CreateRequest, OnDelete, VolumeKey, VolumeRecord};

use super::error::{CreateError, DeleteError, LookupError, S3ErrorKind};
use super::failpoints::{Failpoint, Failpoints};
use super::metadata::{self, BucketMetadata, MetadataError};
use super::store::{BucketCreation, S3Store};
use super::{VolumeLookup, contents};

pub async fn create(
    store: &S3Store,
    bucket: &BucketName,
    create: &CreateRequest,
    failpoints: Failpoints,
) -> Result<(), CreateError> {
    refuse_other_name(store, bucket, &create.record.volume).await?;
    // Always: only the store knows who owns a bucket. Its metadata prove nothing, since anyone can write such tags. The header
    // x-amz-expected-bucket-owner would need the number of the account, which no call of S3 returns.
    let creation =
        store.create_bucket(bucket, create.record.region.as_deref()).await.map_err(|cause| match cause.kind {
            S3ErrorKind::OwnedByAnotherAccount => CreateError::ForeignBucket { bucket: bucket.to_string(), cause },
            _ => CreateError::Bucket { cause },
        })?;
    failpoints.hit(Failpoint::BucketCreated);
    let outcome = ensure_metadata(store, bucket, create).await;
    let is_left = match &outcome {
        Err(CreateError::Read { cause } | CreateError::Metadata { cause, .. }) => !cause.kind.is_transient(),
        Ok(()) | Err(_) => false,
    };
    // The provisioner does not retry after a permanent error: the bucket would be orphaned.
    if creation == BucketCreation::Created
        && is_left
        && let Err(error) = store.delete_bucket(bucket).await
    {
        tracing::warn!(%bucket, error = %Chain(&error), "an empty bucket without metadata is left behind");
    }
    outcome?;
    failpoints.hit(Failpoint::BucketMarked);
    Ok(())
}

/// The name of a bucket is a prefix of the class and the volume's key. A class that was recreated with another prefix while a
/// claim was pending must not lead to a second bucket for the same claim.
async fn refuse_other_name(store: &S3Store, bucket: &BucketName, volume: &VolumeKey) -> Result<(), CreateError> {
    let owned = match store.owned_buckets().await {
        Ok(owned) => owned,
        // Not every account may list its buckets; CreateBucket is the only permission that creating requires.
        Err(error) if matches!(error.kind, S3ErrorKind::Denied | S3ErrorKind::NotSupported) => {
            tracing::debug!(error = %Chain(&error), "buckets cannot be listed");
            return Ok(());
        }
        Err(cause) => return Err(CreateError::Read { cause }),
    };
    match owned.into_iter().find(|it| it.ends_with(volume.as_str()) && it != bucket.as_str()) {
        Some(other) => Err(CreateError::OtherBucket { bucket: bucket.to_string(), other }),
        None => Ok(()),
    }
}

/// A bucket without metadata must be empty: it was created just now, or by an earlier call that did not get to write them.
async fn ensure_metadata(store: &S3Store, bucket: &BucketName, create: &CreateRequest) -> Result<(), CreateError> {
    if let BucketMetadata::Tags(record) | BucketMetadata::Object(record) = read_metadata(store, bucket).await? {
        return compare(&record, create);
    }
    if contents::first_item(store, bucket, "").await.map_err(|cause| CreateError::Read { cause })?.is_some() {
        return Err(CreateError::NoMetadata { bucket: bucket.to_string() });
    }
    let written = metadata::write_bucket(store, bucket, &create.record).await;
    written.map_err(|cause| CreateError::Metadata { bucket: bucket.to_string(), cause })
}

async fn read_metadata(store: &S3Store, bucket: &BucketName) -> Result<BucketMetadata, CreateError> {
    metadata::read_bucket(store, bucket).await.map_err(|error| match error {
        MetadataError::S3(cause) => CreateError::Read { cause },
        MetadataError::Unreadable(cause) => CreateError::Unreadable { cause },
        MetadataError::Credentials(cause) => CreateError::Credentials(cause),
    })
}

fn compare(before: &VolumeRecord, create: &CreateRequest) -> Result<(), CreateError> {
    match before.difference(&create.record, create.capacity) {
        None => Ok(()),
        Some(cause) => Err(CreateError::Different { cause }),
    }
}

/// `key` is `None` for a bucket of Scality's driver, which stored no metadata and never deleted data.
pub async fn delete(
    store: &S3Store,
    bucket: &BucketName,
    key: Option<&VolumeKey>,
    failpoints: Failpoints,
) -> Result<(), DeleteError> {
    let found = match metadata::read_bucket(store, bucket).await {
        Ok(found) => found,
        Err(MetadataError::S3(cause)) if cause.kind == S3ErrorKind::NoSuchBucket => return Ok(()),
        Err(MetadataError::S3(cause)) => return Err(DeleteError::Read { cause }),
        Err(MetadataError::Unreadable(cause)) => return Err(DeleteError::Unreadable { cause }),
        Err(MetadataError::Credentials(cause)) => return Err(DeleteError::Credentials(cause)),
    };
    let on_delete = match (&found, key) {
        (BucketMetadata::Tags(record) | BucketMetadata::Object(record), Some(key)) if record.volume == *key => {
            record.on_delete
        }
        (BucketMetadata::Tags(_) | BucketMetadata::Object(_), _) => {
            return Err(DeleteError::Foreign { bucket: bucket.to_string() });
        }
        // Its name is ours. The metadata were never written, or an earlier call removed them: either way it is empty.
        (BucketMetadata::None, _) => OnDelete::DeleteIfEmpty,
    };
    match on_delete {
        OnDelete::Retain => {
            tracing::info!(%bucket, "bucket retained according to onDelete");
            return Ok(());
        }
        OnDelete::DeleteIfEmpty => {
            let found = contents::first_item(store, bucket, "").await.map_err(|cause| DeleteError::Read { cause })?;
            if let Some(what) = found {
                return Err(not_empty(bucket, what));
            }
        }
        OnDelete::DeleteAll => {
            contents::remove_all(store, bucket, "").await.map_err(|cause| DeleteError::Empty { cause })?;
            failpoints.hit(Failpoint::DataDeleted);
        }
    }
    if matches!(found, BucketMetadata::Object(_)) || on_delete == OnDelete::DeleteAll {
        let removed = contents::remove_metadata(store, bucket, &metadata::bucket_key()).await;
        removed.map_err(|cause| DeleteError::Metadata { cause })?;
        failpoints.hit(Failpoint::MetadataDeleted);
    }
    store.delete_bucket(bucket).await.map_err(|cause| match cause.kind {
        S3ErrorKind::NotEmpty => not_empty(bucket, "an object was just written to it".to_owned()),
        _ => DeleteError::Bucket { cause },
    })?;
    failpoints.hit(Failpoint::BucketDeleted);
    Ok(())
}

pub async fn lookup(store: &S3Store, bucket: &BucketName, key: &VolumeKey) -> Result<VolumeLookup, LookupError> {
    match metadata::read_bucket(store, bucket).await {
        Ok(BucketMetadata::Tags(record) | BucketMetadata::Object(record)) if record.volume == *key => {
            Ok(VolumeLookup::Found(record))
        }
        Ok(BucketMetadata::Tags(_) | BucketMetadata::Object(_) | BucketMetadata::None) => Ok(VolumeLookup::NotFound),
        Err(MetadataError::S3(cause)) if cause.kind == S3ErrorKind::NoSuchBucket => Ok(VolumeLookup::NotFound),
        Err(MetadataError::S3(cause)) => Err(LookupError::Read { cause }),
        Err(MetadataError::Unreadable(cause)) => Err(LookupError::Unreadable { cause }),
        Err(MetadataError::Credentials(cause)) => Err(LookupError::Credentials(cause)),
    }
}

fn not_empty(bucket: &BucketName, what: String) -> DeleteError {
    DeleteError::NotEmpty { place: format!("bucket {:?}", bucket.as_str()), what }
}
