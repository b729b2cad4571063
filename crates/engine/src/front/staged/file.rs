//! The local copy of one file. Its bytes are in the spool or in the staging directory; everything else that a successor needs
//! is in its slot.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::FileAttr;
use parking_lot::{Mutex, MutexGuard, RwLock};
use s3csi_core::chain::Chain;

use super::blocks::{BlockError, BlockFile, Piece, RangeFetch};
use super::directory::StageDirectory;
use crate::front::resume::Delivery;
use crate::front::{FsError, FsResult};
use crate::state::{DIRTY, IN_DIRECTORY, INCOMPLETE, LONGEST_SPOOLED, POISONED, Slot, State};

const STAT_BLOCK: u64 = 512;

pub struct StagedFile {
    /// The node that the kernel knows.
    pub node: u64,
    /// Its slot in the table.
    pub id: u64,
    /// The handle number under which the superblock takes this copy for an open upload.
    pub claim: u64,
    number: u32,
    state: State,
    directory: Arc<StageDirectory>,
    bytes: RwLock<Bytes>,
    on_disk: Mutex<Option<OnDisk>>,
    /// Held while the copy is changed or stored.
    turn: Mutex<()>,
    object: RwLock<Object>,
    handles: AtomicUsize,
    /// Whether handles may use it: it is complete, and the superblock knows of it.
    is_ready: AtomicBool,
}

/// What the bucket and the superblock know of the file.
#[derive(Clone, Debug)]
pub struct Object {
    /// The inode of the superblock; none if the name is gone.
    pub inode: Option<u64>,
    /// The `ETag` of the object that is replaced; none if there is none.
    pub etag: Option<String>,
    /// Where the object is fetched from.
    pub key: String,
    /// Digests of what was to be stored since, and may have been stored: the engine died before it knew, or the store did not
    /// answer. The object is the one with this `ETag` or one of these.
    pub attempts: Vec<String>,
}

/// Between an `ETag` and the attempts in the slot of a copy.
const SEPARATOR: char = '\n';

impl Object {
    /// How many attempts are remembered: each of them is one in which an engine died, or a request failed.
    const MOST_ATTEMPTS: usize = 16;

    /// What a slot says of the object.
    pub fn parse(inode: Option<u64>, key: String, text: &[u8]) -> Self {
        let text = String::from_utf8_lossy(text);
        let mut parts = text.split(SEPARATOR).map(str::to_owned);
        let etag = parts.next().filter(|it| !it.is_empty());
        Self { inode, etag, key, attempts: parts.collect() }
    }

    /// What a successor needs of it.
    pub fn text(&self) -> String {
        let etag = self.etag.clone().unwrap_or_default();
        self.attempts.iter().fold(etag, |text, attempt| format!("{text}{SEPARATOR}{attempt}"))
    }

    /// The same with one more attempt.
    pub fn attempted(mut self, digest: String) -> Self {
        self.attempts.retain(|it| *it != digest);
        self.attempts.push(digest);
        let too_many = self.attempts.len().saturating_sub(Self::MOST_ATTEMPTS);
        self.attempts.drain(..too_many);
        self
    }
}

enum Bytes {
    Spool,
    Blocks(BlockFile),
    /// The copy was dropped, and its slot belongs to others.
    Freed,
}

/// Counts a copy in the staging directory: no mounter without that directory can continue the mount meanwhile.
struct OnDisk(State);

impl OnDisk {
    fn count(state: &State) -> Self {
        state.staged_on_disk().fetch_add(1, Ordering::AcqRel);
        Self(state.clone())
    }
}

impl Drop for OnDisk {
    fn drop(&mut self) {
        self.0.staged_on_disk().fetch_sub(1, Ordering::AcqRel);
    }
}

/// A WRITE request to a staged file.
pub struct StagedWrite<'a> {
    pub unique: u64,
    pub delivery: Delivery,
    pub offset: u64,
    pub data: &'a [u8],
    /// At the end of the file, wherever that is.
    pub is_append: bool,
}

/// The parts of a new [`StagedFile`].
pub struct NewCopy {
    pub node: u64,
    pub id: u64,
    pub claim: u64,
    pub object: Object,
}

impl StagedFile {
    /// An empty copy.
    pub fn new(new: NewCopy, state: &State, directory: &Arc<StageDirectory>) -> Self {
        let NewCopy { node, id, claim, object } = new;
        Self {
            node,
            id,
            claim,
            number: number(id),
            state: state.clone(),
            directory: Arc::clone(directory),
            bytes: RwLock::new(Bytes::Spool),
            on_disk: Mutex::default(),
            turn: Mutex::default(),
            object: RwLock::new(object),
            handles: AtomicUsize::new(0),
            is_ready: AtomicBool::new(false),
        }
    }

    /// The copy of a previous engine. One whose bytes are gone is lost, and says so whenever it is used.
    pub fn reopen(new: NewCopy, state: &State, directory: &Arc<StageDirectory>) -> Self {
        let file = Self::new(new, state, directory);
        if file.slot().has(IN_DIRECTORY) {
            match BlockFile::reopen(file.id, directory, file.length()) {
                Ok(blocks) => {
                    *file.bytes.write() = Bytes::Blocks(blocks);
                    *file.on_disk.lock() = Some(OnDisk::count(state));
                }
                Err(error) => {
                    tracing::error!(staging_file = ?directory.path(file.id), error = %Chain(&error), "a staging file is lost");
                    file.slot().set(POISONED);
                    file.slot().count.store(0, Ordering::Release);
                    file.slot().clear(IN_DIRECTORY);
                }
            }
        }
        file
    }

    /// Takes the content of the object, of which nothing was fetched yet.
    pub fn fill_lazily(&self, length: u64) -> FsResult<()> {
        let blocks = BlockFile::create(self.id, &self.directory, length).map_err(|error| self.failed(&error))?;
        self.slot().set(IN_DIRECTORY);
        *self.on_disk.lock() = Some(OnDisk::count(&self.state));
        *self.bytes.write() = Bytes::Blocks(blocks);
        self.slot().count.store(length, Ordering::Release);
        Ok(())
    }

    /// Takes these bytes as its content, if there is room in the spool.
    pub fn fill(&self, content: &[u8]) -> bool {
        let is_kept = self.state.spool().write_at(self.number, 0, 0, content);
        if is_kept {
            self.slot().count.store(content.len() as u64, Ordering::Release);
        }
        is_kept
    }

    pub fn length(&self) -> u64 {
        self.slot().count.load(Ordering::Acquire)
    }

    pub fn is_dirty(&self) -> bool {
        self.slot().has(DIRTY)
    }

    /// Whether something that was written to it is missing. It is never stored then.
    pub fn is_lost(&self) -> bool {
        matches!(&*self.bytes.read(), Bytes::Freed) || self.slot().has(POISONED)
    }

    /// What every use of a lost copy reports.
    pub fn lost(&self) -> FsError {
        let place = match self.directory.path(self.id) {
            Some(path) => format!("staging file {}", path.display()),
            None => "in memory".into(),
        };
        let reason = format!(
            "something that was written to the local copy of this file ({place}) is missing, so it is not stored and the \
             object stays as it was; close the file in all programs and write it again"
        );
        FsError::new(libc::EIO, reason)
    }

    fn must_be_whole(&self) -> FsResult<()> {
        if self.is_lost() { Err(self.lost()) } else { Ok(()) }
    }

    pub fn modified(&self) -> SystemTime {
        UNIX_EPOCH + Duration::from_nanos(self.slot().size.load(Ordering::Acquire))
    }

    pub fn set_modified(&self, time: SystemTime) {
        let nanoseconds = time.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        self.slot().size.store(u64::try_from(nanoseconds).unwrap_or(u64::MAX), Ordering::Release);
    }

    /// The attributes of the copy instead of those of the object.
    pub fn attributes(&self, attributes: FileAttr) -> FileAttr {
        let (size, mtime) = (self.length(), self.modified());
        FileAttr { size, blocks: size.div_ceil(STAT_BLOCK), mtime, ctime: mtime, ..attributes }
    }

    pub fn set_ready(&self) {
        self.is_ready.store(true, Ordering::Release);
    }

    pub fn is_ready(&self) -> bool {
        self.is_ready.load(Ordering::Acquire)
    }

    pub fn add_handle(&self) {
        self.handles.fetch_add(1, Ordering::AcqRel);
    }

    /// Answers whether it was the last one.
    pub fn remove_handle(&self) -> bool {
        self.handles.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Whether the caller's handle is the only one.
    pub fn is_last_handle(&self) -> bool {
        self.handles.load(Ordering::Acquire) == 1
    }

    pub fn has_handles(&self) -> bool {
        self.handles.load(Ordering::Acquire) > 0
    }

    /// While it is held, the copy is not changed and not stored.
    pub fn lock(&self) -> MutexGuard<'_, ()> {
        self.turn.lock()
    }

    pub fn object(&self) -> Object {
        self.object.read().clone()
    }

    /// The superblock knows nothing of the copy any longer.
    pub fn disconnect(&self) {
        self.object.write().inode = None;
    }

    pub fn set_object(&self, object: Object) {
        *self.object.write() = object;
    }

    /// Reads what there is: less if another thread shortens the file meanwhile.
    pub fn read(&self, offset: u64, size: usize, fetch: RangeFetch<'_>) -> FsResult<Vec<u8>> {
        self.must_be_whole()?;
        let available = self.length().saturating_sub(offset);
        let mut bytes = vec![0; usize::try_from(available).map_or(size, |it| it.min(size))];
        let length = self.read_into(offset, &mut bytes, fetch)?;
        bytes.truncate(length);
        Ok(bytes)
    }

    fn read_into(&self, offset: u64, bytes: &mut [u8], fetch: RangeFetch<'_>) -> FsResult<usize> {
        match &*self.bytes.read() {
            Bytes::Spool => self
                .state
                .spool()
                .read(self.number, offset, bytes)
                .map(|()| bytes.len())
                .map_err(|error| FsError::new(libc::EIO, format!("cannot read the spool: {error}"))),
            Bytes::Blocks(blocks) => blocks.read(offset, bytes, fetch).map_err(|error| match error {
                BlockError::Damaged => self.failed_to_change(&error),
                _ => self.failed(&error),
            }),
            Bytes::Freed => Err(self.lost()),
        }
    }

    /// With the lock held, so that nothing shortens the file.
    fn read_exact(&self, offset: u64, bytes: &mut [u8], fetch: RangeFetch<'_>) -> FsResult<()> {
        let length = self.read_into(offset, bytes, fetch)?;
        if length < bytes.len() { Err(self.failed_to_change(&BlockError::Damaged)) } else { Ok(()) }
    }

    /// Writes with the lock held. An append that is sent again is written where it was written before.
    pub fn write(&self, write: &StagedWrite<'_>, fetch: RangeFetch<'_>) -> FsResult<()> {
        self.must_be_whole()?;
        let slot = self.slot();
        let offset = match write.is_append {
            false => write.offset,
            true if write.delivery == Delivery::Resent && slot.stamp.load(Ordering::Acquire) == write.unique => {
                slot.owner_of_locks.load(Ordering::Acquire)
            }
            true => self.length(),
        };
        if write.is_append {
            slot.owner_of_locks.store(offset, Ordering::Release);
            slot.stamp.store(write.unique, Ordering::Release);
        }
        slot.set(DIRTY);
        self.write_bytes(offset, write.data, fetch)?;
        slot.count.fetch_max(offset + write.data.len() as u64, Ordering::AcqRel);
        self.set_modified(SystemTime::now());
        Ok(())
    }

    fn write_bytes(&self, offset: u64, data: &[u8], fetch: RangeFetch<'_>) -> FsResult<()> {
        let end = offset.checked_add(data.len() as u64).ok_or_else(too_large)?;
        if matches!(&*self.bytes.read(), Bytes::Spool) {
            if self.state.spool().write_at(self.number, self.length(), offset, data) {
                return Ok(());
            }
            self.move_to_directory(end)?;
        }
        match &*self.bytes.read() {
            Bytes::Blocks(blocks) => blocks.write(offset, data, fetch).map_err(|error| self.failed_to_change(&error)),
            Bytes::Spool | Bytes::Freed => Err(too_large()),
        }
    }

    /// truncate(2).
    pub fn truncate(&self, length: u64) -> FsResult<()> {
        let _turn = self.lock();
        self.set_length(length)
    }

    /// Changes the length with the lock held.
    pub fn set_length(&self, length: u64) -> FsResult<()> {
        self.must_be_whole()?;
        let slot = self.slot();
        let before = self.length();
        slot.set(DIRTY);
        // A successor cuts off what is behind the length, and takes a file that is shorter for a damaged one.
        slot.count.store(length.min(before), Ordering::Release);
        let changed = self.set_length_of_bytes(before, length);
        slot.count.store(if changed.is_ok() { length } else { before }, Ordering::Release);
        self.set_modified(SystemTime::now());
        changed
    }

    fn set_length_of_bytes(&self, before: u64, length: u64) -> FsResult<()> {
        if matches!(&*self.bytes.read(), Bytes::Spool) {
            if self.state.spool().set_length(self.number, before, length) {
                return Ok(());
            }
            self.move_to_directory(length)?;
        }
        match &*self.bytes.read() {
            Bytes::Blocks(blocks) => blocks.set_length(length).map_err(|error| self.failed_to_change(&error)),
            Bytes::Spool | Bytes::Freed => Err(too_large()),
        }
    }

    /// The spool has no room for a file of `needed` bytes.
    fn move_to_directory(&self, needed: u64) -> FsResult<()> {
        if !self.directory.is_available() {
            self.slot().set(POISONED);
            return Err(no_directory(needed));
        }
        let mut content = vec![0; usize::try_from(self.length()).map_err(|_| too_large())?];
        self.read_exact(0, &mut content, &|_| None)?;
        let moved = BlockFile::create(self.id, &self.directory, 0).and_then(|blocks| {
            blocks.write(0, &content, &|_| None)?;
            Ok(blocks)
        });
        let blocks = moved.map_err(|error| self.failed_to_change(&error))?;
        // A successor reads either place: both are complete until the flag changes, and the spool is freed after that.
        *self.on_disk.lock() = Some(OnDisk::count(&self.state));
        self.slot().set(IN_DIRECTORY);
        *self.bytes.write() = Bytes::Blocks(blocks);
        self.state.spool().clear(self.number, content.len() as u64);
        Ok(())
    }

    /// How the object is put together. The lock is held.
    pub fn pieces(&self) -> Vec<Piece> {
        let length = self.length();
        match &*self.bytes.read() {
            Bytes::Freed => Vec::new(),
            Bytes::Spool if length == 0 => Vec::new(),
            Bytes::Spool => vec![Piece::Upload(0..length)],
            Bytes::Blocks(blocks) => blocks.pieces(length),
        }
    }

    /// Reads one piece of it to store it.
    pub fn piece(&self, range: &Range<u64>, fetch: RangeFetch<'_>) -> FsResult<Vec<u8>> {
        self.must_be_whole()?;
        let length = usize::try_from(range.end - range.start).map_err(|_| too_large())?;
        let mut bytes = vec![0; length];
        self.read_exact(range.start, &mut bytes, fetch)?;
        Ok(bytes)
    }

    /// All of it is in the bucket now. The lock is held.
    pub fn mark_stored(&self) -> FsResult<()> {
        if let Bytes::Blocks(blocks) = &*self.bytes.read() {
            blocks
                .stored(self.length())
                .map_err(|error| FsError::new(libc::EIO, format!("cannot write the block map: {error}")))?;
        }
        self.slot().clear(DIRTY);
        Ok(())
    }

    /// Frees the bytes. The slot is dropped by the caller; a successor of an engine that dies in between drops it, too, and does not
    /// take the file for an empty one.
    pub fn free(&self) {
        self.slot().set(INCOMPLETE);
        let mut bytes = self.bytes.write();
        match std::mem::replace(&mut *bytes, Bytes::Freed) {
            Bytes::Spool => self.state.spool().clear(self.number, self.length()),
            // Dropping it removes the file.
            Bytes::Blocks(_) | Bytes::Freed => {}
        }
        *self.on_disk.lock() = None;
        self.slot().count.store(0, Ordering::Release);
    }

    pub fn slot(&self) -> &Slot {
        self.state.slot(self.number).expect("the number of a staged file is inside the table")
    }

    /// The program learns now that something is missing in the copy, which is not stored therefore: not even if the program
    /// ignores it, as many do that only look at the result of close.
    fn failed_to_change(&self, error: &BlockError) -> FsError {
        // Nothing was changed if the object could not be fetched, or the file would be larger than a file can be.
        if !matches!(error, BlockError::Fetch) && !is_too_large(error) {
            self.slot().set(POISONED);
        }
        self.failed(error)
    }

    fn failed(&self, error: &BlockError) -> FsError {
        match error {
            BlockError::NoSpace => FsError::new(
                libc::ENOSPC,
                "the staging directory is full; raise --max-stage-size, or close files that are being edited".into(),
            ),
            BlockError::Io { cause } if cause.raw_os_error() == Some(libc::ENOSPC) => {
                FsError::new(libc::ENOSPC, "the file system of the staging directory (--stage) is full".into())
            }
            BlockError::Io { .. } if is_too_large(error) => too_large(),
            BlockError::Io { cause } if !self.directory.is_available() => {
                FsError::new(libc::ENOSPC, format!("{} ({cause})", no_directory(0)))
            }
            BlockError::Io { cause } => {
                let path = self.directory.path(self.id).unwrap_or_default();
                FsError::new(libc::EIO, format!("cannot use the staging file {}: {cause}", path.display()))
            }
            BlockError::Damaged => self.lost(),
            BlockError::Fetch => FsError::new(libc::EIO, error.to_string()),
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the lower half of an id is the number of its slot")]
fn number(id: u64) -> u32 {
    id as u32
}

fn is_too_large(error: &BlockError) -> bool {
    matches!(error, BlockError::Io { cause } if cause.raw_os_error() == Some(libc::EFBIG))
}

fn too_large() -> FsError {
    FsError::new(libc::EFBIG, "the file is too large".into())
}

fn no_directory(needed: u64) -> FsError {
    FsError::new(
        libc::ENOSPC,
        format!(
            "editing a file of {needed} bytes in place needs a staging directory (--stage DIR): in memory there is room for files \
             of {LONGEST_SPOOLED} bytes each"
        ),
    )
}
