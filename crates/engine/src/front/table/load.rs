//! How a table learns what the engines before this one knew. They are all dead by then.

use std::collections::HashSet;
use std::sync::atomic::Ordering::{Relaxed, Release};

use super::{Index, Node, ROOT, ROOT_SLOT, Table, Unneeded, number};
use crate::state::{DIRTY, KEPT, Kind, NEW, ORPHANED, POISONED, Slot};

impl Table {
    /// Builds the index over the slots. Nodes other than the root are lost until somebody asks for them.
    pub fn load(&self) {
        let mut index = self.index();
        *index = Index::default();
        if self.state.used() <= ROOT_SLOT {
            self.make_root();
        }
        let mut text = HashSet::new();
        let mut continuations = Vec::new();
        index.nodes.insert(ROOT_SLOT, Node { inode: ROOT, ..Node::default() });
        index.by_inode.insert(ROOT, ROOT_SLOT);
        for (number, slot) in self.all().filter(|(number, _)| *number != ROOT_SLOT) {
            match slot.kind() {
                Kind::Free => index.free.push(number),
                Kind::Continuation => continuations.push(number),
                Kind::Directory | Kind::File => {
                    self.load_node(&mut index, number, slot);
                    text.extend(self.text_slots(slot));
                }
                Kind::ReadHandle | Kind::WriteHandle | Kind::DirectoryHandle => text.extend(self.text_slots(slot)),
            }
        }
        for (number, slot) in self.all() {
            if matches!(slot.kind(), Kind::ReadHandle | Kind::WriteHandle | Kind::DirectoryHandle) {
                self.load_handle(&mut index, number, slot);
            }
        }
        for number in continuations.into_iter().filter(|it| !text.contains(it)) {
            if let Ok(slot) = self.slot(number) {
                index.release(number, slot);
            }
        }
        self.state.unstored().store(0, Release);
        self.state.spool().load(self.state.used(), self.all().filter_map(|(number, slot)| kept(number, slot)));
        self.collect_unneeded(&mut index);
    }

    fn make_root(&self) {
        self.state.set_used(ROOT_SLOT + 1);
        if let Ok(slot) = self.slot(ROOT_SLOT) {
            slot.owner.store(ROOT, Relaxed);
            slot.set_kind(Kind::Directory);
        }
    }

    fn load_node(&self, index: &mut Index, number: u32, slot: &Slot) {
        let parent = slot.owner.load(Relaxed);
        let is_in_directory = self.current(parent).is_ok_and(|it| it.kind() == Kind::Directory);
        if !is_in_directory {
            // Not to be found by any path, but the kernel may still hold it.
            slot.set(ORPHANED);
            slot.owner.store(ROOT, Relaxed);
        }
        index.nodes.entry(number).or_default();
        index.nodes.entry(self::number(slot.owner.load(Relaxed))).or_default().children += 1;
        if !slot.has(ORPHANED) {
            index.by_name.insert((self::number(parent), self.text(slot).into()), number);
        }
    }

    fn load_handle(&self, index: &mut Index, number: u32, slot: &Slot) {
        let node = slot.owner.load(Relaxed);
        let Some(known) = self.current(node).ok().and_then(|_| index.nodes.get_mut(&self::number(node))) else {
            return index.release(number, slot);
        };
        known.handles += 1;
        let Ok(node) = self.current(node) else { return };
        if slot.has(DIRTY) {
            // Whatever is found under its name now may be another version.
            node.stamp.store(0, Relaxed);
        }
        if slot.has(DIRTY) && !slot.has(KEPT) {
            // What was written is lost, and with it a name that was not in the bucket yet.
            slot.set(POISONED);
            slot.clear(DIRTY);
            node.clear(NEW);
        }
    }

    /// What an engine was about to tell the kernel when it died.
    fn collect_unneeded(&self, index: &mut Index) {
        let nodes: Vec<u32> = index.nodes.keys().copied().collect();
        let mut nothing: Vec<Unneeded> = Vec::new();
        for number in nodes {
            self.collect(index, number, &mut nothing);
        }
    }

    pub(super) fn all(&self) -> impl Iterator<Item = (u32, &Slot)> {
        (ROOT_SLOT..self.state.used()).filter_map(|number| Some((number, self.state.slot(number)?)))
    }

    /// The slots in which the text of this one continues.
    fn text_slots(&self, slot: &Slot) -> Vec<u32> {
        let mut found = Vec::new();
        let mut next = slot.next.load(Relaxed);
        while next != 0 && !found.contains(&next) {
            let Ok(continuation) = self.slot(next) else { break };
            found.push(next);
            next = continuation.next.load(Relaxed);
        }
        found
    }
}

/// What is kept for a write handle, if anything.
fn kept(number: u32, slot: &Slot) -> Option<(u32, u64)> {
    let length = slot.count.load(Relaxed);
    let is_kept = slot.kind() == Kind::WriteHandle && slot.has(KEPT) && length > 0;
    is_kept.then_some((number, length))
}
