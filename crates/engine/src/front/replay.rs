//! Restarts the upload of a small file from the spool: after a crash, and when a process writes after the upload was completed
//! (two children of one process that write into the same file in turn).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use futures::executor::block_on;
use mountpoint_s3_client::ObjectClient;
use mountpoint_s3_fs::metablock::ReadWriteMode;

use super::close_rule::CloseRule;
use super::open_files::Handle;
use super::{CommitPoint, Front, FsError, FsResult};
use crate::state::{DIRTY, SPOOLED, Slot, SlotKind};

/// As the kernel would write it.
const PIECE: usize = 1 << 20;

impl<C: ObjectClient + Clone + Send + Sync + 'static> Front<C> {
    /// What was appended piece by piece cannot be written once more as a whole.
    pub(super) fn flags_of_new(&self, kind: SlotKind) -> u32 {
        if kind == SlotKind::WriteHandle && self.config.commit_point == CommitPoint::Close { SPOOLED } else { 0 }
    }

    /// Whether exactly this was taken already.
    pub(super) fn is_spooled(&self, number: u64, slot: &Slot, offset: i64, data: &[u8]) -> bool {
        let Ok(offset) = u64::try_from(offset) else { return false };
        let is_known = slot.has(SPOOLED) && offset + data.len() as u64 <= slot.count.load(Ordering::Acquire);
        let mut kept = vec![0; if is_known { data.len() } else { 0 }];
        is_known && self.table.read_spooled(number, offset, &mut kept).is_ok() && kept == data
    }

    /// If the upload was completed, begins another one with what was written before. Otherwise there is nothing to do.
    pub(super) fn restart_upload(&self, number: u64, slot: &Slot, handle: &Handle) -> FsResult<Option<Arc<Handle>>> {
        if !handle.is_complete.load(Ordering::Acquire) || !slot.has(SPOOLED) {
            return Ok(None);
        }
        let flags = slot.open_flags.load(Ordering::Relaxed).cast_signed();
        self.release_inner(handle.inode, handle.inner, flags)?;
        let inner = self.reopen_from_spool(number, slot, handle.inode)?;
        self.keep_metadata(slot.owner.load(Ordering::Relaxed))?;
        Ok(Some(self.handles.insert(number, handle.opened_once_more(inner))))
    }

    /// Opens the file for `S3Filesystem` and writes what is kept of it. Answers the new inner handle.
    pub(super) fn reopen_from_spool(&self, number: u64, slot: &Slot, inode: u64) -> FsResult<u64> {
        let length = slot.count.load(Ordering::Acquire);
        let has_begun = length > 0 || slot.has(DIRTY);
        let noted = slot.open_flags.load(Ordering::Relaxed).cast_signed();
        // It may have been stored a moment before the crash, and is replaced then, by the same bytes and more.
        let flags = if has_begun { noted | libc::O_TRUNC } else { noted };
        let open = || block_on(self.files.open(inode, flags.into(), CloseRule::opener()));
        let inner = if has_begun { self.records.with_replaceable(inode, open) } else { open() }?.fh;
        let rewritten = match self.records.take_opened(inner).map(|it| it.mode) {
            Some(ReadWriteMode::Write) => self.rewrite(number, slot, inode, inner, length),
            Some(ReadWriteMode::Read) | None => Err(replaced()),
        };
        if rewritten.is_err() {
            let _ = self.release_inner(inode, inner, flags);
        }
        rewritten.map(|()| inner)
    }

    fn rewrite(&self, number: u64, slot: &Slot, inode: u64, inner: u64, length: u64) -> FsResult<()> {
        let flags = slot.open_flags.load(Ordering::Relaxed).cast_signed();
        let mut offset = 0;
        let mut piece = vec![0; PIECE.min(usize::try_from(length).unwrap_or(PIECE))];
        while offset < length {
            let size = usize::try_from(length - offset).map_or(piece.len(), |it| it.min(piece.len()));
            self.table.read_spooled(number, offset, &mut piece[..size]).map_err(|error| FsError {
                errno: libc::EIO,
                reason: format!("what was kept of this file cannot be read: {error}"),
            })?;
            let position = i64::try_from(offset).unwrap_or(i64::MAX);
            block_on(self.files.write(inode, inner, position, &piece[..size], 0, flags, None))?;
            offset += size as u64;
        }
        Ok(())
    }

    /// Begins the uploads of all files that previous engines were writing, so that their sizes are right again. What
    /// fails here is tried again when the file is used. Called once, while requests are served already.
    pub fn restore(&self) {
        for number in self.resuming.take_unreleased() {
            let flags = self.table.handle(number).map_or(0, |it| it.open_flags.load(Ordering::Relaxed).cast_signed());
            if let Err(error) = self.release(number, flags) {
                tracing::warn!(%error, "cannot store a file that was closed while the engine was replaced");
            }
        }
        for number in self.table.spooled_by_previous_engine() {
            if let Err(error) = self.handle(number) {
                tracing::debug!(%error, "cannot restart an upload yet");
            }
        }
        self.restore_staged();
        self.restore_pending();
        self.resuming.is_restoring.store(false, Ordering::Release);
    }
}

pub fn replaced() -> FsError {
    FsError { errno: libc::ESTALE, reason: "the file was replaced while no engine served it".into() }
}
