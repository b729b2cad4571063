//! Volumes that are a prefix of a shared bucket. Two objects belong to each: its metadata under the volume's key, and a claim
//! on the prefix that names the volume, so that no two volumes have the same prefix or one within the other.

use s3csi_core::bucket::BucketName;
use s3csi_core::chain::Chain;
use s3csi_core::prefix::Prefix;
use s3csi_core::provision::{CreateRequest, OnDelete, VolumeKey, VolumeRecord};
use s3csi_core::text::shortened;

use super::error::{CreateError, DeleteError, LookupError, S3Error, S3ErrorKind};
use super::failpoints::{Failpoint, Failpoints};
use super::metadata::{self, MetadataError};
use super::store::{PutOutcome, S3Store};
use super::{VolumeLookup, contents};

/// A claim that others delete while we read it is written again, this often.
const CLAIM_ATTEMPTS: usize = 3;

/// Keys in one page.
const BATCH_KEYS: i32 = 1000;

pub async fn create(
    store: &S3Store,
    bucket: &BucketName,
    prefix: &Prefix,
    create: &CreateRequest,
    failpoints: Failpoints,
) -> Result<(), CreateError> {
    let record = &create.record;
    let claim = PrefixClaim { store, bucket, prefix, volume: &record.volume };
    let known = match metadata::read(store, bucket, &metadata::volume_key(&record.volume)).await {
        Ok(known) => known,
        Err(MetadataError::S3(cause)) if cause.kind == S3ErrorKind::NoSuchBucket => {
            return Err(CreateError::NoSharedBucket { cause });
        }
        Err(MetadataError::S3(cause)) => return Err(CreateError::Read { cause }),
        Err(MetadataError::Unreadable(cause)) => return Err(CreateError::Unreadable { cause }),
        Err(MetadataError::Credentials(cause)) => return Err(CreateError::Credentials(cause)),
    };
    if let Some(known) = known {
        if let Some(cause) = known.difference(record, create.capacity) {
            return Err(CreateError::Different { cause });
        }
    } else {
        if record.on_delete == OnDelete::DeleteAll {
            refuse_existing_objects(store, bucket, prefix).await?;
        }
        claim.refuse_overlap().await?;
        write_metadata(store, bucket, record).await?;
        failpoints.hit(Failpoint::MetadataWritten);
    }
    let claimed = claim.ensure().await;
    if let Err(CreateError::Overlap { .. }) = &claimed {
        let abandoned = contents::remove_metadata(store, bucket, &metadata::volume_key(&record.volume)).await;
        if let Err(error) = abandoned {
            tracing::warn!(%bucket, error = %Chain(&error), "metadata of a volume that was not created are left behind");
        }
    }
    claimed?;
    failpoints.hit(Failpoint::PrefixTaken);
    Ok(())
}

async fn write_metadata(store: &S3Store, bucket: &BucketName, record: &VolumeRecord) -> Result<(), CreateError> {
    // Exists: a concurrent call for the same volume wrote it, and the next call compares.
    match store.put_new(bucket, &metadata::volume_key(&record.volume), &record.to_text()).await {
        Ok(PutOutcome::Created | PutOutcome::Exists) => Ok(()),
        Err(cause) => Err(CreateError::SharedMetadata { cause }),
    }
}

/// The claim of a volume on its prefix.
struct PrefixClaim<'a> {
    store: &'a S3Store,
    bucket: &'a BucketName,
    prefix: &'a Prefix,
    volume: &'a VolumeKey,
}

impl PrefixClaim<'_> {
    /// From here on the prefix belongs to this volume.
    async fn ensure(&self) -> Result<(), CreateError> {
        let Self { store, bucket, prefix, .. } = self;
        self.write().await?;
        // Two volumes, one within the other, may have found no overlap and claimed their prefixes at the same time: each looks
        // again.
        let overlap = self.refuse_overlap().await;
        if let Err(CreateError::Overlap { .. }) = &overlap
            && let Err(error) = contents::remove_metadata(store, bucket, &metadata::prefix_key(prefix)).await
        {
            tracing::warn!(%bucket, %prefix, error = %Chain(&error), "the claim of a volume that was not created is left behind");
        }
        overlap
    }

    async fn write(&self) -> Result<(), CreateError> {
        let Self { store, bucket, prefix, volume } = self;
        let key = metadata::prefix_key(prefix);
        for _ in 0..CLAIM_ATTEMPTS {
            let put = store.put_new(bucket, &key, volume.as_str()).await;
            if put.map_err(|cause| CreateError::SharedMetadata { cause })? == PutOutcome::Created {
                return Ok(());
            }
            match store.read(bucket, &key).await.map_err(|cause| CreateError::Read { cause })? {
                Some(owner) if owner == volume.as_str() => return Ok(()),
                Some(owner) => return Err(self.overlap(&owner)),
                // It was deleted in between: the prefix is free again, and not ours.
                None => {}
            }
        }
        Err(CreateError::Busy)
    }

    /// No volume lies within another one: workloads with the outer one could read and delete the data of the inner one.
    async fn refuse_overlap(&self) -> Result<(), CreateError> {
        for ancestor in self.prefix.ancestors() {
            self.refuse_other(&metadata::prefix_key(&ancestor)).await?;
        }
        let (within, mut continuation) = (metadata::prefixes_within(self.prefix), None);
        loop {
            let page = self.store.keys(self.bucket, &within, BATCH_KEYS, continuation).await;
            let (keys, next) = page.map_err(|cause| CreateError::Read { cause })?;
            for key in keys {
                self.refuse_other(&key).await?;
            }
            continuation = next;
            if continuation.is_none() {
                return Ok(());
            }
        }
    }

    async fn refuse_other(&self, claim: &str) -> Result<(), CreateError> {
        match self.store.read(self.bucket, claim).await.map_err(|cause| CreateError::Read { cause })? {
            Some(owner) if owner != self.volume.as_str() => Err(self.overlap(&owner)),
            Some(_) | None => Ok(()),
        }
    }

    fn overlap(&self, other: &str) -> CreateError {
        let other = shortened(other, 64);
        CreateError::Overlap { bucket: self.bucket.to_string(), prefix: self.prefix.to_string(), other }
    }
}

/// With `delete-all` everything in the prefix is deleted with the volume, so nothing else may be in it.
async fn refuse_existing_objects(store: &S3Store, bucket: &BucketName, prefix: &Prefix) -> Result<(), CreateError> {
    let found = contents::first_item(store, bucket, prefix.as_str()).await;
    match found.map_err(|cause| CreateError::Read { cause })? {
        None => Ok(()),
        Some(_) => Err(CreateError::PrefixNotEmpty { bucket: bucket.to_string(), prefix: prefix.to_string() }),
    }
}

pub async fn delete(
    store: &S3Store,
    bucket: &BucketName,
    key: &VolumeKey,
    failpoints: Failpoints,
) -> Result<(), DeleteError> {
    let metadata_key = metadata::volume_key(key);
    let record = match metadata::read(store, bucket, &metadata_key).await {
        Ok(Some(record)) => record,
        Ok(None) => return Ok(()),
        Err(MetadataError::S3(cause)) if cause.kind == S3ErrorKind::NoSuchBucket => return Ok(()),
        Err(MetadataError::S3(cause)) => return Err(DeleteError::Read { cause }),
        Err(MetadataError::Unreadable(cause)) => return Err(DeleteError::Unreadable { cause }),
        Err(MetadataError::Credentials(cause)) => return Err(DeleteError::Credentials(cause)),
    };
    // Metadata without a prefix, or under the key of another volume, are not ours.
    let Some(prefix) = record.prefix.as_ref().filter(|_| record.volume == *key) else {
        return Err(DeleteError::Foreign { bucket: bucket.to_string() });
    };
    let look = |cause: S3Error| DeleteError::Read { cause };
    // A volume that was not created completely has no prefix and no data.
    let owner = store.read(bucket, &metadata::prefix_key(prefix)).await.map_err(look)?;
    if owner.as_deref() == Some(key.as_str()) {
        match record.on_delete {
            OnDelete::Retain => tracing::info!(%bucket, %prefix, "data retained according to onDelete"),
            OnDelete::DeleteIfEmpty => {
                if let Some(what) = contents::first_item(store, bucket, prefix.as_str()).await.map_err(look)? {
                    let place = format!("prefix {:?} of bucket {:?}", prefix.as_str(), bucket.as_str());
                    return Err(DeleteError::NotEmpty { place, what });
                }
            }
            OnDelete::DeleteAll => {
                let removed = contents::remove_all(store, bucket, prefix.as_str()).await;
                removed.map_err(|cause| DeleteError::Empty { cause })?;
                failpoints.hit(Failpoint::DataDeleted);
            }
        }
        let released = contents::remove_metadata(store, bucket, &metadata::prefix_key(prefix)).await;
        released.map_err(|cause| DeleteError::Metadata { cause })?;
        failpoints.hit(Failpoint::PrefixReleased);
    }
    contents::remove_metadata(store, bucket, &metadata_key).await.map_err(|cause| DeleteError::Metadata { cause })?;
    failpoints.hit(Failpoint::MetadataDeleted);
    Ok(())
}

pub async fn lookup(store: &S3Store, bucket: &BucketName, key: &VolumeKey) -> Result<VolumeLookup, LookupError> {
    match metadata::read(store, bucket, &metadata::volume_key(key)).await {
        Ok(Some(record)) if record.volume == *key => Ok(VolumeLookup::Found(record)),
        Ok(Some(_) | None) => Ok(VolumeLookup::NotFound),
        Err(MetadataError::S3(cause)) if cause.kind == S3ErrorKind::NoSuchBucket => Ok(VolumeLookup::NotFound),
        Err(MetadataError::S3(cause)) => Err(LookupError::Read { cause }),
        Err(MetadataError::Unreadable(cause)) => Err(LookupError::Unreadable { cause }),
        Err(MetadataError::Credentials(cause)) => Err(LookupError::Credentials(cause)),
    }
}
