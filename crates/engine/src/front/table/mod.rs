//! Node ids and handle numbers that the kernel knows, and what they stand for.
//!
//! An id is the number of a slot and, in its upper half, how often that slot was used: an id that was given back never
//! means something else later. Everything the kernel relies on is in the slots; the rest here is an index over them, which
//! a successor rebuilds (see `load`).
//!
//! A slot is published by its kind, which is stored last and taken back first. References of the kernel are counted up
//! before the reply and down after FORGET was read. A crash between any two stores can therefore leak a slot, but never leave
//! a count that is too low or a half-written slot.
//!
//! `Table` is one type because all of it changes the same slots under one lock. This file has the nodes; its children add
//! the handles (`handles`), the staged files (`staged`), metadata to be sent (`metadata`), the data at risk (`dirty`), the
//! versions of cached pages (`pages`), the times of directories (`times`), the start of a successor (`load`) and the storage of
//! slots and texts (`slots`).

mod dirty;
mod handles;
mod listed;
mod load;
mod metadata;
mod pages;
mod slots;
mod staged;
mod times;

use std::collections::HashMap;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use parking_lot::{Mutex, MutexGuard};

pub use self::handles::NewHandle;
pub use self::listed::ListedNode;
pub use self::pages::{KernelPages, PageVersion};
use crate::state::{MOST_SLOTS, NEW, ORPHANED, Slot, SlotKind, State};

/// The id of the root is fixed by the FUSE protocol; `S3Filesystem` uses the same number for its root.
pub const ROOT: u64 = 1;
const ROOT_SLOT: u32 = 1;
/// No path is deeper: a key of S3 has at most 1024 bytes.
const DEEPEST: usize = 1024;
/// No name is longer, and no sensible `ETag`. What is longer was not written by us.
const LONGEST_TEXT: usize = 64 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// Answered with ESTALE: the kernel looks the name up again.
    #[error("the id is not in use any longer")]
    Stale,

    #[error("more than {MOST_SLOTS} files and handles are in use")]
    Full,
}

/// References to an inode of `S3Filesystem` that are not needed any longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InodeReferences {
    pub inode: u64,
    pub count: u64,
}

/// What `S3Filesystem` says of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryInfo {
    pub kind: SlotKind,
    pub inode: u64,
    pub size: u64,
    /// When it was changed last, in seconds.
    pub stamp: u64,
    /// [`NEW`] if it was made just now, else 0.
    pub flags: u32,
}

/// A node as `S3Filesystem` sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Binding {
    Bound(u64),
    /// Known to a previous engine; to be found again by its name.
    Unresolved {
        parent: u64,
        name: OsString,
        kind: SlotKind,
        is_new: bool,
    },
}

pub struct Table {
    state: State,
    index: Mutex<Index>,
}

#[derive(Default)]
struct Index {
    /// Slots that were used before and are free again.
    free: Vec<u32>,
    nodes: HashMap<u32, Node>,
    by_inode: HashMap<u64, u32>,
    by_name: HashMap<(u32, Box<[u8]>), u32>,
    /// References to inodes that no node stands for any longer, to be given back.
    outdated: Vec<InodeReferences>,
}

/// What is known of a node beside its slot.
#[derive(Default)]
struct Node {
    /// 0 while it is lost.
    inode: u64,
    /// References to the inode that we hold in `S3Filesystem`.
    inode_references: u64,
    children: u32,
    handles: u32,
    /// Local copies of the file; they count as handles, too.
    copies: u32,
    /// The slot of its metadata; 0 if there is none.
    metadata: u32,
}

impl Index {
    /// Answers the references to the inode that the node stood for.
    fn rebind(&mut self, number: u32, slot: &Slot, inode: u64, references: u64) -> Option<InodeReferences> {
        let node = self.nodes.get_mut(&number)?;
        pages::forget(slot);
        let old = InodeReferences { inode: node.inode, count: node.inode_references };
        (node.inode, node.inode_references) = (inode, references);
        self.by_inode.remove(&old.inode);
        self.by_inode.insert(inode, number);
        Some(old)
    }

    fn release(&mut self, number: u32, slot: &Slot) {
        slot.set_kind(SlotKind::Free);
        self.free.push(number);
    }
}

impl Table {
    /// A table that knows nothing until it is loaded.
    pub fn new(state: State) -> Self {
        Self { state, index: Mutex::default() }
    }

    /// The id of `name` in `parent`. Counts one reference of the kernel, so it is called once for every reply that tells the
    /// kernel this id, before that reply.
    pub fn entry(&self, parent: u64, name: &[u8], found: EntryInfo) -> Result<u64, TableError> {
        let mut index = self.index();
        let number = match self.known(&mut index, parent, name, found) {
            Some(number) => number,
            None => self.add_node(&mut index, parent, name, found)?,
        };
        let slot = self.slot(number)?;
        listed::count_reference(slot, found);
        if let Some(node) = index.nodes.get_mut(&number) {
            node.inode_references += 1;
        }
        Ok(id(number, slot))
    }

    /// The node that stands for the inode, or a lost one that has its name and was the same file.
    fn known(&self, index: &mut Index, parent: u64, name: &[u8], found: EntryInfo) -> Option<u32> {
        if let Some(number) = index.by_inode.get(&found.inode) {
            return Some(*number);
        }
        let number = *index.by_name.get(&(number(parent), name.into()))?;
        let slot = self.slot(number).ok()?;
        let node = index.nodes.get_mut(&number)?;
        if node.inode == 0 && is_same(slot, found) {
            node.inode = found.inode;
            index.by_inode.insert(found.inode, number);
            return Some(number);
        }
        if 0 < node.copies && slot.kind() == found.kind {
            // Its content is that of the copy, whatever the object is now: a request of an engine that died may have replaced it.
            let outdated = index.rebind(number, slot, found.inode, 0)?;
            index.outdated.extend((outdated.inode != 0).then_some(outdated));
            return Some(number);
        }
        // The page cache of two versions of a file must never mix, so the new one gets an id of its own.
        slot.set(ORPHANED);
        None
    }

    /// Takes back one `entry` that the kernel was not told after all. `S3Filesystem` took back its own reference.
    pub fn withdraw(&self, node: u64) -> Vec<InodeReferences> {
        if let Some(known) = self.index().nodes.get_mut(&number(node)) {
            known.inode_references = known.inode_references.saturating_sub(1);
        }
        self.forget(node, 1)
    }

    /// The kernel dropped `count` references.
    pub fn forget(&self, node: u64, count: u64) -> Vec<InodeReferences> {
        let mut index = self.index();
        let mut released = std::mem::take(&mut index.outdated);
        if let Ok(slot) = self.current(node) {
            let left = slot.count.load(Relaxed).saturating_sub(count);
            slot.count.store(left, Release);
            self.collect(&mut index, number(node), &mut released);
        }
        released
    }

    pub fn binding(&self, node: u64) -> Result<Binding, TableError> {
        let slot = self.current(node)?;
        let index = self.index();
        match index.nodes.get(&number(node)) {
            Some(known) if known.inode != 0 => Ok(Binding::Bound(known.inode)),
            Some(_) if !slot.has(ORPHANED) => Ok(Binding::Unresolved {
                parent: slot.owner.load(Relaxed),
                name: OsString::from_vec(self.text(slot)),
                kind: slot.kind(),
                is_new: slot.has(NEW),
            }),
            Some(_) | None => Err(TableError::Stale),
        }
    }

    /// The directory of a node and its name in it.
    pub fn location(&self, node: u64) -> Result<(u64, OsString), TableError> {
        let _whole = self.index();
        let slot = self.current(node)?;
        if slot.has(ORPHANED) {
            return Err(TableError::Stale);
        }
        Ok((slot.owner.load(Relaxed), OsString::from_vec(self.text(slot))))
    }

    /// The node stands for another inode now, to which the caller holds one reference. Returns the references to the old one.
    pub fn rebind_node(&self, node: u64, inode: u64) -> Result<InodeReferences, TableError> {
        let slot = self.current(node)?;
        self.index().rebind(number(node), slot, inode, 1).ok_or(TableError::Stale)
    }

    pub fn node_slot(&self, node: u64) -> Result<&Slot, TableError> {
        self.current(node)
    }

    pub fn is_file(&self, node: u64) -> bool {
        self.current(node).is_ok_and(|it| it.kind() == SlotKind::File)
    }

    /// All nodes below a directory.
    pub fn below(&self, directory: u64) -> Vec<u64> {
        let index = self.index();
        let below = index.nodes.keys().filter(|it| self.is_below(**it, directory));
        below.filter_map(|it| self.slot(*it).map(|slot| id(*it, slot)).ok()).collect()
    }

    fn is_below(&self, node: u32, directory: u64) -> bool {
        let mut next = node;
        for _ in 0..DEEPEST {
            let Ok(slot) = self.slot(next) else { return false };
            let owner = slot.owner.load(Relaxed);
            if next == ROOT_SLOT || number(owner) == next {
                return false;
            }
            if owner == directory {
                return true;
            }
            next = number(owner);
        }
        false
    }

    /// The directory and all nodes below stand for other inodes now, which are found by their names on next use. Returns the
    /// references to the old ones.
    pub fn unbind_below(&self, directory: u64) -> Vec<InodeReferences> {
        let below = self.below(directory);
        let mut index = self.index();
        let mut released = Vec::new();
        for node in below.into_iter().chain([directory]) {
            let Some(known) = index.nodes.get_mut(&number(node)) else { continue };
            let old = InodeReferences { inode: known.inode, count: known.inode_references };
            known.inode = 0;
            known.inode_references = 0;
            if old.inode != 0 {
                index.by_inode.remove(&old.inode);
                released.push(old);
            }
            if let Ok(slot) = self.current(node) {
                slot.stamp.store(0, Relaxed);
                pages::forget(slot);
            }
        }
        released
    }

    /// A lost node was found again as `inode`, to which the caller holds one reference.
    pub fn bind(&self, node: u64, inode: u64, kind: SlotKind) -> Result<u64, TableError> {
        let mut index = self.index();
        let number = number(node);
        let is_other = self.current(node)?.kind() != kind || index.by_inode.get(&inode).is_some_and(|it| *it != number);
        let known = index.nodes.get_mut(&number).ok_or(TableError::Stale)?;
        let is_bound_elsewhere = known.inode != 0 && known.inode != inode;
        if is_other || is_bound_elsewhere {
            return Err(TableError::Stale);
        }
        known.inode = inode;
        known.inode_references += 1;
        index.by_inode.insert(inode, number);
        Ok(inode)
    }

    /// A lost node of that name which is not in the bucket: only the previous engines knew it.
    pub fn lost_new(&self, parent: u64, name: &[u8]) -> Option<u64> {
        let index = self.index();
        let number = *index.by_name.get(&(number(parent), name.into()))?;
        self.is_lost_new(&index, number).then(|| self.slot(number).map(|slot| id(number, slot)).ok())?
    }

    pub fn all_lost_new(&self) -> Vec<u64> {
        let index = self.index();
        let lost = index.nodes.keys().filter(|it| self.is_lost_new(&index, **it));
        lost.filter_map(|it| self.slot(*it).map(|slot| id(*it, slot)).ok()).collect()
    }

    fn is_lost_new(&self, index: &Index, number: u32) -> bool {
        let is_lost = index.nodes.get(&number).is_some_and(|it| it.inode == 0);
        is_lost && self.slot(number).is_ok_and(|slot| slot.has(NEW) && !slot.has(ORPHANED))
    }

    pub fn parent(&self, node: u64) -> u64 {
        self.current(node).map_or(ROOT, |slot| slot.owner.load(Relaxed))
    }

    /// Where the node is, for people who read logs.
    pub fn path(&self, node: u64) -> PathBuf {
        let _whole = self.index();
        let mut names = Vec::new();
        let mut node = node;
        while node != ROOT && names.len() < DEEPEST {
            let Ok(slot) = self.current(node) else { break };
            names.push(OsString::from_vec(self.text(slot)));
            node = slot.owner.load(Relaxed);
        }
        let mut path = PathBuf::from("/");
        path.extend(names.into_iter().rev());
        path
    }

    /// The name is gone; the node may still be in use.
    pub fn unlinked(&self, parent: u64, name: &[u8]) {
        let gone = self.index().by_name.remove(&(number(parent), name.into()));
        if let Some(slot) = gone.and_then(|it| self.slot(it).ok()) {
            slot.set(ORPHANED);
            slot.clear(NEW);
            pages::forget(slot);
        }
    }

    /// The node got another name, which may have been another node's before.
    pub fn renamed(
        &self,
        parent: u64,
        name: &[u8],
        new_parent: u64,
        new_name: &[u8],
    ) -> Result<Vec<InodeReferences>, TableError> {
        let mut released = Vec::new();
        let mut index = self.index();
        let Some(moved) = index.by_name.remove(&(number(parent), name.into())) else { return Ok(released) };
        let slot = self.slot(moved)?;
        // The node must not be found by name while the name changes.
        slot.set(ORPHANED);
        self.release_text(&mut index, slot);
        self.write_text(&mut index, slot, new_name)?;
        slot.owner.store(new_parent, Release);
        // A copy has another time, and perhaps another `ETag`.
        slot.stamp.store(0, Relaxed);
        if let Some(node) = index.nodes.get_mut(&number(new_parent)) {
            node.children += 1;
        }
        if let Some(replaced) = index.by_name.insert((number(new_parent), new_name.into()), moved) {
            self.slot(replaced)?.set(ORPHANED);
        }
        slot.clear(ORPHANED);
        if let Some(node) = index.nodes.get_mut(&number(parent)) {
            node.children -= 1;
        }
        self.collect(&mut index, number(parent), &mut released);
        Ok(released)
    }

    /// The name stands for another inode now, to which the caller holds one reference. Returns what is not needed any longer:
    /// the references to the old inode, or the caller's one.
    pub fn rebind(&self, parent: u64, name: &[u8], inode: u64) -> InodeReferences {
        let mut index = self.index();
        let released = InodeReferences { inode, count: 1 };
        let is_known = index.by_inode.contains_key(&inode);
        let Some(number) = index.by_name.get(&(number(parent), name.into())).copied().filter(|_| !is_known) else {
            return released;
        };
        let Some(node) = index.nodes.get_mut(&number) else { return released };
        let old = InodeReferences { inode: node.inode, count: node.inode_references };
        node.inode = inode;
        node.inode_references = 1;
        index.by_inode.remove(&old.inode);
        index.by_inode.insert(inode, number);
        if let Ok(slot) = self.slot(number) {
            pages::forget(slot);
        }
        old
    }

    /// The node with that name in `parent`, if the kernel may know it.
    pub fn node(&self, parent: u64, name: &[u8]) -> Option<u64> {
        let index = self.index();
        let number = *index.by_name.get(&(number(parent), name.into()))?;
        self.slot(number).map(|slot| id(number, slot)).ok()
    }

    pub fn has(&self, node: u64, flags: u32) -> bool {
        self.current(node).is_ok_and(|it| it.has(flags))
    }

    pub fn clear(&self, node: u64, flags: u32) {
        if let Ok(slot) = self.current(node) {
            slot.clear(flags);
        }
    }

    fn add_node(&self, index: &mut Index, parent: u64, name: &[u8], found: EntryInfo) -> Result<u32, TableError> {
        self.current(parent)?;
        let added = self.allocate(index)?;
        let slot = self.slot(added)?;
        slot.owner.store(parent, Relaxed);
        if let Err(error) = self.write_text(index, slot, name) {
            index.free.push(added);
            return Err(error);
        }
        slot.set(found.flags);
        slot.set_kind(found.kind);
        index.nodes.insert(added, Node { inode: found.inode, ..Node::default() });
        if let Some(parent) = index.nodes.get_mut(&number(parent)) {
            parent.children += 1;
        }
        index.by_name.insert((number(parent), name.into()), added);
        index.by_inode.insert(found.inode, added);
        Ok(added)
    }

    /// Frees the node if it is unreferenced, and then perhaps its parent.
    fn collect(&self, index: &mut Index, first: u32, released: &mut Vec<InodeReferences>) {
        let mut candidate = first;
        while candidate != ROOT_SLOT {
            let Ok(slot) = self.slot(candidate) else { return };
            let is_needed = index.nodes.get(&candidate).is_none_or(|it| it.children > 0 || it.handles > 0)
                || slot.count.load(Acquire) > 0;
            if is_needed {
                return;
            }
            let Some(node) = index.nodes.remove(&candidate) else { return };
            let parent = number(slot.owner.load(Relaxed));
            let name = (parent, self.text(slot).into_boxed_slice());
            if index.by_name.get(&name) == Some(&candidate) {
                index.by_name.remove(&name);
            }
            if index.by_inode.get(&node.inode) == Some(&candidate) {
                index.by_inode.remove(&node.inode);
            }
            if node.inode_references > 0 {
                released.push(InodeReferences { inode: node.inode, count: node.inode_references });
            }
            self.release_metadata(index, node.metadata);
            self.release_text(index, slot);
            index.release(candidate, slot);
            if let Some(parent) = index.nodes.get_mut(&parent) {
                parent.children -= 1;
            }
            candidate = parent;
        }
    }

    fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock()
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the lower half of an id is the number of its slot")]
fn number(id: u64) -> u32 {
    id as u32
}

/// Whether a lost node is what `S3Filesystem` now finds under its name.
fn is_same(slot: &Slot, found: EntryInfo) -> bool {
    let stamp = slot.stamp.load(Relaxed);
    let is_unchanged = stamp == 0 || slot.has(NEW) || (slot.size.load(Relaxed), stamp) == (found.size, found.stamp);
    slot.kind() == found.kind && (found.kind == SlotKind::Directory || is_unchanged)
}

fn id(number: u32, slot: &Slot) -> u64 {
    u64::from(number) | u64::from(slot.generation.load(Relaxed)) << 32
}

#[cfg(test)]
mod corruption;
#[cfg(test)]
mod tests;
