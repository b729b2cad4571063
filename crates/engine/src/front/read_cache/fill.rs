//! Fetches the rest of an object that is read at random all over: fewer and larger requests than block by block, and no reader
//! waits for them.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread;

use mountpoint_s3_client::ObjectClient;

use super::ObjectVersion;
use super::cache_file::BLOCK;
use super::cached_object::CachedObject;
use super::permits::Permits;
use crate::front::bucket::Bucket;

/// As many requests at once. Readers need some of those that are allowed.
const THREADS: usize = 2;
/// What one request fetches.
const BLOCKS_AT_ONCE: u64 = 4;
/// So many blocks must have been wanted,
const LEAST_BLOCKS: u64 = 16;
/// and this part of all, so that a few reads in a large object do not fetch it.
const LEAST_SHARE: u64 = 32;

/// How much of an object was wanted, and what was fetched of the rest.
#[derive(Debug, Default)]
pub struct FillProgress {
    wanted: AtomicU64,
    is_begun: AtomicBool,
    /// The block at which the next thread goes on.
    next: AtomicU64,
}

impl FillProgress {
    /// Notes that a reader waited for a block. True once, when the rest should be fetched.
    pub fn note_wanted(&self, size: u64) -> bool {
        let wanted = self.wanted.fetch_add(1, Ordering::Relaxed) + 1;
        let blocks = size.div_ceil(BLOCK);
        let is_worth_it = LEAST_BLOCKS <= wanted && blocks <= wanted.saturating_mul(LEAST_SHARE);
        is_worth_it && !self.is_begun.swap(true, Ordering::Relaxed)
    }

    /// The next part of the object, if there is one.
    fn next_part(&self, size: u64) -> Option<Range<u64>> {
        let block = self.next.fetch_add(BLOCKS_AT_ONCE, Ordering::Relaxed);
        let start = block.checked_mul(BLOCK).filter(|it| *it < size)?;
        Some(start..size.min(start.saturating_add(BLOCKS_AT_ONCE * BLOCK)))
    }
}

/// Starts threads that end when all is there, when it does not fit, and with the last reader.
pub fn start<C>(bucket: &Arc<Bucket<C>>, permits: &Arc<Permits>, object: &Arc<CachedObject>)
where
    C: ObjectClient + Clone + Send + Sync + 'static,
{
    for _ in 0..THREADS {
        let (bucket, permits, object) = (Arc::clone(bucket), Arc::clone(permits), Arc::downgrade(object));
        let fill = move || while fill_part(&bucket, &permits, &object).is_some() {};
        if let Err(error) = thread::Builder::new().name("fill".into()).spawn(fill) {
            tracing::debug!(%error, "cannot start a thread that fetches the rest of an object");
        }
    }
}

fn fill_part<C>(bucket: &Bucket<C>, permits: &Permits, object: &Weak<CachedObject>) -> Option<()>
where
    C: ObjectClient + Clone + Send + Sync + 'static,
{
    let object = object.upgrade()?;
    let ObjectVersion { key, etag, size } = &object.version;
    let missing = object.missing(&object.fill.next_part(*size)?);
    if missing.is_empty() {
        return Some(());
    }
    let _permit = permits.acquire();
    let data = bucket.fetch(key, etag, missing.clone()).ok()?;
    object.write(missing.start, &data).then_some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted_until_begun(size: u64) -> usize {
        let progress = FillProgress::default();
        (1..=10_000).find(|_| progress.note_wanted(size)).unwrap()
    }

    #[test]
    fn the_rest_is_fetched_once_and_only_if_much_was_wanted() {
        assert_eq!(wanted_until_begun(512 * BLOCK), 16);
        assert_eq!(wanted_until_begun(3200 * BLOCK), 100);
        let progress = FillProgress::default();
        assert_eq!((0..100).filter(|_| progress.note_wanted(512 * BLOCK)).count(), 1);
    }

    #[test]
    fn parts_cover_the_object_once() {
        let (progress, size) = (FillProgress::default(), 9 * BLOCK + 5);
        let parts: Vec<_> = std::iter::from_fn(|| progress.next_part(size)).collect();
        assert_eq!(parts, [0..4 * BLOCK, 4 * BLOCK..8 * BLOCK, 8 * BLOCK..size]);
    }
}
