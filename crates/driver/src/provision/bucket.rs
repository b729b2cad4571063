//! A volume that is a bucket of its own.

use s3csi_core::bucket::BucketName;
use s3csi_core::chain::Chain;
use s3csi_core::provision::{Create, OnDelete, Record, VolumeKey};

use super::error::{CreateError, DeleteError, FindError, Kind};
use super::notes::{self, NoteError, Noted};
use super::steps::{Step, Steps};
use super::store::{Made, Store};
use super::{Found, contents};

pub async fn create(store: &Store, bucket: &BucketName, create: &Create, steps: Steps) -> Result<(), CreateError> {
    let before = match look(store, bucket).await {
        Ok(Noted::Not) => Before::NotNoted,
        Ok(Noted::ByTags(record) | Noted::ByObject(record)) => return compare(&record, create),
        Err(CreateError::Look { cause }) if cause.kind == Kind::NoSuchBucket => Before::Missing,
        // A bucket of somebody else is not shown to us; making it tells.
        Err(CreateError::Look { cause }) if cause.kind == Kind::Denied => Before::Hidden,
        Err(error) => return Err(error),
    };
    let made =
        store.create_bucket(bucket, create.record.region.as_deref()).await.map_err(|cause| match cause.kind {
            Kind::Foreign => CreateError::ForeignBucket { bucket: bucket.to_string(), cause },
            _ => CreateError::Bucket { cause },
        })?;
    steps.done(Step::BucketCreated);
    let outcome = mark(store, bucket, create, &before).await;
    let is_left = match &outcome {
        Err(CreateError::Look { cause } | CreateError::Note { cause, .. }) => !cause.kind.passes(),
        Ok(()) | Err(_) => false,
    };
    // The provisioner does not come back after an error that never passes: nobody would ever find this bucket.
    if made == Made::Now
        && is_left
        && let Err(error) = store.delete_bucket(bucket).await
    {
        tracing::warn!(%bucket, error = %Chain(&error), "an empty bucket is left behind, without a note");
    }
    outcome?;
    steps.done(Step::BucketMarked);
    Ok(())
}

/// What the first look at the bucket showed.
enum Before {
    Missing,
    NotNoted,
    Hidden,
}

async fn mark(store: &Store, bucket: &BucketName, create: &Create, before: &Before) -> Result<(), CreateError> {
    if let Before::Hidden = before
        && let Noted::ByTags(record) | Noted::ByObject(record) = look(store, bucket).await?
    {
        return compare(&record, create);
    }
    // A bucket without a note is one that a call before us made and had no time to mark, if it is still empty.
    if !matches!(before, Before::Missing)
        && contents::anything(store, bucket, "").await.map_err(|cause| CreateError::Look { cause })?.is_some()
    {
        return Err(CreateError::NotMarked { bucket: bucket.to_string() });
    }
    let noted = notes::note_bucket(store, bucket, &create.record).await;
    noted.map_err(|cause| CreateError::Note { bucket: bucket.to_string(), cause })
}

async fn look(store: &Store, bucket: &BucketName) -> Result<Noted, CreateError> {
    notes::of_bucket(store, bucket).await.map_err(|error| match error {
        NoteError::S3(cause) => CreateError::Look { cause },
        NoteError::Unreadable(cause) => CreateError::Unreadable { cause },
    })
}

fn compare(before: &Record, create: &Create) -> Result<(), CreateError> {
    match before.difference(&create.record, create.capacity) {
        None => Ok(()),
        Some(cause) => Err(CreateError::Different { cause }),
    }
}

/// `key` is missing for a bucket of the driver before us, which left no notes and never deleted data.
pub async fn delete(
    store: &Store,
    bucket: &BucketName,
    key: Option<&VolumeKey>,
    steps: Steps,
) -> Result<(), DeleteError> {
    let noted = match notes::of_bucket(store, bucket).await {
        Ok(noted) => noted,
        Err(NoteError::S3(cause)) if cause.kind == Kind::NoSuchBucket => return Ok(()),
        Err(NoteError::S3(cause)) => return Err(DeleteError::Look { cause }),
        Err(NoteError::Unreadable(cause)) => return Err(DeleteError::Unreadable { cause }),
    };
    let on_delete = match (&noted, key) {
        (Noted::ByTags(record) | Noted::ByObject(record), Some(key)) if record.volume == *key => record.on_delete,
        (Noted::ByTags(_) | Noted::ByObject(_), _) => return Err(DeleteError::Foreign { bucket: bucket.to_string() }),
        // Its name is ours. It was never marked, or an earlier call removed the note: either way nothing is in it.
        (Noted::Not, _) => OnDelete::DeleteIfEmpty,
    };
    match on_delete {
        OnDelete::Retain => {
            tracing::info!(%bucket, "the bucket stays, as its volume's onDelete says");
            return Ok(());
        }
        OnDelete::DeleteIfEmpty => {
            let found = contents::anything(store, bucket, "").await.map_err(|cause| DeleteError::Look { cause })?;
            if let Some(what) = found {
                return Err(not_empty(bucket, what));
            }
        }
        OnDelete::DeleteAll => {
            contents::remove_all(store, bucket, "").await.map_err(|cause| DeleteError::Empty { cause })?;
            steps.done(Step::DataDeleted);
        }
    }
    if matches!(noted, Noted::ByObject(_)) || on_delete == OnDelete::DeleteAll {
        let removed = contents::remove_note(store, bucket, &notes::bucket_key()).await;
        removed.map_err(|cause| DeleteError::Note { cause })?;
        steps.done(Step::NoteRemoved);
    }
    store.delete_bucket(bucket).await.map_err(|cause| match cause.kind {
        Kind::NotEmpty => not_empty(bucket, "somebody has just written to it".to_owned()),
        _ => DeleteError::Bucket { cause },
    })?;
    steps.done(Step::BucketDeleted);
    Ok(())
}

pub async fn find(store: &Store, bucket: &BucketName, key: &VolumeKey) -> Result<Found, FindError> {
    match notes::of_bucket(store, bucket).await {
        Ok(Noted::ByTags(record) | Noted::ByObject(record)) if record.volume == *key => Ok(Found::Ours(record)),
        Ok(Noted::ByTags(_) | Noted::ByObject(_) | Noted::Not) => Ok(Found::Nothing),
        Err(NoteError::S3(cause)) if cause.kind == Kind::NoSuchBucket => Ok(Found::Nothing),
        Err(NoteError::S3(cause)) => Err(FindError::Look { cause }),
        Err(NoteError::Unreadable(cause)) => Err(FindError::Unreadable { cause }),
    }
}

fn not_empty(bucket: &BucketName, what: String) -> DeleteError {
    DeleteError::NotEmpty { place: format!("bucket {:?}", bucket.as_str()), what }
}
