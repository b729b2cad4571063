//! What must outlive the engine: a memory file that a keeper holds open, so that a successor finds what this engine knew.
//!
//! Without a keeper the same memory belongs to this process alone. The first four numbers of the file are also read by the
//! keeper (`s3csi-mounter`); everything else is known to engines only, and `LAYOUT` changes whenever it does.

mod memory;
mod record;
mod slots;
mod spool;
mod work;

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use memory::Memory;
use record::Record;

pub use slots::{DIRTY, INLINE_TEXT, KEPT, Kind, MOST_SLOTS, NEW, ORPHANED, POISONED, Slot};
pub use spool::Spool;
pub use work::{Loss, Noted, Working};

/// Size and meaning of everything in the file. An engine takes over from one with the same layout only.
const LAYOUT: u64 = 0x7333_6373_6900_0002;
/// Longer than both messages of the first exchange are in any version of the protocol.
const LONGEST_MESSAGE: usize = 256;
const LONGEST_REGION: usize = 64;
/// Often enough for a keeper that counts seconds.
const BEAT_INTERVAL: Duration = Duration::from_millis(250);

/// The start of the file.
#[repr(C)]
pub struct Head {
    /// Counts up while the engine is alive. Read by the keeper.
    beat: AtomicU64,
    /// Handles whose data is neither in the bucket nor in the spool: it would be lost with the engine. Read by the keeper.
    unstored: AtomicU64,
    /// Requests of the kernel that were begun. Read by the keeper.
    begun: AtomicU64,
    /// Requests of the kernel that were done with. Read by the keeper.
    done: AtomicU64,
    layout: AtomicU64,
    /// Slots that were ever used.
    used: AtomicU64,
    question: Record<LONGEST_MESSAGE>,
    answer: Record<LONGEST_MESSAGE>,
    region: Record<LONGEST_REGION>,
    /// The bits of a number; 0 if it is not known.
    network_gbps: AtomicU64,
    work: work::Notes,
}

#[derive(Debug, thiserror::Error)]
pub enum StateError {
    #[error("cannot use the memory shared with other engines")]
    Map {
        #[source]
        cause: io::Error,
    },

    #[error("the mount was served by an engine of another version, which keeps its state in another way")]
    OtherLayout,
}

/// Where this engine stands in the succession.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// The kernel has not been answered yet.
    First,
    /// An engine before this one served the mount.
    Successor,
}

#[derive(Clone)]
pub struct State {
    memory: Arc<Memory>,
    spool: Arc<Spool>,
}

impl State {
    /// State that ends with this process.
    pub fn private() -> Result<Self, StateError> {
        let file = rustix::fs::memfd_create("mount-s3", rustix::fs::MemfdFlags::CLOEXEC)
            .map_err(|cause| StateError::Map { cause: cause.into() })?;
        Self::shared(File::from(file))
    }

    pub fn shared(file: File) -> Result<Self, StateError> {
        let memory = Memory::map(&file).map_err(|cause| StateError::Map { cause })?;
        let state = Self { memory: Arc::new(memory), spool: Arc::new(Spool::new(file)) };
        match state.head().layout.load(Ordering::Acquire) {
            0 => state.head().layout.store(LAYOUT, Ordering::Release),
            LAYOUT => {}
            _ => return Err(StateError::OtherLayout),
        }
        Ok(state)
    }

    pub fn turn(&self) -> Turn {
        if self.answer().is_some() { Turn::Successor } else { Turn::First }
    }

    /// The kernel's first question, and what it was answered.
    pub fn question(&self) -> Option<Vec<u8>> {
        self.head().question.get()
    }

    pub fn answer(&self) -> Option<Vec<u8>> {
        self.head().answer.get()
    }

    /// Notes the first exchange. The answer comes last: it makes later engines successors.
    pub fn note_exchange(&self, question: &[u8], answer: &[u8]) {
        self.head().question.set(question);
        self.head().answer.set(answer);
    }

    /// The region of the bucket, as the first engine found it.
    pub fn region(&self) -> Option<String> {
        self.head().region.get().and_then(|it| String::from_utf8(it).ok())
    }

    /// What the network of this machine can do, if the first engine found out.
    pub fn network_gbps(&self) -> Option<f64> {
        Some(self.head().network_gbps.load(Ordering::Relaxed)).filter(|it| *it != 0).map(f64::from_bits)
    }

    pub fn note_network(&self, region: &str, gbps: Option<f64>) {
        self.head().network_gbps.store(gbps.map_or(0, f64::to_bits), Ordering::Relaxed);
        self.head().region.set(region.as_bytes());
    }

    /// Tells the keeper for the rest of this process's life that it is not frozen.
    pub fn beat(&self) -> io::Result<()> {
        let state = self.clone();
        let beat = move || {
            loop {
                state.head().beat.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(BEAT_INTERVAL);
            }
        };
        std::thread::Builder::new().name("heartbeat".into()).spawn(beat).map(drop)
    }

    /// The slot with that number, which must be below [`MOST_SLOTS`].
    pub fn slot(&self, number: u32) -> Option<&Slot> {
        self.memory.slot(number)
    }

    pub fn used(&self) -> u32 {
        u32::try_from(self.head().used.load(Ordering::Acquire)).unwrap_or(MOST_SLOTS).min(MOST_SLOTS)
    }

    pub fn set_used(&self, used: u32) {
        self.head().used.store(used.into(), Ordering::Release);
    }

    /// How many handles have data that would be lost with the engine.
    pub fn unstored(&self) -> &AtomicU64 {
        &self.head().unstored
    }

    pub fn spool(&self) -> &Spool {
        &self.spool
    }

    fn head(&self) -> &Head {
        self.memory.head()
    }
}
