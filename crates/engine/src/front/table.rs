//! Node ids and handle numbers that the kernel knows, and what they stand for.
//!
//! An id is the number of a slot and, in its upper half, how often that slot was used: an id that was given back never
//! means something else later. Everything the kernel relies on is in the slots; the rest here is an index over them.

use std::collections::HashMap;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::slots::{INLINE_TEXT, Kind, MOST_SLOTS, Slot, Slots};

/// The id of the root is fixed by the FUSE protocol; the file system beneath uses the same number for its root.
pub const ROOT: u64 = 1;
const ROOT_SLOT: u32 = 1;

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

pub struct Table {
    slots: Slots,
    index: Mutex<Index>,
}

struct Index {
    /// Slots that were used before and are free again.
    free: Vec<u32>,
    /// The first slot that was never used.
    next: u32,
    nodes: HashMap<u32, Node>,
    by_inode: HashMap<u64, u32>,
    by_name: HashMap<(u32, Box<[u8]>), u32>,
}

/// What is known of a node beside its slot.
#[derive(Default)]
struct Node {
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
    pub fn new() -> Self {
        let root = Node { inode: ROOT, inode_references: 0, children: 0, handles: 0 };
        let table = Self {
            slots: Slots::new(),
            index: Mutex::new(Index {
                free: Vec::new(),
                next: ROOT_SLOT + 1,
                nodes: HashMap::from([(ROOT_SLOT, root)]),
                by_inode: HashMap::from([(ROOT, ROOT_SLOT)]),
                by_name: HashMap::new(),
            }),
        };
        if let Some(slot) = table.slots.get(ROOT_SLOT) {
            slot.owner.store(ROOT, Relaxed);
            slot.set_kind(Kind::Directory);
        }
        table
    }

    /// The id of `name` in `parent`, which the file system beneath calls `inode`. Counts one reference of the kernel, so it
    /// is called once for every reply that tells the kernel this id, before that reply.
    pub fn entry(&self, parent: u64, name: &[u8], kind: Kind, inode: u64) -> Result<u64, TableError> {
        let mut index = self.index();
        let number = match index.by_inode.get(&inode) {
            Some(number) => *number,
            None => self.add_node(&mut index, parent, name, kind, inode)?,
        };
        let slot = self.slot(number)?;
        slot.count.fetch_add(1, Release);
        if let Some(node) = index.nodes.get_mut(&number) {
            node.inode_references += 1;
        }
        Ok(id(number, slot))
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

    /// The inode of the file system beneath.
    pub fn inode(&self, node: u64) -> Result<u64, TableError> {
        self.current(node)?;
        self.index().nodes.get(&number(node)).map(|it| it.inode).ok_or(TableError::Stale)
    }

    pub fn parent(&self, node: u64) -> u64 {
        self.current(node).map_or(ROOT, |slot| slot.owner.load(Relaxed))
    }

    /// Where the node is, for people who read logs.
    pub fn path(&self, node: u64) -> PathBuf {
        let _whole = self.index();
        let mut names = Vec::new();
        let mut node = node;
        while node != ROOT {
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
        self.index().by_name.remove(&(number(parent), name.into()));
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
        self.release_text(&mut index, slot);
        self.write_text(&mut index, slot, new_name)?;
        slot.owner.store(new_parent, Release);
        if let Some(node) = index.nodes.get_mut(&number(new_parent)) {
            node.children += 1;
        }
        index.by_name.insert((number(new_parent), new_name.into()), moved);
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
    pub fn add_handle(&self, kind: Kind, node: u64, open_flags: i32) -> Result<u64, TableError> {
        let mut index = self.index();
        self.current(node)?;
        let number = self.allocate(&mut index)?;
        let slot = self.slot(number)?;
        slot.owner.store(node, Relaxed);
        slot.open_flags.store(open_flags.cast_unsigned(), Relaxed);
        slot.set_kind(kind);
        if let Some(node) = index.nodes.get_mut(&self::number(node)) {
            node.handles += 1;
        }
        Ok(id(number, slot))
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
        index.release(number(handle), slot);
        if let Some(node) = index.nodes.get_mut(&node) {
            node.handles -= 1;
        }
        self.collect(&mut index, node, &mut unneeded);
        unneeded
    }

    fn add_node(&self, index: &mut Index, parent: u64, name: &[u8], kind: Kind, inode: u64) -> Result<u32, TableError> {
        self.current(parent)?;
        let added = self.allocate(index)?;
        let slot = self.slot(added)?;
        slot.owner.store(parent, Relaxed);
        if let Err(error) = self.write_text(index, slot, name) {
            index.free.push(added);
            return Err(error);
        }
        slot.set_kind(kind);
        index.nodes.insert(added, Node { inode, ..Node::default() });
        if let Some(parent) = index.nodes.get_mut(&number(parent)) {
            parent.children += 1;
        }
        index.by_name.insert((number(parent), name.into()), added);
        index.by_inode.insert(inode, added);
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
        let number = match index.free.pop() {
            Some(number) => number,
            None if index.next < MOST_SLOTS => {
                index.next += 1;
                index.next - 1
            }
            None => return Err(TableError::Full),
        };
        let slot = self.slot(number)?;
        slot.generation.fetch_add(1, Relaxed);
        slot.count.store(0, Relaxed);
        slot.flags.store(0, Relaxed);
        slot.next.store(0, Relaxed);
        slot.text_length.store(0, Relaxed);
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
            piece = if next == 0 || text.len() == length { None } else { self.slots.get(next) };
        }
        text
    }

    fn slot(&self, number: u32) -> Result<&Slot, TableError> {
        self.slots.get(number).ok_or(TableError::Stale)
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

fn id(number: u32, slot: &Slot) -> u64 {
    u64::from(number) | u64::from(slot.generation.load(Relaxed)) << 32
}

#[cfg(test)]
mod tests;
