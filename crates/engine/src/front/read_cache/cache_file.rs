//! One version of one object in a local file, as far as it was read: a header, a bitmap of the pages that are there, and the
//! object's bytes at their offset. What is not there is a hole.
//!
//! The bitmap is written after the pages, and cleared before they are removed, so that the file is right whenever its engine is
//! killed. A crash of the machine may write them in another order, so files of another boot are not used.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;

use parking_lot::{RwLock, RwLockUpgradableReadGuard};
use rustix::fs::{FallocateFlags, fallocate};

use super::ObjectVersion;

/// What is fetched and removed at once.
pub const BLOCK: u64 = 1 << 20;
/// What the kernel asks for.
const PAGE: u64 = 4096;
const PAGES: u64 = BLOCK / PAGE;
/// Bytes of the bitmap for one block.
const BITMAP_BYTES: usize = 32;
const HEADER_BYTES: usize = 4096;
const FORMAT: &str = "s3csi read cache 1";

/// The pages of one block, as they are in the bitmap.
type PageSet = [u8; BITMAP_BYTES];
const NO_PAGES: PageSet = [0; BITMAP_BYTES];

/// Blocks whose part of the bitmap is read at once.
const BLOCKS_AT_ONCE: usize = 1024;

#[derive(Debug)]
pub struct CacheFile {
    file: File,
    /// Of the object.
    size: u64,
    pages: RwLock<Pages>,
}

#[derive(Debug, Default)]
struct Pages {
    blocks: BTreeMap<u64, PageSet>,
    /// The block to remove next.
    hand: u64,
    /// Another program changed the file.
    is_broken: bool,
}

impl CacheFile {
    /// Makes an empty one of any file.
    pub fn create(file: File, version: &ObjectVersion) -> io::Result<Self> {
        let header = header(version)?;
        let cache = Self { file, size: version.size, pages: RwLock::default() };
        cache.file.set_len(0)?;
        cache.file.set_len(cache.length())?;
        cache.file.write_all_at(&header, 0)?;
        Ok(cache)
    }

    /// What a previous engine left. An error if it is something else.
    pub fn reopen(file: File, version: &ObjectVersion) -> io::Result<Self> {
        let cache = Self { file, size: version.size, pages: RwLock::default() };
        let mut found = [0; HEADER_BYTES];
        cache.file.read_exact_at(&mut found, 0)?;
        if found[..] != header(version)? || cache.file.metadata()?.len() != cache.length() {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut blocks = BTreeMap::new();
        let mut bitmap = vec![0; BLOCKS_AT_ONCE * BITMAP_BYTES];
        for first in (0..blocks_of(version.size)).step_by(BLOCKS_AT_ONCE) {
            let count = usize::try_from(blocks_of(version.size) - first).unwrap_or(BLOCKS_AT_ONCE).min(BLOCKS_AT_ONCE);
            let part = &mut bitmap[..count * BITMAP_BYTES];
            cache.file.read_exact_at(part, bitmap_offset(first))?;
            let sets = (first..).zip(part.as_chunks().0).filter(|(_, set)| **set != NO_PAGES);
            blocks.extend(sets.map(|(block, set)| (block, *set)));
        }
        cache.pages.write().blocks = blocks;
        Ok(cache)
    }

    /// How much of the object is there.
    pub fn bytes(&self) -> u64 {
        let pages = self.pages.read();
        pages.blocks.values().map(|it| count(it) * PAGE).sum()
    }

    /// A part of the object, if all of it is there.
    pub fn read(&self, range: &Range<u64>) -> Option<Vec<u8>> {
        let length = usize::try_from(range.end.checked_sub(range.start)?).ok()?;
        let mut bytes = Vec::with_capacity(length);
        // Held until the bytes are read: nothing is removed meanwhile.
        let pages = self.pages.read();
        if pages.is_broken || !pages.contains(range) {
            return None;
        }
        let start = self.data_offset() + range.start;
        while bytes.len() < length {
            let at = start + bytes.len() as u64;
            let count = rustix::io::pread(&self.file, rustix::buffer::spare_capacity(&mut bytes), at).ok()?;
            if count == 0 {
                // Another program shortened the file.
                drop(pages);
                self.pages.write().is_broken = true;
                return None;
            }
        }
        bytes.truncate(length);
        Some(bytes)
    }

    /// From the first to the last block of a part that is not there as a whole.
    pub fn missing(&self, part: &Range<u64>) -> Range<u64> {
        let pages = self.pages.read();
        let blocks =
            (part.start / BLOCK..part.end.div_ceil(BLOCK)).map(|it| it * BLOCK..part.end.min((it + 1) * BLOCK));
        let mut missing = blocks.filter(|it| !pages.contains(it));
        let Some(first) = missing.next() else { return part.end..part.end };
        first.start..missing.next_back().unwrap_or(first).end
    }

    /// Keeps a part of the object, as far as it consists of whole pages. Answers how many bytes are there that were not.
    pub fn write(&self, start: u64, data: &[u8]) -> io::Result<u64> {
        let end = start.saturating_add(data.len() as u64).min(self.size);
        let first = start.next_multiple_of(PAGE);
        let last = if end == self.size { end } else { end / PAGE * PAGE };
        if last <= first {
            return Ok(0);
        }
        let slice = |at: u64| usize::try_from(at - start).unwrap_or(data.len());
        // One writer at a time, beside readers: nothing is removed between the pages and their bits.
        let pages = self.pages.upgradable_read();
        if pages.is_broken {
            return Ok(0);
        }
        if self.file.metadata()?.len() != self.length() {
            RwLockUpgradableReadGuard::upgrade(pages).is_broken = true;
            return Err(io::Error::other("another program changed the length of a cache file"));
        }
        self.file.write_all_at(&data[slice(first)..slice(last)], self.data_offset() + first)?;
        let mut pages = RwLockUpgradableReadGuard::upgrade(pages);
        let mut added = 0;
        for block in first / BLOCK..last.div_ceil(BLOCK) {
            let from = first.max(block * BLOCK) / PAGE % PAGES;
            let to = (last.min((block + 1) * BLOCK) - block * BLOCK).div_ceil(PAGE);
            let mut set = pages.blocks.get(&block).copied().unwrap_or(NO_PAGES);
            let before = count(&set);
            for (byte, bit) in (from..to).map(place) {
                set[byte] |= bit;
            }
            self.file.write_all_at(&set, bitmap_offset(block))?;
            added += count(&set) - before;
            pages.blocks.insert(block, set);
        }
        Ok(added * PAGE)
    }

    /// Removes one block. Answers how many bytes it had; 0 if there is none, or if the file system cannot do that.
    pub fn remove_block(&self) -> u64 {
        let mut pages = self.pages.write();
        let next = pages.blocks.range(pages.hand..).next().or_else(|| pages.blocks.first_key_value());
        let Some((block, set)) = next.map(|(block, set)| (*block, *set)) else { return 0 };
        let removed = || -> io::Result<()> {
            self.file.write_all_at(&NO_PAGES, bitmap_offset(block))?;
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            Ok(fallocate(&self.file, flags, self.data_offset() + block * BLOCK, BLOCK)?)
        };
        pages.hand = block + 1;
        pages.blocks.remove(&block);
        if removed().is_err() { 0 } else { count(&set) * PAGE }
    }

    /// Removes everything.
    pub fn clear(&self) {
        let mut pages = self.pages.write();
        pages.blocks.clear();
        // The bitmap is behind the header.
        let cleared = self.file.set_len(HEADER_BYTES as u64).and_then(|()| self.file.set_len(self.length()));
        pages.is_broken |= cleared.is_err();
    }

    fn data_offset(&self) -> u64 {
        bitmap_offset(blocks_of(self.size)).next_multiple_of(PAGE)
    }

    fn length(&self) -> u64 {
        self.data_offset() + self.size
    }
}

impl Pages {
    fn contains(&self, range: &Range<u64>) -> bool {
        (range.start / BLOCK..range.end.div_ceil(BLOCK)).all(|block| {
            let start = block * BLOCK;
            let first = range.start.saturating_sub(start) / PAGE;
            let last = (range.end - start).div_ceil(PAGE).min(PAGES);
            let has_all = |set: &PageSet| (first..last).map(place).all(|(byte, bit)| set[byte] & bit != 0);
            self.blocks.get(&block).is_some_and(has_all)
        })
    }
}

/// Where the bit of a page is in its block's part of the bitmap.
fn place(page: u64) -> (usize, u8) {
    (usize::try_from(page / 8).unwrap_or_default(), 1 << (page % 8))
}

fn blocks_of(size: u64) -> u64 {
    size.div_ceil(BLOCK)
}

fn bitmap_offset(block: u64) -> u64 {
    HEADER_BYTES as u64 + block * BITMAP_BYTES as u64
}

fn count(set: &PageSet) -> u64 {
    set.iter().map(|it| u64::from(it.count_ones())).sum()
}

/// Says what the file is of. Names of files are hashes, which two objects might have in common.
fn header(version: &ObjectVersion) -> io::Result<Vec<u8>> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let ObjectVersion { key, etag, size } = version;
    let mut header = format!("{FORMAT}\n{}\n{size}\n{etag}\n{key}\n", boot.trim()).into_bytes();
    if HEADER_BYTES < header.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    header.resize(HEADER_BYTES, 0);
    Ok(header)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn version(size: u64) -> ObjectVersion {
        ObjectVersion { key: "a/b".into(), etag: "\"e\"".into(), size }
    }

    fn empty(size: u64) -> CacheFile {
        CacheFile::create(tempfile::tempfile().unwrap(), &version(size)).unwrap()
    }

    /// The object's byte at each offset.
    fn content(range: Range<u64>) -> Vec<u8> {
        range.map(|it| u8::try_from((it ^ (it >> 8) ^ (it >> 16)) % 251).unwrap()).collect()
    }

    #[test]
    fn whole_pages_are_kept_and_the_last_one_is_whole_at_the_end_of_the_object() {
        let cache = empty(2 * BLOCK + 100);
        assert_eq!(cache.write(100, &content(100..10_000)).unwrap(), PAGE);
        assert_eq!(cache.read(&(PAGE..2 * PAGE)), Some(content(PAGE..2 * PAGE)));
        assert_eq!(cache.read(&(PAGE + 5..PAGE + 9)), Some(content(PAGE + 5..PAGE + 9)));
        assert_eq!(cache.read(&(PAGE..2 * PAGE + 1)), None);
        assert_eq!(cache.read(&(0..1)), None);
        let end = 2 * BLOCK - PAGE..2 * BLOCK + 100;
        assert_eq!(cache.write(end.start, &content(end.clone())).unwrap(), 2 * PAGE);
        assert_eq!(cache.read(&end), Some(content(end.clone())));
        assert_eq!(cache.write(end.start, &content(end)).unwrap(), 0);
        assert_eq!(cache.bytes(), 3 * PAGE);
        assert_eq!(cache.write(5, b"x").unwrap(), 0);
    }

    #[test]
    fn removed_blocks_are_not_read_and_can_be_written_again() {
        let cache = empty(3 * BLOCK);
        let all = 0..3 * BLOCK;
        cache.write(BLOCK, &content(BLOCK..2 * BLOCK)).unwrap();
        assert_eq!((cache.missing(&all), cache.missing(&(BLOCK..2 * BLOCK)).is_empty()), (all.clone(), true));
        cache.write(2 * BLOCK, &content(2 * BLOCK..3 * BLOCK)).unwrap();
        assert_eq!(cache.missing(&all), 0..BLOCK);
        cache.write(0, &content(all.clone())).unwrap();
        assert!(cache.missing(&all).is_empty());
        assert_eq!(cache.remove_block(), BLOCK);
        assert_eq!(cache.read(&(0..PAGE)), None);
        assert_eq!(cache.read(&(BLOCK..3 * BLOCK)), Some(content(BLOCK..3 * BLOCK)));
        assert_eq!(cache.remove_block(), BLOCK);
        assert_eq!(cache.read(&(BLOCK..BLOCK + 1)), None);
        cache.write(0, &content(0..PAGE)).unwrap();
        assert_eq!(cache.read(&(0..PAGE)), Some(content(0..PAGE)));
        cache.clear();
        assert_eq!((cache.bytes(), cache.read(&(0..PAGE)), cache.remove_block()), (0, None, 0));
        cache.write(BLOCK, &content(BLOCK..2 * BLOCK)).unwrap();
        assert_eq!(cache.read(&(BLOCK..2 * BLOCK)), Some(content(BLOCK..2 * BLOCK)));
    }

    #[test]
    fn the_next_engine_finds_what_was_kept_and_nothing_of_another_version() {
        let file = tempfile::tempfile().unwrap();
        let first = CacheFile::create(file.try_clone().unwrap(), &version(5 * BLOCK)).unwrap();
        first.write(BLOCK, &content(BLOCK..2 * BLOCK)).unwrap();
        first.write(4 * BLOCK, &content(4 * BLOCK..5 * BLOCK)).unwrap();
        first.remove_block();
        let next = CacheFile::reopen(file.try_clone().unwrap(), &version(5 * BLOCK)).unwrap();
        assert_eq!(next.read(&(4 * BLOCK..5 * BLOCK)), Some(content(4 * BLOCK..5 * BLOCK)));
        assert_eq!((next.read(&(BLOCK..BLOCK + 1)), next.bytes()), (None, BLOCK));
        let other = ObjectVersion { etag: "\"f\"".into(), ..version(5 * BLOCK) };
        assert!(CacheFile::reopen(file.try_clone().unwrap(), &other).is_err());
        assert!(CacheFile::reopen(file, &version(5 * BLOCK - 1)).is_err());
        assert!(CacheFile::reopen(tempfile::tempfile().unwrap(), &version(1)).is_err());
    }

    #[test]
    fn a_file_that_another_program_shortened_is_not_used() {
        for extends_again in [false, true] {
            let cache = empty(2 * BLOCK);
            cache.write(0, &content(0..2 * BLOCK)).unwrap();
            cache.file.set_len(cache.data_offset() + BLOCK).unwrap();
            if extends_again {
                assert!(cache.write(0, &content(0..PAGE)).is_err());
            } else {
                assert_eq!(cache.read(&(BLOCK..2 * BLOCK)), None);
            }
            assert_eq!(cache.read(&(0..PAGE)), None);
            assert_eq!(cache.write(0, &content(0..PAGE)).unwrap(), 0);
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Write(Range<u64>),
        Read(Range<u64>),
        Remove,
        Clear,
        Reopen,
    }

    fn step(size: u64) -> impl Strategy<Value = Step> {
        let range = (0..size, 1..2 * BLOCK).prop_map(move |(start, length)| start..(start + length).min(size));
        prop_oneof![
            4 => range.clone().prop_map(Step::Write),
            8 => range.prop_map(Step::Read),
            1 => Just(Step::Remove),
            1 => Just(Step::Clear),
            1 => Just(Step::Reopen),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn what_is_read_is_what_the_object_has(steps in prop::collection::vec(step(3 * BLOCK + 777), 1..30)) {
            let size = 3 * BLOCK + 777;
            let mut cache = empty(size);
            let mut present: u64 = 0;
            for step in steps {
                match step {
                    Step::Write(range) => present += cache.write(range.start, &content(range.clone())).unwrap(),
                    Step::Read(range) => if let Some(bytes) = cache.read(&range) {
                        prop_assert!(bytes == content(range));
                    },
                    Step::Remove => present -= cache.remove_block(),
                    Step::Clear => {
                        cache.clear();
                        present = 0;
                    }
                    Step::Reopen => cache = CacheFile::reopen(cache.file, &version(size)).unwrap(),
                }
                prop_assert_eq!(cache.bytes(), present);
            }
        }
    }
}
