//! The contents of a bucket or prefix: whether there are any, and deleting all.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use s3csi_core::bucket::BucketName;
use s3csi_core::text::shortened;

use super::error::{S3Error, S3ErrorKind};
use super::metadata;
use super::store::{BATCH, BucketVersioning, ObjectToDelete, S3Store};

/// At most ten requests a second, each for a thousand objects: the store has other clients.
const PAUSE: Duration = Duration::from_millis(100);

/// A store whose listings lag behind is given this many pauses to catch up.
const MAX_STALE_LISTINGS: usize = 10;

/// How often progress is logged.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);

/// Describes the first object or upload; `None` if there are none. The metadata of a bucket do not count.
pub async fn first_item(store: &S3Store, bucket: &BucketName, prefix: &str) -> Result<Option<String>, S3Error> {
    // At most one of two objects is the metadata.
    let found = store.versions(bucket, prefix, 2).await?.items;
    if let Some(object) = found.iter().find(|it| !is_metadata(it)) {
        return Ok(Some(format!("there is {:?}", object.key)));
    }
    let uploads = store.uploads(bucket, prefix).await?;
    Ok(uploads.first().map(|(key, _)| format!("there is an upload in progress, for {key:?}")))
}

/// Deletes everything: objects, versions, delete markers and uploads in progress, until nothing is listed any more. The metadata
/// of a bucket stay until the end, as the proof that it is ours.
pub async fn remove_all(store: &S3Store, bucket: &BucketName, prefix: &str) -> Result<(), S3Error> {
    let mut progress = Progress::new(bucket, prefix);
    let mut aborted = BTreeSet::new();
    loop {
        let uploads = store.uploads(bucket, prefix).await?;
        if uploads.is_empty() {
            break;
        }
        for (key, upload) in &uploads {
            if !aborted.insert((key.clone(), upload.clone())) {
                return Err(still_listed("AbortMultipartUpload", bucket, key));
            }
            store.abort_upload(bucket, key, upload).await?;
        }
        progress.record(0, uploads.len()).await;
    }
    remove_objects(store, bucket, prefix, |it| !is_metadata(it), &mut progress).await?;
    progress.done();
    Ok(())
}

/// Deletes one of our metadata objects with all its versions.
pub async fn remove_metadata(store: &S3Store, bucket: &BucketName, key: &str) -> Result<(), S3Error> {
    let mut progress = Progress::new(bucket, key);
    remove_objects(store, bucket, key, |it| it.key == key, &mut progress).await
}

/// Deletes the objects that are listed under `prefix` and selected, page by page. Deleted objects are not listed again: the first
/// page is always the rest, and the end is reached when a listing shows that there is none.
async fn remove_objects(
    store: &S3Store,
    bucket: &BucketName,
    prefix: &str,
    is_selected: impl Fn(&ObjectToDelete) -> bool,
    progress: &mut Progress<'_>,
) -> Result<(), S3Error> {
    let versioning = store.versioning(bucket).await?;
    let mut deleted = BTreeSet::new();
    let mut stale_listings = 0;
    loop {
        let mut objects = store.versions(bucket, prefix, BATCH).await?.items;
        objects.retain(&is_selected);
        if versioning == BucketVersioning::NeverUsed {
            for object in &mut objects {
                object.version = None;
            }
        }
        let Some(first) = objects.first().map(|it| it.key.clone()) else {
            return Ok(());
        };
        objects.retain(|it| !deleted.contains(it));
        if objects.is_empty() {
            stale_listings += 1;
            if MAX_STALE_LISTINGS < stale_listings {
                return Err(still_listed("DeleteObjects", bucket, &first));
            }
            tokio::time::sleep(PAUSE).await;
            continue;
        }
        store.delete_objects(bucket, &objects).await?;
        progress.record(objects.len(), 0).await;
        // Listings are in the order of keys, so only the last page can be listed again.
        deleted = objects.into_iter().collect();
    }
}

/// Success must not be reported for data that is still there.
fn still_listed(operation: &'static str, bucket: &BucketName, key: &str) -> S3Error {
    let (kind, message) = if key.contains(char::REPLACEMENT_CHARACTER) {
        let message = "the store lists a key with characters that it does not encode, so that its name is unknown";
        (S3ErrorKind::NotSupported, format!("{message}: {key:?}; delete it with another tool"))
    } else {
        (S3ErrorKind::Busy, format!("the store reports success, but still lists {key:?}"))
    };
    S3Error { operation, bucket: bucket.to_string(), kind, message: shortened(&message, 512), code: None }
}

fn is_metadata(object: &ObjectToDelete) -> bool {
    object.key == metadata::bucket_key()
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

    async fn record(&mut self, objects: usize, uploads: usize) {
        self.objects += objects;
        self.uploads += uploads;
        if PROGRESS_INTERVAL <= self.reported.elapsed() {
            self.reported = Instant::now();
            let Self { bucket, prefix, objects, uploads, .. } = self;
            tracing::info!(%bucket, prefix, objects, uploads, "deleting the volume's data");
        }
        tokio::time::sleep(PAUSE).await;
    }

    fn done(self) {
        let Self { bucket, prefix, objects, uploads, .. } = self;
        if 0 < objects + uploads {
            tracing::info!(%bucket, prefix, objects, uploads, "deleted the volume's data");
        }
    }
}
