//! Loads the table that previous engines left behind. They are all dead by then.

use std::collections::HashSet;
use std::sync::atomic::Ordering::{Relaxed, Release};

use super::{DEEPEST, Index, InodeReferences, LONGEST_TEXT, Node, ROOT, ROOT_SLOT, Table, number};
use crate::state::{
    DIRTY, IN_DIRECTORY, INCOMPLETE, INLINE_TEXT, LONGEST_SPOOLED, NEW, ORPHANED, POISONED, SPOOLED, Slot, SlotKind,
};

impl Table {
    /// Builds the index over the slots. Nodes other than the root are resolved on first use.
    pub fn load(&self) {
        let mut index = self.index();
        *index = Index::default();
        let has_root = self.current(ROOT).is_ok_and(|it| it.kind() == SlotKind::Directory);
        if self.state.used() <= ROOT_SLOT || !has_root {
            self.make_root();
        }
        let mut text = HashSet::new();
        let mut continuations = Vec::new();
        index.nodes.insert(ROOT_SLOT, Node { inode: ROOT, ..Node::default() });
        index.by_inode.insert(ROOT, ROOT_SLOT);
        for (number, slot) in self.all().filter(|(number, _)| *number != ROOT_SLOT) {
            match slot.kind() {
                SlotKind::Free => index.free.push(number),
                SlotKind::Continuation => continuations.push(number),
                SlotKind::Directory | SlotKind::File => {
                    self.claim_text(slot, &mut text);
                    self.load_node(&mut index, number, slot);
                }
                SlotKind::ReadHandle
                | SlotKind::WriteHandle
                | SlotKind::DirectoryHandle
                | SlotKind::StagedFile
                | SlotKind::Metadata => self.claim_text(slot, &mut text),
            }
        }
        for (number, slot) in self.all() {
            match slot.kind() {
                SlotKind::ReadHandle | SlotKind::WriteHandle | SlotKind::DirectoryHandle | SlotKind::StagedFile => {
                    self.load_handle(&mut index, number, slot);
                }
                SlotKind::Metadata => self.load_metadata(&mut index, number, slot),
                SlotKind::Free | SlotKind::Directory | SlotKind::File | SlotKind::Continuation => {}
            }
        }
        for number in continuations.into_iter().filter(|it| !text.contains(it)) {
            if let Ok(slot) = self.slot(number) {
                index.release(number, slot);
            }
        }
        self.state.unstored().store(0, Release);
        self.state.staged_on_disk().store(0, Release);
        self.state.spool().load(self.state.used(), self.all().filter_map(|(number, slot)| kept(number, slot)));
        self.collect_unneeded(&mut index);
    }

    fn make_root(&self) {
        self.state.set_used(self.state.used().max(ROOT_SLOT + 1));
        if let Ok(slot) = self.slot(ROOT_SLOT) {
            slot.generation.store(0, Relaxed);
            slot.next.store(0, Relaxed);
            slot.text_length.store(0, Relaxed);
            slot.owner.store(ROOT, Relaxed);
            slot.set_kind(SlotKind::Directory);
        }
    }

    fn load_node(&self, index: &mut Index, number: u32, slot: &Slot) {
        let parent = slot.owner.load(Relaxed);
        if !self.leads_to_root(parent) {
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
        let is_spooled = kept(number, slot).is_some();
        let is_impossible = is_spooled && LONGEST_SPOOLED < slot.count.load(Relaxed);
        if slot.has(INCOMPLETE) {
            // Whatever asked for this copy was not answered, and is sent again; or the copy is not needed any longer.
            self.release_text(index, slot);
            return index.release(number, slot);
        }
        if is_impossible && slot.kind() == SlotKind::StagedFile {
            slot.set(POISONED);
            slot.count.store(0, Relaxed);
        } else if is_impossible {
            slot.clear(SPOOLED);
        }
        known.handles += 1;
        known.copies += u32::from(slot.kind() == SlotKind::StagedFile);
        let Ok(node) = self.current(node) else { return };
        if slot.has(DIRTY) {
            // Whatever is found under its name now may be another version.
            node.stamp.store(0, Relaxed);
        }
        if slot.kind() == SlotKind::WriteHandle && slot.has(DIRTY) && !slot.has(SPOOLED) {
            // What was written is lost, and with it a name that was not in the bucket yet.
            slot.set(POISONED);
            slot.clear(DIRTY);
            node.clear(NEW);
        }
    }

    /// What an engine was about to tell the kernel when it died.
    fn collect_unneeded(&self, index: &mut Index) {
        let nodes: Vec<u32> = index.nodes.keys().copied().collect();
        let mut nothing: Vec<InodeReferences> = Vec::new();
        for number in nodes {
            self.collect(index, number, &mut nothing);
        }
    }

    pub(super) fn all(&self) -> impl Iterator<Item = (u32, &Slot)> {
        (ROOT_SLOT..self.state.used()).filter_map(|number| Some((number, self.state.slot(number)?)))
    }

    /// Whether this is a directory with a path. Nodes that are each other's directories would be looked up for ever.
    fn leads_to_root(&self, directory: u64) -> bool {
        let mut next = directory;
        for _ in 0..DEEPEST {
            if next == ROOT {
                return true;
            }
            let is_used = number(next) < self.state.used();
            match self.current(next) {
                Ok(slot) if is_used && slot.kind() == SlotKind::Directory => next = slot.owner.load(Relaxed),
                Ok(_) | Err(_) => return false,
            }
        }
        false
    }

    /// Notes the slots in which the text of this one continues, and cuts it where it does not continue in a slot of its own: one that
    /// two texts had in common would be freed, and used, twice.
    fn claim_text(&self, slot: &Slot, claimed: &mut HashSet<u32>) {
        let length = (slot.text_length.load(Relaxed) as usize).min(LONGEST_TEXT);
        let (mut last, mut room) = (slot, INLINE_TEXT);
        loop {
            let next = last.next.load(Relaxed);
            let is_continuation = |slot: &&Slot| next != 0 && slot.kind() == SlotKind::Continuation;
            let continuation = self.slot(next).ok().filter(is_continuation);
            match continuation {
                Some(continuation) if room < length && next < self.state.used() && claimed.insert(next) => {
                    last = continuation;
                    room += INLINE_TEXT;
                }
                Some(_) | None => break,
            }
        }
        last.next.store(0, Relaxed);
        slot.text_length.store(u32::try_from(length.min(room)).unwrap_or(u32::MAX), Release);
    }
}

/// What the spool holds for a slot, if anything.
fn kept(number: u32, slot: &Slot) -> Option<(u32, u64)> {
    let length = slot.count.load(Relaxed);
    let is_kept = match slot.kind() {
        SlotKind::WriteHandle => slot.has(SPOOLED),
        SlotKind::StagedFile => !slot.has(IN_DIRECTORY),
        _ => false,
    } && length > 0;
    is_kept.then_some((number, length))
}
