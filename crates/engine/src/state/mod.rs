//! What must outlive the engine: a memory file that a supervisor holds open, so that a successor finds what this engine knew.
//!
//! Without a supervisor the same memory belongs to this process alone. The first four numbers of the file are also read by the
//! supervisor; everything else is known to engines only, and `LAYOUT` changes whenever it does.

mod in_flight;
mod memory;
mod record;
mod slots;
mod spool;

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use memory::Memory;
use record::Record;

pub use in_flight::{InFlight, InFlightGuard, RequestClass};
pub use slots::{
    DIRTY, IN_DIRECTORY, INCOMPLETE, INLINE_TEXT, MOST_SLOTS, NEW, ORPHANED, POISONED, SPOOLED, Slot, SlotKind,
};
pub use spool::{LONGEST as LONGEST_SPOOLED, Spool};

/// Size and meaning of everything in the file. An engine takes over from one with the same layout only.
const LAYOUT: u64 = 0x7333_6373_6900_0005;
/// Longer than both messages of the first exchange are in any version of the protocol.
const LONGEST_MESSAGE: usize = 256;
const LONGEST_REGION: usize = 64;
const LONGEST_PATH: usize = 1024;
/// Often enough for a supervisor that counts seconds.
const BEAT_INTERVAL: Duration = Duration::from_millis(250);

/// The start of the file.
#[repr(C)]
pub struct Head {
    /// Counts up while the engine is alive. Read by the supervisor.
    beat: AtomicU64,
    /// Handles whose data is neither in the bucket nor in the spool: it would be lost with the engine. Read by the supervisor.
    unstored: AtomicU64,
    /// Requests of the kernel that were begun. Read by the supervisor.
    begun: AtomicU64,
    /// Requests of the kernel that were done with. Read by the supervisor.
    done: AtomicU64,
    layout: AtomicU64,
    /// Slots that were ever used.
    used: AtomicU64,
    /// Staged files in a directory that an engine in another container does not have. Read by the supervisor.
    staged_on_disk: AtomicU64,
    question: Record<LONGEST_MESSAGE>,
    answer: Record<LONGEST_MESSAGE>,
    region: Record<LONGEST_REGION>,
    /// The bits of a number; 0 if it is not known.
    network_gbps: AtomicU64,
    /// Where the staged files of this mount are, if they have a directory.
    stage: Record<LONGEST_PATH>,
    /// What the mount shows; 0 if no engine has noted it.
    fingerprint: AtomicU64,
    work: in_flight::InFlightTable,
}

#[derive(Debug, thiserror::Error)]
pub enum StateError {
    #[error("cannot use the memory shared with other engines")]
    Map {
        #[source]
        cause: io::Error,
    },

    #[error("the mount was served by an engine of another version, which uses another state format")]
    OtherLayout,

    #[error("the mount was served by an engine with another bucket, prefix or endpoint")]
    OtherSource,
}

/// What a mount shows. An engine with another one would find other objects under the names that the kernel knows.
#[derive(Clone, Copy, Debug)]
pub struct MountedSource<'a> {
    pub bucket: &'a str,
    pub prefix: &'a str,
    pub endpoint: Option<&'a str>,
}

/// Where this engine stands in the takeover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// The kernel has not been answered yet.
    First,
    /// An previous engine served the mount.
    Resumed,
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

    /// Notes what the mount shows, or checks that the engine before this one showed the same.
    pub fn match_source(&self, source: MountedSource<'_>) -> Result<(), StateError> {
        let fingerprint = source.fingerprint();
        match self.head().fingerprint.load(Ordering::Acquire) {
            0 => self.head().fingerprint.store(fingerprint, Ordering::Release),
            known if known == fingerprint => {}
            _ => return Err(StateError::OtherSource),
        }
        Ok(())
    }

    pub fn start(&self) -> Start {
        if self.answer().is_some() { Start::Resumed } else { Start::First }
    }

    /// The kernel's first question, and what it was answered.
    pub fn question(&self) -> Option<Vec<u8>> {
        self.head().question.get()
    }

    pub fn answer(&self) -> Option<Vec<u8>> {
        self.head().answer.get()
    }

    /// Records the first exchange. The answer comes last: it makes later engines successors.
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

    /// The directory of this mount's staged files, as the first engine made it.
    pub fn stage_directory(&self) -> Option<PathBuf> {
        self.head().stage.get().map(|it| PathBuf::from(OsString::from_vec(it)))
    }

    pub fn note_stage_directory(&self, path: &Path) {
        self.head().stage.set(path.as_os_str().as_bytes());
    }

    /// Tells the supervisor for the rest of this process's life that it is not frozen.
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

    /// Waits until no other engine serves the mount: two engines would corrupt the state. A socket that a dead engine closed does
    /// not prove it, because the kernel closes sockets of a dying process before its last thread has ended.
    pub fn lock(&self) -> io::Result<()> {
        self.spool.lock()
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

    /// How many staged files are in a directory. They outlive the engine, but not its container.
    pub fn staged_on_disk(&self) -> &AtomicU64 {
        &self.head().staged_on_disk
    }

    pub fn spool(&self) -> &Spool {
        &self.spool
    }

    fn head(&self) -> &Head {
        self.memory.head()
    }
}

impl MountedSource<'_> {
    /// FNV-1a: the same in every version of the engine, and no secret depends on it.
    fn fingerprint(self) -> u64 {
        let Self { bucket, prefix, endpoint } = self;
        let bytes = [bucket, prefix, endpoint.unwrap_or_default()].join("\0").into_bytes();
        let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        hash.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: MountedSource<'_> = MountedSource { bucket: "b", prefix: "a/", endpoint: Some("http://s3") };

    #[track_caller]
    fn check(successor: MountedSource<'_>, is_same: bool) {
        let state = State::private().unwrap();
        state.match_source(SOURCE).unwrap();
        assert_eq!(state.match_source(successor).is_ok(), is_same, "{successor:?}");
    }

    #[test]
    fn a_successor_shows_the_same_bucket_prefix_and_endpoint() {
        check(SOURCE, true);
        check(MountedSource { bucket: "c", ..SOURCE }, false);
        check(MountedSource { prefix: "", ..SOURCE }, false);
        check(MountedSource { endpoint: Some("http://other"), ..SOURCE }, false);
        check(MountedSource { endpoint: None, ..SOURCE }, false);
        check(MountedSource { bucket: "b\0a", prefix: "/", ..SOURCE }, false);
    }
}
