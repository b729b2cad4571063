//! Node ids and handle numbers that the kernel knows, and what they stand for.
//!
//! An id is the number of a slot and, in its upper half, how often that slot was used: an id that was given back never
//! means something else later. Everything the kernel relies on is in the slots; the rest here is an index over them, which
//! a successor builds anew (see `load`).
//!
//! A slot is published by its kind, which is stored last and taken back first. References of the kernel are counted up
//! before the kernel is told and down after it has said so. A crash between any two stores can therefore leave a slot that
//! nobody needs, but never a count that is too low or a slot that is half true.

mod load;
mod unstored;

use std::collections::HashMap;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::state::{INLINE_TEXT, Kind, MOST_SLOTS, NEW, ORPHANED, Slot, State};

/// The id of the root is fixed by the FUSE protocol; the file system beneath uses the same number for its root.
pub const ROOT: u64 = 1;
const ROOT_SLOT: u32 = 1;
/// No path is deeper: a key of S3 has at most 1024 bytes.
const DEEPEST: usize = 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// The kernel should not have this id any more; it looks the name up again when it hears of it.
    #[error("the id is not in use any more")]
    Stale,

    #[error("more than {MOST_SLOTS} files and handles are in use")]
    Full,
}

/// References to an inode of the file system beneath that are not needed any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unneeded {
    pub inode: u64,
    pub count: u64,
}

/// What the file system beneath says of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    pub kind: Kind,
    pub inode: u64,
    pub size: u64,
    /// When it was changed last, in seconds.
    pub stamp: u64,
    /// [`NEW`] if it was made just now, else 0.
    pub flags: u32,
}

/// What is noted of a handle when it is opened.
#[derive(Clone, Copy, Debug)]
pub struct NewHandle<'a> {
    pub kind: Kind,
    pub open_flags: i32,
    /// The process that opened a file for writing, if it can be told from others.
    pub opener: u32,
    /// What a read handle reads.
    pub etag: &'a [u8],
    /// [`crate::state::KEPT`] if all that will be written is to be kept until the handle is dropped, else 0.
    pub flags: u32,
}

/// A node as the file system beneath sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Binding {
    Bound(u64),
    /// Known to an engine before this one; to be found again by its name.
    Lost {
        parent: u64,
        name: OsString,
        kind: Kind,
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
}

/// What is known of a node beside its slot.
#[derive(Default)]
struct Node {
    /// 0 while it is lost.
    inode: u64,
    /// References to the inode that we hold in the file system beneath.
    inode_references: u64,
    children: u32,
    handles: u32,
}

impl Index {
    fn release(&mut self, number: u32, slot: &Slot) {
        slot.set_kind(Kind::Free);
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
    pub fn entry(&self, parent: u64, name: &[u8], found: Found) -> Result<u64, TableError> {
        let mut index = self.index();
        let number = match self.known(&mut index, parent, name, found) {
            Some(number) => number,
            None => self.add_node(&mut index, parent, name, found)?,
        };
        let slot = self.slot(number)?;
        slot.count.fetch_add(1, Release);
        slot.size.store(found.size, Relaxed);
        slot.stamp.store(found.stamp, Relaxed);
        if let Some(node) = index.nodes.get_mut(&number) {
            node.inode_references += 1;
        }
        Ok(id(number, slot))
    }

    /// The node that stands for the inode, or a lost one that has its name and was the same file.
    fn known(&self, index: &mut Index, parent: u64, name: &[u8], found: Found) -> Option<u32> {
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
        // The page cache of two versions of a file must never mix, so the new one gets an id of its own.
        slot.set(ORPHANED);
        None
    }

    /// Takes back one `entry` that the kernel was not told after all. The file system beneath took back its own reference.
    pub fn withdraw(&self, node: u64) -> Option<Unneeded> {
        if let Some(known) = self.index().nodes.get_mut(&number(node)) {
            known.inode_references = known.inode_references.saturating_sub(1);
        }
        self.forget(node, 1).pop()
    }

    /// The kernel dropped `count` references.
    pub fn forget(&self, node: u64, count: u64) -> Vec<Unneeded> {
        let mut unneeded = Vec::new();
        let mut index = self.index();
        if let Ok(slot) = self.current(node) {
            let left = slot.count.load(Relaxed).saturating_sub(count);
            slot.count.store(left, Release);
            self.collect(&mut index, number(node), &mut unneeded);
        }
        unneeded
    }

    pub fn binding(&self, node: u64) -> Result<Binding, TableError> {
        let slot = self.current(node)?;
        let index = self.index();
        match index.nodes.get(&number(node)) {
            Some(known) if known.inode != 0 => Ok(Binding::Bound(known.inode)),
            Some(_) if !slot.has(ORPHANED) => Ok(Binding::Lost {
                parent: slot.owner.load(Relaxed),
                name: OsString::from_vec(self.text(slot)),
                kind: slot.kind(),
                is_new: slot.has(NEW),
            }),
            Some(_) | None => Err(TableError::Stale),
        }
    }

    /// A lost node was found again as `inode`, to which the caller holds one reference.
    pub fn bind(&self, node: u64, inode: u64, kind: Kind) -> Result<u64, TableError> {
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

    /// A lost node of that name which is not in the bucket: only the engines before this one knew it.
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
        }
    }

    /// The node got another name, which may have been another node's before.
    pub fn renamed(
        &self,
        parent: u64,
        name: &[u8],
        new_parent: u64,
        new_name: &[u8],
    ) -> Result<Vec<Unneeded>, TableError> {
        let mut unneeded = Vec::new();
        let mut index = self.index();
        let Some(moved) = index.by_name.remove(&(number(parent), name.into())) else { return Ok(unneeded) };
        let slot = self.slot(moved)?;
        // While the name is neither the old nor the new one, nobody may find the node by it.
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
        self.collect(&mut index, number(parent), &mut unneeded);
        Ok(unneeded)
    }

    /// The name stands for another inode now, to which the caller holds one reference. Returns what is not needed any more:
    /// the references to the old inode, or the caller's one.
    pub fn rebind(&self, parent: u64, name: &[u8], inode: u64) -> Unneeded {
        let mut index = self.index();
        let unneeded = Unneeded { inode, count: 1 };
        let is_known = index.by_inode.contains_key(&inode);
        let Some(number) = index.by_name.get(&(number(parent), name.into())).copied().filter(|_| !is_known) else {
            return unneeded;
        };
        let Some(node) = index.nodes.get_mut(&number) else { return unneeded };
        let old = Unneeded { inode: node.inode, count: node.inode_references };
        node.inode = inode;
        node.inode_references = 1;
        index.by_inode.remove(&old.inode);
        index.by_inode.insert(inode, number);
        old
    }

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

    /// The `ETag` of what a read handle reads.
    pub fn etag(&self, slot: &Slot) -> Vec<u8> {
        self.text(slot)
    }

    pub fn clear(&self, node: u64, flags: u32) {
        if let Ok(slot) = self.current(node) {
            slot.clear(flags);
        }
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

    pub fn handle(&self, handle: u64) -> Result<&Slot, TableError> {
        let slot = self.current(handle)?;
        match slot.kind() {
            Kind::ReadHandle | Kind::WriteHandle | Kind::DirectoryHandle => Ok(slot),
            Kind::Free | Kind::Directory | Kind::File | Kind::Continuation => Err(TableError::Stale),
        }
    }

    pub fn drop_handle(&self, handle: u64) -> Vec<Unneeded> {
        let mut unneeded = Vec::new();
        let mut index = self.index();
        let Ok(slot) = self.handle(handle) else { return unneeded };
        let node = number(slot.owner.load(Relaxed));
        self.end_writing(slot);
        self.stop_keeping(handle, slot);
        self.release_text(&mut index, slot);
        index.release(number(handle), slot);
        if let Some(node) = index.nodes.get_mut(&node) {
            node.handles -= 1;
        }
        self.collect(&mut index, node, &mut unneeded);
        unneeded
    }

    fn add_node(&self, index: &mut Index, parent: u64, name: &[u8], found: Found) -> Result<u32, TableError> {
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

    /// Frees the node if nobody needs it any more, and then perhaps its parent.
    fn collect(&self, index: &mut Index, first: u32, unneeded: &mut Vec<Unneeded>) {
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
                unneeded.push(Unneeded { inode: node.inode, count: node.inode_references });
            }
            self.release_text(index, slot);
            index.release(candidate, slot);
            if let Some(parent) = index.nodes.get_mut(&parent) {
                parent.children -= 1;
            }
            candidate = parent;
        }
    }

    fn allocate(&self, index: &mut Index) -> Result<u32, TableError> {
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

    fn write_text(&self, index: &mut Index, slot: &Slot, text: &[u8]) -> Result<(), TableError> {
        let (first, rest) = text.split_at(text.len().min(INLINE_TEXT));
        let mut next = 0;
        // The last piece is stored first, so that a slot never names one that is not filled.
        for piece in rest.chunks(INLINE_TEXT).rev() {
            let number = self.allocate(index)?;
            let continuation = self.slot(number)?;
            continuation.write_text(piece);
            continuation.next.store(next, Relaxed);
            continuation.set_kind(Kind::Continuation);
            next = number;
        }
        slot.write_text(first);
        slot.next.store(next, Relaxed);
        slot.text_length.store(u32::try_from(text.len()).unwrap_or(u32::MAX), Release);
        Ok(())
    }

    fn release_text(&self, index: &mut Index, slot: &Slot) {
        let mut next = slot.next.swap(0, Relaxed);
        while next != 0 {
            let Ok(continuation) = self.slot(next) else { return };
            let following = continuation.next.swap(0, Relaxed);
            index.release(next, continuation);
            next = following;
        }
    }

    fn text(&self, slot: &Slot) -> Vec<u8> {
        let length = slot.text_length.load(Acquire) as usize;
        let mut text = Vec::with_capacity(length);
        let mut piece = Some(slot);
        while let Some(slot) = piece {
            text.extend(slot.read_text((length - text.len()).min(INLINE_TEXT)));
            let next = slot.next.load(Relaxed);
            piece = if next == 0 || text.len() == length { None } else { self.state.slot(next) };
        }
        text
    }

    fn slot(&self, number: u32) -> Result<&Slot, TableError> {
        self.state.slot(number).ok_or(TableError::Stale)
    }

    /// The slot of an id that is still in use.
    fn current(&self, id: u64) -> Result<&Slot, TableError> {
        let slot = self.slot(number(id))?;
        let is_current = u64::from(slot.generation.load(Relaxed)) == id >> 32 && slot.kind() != Kind::Free;
        if is_current { Ok(slot) } else { Err(TableError::Stale) }
    }

    fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the lower half of an id is the number of its slot")]
fn number(id: u64) -> u32 {
    id as u32
}

/// Whether a lost node is what the file system beneath now finds under its name.
fn is_same(slot: &Slot, found: Found) -> bool {
    let stamp = slot.stamp.load(Relaxed);
    let is_unchanged = stamp == 0 || slot.has(NEW) || (slot.size.load(Relaxed), stamp) == (found.size, found.stamp);
    slot.kind() == found.kind && (found.kind == Kind::Directory || is_unchanged)
}

fn id(number: u32, slot: &Slot) -> u64 {
    u64::from(number) | u64::from(slot.generation.load(Relaxed)) << 32
}

#[cfg(test)]
mod tests;
