//! Slots of staged files: what a successor needs to go on with a file that is edited in place.

use std::sync::atomic::Ordering::{Acquire, Relaxed};

use super::{Table, TableError, id, number};
use crate::front::table::InodeReferences;
use crate::state::{INCOMPLETE, ORPHANED, Slot, SlotKind};

impl Table {
    /// A slot for the local copy of a node, which stays until the slot is dropped. It counts as incomplete until
    /// [`INCOMPLETE`] is cleared.
    pub fn add_staged(&self, node: u64, etag: &[u8]) -> Result<u64, TableError> {
        let mut index = self.index();
        self.current(node)?;
        let added = self.allocate(&mut index)?;
        let slot = self.slot(added)?;
        slot.owner.store(node, Relaxed);
        if let Err(error) = self.write_text(&mut index, slot, etag) {
            index.free.push(added);
            return Err(error);
        }
        slot.set(INCOMPLETE);
        slot.set_kind(SlotKind::StagedFile);
        if let Some(node) = index.nodes.get_mut(&number(node)) {
            node.handles += 1;
            node.copies += 1;
        }
        Ok(id(added, slot))
    }

    pub fn staged(&self, staged: u64) -> Result<&Slot, TableError> {
        self.current(staged).and_then(|slot| match slot.kind() {
            SlotKind::StagedFile => Ok(slot),
            _ => Err(TableError::Stale),
        })
    }

    /// The `ETag` of the object that a staged file replaces; empty if there is none.
    pub fn set_staged_etag(&self, staged: u64, etag: &[u8]) -> Result<(), TableError> {
        let mut index = self.index();
        let slot = self.staged(staged)?;
        self.release_text(&mut index, slot);
        self.write_text(&mut index, slot, etag)
    }

    /// The copy is not needed any longer. Its bytes must be freed before.
    pub fn drop_staged(&self, staged: u64) -> Vec<InodeReferences> {
        let mut released = Vec::new();
        let mut index = self.index();
        let Ok(slot) = self.staged(staged) else { return released };
        let node = number(slot.owner.load(Relaxed));
        self.release_text(&mut index, slot);
        index.release(number(staged), slot);
        if let Some(node) = index.nodes.get_mut(&node) {
            node.handles -= 1;
            node.copies -= 1;
        }
        self.collect(&mut index, node, &mut released);
        released
    }

    /// All staged files: id of the slot and of the node.
    pub fn all_staged(&self) -> Vec<(u64, u64)> {
        let staged = self.all().filter(|(_, slot)| slot.kind() == SlotKind::StagedFile);
        staged.map(|(number, slot)| (id(number, slot), slot.owner.load(Acquire))).collect()
    }

    /// Whether the name of the node is gone.
    pub fn is_unlinked(&self, node: u64) -> bool {
        self.has(node, ORPHANED)
    }
}
