//! A volume that is a part of a shared bucket. Two notes belong to it: one under the volume's key that says everything, and
//! one under the prefix that says whose it is, so that no two volumes ever have the same place or one in the other.

use s3csi_core::bucket::BucketName;
use s3csi_core::chain::Chain;
use s3csi_core::prefix::Prefix;
use s3csi_core::provision::{Create, OnDelete, Record, VolumeKey};

use super::error::{CreateError, DeleteError, FindError, Kind, S3Error};
use super::notes::{self, NoteError};
use super::steps::{Step, Steps};
use super::store::{BATCH, Put, Store};
use super::{Found, contents};

pub async fn create(
    store: &Store,
    bucket: &BucketName,
    prefix: &Prefix,
    create: &Create,
    steps: Steps,
) -> Result<(), CreateError> {
    let record = &create.record;
    let noted = match notes::read(store, bucket, &notes::volume_key(&record.volume)).await {
        Ok(noted) => noted,
        Err(NoteError::S3(cause)) if cause.kind == Kind::NoSuchBucket => {
            return Err(CreateError::NoSharedBucket { cause });
        }
        Err(NoteError::S3(cause)) => return Err(CreateError::Look { cause }),
        Err(NoteError::Unreadable(cause)) => return Err(CreateError::Unreadable { cause }),
    };
    if let Some(noted) = noted {
        if let Some(cause) = noted.difference(record, create.capacity) {
            return Err(CreateError::Different { cause });
        }
    } else {
        if record.on_delete == OnDelete::DeleteAll {
            refuse_strangers(store, bucket, prefix).await?;
        }
        refuse_overlap(store, bucket, prefix, &record.volume).await?;
        note(store, bucket, record).await?;
        steps.done(Step::VolumeNoted);
    }
    let taken = take(store, bucket, prefix, &record.volume).await;
    if let Err(error) = &taken
        && matches!(error, CreateError::Overlap { .. })
        && let Err(error) = contents::remove_note(store, bucket, &notes::volume_key(&record.volume)).await
    {
        tracing::warn!(%bucket, error = %Chain(&error), "a note about a volume that was not made is left behind");
    }
    taken?;
    steps.done(Step::PrefixTaken);
    Ok(())
}

async fn note(store: &Store, bucket: &BucketName, record: &Record) -> Result<(), CreateError> {
    // Taken: another call for the same volume was faster, and noted what the next one will compare.
    match store.put_new(bucket, &notes::volume_key(&record.volume), &record.to_text()).await {
        Ok(Put::Done | Put::Taken) => Ok(()),
        Err(cause) => Err(CreateError::SharedNote { cause }),
    }
}

/// From here on the prefix is this volume's.
async fn take(store: &Store, bucket: &BucketName, prefix: &Prefix, volume: &VolumeKey) -> Result<(), CreateError> {
    let look = |cause| CreateError::Look { cause };
    let put = store.put_new(bucket, &notes::prefix_key(prefix), volume.as_str()).await;
    match put.map_err(|cause| CreateError::SharedNote { cause })? {
        Put::Done => Ok(()),
        Put::Taken => match store.read(bucket, &notes::prefix_key(prefix)).await.map_err(look)? {
            Some(other) if other != volume.as_str() => Err(overlap(bucket, prefix, &other)),
            Some(_) | None => Ok(()),
        },
    }
}

/// With `delete-all` everything in the prefix goes with the volume, so that nothing of others may be in it.
async fn refuse_strangers(store: &Store, bucket: &BucketName, prefix: &Prefix) -> Result<(), CreateError> {
    let found = contents::anything(store, bucket, prefix.as_str()).await;
    match found.map_err(|cause| CreateError::Look { cause })? {
        None => Ok(()),
        Some(_) => Err(CreateError::PrefixNotEmpty { bucket: bucket.to_string(), prefix: prefix.to_string() }),
    }
}

/// No volume lies in another one: whoever mounts the outer one would see the inner one's data, and delete it.
async fn refuse_overlap(
    store: &Store,
    bucket: &BucketName,
    prefix: &Prefix,
    volume: &VolumeKey,
) -> Result<(), CreateError> {
    let look = |cause| CreateError::Look { cause };
    let mut around: Vec<String> = prefix.ancestors().map(|it| notes::prefix_key(&it)).collect();
    let within = store.versions(bucket, &notes::prefixes_within(prefix), BATCH).await.map_err(look)?;
    around.extend(within.items.into_iter().map(|it| it.key));
    for key in around {
        if let Some(other) = store.read(bucket, &key).await.map_err(look)?
            && other != volume.as_str()
        {
            return Err(overlap(bucket, prefix, &other));
        }
    }
    Ok(())
}

fn overlap(bucket: &BucketName, prefix: &Prefix, other: &str) -> CreateError {
    CreateError::Overlap { bucket: bucket.to_string(), prefix: prefix.to_string(), other: other.to_owned() }
}

pub async fn delete(store: &Store, bucket: &BucketName, key: &VolumeKey, steps: Steps) -> Result<(), DeleteError> {
    let note_key = notes::volume_key(key);
    let record = match notes::read(store, bucket, &note_key).await {
        Ok(Some(record)) => record,
        Ok(None) => return Ok(()),
        Err(NoteError::S3(cause)) if cause.kind == Kind::NoSuchBucket => return Ok(()),
        Err(NoteError::S3(cause)) => return Err(DeleteError::Look { cause }),
        Err(NoteError::Unreadable(cause)) => return Err(DeleteError::Unreadable { cause }),
    };
    // A note without a prefix, or under the name of another volume, is not of ours.
    let Some(prefix) = record.prefix.as_ref().filter(|_| record.volume == *key) else {
        return Err(DeleteError::Foreign { bucket: bucket.to_string() });
    };
    let look = |cause: S3Error| DeleteError::Look { cause };
    // A volume whose making never got so far that the prefix became its own has no data.
    let owner = store.read(bucket, &notes::prefix_key(prefix)).await.map_err(look)?;
    if owner.as_deref() == Some(key.as_str()) {
        match record.on_delete {
            OnDelete::Retain => tracing::info!(%bucket, %prefix, "the data stays, as its volume's onDelete says"),
            OnDelete::DeleteIfEmpty => {
                if let Some(what) = contents::anything(store, bucket, prefix.as_str()).await.map_err(look)? {
                    let place = format!("prefix {:?} of bucket {:?}", prefix.as_str(), bucket.as_str());
                    return Err(DeleteError::NotEmpty { place, what });
                }
            }
            OnDelete::DeleteAll => {
                let removed = contents::remove_all(store, bucket, prefix.as_str()).await;
                removed.map_err(|cause| DeleteError::Empty { cause })?;
                steps.done(Step::DataDeleted);
            }
        }
        let released = contents::remove_note(store, bucket, &notes::prefix_key(prefix)).await;
        released.map_err(|cause| DeleteError::Note { cause })?;
        steps.done(Step::PrefixReleased);
    }
    contents::remove_note(store, bucket, &note_key).await.map_err(|cause| DeleteError::Note { cause })?;
    steps.done(Step::NoteRemoved);
    Ok(())
}

pub async fn find(store: &Store, bucket: &BucketName, key: &VolumeKey) -> Result<Found, FindError> {
    match notes::read(store, bucket, &notes::volume_key(key)).await {
        Ok(Some(record)) if record.volume == *key => Ok(Found::Ours(record)),
        Ok(Some(_) | None) => Ok(Found::Nothing),
        Err(NoteError::S3(cause)) if cause.kind == Kind::NoSuchBucket => Ok(Found::Nothing),
        Err(NoteError::S3(cause)) => Err(FindError::Look { cause }),
        Err(NoteError::Unreadable(cause)) => Err(FindError::Unreadable { cause }),
    }
}
