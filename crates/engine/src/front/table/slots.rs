//! Slots of the table: allocated, released, found by number or ID, and the texts that continue in further slots.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::{Index, LONGEST_TEXT, Table, TableError, number};
use crate::state::{INLINE_TEXT, MOST_SLOTS, Slot, SlotKind};

impl Table {
    pub(super) fn slot(&self, number: u32) -> Result<&Slot, TableError> {
        self.state.slot(number).ok_or(TableError::Stale)
    }

    /// The slot of an id that is still in use.
    pub(super) fn current(&self, id: u64) -> Result<&Slot, TableError> {
        let slot = self.slot(number(id))?;
        let is_current = u64::from(slot.generation.load(Relaxed)) == id >> 32 && slot.kind() != SlotKind::Free;
        if is_current { Ok(slot) } else { Err(TableError::Stale) }
    }

    pub(super) fn allocate(&self, index: &mut Index) -> Result<u32, TableError> {
        let number = match (index.free.pop(), self.state.used()) {
            (Some(number), _) => number,
            (None, next) if next < MOST_SLOTS => {
                self.state.set_used(next + 1);
                next
            }
            (None, _) => return Err(TableError::Full),
        };
        let slot = self.slot(number)?;
        slot.generation.fetch_add(1, Relaxed);
        slot.count.store(0, Relaxed);
        slot.flags.store(0, Relaxed);
        slot.next.store(0, Relaxed);
        slot.text_length.store(0, Relaxed);
        slot.size.store(0, Relaxed);
        slot.stamp.store(0, Relaxed);
        slot.owner_of_locks.store(0, Relaxed);
        Ok(number)
    }

    pub(super) fn write_text(&self, index: &mut Index, slot: &Slot, text: &[u8]) -> Result<(), TableError> {
        let (first, rest) = text.split_at(text.len().min(INLINE_TEXT));
        let mut next = 0;
        // The last piece is stored first, so that a slot never names one that is not filled.
        for piece in rest.chunks(INLINE_TEXT).rev() {
            let number = self.allocate(index)?;
            let continuation = self.slot(number)?;
            continuation.write_text(piece);
            continuation.next.store(next, Relaxed);
            continuation.set_kind(SlotKind::Continuation);
            next = number;
        }
        slot.write_text(first);
        slot.next.store(next, Relaxed);
        slot.text_length.store(u32::try_from(text.len()).unwrap_or(u32::MAX), Release);
        Ok(())
    }

    pub(super) fn release_text(&self, index: &mut Index, slot: &Slot) {
        let mut next = slot.next.swap(0, Relaxed);
        while next != 0 {
            let Ok(continuation) = self.slot(next) else { return };
            let following = continuation.next.swap(0, Relaxed);
            index.release(next, continuation);
            next = following;
        }
    }

    pub(super) fn text(&self, slot: &Slot) -> Vec<u8> {
        let length = (slot.text_length.load(Acquire) as usize).min(LONGEST_TEXT);
        let mut text = Vec::with_capacity(length);
        let mut piece = Some(slot);
        while let Some(slot) = piece {
            text.extend(slot.read_text((length - text.len()).min(INLINE_TEXT)));
            let next = slot.next.load(Relaxed);
            piece = if next == 0 || text.len() == length { None } else { self.state.slot(next) };
        }
        text
    }
}
