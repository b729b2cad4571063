//! Learns from the metadata layer what `open` decided, and when something written is in the bucket.

use std::cell::{Cell, RefCell};
use std::ffi::OsStr;

use async_trait::async_trait;
use mountpoint_s3_client::types::ETag;
use mountpoint_s3_fs::fs::OpenFlags;
use mountpoint_s3_fs::memory::WriteHandleLimiter;
use mountpoint_s3_fs::metablock::{
    AddDirEntry, InodeError, InodeKind, InodeNo, Lookup, Metablock, NewHandle, PendingUploadHook, ReadWriteMode,
    S3Location, WriteMode,
};
use time::OffsetDateTime;

thread_local! {
    // The front blocks on the futures of the file system, so both run on the same thread.
    static LAST: RefCell<Opening> = const { RefCell::new(Opening { mode: ReadWriteMode::Read, key: String::new(), etag: String::new(), size: 0 }) };
    static HAS_FINISHED: Cell<bool> = const { Cell::new(false) };
    static OVERWRITING: Cell<Overwriting> = const { Cell::new(Overwriting::AsConfigured) };
}

/// Whether an object may be replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overwriting {
    AsConfigured,
    /// The object is our own: its file is still open.
    Permitted,
}

/// Opens with this permission.
pub fn with<T>(permission: Overwriting, open: impl FnOnce() -> T) -> T {
    OVERWRITING.set(permission);
    let opened = open();
    OVERWRITING.set(Overwriting::AsConfigured);
    opened
}

/// What `open` decided.
#[derive(Clone, Debug)]
pub struct Opening {
    pub mode: ReadWriteMode,
    /// Of the object in the bucket.
    pub key: String,
    /// Of the object that is read; empty if there is none yet.
    pub etag: String,
    pub size: u64,
}

/// What the last `open` on this thread decided.
pub fn last() -> Opening {
    LAST.with_borrow(Clone::clone)
}

/// Whether an upload was completed on this thread since the last call.
pub fn take_finished() -> bool {
    HAS_FINISHED.replace(false)
}

/// Passes everything on, and notes new handles and completed uploads.
pub struct Observed<M>(pub M);

type Answer<T> = Result<T, InodeError>;

#[async_trait]
impl<M: Metablock> Metablock for Observed<M> {
    async fn open_handle(
        &self,
        ino: InodeNo,
        fh: u64,
        write_mode: &WriteMode,
        flags: OpenFlags,
        write_handle_limiter: Option<&WriteHandleLimiter>,
    ) -> Answer<NewHandle> {
        let is_permitted = OVERWRITING.get() == Overwriting::Permitted;
        let write_mode = WriteMode { allow_overwrite: write_mode.allow_overwrite || is_permitted, ..*write_mode };
        let handle = self.0.open_handle(ino, fh, &write_mode, flags, write_handle_limiter).await?;
        let etag = handle.lookup.stat().etag.as_deref().unwrap_or_default().to_owned();
        let key = handle.lookup.s3_location().map(|it| it.full_key().to_string()).unwrap_or_default();
        LAST.set(Opening { mode: handle.mode, key, etag, size: handle.lookup.stat().size as u64 });
        Ok(handle)
    }

    async fn lookup(&self, parent_ino: InodeNo, name: &OsStr) -> Answer<Lookup> {
        self.0.lookup(parent_ino, name).await
    }

    async fn getattr(&self, ino: InodeNo, force_revalidate_if_remote: bool) -> Answer<Lookup> {
        self.0.getattr(ino, force_revalidate_if_remote).await
    }

    async fn setattr(
        &self,
        ino: InodeNo,
        atime: Option<OffsetDateTime>,
        mtime: Option<OffsetDateTime>,
    ) -> Answer<Lookup> {
        self.0.setattr(ino, atime, mtime).await
    }

    async fn create(&self, dir: InodeNo, name: &OsStr, kind: InodeKind) -> Answer<Lookup> {
        self.0.create(dir, name, kind).await
    }

    async fn forget(&self, ino: InodeNo, n: u64) {
        self.0.forget(ino, n).await;
    }

    async fn inc_file_size(&self, ino: InodeNo, len: usize) -> Answer<usize> {
        self.0.inc_file_size(ino, len).await
    }

    async fn finish_writing(&self, ino: InodeNo, etag: Option<ETag>, fh: u64) -> Answer<Lookup> {
        let finished = self.0.finish_writing(ino, etag, fh).await?;
        HAS_FINISHED.set(true);
        Ok(finished)
    }

    async fn finish_reading(&self, ino: InodeNo, fh: u64) -> Answer<()> {
        self.0.finish_reading(ino, fh).await
    }

    async fn flush_reader(&self, ino: InodeNo, fh: u64) -> Answer<()> {
        self.0.flush_reader(ino, fh).await
    }

    async fn flush_writer(&self, ino: InodeNo, fh: u64, hook: PendingUploadHook) -> Answer<Option<PendingUploadHook>> {
        self.0.flush_writer(ino, fh, hook).await
    }

    async fn release_writer(
        &self,
        ino: InodeNo,
        fh: u64,
        hook: PendingUploadHook,
        location: &S3Location,
    ) -> Answer<()> {
        self.0.release_writer(ino, fh, hook, location).await
    }

    async fn try_reactivate_handle(&self, ino: InodeNo, fh: u64, mode: ReadWriteMode) -> Answer<bool> {
        self.0.try_reactivate_handle(ino, fh, mode).await
    }

    async fn new_readdir_handle(&self, dir_ino: InodeNo) -> Answer<u64> {
        self.0.new_readdir_handle(dir_ino).await
    }

    async fn readdir<'a>(
        &self,
        parent: InodeNo,
        fh: u64,
        offset: i64,
        is_readdirplus: bool,
        add: AddDirEntry<'a>,
    ) -> Answer<()> {
        self.0.readdir(parent, fh, offset, is_readdirplus, add).await
    }

    async fn releasedir(&self, fh: u64) -> Answer<()> {
        self.0.releasedir(fh).await
    }

    async fn rename(
        &self,
        source_parent: InodeNo,
        source: &OsStr,
        destination_parent: InodeNo,
        destination: &OsStr,
        allow_overwrite: bool,
    ) -> Answer<()> {
        self.0.rename(source_parent, source, destination_parent, destination, allow_overwrite).await
    }

    async fn rmdir(&self, parent_ino: InodeNo, name: &OsStr) -> Answer<()> {
        self.0.rmdir(parent_ino, name).await
    }

    async fn unlink(&self, parent_ino: InodeNo, name: &OsStr) -> Answer<()> {
        self.0.unlink(parent_ino, name).await
    }
}
