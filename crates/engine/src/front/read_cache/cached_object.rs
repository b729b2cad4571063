//! One version of an object that is being read, shared by all handles that read it.

use std::collections::HashMap;
use std::io;
use std::ops::{Deref, Range};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::Mutex;

use super::ObjectVersion;
use super::cache_file::CacheFile;
use super::fill::FillProgress;
use super::kept_files::KeptFiles;
use crate::front::bucket::BucketError;
use crate::front::staged::StageDirectory;

/// Where cache files are.
#[derive(Debug)]
pub enum CachePlace {
    /// In what staged files leave of the staging directory, without a name, as long as a handle reads the object.
    Stage(Arc<StageDirectory>),
    /// In the directory of `--cache`.
    Kept(KeptFiles),
}

/// Blocks that are being fetched by one request: the first thread that wants one of them fetches them, the others wait.
pub struct BlockFetch {
    pub blocks: Range<u64>,
    pub content: OnceLock<Result<Bytes, FailedFetch>>,
}

pub struct FailedFetch {
    pub error: BucketError,
    pub at: Instant,
}

pub struct CachedObject {
    pub version: ObjectVersion,
    /// No two objects have the same.
    pub id: u64,
    name: String,
    /// None if it cannot be made.
    file: Option<CacheFile>,
    /// How much of the place the file takes.
    bytes: AtomicU64,
    /// Until they are in the file.
    fetching: Mutex<HashMap<u64, Arc<BlockFetch>>>,
    pub fill: FillProgress,
    readers: AtomicUsize,
    objects: Arc<CachedObjects>,
}

/// An object for one handle, which is counted.
pub struct ObjectReader(Arc<CachedObject>);

impl ObjectReader {
    pub fn new(object: Arc<CachedObject>) -> Self {
        object.readers.fetch_add(1, Ordering::Relaxed);
        Self(object)
    }
}

impl Deref for ObjectReader {
    type Target = Arc<CachedObject>;

    fn deref(&self) -> &Arc<CachedObject> {
        &self.0
    }
}

impl Drop for ObjectReader {
    fn drop(&mut self) {
        self.readers.fetch_sub(1, Ordering::Relaxed);
    }
}

/// All objects that are being read.
pub struct CachedObjects {
    place: CachePlace,
    open: Mutex<OpenObjects>,
}

#[derive(Default)]
struct OpenObjects {
    next_id: u64,
    by_name: HashMap<String, (u64, Weak<CachedObject>)>,
}

impl CachedObjects {
    pub fn new(place: CachePlace) -> Arc<Self> {
        let objects = Arc::new(Self { place, open: Mutex::default() });
        if let CachePlace::Stage(directory) = &objects.place {
            let weak = Arc::downgrade(&objects);
            directory.on_room_wanted(Box::new(move || {
                if let Some(objects) = weak.upgrade() {
                    objects.clear();
                }
            }));
        }
        objects
    }

    /// Whether objects are kept from the first read on, not only those that are read at random.
    pub fn keeps_all(&self) -> bool {
        matches!(self.place, CachePlace::Kept(_))
    }

    pub fn get(self: &Arc<Self>, version: &ObjectVersion) -> Arc<CachedObject> {
        let name = version.name();
        // Held while the file is opened: nothing else may be opened under its name.
        let mut open = self.open.lock();
        if let Some(object) = open.by_name.get(&name).and_then(|(_, it)| it.upgrade()) {
            return object;
        }
        let opened = match &self.place {
            CachePlace::Stage(directory) => {
                directory.create_unnamed().and_then(|file| CacheFile::create(file, version))
            }
            CachePlace::Kept(files) => files.open(&name, version),
        };
        let file =
            opened.inspect_err(|error| tracing::debug!(%error, key = version.key, "cannot make a cache file")).ok();
        open.next_id += 1;
        let object = Arc::new(CachedObject {
            version: version.clone(),
            id: open.next_id,
            name: name.clone(),
            bytes: AtomicU64::new(file.as_ref().map_or(0, CacheFile::bytes)),
            file,
            fetching: Mutex::default(),
            fill: FillProgress::default(),
            readers: AtomicUsize::new(0),
            objects: Arc::clone(self),
        });
        open.by_name.insert(name, (object.id, Arc::downgrade(&object)));
        object
    }

    fn all(&self) -> Vec<Arc<CachedObject>> {
        self.open.lock().by_name.values().filter_map(|(_, it)| it.upgrade()).collect()
    }

    /// Room for new bytes, if necessary that of blocks of the object that has most of them.
    fn reserve(&self, bytes: u64) -> bool {
        loop {
            let is_reserved = match &self.place {
                CachePlace::Stage(directory) => directory.reserve_spare(bytes),
                CachePlace::Kept(files) => files.reserve(bytes),
            };
            if is_reserved {
                return true;
            }
            let largest = self.all().into_iter().max_by_key(|it| it.bytes.load(Ordering::Relaxed));
            let freed = largest.map_or(0, |it| it.remove_block());
            if freed == 0 {
                return false;
            }
        }
    }

    fn release(&self, bytes: u64) {
        match &self.place {
            CachePlace::Stage(directory) => directory.release_spare(bytes),
            CachePlace::Kept(files) => files.release(bytes),
        }
    }

    fn clear(&self) {
        for object in self.all() {
            object.clear();
        }
    }
}

/// The kernel repeats a read that failed at once, and must not make a broken store send everything once more.
const FAILURE_KEPT: Duration = Duration::from_secs(1);

impl CachedObject {
    /// Whether several handles use the file.
    pub fn is_shared(&self) -> bool {
        self.file.is_some() && 1 < self.readers.load(Ordering::Relaxed)
    }

    /// The block as it is being fetched, or has just failed to be. Otherwise it will be, with blocks behind it that are not there
    /// either, up to so many.
    pub fn fetching(&self, block: u64, most: u64) -> Arc<BlockFetch> {
        let mut fetching = self.fetching.lock();
        let has_failed =
            |it: &Arc<BlockFetch>| matches!(it.content.get(), Some(Err(it)) if FAILURE_KEPT <= it.at.elapsed());
        match fetching.get(&block) {
            Some(failed) if has_failed(failed) => {
                for block in failed.blocks.clone() {
                    fetching.remove(&block);
                }
            }
            Some(fetch) => return Arc::clone(fetch),
            None => {}
        }
        let is_wanted = |block: &u64| {
            let part = self.version.part(&(*block..*block + 1));
            !fetching.contains_key(block) && !part.is_empty() && !self.missing(&part).is_empty()
        };
        let more = (block + 1..block + most).take_while(is_wanted).count() as u64;
        let blocks = block..block + 1 + more;
        let fetch = Arc::new(BlockFetch { blocks: blocks.clone(), content: OnceLock::new() });
        fetching.extend(blocks.map(|it| (it, Arc::clone(&fetch))));
        fetch
    }

    /// The blocks are in the file, or in memory.
    pub fn fetched(&self, blocks: &Range<u64>) {
        let mut fetching = self.fetching.lock();
        for block in blocks.clone() {
            fetching.remove(&block);
        }
    }

    /// A part of the object, if all of it is in the file.
    pub fn read(&self, range: &Range<u64>) -> Option<Vec<u8>> {
        self.file.as_ref()?.read(range)
    }

    /// What is missing of a part that begins with a block. Nothing is if there is no file.
    pub fn missing(&self, part: &Range<u64>) -> Range<u64> {
        self.file.as_ref().map_or(part.end..part.end, |it| it.missing(part))
    }

    /// Keeps a part of the object in the file. Answers whether it is there.
    pub fn write(&self, start: u64, data: &[u8]) -> bool {
        let Some(file) = &self.file else { return false };
        let bytes = data.len() as u64;
        if !self.objects.reserve(bytes) {
            return false;
        }
        let written = file.write(start, data);
        let added = *written.as_ref().unwrap_or(&0);
        self.bytes.fetch_add(added, Ordering::AcqRel);
        self.objects.release(bytes.saturating_sub(added));
        written.inspect_err(|error| self.log(error)).is_ok()
    }

    fn remove_block(&self) -> u64 {
        let freed = self.file.as_ref().map_or(0, CacheFile::remove_block);
        self.forget(freed)
    }

    fn clear(&self) {
        if let Some(file) = &self.file {
            file.clear();
            self.forget(u64::MAX);
        }
    }

    /// So much of the file is gone. Answers how much of it was counted.
    fn forget(&self, freed: u64) -> u64 {
        let mut counted = 0;
        let _ = self.bytes.fetch_update(Ordering::AcqRel, Ordering::Acquire, |bytes| {
            counted = bytes.min(freed);
            Some(bytes - counted)
        });
        self.objects.release(counted);
        counted
    }

    fn log(&self, error: &io::Error) {
        // A full disk, for instance. Reading goes on without it.
        tracing::debug!(%error, key = self.version.key, "cannot write to a cache file");
    }
}

impl Drop for CachedObject {
    fn drop(&mut self) {
        let mut open = self.objects.open.lock();
        let is_last = open.by_name.get(&self.name).is_some_and(|(id, _)| *id == self.id);
        if is_last {
            open.by_name.remove(&self.name);
        }
        let bytes = self.bytes.load(Ordering::Acquire);
        match &self.objects.place {
            CachePlace::Kept(files) if is_last && self.file.is_some() => files.close(&self.name, bytes),
            // The file goes with its descriptor, or another handle has opened it again and counted it once more.
            CachePlace::Stage(_) | CachePlace::Kept(_) => self.objects.release(bytes),
        }
    }
}
