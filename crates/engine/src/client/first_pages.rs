//! The first page of a directory's listing, requested while the directory is looked up.
//!
//! find(1), du(1) and rm(1) look the directories of a tree up, one after the other, and list each right after: a request for an
//! object of that name, one for any name in the directory, and one for its names. Where the directories beneath one parent are
//! listed one after the other, the lookup asks for the first page of names instead: it says whether there is a directory, which
//! hides an object of the same name, and waits for the listing that follows. If none follows soon, pages are not requested for a
//! while.
//!
//! These programs take the directories in the order in which the parent's listing names them. The pages of the next ones are
//! therefore requested at the same time, as many as will be used while they may be believed.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures::future::{BoxFuture, Shared};
use mountpoint_s3_client::types::{ListObjectsResult, ObjectInfo};
use parking_lot::Mutex;

use super::values;

/// As many names as the file system asks for at once.
pub const PAGE: usize = 1000;

/// From when it was received on: for as long as others' changes may stay unseen anyway.
const BELIEVED: Duration = Duration::from_millis(100);
/// Directories with a longer pause between them are not listed one after the other.
const FOLLOWS: Duration = Duration::from_secs(1);
/// So many must have been listed one after the other.
const LISTED_TO_EXPECT_MORE: i32 = 2;
/// After an unused page, so many listings must follow until the next one is requested with a lookup.
const COST_OF_A_WASTE: i32 = 8;
/// They bound the memory.
const MOST_PAGES: usize = 16;
const MOST_PARENTS: usize = 64;
const MOST_ORDERS: usize = 16;
/// More at once make neither stores nor programs faster by much.
const MOST_AHEAD: u128 = 4;
/// Pages that are requested ahead should be used within this time: half of what they may be believed for, since programs do not
/// always need equally long.
const USED_WITHIN: Duration = Duration::from_millis(50);

/// None if the request failed, or if the page alone does not tell enough.
pub type FirstPage = Shared<BoxFuture<'static, Option<Arc<ReceivedPage>>>>;

pub struct ReceivedPage {
    pub page: ListObjectsResult,
    /// The object whose key is that of the directory itself. Listings do not contain it.
    pub marker: Option<ObjectInfo>,
    pub received: Instant,
}

#[derive(Default)]
pub struct FirstPages {
    seen: Mutex<Seen>,
    /// How many changes of ours were noted.
    changes: AtomicU64,
}

#[derive(Default)]
struct Seen {
    parents: HashMap<String, Parent>,
    /// The directories in a directory, in the order of its listing. The latest is the last one.
    orders: VecDeque<(String, Vec<String>)>,
    pages: VecDeque<RequestedPage>,
}

/// How the directories beneath one are used.
struct Parent {
    /// Listed one after the other; negative after an unused page.
    listed: i32,
    last: Instant,
    /// The directory that was listed last, and how long it takes from one to the next on average.
    directory: String,
    pace: Duration,
}

struct RequestedPage {
    directory: String,
    requested: Instant,
    /// Before its directory was looked up.
    is_ahead: bool,
    is_used: bool,
    page: FirstPage,
}

/// Who has requested a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    Lookup,
    Ahead,
    Listing,
}

impl ReceivedPage {
    /// Whether any key begins with the directory's, if only its own marker.
    pub fn is_directory(&self) -> bool {
        self.marker.is_some() || !self.page.objects.is_empty() || !self.page.common_prefixes.is_empty()
    }

    /// The answer to the request for one name.
    pub fn one_name(&self) -> ListObjectsResult {
        let mut found = values::nothing_listed();
        found.common_prefixes.extend(self.page.common_prefixes.first().cloned());
        if found.common_prefixes.is_empty() {
            found.objects.extend(self.marker.iter().chain(&self.page.objects).next().cloned());
        }
        found
    }

    pub fn whole(&self) -> ListObjectsResult {
        copy(&self.page)
    }
}

/// The library's type cannot be cloned.
pub fn copy(page: &ListObjectsResult) -> ListObjectsResult {
    let mut found = values::nothing_listed();
    found.objects.clone_from(&page.objects);
    found.common_prefixes.clone_from(&page.common_prefixes);
    found.next_continuation_token.clone_from(&page.next_continuation_token);
    found
}

impl FirstPages {
    /// The page that the lookup of a directory waits for, if the directory will probably be listed right after. `directory` ends
    /// with a slash.
    pub fn page(&self, now: Instant, directory: &str, request: impl Fn(&str) -> FirstPage) -> Option<FirstPage> {
        self.seen.lock().page(now, directory, request)
    }

    /// Notes in which order a listing names directories. Programs will take them in this order.
    pub fn note_order(&self, parent: &str, directories: &[String]) {
        let orders = &mut self.seen.lock().orders;
        orders.retain(|(name, _)| name != parent);
        if directories.is_empty() {
            return;
        }
        if orders.len() == MOST_ORDERS {
            orders.pop_front();
        }
        orders.push_back((parent.to_owned(), directories.to_vec()));
    }

    /// Notes that a directory is listed, and finds what its lookup, or a listing a moment ago, has requested: rm(1) lists a directory
    /// twice. The pages of the next directories are requested: the kernel may know them from their parent's listing, and then looks
    /// none of them up.
    pub fn listed(&self, now: Instant, directory: &str, request: impl Fn(&str) -> FirstPage) -> Option<FirstPage> {
        self.seen.lock().listed(now, directory, request)
    }

    pub fn changes(&self) -> u64 {
        self.changes.load(Ordering::SeqCst)
    }

    /// Keeps the page of a listing that no lookup has requested, unless we changed something since: it may not know of that.
    pub fn keep(&self, now: Instant, directory: &str, page: FirstPage, changes: u64) {
        let mut seen = self.seen.lock();
        if self.changes() != changes {
            return;
        }
        seen.drop_unused(now);
        seen.pages.retain(|it| it.directory != directory);
        seen.add(now, directory, page, Origin::Listing);
    }

    /// An object was changed by us: pages that may say something else are dropped.
    pub fn forget(&self, key: &str) {
        // First: a page that is kept afterwards is dropped below.
        self.changes.fetch_add(1, Ordering::SeqCst);
        let mut seen = self.seen.lock();
        if !seen.pages.is_empty() {
            seen.pages.retain(|it| !key.starts_with(it.directory.as_str()));
        }
    }
}

impl Seen {
    fn page(&mut self, now: Instant, directory: &str, request: impl Fn(&str) -> FirstPage) -> Option<FirstPage> {
        self.parents.get(parent(directory)).filter(|it| it.expects_more(now))?;
        self.drop_unused(now);
        // A lookup asks twice: for a file and for a directory of the name.
        let page = match self.pages.iter().find(|it| it.directory == directory) {
            Some(known) if !known.is_old(now) => known.page.clone(),
            known => {
                if known.is_some_and(|it| it.is_ahead)
                    && let Some(parent) = self.parents.get_mut(parent(directory))
                {
                    // It came too early.
                    parent.pace = parent.pace.max(USED_WITHIN);
                }
                self.pages.retain(|it| it.directory != directory);
                let page = request(directory);
                self.add(now, directory, page.clone(), Origin::Lookup);
                page
            }
        };
        self.request_ahead(now, directory, request);
        Some(page)
    }

    fn listed(&mut self, now: Instant, directory: &str, request: impl Fn(&str) -> FirstPage) -> Option<FirstPage> {
        self.note_listed(now, directory);
        let page = self.pages.iter_mut().find(|it| it.directory == directory).and_then(|requested| {
            requested.is_used = true;
            (!requested.is_old(now)).then(|| requested.page.clone())
        });
        if !self.parents.get(parent(directory)).is_some_and(|it| it.expects_more(now)) {
            return page;
        }
        self.drop_unused(now);
        self.request_ahead(now, directory, request);
        page
    }

    fn request_ahead(&mut self, now: Instant, directory: &str, request: impl Fn(&str) -> FirstPage) {
        for next in self.next(directory) {
            let page = request(&next);
            self.add(now, &next, page, Origin::Ahead);
        }
    }

    fn add(&mut self, now: Instant, directory: &str, page: FirstPage, origin: Origin) {
        let (is_ahead, is_used) = (origin == Origin::Ahead, origin == Origin::Listing);
        let directory = directory.to_owned();
        self.pages.push_back(RequestedPage { directory, requested: now, is_ahead, is_used, page });
    }

    /// The directories that will be listed after this one, and were not requested.
    fn next(&self, directory: &str) -> Vec<String> {
        let Some(pace) = self.parents.get(parent(directory)).map(|it| it.pace) else { return Vec::new() };
        let count = (USED_WITHIN.as_micros() / pace.as_micros().max(1)).min(MOST_AHEAD);
        let order = self.orders.iter().find(|(name, _)| name == parent(directory)).map_or(&[][..], |(_, order)| order);
        let Some(at) = order.iter().position(|it| it == directory) else { return Vec::new() };
        let next = order[at + 1..].iter().take(usize::try_from(count).unwrap_or_default());
        next.filter(|it| self.pages.iter().all(|page| page.directory != **it)).cloned().collect()
    }

    fn note_listed(&mut self, now: Instant, directory: &str) {
        let name = parent(directory);
        if !self.parents.contains_key(name) && MOST_PARENTS <= self.parents.len() {
            let oldest = self.parents.iter().min_by_key(|(_, it)| it.last).map(|(name, _)| name.clone());
            self.parents.remove(&oldest.unwrap_or_default());
        }
        let new = || Parent { listed: 0, last: now, directory: String::new(), pace: FOLLOWS };
        let parent = self.parents.entry(name.to_owned()).or_insert_with(new);
        if parent.directory == directory && 0 < parent.listed {
            // Once more.
            return;
        }
        let took = now.saturating_duration_since(parent.last);
        let follows = took <= FOLLOWS;
        parent.pace = if parent.listed == 1 { took.min(FOLLOWS) } else { (parent.pace * 3 + took.min(FOLLOWS)) / 4 };
        parent.listed = if follows || parent.listed < 0 { LISTED_TO_EXPECT_MORE.min(parent.listed + 1) } else { 1 };
        parent.last = now;
        directory.clone_into(&mut parent.directory);
    }

    fn drop_unused(&mut self, now: Instant) {
        while self.pages.front().is_some_and(|it| FOLLOWS < now.saturating_duration_since(it.requested))
            || MOST_PAGES <= self.pages.len()
        {
            let Some(page) = self.pages.pop_front() else { return };
            if !page.is_used
                && let Some(parent) = self.parents.get_mut(parent(&page.directory))
            {
                parent.listed = LISTED_TO_EXPECT_MORE - COST_OF_A_WASTE;
            }
        }
    }
}

impl Parent {
    fn expects_more(&self, now: Instant) -> bool {
        LISTED_TO_EXPECT_MORE <= self.listed && now.saturating_duration_since(self.last) <= FOLLOWS
    }
}

impl RequestedPage {
    fn is_old(&self, now: Instant) -> bool {
        let received = self.page.peek().and_then(Option::as_ref).map(|it| it.received);
        // What was requested ahead is as old as its request, like what is not there yet.
        let since = received.filter(|_| !self.is_ahead).unwrap_or(self.requested);
        BELIEVED < now.saturating_duration_since(since)
    }
}

/// The directory in which this one is.
fn parent(directory: &str) -> &str {
    let name = directory.trim_end_matches('/');
    name.rfind('/').map_or("", |it| &name[..=it])
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    fn received(at: Instant, prefixes: &[&str]) -> FirstPage {
        let mut page = values::nothing_listed();
        page.common_prefixes.extend(prefixes.iter().map(|it| (*it).to_owned()));
        let page = ReceivedPage { page, marker: None, received: at };
        let page = futures::future::ready(Some(Arc::new(page))).boxed().shared();
        assert!(page.clone().now_or_never().is_some());
        page
    }

    fn listed(pages: &FirstPages, now: Instant, directory: &str) -> Option<FirstPage> {
        pages.listed(now, directory, |_| received(now, &[]))
    }

    /// `a/1/` and `a/2/` were just listed.
    fn used(now: Instant) -> FirstPages {
        let pages = FirstPages::default();
        for directory in ["a/1/", "a/2/"] {
            assert!(pages.page(now, directory, |_| received(now, &[])).is_none());
            assert!(listed(&pages, now, directory).is_none());
        }
        pages
    }

    #[test]
    fn a_listing_is_expected_where_directories_are_listed_one_after_the_other() {
        let now = Instant::now();
        let pages = used(now);
        let request = |directory, at| pages.page(at, directory, |_| received(at, &["a/3/x/"])).is_some();
        assert!(request("a/3/", now));
        assert!(!request("b/3/", now));
        assert!(!request("a/3/x/", now));
        assert!(!request("a/4/", now + FOLLOWS + Duration::from_millis(1)));
    }

    #[test]
    fn a_page_answers_its_lookup_and_the_listings_of_a_moment() {
        let now = Instant::now();
        let pages = used(now);
        for _ in 0..2 {
            let page = pages.page(now, "a/3/", |_| received(now, &["a/3/x/", "a/3/y/"])).unwrap();
            let page = page.now_or_never().unwrap().unwrap();
            assert_eq!(page.one_name().common_prefixes, ["a/3/x/"]);
        }
        for _ in 0..2 {
            let listed = listed(&pages, now, "a/3/").unwrap().now_or_never().unwrap().unwrap();
            assert_eq!(listed.whole().common_prefixes, ["a/3/x/", "a/3/y/"]);
        }
        assert!(listed(&pages, now + BELIEVED + Duration::from_millis(1), "a/3/").is_none());
        let changes = pages.changes();
        pages.keep(now, "b/1/", received(now, &[]), changes);
        assert!(listed(&pages, now, "b/1/").is_some());
        pages.forget("b/1/file");
        assert!(listed(&pages, now, "b/1/").is_none());
        // It was requested before the change.
        pages.keep(now, "b/1/", received(now, &[]), changes);
        assert!(listed(&pages, now, "b/1/").is_none());
    }

    #[test]
    fn a_page_is_not_believed_for_long_nor_after_a_change_of_ours() {
        let now = Instant::now();
        let pages = used(now);
        let request = || drop(pages.page(now, "a/3/", |_| received(now, &["a/3/x/"])).unwrap());
        request();
        assert!(listed(&pages, now + BELIEVED + Duration::from_millis(1), "a/3/").is_none());
        request();
        pages.forget("a/30");
        pages.forget("a/3/x/file");
        assert!(listed(&pages, now, "a/3/").is_none());
        request();
        pages.forget("a/30");
        assert!(listed(&pages, now, "a/3/").is_some());
    }

    #[test]
    fn an_unused_page_suspends_requests() {
        let now = Instant::now();
        let pages = used(now);
        let later = now + FOLLOWS;
        assert!(pages.page(now, "a/3/", |_| received(now, &["a/3/x/"])).is_some());
        let after = later + Duration::from_millis(1);
        listed(&pages, later, "a/4/");
        assert!(pages.page(after, "a/5/", |_| received(after, &[])).is_some());
        let mut listings = 0;
        while pages.page(after, "a/6/", |_| received(after, &[])).is_none() {
            listed(&pages, after, &format!("a/7-{listings}/"));
            listings += 1;
        }
        assert_eq!(listings, COST_OF_A_WASTE);
    }

    /// `a/1/` and `a/2/` were listed one after the other, at this pace, and `a/` has eight directories.
    fn paced(now: Instant, pace: Duration) -> FirstPages {
        let pages = FirstPages::default();
        let names: Vec<String> = (1..9).map(|it| format!("a/{it}/")).collect();
        pages.note_order("a/", &names);
        let mut seen = pages.seen.lock();
        seen.note_listed(now.checked_sub(pace).unwrap(), "a/1/");
        seen.note_listed(now, "a/2/");
        drop(seen);
        pages
    }

    /// What is requested when the directory is looked up.
    fn requested(pages: &FirstPages, now: Instant, directory: &str) -> Vec<String> {
        let requested = Mutex::new(Vec::new());
        pages.page(now, directory, |it| {
            requested.lock().push(it.to_owned());
            received(now, &[])
        });
        requested.into_inner()
    }

    #[test]
    fn the_next_directories_are_requested_ahead_as_many_as_are_used_in_time() {
        let now = Instant::now();
        let pages = paced(now, Duration::from_millis(5));
        assert_eq!(requested(&pages, now, "a/3/"), ["a/3/", "a/4/", "a/5/", "a/6/", "a/7/"]);
        assert_eq!(requested(&pages, now, "a/4/"), ["a/8/"]);
        assert!(listed(&pages, now, "a/4/").is_some());
        assert_eq!(requested(&paced(now, Duration::from_millis(20)), now, "a/3/"), ["a/3/", "a/4/", "a/5/"]);
        assert_eq!(requested(&paced(now, Duration::from_millis(200)), now, "a/3/"), ["a/3/"]);
        assert_eq!(requested(&paced(now, Duration::from_millis(5)), now, "a/x/"), ["a/x/"]);
    }

    #[test]
    fn the_next_directories_are_requested_ahead_without_lookups_too() {
        let now = Instant::now();
        let pages = paced(now, Duration::from_millis(5));
        let requested = Mutex::new(Vec::new());
        for (directory, is_known) in [("a/3/", false), ("a/4/", true)] {
            let page = pages.listed(now, directory, |it| {
                requested.lock().push(it.to_owned());
                received(now, &[])
            });
            assert_eq!(page.is_some(), is_known, "{directory}");
        }
        assert_eq!(requested.into_inner(), ["a/4/", "a/5/", "a/6/", "a/7/", "a/8/"]);
    }

    #[test]
    fn a_page_that_came_too_early_is_requested_again_and_fewer_are_requested_ahead() {
        let now = Instant::now();
        let pages = paced(now, Duration::from_millis(5));
        requested(&pages, now, "a/3/");
        let later = now + BELIEVED + Duration::from_millis(1);
        assert_eq!(requested(&pages, later, "a/4/"), ["a/4/"]);
        assert_eq!(requested(&pages, later, "a/7/"), ["a/7/", "a/8/"]);
    }

    #[test]
    fn neither_pages_nor_parents_pile_up() {
        let now = Instant::now();
        let pages = used(now);
        for number in 0..1000 {
            pages.page(now, &format!("a/{number}/"), |_| received(now, &[]));
            listed(&pages, now, &format!("{number}/x/"));
            pages.note_order(&format!("{number}/"), &[format!("{number}/x/")]);
        }
        let seen = pages.seen.into_inner();
        assert!(seen.pages.len() <= MOST_PAGES && seen.parents.len() == MOST_PARENTS);
        assert_eq!(seen.orders.len(), MOST_ORDERS);
    }
}
