//! The memory of the table: numbered slots of fixed size, written by plain atomic stores.
//!
//! A slot holds no pointer and no Rust type with a hidden layout, so that the memory can be a file shared with another
//! process one day. Today it is allocated piece by piece.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

/// Bytes of text in one slot; longer text continues in further slots.
pub const INLINE_TEXT: usize = 88;
const SLOTS_PER_PIECE: u32 = 4096;
const PIECES: u32 = 1024;
/// Four million nodes and handles: half a gigabyte.
pub const MOST_SLOTS: u32 = SLOTS_PER_PIECE * PIECES;

/// What a slot is used for. Stored last when a slot is filled and first when it is emptied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    Free = 0,
    Directory = 1,
    File = 2,
    /// The rest of a long text.
    Continuation = 3,
    ReadHandle = 4,
    WriteHandle = 5,
    DirectoryHandle = 6,
}

/// Flag of a write handle: a write failed, so that closing it must fail, too.
pub const POISONED: u32 = 1;

#[derive(Default)]
#[repr(C)]
pub struct Slot {
    kind: AtomicU32,
    /// Counts the uses of this slot, so that an old id never means something new.
    pub generation: AtomicU32,
    /// Node: id of its directory. Handle: id of its node.
    pub owner: AtomicU64,
    /// Node: how often the kernel was told its id. Write handle: bytes written.
    pub count: AtomicU64,
    pub flags: AtomicU32,
    pub text_length: AtomicU32,
    pub next: AtomicU32,
    /// Handle: the flags of open(2).
    pub open_flags: AtomicU32,
    text: Text,
}

#[repr(C)]
struct Text([AtomicU8; INLINE_TEXT]);

impl Default for Text {
    fn default() -> Self {
        Self([const { AtomicU8::new(0) }; INLINE_TEXT])
    }
}

impl Slot {
    pub fn kind(&self) -> Kind {
        match self.kind.load(Ordering::Acquire) {
            1 => Kind::Directory,
            2 => Kind::File,
            3 => Kind::Continuation,
            4 => Kind::ReadHandle,
            5 => Kind::WriteHandle,
            6 => Kind::DirectoryHandle,
            _ => Kind::Free,
        }
    }

    pub fn set_kind(&self, kind: Kind) {
        self.kind.store(kind as u32, Ordering::Release);
    }

    pub fn has(&self, flags: u32) -> bool {
        self.flags.load(Ordering::Acquire) & flags != 0
    }

    pub fn set(&self, flags: u32) {
        self.flags.fetch_or(flags, Ordering::Release);
    }

    pub fn write_text(&self, text: &[u8]) {
        for (target, byte) in self.text.0.iter().zip(text) {
            target.store(*byte, Ordering::Relaxed);
        }
    }

    pub fn read_text(&self, length: usize) -> impl Iterator<Item = u8> {
        self.text.0.iter().take(length).map(|it| it.load(Ordering::Relaxed))
    }
}

/// All slots, by number.
pub struct Slots {
    pieces: Box<[OnceLock<Box<[Slot]>>]>,
}

impl Slots {
    pub fn new() -> Self {
        Self { pieces: (0..PIECES).map(|_| OnceLock::new()).collect() }
    }

    /// The slot with that number, which must be below [`MOST_SLOTS`].
    pub fn get(&self, number: u32) -> Option<&Slot> {
        let piece = self.pieces.get((number / SLOTS_PER_PIECE) as usize)?;
        let piece = piece.get_or_init(|| (0..SLOTS_PER_PIECE).map(|_| Slot::default()).collect());
        piece.get((number % SLOTS_PER_PIECE) as usize)
    }
}

const _: () = assert!(size_of::<Slot>() == 128, "the layout of a slot is part of what another process may read");
