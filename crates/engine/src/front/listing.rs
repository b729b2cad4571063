//! Directory listings.

use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use fuser::{FileAttr, FileType};
use futures::executor::block_on;
use mountpoint_s3_client::ObjectClient;
use mountpoint_s3_fs::fs::{DirectoryEntry, DirectoryReplier, ToErrno};
use parking_lot::Mutex;

use super::staged::CopyAttributes;
use super::table::ListedNode;
use super::{Front, FsResult, found};
use crate::state::SlotKind;

/// Whether a listing only names its entries, or also hands the kernel references to them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Detail {
    Names,
    Entries,
}

impl<C: ObjectClient + Clone + Send + Sync + 'static> Front<C> {
    /// Passes entries to `add` until it says that the reply is full.
    pub(super) fn list(
        &self,
        node: u64,
        handle: u64,
        offset: i64,
        detail: Detail,
        add: impl FnMut(&DirectoryEntry) -> bool + Send + Sync,
    ) -> FsResult<()> {
        let handle = self.handle(handle)?;
        let has_to_skip = handle.take_reopened() && offset > 0;
        if has_to_skip {
            block_on(self.files.readdir(handle.inode, handle.inner, 0, Skip { to: offset }))?;
        }
        let unbound = Mutex::default();
        let reply = Reply { front: self, directory: node, detail, drops: self.staged.drops(), unbound: &unbound, add };
        let listed = match detail {
            Detail::Names => block_on(self.files.readdir(handle.inode, handle.inner, offset, reply)),
            Detail::Entries => block_on(self.files.readdirplus(handle.inode, handle.inner, offset, reply)),
        };
        for UnboundEntry { node, inode, kind } in unbound.into_inner() {
            self.give_back(self.table.bind_listed(node, inode, kind).into_iter().collect());
        }
        match listed {
            // The directory has become shorter than what the kernel has seen of it: this is its end.
            Err(error) if has_to_skip && error.to_errno() == libc::EINVAL => Ok(()),
            other => Ok(other?),
        }
    }
}

/// Passes over what the kernel was told by a previous engine.
struct Skip {
    to: i64,
}

impl DirectoryReplier for Skip {
    fn add(&mut self, entry: DirectoryEntry) -> bool {
        entry.offset > self.to
    }
}

/// A node of a previous engine in a reply.
struct UnboundEntry {
    node: u64,
    inode: u64,
    kind: SlotKind,
}

struct Reply<'a, C: ObjectClient + Clone + Send + Sync + 'static, A> {
    front: &'a Front<C>,
    directory: u64,
    detail: Detail,
    /// How many copies of files were dropped before.
    drops: u64,
    unbound: &'a Mutex<Vec<UnboundEntry>>,
    add: A,
}

impl<C, A> DirectoryReplier for Reply<'_, C, A>
where
    C: ObjectClient + Clone + Send + Sync + 'static,
    A: FnMut(&DirectoryEntry) -> bool,
{
    fn add(&mut self, entry: DirectoryEntry) -> bool {
        let table = &self.front.table;
        let known = match entry.name.as_bytes() {
            b"." => Some(self.directory),
            b".." => Some(table.parent(self.directory)),
            _ if self.detail == Detail::Names => Some(entry.ino),
            _ => None,
        };
        if let Some(id) = known {
            return (self.add)(&with_id(entry, id));
        }
        let found = found(&FileAttr { ino: entry.ino, ..entry.attr }, 0);
        let Ok(node) = table.list(self.directory, entry.name.as_bytes(), found) else {
            // The table is full. The reply ends here, as if its buffer was; the next one will be empty.
            return true;
        };
        let (id, inode, kind) = (node.id(), found.inode, found.kind);
        let listed = self.front.with_listed_metadata(id, entry.attr);
        let found = self.front.staged.attributes_since(self.drops, id, listed);
        let (attr, is_outdated) = (found.attr(), matches!(found, CopyAttributes::Outdated(_)));
        // The superblock listed its own files when the directory was opened; they may have been written since.
        let is_written = attr.kind == FileType::RegularFile && (attr.size == 0 || table.has_handles(id));
        let is_asked_again = is_outdated || is_written || self.front.has_unknown_metadata(id, &attr);
        let ttl = if is_asked_again { Duration::ZERO } else { entry.ttl };
        let is_full = (self.add)(&with_id(DirectoryEntry { attr, ttl, ..entry }, id));
        if is_full {
            // The entry is not in the reply. `S3Filesystem` drops its own reference when the reply is full.
            self.front.give_back(table.unlist(node));
        } else if let ListedNode::Unbound(node) = node {
            self.unbound.lock().push(UnboundEntry { node, inode, kind });
        }
        is_full
    }
}

fn with_id(entry: DirectoryEntry, id: u64) -> DirectoryEntry {
    DirectoryEntry { ino: id, attr: FileAttr { ino: id, ..entry.attr }, ..entry }
}
