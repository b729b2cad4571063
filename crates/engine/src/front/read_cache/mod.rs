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
use cached_object::{CachedObject, CachedObjects, FailedFetch};
use permits::Permits;
use read_pattern::{ReadKind, ReadPattern};

pub use cached_object::CachePlace;
pub use kept_files::{KeptFiles, KeptLimit};

/// Blocks that are fetched at once, of all objects together. Each takes twice its size for a moment.
const FETCHES: usize = 8;

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
    object: OnceLock<Arc<CachedObject>>,
}

impl CachedReader {
    /// None if the object is not to be cached.
    pub fn new(object: &OpenedObject, flags: i32) -> Option<Self> {
        let OpenedObject { key, etag, size, .. } = object;
        let is_cached = flags & libc::O_DIRECT == 0 && !etag.is_empty() && !key.is_empty() && 0 < *size;
        let version = ObjectVersion { key: key.clone(), etag: etag.clone(), size: *size };
        is_cached.then(|| Self { version, pattern: ReadPattern::default(), object: OnceLock::new() })
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
    /// Other readers get it from the object's `fetching` until it is dropped.
    block: Option<u64>,
}

impl Drop for NewContent {
    fn drop(&mut self) {
        if let Some(block) = self.block {
            self.object.fetched(block);
        }
    }
}

pub struct ReadCache<C> {
    bucket: Arc<Bucket<C>>,
    objects: Arc<CachedObjects>,
    fetches: Arc<Permits>,
    /// By object and block, the latest one last.
    recent: Mutex<VecDeque<(u64, u64, Bytes)>>,
}

impl<C: ObjectClient + Clone + Send + Sync + 'static> ReadCache<C> {
    pub fn new(bucket: Arc<Bucket<C>>, place: CachePlace) -> Self {
        let objects = CachedObjects::new(place);
        Self { bucket, objects, fetches: Arc::new(Permits::new(FETCHES)), recent: Mutex::default() }
    }

    /// Answers a read, unless the caller must ask `S3Filesystem`.
    pub fn read(&self, reader: &CachedReader, offset: u64, size: u32) -> Option<FsResult<ReadReply>> {
        let access = reader.pattern.note(offset, size.into());
        let end = offset.saturating_add(size.into()).min(reader.version.size);
        if end <= offset {
            return None;
        }
        let is_used = self.objects.keeps_all() || access == ReadKind::Random || reader.object.get().is_some();
        if !is_used {
            return None;
        }
        let object = self.object(reader);
        if let Some(bytes) = object.read(&(offset..end)) {
            return Some(Ok(Bytes::from(bytes).into()));
        }
        (access == ReadKind::Random).then(|| self.read_blocks(object, offset..end))
    }

    /// What `S3Filesystem` has read.
    pub fn pass(&self, reader: &CachedReader, offset: u64, data: Bytes) -> ReadReply {
        let mut reply = ReadReply::from(data);
        if self.objects.keeps_all() && !reply.data.is_empty() {
            let object = Arc::clone(self.object(reader));
            reply.keep.push(NewContent { object, start: offset, data: reply.data.clone(), block: None });
        }
        reply
    }

    /// Called after the kernel has its reply.
    pub fn keep(&self, new: Vec<NewContent>) {
        for content in new {
            if !content.object.write(content.start, &content.data)
                && let Some(block) = content.block
            {
                self.keep_in_memory(content.object.id, block, content.data.clone());
            }
        }
    }

    fn object<'a>(&self, reader: &'a CachedReader) -> &'a Arc<CachedObject> {
        reader.object.get_or_init(|| self.objects.get(&reader.version))
    }

    fn read_blocks(&self, object: &Arc<CachedObject>, range: Range<u64>) -> FsResult<ReadReply> {
        let (mut parts, mut keep) = (Vec::new(), Vec::new());
        for block in range.start / BLOCK..range.end.div_ceil(BLOCK) {
            let start = block * BLOCK;
            let data = self.block(object, block, &mut keep)?;
            let index = |at: u64| usize::try_from(at.saturating_sub(start)).unwrap_or(usize::MAX).min(data.len());
            parts.push(data.slice(index(range.start)..index(range.end)));
        }
        let data = if parts.len() == 1 { parts.remove(0) } else { parts.concat().into() };
        Ok(ReadReply { data, keep })
    }

    fn block(&self, object: &Arc<CachedObject>, block: u64, keep: &mut Vec<NewContent>) -> FsResult<Bytes> {
        let start = block * BLOCK;
        let range = start..(start + BLOCK).min(object.version.size);
        if let Some(data) = self.recent(object.id, block).or_else(|| object.read(&range).map(Bytes::from)) {
            return Ok(data);
        }
        let cell = object.fetching(block);
        let mut is_own = false;
        let fetched = cell.get_or_init(|| {
            is_own = true;
            if object.fill.note_wanted(object.version.size) {
                fill::start(&self.bucket, &self.fetches, object);
            }
            let _permit = self.fetches.acquire();
            let ObjectVersion { key, etag, .. } = &object.version;
            let fetched = self.bucket.fetch(key, etag, range);
            fetched.map(Bytes::from).map_err(|error| FailedFetch { error, at: Instant::now() })
        });
        match fetched {
            Ok(data) if is_own => {
                let new = NewContent { object: Arc::clone(object), start, data: data.clone(), block: Some(block) };
                keep.push(new);
                Ok(data.clone())
            }
            Ok(data) => Ok(data.clone()),
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
