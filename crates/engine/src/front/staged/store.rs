//! Stores a staged file in the bucket, as a whole: the object is the old one or the new one.

use std::ops::Range;
use std::time::SystemTime;

use futures::executor::block_on;
use mountpoint_s3_client::ObjectClient;
use mountpoint_s3_client::types::ETag;
use mountpoint_s3_fs::fs::ToErrno;

use super::blocks::Piece;
use super::file::{Object, StagedFile};
use crate::client::{ObjectHeaders, UserMetadata, is_content_of};
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
        let mut object = file.object();
        if object.inode.is_none() {
            // Of a previous engine, and not claimed yet.
            object.inode = Some(self.inode(file.node)?);
            file.set_object(object.clone());
            self.claim(file)?;
        }
        let key = self.bucket.key(&self.table.path(file.node))?;
        let mut metadata = self.metadata_to_store(file.node, &key)?;
        if StoredAttributes::parse(&metadata).mtime != Some(file.modified()) {
            // It was written after a program had set its time.
            metadata = without_time(metadata);
        }
        let etag = self.upload_copy(file, &key, &object, &metadata)?;
        self.table.set_staged_etag(file.id, etag.as_bytes())?;
        let headers = ObjectHeaders::new(&etag, metadata).written_at(file.modified());
        self.note_metadata(file.node, &key, headers);
        file.set_object(Object { etag: Some(etag), key, ..object });
        file.mark_stored()?;
        self.table.stored(file.node);
        self.finish_claim(file)?;
        self.claim(file)?;
        tracing::debug!(path = ?self.table.path(file.node), size = file.length(), "stored");
        Ok(())
    }

    /// Answers the `ETag` of the new object.
    fn upload_copy(&self, file: &StagedFile, key: &str, object: &Object, metadata: &UserMetadata) -> FsResult<String> {
        let length = file.length();
        if length <= SINGLE_PUT {
            let content = file.piece(&(0..length), &|range| self.fetch(file, range))?;
            return self.put_copy(key, content, object, metadata);
        }
        if let Some(etag) = &object.etag
            && self.bucket.head(key)?.is_none_or(|it| it.etag != *etag)
        {
            return Err(BucketError::Changed.into());
        }
        let pieces = file.pieces();
        if let Some(etag) = &object.etag
            && pieces.iter().any(|it| matches!(it, Piece::Copy(_)))
            && let Some(composed) =
                self.compose_copy(file, key, &OldObject { key: &object.key, etag }, metadata, &pieces)?
        {
            return Ok(composed);
        }
        let ranges = pieces.into_iter().flat_map(|piece| match piece {
            Piece::Copy(range) | Piece::Upload(range) => split(range),
        });
        let pieces = ranges.map(|range| file.piece(&range, &|range| self.fetch(file, range)));
        self.bucket.upload(key, metadata, pieces)
    }

    /// Lets the server copy what was not changed. None if it cannot.
    fn compose_copy(
        &self,
        file: &StagedFile,
        key: &str,
        old: &OldObject<'_>,
        metadata: &UserMetadata,
        pieces: &[Piece],
    ) -> FsResult<Option<String>> {
        let parts = pieces.iter().map(|piece| match piece {
            Piece::Copy(range) => Part::Copy(range.clone()),
            Piece::Upload(range) => Part::Upload(range.clone()),
        });
        let read = |range: &Range<u64>| file.piece(range, &|range| self.fetch(file, range));
        match self.bucket.compose(key, old, metadata, parts.collect(), read) {
            Ok(etag) => Ok(Some(etag)),
            Err(ComposeError::Failed(error)) => Err(error),
            Err(ComposeError::Unsupported(reason)) => {
                tracing::info!(key, reason, "the store cannot copy parts, uploading the whole file");
                Ok(None)
            }
        }
    }

    fn put_copy(&self, key: &str, content: Vec<u8>, object: &Object, metadata: &UserMetadata) -> FsResult<String> {
        let condition = object.etag.as_deref().map_or(WriteCondition::None, WriteCondition::Matches);
        let stored = self.bucket.put(key, content.clone(), condition, metadata);
        let Err(BucketError::Changed) = stored else { return Ok(stored?) };
        // An engine that died may have stored the same bytes without a chance to note it.
        match self.bucket.head(key)? {
            Some(found) if is_content_of(&content, &found.etag) => Ok(found.etag),
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

fn split(range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let Range { start, end } = range;
    (start..end)
        .step_by(usize::try_from(UPLOAD_PIECE).unwrap_or(usize::MAX))
        .map(move |it| it..(it + UPLOAD_PIECE).min(end))
}
