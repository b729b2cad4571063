//! What is in a bucket, or in a part of it: is there anything, and how it is all removed.

use std::time::{Duration, Instant};

use s3csi_core::bucket::BucketName;

use super::error::S3Error;
use super::notes;
use super::store::{BATCH, Doomed, Store};

/// At most ten requests a second, each for a thousand objects: others use the store as well.
const PAUSE: Duration = Duration::from_millis(100);

/// So often the log tells how far we are.
const REPORT: Duration = Duration::from_secs(10);

/// The first thing that is found in there, in words, or nothing. The note about a bucket does not count.
pub async fn anything(store: &Store, bucket: &BucketName, prefix: &str) -> Result<Option<String>, S3Error> {
    // There is one such note in a bucket at most, so that two say everything.
    let found = store.versions(bucket, prefix, 2).await?.items;
    if let Some(object) = found.iter().find(|it| !is_note(it)) {
        return Ok(Some(format!("there is {:?}", object.key)));
    }
    let uploads = store.uploads(bucket, prefix).await?;
    Ok(uploads.first().map(|(key, _)| format!("there is an upload in progress, for {key:?}")))
}

/// Removes everything in there: objects, their versions, delete markers and uploads in progress. The note about a
/// bucket stays: it is the proof that this is ours until it is over.
pub async fn remove_all(store: &Store, bucket: &BucketName, prefix: &str) -> Result<(), S3Error> {
    let mut progress = Progress::new(bucket, prefix);
    loop {
        let uploads = store.uploads(bucket, prefix).await?;
        if uploads.is_empty() {
            break;
        }
        for (key, upload) in &uploads {
            store.abort_upload(bucket, key, upload).await?;
        }
        progress.made(0, uploads.len()).await;
    }
    loop {
        let page = store.versions(bucket, prefix, BATCH).await?;
        let doomed: Vec<Doomed> = page.items.into_iter().filter(|it| !is_note(it)).collect();
        if !doomed.is_empty() {
            store.delete_objects(bucket, &doomed).await?;
            progress.made(doomed.len(), 0).await;
        }
        // What was removed is not listed again: the beginning is always the rest.
        if page.is_last || doomed.is_empty() {
            break;
        }
    }
    progress.done();
    Ok(())
}

/// Removes one object of ours with all its versions.
pub async fn remove_note(store: &Store, bucket: &BucketName, key: &str) -> Result<(), S3Error> {
    loop {
        let page = store.versions(bucket, key, BATCH).await?;
        let doomed: Vec<Doomed> = page.items.into_iter().filter(|it| it.key == key).collect();
        if doomed.is_empty() {
            return Ok(());
        }
        store.delete_objects(bucket, &doomed).await?;
        if page.is_last {
            return Ok(());
        }
    }
}

fn is_note(object: &Doomed) -> bool {
    object.key == notes::bucket_key()
}

struct Progress<'a> {
    bucket: &'a BucketName,
    prefix: &'a str,
    objects: usize,
    uploads: usize,
    reported: Instant,
}

impl<'a> Progress<'a> {
    fn new(bucket: &'a BucketName, prefix: &'a str) -> Self {
        Self { bucket, prefix, objects: 0, uploads: 0, reported: Instant::now() }
    }

    async fn made(&mut self, objects: usize, uploads: usize) {
        self.objects += objects;
        self.uploads += uploads;
        if REPORT <= self.reported.elapsed() {
            self.reported = Instant::now();
            let Self { bucket, prefix, objects, uploads, .. } = self;
            tracing::info!(%bucket, prefix, objects, uploads, "removing the volume's data, more to go");
        }
        tokio::time::sleep(PAUSE).await;
    }

    fn done(self) {
        let Self { bucket, prefix, objects, uploads, .. } = self;
        if 0 < objects + uploads {
            tracing::info!(%bucket, prefix, objects, uploads, "removed the volume's data");
        }
    }
}
