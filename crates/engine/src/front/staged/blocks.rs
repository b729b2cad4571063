//! A staged file on disk, fetched from the bucket block by block when it is needed.
//!
//! A block is absent (its bytes are those of the object that the file replaces), present, or dirty (changed here). The states
//! are in a file of their own, so that a successor knows them: a block is marked dirty before it is changed, and present after
//! it was fetched.
//!
//! Other programs can reach these files. A file that is shorter than it should be would be made long again by the next write,
//! with zeros in it, so its length is compared before each use.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::directory::StageDirectory;

/// As large as a part of an upload: clean blocks are copied by the server, dirty ones are uploaded.
pub const BLOCK: u64 = 8 << 20;
const DATA: &str = "";
const MAP: &str = ".blocks";
/// The map starts with the length of the object that absent blocks are fetched from.
const MAP_HEADER: u64 = 8;

const ABSENT: u8 = 0;
const PRESENT: u8 = 1;
const DIRTY: u8 = 2;

#[derive(Debug, thiserror::Error)]
pub enum BlockError {
    #[error("the staging directory is full")]
    NoSpace,

    #[error("cannot use a staging file")]
    Io {
        #[source]
        cause: io::Error,
    },

    #[error("a staging file is shorter than what was written to it: another program changed it")]
    Damaged,

    #[error("cannot fetch the part of the object that is edited")]
    Fetch,
}

/// Reads a range of the object that the file replaces.
pub type RangeFetch<'a> = &'a dyn Fn(Range<u64>) -> Option<Vec<u8>>;

/// A part of the file as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// These bytes of the old object are unchanged.
    Copy(Range<u64>),
    Upload(Range<u64>),
}

#[derive(Debug)]
pub struct BlockFile {
    id: u64,
    directory: Arc<StageDirectory>,
    data: File,
    map: File,
    blocks: Mutex<Blocks>,
    /// Another program removed it, which was logged.
    is_removed: AtomicBool,
}

#[derive(Debug, Default)]
struct Blocks {
    states: Vec<u8>,
    /// Bytes of the old object that are still part of the file.
    base_length: u64,
    /// The data has at least as many bytes, unless another program changed it.
    length: u64,
}

impl BlockFile {
    /// A file with the content of an object of `length` bytes, nothing of it fetched.
    pub fn create(id: u64, directory: &Arc<StageDirectory>, length: u64) -> Result<Self, BlockError> {
        let io = |cause| BlockError::Io { cause };
        let data = directory.create(id, DATA).map_err(io)?;
        let map = directory.create(id, MAP).map_err(io)?;
        data.set_len(length).map_err(io)?;
        let blocks = Blocks { states: vec![ABSENT; count(length)], base_length: length, length };
        let file = Self::new(id, directory, data, map, Blocks::default());
        file.write_map(&blocks).map_err(io)?;
        *file.blocks.lock() = blocks;
        Ok(file)
    }

    /// The file of a previous engine, which has acknowledged `length` bytes.
    pub fn reopen(id: u64, directory: &Arc<StageDirectory>, length: u64) -> Result<Self, BlockError> {
        let io = |cause| BlockError::Io { cause };
        let data = directory.reopen(id, DATA).map_err(io)?;
        let map = directory.reopen(id, MAP).map_err(io)?;
        let mut header = 0_u64.to_le_bytes();
        map.read_exact_at(&mut header, 0).map_err(io)?;
        let known = usize::try_from(map.metadata().map_err(io)?.len().saturating_sub(MAP_HEADER)).unwrap_or(0);
        let mut states = vec![ABSENT; known];
        map.read_exact_at(&mut states, MAP_HEADER).map_err(io)?;
        let is_whole = length <= data.metadata().map_err(io)?.len() && count(length) <= known;
        if !is_whole || states.iter().any(|it| DIRTY < *it) {
            return Err(BlockError::Damaged);
        }
        directory.count(states.iter().filter(|it| **it != ABSENT).count() as u64 * BLOCK);
        let file =
            Self::new(id, directory, data, map, Blocks { states, base_length: u64::from_le_bytes(header), length });
        // What was written or cut off when the engine died was not acknowledged.
        file.set_length(length)?;
        Ok(file)
    }

    fn new(id: u64, directory: &Arc<StageDirectory>, data: File, map: File, blocks: Blocks) -> Self {
        let (directory, blocks) = (Arc::clone(directory), Mutex::new(blocks));
        Self { id, directory, data, map, blocks, is_removed: AtomicBool::new(false) }
    }

    /// Reads as much as there is, and answers how much that is.
    pub fn read(&self, offset: u64, bytes: &mut [u8], fetch: RangeFetch<'_>) -> Result<usize, BlockError> {
        let range = offset..offset + bytes.len() as u64;
        self.check()?;
        for number in numbers(&range) {
            self.ensure_present(number, fetch)?;
        }
        let mut length = 0;
        while length < bytes.len() {
            match self.data.read_at(&mut bytes[length..], offset + length as u64) {
                Ok(0) => break,
                Ok(read) => length += read,
                Err(cause) if cause.kind() == io::ErrorKind::Interrupted => {}
                Err(cause) => return Err(BlockError::Io { cause }),
            }
        }
        if length < bytes.len() {
            // Either this file was shortened meanwhile, or another program did it.
            self.check()?;
        }
        Ok(length)
    }

    /// Writes, and makes the file longer if necessary.
    pub fn write(&self, offset: u64, bytes: &[u8], fetch: RangeFetch<'_>) -> Result<(), BlockError> {
        let io = |cause| BlockError::Io { cause };
        let range = offset..offset + bytes.len() as u64;
        self.check()?;
        for number in numbers(&range) {
            let block = number as u64 * BLOCK..(number as u64 + 1) * BLOCK;
            let is_replaced = range.start <= block.start && block.end <= range.end;
            if !is_replaced {
                self.ensure_present(number, fetch)?;
            }
            self.mark(number, DIRTY)?;
        }
        self.data.write_all_at(bytes, offset).map_err(io)?;
        let mut blocks = self.blocks.lock();
        blocks.length = blocks.length.max(range.end);
        Ok(())
    }

    /// What is cut off reads as zeros if the file grows again.
    pub fn set_length(&self, length: u64) -> Result<(), BlockError> {
        let io = |cause| BlockError::Io { cause };
        self.check()?;
        let mut blocks = self.blocks.lock();
        let states = count(length);
        let kept = states.min(blocks.states.len());
        let dropped = blocks.states.drain(kept..).filter(|it| *it != ABSENT).count();
        blocks.base_length = blocks.base_length.min(length);
        // Behind the old object there is nothing to fetch, so an absent block there reads as zeros.
        blocks.states.resize(states, ABSENT);
        self.write_map(&blocks).map_err(io)?;
        self.directory.release(dropped as u64 * BLOCK);
        self.data.set_len(length).map_err(io)?;
        blocks.length = length;
        Ok(())
    }

    /// How a file of `length` bytes is made of the old object and of what was changed.
    pub fn pieces(&self, length: u64) -> Vec<Piece> {
        let blocks = self.blocks.lock();
        let mut pieces: Vec<Piece> = Vec::new();
        for number in 0..count(length) {
            let start = number as u64 * BLOCK;
            let range = start..(start + BLOCK).min(length);
            let is_clean = blocks.states.get(number).is_none_or(|it| *it != DIRTY) && range.end <= blocks.base_length;
            match (is_clean, pieces.last_mut()) {
                (true, Some(Piece::Copy(last))) => last.end = range.end,
                (true, _) => pieces.push(Piece::Copy(range)),
                (false, _) => pieces.push(Piece::Upload(range)),
            }
        }
        pieces
    }

    /// The whole file of `length` bytes was stored as one object.
    pub fn stored(&self, length: u64) -> io::Result<()> {
        let mut blocks = self.blocks.lock();
        blocks.base_length = length;
        for state in &mut blocks.states {
            *state = if *state == DIRTY { PRESENT } else { *state };
        }
        self.write_map(&blocks)
    }

    fn check(&self) -> Result<(), BlockError> {
        let blocks = self.blocks.lock();
        let found = self.data.metadata().map_err(|cause| BlockError::Io { cause })?;
        if found.len() < blocks.length {
            return Err(BlockError::Damaged);
        }
        let is_removed = found.nlink() == 0 && self.directory.has_names();
        if is_removed && !self.is_removed.swap(true, Ordering::Relaxed) {
            let file = self.directory.path(self.id);
            tracing::error!(
                ?file,
                "another program removed a staging file; this engine still stores it, but a successor could not"
            );
        }
        Ok(())
    }

    fn ensure_present(&self, number: usize, fetch: RangeFetch<'_>) -> Result<(), BlockError> {
        // Held over the request: a block is fetched once, and never over what was written meanwhile.
        let mut blocks = self.blocks.lock();
        if blocks.states.get(number).is_some_and(|it| *it != ABSENT) {
            return Ok(());
        }
        let start = number as u64 * BLOCK;
        let end = (start + BLOCK).min(blocks.base_length);
        if end <= start {
            return Ok(());
        }
        if !self.directory.reserve(BLOCK) {
            return Err(BlockError::NoSpace);
        }
        let fetched = fetch(start..end).filter(|it| it.len() as u64 == end - start);
        let written = match &fetched {
            Some(bytes) => self.data.write_all_at(bytes, start).map_err(|cause| BlockError::Io { cause }),
            None => Err(BlockError::Fetch),
        };
        written
            .and_then(|()| self.set_state(&mut blocks, number, PRESENT))
            .inspect_err(|_| self.directory.release(BLOCK))
    }

    fn mark(&self, number: usize, state: u8) -> Result<(), BlockError> {
        let mut blocks = self.blocks.lock();
        let before = blocks.states.get(number).copied().unwrap_or(ABSENT);
        if before == state {
            return Ok(());
        }
        if before == ABSENT && !self.directory.reserve(BLOCK) {
            return Err(BlockError::NoSpace);
        }
        self.set_state(&mut blocks, number, state).inspect_err(|_| {
            if before == ABSENT {
                self.directory.release(BLOCK);
            }
        })
    }

    fn set_state(&self, blocks: &mut Blocks, number: usize, state: u8) -> Result<(), BlockError> {
        let io = |cause| BlockError::Io { cause };
        if blocks.states.len() <= number {
            blocks.states.resize(number + 1, ABSENT);
            self.write_map(blocks).map_err(io)?;
        }
        self.map.write_all_at(&[state], MAP_HEADER + number as u64).map_err(io)?;
        blocks.states[number] = state;
        Ok(())
    }

    fn write_map(&self, blocks: &Blocks) -> io::Result<()> {
        self.map.write_all_at(&blocks.base_length.to_le_bytes(), 0)?;
        self.map.write_all_at(&blocks.states, MAP_HEADER)?;
        self.map.set_len(MAP_HEADER + blocks.states.len() as u64)
    }
}

impl Drop for BlockFile {
    fn drop(&mut self) {
        let present = self.blocks.get_mut().states.iter().filter(|it| **it != ABSENT).count();
        self.directory.release(present as u64 * BLOCK);
        self.directory.remove(self.id, DATA);
        self.directory.remove(self.id, MAP);
    }
}

fn count(length: u64) -> usize {
    usize::try_from(length.div_ceil(BLOCK)).unwrap_or(usize::MAX)
}

/// The blocks that a range touches.
fn numbers(range: &Range<u64>) -> Range<usize> {
    if range.is_empty() {
        return 0..0;
    }
    usize::try_from(range.start / BLOCK).unwrap_or(usize::MAX)..count(range.end)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::front::staged::directory::Lifetime;
    use crate::state::State;

    struct World {
        _parent: tempfile::TempDir,
        directory: Arc<StageDirectory>,
        object: Vec<u8>,
        fetches: AtomicUsize,
    }

    impl World {
        fn new(length: u64) -> Self {
            let parent = tempfile::tempdir().unwrap();
            let state = State::private().unwrap();
            let directory = StageDirectory::open(parent.path(), true, 64 * BLOCK, &state, Lifetime::Mount).unwrap();
            let object = (0..length).map(|it| u8::try_from(it % 251).unwrap()).collect();
            Self { _parent: parent, directory: Arc::new(directory), object, fetches: AtomicUsize::new(0) }
        }

        fn fetch(&self, range: &Range<u64>) -> Option<Vec<u8>> {
            self.fetches.fetch_add(1, Ordering::Relaxed);
            let bounds = usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap();
            self.object.get(bounds).map(<[u8]>::to_vec)
        }

        fn file(&self) -> BlockFile {
            BlockFile::create(1, &self.directory, self.object.len() as u64).unwrap()
        }
    }

    fn read(world: &World, file: &BlockFile, offset: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        assert_eq!(file.read(offset, &mut bytes, &|range| world.fetch(&range)).unwrap(), length);
        bytes
    }

    #[test]
    fn only_the_blocks_that_are_used_are_fetched_and_only_once() {
        let world = World::new(3 * BLOCK + 100);
        let file = world.file();
        let object = |range: Range<usize>| world.object[range].to_vec();
        let start = usize::try_from(BLOCK).unwrap();
        assert_eq!(read(&world, &file, BLOCK, 10), object(start..start + 10));
        assert_eq!(read(&world, &file, BLOCK + 5, 10), object(start + 5..start + 15));
        assert_eq!(world.fetches.load(Ordering::Relaxed), 1);
        file.write(0, &vec![7; usize::try_from(BLOCK).unwrap()], &|_| None).unwrap();
        assert_eq!(file.pieces(3 * BLOCK + 100), [Piece::Upload(0..BLOCK), Piece::Copy(BLOCK..3 * BLOCK + 100)]);
    }

    #[test]
    fn an_append_leaves_all_whole_blocks_to_the_server() {
        let world = World::new(2 * BLOCK + 100);
        let file = world.file();
        file.write(2 * BLOCK + 100, b"more", &|range| world.fetch(&range)).unwrap();
        assert_eq!(
            file.pieces(2 * BLOCK + 104),
            [Piece::Copy(0..2 * BLOCK), Piece::Upload(2 * BLOCK..2 * BLOCK + 104)]
        );
        assert_eq!(
            read(&world, &file, 2 * BLOCK + 98, 6),
            [world.object[16_777_314], world.object[16_777_315], b'm', b'o', b'r', b'e']
        );
        file.stored(2 * BLOCK + 104).unwrap();
        assert_eq!(file.pieces(2 * BLOCK + 104), [Piece::Copy(0..2 * BLOCK + 104)]);
    }

    #[test]
    fn what_was_cut_off_never_comes_back() {
        let world = World::new(2 * BLOCK);
        let file = world.file();
        file.set_length(BLOCK + 2).unwrap();
        file.set_length(2 * BLOCK).unwrap();
        let start = usize::try_from(BLOCK).unwrap();
        assert_eq!(read(&world, &file, BLOCK, 4), [world.object[start], world.object[start + 1], 0, 0]);
        assert_eq!(file.pieces(2 * BLOCK), [Piece::Copy(0..BLOCK), Piece::Upload(BLOCK..2 * BLOCK)]);
    }

    #[test]
    fn a_read_beyond_the_end_is_short() {
        let world = World::new(2 * BLOCK);
        let file = world.file();
        file.set_length(BLOCK + 2).unwrap();
        let mut bytes = [7; 5];
        assert_eq!(file.read(BLOCK, &mut bytes, &|range| world.fetch(&range)).unwrap(), 2);
        let start = usize::try_from(BLOCK).unwrap();
        assert_eq!(bytes, [world.object[start], world.object[start + 1], 7, 7, 7]);
    }

    #[test]
    fn a_successor_knows_which_blocks_are_here_and_which_were_changed() {
        let world = World::new(3 * BLOCK);
        let file = world.file();
        file.write(BLOCK + 1, b"changed", &|range| world.fetch(&range)).unwrap();
        let successor = BlockFile::reopen(1, &world.directory, 3 * BLOCK).unwrap();
        std::mem::forget(file);
        assert_eq!(read(&world, &successor, BLOCK + 1, 7), b"changed");
        assert_eq!(world.fetches.load(Ordering::Relaxed), 1);
        assert_eq!(successor.pieces(3 * BLOCK)[1], Piece::Upload(BLOCK..2 * BLOCK));
    }

    #[test]
    fn a_file_that_was_shortened_is_neither_written_nor_read() {
        let world = World::new(2 * BLOCK);
        let file = world.file();
        file.write(0, b"changed", &|range| world.fetch(&range)).unwrap();
        file.data.set_len(5).unwrap();
        let damaged = |result: Result<(), BlockError>| assert!(matches!(result, Err(BlockError::Damaged)));
        damaged(file.write(2 * BLOCK, b"more", &|range| world.fetch(&range)));
        damaged(file.read(0, &mut [0; 7], &|range| world.fetch(&range)).map(drop));
        damaged(file.set_length(3 * BLOCK));
        damaged(BlockFile::reopen(1, &world.directory, 2 * BLOCK).map(std::mem::forget));
        file.data.set_len(2 * BLOCK).unwrap();
        file.map.set_len(MAP_HEADER + 1).unwrap();
        damaged(BlockFile::reopen(1, &world.directory, 2 * BLOCK).map(std::mem::forget));
    }

    #[test]
    fn a_successor_cuts_off_what_was_not_acknowledged() {
        let world = World::new(0);
        let file = world.file();
        file.write(0, b"acknowledged, not", &|range| world.fetch(&range)).unwrap();
        let successor = BlockFile::reopen(1, &world.directory, 12).unwrap();
        std::mem::forget(file);
        successor.set_length(17).unwrap();
        assert_eq!(read(&world, &successor, 0, 17), b"acknowledged\0\0\0\0\0");
    }

    #[test]
    fn a_full_directory_is_an_error_and_nothing_is_lost() {
        let world = World::new(2 * BLOCK);
        let directory = Arc::new(StageDirectory::none());
        assert!(BlockFile::create(1, &directory, 5).is_err());
        let file = world.file();
        assert!(world.directory.reserve(63 * BLOCK));
        file.write(0, b"x", &|range| world.fetch(&range)).unwrap();
        assert!(matches!(file.write(BLOCK, b"x", &|range| world.fetch(&range)), Err(BlockError::NoSpace)));
        assert_eq!(read(&world, &file, 0, 1), b"x");
    }
}
