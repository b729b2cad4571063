//! Resolves node ids and handles of previous engines on first use.
//!
//! Nodes are looked up by their path; names that were not in the bucket yet are made again. Handles are opened again, but
//! only if that can neither show other bytes nor hide lost ones.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::executor::block_on;
use mountpoint_s3_client::ObjectClient;
use mountpoint_s3_fs::fs::{Entry, Error, ToErrno};
use mountpoint_s3_fs::metablock::ReadWriteMode;
use parking_lot::{Mutex, MutexGuard};

use super::close_rule::CloseRule;
use super::open_files::{Handle, OpenFile};
use super::read_cache::CachedReader;
use super::replay::replaced;
use super::table::{Binding, TableError};
use super::writing::noted_rule;
use super::{Front, FsError, FsResult, kind_of};
use crate::state::{POISONED, SPOOLED, SlotKind};

/// Requests that the kernel sends for a second time, because their first reader died, have this bit in their number.
pub const SENT_AGAIN: u64 = 1 << 63;

/// Two requests for one handle must not both open it again; requests for others need not wait.
const LOCKS: usize = 64;

/// Whether a request may have been carried out by an engine that died before it could say so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    First,
    Resent,
}

impl Delivery {
    pub fn of(unique: u64) -> Self {
        if unique & SENT_AGAIN == 0 { Self::First } else { Self::Resent }
    }
}

/// The number of a request, however often it is sent.
pub fn request_number(unique: u64) -> u64 {
    unique & !SENT_AGAIN
}

pub struct Resuming {
    reopening: [Mutex<()>; LOCKS],
    /// Some names that were not in the bucket have not been made again yet.
    has_lost_names: AtomicBool,
    /// Held while all of them are recreated: listings wait for it.
    remaking: Mutex<()>,
    /// [`Front::restore`] has not ended yet.
    pub is_restoring: AtomicBool,
    /// Handles whose RELEASE the previous engine had read but not finished.
    unreleased: Mutex<Vec<u64>>,
}

impl Resuming {
    /// Locks the reopening of this handle.
    pub fn lock(&self, number: u64) -> MutexGuard<'_, ()> {
        let lock = usize::try_from(number % LOCKS as u64).unwrap_or_default();
        self.reopening[lock].lock()
    }

    pub fn release_later(&self, handle: u64) {
        self.unreleased.lock().push(handle);
    }

    pub fn take_unreleased(&self) -> Vec<u64> {
        std::mem::take(&mut *self.unreleased.lock())
    }
}

impl Default for Resuming {
    fn default() -> Self {
        Self {
            reopening: std::array::from_fn(|_| Mutex::new(())),
            has_lost_names: AtomicBool::new(true),
            remaking: Mutex::default(),
            is_restoring: AtomicBool::new(true),
            unreleased: Mutex::default(),
        }
    }
}

/// A node on the way from the root to the one that is looked for.
struct Step {
    node: u64,
    name: OsString,
    kind: SlotKind,
    is_new: bool,
}

impl<C: ObjectClient + Clone + Send + Sync + 'static> Front<C> {
    /// The inode of `S3Filesystem`.
    pub(super) fn inode(&self, node: u64) -> FsResult<u64> {
        // Up to something that is known, then down again.
        let mut steps: Vec<Step> = Vec::new();
        let mut next = node;
        let mut inode = loop {
            match self.table.binding(next)? {
                Binding::Bound(inode) => break inode,
                Binding::Unresolved { parent, name, kind, is_new } => {
                    let is_circle = steps.iter().any(|it| it.node == next);
                    if is_circle {
                        return Err(TableError::Stale.into());
                    }
                    steps.push(Step { node: next, name, kind, is_new });
                    next = parent;
                }
            }
        };
        for step in steps.into_iter().rev() {
            inode = self.find_again(inode, &step)?;
        }
        Ok(inode)
    }

    fn find_again(&self, parent: u64, step: &Step) -> FsResult<u64> {
        let mut found = block_on(self.files.lookup(parent, &step.name));
        if step.is_new && is(&found, libc::ENOENT) {
            found = self.make_again(parent, step);
            if is(&found, libc::EEXIST) {
                // Another thread was faster.
                found = block_on(self.files.lookup(parent, &step.name));
            }
        }
        let attributes = found?.attr;
        self.table.bind(step.node, attributes.ino, kind_of(attributes.kind)).or_else(|error| {
            block_on(self.files.forget(attributes.ino, 1));
            match self.table.binding(step.node)? {
                Binding::Bound(inode) => Ok(inode),
                Binding::Unresolved { .. } => Err(error.into()),
            }
        })
    }

    fn make_again(&self, parent: u64, step: &Step) -> Result<Entry, Error> {
        match step.kind {
            SlotKind::Directory => block_on(self.files.mkdir(parent, &step.name, 0o755, 0)),
            _ => block_on(self.files.mknod(parent, &step.name, libc::S_IFREG | 0o644, 0, 0)),
        }
    }

    /// A name that only the previous engines knew must exist again before it is used.
    pub(super) fn remake(&self, parent: u64, name: &OsStr) -> FsResult<()> {
        if self.resuming.has_lost_names.load(Ordering::Acquire)
            && let Some(node) = self.table.lost_new(parent, name.as_bytes())
        {
            self.inode(node)?;
        }
        Ok(())
    }

    /// Before a listing: all such names.
    pub(super) fn remake_all(&self) {
        if !self.resuming.has_lost_names.load(Ordering::Acquire) {
            return;
        }
        let _one_at_a_time = self.resuming.remaking.lock();
        for node in self.table.all_lost_new() {
            if let Err(error) = self.inode(node) {
                tracing::warn!(path = ?self.table.path(node), %error, "cannot recreate a file or directory that was not stored yet");
            }
        }
        // What failed is tried again with the next listing.
        self.resuming.has_lost_names.store(!self.table.all_lost_new().is_empty(), Ordering::Release);
    }

    /// The handle, opened again if it was opened by a previous engine.
    pub(super) fn handle(&self, number: u64) -> FsResult<Arc<Handle>> {
        if let Some(OpenFile::Direct(handle)) = self.handles.get(number) {
            return Ok(handle);
        }
        let _one_at_a_time = self.resuming.lock(number);
        match self.handles.get(number) {
            Some(OpenFile::Direct(handle)) => Ok(handle),
            Some(OpenFile::Staged(_)) => Err(not_open()),
            None => self.reopen(number),
        }
    }

    fn reopen(&self, number: u64) -> FsResult<Arc<Handle>> {
        let slot = self.table.handle(number).map_err(|_| not_open())?;
        let node = slot.owner.load(Ordering::Relaxed);
        let flags = slot.open_flags.load(Ordering::Relaxed).cast_signed();
        let kind = slot.kind();
        if kind == SlotKind::WriteHandle {
            let is_beyond_help = slot.has(POISONED) || (slot.count.load(Ordering::Acquire) > 0 && !slot.has(SPOOLED));
            if is_beyond_help {
                return Err(written_before());
            }
            let inode = self.inode(node)?;
            let inner = self.reopen_from_spool(number, slot, inode)?;
            return Ok(self.handles.insert(number, Handle::reopened(inode, inner, Some(noted_rule(slot)))));
        }
        if slot.has(POISONED) {
            return Err(written_before());
        }
        let inode = self.inode(node)?;
        if kind == SlotKind::DirectoryHandle {
            self.remake_all();
            let inner = block_on(self.files.opendir(inode, flags))?.fh;
            return Ok(self.handles.insert(number, Handle::reopened(inode, inner, None)));
        }
        let inner = block_on(self.files.open(inode, libc::O_RDONLY.into(), CloseRule::opener()))?.fh;
        let same = self.records.take_opened(inner).filter(|object| {
            matches!(object.mode, ReadWriteMode::Read) && object.etag.as_bytes() == self.table.etag(slot)
        });
        let Some(object) = same else {
            let _ = self.release_inner(inode, inner, flags);
            return Err(replaced());
        };
        let reader = CachedReader::new(&object, flags);
        Ok(self.handles.insert(number, Handle::reopened(inode, inner, None).with_reader(reader)))
    }
}

fn is<T>(result: &Result<T, Error>, errno: i32) -> bool {
    result.as_ref().is_err_and(|error| error.to_errno() == errno)
}

pub fn not_open() -> FsError {
    FsError { errno: libc::EBADF, reason: "the handle is not open".into() }
}

fn written_before() -> FsError {
    let reason = "something written to this file earlier was lost".into();
    FsError { errno: libc::EIO, reason }
}
