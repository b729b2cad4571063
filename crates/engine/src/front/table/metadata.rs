//! What the next upload of a file carries beside its content: mode, owner, time and extended attributes that were set before the
//! file is stored. A successor sends it, too.

use std::sync::atomic::Ordering::Relaxed;

use super::{Index, Table, TableError, id, number};
use crate::state::{Slot, SlotKind};

impl Table {
    pub fn set_metadata(&self, node: u64, text: &[u8]) -> Result<(), TableError> {
        let mut index = self.index();
        self.current(node)?;
        let added = self.allocate(&mut index)?;
        let slot = self.slot(added)?;
        slot.owner.store(node, Relaxed);
        if let Err(error) = self.write_text(&mut index, slot, text) {
            index.free.push(added);
            return Err(error);
        }
        // The new one first: a crash leaves one of them or both, each complete.
        slot.set_kind(SlotKind::Metadata);
        let known = index.nodes.get_mut(&number(node));
        let unneeded = known.map_or(added, |known| std::mem::replace(&mut known.metadata, added));
        self.release_metadata(&mut index, unneeded);
        Ok(())
    }

    pub fn metadata(&self, node: u64) -> Option<Vec<u8>> {
        let index = self.index();
        self.current(node).ok()?;
        let number = index.nodes.get(&number(node)).map(|it| it.metadata).filter(|it| *it != 0)?;
        self.slot(number).ok().map(|slot| self.text(slot))
    }

    /// Answers whether there was any.
    pub fn clear_metadata(&self, node: u64) -> bool {
        let mut index = self.index();
        let known = self.current(node).ok().and_then(|_| index.nodes.get_mut(&number(node)));
        let unneeded = known.map_or(0, |known| std::mem::take(&mut known.metadata));
        self.release_metadata(&mut index, unneeded);
        unneeded != 0
    }

    /// All nodes that have metadata.
    pub fn with_metadata(&self) -> Vec<u64> {
        let index = self.index();
        let nodes = index.nodes.iter().filter(|(_, node)| node.metadata != 0);
        nodes.filter_map(|(number, _)| self.slot(*number).ok().map(|slot| id(*number, slot))).collect()
    }

    pub(super) fn release_metadata(&self, index: &mut Index, number: u32) {
        if number != 0
            && let Ok(slot) = self.slot(number)
        {
            self.release_text(index, slot);
            index.release(number, slot);
        }
    }

    pub(super) fn load_metadata(&self, index: &mut Index, number: u32, slot: &Slot) {
        let node = slot.owner.load(Relaxed);
        match self.current(node).ok().and_then(|_| index.nodes.get_mut(&self::number(node))) {
            Some(known) if known.metadata == 0 => known.metadata = number,
            Some(_) | None => self.release_metadata(index, number),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::front::table::ROOT;
    use crate::front::table::tests::{found, successor, table};
    use crate::state::SlotKind;

    #[test]
    fn metadata_belongs_to_a_node_and_is_found_by_a_successor() {
        let table = table();
        let node = table.entry(ROOT, b"file", found(SlotKind::File, 10)).unwrap();
        assert_eq!(table.metadata(node), None);
        let text = vec![b'x'; 1000];
        table.set_metadata(node, b"first").unwrap();
        table.set_metadata(node, &text).unwrap();
        let successor = successor(&table);
        assert_eq!((successor.metadata(node), successor.with_metadata()), (Some(text), vec![node]));
        assert!(successor.clear_metadata(node) && !successor.clear_metadata(node));
        assert_eq!((successor.metadata(node), successor.with_metadata()), (None, vec![]));
    }

    #[test]
    fn the_slots_of_metadata_are_used_again() {
        let table = table();
        let used = || {
            let node = table.entry(ROOT, b"file", found(SlotKind::File, 10)).unwrap();
            table.set_metadata(node, &[b'x'; 1000]).unwrap();
            table.set_metadata(node, &[b'y'; 1000]).unwrap();
            table.forget(node, 1);
            table.state.used()
        };
        assert_eq!(used(), used());
    }
}
