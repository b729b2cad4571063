//! Directories: S3 has none, so one that shall exist without files has a marker, an empty object whose key ends in a slash.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use futures::executor::block_on;
use mountpoint_s3_client::ObjectClient;
use mountpoint_s3_fs::fs::ToErrno;
use parking_lot::Mutex;

use super::bucket::WriteCondition;
use super::resume::Delivery;
use super::staged::Writes;
use super::{Front, FsError, FsResult};
use crate::client::{ObjectHeaders, UserMetadata};
use crate::state::NEW;

/// Directories that lost a file or a directory here. If it was the last one and there is no marker, the bucket does not know them any longer,
/// but the kernel does.
#[derive(Default)]
pub struct Emptied(Mutex<HashSet<u64>>);

/// They bound the memory; a directory that is forgotten here behaves as one that another client emptied.
const MOST_EMPTIED: usize = 10_000;

impl Emptied {
    pub fn note(&self, directory: u64) {
        let mut emptied = self.0.lock();
        if emptied.len() < MOST_EMPTIED {
            emptied.insert(directory);
        }
    }

    fn take(&self, directory: u64) -> bool {
        self.0.lock().remove(&directory)
    }
}

impl<C: ObjectClient + Clone + Send + Sync + 'static> Front<C> {
    /// Whether directories have markers: they must be removable, too.
    fn has_markers(&self) -> bool {
        self.config.writes != Writes::Sequential && self.config.allow_delete
    }

    pub(super) fn ensure_marker(&self, directory: u64, metadata: UserMetadata) -> FsResult<()> {
        if self.has_markers() { self.put_marker(directory, metadata) } else { Ok(()) }
    }

    fn put_marker(&self, node: u64, metadata: UserMetadata) -> FsResult<()> {
        let key = format!("{}/", self.bucket.key(&self.table.path(node))?);
        let etag = self.bucket.put(&key, Vec::new(), WriteCondition::None, &metadata)?;
        self.metadata.insert(&key, ObjectHeaders::new(&etag, metadata));
        self.table.stored(node);
        Ok(())
    }

    pub(super) fn remove_directory(&self, delivery: Delivery, parent: u64, inode: u64, name: &OsStr) -> FsResult<()> {
        let known = self.table.node(parent, name.as_bytes()).filter(|_| self.has_markers());
        let Some(node) = known else {
            self.removed(delivery, parent, name, block_on(self.files.rmdir(inode, name)))?;
            self.emptied.note(parent);
            return Ok(());
        };
        let marker = format!("{}/", self.bucket.key(&self.table.path(node))?);
        let not_empty = || FsError::new(libc::ENOTEMPTY, "the directory is not empty".into());
        // In this order: a file may be stored meanwhile, by a close that the kernel does not wait for.
        if self.has_local_files(node) {
            return Err(not_empty());
        }
        let keys = self.bucket.list(&marker, 2)?;
        if keys.iter().any(|it| *it != marker) {
            return Err(not_empty());
        }
        if !keys.is_empty() {
            self.bucket.delete(&marker)?;
        }
        self.forget_directory(&marker, node, inode, name);
        self.table.unlinked(parent, name.as_bytes());
        self.emptied.note(parent);
        Ok(())
    }

    /// The superblock removes directories that it made itself; others it forgets when it finds that they are gone.
    fn forget_directory(&self, marker: &str, node: u64, parent_inode: u64, name: &OsStr) {
        let _removed = self.removed.note(marker);
        let removed = block_on(self.files.rmdir(parent_inode, name));
        if removed.is_err()
            && let Ok(inode) = self.inode(node)
        {
            let _ = block_on(self.metablock.getattr(inode, true));
        }
    }

    /// Whether something in the directory is not in the bucket yet.
    fn has_local_files(&self, directory: u64) -> bool {
        self.table.has_new_children(directory)
            || self.staged.nodes().into_iter().any(|node| {
                self.table.parent(node) == directory && !self.table.is_unlinked(node) && self.table.has(node, NEW)
            })
    }

    /// Binds a node to the directory with that name. The superblock may remember for a moment that there is none, so one is made
    /// there first.
    pub(super) fn bind_directory(&self, node: u64, parent: u64, name: &OsStr) -> FsResult<()> {
        let directory = self.inode(parent)?;
        let inode = match block_on(self.files.mkdir(directory, name, 0o755, 0)) {
            Err(error) if error.to_errno() == libc::EEXIST => block_on(self.files.lookup(directory, name))?.attr.ino,
            other => other?.attr.ino,
        };
        let released = self.table.rebind_node(node, inode)?;
        self.give_back(vec![released]);
        Ok(())
    }

    /// Makes a directory again that went with its last file.
    pub(super) fn revive_directory(&self, node: u64) -> FsResult<()> {
        let gone = || FsError::new(libc::ENOENT, "the directory does not exist".into());
        if self.table.is_file(node) || !self.emptied.take(node) {
            return Err(gone());
        }
        let (parent, name) = self.table.location(node)?;
        self.bind_directory(node, parent, &name)?;
        self.ensure_marker(node, UserMetadata::new())
    }
}
