//! Attributes of files and directories: GETATTR and SETATTR.

use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{FileAttr, FileType};
use futures::executor::block_on;
use mountpoint_s3_client::ObjectClient;
use mountpoint_s3_fs::fs::Attr;
use time::OffsetDateTime;

use super::metadata::{MetadataMode, StoredAttributes};
use super::open_files::OpenFile;
use super::staged::{CopyAttributes, InitialContent, LargeUploads, Writes};
use super::{Front, FsError, FsResult};
use crate::state::{NEW, SlotKind};

pub const STAT_BLOCK: u64 = 512;
/// As `S3Filesystem` says it.
const PREFERRED_BLOCK: u32 = 1 << 20;
/// The kernel asks again soon: such a node is about to go.
const UNLINKED_TTL: Duration = Duration::from_secs(1);

/// How often the superblock is asked for attributes while copies of files are dropped.
const MOST_ATTEMPTS: u32 = 5;

/// Owner and permissions where nothing else is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DefaultAttributes {
    pub uid: u32,
    pub gid: u32,
    pub file_mode: u16,
    pub dir_mode: u16,
}

/// What SETATTR changes.
#[derive(Clone, Copy, Debug, Default)]
pub struct AttributeChange {
    pub size: Option<u64>,
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub accessed: Option<OffsetDateTime>,
    pub modified: Option<OffsetDateTime>,
}

impl<C: ObjectClient + Clone + Send + Sync + 'static> Front<C> {
    pub(super) fn attributes(&self, node: u64) -> FsResult<Attr> {
        if self.table.is_unlinked(node) {
            return self.last_attributes(node);
        }
        let mut attempt = 1;
        loop {
            let drops = self.staged.drops();
            let Some(found) = self.superblock_attributes(node)? else { return self.last_attributes(node) };
            match self.staged.attributes_since(drops, node, found.attr) {
                // The time of a file changes when it is closed; the kernel does not notice that by itself.
                CopyAttributes::Known(attr) if self.has_writer(node) => return Ok(Attr { attr, ttl: Duration::ZERO }),
                CopyAttributes::Known(attr) => return Ok(Attr { attr, ..found }),
                // The kernel asks again before it uses them.
                CopyAttributes::Outdated(attr) if attempt == MOST_ATTEMPTS => {
                    return Ok(Attr { attr, ttl: Duration::ZERO });
                }
                CopyAttributes::Outdated(_) => attempt += 1,
            }
        }
    }

    /// None if the name is gone, and the kernel still refers to it by an open file, a working directory or the root of a bind
    /// mount.
    fn superblock_attributes(&self, node: u64) -> FsResult<Option<Attr>> {
        let find = || self.inode(node).and_then(|inode| Ok(block_on(self.files.getattr(inode))?));
        let is_gone = |error: &FsError| error.errno == libc::ENOENT;
        let found = match find() {
            Err(error) if is_gone(&error) && self.revive_directory(node).is_ok() => find(),
            other => other,
        };
        match found {
            Ok(found) => {
                let attr = self.with_fetched_metadata(node, FileAttr { ino: node, ..found.attr });
                Ok(Some(Attr { attr, ..found }))
            }
            Err(error) if is_gone(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The attributes of a node whose name is gone, as local file systems answer them: with a link count of 0.
    fn last_attributes(&self, node: u64) -> FsResult<Attr> {
        let slot = self.table.node_slot(node)?;
        let DefaultAttributes { uid, gid, file_mode, dir_mode } = self.config.attributes;
        let (kind, perm) = match slot.kind() {
            SlotKind::Directory => (FileType::Directory, dir_mode),
            _ => (FileType::RegularFile, file_mode),
        };
        let size = slot.size.load(Ordering::Relaxed);
        let time: SystemTime = UNIX_EPOCH + Duration::from_secs(slot.stamp.load(Ordering::Relaxed));
        let attr = FileAttr {
            ino: node,
            size,
            blocks: size.div_ceil(STAT_BLOCK),
            atime: time,
            mtime: time,
            ctime: time,
            crtime: UNIX_EPOCH,
            kind,
            perm,
            nlink: 0,
            uid,
            gid,
            rdev: 0,
            blksize: PREFERRED_BLOCK,
            flags: 0,
        };
        Ok(Attr { ttl: UNLINKED_TTL, attr: self.staged.attributes(node, attr) })
    }

    pub(super) fn set_attributes(
        &self,
        node: u64,
        handle: Option<u64>,
        change: &AttributeChange,
        flags: Option<u32>,
    ) -> FsResult<Attr> {
        if let Some(size) = change.size {
            self.set_size(node, handle, size)?;
        }
        let is_chowned = change.uid.is_some() || change.gid.is_some();
        if change.mode.is_none() && (change.size.is_some() || is_chowned) && !self.table.is_unlinked(node) {
            self.clear_set_ids(node)?;
        }
        let stored = StoredAttributes {
            mode: change.mode,
            uid: change.uid,
            gid: change.gid,
            mtime: change.modified.map(SystemTime::from),
        };
        let is_only_size = change.accessed.is_none() && stored == StoredAttributes::default();
        if is_only_size || self.table.is_unlinked(node) {
            return self.attributes(node);
        }
        if let Some(modified) = change.modified {
            let _ = self.with_copy(node, |file| file.set_modified(modified.into()));
            self.table.set_directory_time(node, modified.into());
        }
        match self.config.metadata {
            MetadataMode::Store if stored != StoredAttributes::default() => self.set_metadata(node, &stored)?,
            MetadataMode::Store | MetadataMode::Ignore => {}
            MetadataMode::Refuse => {
                let inode = self.inode(node)?;
                let changed = block_on(self.files.setattr(inode, change.accessed, change.modified, None, flags))?;
                return Ok(Attr { attr: self.staged.attributes(node, changed.attr), ..changed });
            }
        }
        self.attributes(node)
    }

    /// truncate(2), ftruncate(2), and `O_TRUNC` where the kernel sends it apart from the open.
    fn set_size(&self, node: u64, handle: Option<u64>, size: u64) -> FsResult<()> {
        self.table.forget_pages(node);
        if self.staged.get(node).is_some() {
            return self.truncate_copy(node, InitialContent::Current, LargeUploads::Continue, size);
        }
        match handle.and_then(|number| self.handles.get(number).map(|open| (number, open))) {
            Some((number, OpenFile::Direct(_))) if self.is_write_handle(number) => {
                self.resize_upload(node, number, size)
            }
            _ => self.truncate_closed(node, size),
        }
    }

    fn is_write_handle(&self, number: u64) -> bool {
        self.table.handle(number).is_ok_and(|slot| slot.kind() == SlotKind::WriteHandle)
    }

    /// A file that is being uploaded: its length is what was written, unless it can be staged.
    fn resize_upload(&self, node: u64, number: u64, size: u64) -> FsResult<()> {
        let written = self.table.handle(number).map_or(0, |slot| slot.count.load(Ordering::Acquire));
        if size == written {
            return Ok(());
        }
        if self.config.writes == Writes::Sequential {
            return Err(FsError::new(
                libc::EINVAL,
                "the length of a file that is written from beginning to end is what was written; \
                 mount with --writes auto to change it"
                    .into(),
            ));
        }
        self.truncate_copy(node, InitialContent::Current, LargeUploads::Complete, size)
    }

    fn truncate_closed(&self, node: u64, size: u64) -> FsResult<()> {
        let is_new = self.table.has(node, NEW);
        if is_new && size == 0 {
            return Ok(());
        }
        if self.config.writes == Writes::Sequential {
            let inode = self.inode(node)?;
            return Ok(block_on(self.files.setattr(inode, None, None, Some(size), None)).map(drop)?);
        }
        if !is_new && !self.config.allow_overwrite {
            return Err(FsError::new(
                libc::EPERM,
                "changing an existing file is disabled; mount with --allow-overwrite to enable it".into(),
            ));
        }
        let content = if size == 0 { InitialContent::Empty } else { InitialContent::Current };
        self.truncate_copy(node, content, LargeUploads::Continue, size)
    }

    fn truncate_copy(
        &self,
        node: u64,
        content: InitialContent,
        large_uploads: LargeUploads,
        size: u64,
    ) -> FsResult<()> {
        let file = self.stage_with(node, content, large_uploads)?;
        let truncated = file.truncate(size);
        // Without an open handle this is the last use, so it is stored now.
        let stored = if file.is_last_handle() { truncated.and_then(|()| self.store(&file)) } else { truncated };
        self.release_copy(&file);
        stored
    }
}
