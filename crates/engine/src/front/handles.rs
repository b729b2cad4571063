//! Opens, reads and releases files and directories. What is written is in `writing`.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use futures::executor::block_on;
use mountpoint_s3_client::ObjectClient;
use mountpoint_s3_fs::fs::Error;
use mountpoint_s3_fs::metablock::ReadWriteMode;

use super::close_rule::CloseRule;
use super::open_files::{Handle, OpenFile};
use super::pages::DIRECT_IO;
use super::read_cache::{CachedReader, ReadReply};
use super::resume::{Delivery, not_open, request_number};
use super::table::NewHandle;
use super::writing::{PriorWrites, noted_rule};
use super::{Front, FsResult};
use crate::state::{POISONED, SPOOLED, SlotKind};

/// The answer to open(2): our handle number and flags for the kernel.
pub struct Opened {
    pub number: u64,
    pub flags: u32,
}

impl<C: ObjectClient + Clone + Send + Sync + 'static> Front<C> {
    pub(super) fn open(&self, node: u64, flags: i32, pid: u32, unique: u64) -> FsResult<Opened> {
        let request = request_number(unique);
        if Delivery::of(unique) == Delivery::Resent
            && let Some(opened) = self.opened_before(node, flags, request)
        {
            return Ok(opened);
        }
        {
            let _shared = self.staged.lock(node).read();
            if !self.needs_copy(node, flags) {
                match self.open_direct(node, flags, pid, request) {
                    Err(error) if self.may_use_copy(node, flags, &error) => {}
                    opened => return opened,
                }
            }
        }
        self.open_staged(node, flags, request)
    }

    /// The handle that a previous engine opened for this request, without being able to say so. With a second one, the first would stay
    /// open for ever.
    fn opened_before(&self, node: u64, flags: i32, request: u64) -> Option<Opened> {
        let number = self.table.opened_by(node, &request.to_le_bytes())?;
        let slot = self.table.handle(number).ok()?;
        match self.handles.get(number) {
            Some(OpenFile::Staged(_)) => Some(Opened { number, flags: 0 }),
            None if !slot.has(SPOOLED) => None,
            Some(OpenFile::Direct(_)) | None => {
                let is_direct = noted_rule(slot).needs_direct_io() || flags & libc::O_DIRECT != 0;
                Some(Opened { number, flags: if is_direct { DIRECT_IO } else { 0 } })
            }
        }
    }

    fn open_direct(&self, node: u64, flags: i32, pid: u32, request: u64) -> FsResult<Opened> {
        let inode = self.inode(node)?;
        let inner = block_on(self.files.open(inode, self.inner_flags(node, flags).into(), CloseRule::opener()))?;
        let object = self.records.take_opened(inner.fh).ok_or_else(not_open)?;
        let (kind, close_rule) = match object.mode {
            ReadWriteMode::Read => (SlotKind::ReadHandle, None),
            ReadWriteMode::Write => (SlotKind::WriteHandle, Some(CloseRule::for_process(pid))),
        };
        let direct_io = if close_rule.as_ref().is_some_and(CloseRule::needs_direct_io) { DIRECT_IO } else { 0 };
        let request = request.to_le_bytes();
        let text = if kind == SlotKind::ReadHandle { object.etag.as_bytes() } else { &request };
        let opener = close_rule.as_ref().map_or(0, CloseRule::process);
        let new = NewHandle { kind, open_flags: flags, opener, text, flags: self.flags_of_new(kind) };
        let is_replaced = kind == SlotKind::WriteHandle && flags & libc::O_TRUNC != 0;
        let kept = if is_replaced { self.keep_metadata(node) } else { Ok(()) };
        let added = kept.and_then(|()| Ok(self.table.add_handle(node, new)?));
        let number = added.inspect_err(|_| {
            // The kernel never learns of this handle, so it is closed here.
            let _ = self.release_inner(inode, inner.fh, flags);
        })?;
        let fetch = match object.mode {
            ReadWriteMode::Read => self.small_files.opened(Instant::now(), &object.key, &object.etag, object.size),
            ReadWriteMode::Write => None,
        };
        let (pages, unconfirmed) = self.open_pages(node, number, flags, &object);
        let reader = if kind == SlotKind::ReadHandle { CachedReader::new(&object, flags) } else { None };
        let handle = Handle::new(inode, inner.fh, close_rule).with_fetch(fetch, object.etag).with_reader(reader);
        self.handles.insert(number, handle.with_unconfirmed(unconfirmed));
        Ok(Opened { number, flags: inner.flags | direct_io | pages })
    }

    pub(super) fn read(
        &self,
        number: u64,
        offset: i64,
        size: u32,
        flags: i32,
        lock_owner: Option<u64>,
    ) -> FsResult<ReadReply> {
        if let Some(file) = self.staged_handle(number) {
            return self.read_staged(&file, offset, size).map(ReadReply::from);
        }
        let handle = self.handle(number)?;
        self.confirm_pages(number, &handle);
        if let Some(content) = handle.content() {
            let start = usize::try_from(offset).unwrap_or(usize::MAX).min(content.len());
            let end = start.saturating_add(size as usize).min(content.len());
            return Ok(content.slice(start..end).into());
        }
        let start = u64::try_from(offset).unwrap_or_default();
        if let Some(read) = handle.reader.as_ref().and_then(|it| self.read_cache.read(it, start, size)) {
            return read;
        }
        let read = {
            let _turn = handle.order.enter(start, size.into());
            let ask = || self.files.read(handle.inode, handle.inner, offset, size, flags, lock_owner);
            block_on(self.timeout.repeat(ask))
        };
        match read {
            Ok(data) => Ok(match &handle.reader {
                Some(reader) => self.read_cache.pass(reader, start, data),
                None => data.into(),
            }),
            Err(error) => {
                let slot = self.table.handle(number).map_err(|_| not_open())?;
                match self.staged_meanwhile(number, slot) {
                    Some(file) => self.read_staged(&file, offset, size).map(Into::into),
                    None => Err(error.into()),
                }
            }
        }
    }

    pub(super) fn open_directory(&self, node: u64, flags: i32) -> FsResult<Opened> {
        let inode = self.inode(node)?;
        self.remake_all();
        let inner = block_on(self.files.opendir(inode, flags))?;
        let new = NewHandle { kind: SlotKind::DirectoryHandle, open_flags: flags, opener: 0, text: &[], flags: 0 };
        let number = self.table.add_handle(node, new).inspect_err(|_| {
            let _ = block_on(self.files.releasedir(inode, inner.fh, flags));
        })?;
        self.handles.insert(number, Handle::new(inode, inner.fh, None));
        Ok(Opened { number, flags: inner.flags })
    }

    /// RELEASE: the last reference to the handle is gone.
    pub(super) fn release(&self, number: u64, flags: i32) -> FsResult<()> {
        if let Some(file) = self.staged_handle(number) {
            return self.release_staged(number, &file);
        }
        let slot = self.table.handle(number).map_err(|_| not_open())?;
        let kind = slot.kind();
        // An unlink or rename that stages the file waits until its upload has ended.
        let _shared = self.staged.lock(slot.owner.load(Ordering::Relaxed)).read();
        if let Some(file) = self.staged_handle(number) {
            return self.release_staged(number, &file);
        }
        let is_unfinished = kind == SlotKind::WriteHandle && self.prior_writes(number, slot) == PriorWrites::None;
        let reopened = if is_unfinished { self.handle(number).map(drop) } else { Ok(()) };
        // `restore` must not reopen this handle at the same time.
        let _last = self.resuming.is_restoring.load(Ordering::Acquire).then(|| self.resuming.lock(number));
        let Some(OpenFile::Direct(handle)) = self.handles.remove(number) else {
            self.give_back(self.table.drop_handle(number));
            return reopened;
        };
        let released = if kind == SlotKind::DirectoryHandle {
            block_on(self.files.releasedir(handle.inode, handle.inner, flags))
        } else {
            self.release_inner(handle.inode, handle.inner, flags)
        };
        if kind == SlotKind::WriteHandle && released.is_ok() && !slot.has(POISONED) {
            self.note_stored(slot);
        }
        self.give_back(self.table.drop_handle(number));
        Ok(released?)
    }

    /// Closes a handle of `S3Filesystem`; completes its upload, if it has one.
    pub(super) fn release_inner(&self, inode: u64, inner: u64, flags: i32) -> Result<(), Error> {
        let released = block_on(self.files.release(inode, inner, flags, None, false));
        self.records.take_completed(inner);
        released
    }

    /// Runs one step with the handle while no other step of it runs.
    pub(super) fn in_turn<T>(&self, number: u64, step: impl FnOnce(&Arc<Handle>) -> FsResult<T>) -> FsResult<T> {
        loop {
            let handle = self.handle(number)?;
            let _turn = handle.turn.lock();
            // Another thread may have replaced the handle meanwhile.
            if self.handles.is_current(number, &handle) {
                return step(&handle);
            }
        }
    }
}
