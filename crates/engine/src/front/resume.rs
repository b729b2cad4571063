//! What an engine does with the ids and handles of the engines before it: each is found again when it is used.
//!
//! Nodes are looked up by their path; names that were not in the bucket yet are made again. Handles are opened again, but
//! only if that can neither show other bytes nor hide lost ones.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::executor::block_on;
use mountpoint_s3_client::ObjectClient;
use mountpoint_s3_fs::fs::{Entry, Error, ToErrno};
use mountpoint_s3_fs::metablock::ReadWriteMode;

use super::close_rule::CloseRule;
use super::handles::{Handle, noted_rule};
use super::kept::replaced;
use super::table::{Binding, TableError};
use super::{Failure, Front, Outcome, kind_of, opening};
use crate::state::{KEPT, Kind, POISONED};

/// Requests that the kernel sends for a second time, because their first reader died, have this bit in their number.
const SENT_AGAIN: u64 = 1 << 63;

/// Two requests for one handle must not both open it again; requests for others need not wait.
const LOCKS: usize = 64;

/// Whether a request may have been carried out by an engine that died before it could say so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attempt {
    First,
    Again,
}

impl Attempt {
    pub fn of(unique: u64) -> Self {
        if unique & SENT_AGAIN == 0 { Self::First } else { Self::Again }
    }
}

pub struct Resuming {
    reopening: [Mutex<()>; LOCKS],
    /// Some names that were not in the bucket have not been made again yet.
    has_lost_names: AtomicBool,
    /// Held while all of them are made again, so that nobody lists a directory before.
    remaking: Mutex<()>,
    /// [`Front::restore`] has not ended yet.
    pub is_restoring: AtomicBool,
    /// Handles that nobody uses any more, and that the engine before this one could not drop.
    unreleased: Mutex<Vec<u64>>,
}

impl Resuming {
    /// While it is held, nobody opens this handle again.
    pub fn lock(&self, number: u64) -> MutexGuard<'_, ()> {
        let lock = usize::try_from(number % LOCKS as u64).unwrap_or_default();
        self.reopening[lock].lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn release_later(&self, handle: u64) {
        self.unreleased.lock().unwrap_or_else(PoisonError::into_inner).push(handle);
    }

    pub fn take_unreleased(&self) -> Vec<u64> {
        std::mem::take(&mut *self.unreleased.lock().unwrap_or_else(PoisonError::into_inner))
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
    kind: Kind,
    is_new: bool,
}

impl<C: ObjectClient + Clone + Send + Sync + 'static> Front<C> {
    /// The inode of the file system beneath.
    pub(super) fn inode(&self, node: u64) -> Outcome<u64> {
        // Up to something that is known, then down again.
        let mut steps: Vec<Step> = Vec::new();
        let mut next = node;
        let mut inode = loop {
            match self.table.binding(next)? {
                Binding::Bound(inode) => break inode,
                Binding::Lost { parent, name, kind, is_new } => {
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

    fn find_again(&self, parent: u64, step: &Step) -> Outcome<u64> {
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
                Binding::Lost { .. } => Err(error.into()),
            }
        })
    }

    fn make_again(&self, parent: u64, step: &Step) -> Result<Entry, Error> {
        match step.kind {
            Kind::Directory => block_on(self.files.mkdir(parent, &step.name, 0o755, 0)),
            _ => block_on(self.files.mknod(parent, &step.name, libc::S_IFREG | 0o644, 0, 0)),
        }
    }

    /// A name that only the engines before this one knew must exist again before it is used.
    pub(super) fn remake(&self, parent: u64, name: &OsStr) -> Outcome<()> {
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
        let _one_at_a_time = self.resuming.remaking.lock().unwrap_or_else(PoisonError::into_inner);
        for node in self.table.all_lost_new() {
            if let Err(failure) = self.inode(node) {
                tracing::warn!(path = ?self.table.path(node), %failure, "not stored before the engine was replaced, and not made again");
            }
        }
        // What failed is tried again with the next listing.
        self.resuming.has_lost_names.store(!self.table.all_lost_new().is_empty(), Ordering::Release);
    }

    /// The handle, opened again if it was opened by an engine before this one.
    pub(super) fn handle(&self, number: u64) -> Outcome<Arc<Handle>> {
        if let Some(handle) = self.handles.get(number) {
            return Ok(handle);
        }
        let _one_at_a_time = self.resuming.lock(number);
        match self.handles.get(number) {
            Some(handle) => Ok(handle),
            None => self.reopen(number),
        }
    }

    fn reopen(&self, number: u64) -> Outcome<Arc<Handle>> {
        let slot = self.table.handle(number).map_err(|_| not_open())?;
        let node = slot.owner.load(Ordering::Relaxed);
        let flags = slot.open_flags.load(Ordering::Relaxed).cast_signed();
        let kind = slot.kind();
        if kind == Kind::WriteHandle {
            let is_beyond_help = slot.has(POISONED) || (slot.count.load(Ordering::Acquire) > 0 && !slot.has(KEPT));
            if is_beyond_help {
                return Err(written_before());
            }
            let inode = self.inode(node)?;
            let inner = self.write_kept(number, slot, inode)?;
            return Ok(self.handles.insert(number, Handle::reopened(inode, inner, Some(noted_rule(slot)))));
        }
        let inode = self.inode(node)?;
        if kind == Kind::DirectoryHandle {
            self.remake_all();
            let inner = block_on(self.files.opendir(inode, flags))?.fh;
            return Ok(self.handles.insert(number, Handle::reopened(inode, inner, None)));
        }
        let inner = block_on(self.files.open(inode, flags.into(), CloseRule::opener()))?.fh;
        let opening = opening::last();
        let is_same = matches!(opening.mode, ReadWriteMode::Read) && opening.etag.as_bytes() == self.table.etag(slot);
        if !is_same {
            let _ = block_on(self.files.release(inode, inner, flags, None, false));
            return Err(replaced());
        }
        Ok(self.handles.insert(number, Handle::reopened(inode, inner, None)))
    }
}

fn is<T>(result: &Result<T, Error>, errno: i32) -> bool {
    result.as_ref().is_err_and(|error| error.to_errno() == errno)
}

pub fn not_open() -> Failure {
    Failure { errno: libc::EBADF, reason: "the handle is not open".into() }
}

fn written_before() -> Failure {
    let reason = "the engine was replaced after a part of this file was written".into();
    Failure { errno: libc::EIO, reason }
}
