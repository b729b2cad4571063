//! Records what the superblock decides at open and when it completes an upload, and keeps it from waiting for itself.
//!
//! `S3Filesystem::open` and `flush` return neither the `ETag` of the object nor whether the upload was completed, but both pass
//! through the `Metablock` with the number of their handle. The front looks the record up by that number.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures::FutureExt as _;
use mountpoint_s3_client::types::ETag;
use mountpoint_s3_fs::fs::OpenFlags;
use mountpoint_s3_fs::memory::WriteHandleLimiter;
use mountpoint_s3_fs::metablock::{
    AddDirEntry, InodeError, InodeKind, InodeNo, Lookup, Metablock, NewHandle, PendingUploadHook, ReadWriteMode,
    S3Location, WriteMode,
};
use parking_lot::{Condvar, Mutex};
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
///
/// It forgets an inode with its table locked and waits for the directory. When a listing begins and after a rename, it locks the
/// directory and waits for the table. So it forgets only while it does neither. It holds no lock while it waits for the store.
pub struct RecordingMetablock<M> {
    inner: Arc<M>,
    records: Arc<HandleRecords>,
    /// How many listings begin and how many renames are worked on. Locked while inodes are forgotten.
    working: Mutex<usize>,
    work_ended: Condvar,
    /// What the kernel forgot and the superblock did not yet.
    forgotten: Mutex<Vec<(InodeNo, u64)>>,
}

/// So many forgotten inodes may wait. Programs that list and rename all the time would otherwise keep them for ever.
const MOST_FORGOTTEN: usize = 10_000;

/// While it exists, nothing is forgotten.
struct DirectoryWork<'a, M: Metablock + Send + Sync>(&'a RecordingMetablock<M>);

impl<M: Metablock + Send + Sync> Drop for DirectoryWork<'_, M> {
    fn drop(&mut self) {
        *self.0.working.lock() -= 1;
        self.0.forget_waiting();
        self.0.work_ended.notify_all();
    }
}

/// Of a listing, until it waits for the store or has its first entry.
type ListingBegin<'a, M> = Mutex<Option<DirectoryWork<'a, M>>>;

impl<M: Metablock + Send + Sync> RecordingMetablock<M> {
    pub fn new(inner: Arc<M>, records: Arc<HandleRecords>) -> Self {
        let (working, work_ended, forgotten) = (Mutex::new(0), Condvar::new(), Mutex::default());
        Self { inner, records, working, work_ended, forgotten }
    }

    fn begin(&self) -> DirectoryWork<'_, M> {
        let mut working = self.working.lock();
        self.work_ended.wait_while(&mut working, |it| *it > 0 && MOST_FORGOTTEN <= self.forgotten.lock().len());
        if *working == 0 {
            self.forget_all();
        }
        *working += 1;
        DirectoryWork(self)
    }

    /// Forgets, unless something else is going on, which then does this when it has ended.
    fn forget_waiting(&self) {
        while !self.forgotten.lock().is_empty() {
            let Some(working) = self.working.try_lock() else { return };
            if *working > 0 {
                return;
            }
            self.forget_all();
        }
    }

    /// Only while nothing else is going on, and nothing else can begin.
    fn forget_all(&self) {
        let forgotten = std::mem::take(&mut *self.forgotten.lock());
        for (ino, n) in forgotten {
            self.inner.forget(ino, n).now_or_never().expect("forgetting has nothing to wait for");
        }
    }

    async fn list<T>(&self, begin: &ListingBegin<'_, M>, mut listing: impl Future<Output = T> + Unpin) -> T {
        let first = poll_fn(|context| Poll::Ready(listing.poll_unpin(context))).await;
        drop(begin.lock().take());
        match first {
            Poll::Ready(listed) => listed,
            Poll::Pending => listing.await,
        }
    }
}

/// Whether a listing has to be repeated: a file that is being made is in its directory before it is in the superblock's table.
fn is_to_be_repeated<T>(listed: &Answer<T>, directory: InodeNo, deadline: Instant) -> bool {
    matches!(listed, Err(InodeError::InodeDoesNotExist(ino)) if *ino != directory) && Instant::now() < deadline
}

type Answer<T> = Result<T, InodeError>;

/// How long a listing waits for files that are being made: until another thread has done a few instructions.
const LONGEST_CREATION: Duration = Duration::from_secs(1);

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
        self.forgotten.lock().push((ino, n));
        self.forget_waiting();
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
        let deadline = Instant::now() + LONGEST_CREATION;
        loop {
            let begin = Mutex::new(Some(self.begin()));
            let opened = self.list(&begin, self.inner.new_readdir_handle(dir_ino)).await;
            if !is_to_be_repeated(&opened, dir_ino, deadline) {
                return opened;
            }
            std::thread::yield_now();
        }
    }

    async fn readdir<'a>(
        &self,
        parent: InodeNo,
        fh: u64,
        offset: i64,
        is_readdirplus: bool,
        mut add: AddDirEntry<'a>,
    ) -> Answer<()> {
        if offset != 0 {
            return self.inner.readdir(parent, fh, offset, is_readdirplus, add).await;
        }
        // A program that goes back to the beginning lists the directory again.
        let deadline = Instant::now() + LONGEST_CREATION;
        loop {
            let (begin, mut is_begun) = (Mutex::new(Some(self.begin())), false);
            let add = Box::new(|entry, name, offset, generation| {
                is_begun = true;
                // An entry may ask the store for its attributes.
                drop(begin.lock().take());
                add(entry, name, offset, generation)
            });
            let listed = self.list(&begin, self.inner.readdir(parent, fh, offset, is_readdirplus, add)).await;
            if is_begun || !is_to_be_repeated(&listed, parent, deadline) {
                return listed;
            }
            std::thread::yield_now();
        }
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
        let mut rename = self.inner.rename(source_parent, source, destination_parent, destination, allow_overwrite);
        let work = poll_fn(|context| {
            let _work = self.begin();
            rename.poll_unpin(context)
        });
        work.await
    }

    async fn rmdir(&self, parent_ino: InodeNo, name: &OsStr) -> Answer<()> {
        self.inner.rmdir(parent_ino, name).await
    }

    async fn unlink(&self, parent_ino: InodeNo, name: &OsStr) -> Answer<()> {
        self.inner.unlink(parent_ino, name).await
    }
}
