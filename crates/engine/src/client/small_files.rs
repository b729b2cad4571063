//! Small files fetched while they are looked up.
//!
//! The kernel looks a name up and reads the file right after: two round trips for a few bytes. Where the small files of a
//! directory are read one after the other, a lookup asks for the content, which comes with the attributes, and the content waits
//! for its reader. It is used only if its MD5 is the `ETag` of the attributes, which is so for every object stored by a single
//! PUT; otherwise the attributes are asked for, and if it is not read soon, it is discarded.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::StreamExt as _;
use futures::future::BoxFuture;
use mountpoint_s3_client::ObjectClient;
use mountpoint_s3_client::error::{GetObjectError, ObjectClientError};
use mountpoint_s3_client::types::GetObjectParams;
use parking_lot::Mutex;

use super::budget::{Buffer, MemoryBudget};

/// Longer files are worth a request of their own: it takes longer than a round trip to send them. It is also as much as the
/// kernel reads first.
const SMALL: u64 = 128 << 10;
/// The kernel opens what it looked up at once, and asks the server again for what it looked up longer ago.
const WAITS_FOR_ITS_READER: Duration = Duration::from_secs(1);
/// As many files as programs may read at the same time; they bound the memory.
const MOST_WAITING: usize = 64;
const MOST_DIRECTORIES: usize = 64;
/// So many small files of a directory must have been read one after the other.
const READS_TO_EXPECT_MORE: i32 = 2;
/// After an unused fetch, this many reads must follow until the next is tried.
const COST_OF_A_WASTE: i32 = 8;

/// Content that was requested before it is read.
pub type Fetch = BoxFuture<'static, Option<Bytes>>;

#[derive(Default)]
pub struct SmallFilePrefetch {
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    directories: HashMap<String, AccessPattern>,
    waiting: VecDeque<Waiting>,
}

/// How the files of one directory are used.
struct AccessPattern {
    /// Small files read since the last unused fetch; negative after one.
    reads: i32,
    last: Instant,
}

struct Waiting {
    key: String,
    etag: String,
    size: u64,
    since: Instant,
    content: Fetch,
}

impl SmallFilePrefetch {
    /// Whether the file will probably be read right after it was looked up.
    pub fn expects_read(&self, key: &str) -> bool {
        let seen = self.seen.lock();
        seen.directories.get(directory(key)).is_some_and(|it| READS_TO_EXPECT_MORE <= it.reads)
    }

    /// Keeps what is being fetched for the one who reads it.
    pub fn keep(&self, now: Instant, key: &str, etag: &str, size: u64, content: Fetch) {
        let mut seen = self.seen.lock();
        seen.waiting.retain(|it| it.key != key);
        let waiting = Waiting { key: key.to_owned(), etag: etag.to_owned(), size, since: now, content };
        seen.waiting.push_back(waiting);
        while seen.waiting.front().is_some_and(|it| WAITS_FOR_ITS_READER < now.duration_since(it.since))
            || MOST_WAITING < seen.waiting.len()
        {
            if let Some(wasted) = seen.waiting.pop_front() {
                seen.note_waste(now, &wasted.key);
            }
        }
    }

    /// Notes that a fetch was of no use.
    pub fn note_waste(&self, now: Instant, key: &str) {
        self.seen.lock().note_waste(now, key);
    }

    /// Notes that a file is opened to be read, and finds what was fetched of it.
    pub fn opened(&self, now: Instant, key: &str, etag: &str, size: u64) -> Option<Fetch> {
        if !is_small(size) {
            return None;
        }
        let mut seen = self.seen.lock();
        seen.note_read(now, key);
        let position = seen.waiting.iter().position(|it| it.key == key)?;
        let waiting = seen.waiting.remove(position)?;
        let is_wanted =
            waiting.size == size && waiting.etag == etag && now.duration_since(waiting.since) <= WAITS_FOR_ITS_READER;
        is_wanted.then_some(waiting.content)
    }
}

impl Seen {
    fn note_read(&mut self, now: Instant, key: &str) {
        let pattern = self.pattern(now, key);
        pattern.reads = pattern.reads.saturating_add(1).min(READS_TO_EXPECT_MORE);
    }

    fn note_waste(&mut self, now: Instant, key: &str) {
        self.pattern(now, key).reads = READS_TO_EXPECT_MORE - COST_OF_A_WASTE;
    }

    fn pattern(&mut self, now: Instant, key: &str) -> &mut AccessPattern {
        let directory = directory(key);
        if !self.directories.contains_key(directory) && MOST_DIRECTORIES <= self.directories.len() {
            let oldest = self.directories.iter().min_by_key(|(_, it)| it.last).map(|(name, _)| name.clone());
            self.directories.remove(&oldest.unwrap_or_default());
        }
        let pattern = self.directories.entry(directory.to_owned()).or_insert(AccessPattern { reads: 0, last: now });
        pattern.last = now;
        pattern
    }
}

/// What a GET of a file found that is probably small.
#[derive(Debug, PartialEq, Eq)]
pub enum SmallFile {
    Absent,
    /// The whole object, or its beginning.
    Content(Bytes),
    /// HEAD may tell more.
    Unknown,
}

pub async fn fetch<C>(client: &C, bucket: &str, key: &str, budget: &Arc<MemoryBudget>) -> SmallFile
where
    C: ObjectClient + Send + Sync + 'static,
{
    let params = GetObjectParams::new().range(Some(0..SMALL));
    let response = match client.get_object(bucket, key, &params).await {
        Ok(response) => response,
        Err(ObjectClientError::ServiceError(GetObjectError::NoSuchKey(_))) => return SmallFile::Absent,
        Err(_) => return SmallFile::Unknown,
    };
    let mut parts = std::pin::pin!(response);
    let mut content = Buffer::new(budget);
    while let Some(part) = parts.next().await {
        let Ok(part) = part else { return SmallFile::Unknown };
        let is_next = usize::try_from(part.offset).is_ok_and(|it| it == content.as_ref().len());
        if !is_next || !content.try_append(&part.data, usize::try_from(SMALL).unwrap_or(usize::MAX)) {
            return SmallFile::Unknown;
        }
    }
    SmallFile::Content(Bytes::from_owner(content))
}

/// Whether an object of this size may have been fetched whole.
pub fn is_small(size: u64) -> bool {
    (1..=SMALL).contains(&size)
}

fn directory(key: &str) -> &str {
    key.rsplit_once('/').map_or("", |(directory, _)| directory)
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    const ETAG: &str = "\"900150983cd24fb0d6963f7d28e17f72\"";

    fn content() -> Fetch {
        futures::future::ready(Some(Bytes::from_static(b"abc"))).boxed()
    }

    /// A directory of which files `a/1` and `a/2` were just read.
    fn used(now: Instant) -> SmallFilePrefetch {
        let prefetch = SmallFilePrefetch::default();
        for key in ["a/1", "a/2"] {
            assert!(!prefetch.expects_read("a/3"));
            assert!(prefetch.opened(now, key, ETAG, 3).is_none());
        }
        prefetch
    }

    #[test]
    fn a_read_is_expected_where_small_files_are_read_and_nowhere_else() {
        let now = Instant::now();
        let prefetch = used(now);
        assert!(prefetch.expects_read("a/3"));
        assert!(!prefetch.expects_read("b/3"));
        assert!(!prefetch.expects_read("a/b/3"));
    }

    #[test]
    fn large_and_empty_files_are_no_reason_to_expect_more() {
        let (now, prefetch) = (Instant::now(), SmallFilePrefetch::default());
        for size in [0, SMALL + 1] {
            for _ in 0..9 {
                assert!(prefetch.opened(now, "a/1", ETAG, size).is_none());
            }
        }
        assert!(!prefetch.expects_read("a/1"));
    }

    #[test]
    fn what_was_fetched_is_given_once_to_the_reader_of_that_very_object() {
        let now = Instant::now();
        let prefetch = used(now);
        prefetch.keep(now, "a/3", ETAG, 3, content());
        assert!(prefetch.opened(now, "a/4", ETAG, 3).is_none());
        assert!(prefetch.opened(now, "a/3", ETAG, 3).is_some());
        assert!(prefetch.opened(now, "a/3", ETAG, 3).is_none());
        prefetch.keep(now, "a/3", "another", 3, content());
        assert!(prefetch.opened(now, "a/3", ETAG, 3).is_none());
        prefetch.keep(now, "a/3", ETAG, 4, content());
        assert!(prefetch.opened(now, "a/3", ETAG, 3).is_none());
    }

    #[test]
    fn an_unread_fetch_is_dropped_and_suspends_prefetching() {
        let now = Instant::now();
        let prefetch = used(now);
        prefetch.keep(now, "a/3", ETAG, 3, content());
        let later = now + WAITS_FOR_ITS_READER + Duration::from_millis(1);
        prefetch.keep(later, "b/1", ETAG, 3, content());
        assert!(!prefetch.expects_read("a/4"));
        let mut reads = 0;
        while !prefetch.expects_read("a/4") {
            prefetch.opened(later, "a/4", ETAG, 3);
            reads += 1;
        }
        assert_eq!(reads, COST_OF_A_WASTE);
    }

    #[test]
    fn neither_fetches_nor_directories_pile_up() {
        let (now, prefetch) = (Instant::now(), SmallFilePrefetch::default());
        for number in 0..1000 {
            prefetch.keep(now, &format!("{number}/file"), ETAG, 3, content());
            prefetch.opened(now, &format!("{number}/other"), ETAG, 3);
        }
        let seen = prefetch.seen.into_inner();
        assert_eq!((seen.waiting.len(), seen.directories.len()), (MOST_WAITING, MOST_DIRECTORIES));
    }
}
