//! Where in the store it is noted what was made: as tags of a bucket, which no mount shows, and where the store has none
//! as an object with a reserved name; for parts of shared buckets always as such objects.

use std::collections::BTreeMap;

use s3csi_core::bucket::BucketName;
use s3csi_core::prefix::{Prefix, RESERVED};
use s3csi_core::provision::{Record, UnreadableRecord, VolumeKey};

use super::error::{Kind, S3Error};
use super::store::{Put, Store};

#[derive(Debug)]
pub enum NoteError {
    S3(S3Error),
    Unreadable(UnreadableRecord),
}

/// How a bucket of its own is noted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Noted {
    ByTags(Record),
    ByObject(Record),
    Not,
}

/// The note about a bucket of its own, where the store has no tags.
pub fn bucket_key() -> String {
    format!("{RESERVED}volume")
}

/// The note about a volume in a shared bucket.
pub fn volume_key(key: &VolumeKey) -> String {
    format!("{RESERVED}volumes/{key}")
}

/// Which volume has a prefix. These keys lie in each other as the prefixes do.
pub fn prefix_key(prefix: &Prefix) -> String {
    format!("{RESERVED}prefixes/{prefix}{PREFIX_END}")
}

/// Everything that is noted about prefixes in this one, itself included.
pub fn prefixes_within(prefix: &Prefix) -> String {
    format!("{RESERVED}prefixes/{prefix}")
}

/// Names in Kubernetes have no colons, so that no prefix made of them has this as a part.
const PREFIX_END: &str = ":volume";

pub async fn of_bucket(store: &Store, bucket: &BucketName) -> Result<Noted, NoteError> {
    let tags = store.bucket_tags(bucket).await.map_err(NoteError::S3)?;
    if let Some(tags) = tags {
        let entries: BTreeMap<String, String> = tags.into_iter().collect();
        if let Some(record) = Record::from_entries(&entries).map_err(NoteError::Unreadable)? {
            return Ok(Noted::ByTags(record));
        }
    }
    Ok(read(store, bucket, &bucket_key()).await?.map_or(Noted::Not, Noted::ByObject))
}

/// Notes a bucket that has no note yet.
pub async fn note_bucket(store: &Store, bucket: &BucketName, record: &Record) -> Result<(), S3Error> {
    match store.tag_bucket(bucket, &record.entries()).await {
        Err(error) if error.kind == Kind::NotSupported => {
            // Taken: a call at the same time noted the same, since the bucket's name stands for the request.
            let (Put::Done | Put::Taken) = store.put_new(bucket, &bucket_key(), &record.to_text()).await?;
            Ok(())
        }
        outcome => outcome,
    }
}

pub async fn read(store: &Store, bucket: &BucketName, key: &str) -> Result<Option<Record>, NoteError> {
    match store.read(bucket, key).await.map_err(NoteError::S3)? {
        Some(text) => Record::from_text(&text).map_err(NoteError::Unreadable),
        None => Ok(None),
    }
}
