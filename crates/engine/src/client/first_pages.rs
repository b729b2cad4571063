//! The first page of a directory's listing, requested while the directory is looked up.
//!
//! find(1), du(1) and rm(1) look the directories of a tree up, one after the other, and list each right after: a request for an
//! object of that name, one for any name in the directory, and one for its names. Where the directories beneath one parent are
//! listed one after the other, the lookup asks for the first page of names instead: it says whether there is a directory, which
//! hides an object of the same name, and waits for the listing that follows. If none follows soon, pages are not requested for a
//! while.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
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
}

#[derive(Default)]
struct Seen {
    parents: HashMap<String, Parent>,
    pages: VecDeque<RequestedPage>,
}

/// How the directories beneath one are used.
struct Parent {
    /// Listed one after the other; negative after an unused page.
    listed: i32,
    last: Instant,
}

struct RequestedPage {
    directory: String,
    requested: Instant,
    page: FirstPage,
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
        let mut found = values::nothing_listed();
        found.objects.clone_from(&self.page.objects);
        found.common_prefixes.clone_from(&self.page.common_prefixes);
        found.next_continuation_token.clone_from(&self.page.next_continuation_token);
        found
    }
}

impl FirstPages {
    /// The page that the lookup of a directory waits for, if the directory will probably be listed right after. `directory` ends
    /// with a slash.
    pub fn page(&self, now: Instant, directory: &str, request: impl FnOnce() -> FirstPage) -> Option<FirstPage> {
        let mut seen = self.seen.lock();
        let is_expected = seen
            .parents
            .get(parent(directory))
            .is_some_and(|it| LISTED_TO_EXPECT_MORE <= it.listed && now.saturating_duration_since(it.last) <= FOLLOWS);
        if !is_expected {
            return None;
        }
        seen.drop_unused(now);
        // A lookup asks twice: for a file and for a directory of the name.
        if let Some(known) = seen.pages.iter().find(|it| it.directory == directory && !it.is_old(now)) {
            return Some(known.page.clone());
        }
        seen.pages.retain(|it| it.directory != directory);
        let page = request();
        seen.pages.push_back(RequestedPage { directory: directory.to_owned(), requested: now, page: page.clone() });
        Some(page)
    }

    /// Notes that a directory is listed, and finds what its lookup has requested.
    pub fn listed(&self, now: Instant, directory: &str) -> Option<FirstPage> {
        let mut seen = self.seen.lock();
        seen.note_listed(now, parent(directory));
        let found = seen.pages.iter().position(|it| it.directory == directory)?;
        let requested = seen.pages.remove(found)?;
        (!requested.is_old(now)).then_some(requested.page)
    }

    /// An object was changed by us: pages that may say something else are dropped.
    pub fn forget(&self, key: &str) {
        let mut seen = self.seen.lock();
        if !seen.pages.is_empty() {
            seen.pages.retain(|it| !key.starts_with(it.directory.as_str()));
        }
    }
}

impl Seen {
    fn note_listed(&mut self, now: Instant, parent: &str) {
        if !self.parents.contains_key(parent) && MOST_PARENTS <= self.parents.len() {
            let oldest = self.parents.iter().min_by_key(|(_, it)| it.last).map(|(name, _)| name.clone());
            self.parents.remove(&oldest.unwrap_or_default());
        }
        let parent = self.parents.entry(parent.to_owned()).or_insert(Parent { listed: 0, last: now });
        let follows = now.saturating_duration_since(parent.last) <= FOLLOWS;
        parent.listed = if follows || parent.listed < 0 { LISTED_TO_EXPECT_MORE.min(parent.listed + 1) } else { 1 };
        parent.last = now;
    }

    fn drop_unused(&mut self, now: Instant) {
        while self.pages.front().is_some_and(|it| FOLLOWS < now.saturating_duration_since(it.requested))
            || MOST_PAGES <= self.pages.len()
        {
            let Some(unused) = self.pages.pop_front() else { return };
            if let Some(parent) = self.parents.get_mut(parent(&unused.directory)) {
                parent.listed = LISTED_TO_EXPECT_MORE - COST_OF_A_WASTE;
            }
        }
    }
}

impl RequestedPage {
    fn is_old(&self, now: Instant) -> bool {
        let received = self.page.peek().and_then(Option::as_ref).map(|it| it.received);
        received.is_some_and(|it| BELIEVED < now.saturating_duration_since(it))
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

    /// `a/1/` and `a/2/` were just listed.
    fn used(now: Instant) -> FirstPages {
        let pages = FirstPages::default();
        for directory in ["a/1/", "a/2/"] {
            assert!(pages.page(now, directory, || received(now, &[])).is_none());
            assert!(pages.listed(now, directory).is_none());
        }
        pages
    }

    #[test]
    fn a_listing_is_expected_where_directories_are_listed_one_after_the_other() {
        let now = Instant::now();
        let pages = used(now);
        let request = |directory, at| pages.page(at, directory, || received(at, &["a/3/x/"])).is_some();
        assert!(request("a/3/", now));
        assert!(!request("b/3/", now));
        assert!(!request("a/3/x/", now));
        assert!(!request("a/4/", now + FOLLOWS + Duration::from_millis(1)));
    }

    #[test]
    fn a_page_answers_its_lookup_and_one_listing() {
        let now = Instant::now();
        let pages = used(now);
        for _ in 0..2 {
            let page = pages.page(now, "a/3/", || received(now, &["a/3/x/", "a/3/y/"])).unwrap();
            let page = page.now_or_never().unwrap().unwrap();
            assert_eq!(page.one_name().common_prefixes, ["a/3/x/"]);
        }
        let listed = pages.listed(now, "a/3/").unwrap().now_or_never().unwrap().unwrap();
        assert_eq!(listed.whole().common_prefixes, ["a/3/x/", "a/3/y/"]);
        assert!(pages.listed(now, "a/3/").is_none());
    }

    #[test]
    fn a_page_is_not_believed_for_long_nor_after_a_change_of_ours() {
        let now = Instant::now();
        let pages = used(now);
        let request = || drop(pages.page(now, "a/3/", || received(now, &["a/3/x/"])).unwrap());
        request();
        assert!(pages.listed(now + BELIEVED + Duration::from_millis(1), "a/3/").is_none());
        request();
        pages.forget("a/30");
        pages.forget("a/3/x/file");
        assert!(pages.listed(now, "a/3/").is_none());
        request();
        pages.forget("a/30");
        assert!(pages.listed(now, "a/3/").is_some());
    }

    #[test]
    fn an_unused_page_suspends_requests() {
        let now = Instant::now();
        let pages = used(now);
        let later = now + FOLLOWS;
        assert!(pages.page(now, "a/3/", || received(now, &["a/3/x/"])).is_some());
        let after = later + Duration::from_millis(1);
        pages.listed(later, "a/4/");
        assert!(pages.page(after, "a/5/", || received(after, &[])).is_some());
        let mut listings = 0;
        while pages.page(after, "a/6/", || received(after, &[])).is_none() {
            pages.listed(after, "a/7/");
            listings += 1;
        }
        assert_eq!(listings, COST_OF_A_WASTE);
    }

    #[test]
    fn neither_pages_nor_parents_pile_up() {
        let now = Instant::now();
        let pages = used(now);
        for number in 0..1000 {
            pages.page(now, &format!("a/{number}/"), || received(now, &[]));
            pages.listed(now, &format!("{number}/x/"));
        }
        let seen = pages.seen.into_inner();
        assert!(seen.pages.len() <= MOST_PAGES && seen.parents.len() == MOST_PARENTS);
    }
}
