//! What was written through a handle and is not in the bucket yet: how much of it outlives this engine.

use std::io;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use super::{DEEPEST, ROOT, Table, number};
use crate::state::{DIRTY, NEW, SPOOLED, Slot, SlotKind};

impl Table {
    /// Something is being written that is not in the bucket yet.
    pub fn begin_writing(&self, slot: &Slot) {
        self.forget_pages(slot.owner.load(Relaxed));
        if !slot.has(DIRTY) && !slot.has(SPOOLED) {
            self.add_at_risk();
        }
        slot.set(DIRTY);
    }

    /// What was written is in the bucket, or will never be.
    pub fn end_writing(&self, slot: &Slot) {
        let was_at_risk = slot.has(DIRTY) && !slot.has(SPOOLED);
        slot.clear(DIRTY);
        if was_at_risk {
            self.state.unstored().fetch_sub(1, AcqRel);
        }
    }

    /// Takes note of bytes that `S3Filesystem` has taken, and keeps them if there is room.
    pub fn wrote(&self, handle: u64, slot: &Slot, data: &[u8]) {
        let length = slot.count.load(Acquire);
        if slot.has(SPOOLED) && !self.state.spool().append(number(handle), length, data) {
            self.stop_spooling(handle, slot);
        }
        slot.count.fetch_add(data.len() as u64, Release);
    }

    /// Reads kept bytes, from `offset` on.
    pub fn read_spooled(&self, handle: u64, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.state.spool().read(number(handle), offset, bytes)
    }

    /// From now on a crash loses what was written and is not in the bucket.
    pub fn stop_spooling(&self, handle: u64, slot: &Slot) {
        if slot.has(DIRTY) && slot.has(SPOOLED) {
            self.add_at_risk();
        }
        if slot.clear(SPOOLED) {
            self.state.spool().clear(number(handle), slot.count.load(Acquire));
        }
    }

    /// Handles of previous engines whose data has to be written once more.
    pub fn spooled_by_previous_engine(&self) -> Vec<u64> {
        let is_waiting = |slot: &Slot| slot.kind() == SlotKind::WriteHandle && slot.has(DIRTY) && slot.has(SPOOLED);
        self.all().filter(|(_, slot)| is_waiting(slot)).map(|(number, slot)| super::id(number, slot)).collect()
    }

    /// Whether something in the directory is not in the bucket yet.
    pub fn has_new_children(&self, directory: u64) -> bool {
        let index = self.index();
        let has_children = index.nodes.get(&number(directory)).is_some_and(|it| it.children > 0);
        has_children
            && index.by_name.iter().any(|((parent, _), child)| {
                *parent == number(directory) && self.slot(*child).is_ok_and(|slot| slot.has(NEW))
            })
    }

    /// The file is in the bucket, and with it every directory above.
    pub fn stored(&self, node: u64) {
        let mut next = node;
        for _ in 0..DEEPEST {
            let Ok(slot) = self.current(next) else { return };
            slot.clear(NEW);
            if next == node {
                slot.stamp.store(0, Relaxed);
            }
            if next == ROOT {
                return;
            }
            next = slot.owner.load(Relaxed);
        }
    }

    /// Counts a handle before it is at risk, not after: the supervisor may suspend this process at any moment, and kills it only if
    /// nothing is at risk.
    fn add_at_risk(&self) {
        self.state.unstored().fetch_add(1, AcqRel);
    }
}
