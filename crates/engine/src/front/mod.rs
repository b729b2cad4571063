//! Our FUSE front: answers the kernel with the file system of `mountpoint-s3-fs`, under ids and handles of our own.
//!
//! It owns node ids and handles (in `table`) so that a later engine can take over a mount that this one served. It decides
//! nothing about S3.
//!
//! `Front` is one type in many files, as a FUSE file system is one object: nearly every request needs the table, the handles and
//! `S3Filesystem` together. The files follow the requests. `requests` receives them and answers; `names`, `directories`,
//! `rename_directory` and `listing` serve requests about names, `attributes` and `metadata` those about attributes, `handles`
//! those about open files, and `staged` all requests for files that are edited in place. `resume` and `replay` continue what a
//! previous engine left. State that one of them alone needs is a type there (`Handles`, `StagedFiles`, `Resuming`), and `bucket`
//! and `compose`, which call S3 without `S3Filesystem`, know nothing of the front.

mod attributes;
mod bucket;
mod close_rule;
mod compose;
mod directories;
mod handles;
mod listing;
mod metablock;
mod metadata;
mod names;
mod open_files;
mod pages;
mod read_cache;
mod read_order;
mod rename_directory;
mod replay;
mod requests;
mod resume;
mod staged;
mod table;
mod writing;

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::UNIX_EPOCH;

use fuser::{FileAttr, FileType};
use futures::executor::block_on;
use mountpoint_s3_client::ObjectClient;
use mountpoint_s3_fs::S3Filesystem;
use mountpoint_s3_fs::fs::{Entry, Error, ToErrno};
use mountpoint_s3_fs::metablock::Metablock;

use directories::Emptied;
use open_files::Handles;
use read_cache::{CachePlace, ReadCache};
use resume::{Delivery, Resuming};
use staged::StagedFiles;
use table::{EntryInfo, InodeReferences, Table, TableError};

use crate::client::{MetadataCache, RemovedDirectories, SmallFilePrefetch, StoreTimeout};
use crate::session::Resumable;
use crate::state::{InFlight, RequestClass, SlotKind, State};

pub use attributes::DefaultAttributes;
pub use bucket::{Bucket, UploadSettings};
pub use metablock::{HandleRecords, RecordingMetablock};
pub use metadata::{MetadataMode, Overrides};
pub use read_cache::{KeptFiles, KeptLimit};
pub use requests::Requests;
pub use staged::{Lifetime, StageDirectory, Writes, start_retries};

/// What the front does after a rename.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterRename {
    /// The object keeps its `ETag`: cached attributes stay valid.
    KeepAttributes,
    /// The object is a copy and may have another `ETag`: cached attributes are stale.
    Revalidate,
}

pub struct Front<C: ObjectClient + Clone + Send + Sync + 'static> {
    files: S3Filesystem<C>,
    table: Table,
    state: State,
    handles: Handles,
    resuming: Resuming,
    config: FrontConfig,
    small_files: Arc<SmallFilePrefetch>,
    records: Arc<HandleRecords>,
    metablock: Arc<dyn Metablock>,
    bucket: Arc<Bucket<C>>,
    read_cache: ReadCache<C>,
    staged: StagedFiles,
    emptied: Emptied,
    metadata: Arc<MetadataCache>,
    removed: Arc<RemovedDirectories>,
    timeout: StoreTimeout,
    /// The kernel has seen a file with a set-user-ID or set-group-ID bit.
    has_set_ids: AtomicBool,
}

/// What the front shares with the client and the superblock.
pub struct FrontContext<C> {
    pub small_files: Arc<SmallFilePrefetch>,
    pub records: Arc<HandleRecords>,
    pub metablock: Arc<dyn Metablock>,
    pub bucket: Bucket<C>,
    pub stage: StageDirectory,
    /// Where what was read is kept; otherwise the staging directory takes what is read at random, while files are open.
    pub kept: Option<KeptFiles>,
    pub metadata: Arc<MetadataCache>,
    pub removed: Arc<RemovedDirectories>,
    pub timeout: StoreTimeout,
}

/// Settings of this mount.
#[derive(Clone, Debug)]
pub struct FrontConfig {
    pub after_rename: AfterRename,
    pub commit_point: CommitPoint,
    pub writes: Writes,
    pub allow_delete: bool,
    pub allow_overwrite: bool,
    pub attributes: DefaultAttributes,
    pub metadata: MetadataMode,
    pub overrides: Overrides,
    /// The size that statfs(2) reports, all of it free.
    pub reported_size: u64,
    /// Directories with more objects are not renamed.
    pub max_rename_objects: usize,
    /// LOOKUP of this name never returns; set by tests only.
    pub hang_on_lookup: Option<OsString>,
}

/// When written data is stored in the bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommitPoint {
    /// When the upload of the whole file is completed.
    Close,
    /// At every close and fsync.
    Flush,
}

/// Why an operation fails: an errno for the kernel, a reason for the log.
#[derive(Debug)]
pub struct FsError {
    errno: i32,
    reason: String,
}

type FsResult<T> = Result<T, FsError>;

impl FsError {
    fn new(errno: i32, reason: String) -> Self {
        Self { errno, reason }
    }
}

impl<C: ObjectClient + Clone + Send + Sync + 'static> Front<C> {
    /// The table must be loaded before the first request is served.
    pub fn new(files: S3Filesystem<C>, state: &State, config: FrontConfig, context: FrontContext<C>) -> Self {
        let (bucket, directory) = (Arc::new(context.bucket), Arc::new(context.stage));
        let place = context.kept.map_or_else(|| CachePlace::Stage(Arc::clone(&directory)), CachePlace::Kept);
        Self {
            files,
            table: Table::new(state.clone()),
            state: state.clone(),
            handles: Handles::default(),
            resuming: Resuming::default(),
            config,
            small_files: context.small_files,
            records: context.records,
            metablock: context.metablock,
            read_cache: ReadCache::new(Arc::clone(&bucket), place),
            bucket,
            staged: StagedFiles::new(directory),
            emptied: Emptied::default(),
            metadata: context.metadata,
            removed: context.removed,
            timeout: context.timeout,
            has_set_ids: AtomicBool::new(false),
        }
    }

    /// Gives the entry our id. From here on the kernel holds a reference to it.
    fn remember(&self, parent: u64, name: &OsStr, mut entry: Entry, flags: u32) -> FsResult<Entry> {
        let inode = entry.attr.ino;
        entry.attr.ino = self
            .table
            .entry(parent, name.as_bytes(), found(&entry.attr, flags))
            .inspect_err(|_| block_on(self.files.forget(inode, 1)))?;
        Ok(entry)
    }

    fn give_back(&self, released: Vec<InodeReferences>) {
        for InodeReferences { inode, count } in released.into_iter().filter(|it| it.count > 0) {
            block_on(self.files.forget(inode, count));
        }
    }
}

impl<C: ObjectClient + Clone + Send + Sync + 'static> Resumable for Front<C> {
    fn resume(&self) {
        self.table.load();
        self.recover_pending();
        self.recover_staged();
    }

    fn fail_lost_requests(&self, lost: &[InFlight]) {
        for InFlight { handle, class, .. } in lost {
            match (class, self.table.handle(*handle)) {
                (RequestClass::Write, Ok(slot)) => self.poison(*handle, slot),
                (RequestClass::Release, Ok(_)) => self.resuming.release_later(*handle),
                _ => {}
            }
        }
    }
}

/// What the table has to know of a name.
fn found(attributes: &FileAttr, flags: u32) -> EntryInfo {
    EntryInfo {
        kind: kind_of(attributes.kind),
        inode: attributes.ino,
        size: attributes.size,
        stamp: attributes.mtime.duration_since(UNIX_EPOCH).map_or(0, |it| it.as_secs()),
        flags,
    }
}

fn kind_of(kind: FileType) -> SlotKind {
    if kind == FileType::Directory { SlotKind::Directory } else { SlotKind::File }
}

impl From<Error> for FsError {
    fn from(error: Error) -> Self {
        Self { errno: error.to_errno(), reason: error.to_string() }
    }
}

impl From<TableError> for FsError {
    fn from(error: TableError) -> Self {
        let errno = match error {
            TableError::Stale => libc::ESTALE,
            TableError::Full => libc::ENFILE,
        };
        Self { errno, reason: error.to_string() }
    }
}

impl fmt::Display for FsError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.reason)
    }
}
