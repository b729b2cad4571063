//! Files that are edited in place: a local copy takes every operation and is stored as a whole at close and fsync.
//!
//! All handles of a staged node use the one copy. The superblock takes the copy for an upload in progress (its *claim*), so it
//! keeps the inode whatever the bucket says meanwhile. Opens hold the node's lock shared and staging holds it exclusively, so no
//! handle is opened beside a copy that is being made.

mod blocks;
mod directory;
mod file;
mod names;
mod recover;
mod stage;
mod store;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use fuser::{FileAttr, FileType};
use futures::executor::block_on;
use mountpoint_s3_client::ObjectClient;
use parking_lot::RwLock;

use super::bucket::BucketError;
use super::handles::Opened;
use super::open_files::OpenFile;
use super::resume::not_open;
use super::table::NewHandle;
use super::writing::WriteRequest;
use super::{Front, FsError, FsResult};
use crate::state::{DIRTY, NEW, POISONED, SPOOLED, SlotKind};
use file::StagedWrite;

pub use directory::{Lifetime, StageDirectory};
pub use file::StagedFile;
pub use recover::start_retries;

/// Handle numbers of copies in the superblock; `S3Filesystem` counts its own from 1.
const CLAIMS: u64 = 1 << 62;
/// Locks of nodes. Two nodes that share one wait for each other while one of them is staged.
const LOCKS: usize = 1024;
/// `FUSE_WRITE_CACHE`: the kernel writes back a mapped page.
const WRITE_CACHE: u32 = 1;

/// How files are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writes {
    /// New files are uploaded while they are written; what that cannot do stages the file.
    Auto,
    /// Every file that is written is staged.
    Staged,
    /// Nothing is staged: new files, from beginning to end.
    Sequential,
}

/// What a copy starts with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InitialContent {
    Current,
    Empty,
}

/// What becomes of an upload that is too large to be in the spool when its file is staged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LargeUploads {
    /// It goes on, and the file is not staged: what follows may not fit into the staging directory.
    Continue,
    /// It is completed first: others see what was written so far.
    Complete,
}

pub struct StagedFiles {
    directory: Arc<StageDirectory>,
    files: RwLock<HashMap<u64, Arc<StagedFile>>>,
    locks: Vec<RwLock<()>>,
    next_claim: AtomicU64,
    /// How many copies were dropped.
    drops: AtomicU64,
}

/// Attributes of a file, as far as the copies of files know.
#[derive(Clone, Copy, Debug)]
pub enum CopyAttributes {
    Known(FileAttr),
    /// The superblock takes a file with a copy for an empty one, and was asked before the copy was dropped. Or the copy is lost.
    Outdated(FileAttr),
}

impl CopyAttributes {
    pub fn attr(self) -> FileAttr {
        match self {
            Self::Known(attr) | Self::Outdated(attr) => attr,
        }
    }
}

impl StagedFiles {
    pub fn new(directory: Arc<StageDirectory>) -> Self {
        Self {
            directory,
            files: RwLock::default(),
            locks: (0..LOCKS).map(|_| RwLock::default()).collect(),
            next_claim: AtomicU64::new(CLAIMS),
            drops: AtomicU64::new(0),
        }
    }

    pub fn get(&self, node: u64) -> Option<Arc<StagedFile>> {
        self.files.read().get(&node).cloned()
    }

    /// The copy, with one handle more so that it is not dropped.
    fn acquire(&self, node: u64) -> Option<Arc<StagedFile>> {
        let files = self.files.read();
        let file = files.get(&node).filter(|it| it.is_ready())?;
        file.add_handle();
        Some(Arc::clone(file))
    }

    /// How many copies were dropped so far: asked before the superblock is asked for attributes.
    pub fn drops(&self) -> u64 {
        self.drops.load(Ordering::Acquire)
    }

    /// The attributes of the copy, if there is one, else those that the superblock gave since `drops` were counted.
    pub fn attributes_since(&self, drops: u64, node: u64, attributes: FileAttr) -> CopyAttributes {
        // Under the lock: a copy that is dropped gives its slot to others.
        let files = self.files.read();
        let is_empty_file = attributes.kind == FileType::RegularFile && attributes.size == 0;
        match files.get(&node) {
            // It is dropped soon, and the file is the object again.
            Some(file) if file.is_lost() => CopyAttributes::Outdated(file.attributes(attributes)),
            Some(file) => CopyAttributes::Known(file.attributes(attributes)),
            None if is_empty_file && self.drops() != drops => CopyAttributes::Outdated(attributes),
            None => CopyAttributes::Known(attributes),
        }
    }

    /// The attributes of the copy, if there is one, else these.
    pub fn attributes(&self, node: u64, attributes: FileAttr) -> FileAttr {
        self.attributes_since(self.drops(), node, attributes).attr()
    }

    pub fn nodes(&self) -> Vec<u64> {
        self.files.read().keys().copied().collect()
    }

    /// Nodes whose copy no handle uses.
    fn unused(&self) -> Vec<u64> {
        self.files.read().values().filter(|it| !it.has_handles()).map(|it| it.node).collect()
    }

    fn all(&self) -> Vec<Arc<StagedFile>> {
        self.files.read().values().cloned().collect()
    }

    pub fn lock(&self, node: u64) -> &RwLock<()> {
        &self.locks[usize::try_from(node % LOCKS as u64).unwrap_or_default()]
    }

    fn claim(&self) -> u64 {
        self.next_claim.fetch_add(1, Ordering::Relaxed)
    }
}

impl<C: ObjectClient + Clone + Send + Sync + 'static> Front<C> {
    /// Whether this open needs the local copy. Others are tried without one first: see [`Front::may_use_copy`].
    pub(super) fn needs_copy(&self, node: u64, flags: i32) -> bool {
        if self.staged.get(node).is_some() {
            return true;
        }
        if self.config.writes == Writes::Sequential {
            return false;
        }
        let is_new = self.table.has(node, NEW);
        let is_emptied = is_new || flags & libc::O_TRUNC != 0;
        if !is_new && !self.config.allow_overwrite {
            return false;
        }
        match flags & libc::O_ACCMODE {
            libc::O_RDONLY => false,
            _ if flags & (libc::O_SYNC | libc::O_DSYNC) != 0 => true,
            libc::O_WRONLY if is_emptied => self.config.writes == Writes::Staged,
            // Many programs open a file to change it, and only read it or touch it: the copy is made at the first write.
            libc::O_WRONLY => false,
            _ => is_emptied,
        }
    }

    /// The flags to open a file with in `S3Filesystem`: one that may be edited is only read until the first write.
    pub(super) fn inner_flags(&self, node: u64, flags: i32) -> i32 {
        let is_edited = flags & libc::O_ACCMODE == libc::O_WRONLY && flags & libc::O_TRUNC == 0;
        let may_edit = self.config.writes != Writes::Sequential && self.config.allow_overwrite;
        if is_edited && may_edit && !self.table.has(node, NEW) {
            flags & !(libc::O_ACCMODE | libc::O_APPEND)
        } else {
            flags
        }
    }

    /// Whether a file that the superblock refuses to open beside other handles is opened as a copy, which all of them use.
    pub(super) fn may_use_copy(&self, node: u64, flags: i32, error: &FsError) -> bool {
        let may_change = self.config.allow_overwrite || self.table.has(node, NEW);
        let is_read_only = flags & libc::O_ACCMODE == libc::O_RDONLY;
        error.errno == libc::EPERM && self.config.writes != Writes::Sequential && (is_read_only || may_change)
    }

    /// Whether the file is being uploaded.
    pub(super) fn has_writer(&self, node: u64) -> bool {
        let is_writing = |number: u64| match (self.table.handle(number), self.handles.get(number)) {
            (Ok(slot), _) if slot.kind() != SlotKind::WriteHandle || slot.has(POISONED) => false,
            (_, Some(OpenFile::Direct(handle))) => !handle.is_complete.load(Ordering::Acquire),
            (Ok(slot), None) => slot.has(DIRTY) || (slot.has(SPOOLED) && slot.count.load(Ordering::Acquire) == 0),
            (_, Some(OpenFile::Staged(_))) | (Err(_), None) => false,
        };
        self.table.has_handles(node) && self.table.handles_of(node).into_iter().any(is_writing)
    }

    pub(super) fn open_staged(&self, node: u64, flags: i32, request: u64) -> FsResult<Opened> {
        let is_emptied = flags & libc::O_TRUNC != 0;
        let file = self.stage(node, if is_emptied { InitialContent::Empty } else { InitialContent::Current })?;
        let attached = self.attach(&file, flags, request);
        if attached.is_err() {
            self.release_copy(&file);
        }
        attached
    }

    fn attach(&self, file: &Arc<StagedFile>, flags: i32, request: u64) -> FsResult<Opened> {
        if file.is_lost() {
            return Err(file.lost());
        }
        if flags & libc::O_TRUNC != 0 {
            let _turn = file.lock();
            file.set_length(0)?;
        }
        if self.table.has(file.node, NEW) {
            file.slot().set(DIRTY);
        }
        let is_read_only = flags & libc::O_ACCMODE == libc::O_RDONLY;
        let kind = if is_read_only { SlotKind::ReadHandle } else { SlotKind::WriteHandle };
        let request = request.to_le_bytes();
        let text = if is_read_only { &[][..] } else { &request };
        let new = NewHandle { kind, open_flags: flags, opener: 0, text, flags: 0 };
        let number = self.table.add_handle(file.node, new)?;
        self.handles.insert_staged(number, Arc::clone(file));
        Ok(Opened { number, flags: 0 })
    }

    pub(super) fn staged_handle(&self, number: u64) -> Option<Arc<StagedFile>> {
        match self.handles.get(number)? {
            OpenFile::Staged(file) => Some(file),
            OpenFile::Direct(_) => None,
        }
    }

    pub(super) fn read_staged(&self, file: &StagedFile, offset: i64, size: u32) -> FsResult<Bytes> {
        let offset = u64::try_from(offset).map_err(|_| FsError::new(libc::EINVAL, "negative offset".into()))?;
        Ok(file.read(offset, size as usize, &|range| self.fetch(file, range))?.into())
    }

    pub(super) fn write_staged(&self, file: &StagedFile, request: &WriteRequest<'_>) -> FsResult<u32> {
        let slot = self.table.handle(request.number).map_err(|_| not_open())?;
        let offset = u64::try_from(request.offset).map_err(|_| FsError::new(libc::EINVAL, "negative offset".into()))?;
        let is_from_cache = request.write_flags & WRITE_CACHE != 0;
        let write = StagedWrite {
            unique: request.unique & !super::resume::SENT_AGAIN,
            delivery: request.delivery,
            offset,
            data: request.data,
            is_append: request.flags & libc::O_APPEND != 0 && !is_from_cache,
        };
        {
            let _turn = file.lock();
            file.write(&write, &|range| self.fetch(file, range))?;
        }
        let is_synchronous =
            slot.open_flags.load(Ordering::Relaxed).cast_signed() & (libc::O_SYNC | libc::O_DSYNC) != 0;
        if is_synchronous {
            self.store(file)?;
        }
        Ok(u32::try_from(request.data.len()).unwrap_or(u32::MAX))
    }

    /// FLUSH of a handle that uses a copy.
    pub(super) fn flush_staged(&self, number: u64, file: &StagedFile) -> FsResult<()> {
        let slot = self.table.handle(number).map_err(|_| not_open())?;
        let flags = slot.open_flags.load(Ordering::Relaxed).cast_signed();
        // A reader that closes the file has nothing to store.
        let stored = if flags & libc::O_ACCMODE == libc::O_RDONLY { Ok(()) } else { self.store(file) };
        if file.is_lost() {
            // From now on only this handle reports it, and the file can be opened again.
            slot.set(POISONED);
            if self.handles.remove(number).is_some() {
                self.release_copy(file);
            }
        }
        stored
    }

    /// The handles of a node that use its copy: all but those that have lost something before.
    fn handles_of_copy(&self, node: u64) -> Vec<u64> {
        let is_sound = |number: &u64| self.table.handle(*number).is_ok_and(|slot| !slot.has(POISONED));
        self.table.handles_of(node).into_iter().filter(is_sound).collect()
    }

    /// RELEASE of a handle that uses a copy.
    pub(super) fn release_staged(&self, number: u64, file: &StagedFile) -> FsResult<()> {
        // No caller waits for the result, so what cannot be stored now is stored later.
        let stored = self.store(file);
        self.handles.remove(number);
        self.give_back(self.table.drop_handle(number));
        self.release_copy(file);
        stored
    }

    /// Changes the copy, if there is one. It is not dropped meanwhile.
    pub(super) fn with_copy<T>(&self, node: u64, change: impl FnOnce(&StagedFile) -> T) -> Option<T> {
        let file = self.staged.acquire(node)?;
        let changed = change(&file);
        self.release_copy(&file);
        Some(changed)
    }

    /// One handle less. The copy is dropped with the last one, unless something is not stored yet.
    pub(super) fn release_copy(&self, file: &StagedFile) {
        let is_unused = {
            let _files = self.staged.files.write();
            file.remove_handle()
        };
        let is_needed = file.is_dirty() && !file.is_lost() && !self.table.is_unlinked(file.node);
        if is_unused && !is_needed {
            self.drop_copy(file);
        }
    }

    /// Drops a copy that is stored, lost, or whose name is gone, unless it is used again meanwhile.
    fn drop_copy(&self, file: &StagedFile) {
        let turn = file.lock();
        // Its attributes are the copy's until the superblock knows the size.
        if let Err(error) = self.finish_claim(file) {
            tracing::debug!(%error, "the superblock looks the file up again");
        }
        if file.is_lost() {
            self.look_up_lost(file);
        }
        let mut files = self.staged.files.write();
        let is_current = files.get(&file.node).is_some_and(|it| it.id == file.id);
        if file.has_handles() || !is_current {
            drop(files);
            if is_current && let Err(error) = self.claim(file) {
                tracing::debug!(%error, "cannot claim a staged file again");
            }
            return;
        }
        files.remove(&file.node);
        self.staged.drops.fetch_add(1, Ordering::AcqRel);
        drop(files);
        let is_lost = file.is_lost();
        file.free();
        drop(turn);
        if is_lost {
            self.forget_lost(file.node);
        }
        self.give_back(self.table.drop_staged(file.id));
    }

    /// After a copy was lost the file is the object in the bucket, if there is one. The superblock takes it for empty until it
    /// has asked the bucket, so the attributes are the copy's until then.
    fn look_up_lost(&self, file: &StagedFile) {
        if let Some(inode) = file.object().inode {
            let _ = block_on(self.metablock.getattr(inode, true));
        }
    }

    fn forget_lost(&self, node: u64) {
        self.forget_pending(node);
        self.table.clear(node, NEW);
        self.table.forget_pages(node);
    }

    fn fetch(&self, file: &StagedFile, range: Range<u64>) -> Option<Vec<u8>> {
        let object = file.object();
        let mut fetched = self.bucket.fetch(&object.key, object.etag.as_deref()?, range.clone());
        if let Err(BucketError::Changed) = fetched
            && let Ok(Some(found)) = self.bucket.head(&object.key)
            && store::rebase(file, &found.etag)
        {
            fetched = self.bucket.fetch(&object.key, &found.etag, range);
        }
        fetched
            .inspect_err(
                |error| tracing::warn!(key = object.key, %error, "cannot fetch a part of a file that is edited"),
            )
            .ok()
            .map(Vec::from)
    }
}
