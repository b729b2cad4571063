//! Stores a staged file in the bucket, as a whole: the object is the old one or the new one.

use std::ops::Range;
use std::time::SystemTime;

use futures::executor::block_on;
use mountpoint_s3_client::ObjectClient;
use mountpoint_s3_client::types::ETag;
use mountpoint_s3_fs::fs::ToErrno;

use super::blocks::Piece;
use super::file::{Object, StagedFile};
use crate::client::{ObjectHeaders, UserMetadata, digest, is_content_of, is_digest_of};
use crate::front::bucket::{BucketError, WriteCondition};
use crate::front::compose::{ComposeError, OldObject, Part};
use crate::front::metadata::{StoredAttributes, without_time};
use crate::front::{Front, FsError, FsResult};

/// Larger files are multipart uploads.
const SINGLE_PUT: u64 = 8 << 20;
/// How much of a large file is read at once.
const UPLOAD_PIECE: u64 = 8 << 20;

impl<C: ObjectClient + Clone + Send + Sync + 'static> Front<C> {
    /// Stores the copy, if something was changed.
    pub(in crate::front) fn store(&self, file: &StagedFile) -> FsResult<()> {
        let _turn = file.lock();
        self.store_locked(file)
    }

    /// Stores a copy that only the caller uses: what another program is writing is stored when that program says so.
    pub(super) fn store_if_unused(&self, file: &StagedFile) -> FsResult<()> {
        let _turn = file.lock();
        if file.is_last_handle() { self.store_locked(file) } else { Ok(()) }
    }

    fn store_locked(&self, file: &StagedFile) -> FsResult<()> {
        if !file.is_dirty() || self.table.is_unlinked(file.node) {
            return Ok(());
        }
        if file.is_lost() {
            return Err(file.lost());
        }
        let object = file.object();
        if object.inode.is_none() {
            // Of a previous engine, and not claimed yet.
            file.set_object(Object { inode: Some(self.inode(file.node)?), ..object });
            self.claim(file)?;
        }
        let key = self.bucket.key(&self.table.path(file.node))?;
        let mut metadata = self.metadata_to_store(file.node, &key)?;
        if StoredAttributes::parse(&metadata).mtime != Some(file.modified()) {
            // It was written after a program had set its time.
            metadata = without_time(metadata);
        }
        let etag = self.upload_copy(file, &key, &metadata)?;
        self.table.set_staged_etag(file.id, etag.as_bytes())?;
        let headers = ObjectHeaders::new(&etag, metadata).written_at(file.modified());
        self.note_metadata(file.node, &key, headers);
        file.set_object(Object { etag: Some(etag), key, attempts: Vec::new(), ..file.object() });
        file.mark_stored()?;
        self.table.stored(file.node);
        // The object is stored, whatever the superblock says.
        if let Err(error) = self.finish_claim(file).and_then(|()| self.claim(file)) {
            tracing::debug!(%error, "the superblock looks the file up again");
            file.disconnect();
        }
        tracing::debug!(path = ?self.table.path(file.node), size = file.length(), "stored");
        Ok(())
    }

    /// Answers the `ETag` of the new object.
    fn upload_copy(&self, file: &StagedFile, key: &str, metadata: &UserMetadata) -> FsResult<String> {
        let length = file.length();
        if length <= SINGLE_PUT {
            let content = file.piece(&(0..length), &|range| self.fetch(file, range))?;
            return self.put_copy(file, key, content, metadata);
        }
        if let Some(etag) = file.object().etag
            && self.bucket.head(key)?.is_none_or(|it| it.etag != etag && !rebase(file, &it.etag))
        {
            return Err(BucketError::Changed.into());
        }
        let pieces = file.pieces();
        if pieces.iter().any(|it| matches!(it, Piece::Copy(_)))
            && let Some(composed) = self.compose_copy(file, key, metadata, &pieces)?
        {
            return Ok(composed);
        }
        let ranges = pieces.into_iter().flat_map(|piece| match piece {
            Piece::Copy(range) | Piece::Upload(range) => split(range),
        });
        let pieces = ranges.map(|range| file.piece(&range, &|range| self.fetch(file, range)));
        self.bucket.upload(key, metadata, pieces, |digest| self.note_attempt(file, digest))
    }

    /// Notes what is about to be stored, for the engine that goes on if this one dies before it knows whether it was: the file may be
    /// changed before it is stored again.
    fn note_attempt(&self, file: &StagedFile, digest: String) -> FsResult<()> {
        let object = file.object().attempted(digest);
        self.table.set_staged_etag(file.id, object.text().as_bytes())?;
        file.set_object(object);
        Ok(())
    }

    /// Lets the server copy what was not changed. None if it cannot.
    fn compose_copy(
        &self,
        file: &StagedFile,
        key: &str,
        metadata: &UserMetadata,
        pieces: &[Piece],
    ) -> FsResult<Option<String>> {
        let object = file.object();
        let Some(etag) = &object.etag else { return Ok(None) };
        let old = OldObject { key: &object.key, etag };
        let parts = pieces.iter().map(|piece| match piece {
            Piece::Copy(range) => Part::Copy(range.clone()),
            Piece::Upload(range) => Part::Upload(range.clone()),
        });
        let read = |range: &Range<u64>| file.piece(range, &|range| self.fetch(file, range));
        let note = |digest| self.note_attempt(file, digest);
        match self.bucket.compose(key, &old, metadata, parts.collect(), read, note) {
            Ok(etag) => Ok(Some(etag)),
            Err(ComposeError::Failed(error)) => Err(error),
            Err(ComposeError::Unsupported(reason)) => {
                tracing::info!(key, reason, "the store cannot copy parts, uploading the whole file");
                Ok(None)
            }
        }
    }

    fn put_copy(&self, file: &StagedFile, key: &str, content: Vec<u8>, metadata: &UserMetadata) -> FsResult<String> {
        let Some(etag) = file.object().etag else {
            return Ok(self.bucket.put(key, content, WriteCondition::None, metadata)?);
        };
        self.note_attempt(file, digest(&content))?;
        let stored = self.bucket.put(key, content.clone(), WriteCondition::Matches(&etag), metadata);
        let Err(BucketError::Changed) = stored else { return Ok(stored?) };
        match self.bucket.head(key)? {
            Some(found) if is_content_of(&content, &found.etag) => Ok(found.etag),
            Some(found) if rebase(file, &found.etag) => {
                Ok(self.bucket.put(key, content, WriteCondition::Matches(&found.etag), metadata)?)
            }
            Some(_) => Err(BucketError::Changed.into()),
            // Deleted by another client: what is written here is a new file.
            None => Ok(self.bucket.put(key, content, WriteCondition::None, metadata)?),
        }
    }

    /// Tells the superblock what is in the bucket, as far as this copy knows it; it does not take the file for an upload any
    /// longer. The lock is held.
    pub(super) fn finish_claim(&self, file: &StagedFile) -> FsResult<()> {
        let object = file.object();
        let (Some(inode), length) = (object.inode, file.length()) else { return Ok(()) };
        let is_unknown = self.table.is_unlinked(file.node) || file.is_lost();
        let etag = object.etag.filter(|_| !is_unknown).map(|it| ETag::from(it.as_str()));
        let modified: SystemTime = file.modified();
        let finished = block_on(async {
            if etag.is_some() {
                self.metablock.inc_file_size(inode, usize::try_from(length).unwrap_or(usize::MAX)).await?;
                self.metablock.setattr(inode, None, Some(modified.into())).await?;
            }
            self.metablock.finish_writing(inode, etag, file.claim).await
        });
        finished.map(drop).map_err(|error| FsError::new(error.to_errno(), error.to_string()))
    }
}

/// Whether the object that was found is one that this file was to be stored as; then what was not changed since is in it, too.
pub(super) fn rebase(file: &StagedFile, found: &str) -> bool {
    let object = file.object();
    let is_ours = object.attempts.iter().any(|it| is_digest_of(it, found));
    if is_ours {
        tracing::info!(key = object.key, "this file had been stored, though no answer said so");
        file.set_object(Object { etag: Some(found.to_owned()), ..object });
    }
    is_ours
}

fn split(range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let Range { start, end } = range;
    (start..end)
        .step_by(usize::try_from(UPLOAD_PIECE).unwrap_or(usize::MAX))
        .map(move |it| it..(it + UPLOAD_PIECE).min(end))
}
