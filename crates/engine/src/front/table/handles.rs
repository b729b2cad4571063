//! Handles of the table: slots that keep their node alive, with what a successor needs to open the file again.

use std::sync::atomic::Ordering::{Acquire, Relaxed};

use super::{InodeReferences, Table, TableError, id, number};
use crate::state::{DIRTY, Slot, SlotKind};

/// What is noted of a handle when it is opened.
#[derive(Clone, Copy, Debug)]
pub struct NewHandle<'a> {
    pub kind: SlotKind,
    pub open_flags: i32,
    /// The process that opened a file for writing, if it can be told from others.
    pub opener: u32,
    /// Read handle: the `ETag` of what it reads. Write handle: the number of the request that opened it.
    pub text: &'a [u8],
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
        if let Err(error) = self.write_text(&mut index, slot, new.text) {
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

    /// The handle that a request opened for writing.
    pub fn opened_by(&self, node: u64, request: &[u8]) -> Option<u64> {
        let is_it = |slot: &Slot| slot.kind() == SlotKind::WriteHandle && self.text(slot) == request;
        self.handles_of(node).into_iter().find(|it| self.handle(*it).is_ok_and(is_it))
    }

    /// The file was stored through this handle: it is not empty because others were opened before and have not written yet.
    pub fn stored_through(&self, stored: &Slot) {
        let node = stored.owner.load(Relaxed);
        let has_others = self.index().nodes.get(&number(node)).is_some_and(|it| it.handles > 1);
        for number in if has_others { self.handles_of(node) } else { Vec::new() } {
            let Ok(slot) = self.handle(number) else { continue };
            let is_unused = slot.count.load(Acquire) == 0 && !slot.has(DIRTY);
            if slot.kind() == SlotKind::WriteHandle && is_unused && !std::ptr::eq(slot, stored) {
                self.stop_spooling(number, slot);
            }
        }
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

#[cfg(test)]
mod tests {
    use super::super::ROOT;
    use super::super::tests::{found, successor, table};
    use super::*;
    use crate::state::SPOOLED;

    fn writer(table: &Table, node: u64, request: u64) -> u64 {
        let text = &request.to_le_bytes();
        let new = NewHandle { kind: SlotKind::WriteHandle, open_flags: 1, opener: 42, text, flags: SPOOLED };
        table.add_handle(node, new).unwrap()
    }

    #[test]
    fn a_successor_finds_the_handle_that_a_request_opened() {
        let table = table();
        let [node, other] = [(b"a", 10), (b"b", 11)]
            .map(|(name, inode)| table.entry(ROOT, name, found(SlotKind::File, inode)).unwrap());
        let handles = [7, 8].map(|it| writer(&table, node, it));
        let table = successor(&table);
        let opened = |node, request: u64| table.opened_by(node, &request.to_le_bytes());
        assert_eq!([7, 8, 9].map(|it| opened(node, it)), [Some(handles[0]), Some(handles[1]), None]);
        assert_eq!(opened(other, 7), None);
        table.drop_handle(handles[0]);
        assert_eq!(opened(node, 7), None);
    }

    #[test]
    fn a_file_is_not_empty_because_of_an_unused_handle_once_something_is_stored() {
        let table = table();
        let node = table.entry(ROOT, b"a", found(SlotKind::File, 10)).unwrap();
        let [unused, storing, used] = [7, 8, 9].map(|it| writer(&table, node, it));
        let slot = |number| table.handle(number).unwrap();
        for number in [storing, used] {
            table.begin_writing(slot(number));
            table.wrote(number, slot(number), b"content");
        }
        table.end_writing(slot(storing));
        table.stored_through(slot(storing));
        assert_eq!([unused, storing, used].map(|it| slot(it).has(SPOOLED)), [false, true, true]);
    }
}
