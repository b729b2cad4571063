//! Answers reads from local files, and random reads by blocks of the object.
//!
//! The crates have one window for each handle, which is thrown away when a reader jumps: each read of 4 KiB costs a request for
//! more than a mebibyte. Here a random reader gets blocks of one mebibyte, which are kept in a file. With `--cache` the file
//! stays, and takes what sequential readers get from the crates as well; without it the file has no name and is gone with the
//! last handle. Blocks that fit into no file are kept in memory, a few of them.
//!
//! Every request has the `ETag` of the handle as a condition, and files are named after it, so that no handle sees two versions.

mod cache_file;
mod cached_object;
mod fill;
mod kept_files;
mod permits;
mod read_pattern;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use bytes::Bytes;
use md5::{Digest as _, Md5};
use mountpoint_s3_client::ObjectClient;
use parking_lot::Mutex;

use super::FsResult;
use super::bucket::Bucket;
use super::metablock::OpenedObject;

use cache_file::BLOCK;
use cached_object::{CachedObject, CachedObjects, FailedFetch, ObjectReader};
use permits::{Permit, Permits};
use read_pattern::{ReadKind, ReadPattern};

pub use cached_object::CachePlace;
pub use kept_files::{KeptFiles, KeptLimit};

/// Blocks that are fetched at once, of all objects together. Each takes twice its size for a moment.
const FETCHES: usize = 8;

/// Blocks that one request fetches for a reader that goes on in order: many readers at once make many requests.
const BLOCKS_IN_ORDER: u64 = 4;

/// So many readers that go on in order keep what they fetch in memory, and not in the file, from which nothing would read it again.
const READERS_IN_ORDER: usize = 8;
/// What each of them keeps: the kernel asks for the beginning of one before it has the end of the other.
const PARTS_IN_ORDER: usize = 2;

/// Blocks in memory that fit into no file.
const BLOCKS_IN_MEMORY: usize = 16;

/// What is read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectVersion {
    pub key: String,
    pub etag: String,
    pub size: u64,
}

impl ObjectVersion {
    /// Where these blocks are in the object.
    fn part(&self, blocks: &Range<u64>) -> Range<u64> {
        (blocks.start * BLOCK).min(self.size)..(blocks.end * BLOCK).min(self.size)
    }

    /// For a file.
    fn name(&self) -> String {
        let mut hash = Md5::new();
        for part in [self.key.as_bytes(), self.etag.as_bytes(), &self.size.to_le_bytes()] {
            hash.update(part.len().to_le_bytes());
            hash.update(part);
        }
        format!("{:x}", hash.finalize())
    }
}

/// What one handle reads, and how.
pub struct CachedReader {
    version: ObjectVersion,
    pattern: ReadPattern,
    object: OnceLock<ObjectReader>,
    in_order: Mutex<PartsInOrder>,
}

/// What a reader that goes on in order has fetched last.
#[derive(Default)]
struct PartsInOrder {
    parts: VecDeque<NewContent>,
    permit: Option<Permit<Arc<Permits>>>,
}

impl CachedReader {
    /// None if the object is not to be cached.
    pub fn new(object: &OpenedObject, flags: i32) -> Option<Self> {
        let OpenedObject { key, etag, size, .. } = object;
        let is_cached = flags & libc::O_DIRECT == 0 && !etag.is_empty() && !key.is_empty() && 0 < *size;
        let version = ObjectVersion { key: key.clone(), etag: etag.clone(), size: *size };
        is_cached.then(|| {
            let (pattern, object, in_order) = (ReadPattern::default(), OnceLock::new(), Mutex::default());
            Self { version, pattern, object, in_order }
        })
    }
}

/// What is read, and what to keep of it after the reply.
pub struct ReadReply {
    pub data: Bytes,
    pub keep: Vec<NewContent>,
}

impl From<Bytes> for ReadReply {
    fn from(data: Bytes) -> Self {
        Self { data, keep: Vec::new() }
    }
}

/// A part of an object that is not in its file yet.
pub struct NewContent {
    object: Arc<CachedObject>,
    start: u64,
    data: Bytes,
    /// Other readers get these blocks from the object's `fetching` until it is dropped.
    blocks: Range<u64>,
}

impl Drop for NewContent {
    fn drop(&mut self) {
        self.object.fetched(&self.blocks);
    }
}

pub struct ReadCache<C> {
    bucket: Arc<Bucket<C>>,
    objects: Arc<CachedObjects>,
    fetches: Arc<Permits>,
    readers_in_order: Arc<Permits>,
    /// By object and block, the latest one last.
    recent: Mutex<VecDeque<(u64, u64, Bytes)>>,
}

impl<C: ObjectClient + Clone + Send + Sync + 'static> ReadCache<C> {
    pub fn new(bucket: Arc<Bucket<C>>, place: CachePlace) -> Self {
        let objects = CachedObjects::new(place);
        let [fetches, readers_in_order] = [FETCHES, READERS_IN_ORDER].map(|it| Arc::new(Permits::new(it)));
        Self { bucket, objects, fetches, readers_in_order, recent: Mutex::default() }
    }

    /// Answers a read, unless the caller must ask `S3Filesystem`.
    pub fn read(&self, reader: &CachedReader, offset: u64, size: u32) -> Option<FsResult<ReadReply>> {
        let access = reader.pattern.note(offset, size.into());
        let end = offset.saturating_add(size.into()).min(reader.version.size);
        if end <= offset {
            return None;
        }
        let is_used = self.objects.keeps_all() || access != ReadKind::Sequential || reader.object.get().is_some();
        if !is_used {
            return None;
        }
        let object = self.object(reader);
        if let Some(bytes) = object.read(&(offset..end)) {
            return Some(Ok(Bytes::from(bytes).into()));
        }
        let at_once = match access {
            ReadKind::Jump | ReadKind::AfterJump => 1,
            // The window of the crates would reach into the parts of the file that other readers fetch.
            ReadKind::Sequential if reader.pattern.has_jumped() && object.is_shared() => BLOCKS_IN_ORDER,
            ReadKind::Sequential => return None,
        };
        let read = self.read_blocks(object, offset..end, at_once);
        let has_fetched = read.as_ref().is_ok_and(|it| !it.keep.is_empty());
        if access == ReadKind::Jump && has_fetched && object.fill.note_wanted(object.version.size) {
            fill::start(&self.bucket, &self.fetches, object);
        }
        Some(read.map(|it| if access == ReadKind::Sequential { self.keep_in_order(reader, it) } else { it }))
    }

    /// Keeps what a reader that goes on in order has fetched, if that may be in memory.
    fn keep_in_order(&self, reader: &CachedReader, mut reply: ReadReply) -> ReadReply {
        if reply.keep.is_empty() || self.objects.keeps_all() {
            return reply;
        }
        let mut in_order = reader.in_order.lock();
        if in_order.permit.is_none() {
            in_order.permit = self.readers_in_order.try_acquire();
        }
        if in_order.permit.is_some() {
            in_order.parts.extend(reply.keep.drain(..));
            let excess = in_order.parts.len().saturating_sub(PARTS_IN_ORDER);
            in_order.parts.drain(..excess);
        }
        reply
    }

    /// What `S3Filesystem` has read.
    pub fn pass(&self, reader: &CachedReader, offset: u64, data: Bytes) -> ReadReply {
        let mut reply = ReadReply::from(data);
        if self.objects.keeps_all() && !reply.data.is_empty() {
            let object = Arc::clone(self.object(reader));
            reply.keep.push(NewContent { object, start: offset, data: reply.data.clone(), blocks: 0..0 });
        }
        reply
    }

    /// Called after the kernel has its reply.
    pub fn keep(&self, new: Vec<NewContent>) {
        for content in new {
            if content.object.write(content.start, &content.data) {
                continue;
            }
            for block in content.blocks.clone() {
                let part = part_of(&(block * BLOCK..(block + 1) * BLOCK), content.start, &content.data);
                self.keep_in_memory(content.object.id, block, Bytes::copy_from_slice(&content.data[part]));
            }
        }
    }

    fn object<'a>(&self, reader: &'a CachedReader) -> &'a Arc<CachedObject> {
        reader.object.get_or_init(|| ObjectReader::new(self.objects.get(&reader.version)))
    }

    fn read_blocks(&self, object: &Arc<CachedObject>, range: Range<u64>, at_once: u64) -> FsResult<ReadReply> {
        let (mut parts, mut keep) = (Vec::new(), Vec::new());
        for block in range.start / BLOCK..range.end.div_ceil(BLOCK) {
            let (start, data) = self.block(object, block, at_once, &mut keep)?;
            let end = range.end.min((block + 1) * BLOCK);
            parts.push(data.slice(part_of(&(range.start.max(block * BLOCK)..end), start, &data)));
        }
        let data = if parts.len() == 1 { parts.remove(0) } else { parts.concat().into() };
        Ok(ReadReply { data, keep })
    }

    /// Something that contains the block, and where that begins. A request fetches so many blocks at once.
    fn block(
        &self,
        object: &Arc<CachedObject>,
        block: u64,
        at_once: u64,
        keep: &mut Vec<NewContent>,
    ) -> FsResult<(u64, Bytes)> {
        let range = object.version.part(&(block..block + 1));
        if let Some(data) = self.recent(object.id, block).or_else(|| object.read(&range).map(Bytes::from)) {
            return Ok((range.start, data));
        }
        let fetch = object.fetching(block, at_once);
        let range = object.version.part(&fetch.blocks);
        let start = range.start;
        let mut is_own = false;
        let fetched = fetch.content.get_or_init(|| {
            is_own = true;
            let _permit = self.fetches.acquire();
            let ObjectVersion { key, etag, .. } = &object.version;
            let fetched = self.bucket.fetch(key, etag, range);
            // What is kept must not occupy the library's buffers, of which there are few: writers wait for them.
            let fetched = fetched.map(|it| if at_once > 1 { Bytes::copy_from_slice(&it) } else { it });
            fetched.map_err(|error| FailedFetch { error, at: Instant::now() })
        });
        match fetched {
            Ok(data) => {
                if is_own {
                    let (object, blocks) = (Arc::clone(object), fetch.blocks.clone());
                    keep.push(NewContent { object, start, data: data.clone(), blocks });
                }
                Ok((start, data.clone()))
            }
            Err(failed) => Err(failed.error.clone().into()),
        }
    }

    fn recent(&self, object: u64, block: u64) -> Option<Bytes> {
        let mut recent = self.recent.lock();
        let found = recent.iter().position(|(id, number, _)| (*id, *number) == (object, block))?;
        let entry = recent.remove(found)?;
        let data = entry.2.clone();
        recent.push_back(entry);
        Some(data)
    }

    fn keep_in_memory(&self, object: u64, block: u64, data: Bytes) {
        let mut recent = self.recent.lock();
        if recent.len() == BLOCKS_IN_MEMORY {
            recent.pop_front();
        }
        recent.push_back((object, block, data));
    }
}

/// Where this part of an object is in data that begin at `start`.
fn part_of(part: &Range<u64>, start: u64, data: &Bytes) -> Range<usize> {
    let index = |at: u64| usize::try_from(at.saturating_sub(start)).unwrap_or(usize::MAX).min(data.len());
    index(part.start)..index(part.end)
}
