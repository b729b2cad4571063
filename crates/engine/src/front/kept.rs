//! Writing a small file once more from what was kept of it: after a crash, and when somebody writes on after the upload was
//! completed (two children of one process that write into the same file in turn).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use futures::executor::block_on;
use mountpoint_s3_client::ObjectClient;
use mountpoint_s3_fs::metablock::ReadWriteMode;

use super::close_rule::CloseRule;
use super::handles::Handle;
use super::{Commits, Failure, Front, Outcome, opening};
use crate::state::{DIRTY, KEPT, Kind, Slot};

/// As the kernel would write it.
const PIECE: usize = 1 << 20;

impl<C: ObjectClient + Clone + Send + Sync + 'static> Front<C> {
    /// What was appended piece by piece cannot be written once more as a whole.
    pub(super) fn flags_of_new(&self, kind: Kind) -> u32 {
        if kind == Kind::WriteHandle && self.habits.commits == Commits::AtEnd { KEPT } else { 0 }
    }

    /// Whether exactly this was taken already.
    pub(super) fn has_kept(&self, number: u64, slot: &Slot, offset: i64, data: &[u8]) -> bool {
        let Ok(offset) = u64::try_from(offset) else { return false };
        let is_known = slot.has(KEPT) && offset + data.len() as u64 <= slot.count.load(Ordering::Acquire);
        let mut kept = vec![0; if is_known { data.len() } else { 0 }];
        is_known && self.table.read_kept(number, offset, &mut kept).is_ok() && kept == data
    }

    /// If the upload was completed, begins another one with what was written before. Otherwise there is nothing to do.
    pub(super) fn write_once_more(&self, number: u64, slot: &Slot, handle: &Handle) -> Outcome<Option<Arc<Handle>>> {
        if !handle.is_complete.load(Ordering::Acquire) || !slot.has(KEPT) {
            return Ok(None);
        }
        let flags = slot.open_flags.load(Ordering::Relaxed).cast_signed();
        block_on(self.files.release(handle.inode, handle.inner, flags, None, false))?;
        let inner = self.write_kept(number, slot, handle.inode)?;
        Ok(Some(self.handles.insert(number, handle.opened_once_more(inner))))
    }

    /// Opens the file for the file system beneath and writes what is kept of it. Answers the new inner handle.
    pub(super) fn write_kept(&self, number: u64, slot: &Slot, inode: u64) -> Outcome<u64> {
        let length = slot.count.load(Ordering::Acquire);
        let has_begun = length > 0 || slot.has(DIRTY);
        let noted = slot.open_flags.load(Ordering::Relaxed).cast_signed();
        // It may have been stored a moment before the crash, and is replaced then, by the same bytes and more.
        let flags = if has_begun { noted | libc::O_TRUNC } else { noted };
        let permission = if has_begun { opening::Overwriting::Permitted } else { opening::Overwriting::AsConfigured };
        let inner =
            opening::with(permission, || block_on(self.files.open(inode, flags.into(), CloseRule::opener())))?.fh;
        let rewritten = match opening::last().mode {
            ReadWriteMode::Write => self.rewrite(number, slot, inode, inner, length),
            ReadWriteMode::Read => Err(replaced()),
        };
        if rewritten.is_err() {
            let _ = block_on(self.files.release(inode, inner, flags, None, false));
        }
        rewritten.map(|()| inner)
    }

    fn rewrite(&self, number: u64, slot: &Slot, inode: u64, inner: u64, length: u64) -> Outcome<()> {
        let flags = slot.open_flags.load(Ordering::Relaxed).cast_signed();
        let mut offset = 0;
        let mut piece = vec![0; PIECE.min(usize::try_from(length).unwrap_or(PIECE))];
        while offset < length {
            let size = usize::try_from(length - offset).map_or(piece.len(), |it| it.min(piece.len()));
            self.table.read_kept(number, offset, &mut piece[..size]).map_err(|error| Failure {
                errno: libc::EIO,
                reason: format!("what was kept of this file cannot be read: {error}"),
            })?;
            let position = i64::try_from(offset).unwrap_or(i64::MAX);
            block_on(self.files.write(inode, inner, position, &piece[..size], 0, flags, None))?;
            offset += size as u64;
        }
        Ok(())
    }

    /// Begins the uploads of all files that engines before this one were writing, so that their sizes are right again. What
    /// fails here is tried again when the file is used. Called once, while requests are served already.
    pub fn restore(&self) {
        for number in self.resuming.take_unreleased() {
            let flags = self.table.handle(number).map_or(0, |it| it.open_flags.load(Ordering::Relaxed).cast_signed());
            if let Err(failure) = self.release(number, flags) {
                tracing::warn!(%failure, "a file that was closed before the engine was replaced is not stored");
            }
        }
        for number in self.table.kept_by_others() {
            if let Err(failure) = self.handle(number) {
                tracing::debug!(%failure, "a file that was being written cannot be written on yet");
            }
        }
        self.resuming.is_restoring.store(false, Ordering::Release);
    }
}

pub fn replaced() -> Failure {
    Failure { errno: libc::ESTALE, reason: "the file was replaced while no engine served it".into() }
}
