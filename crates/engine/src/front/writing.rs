//! Writing to open files: WRITE, FLUSH and FSYNC.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use futures::executor::block_on;
use mountpoint_s3_client::ObjectClient;

use super::close_rule::{CloseRule, Owners};
use super::open_files::OpenFile;
use super::resume::{Delivery, not_open};
use super::staged::{InitialContent, LargeUploads, StagedFile, Writes};
use super::{CommitPoint, Front, FsError, FsResult};
use crate::state::{DIRTY, NEW, POISONED, SPOOLED, Slot, SlotKind};

/// `FUSE_WRITE_KILL_SUIDGID`: the writer may not keep these bits of the file's mode.
const WRITE_KILL_SET_IDS: u32 = 4;

/// A request to write, as the kernel makes it.
pub struct WriteRequest<'a> {
    pub unique: u64,
    pub delivery: Delivery,
    pub number: u64,
    pub offset: i64,
    pub data: &'a [u8],
    pub write_flags: u32,
    pub flags: i32,
    pub lock_owner: Option<u64>,
}

/// What became of data written through a handle of a previous engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PriorWrites {
    /// Nothing was written, or it can be written once more, or the handle is one of ours.
    None,
    Stored,
    Lost,
}

impl<C: ObjectClient + Clone + Send + Sync + 'static> Front<C> {
    pub(super) fn write(&self, request: &WriteRequest<'_>) -> FsResult<u32> {
        if request.write_flags & WRITE_KILL_SET_IDS != 0
            && let Ok(slot) = self.table.handle(request.number)
        {
            self.clear_set_ids(slot.owner.load(Ordering::Relaxed))?;
        }
        if let Some(file) = self.copy_to_write(request)? {
            return self.write_staged(&file, request);
        }
        let &WriteRequest { delivery, number, offset, data, write_flags, flags, lock_owner, unique: _ } = request;
        let slot = self.table.handle(number).map_err(|_| not_open())?;
        if slot.has(POISONED) {
            return Err(poisoned());
        }
        if delivery == Delivery::Resent && self.is_spooled(number, slot, offset, data) {
            // The previous engine had taken it, but could not say so.
            return Ok(u32::try_from(data.len()).unwrap_or(u32::MAX));
        }
        let written = self.in_turn(number, |handle| {
            if let Some(rule) = &handle.close_rule {
                rule.wrote(lock_owner);
                note_owners(slot, rule);
            }
            let again = self.restart_upload(number, slot, handle)?;
            let handle = again.as_deref().unwrap_or(handle);
            self.table.begin_writing(slot);
            let write = self.files.write(handle.inode, handle.inner, offset, data, write_flags, flags, lock_owner);
            let written = block_on(write)?;
            self.table.wrote(number, slot, &data[..data.len().min(written as usize)]);
            Ok(written)
        });
        if written.is_err() {
            if let Some(file) = self.staged_meanwhile(number, slot) {
                return self.write_staged(&file, request);
            }
            self.poison(number, slot);
        }
        written
    }

    pub(super) fn flush(&self, number: u64, pid: u32, lock_owner: u64) -> FsResult<()> {
        if let Some(file) = self.staged_handle(number) {
            return self.flush_staged(number, &file);
        }
        let slot = self.table.handle(number).map_err(|_| not_open())?;
        match self.prior_writes(number, slot) {
            PriorWrites::None => {}
            PriorWrites::Stored => return Ok(()),
            PriorWrites::Lost => return Err(poisoned()),
        }
        let flushed = self.in_turn(number, |handle| {
            self.confirm_pages(number, handle);
            let closer = match &handle.close_rule {
                Some(rule) => rule.closer(pid, lock_owner, slot.count.load(Ordering::Acquire)),
                None => pid,
            };
            if let Some(rule) = &handle.close_rule {
                note_owners(slot, rule);
            }
            self.records.take_completed(handle.inner);
            block_on(self.files.flush(handle.inode, handle.inner, lock_owner, closer))?;
            must_be_sound(slot)?;
            let is_complete = self.records.take_completed(handle.inner);
            handle.is_complete.fetch_or(is_complete, Ordering::AcqRel);
            if is_complete || self.config.commit_point == CommitPoint::Flush {
                self.note_stored(slot);
            }
            Ok(())
        });
        if flushed.is_err() {
            if let Some(file) = self.staged_meanwhile(number, slot) {
                return self.flush_staged(number, &file);
            }
            if slot.kind() == SlotKind::WriteHandle {
                self.poison(number, slot);
            }
        }
        flushed
    }

    pub(super) fn fsync(&self, number: u64, only_data: bool) -> FsResult<()> {
        if let Some(file) = self.staged_handle(number) {
            return self.store(&file);
        }
        let slot = self.table.handle(number).map_err(|_| not_open())?;
        match self.prior_writes(number, slot) {
            PriorWrites::None => {}
            PriorWrites::Stored => return Ok(()),
            PriorWrites::Lost => return Err(poisoned()),
        }
        let synced = self.in_turn(number, |handle| {
            block_on(self.files.fsync(handle.inode, handle.inner, only_data))?;
            must_be_sound(slot)?;
            handle.is_complete.fetch_or(self.config.commit_point == CommitPoint::Close, Ordering::AcqRel);
            self.note_stored(slot);
            Ok(())
        });
        if synced.is_err() && slot.kind() == SlotKind::WriteHandle {
            if let Some(file) = self.staged_meanwhile(number, slot) {
                return self.store(&file);
            }
            self.poison(number, slot);
        }
        synced
    }

    /// The copy that a write goes to: it is staged already, or becomes so because it cannot be uploaded in this order.
    fn copy_to_write(&self, request: &WriteRequest<'_>) -> FsResult<Option<Arc<StagedFile>>> {
        if let Some(file) = self.staged_handle(request.number) {
            return Ok(Some(file));
        }
        let slot = self.table.handle(request.number).map_err(|_| not_open())?;
        if slot.has(POISONED) {
            return Err(poisoned());
        }
        let is_next = match slot.kind() {
            // A file whose upload was completed, and cannot be begun again from the spool: what follows is an edit.
            SlotKind::WriteHandle if self.is_completed(request.number, slot) && !slot.has(SPOOLED) => false,
            SlotKind::WriteHandle => {
                u64::try_from(request.offset).is_ok_and(|it| it == slot.count.load(Ordering::Acquire))
            }
            _ => false,
        };
        let is_taken =
            request.delivery == Delivery::Resent && self.is_spooled(request.number, slot, request.offset, request.data);
        if is_next || is_taken || self.config.writes == Writes::Sequential {
            return Ok(None);
        }
        let node = slot.owner.load(Ordering::Relaxed);
        if slot.kind() == SlotKind::ReadHandle && !self.config.allow_overwrite {
            return Err(FsError::new(
                libc::EPERM,
                "changing an existing file is disabled; mount with --allow-overwrite to enable it".into(),
            ));
        }
        let file = self.stage_with(node, InitialContent::Current, LargeUploads::Complete)?;
        // The handle uses the copy now, and keeps it.
        self.release_copy(&file);
        Ok(self.staged_handle(request.number))
    }

    /// The copy of a file that another thread has staged since this call began, or is staging: its handles were closed for that, so an
    /// error of theirs means nothing.
    pub(super) fn staged_meanwhile(&self, number: u64, slot: &Slot) -> Option<Arc<StagedFile>> {
        let _settled = self.staged.lock(slot.owner.load(Ordering::Relaxed)).read();
        self.staged_handle(number)
    }

    /// Whether what was written through this handle is stored.
    fn is_completed(&self, number: u64, slot: &Slot) -> bool {
        match self.handles.get(number) {
            Some(OpenFile::Direct(handle)) => handle.is_complete.load(Ordering::Acquire),
            Some(OpenFile::Staged(_)) => false,
            None => self.config.commit_point == CommitPoint::Close && !slot.has(DIRTY),
        }
    }

    /// What is known of a handle without opening it again.
    pub(super) fn prior_writes(&self, number: u64, slot: &Slot) -> PriorWrites {
        if self.handles.get(number).is_some() {
            return PriorWrites::None;
        }
        match slot.kind() {
            _ if slot.has(POISONED) => PriorWrites::Lost,
            SlotKind::WriteHandle if slot.has(DIRTY) || slot.count.load(Ordering::Acquire) == 0 => PriorWrites::None,
            // Read handles have nothing to store.
            _ => PriorWrites::Stored,
        }
    }

    pub(super) fn note_stored(&self, slot: &Slot) {
        if slot.kind() == SlotKind::WriteHandle {
            self.table.end_writing(slot);
            self.table.stored_through(slot);
            let node = slot.owner.load(Ordering::Relaxed);
            self.table.stored(node);
            self.send_late_metadata(node);
        }
    }

    /// What was written is lost, and so is a name that was not in the bucket yet.
    pub(super) fn poison(&self, number: u64, slot: &Slot) {
        slot.set(POISONED);
        self.table.end_writing(slot);
        self.table.stop_spooling(number, slot);
        let node = slot.owner.load(Ordering::Relaxed);
        self.forget_pending(node);
        self.table.clear(node, NEW);
        self.table.forget_pages(node);
    }
}

/// For a successor.
fn note_owners(slot: &Slot, rule: &CloseRule) {
    let Owners { closed_before_writing, presumed } = rule.owners();
    slot.size.store(closed_before_writing.unwrap_or_default(), Ordering::Relaxed);
    slot.owner_of_locks.store(presumed.unwrap_or_default(), Ordering::Relaxed);
}

/// What a previous engine noted.
pub fn noted_rule(slot: &Slot) -> CloseRule {
    let noted = |owner: u64| Some(owner).filter(|it| *it != 0);
    let owners = Owners {
        closed_before_writing: noted(slot.size.load(Ordering::Relaxed)),
        presumed: noted(slot.owner_of_locks.load(Ordering::Relaxed)),
    };
    CloseRule::recorded(u32::try_from(slot.stamp.load(Ordering::Relaxed)).unwrap_or_default(), owners)
}

/// Whatever `S3Filesystem` says: after a failed write the application must hear of it once more, because many look
/// at the result of close only.
fn must_be_sound(slot: &Slot) -> FsResult<()> {
    if slot.has(POISONED) { Err(poisoned()) } else { Ok(()) }
}

fn poisoned() -> FsError {
    FsError { errno: libc::EIO, reason: "something written to this file earlier was lost".into() }
}
