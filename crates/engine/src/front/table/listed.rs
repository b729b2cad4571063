//! Entries of listings. `S3Filesystem` counts its reference to an inode after the entry is in the reply, but other threads use the
//! inode of a node that the kernel knows at once. After another engine has taken over, the kernel knows nodes that are not bound yet:
//! such a node is bound when the listing is complete.

use std::sync::atomic::Ordering::{Relaxed, Release};

use super::{EntryInfo, Index, InodeReferences, Table, TableError, id, is_same, number};
use crate::state::{Slot, SlotKind};

/// The id of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListedNode {
    Bound(u64),
    /// To be bound when `S3Filesystem` counts the reference.
    Unbound(u64),
}

impl ListedNode {
    pub fn id(self) -> u64 {
        match self {
            Self::Bound(id) | Self::Unbound(id) => id,
        }
    }
}

impl Table {
    /// As `entry`, before `S3Filesystem` counts its reference.
    pub fn list(&self, parent: u64, name: &[u8], found: EntryInfo) -> Result<ListedNode, TableError> {
        let index = self.index();
        let Some(number) = self.unbound(&index, parent, name, found) else {
            drop(index);
            return self.entry(parent, name, found).map(ListedNode::Bound);
        };
        let slot = self.slot(number)?;
        count_reference(slot, found);
        Ok(ListedNode::Unbound(id(number, slot)))
    }

    /// Takes back an entry that is not in the reply after all.
    pub fn unlist(&self, node: ListedNode) -> Vec<InodeReferences> {
        match node {
            ListedNode::Bound(id) => self.withdraw(id),
            ListedNode::Unbound(id) => self.forget(id, 1),
        }
    }

    /// `S3Filesystem` counts the reference now. Returns it if the node stands for something else, or is gone.
    pub fn bind_listed(&self, node: u64, inode: u64, kind: SlotKind) -> Option<InodeReferences> {
        self.bind(node, inode, kind).err().map(|_| InodeReferences { inode, count: 1 })
    }

    /// The node of the name that `entry` would bind to the inode.
    fn unbound(&self, index: &Index, parent: u64, name: &[u8], found: EntryInfo) -> Option<u32> {
        if index.by_inode.contains_key(&found.inode) {
            return None;
        }
        let number = *index.by_name.get(&(number(parent), name.into()))?;
        let slot = self.slot(number).ok()?;
        let node = index.nodes.get(&number)?;
        let is_lost = node.inode == 0 && is_same(slot, found);
        let is_copy = 0 < node.copies && slot.kind() == found.kind;
        (is_lost || is_copy).then_some(number)
    }
}

/// The kernel gets a reference to the node, and these attributes.
pub(super) fn count_reference(slot: &Slot, found: EntryInfo) {
    slot.count.fetch_add(1, Release);
    slot.size.store(found.size, Relaxed);
    slot.stamp.store(found.stamp, Relaxed);
}

#[cfg(test)]
mod tests {
    use super::super::tests::{found, successor, table};
    use super::super::{Binding, ROOT};
    use super::*;

    const FILE: EntryInfo = EntryInfo { kind: SlotKind::File, inode: 21, size: 7, stamp: 1000, flags: 0 };

    fn is_unresolved(table: &Table, node: u64) -> bool {
        matches!(table.binding(node), Ok(Binding::Unresolved { .. }))
    }

    #[test]
    fn a_node_of_a_previous_engine_is_bound_when_its_inode_is_counted() {
        let table = table();
        let node = table.entry(ROOT, b"f", found(SlotKind::File, 11)).unwrap();
        let table = successor(&table);
        assert_eq!(table.list(ROOT, b"f", FILE), Ok(ListedNode::Unbound(node)));
        assert!(is_unresolved(&table, node), "other threads look it up");
        assert_eq!(table.bind_listed(node, 21, SlotKind::File), None);
        assert_eq!(table.binding(node), Ok(Binding::Bound(21)));
        assert_eq!(table.list(ROOT, b"f", FILE), Ok(ListedNode::Bound(node)));
        assert_eq!(table.forget(node, 3), [InodeReferences { inode: 21, count: 2 }]);
    }

    #[test]
    fn a_node_that_was_looked_up_meanwhile_keeps_both_references() {
        let table = table();
        let node = table.entry(ROOT, b"f", found(SlotKind::File, 11)).unwrap();
        let table = successor(&table);
        table.list(ROOT, b"f", FILE).unwrap();
        table.bind(node, 21, SlotKind::File).unwrap();
        assert_eq!(table.bind_listed(node, 21, SlotKind::File), None);
        assert_eq!(table.forget(node, 2), [InodeReferences { inode: 21, count: 2 }]);
    }

    #[test]
    fn what_a_node_does_not_stand_for_is_given_back() {
        let table = table();
        let node = table.entry(ROOT, b"f", found(SlotKind::File, 11)).unwrap();
        let table = successor(&table);
        table.list(ROOT, b"f", FILE).unwrap();
        table.bind(node, 22, SlotKind::File).unwrap();
        let counted = InodeReferences { inode: 21, count: 1 };
        assert_eq!(table.bind_listed(node, 21, SlotKind::File), Some(counted));
        table.forget(node, 2);
        assert_eq!(table.bind_listed(node, 21, SlotKind::File), Some(counted), "it is gone");
    }

    #[test]
    fn an_entry_that_is_not_in_the_reply_is_taken_back() {
        let table = table();
        let known = table.entry(ROOT, b"f", found(SlotKind::File, 11)).unwrap();
        let table = successor(&table);
        let unbound = table.list(ROOT, b"f", FILE).unwrap();
        assert_eq!((unbound, table.unlist(unbound)), (ListedNode::Unbound(known), Vec::new()));
        assert!(is_unresolved(&table, known));
        let new = table.list(ROOT, b"new", EntryInfo { inode: 31, ..FILE }).unwrap();
        assert!(matches!(new, ListedNode::Bound(_)) && table.unlist(new).is_empty());
    }
}
