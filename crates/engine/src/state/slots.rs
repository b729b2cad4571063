//! What one slot of the table looks like: of fixed size, written by plain atomic stores.
//!
//! A slot holds no pointer and no Rust type with a hidden layout, because another process reads it after this one has died.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

/// Bytes of text in one slot; longer text continues in further slots.
pub const INLINE_TEXT: usize = 64;
/// Four million nodes and handles: half a gigabyte, if all were used.
pub const MOST_SLOTS: u32 = 1 << 22;

/// What a slot is used for. Stored last when a slot is filled and first when it is emptied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum SlotKind {
    Free = 0,
    Directory = 1,
    File = 2,
    /// The rest of a long text.
    Continuation = 3,
    ReadHandle = 4,
    WriteHandle = 5,
    DirectoryHandle = 6,
    /// The local copy of a file that is edited in place.
    StagedFile = 7,
    /// What the next upload of a file carries beside its content.
    Metadata = 8,
}

/// Flag of a write handle or staged file: a write failed or what was written is lost, so that closing it must fail, too.
pub const POISONED: u32 = 1;
/// Flag of a write handle or staged file: something was written that is not in the bucket yet.
pub const DIRTY: u32 = 2;
/// Flag of a node: it was made here and is not in the bucket yet.
pub const NEW: u32 = 4;
/// Flag of a node: its path names something else now, or nothing.
pub const ORPHANED: u32 = 8;
/// Flag of a write handle: all that was written through it is in the spool, too.
pub const SPOOLED: u32 = 16;

/// Flag of a staged file: its bytes are in the staging directory, not in the spool.
pub const IN_DIRECTORY: u32 = 32;
/// Flag of a staged file: it is being made, and nothing was acknowledged yet, or it is being dropped. A successor drops it.
pub const INCOMPLETE: u32 = 64;

#[repr(C)]
pub struct Slot {
    kind: AtomicU32,
    /// Counts the uses of this slot, so that an old id never means something new.
    pub generation: AtomicU32,
    /// Node: id of its directory. Handle, staged file and metadata: id of its node.
    pub owner: AtomicU64,
    /// Node: lookup count of the kernel. Write handle: bytes written. Staged file: its length.
    pub count: AtomicU64,
    pub flags: AtomicU32,
    pub text_length: AtomicU32,
    pub next: AtomicU32,
    /// Handle: the flags of open(2).
    pub open_flags: AtomicU32,
    /// File: its size when the kernel was last told. Write handle: the lock owner that closed it before anything was written.
    /// Staged file: when it was modified, in nanoseconds.
    pub size: AtomicU64,
    /// File: when it was changed last, in seconds; 0 if that is not known. Write handle: the process that opened it.
    /// Staged file: number of the last request that appended.
    pub stamp: AtomicU64,
    /// File: the version of its content that the kernel may have pages of. Directory: when a name in it was changed, in
    /// nanoseconds; 0 if none was. Write handle: the lock owner that counts as the
    /// opener's, as far as it is known. Staged file: where the last request that appended was written.
    pub owner_of_locks: AtomicU64,
    /// Node: its name. Read handle: the `ETag` of what it reads. Write handle: number of the request that opened it. Staged file: the `ETag` of the object it replaces. Metadata:
    /// names and values, each followed by a zero.
    text: [AtomicU8; INLINE_TEXT],
}

impl Slot {
    pub fn kind(&self) -> SlotKind {
        match self.kind.load(Ordering::Acquire) {
            1 => SlotKind::Directory,
            2 => SlotKind::File,
            3 => SlotKind::Continuation,
            4 => SlotKind::ReadHandle,
            5 => SlotKind::WriteHandle,
            6 => SlotKind::DirectoryHandle,
            7 => SlotKind::StagedFile,
            8 => SlotKind::Metadata,
            _ => SlotKind::Free,
        }
    }

    pub fn set_kind(&self, kind: SlotKind) {
        self.kind.store(kind as u32, Ordering::Release);
    }

    pub fn has(&self, flags: u32) -> bool {
        self.flags.load(Ordering::Acquire) & flags != 0
    }

    /// Answers whether they were set before.
    pub fn set(&self, flags: u32) -> bool {
        self.flags.fetch_or(flags, Ordering::AcqRel) & flags != 0
    }

    /// Answers whether they were set before.
    pub fn clear(&self, flags: u32) -> bool {
        self.flags.fetch_and(!flags, Ordering::AcqRel) & flags != 0
    }

    pub fn write_text(&self, text: &[u8]) {
        for (target, byte) in self.text.iter().zip(text) {
            target.store(*byte, Ordering::Relaxed);
        }
    }

    pub fn read_text(&self, length: usize) -> impl Iterator<Item = u8> {
        self.text.iter().take(length).map(|it| it.load(Ordering::Relaxed))
    }
}

const _: () = assert!(size_of::<Slot>() == 128, "the layout of a slot is part of what another process may read");
