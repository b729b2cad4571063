//! Where the metadata of volumes are stored: as tags of a bucket, which no mount shows, or as an object with a reserved key if the
//! store has no bucket tags; for prefixes of shared buckets always as such objects.

use std::collections::BTreeMap;

use s3csi_core::bucket::BucketName;
use s3csi_core::prefix::{Prefix, RESERVED};
use s3csi_core::provision::{UnreadableRecord, VolumeKey, VolumeRecord};
use s3csi_core::publish::AuthenticationSource;

use super::error::{CredentialsError, S3Error, S3ErrorKind};
use super::store::{PutOutcome, S3Store};

#[derive(Debug)]
pub enum MetadataError {
    S3(S3Error),
    Unreadable(UnreadableRecord),
    Credentials(CredentialsError),
}

/// The metadata of a bucket of its own, and where they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BucketMetadata {
    Tags(VolumeRecord),
    Object(VolumeRecord),
    None,
}

/// The metadata of a bucket of its own, if the store has no bucket tags.
pub fn bucket_key() -> String {
    format!("{RESERVED}volume")
}

/// The metadata of a volume in a shared bucket.
pub fn volume_key(key: &VolumeKey) -> String {
    format!("{RESERVED}volumes/{key}")
}

/// Names the volume that a prefix belongs to. These keys are nested as the prefixes are.
pub fn prefix_key(prefix: &Prefix) -> String {
    format!("{RESERVED}prefixes/{prefix}{PREFIX_END}")
}

/// The claims on this prefix and on all within it.
pub fn prefixes_within(prefix: &Prefix) -> String {
    format!("{RESERVED}prefixes/{prefix}")
}

/// Names in Kubernetes contain no colons, so no prefix that is derived from them contains this.
const PREFIX_END: &str = ":volume";

pub async fn read_bucket(store: &S3Store, bucket: &BucketName) -> Result<BucketMetadata, MetadataError> {
    let tags = store.bucket_tags(bucket).await.map_err(MetadataError::S3)?;
    if let Some(tags) = tags {
        let entries: BTreeMap<String, String> = tags.into_iter().collect();
        if let Some(record) = VolumeRecord::from_entries(&entries).map_err(MetadataError::Unreadable)? {
            return checked(store, record).map(BucketMetadata::Tags);
        }
    }
    Ok(read(store, bucket, &bucket_key()).await?.map_or(BucketMetadata::None, BucketMetadata::Object))
}

/// Writes the metadata of a bucket that has none yet.
pub async fn write_bucket(store: &S3Store, bucket: &BucketName, record: &VolumeRecord) -> Result<(), S3Error> {
    match store.tag_bucket(bucket, &record.entries()).await {
        Err(error) if error.kind == S3ErrorKind::NotSupported => {
            // Exists: a concurrent call wrote the same, since the bucket's name is derived from the request.
            let (PutOutcome::Created | PutOutcome::Exists) =
                store.put_new(bucket, &bucket_key(), &record.to_text()).await?;
            Ok(())
        }
        outcome => outcome,
    }
}

pub async fn read(store: &S3Store, bucket: &BucketName, key: &str) -> Result<Option<VolumeRecord>, MetadataError> {
    match store.read(bucket, key).await.map_err(MetadataError::S3)? {
        Some(text) => {
            let record = VolumeRecord::from_text(&text).map_err(MetadataError::Unreadable)?;
            record.map(|it| checked(store, it)).transpose()
        }
        None => Ok(None),
    }
}

/// A volume that was created with a Secret belongs to its tenant: the driver's keys, which may do more, never act on it.
fn checked(store: &S3Store, record: VolumeRecord) -> Result<VolumeRecord, MetadataError> {
    match (record.provisioned_with, store.source()) {
        (AuthenticationSource::Driver, _) | (_, AuthenticationSource::Secret) => Ok(record),
        // Nothing is provisioned as `pod`; a record that says so was not written by this driver.
        (
            AuthenticationSource::Secret | AuthenticationSource::Pod,
            AuthenticationSource::Driver | AuthenticationSource::Pod,
        ) => Err(MetadataError::Credentials(CredentialsError::SecretRequired)),
    }
}
