//! Handles of the table: slots that keep their node alive, with what a successor needs to open the file again.

use std::sync::atomic::Ordering::Relaxed;

use super::{InodeReferences, Table, TableError, id, number};
use crate::state::{Slot, SlotKind};

/// What is noted of a handle when it is opened.
#[derive(Clone, Copy, Debug)]
pub struct NewHandle<'a> {
    pub kind: SlotKind,
    pub open_flags: i32,
    /// The process that opened a file for writing, if it can be told from others.
    pub opener: u32,
    /// What a read handle reads.
    pub etag: &'a [u8],
    /// [`crate::state::SPOOLED`] if all that will be written is to be kept until the handle is dropped, else 0.
    pub flags: u32,
}

impl Table {
    /// A new handle of the node; the node stays until the handle is dropped.
    pub fn add_handle(&self, node: u64, new: NewHandle<'_>) -> Result<u64, TableError> {
        let mut index = self.index();
        self.current(node)?;
        let number = self.allocate(&mut index)?;
        let slot = self.slot(number)?;
        slot.owner.store(node, Relaxed);
        slot.open_flags.store(new.open_flags.cast_unsigned(), Relaxed);
        slot.stamp.store(new.opener.into(), Relaxed);
        if let Err(error) = self.write_text(&mut index, slot, new.etag) {
            index.free.push(number);
            return Err(error);
        }
        slot.flags.store(new.flags, Relaxed);
        slot.set_kind(new.kind);
        if let Some(node) = index.nodes.get_mut(&self::number(node)) {
            node.handles += 1;
        }
        Ok(id(number, slot))
    }

    pub fn handle(&self, handle: u64) -> Result<&Slot, TableError> {
        let slot = self.current(handle)?;
        match slot.kind() {
            SlotKind::ReadHandle | SlotKind::WriteHandle | SlotKind::DirectoryHandle => Ok(slot),
            SlotKind::Free
            | SlotKind::Directory
            | SlotKind::File
            | SlotKind::Continuation
            | SlotKind::StagedFile
            | SlotKind::Metadata => Err(TableError::Stale),
        }
    }

    pub fn drop_handle(&self, handle: u64) -> Vec<InodeReferences> {
        let mut released = Vec::new();
        let mut index = self.index();
        let Ok(slot) = self.handle(handle) else { return released };
        let node = number(slot.owner.load(Relaxed));
        self.end_writing(slot);
        self.stop_spooling(handle, slot);
        self.release_text(&mut index, slot);
        index.release(number(handle), slot);
        if let Some(node) = index.nodes.get_mut(&node) {
            node.handles -= 1;
        }
        self.collect(&mut index, node, &mut released);
        released
    }

    /// Whether the node has handles or a staged copy.
    pub fn has_handles(&self, node: u64) -> bool {
        self.index().nodes.get(&number(node)).is_some_and(|it| it.handles > 0)
    }

    /// The handles of a file.
    pub fn handles_of(&self, node: u64) -> Vec<u64> {
        if !self.has_handles(node) {
            return Vec::new();
        }
        let is_handle = |slot: &Slot| matches!(slot.kind(), SlotKind::ReadHandle | SlotKind::WriteHandle);
        let handles = self.all().filter(|(_, slot)| is_handle(slot) && slot.owner.load(Relaxed) == node);
        handles.map(|(number, slot)| id(number, slot)).collect()
    }

    /// The `ETag` of what a read handle reads from now on.
    pub fn set_handle_etag(&self, handle: u64, etag: &[u8]) -> Result<(), TableError> {
        let mut index = self.index();
        let slot = self.handle(handle)?;
        if slot.kind() != SlotKind::ReadHandle {
            return Ok(());
        }
        self.release_text(&mut index, slot);
        self.write_text(&mut index, slot, etag)
    }

    /// The `ETag` of what a read handle reads.
    pub fn etag(&self, slot: &Slot) -> Vec<u8> {
        self.text(slot)
    }
}
