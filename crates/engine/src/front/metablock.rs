//! Records what the superblock decides at open and when it completes an upload.
//!
//! `S3Filesystem::open` and `flush` return neither the `ETag` of the object nor whether the upload was completed, but both pass
//! through the `Metablock` with the number of their handle. The front looks the record up by that number.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::sync::Arc;

use async_trait::async_trait;
use mountpoint_s3_client::types::ETag;
use mountpoint_s3_fs::fs::OpenFlags;
use mountpoint_s3_fs::memory::WriteHandleLimiter;
use mountpoint_s3_fs::metablock::{
    AddDirEntry, InodeError, InodeKind, InodeNo, Lookup, Metablock, NewHandle, PendingUploadHook, ReadWriteMode,
    S3Location, WriteMode,
};
use parking_lot::Mutex;
use time::OffsetDateTime;

/// What open(2) decided.
#[derive(Clone, Debug)]
pub struct OpenedObject {
    pub mode: ReadWriteMode,
    /// Of the object in the bucket.
    pub key: String,
    /// Of the object that is read; empty if there is none yet.
    pub etag: String,
    pub size: u64,
}

/// Decisions of the superblock, by handle number of `S3Filesystem`.
#[derive(Default)]
pub struct HandleRecords(Mutex<Records>);

#[derive(Default)]
struct Records {
    opened: HashMap<u64, OpenedObject>,
    /// Write handles whose upload was completed.
    completed: HashSet<u64>,
    /// Inodes that may be replaced although the configuration forbids it: their file is still open here.
    replaceable: HashMap<InodeNo, usize>,
}

impl HandleRecords {
    /// What the open of this handle decided. The record is removed.
    pub fn take_opened(&self, handle: u64) -> Option<OpenedObject> {
        self.0.lock().opened.remove(&handle)
    }

    /// Whether the upload of this handle was completed. The record is removed.
    pub fn take_completed(&self, handle: u64) -> bool {
        self.0.lock().completed.remove(&handle)
    }

    /// While `open` runs, the object of this inode may be replaced, whatever the configuration says.
    pub fn with_replaceable<T>(&self, inode: InodeNo, open: impl FnOnce() -> T) -> T {
        *self.0.lock().replaceable.entry(inode).or_default() += 1;
        let opened = open();
        let mut records = self.0.lock();
        if let Some(count) = records.replaceable.get_mut(&inode) {
            *count -= 1;
        }
        records.replaceable.retain(|_, count| *count > 0);
        opened
    }

    /// The handle is closed; nothing will ask for its records.
    fn forget(&self, handle: u64) {
        self.0.lock().opened.remove(&handle);
    }
}

/// A superblock whose decisions about handles are recorded.
pub struct RecordingMetablock<M> {
    pub inner: Arc<M>,
    pub records: Arc<HandleRecords>,
}

type Answer<T> = Result<T, InodeError>;

#[async_trait]
impl<M: Metablock + Send + Sync> Metablock for RecordingMetablock<M> {
    async fn open_handle(
        &self,
        ino: InodeNo,
        fh: u64,
        write_mode: &WriteMode,
        flags: OpenFlags,
        write_handle_limiter: Option<&WriteHandleLimiter>,
    ) -> Answer<NewHandle> {
        let is_replaceable = self.records.0.lock().replaceable.contains_key(&ino);
        let write_mode = WriteMode { allow_overwrite: write_mode.allow_overwrite || is_replaceable, ..*write_mode };
        let handle = self.inner.open_handle(ino, fh, &write_mode, flags, write_handle_limiter).await?;
        let etag = handle.lookup.stat().etag.as_deref().unwrap_or_default().to_owned();
        let key = handle.lookup.s3_location().map(|it| it.full_key().to_string()).unwrap_or_default();
        let opened = OpenedObject { mode: handle.mode, key, etag, size: handle.lookup.stat().size as u64 };
        self.records.0.lock().opened.insert(fh, opened);
        Ok(handle)
    }

    async fn lookup(&self, parent_ino: InodeNo, name: &OsStr) -> Answer<Lookup> {
        self.inner.lookup(parent_ino, name).await
    }

    async fn getattr(&self, ino: InodeNo, force_revalidate_if_remote: bool) -> Answer<Lookup> {
        self.inner.getattr(ino, force_revalidate_if_remote).await
    }

    async fn setattr(
        &self,
        ino: InodeNo,
        atime: Option<OffsetDateTime>,
        mtime: Option<OffsetDateTime>,
    ) -> Answer<Lookup> {
        self.inner.setattr(ino, atime, mtime).await
    }

    async fn create(&self, dir: InodeNo, name: &OsStr, kind: InodeKind) -> Answer<Lookup> {
        self.inner.create(dir, name, kind).await
    }

    async fn forget(&self, ino: InodeNo, n: u64) {
        self.inner.forget(ino, n).await;
    }

    async fn inc_file_size(&self, ino: InodeNo, len: usize) -> Answer<usize> {
        self.inner.inc_file_size(ino, len).await
    }

    async fn finish_writing(&self, ino: InodeNo, etag: Option<ETag>, fh: u64) -> Answer<Lookup> {
        let finished = self.inner.finish_writing(ino, etag, fh).await?;
        self.records.forget(fh);
        self.records.0.lock().completed.insert(fh);
        Ok(finished)
    }

    async fn finish_reading(&self, ino: InodeNo, fh: u64) -> Answer<()> {
        self.records.forget(fh);
        self.inner.finish_reading(ino, fh).await
    }

    async fn flush_reader(&self, ino: InodeNo, fh: u64) -> Answer<()> {
        self.inner.flush_reader(ino, fh).await
    }

    async fn flush_writer(&self, ino: InodeNo, fh: u64, hook: PendingUploadHook) -> Answer<Option<PendingUploadHook>> {
        self.inner.flush_writer(ino, fh, hook).await
    }

    async fn release_writer(
        &self,
        ino: InodeNo,
        fh: u64,
        hook: PendingUploadHook,
        location: &S3Location,
    ) -> Answer<()> {
        self.inner.release_writer(ino, fh, hook, location).await
    }

    async fn try_reactivate_handle(&self, ino: InodeNo, fh: u64, mode: ReadWriteMode) -> Answer<bool> {
        self.inner.try_reactivate_handle(ino, fh, mode).await
    }

    async fn new_readdir_handle(&self, dir_ino: InodeNo) -> Answer<u64> {
        self.inner.new_readdir_handle(dir_ino).await
    }

    async fn readdir<'a>(
        &self,
        parent: InodeNo,
        fh: u64,
        offset: i64,
        is_readdirplus: bool,
        add: AddDirEntry<'a>,
    ) -> Answer<()> {
        self.inner.readdir(parent, fh, offset, is_readdirplus, add).await
    }

    async fn releasedir(&self, fh: u64) -> Answer<()> {
        self.inner.releasedir(fh).await
    }

    async fn rename(
        &self,
        source_parent: InodeNo,
        source: &OsStr,
        destination_parent: InodeNo,
        destination: &OsStr,
        allow_overwrite: bool,
    ) -> Answer<()> {
        self.inner.rename(source_parent, source, destination_parent, destination, allow_overwrite).await
    }

    async fn rmdir(&self, parent_ino: InodeNo, name: &OsStr) -> Answer<()> {
        self.inner.rmdir(parent_ino, name).await
    }

    async fn unlink(&self, parent_ino: InodeNo, name: &OsStr) -> Answer<()> {
        self.inner.unlink(parent_ino, name).await
    }
}
