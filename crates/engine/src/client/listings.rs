//! One page of a directory's listing for many files that are created.
//!
//! Who creates a file looks first whether there is one, and then stores it: two round trips. Where we are storing one small file after the
//! other, the directory's listing is asked for meanwhile, and for a moment after it was asked for it says what is *not* there: so a file
//! costs one round trip. Everything else is asked about as ever: what is in the listing, what we changed ourselves since, and names
//! in directories in which we store nothing, where others may just have made what we are to find. Listings of long directories cost
//! more than they save, and are not repeated.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::FutureExt as _;
use futures::future::{BoxFuture, Shared};
use mountpoint_s3_client::types::ListObjectsResult;
use parking_lot::{Mutex, MutexGuard};

use super::first_pages::FirstPages;
use super::next_pages::NextPages;
use super::siblings::SiblingDirectories;

/// For how long a listing is believed, from when it was sent on. What others stored a moment ago must not be replaced, and what is not
/// there is noted by the file system for the rest of a tenth of a second.
const BELIEVED: Duration = Duration::from_millis(75);
/// Early enough that the next one is there before this one may not be believed any longer.
const ASKED_AGAIN_AFTER: Duration = Duration::from_millis(35);
/// Files with a longer pause between them are not stored one after the other.
const FOLLOWS: Duration = Duration::from_millis(250);
/// So many must have been stored one after the other.
const STORED_TO_EXPECT_MORE: u32 = 2;
/// As many as a server sends at once. Longer directories are not worth it.
pub const PAGE: usize = 1000;
/// What a server and we work on each name of a listing; versitygw was measured with 35 µs.
const COST_OF_A_NAME: Duration = Duration::from_micros(40);
/// A listing should save so many times what it costs: others use the server and the machine, too.
const WORTH_IT: u32 = 2;
/// One that answered nothing is not asked for again for so many looks,
const LOOKS_AFTER_A_WASTE: u32 = 8;
/// and one that is too long for so many: it will hardly become shorter soon.
const LOOKS_AFTER_A_LONG_ONE: u32 = 500;
/// They bound the memory: two pages each.
const MOST_DIRECTORIES: usize = 16;

/// Keys of objects, and of directories with a slash at the end. Nothing if the directory is too long or could not be listed.
pub type Names = Shared<BoxFuture<'static, Option<Arc<HashSet<String>>>>>;

#[derive(Default)]
pub struct Listings {
    seen: Mutex<Seen>,
    /// Of directories that are looked up to be listed.
    pub first_pages: FirstPages,
    /// Of directories with many names.
    pub next_pages: NextPages,
    /// Of files that are read one after the other.
    pub siblings: SiblingDirectories,
}

#[derive(Default)]
struct Seen {
    /// Those in which we store something.
    directories: HashMap<String, Directory>,
    /// How long the server takes to answer one look, on average.
    look: Duration,
}

struct Directory {
    /// Files that were stored one after the other, and when the last one was.
    stored: u32,
    last_stored: Instant,
    /// Looks until a listing may be tried again.
    patience: u32,
    /// The newest is the last. There are at most two.
    pages: VecDeque<Page>,
}

struct Page {
    asked: Instant,
    names: Names,
    /// What we know to be there, or may have made, since it was asked for.
    changed: HashSet<String>,
    answers: u32,
}

/// What listings say about one key.
pub enum KeyPresence {
    Absent,
    Unknown,
    /// Ask again when this is complete.
    Coming(Names),
}

impl Listings {
    /// `key` is that of an object, or of a directory with a slash at its end.
    pub fn answer(&self, now: Instant, key: &str) -> KeyPresence {
        if !is_plain(key) {
            return KeyPresence::Unknown;
        }
        let name = directory(key);
        let pages: Vec<Names> = {
            let mut seen = self.lock();
            let look = seen.look;
            let Some(directory) = seen.directories.get_mut(name) else { return KeyPresence::Unknown };
            directory.forget_old(now, look);
            let is_changed = directory.pages.iter().any(|it| it.changed.contains(key));
            if is_changed || !directory.is_filled(now) {
                return KeyPresence::Unknown;
            }
            directory.pages.iter().rev().map(|it| it.names.clone()).collect()
        };
        // The page is parsed by the first thread that needs it.
        let mut coming = None;
        for page in pages {
            match page.clone().now_or_never() {
                Some(Some(names)) if names.contains(key) => return KeyPresence::Unknown,
                Some(Some(_)) => {
                    self.note_answer(name, &page);
                    return KeyPresence::Absent;
                }
                Some(None) => self.give_up(name),
                None => coming = Some(page),
            }
        }
        coming.map_or(KeyPresence::Unknown, KeyPresence::Coming)
    }

    /// Notes a look at an object, and how long the server took if it was asked. Answers its directory, with a slash unless it is the
    /// root, if that should be listed now.
    pub fn looked<'key>(&self, now: Instant, key: &'key str, took: Option<Duration>) -> Option<&'key str> {
        let name = directory(key);
        let mut seen = self.lock();
        if let Some(took) = took {
            seen.look = if seen.look.is_zero() { took } else { (seen.look * 3 + took) / 4 };
        }
        let look = seen.look;
        let directory = seen.directories.get_mut(name)?;
        directory.forget_old(now, look);
        if 0 < directory.patience {
            directory.patience -= 1;
            return None;
        }
        let is_new = |it: &Page| now.saturating_duration_since(it.asked) < ASKED_AGAIN_AFTER;
        (directory.is_filled(now) && !directory.pages.back().is_some_and(is_new)).then_some(name)
    }

    /// Keeps a listing that is about to be asked for. Its future must not have been polled before.
    pub fn keep(&self, now: Instant, directory: &str, names: Names) {
        let mut seen = self.lock();
        let Some(directory) = seen.directories.get_mut(directory) else { return };
        while 2 <= directory.pages.len() {
            directory.pages.pop_front();
        }
        directory.pages.push_back(Page { asked: now, names, changed: HashSet::new(), answers: 0 });
    }

    /// Notes that this object is there, or may be, whatever listings say that were asked for before.
    pub fn note_there(&self, key: &str) {
        for (name, directory) in &mut self.lock().directories {
            let Some(rest) = key.strip_prefix(name.as_str()) else { continue };
            let end = rest.find('/').map_or(key.len(), |it| name.len() + it + 1);
            for page in &mut directory.pages {
                page.changed.insert(key[..end].to_owned());
            }
        }
    }

    /// Notes that this object was stored by us, or may have been.
    pub fn stored(&self, now: Instant, key: &str) {
        self.note_changed(key);
        let name = directory(key);
        let directories = &mut self.lock().directories;
        if !directories.contains_key(name) && MOST_DIRECTORIES <= directories.len() {
            let oldest = directories.iter().min_by_key(|(_, it)| it.last_stored).map(|(name, _)| name.clone());
            directories.remove(&oldest.unwrap_or_default());
        }
        let directory = directories.entry(name.to_owned()).or_insert_with(|| Directory {
            stored: 0,
            last_stored: now,
            patience: 0,
            pages: VecDeque::new(),
        });
        let follows = now.saturating_duration_since(directory.last_stored) <= FOLLOWS;
        directory.stored = if follows { STORED_TO_EXPECT_MORE.min(directory.stored + 1) } else { 1 };
        directory.last_stored = now;
    }

    /// Notes that an object was changed by us, or may have been.
    pub fn note_changed(&self, key: &str) {
        self.note_there(key);
        self.forget_pages(key);
    }

    /// Drops pages that were requested in advance and may not know of our change of this object.
    pub fn forget_pages(&self, key: &str) {
        self.first_pages.forget(key);
        self.next_pages.forget(key);
    }

    /// An explicit listing must not be contradicted by an older cached one.
    pub fn forget(&self, directory: &str) {
        if let Some(directory) = self.lock().directories.get_mut(directory) {
            directory.pages.clear();
        }
    }

    fn note_answer(&self, directory: &str, page: &Names) {
        if let Some(directory) = self.lock().directories.get_mut(directory) {
            let is_it = |it: &&mut Page| it.names.ptr_eq(page);
            directory.pages.iter_mut().filter(is_it).for_each(|it| it.answers += 1);
        }
    }

    fn give_up(&self, directory: &str) {
        if let Some(directory) = self.lock().directories.get_mut(directory) {
            directory.patience = LOOKS_AFTER_A_LONG_ONE;
            directory.pages.clear();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock()
    }
}

impl Directory {
    /// Whether we are storing one file after the other.
    fn is_filled(&self, now: Instant) -> bool {
        STORED_TO_EXPECT_MORE <= self.stored && now.saturating_duration_since(self.last_stored) <= FOLLOWS
    }

    fn forget_old(&mut self, now: Instant, look: Duration) {
        while self.pages.front().is_some_and(|it| BELIEVED < now.saturating_duration_since(it.asked)) {
            let Some(Page { names, answers, .. }) = self.pages.pop_front() else { return };
            let count = names.peek().and_then(Option::as_ref).map_or(0, |it| it.len());
            let cost = COST_OF_A_NAME * u32::try_from(count).unwrap_or(u32::MAX);
            // A look of the file system is two of ours: for an object and for a directory. They are asked at once.
            if answers == 0 {
                self.patience = LOOKS_AFTER_A_WASTE;
            } else if look * answers / 2 < cost * WORTH_IT {
                self.patience = LOOKS_AFTER_A_LONG_ONE;
            }
        }
    }
}

/// The names in a directory, if they fit one page of `PAGE` names. Starts when it is polled for the first time.
pub fn names(page: impl Future<Output = Option<ListObjectsResult>> + Send + 'static) -> Names {
    async move {
        let page = page.await?;
        let is_whole = page.next_continuation_token.is_none();
        let keys = page.objects.into_iter().map(|it| it.key).chain(page.common_prefixes);
        is_whole.then(|| Arc::new(keys.collect()))
    }
    .boxed()
    .shared()
}

/// The directory that a key is listed in: up to the last slash, not counting one at its end.
fn directory(key: &str) -> &str {
    let name = key.strip_suffix('/').unwrap_or(key);
    name.rfind('/').map_or("", |it| &key[..=it])
}

/// Whether every store lists this key with the same characters that it is asked for with.
fn is_plain(key: &str) -> bool {
    !key.chars().any(|it| it.is_control() || it == '%' || it == '+')
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOMENT: Duration = Duration::from_millis(1);
    const LOOK: Option<Duration> = Some(Duration::from_millis(10));

    fn page(names: Option<&[&str]>) -> Names {
        let names = names.map(|it| Arc::new(it.iter().map(|it| (*it).to_owned()).collect()));
        futures::future::ready(names).boxed().shared()
    }

    /// `a/8` and `a/9` were just stored.
    fn filled(now: Instant) -> Listings {
        let listings = Listings::default();
        for key in ["a/8", "a/9"] {
            assert_eq!(listings.looked(now, key, LOOK), None);
            listings.stored(now, key);
        }
        listings
    }

    /// And `a/` was listed then: there are the file `a/1` and the directory `a/2/`.
    fn listed(now: Instant) -> Listings {
        let listings = filled(now);
        assert_eq!(listings.looked(now, "a/3", LOOK), Some("a/"));
        listings.keep(now, "a/", page(Some(&["a/1", "a/2/"])));
        listings
    }

    /// We go on storing files in `a/`.
    fn filled_on(listings: Listings, until: Instant) -> Listings {
        listings.lock().directories.get_mut("a/").unwrap().last_stored = until;
        listings
    }

    #[track_caller]
    fn check(listings: &Listings, now: Instant, key: &str, is_absent: bool) {
        assert_eq!(matches!(listings.answer(now, key), KeyPresence::Absent), is_absent, "{key}");
    }

    #[test]
    fn only_what_is_not_listed_is_answered() {
        let now = Instant::now();
        let listings = listed(now);
        for (key, is_absent) in [
            ("a/1", false),
            ("a/1/", true),
            ("a/2", true),
            ("a/2/", false),
            ("a/3", true),
            ("a/3/", true),
            ("a/2/x", false),
            ("b", false),
            ("a", false),
        ] {
            check(&listings, now, key, is_absent);
        }
    }

    #[test]
    fn nothing_is_listed_or_answered_where_we_do_not_store_one_file_after_the_other() {
        let (now, listings) = (Instant::now(), Listings::default());
        for _ in 0..9 {
            assert_eq!(listings.looked(now, "a/1", LOOK), None);
        }
        listings.stored(now, "a/1");
        let later = now + FOLLOWS + MOMENT;
        listings.stored(later, "a/2");
        assert_eq!(listings.looked(later, "a/3", LOOK), None);
        let listings = listed(now);
        listings.keep(later, "a/", page(Some(&[])));
        check(&listings, later, "a/3", false);
    }

    #[test]
    fn keys_that_stores_may_list_in_another_spelling_are_not_answered() {
        let now = Instant::now();
        let listings = listed(now);
        for key in ["a/x+y", "a/x%20y", "a/x\u{1}y"] {
            check(&listings, now, key, false);
        }
        check(&listings, now, "a/größe 5", true);
    }

    #[test]
    fn the_root_is_a_directory_too() {
        let (now, listings) = (Instant::now(), Listings::default());
        listings.stored(now, "v");
        listings.stored(now, "w");
        assert_eq!(listings.looked(now, "y", LOOK), Some(""));
        listings.keep(now, "", page(Some(&["x"])));
        check(&listings, now, "y", true);
        check(&listings, now, "x", false);
    }

    #[test]
    fn a_listing_is_believed_for_a_moment_after_it_was_asked_for() {
        let now = Instant::now();
        let listings = filled_on(listed(now), now + BELIEVED);
        check(&listings, now + BELIEVED, "a/3", true);
        check(&listings, now + BELIEVED + MOMENT, "a/3", false);
    }

    #[test]
    fn what_we_made_since_is_there() {
        let now = Instant::now();
        let listings = listed(now);
        listings.stored(now, "a/3");
        check(&listings, now, "a/3", false);
        check(&listings, now, "a/3/", true);
        listings.note_there("a/4/deep/file");
        check(&listings, now, "a/4/", false);
        check(&listings, now, "a/4", true);
        check(&listings, now, "a/5", true);
    }

    #[test]
    fn the_next_one_is_asked_for_before_the_last_one_is_too_old() {
        let now = Instant::now();
        let listings = filled_on(listed(now), now + ASKED_AGAIN_AFTER);
        assert_eq!(listings.looked(now + ASKED_AGAIN_AFTER.saturating_sub(MOMENT), "a/5", None), None);
        let later = now + ASKED_AGAIN_AFTER;
        assert_eq!(listings.looked(later, "a/6", None), Some("a/"));
        // It is on its way, and the last one still answers.
        listings.keep(later, "a/", futures::future::pending().boxed().shared());
        check(&listings, later, "a/7", true);
        assert_eq!(listings.looked(later, "a/7", None), None);
        let listings = filled_on(listings, now + BELIEVED);
        assert!(matches!(listings.answer(now + BELIEVED + MOMENT, "a/7"), KeyPresence::Coming(_)));
    }

    /// How many looks pass until the directory is listed again.
    fn patience(listings: &Listings, now: Instant) -> u32 {
        (0..9999).find(|_| listings.looked(now, "a/5", None).is_some()).unwrap()
    }

    #[test]
    fn a_listing_that_answered_nothing_is_not_repeated_soon() {
        let now = Instant::now();
        let later = now + BELIEVED + MOMENT;
        assert_eq!(patience(&filled_on(listed(now), later), later), LOOKS_AFTER_A_WASTE);
    }

    #[test]
    fn a_listing_that_costs_more_than_it_saves_is_not_repeated_for_long() {
        let now = Instant::now();
        let later = now + BELIEVED + MOMENT;
        for (count, expected) in [(100, 0), (500, LOOKS_AFTER_A_LONG_ONE)] {
            let listings = filled(now);
            let names: Vec<String> = (0..count).map(|it| format!("a/name-{it}")).collect();
            listings.keep(now, "a/", page(Some(&names.iter().map(String::as_str).collect::<Vec<_>>())));
            // Two looks of the file system, which the server would take 20 ms for.
            for key in ["a/3", "a/3/", "a/4", "a/4/"] {
                check(&listings, now, key, true);
            }
            assert_eq!(patience(&filled_on(listings, later), later), expected, "{count} names");
        }
    }

    #[test]
    fn a_directory_that_is_too_long_is_left_alone() {
        let now = Instant::now();
        let listings = filled(now);
        listings.keep(now, "a/", page(None));
        check(&listings, now, "a/3", false);
        assert_eq!(patience(&listings, now), LOOKS_AFTER_A_LONG_ONE);
    }

    #[test]
    fn an_explicit_listing_discards_cached_pages() {
        let now = Instant::now();
        let listings = listed(now);
        listings.forget("a/");
        check(&listings, now, "a/3", false);
    }

    #[test]
    fn directories_do_not_pile_up() {
        let (now, listings) = (Instant::now(), Listings::default());
        for number in 0..1000 {
            listings.stored(now, &format!("{number}/file"));
        }
        assert_eq!(listings.lock().directories.len(), MOST_DIRECTORIES);
    }
}
