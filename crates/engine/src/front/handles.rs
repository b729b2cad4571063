//! Open files and directories: our handle numbers, and the handles of the file system beneath that they stand for.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, RwLock};

use futures::executor::block_on;
use mountpoint_s3_client::ObjectClient;
use mountpoint_s3_fs::metablock::ReadWriteMode;

use super::close_rule::CloseRule;
use super::slots::{Kind, POISONED, Slot};
use super::{Failure, Front, Outcome, opening};

/// Tells the kernel to bypass the page cache for this handle (`FOPEN_DIRECT_IO` of the FUSE protocol).
const DIRECT_IO: u32 = 1;

pub struct Handle {
    pub inode: u64,
    /// The number the file system beneath uses.
    pub inner: u64,
    /// Only written files have uploads to complete.
    close_rule: Option<CloseRule>,
}

#[derive(Default)]
pub struct Handles(RwLock<HashMap<u64, Arc<Handle>>>);

impl Handles {
    fn insert(&self, number: u64, handle: Handle) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(number, Arc::new(handle));
    }

    pub fn get(&self, number: u64) -> Outcome<Arc<Handle>> {
        let handle = self.0.read().unwrap_or_else(PoisonError::into_inner).get(&number).cloned();
        handle.ok_or_else(|| Failure { errno: libc::EBADF, reason: "the handle is not open".into() })
    }

    fn remove(&self, number: u64) -> Option<Arc<Handle>> {
        self.0.write().unwrap_or_else(PoisonError::into_inner).remove(&number)
    }
}

/// The answer to open(2): our handle number and flags for the kernel.
pub struct Opened {
    pub number: u64,
    pub flags: u32,
}

impl<C: ObjectClient + Clone + Send + Sync + 'static> Front<C> {
    pub(super) fn open(&self, node: u64, flags: i32, pid: u32) -> Outcome<Opened> {
        let inode = self.table.inode(node)?;
        let rule = CloseRule::for_process(pid);
        let inner = block_on(self.files.open(inode, flags.into(), rule.opener()))?;
        let (kind, close_rule) = match opening::last_mode() {
            ReadWriteMode::Read => (Kind::ReadHandle, None),
            ReadWriteMode::Write => (Kind::WriteHandle, Some(rule)),
        };
        let direct_io = if close_rule.as_ref().is_some_and(CloseRule::needs_direct_io) { DIRECT_IO } else { 0 };
        let number = self.table.add_handle(kind, node, flags).inspect_err(|_| {
            // Nobody can use or close the inner handle then, so it is closed here.
            let _ = block_on(self.files.release(inode, inner.fh, flags, None, false));
        })?;
        self.handles.insert(number, Handle { inode, inner: inner.fh, close_rule });
        Ok(Opened { number, flags: inner.flags | direct_io })
    }

    pub(super) fn write(
        &self,
        number: u64,
        offset: i64,
        data: &[u8],
        write_flags: u32,
        flags: i32,
        lock_owner: Option<u64>,
    ) -> Outcome<u32> {
        let handle = self.handles.get(number)?;
        let slot = self.table.handle(number)?;
        if slot.has(POISONED) {
            return Err(poisoned());
        }
        if let Some(rule) = &handle.close_rule {
            rule.wrote(lock_owner);
        }
        let written =
            block_on(self.files.write(handle.inode, handle.inner, offset, data, write_flags, flags, lock_owner))
                .inspect_err(|_| slot.set(POISONED))?;
        slot.count.fetch_add(u64::from(written), Ordering::Release);
        Ok(written)
    }

    pub(super) fn flush(&self, number: u64, pid: u32, lock_owner: u64) -> Outcome<()> {
        let handle = self.handles.get(number)?;
        let slot = self.table.handle(number)?;
        let closer = match &handle.close_rule {
            Some(rule) => rule.closer(pid, lock_owner, slot.count.load(Ordering::Acquire)),
            None => pid,
        };
        block_on(self.files.flush(handle.inode, handle.inner, lock_owner, closer))?;
        must_be_sound(slot)
    }

    pub(super) fn fsync(&self, number: u64, only_data: bool) -> Outcome<()> {
        let handle = self.handles.get(number)?;
        block_on(self.files.fsync(handle.inode, handle.inner, only_data))?;
        must_be_sound(self.table.handle(number)?)
    }

    pub(super) fn open_directory(&self, node: u64, flags: i32) -> Outcome<Opened> {
        let inode = self.table.inode(node)?;
        let inner = block_on(self.files.opendir(inode, flags))?;
        let number = self.table.add_handle(Kind::DirectoryHandle, node, flags).inspect_err(|_| {
            let _ = block_on(self.files.releasedir(inode, inner.fh, flags));
        })?;
        self.handles.insert(number, Handle { inode, inner: inner.fh, close_rule: None });
        Ok(Opened { number, flags: inner.flags })
    }

    /// The last user of the handle is gone.
    pub(super) fn release(&self, number: u64, flags: i32) -> Outcome<()> {
        let Some(handle) = self.handles.remove(number) else {
            return Err(Failure { errno: libc::EBADF, reason: "the handle is not open".into() });
        };
        let is_directory = self.table.handle(number).is_ok_and(|slot| slot.kind() == Kind::DirectoryHandle);
        let released = if is_directory {
            block_on(self.files.releasedir(handle.inode, handle.inner, flags))
        } else {
            block_on(self.files.release(handle.inode, handle.inner, flags, None, false))
        };
        self.give_back(self.table.drop_handle(number));
        Ok(released?)
    }
}

/// Whatever the file system beneath says: after a failed write the application must hear of it once more, because many look
/// at the result of close only.
fn must_be_sound(slot: &Slot) -> Outcome<()> {
    if slot.has(POISONED) { Err(poisoned()) } else { Ok(()) }
}

fn poisoned() -> Failure {
    Failure { errno: libc::EIO, reason: "an earlier write to this file failed".into() }
}
