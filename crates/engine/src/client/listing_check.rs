//! Checks pages of listings before the file system uses them. It takes them for what S3 promises: every key begins with the prefix
//! that was asked for, and pages come to an end. A store that breaks the first promise would make it panic, one that breaks the
//! second would keep a call for ever.

use std::collections::{HashSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};

use mountpoint_s3_client::types::ListObjectsResult;
use parking_lot::Mutex;

/// Listings in progress whose pages are remembered. There is at most one for each open directory.
const MOST_LISTINGS: usize = 256;

/// AWS may send pages without entries where it skips deleted ones, but not so many.
const MOST_EMPTY_PAGES: u32 = 1000;

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum EndlessListing {
    #[error("the store repeats pages of the listing")]
    Repeated,

    #[error("the store sent {MOST_EMPTY_PAGES} pages without entries and still says that there are more")]
    Empty,
}

/// Watches over the pages of all listings.
#[derive(Debug, Default)]
pub struct ListingCheck {
    listings: Mutex<VecDeque<Listing>>,
}

/// A listing in progress, found again by the token for its next page.
#[derive(Debug, Default)]
struct Listing {
    next: u64,
    tokens: HashSet<u64>,
    empty_pages: u32,
}

impl ListingCheck {
    /// Refuses a page that leads nowhere. `token` is what it was asked for with.
    pub fn check(&self, token: Option<&str>, page: &ListObjectsResult) -> Result<(), EndlessListing> {
        let mut listings = self.listings.lock();
        let known = token.map(hash).and_then(|it| listings.iter().position(|listing| listing.next == it));
        let mut listing = known.and_then(|it| listings.remove(it)).unwrap_or_default();
        let Some(next) = page.next_continuation_token.as_deref() else { return Ok(()) };
        listing.tokens.extend(token.map(hash));
        listing.next = hash(next);
        let is_empty = page.objects.is_empty() && page.common_prefixes.is_empty();
        listing.empty_pages = if is_empty { listing.empty_pages + 1 } else { 0 };
        let checked = if !listing.tokens.insert(listing.next) {
            Err(EndlessListing::Repeated)
        } else if MOST_EMPTY_PAGES <= listing.empty_pages {
            Err(EndlessListing::Empty)
        } else {
            Ok(())
        };
        if let (Err(_), Some(token)) = (&checked, token) {
            // A page that was requested in advance is requested once more, and must not be taken for the first one then.
            listing.next = hash(token);
        }
        while MOST_LISTINGS <= listings.len() {
            listings.pop_front();
        }
        listings.push_back(listing);
        checked
    }
}

/// Removes what does not belong into a page. The file system cuts the prefix off every name, and the delimiter off every common
/// prefix.
pub fn remove_foreign(prefix: &str, delimiter: &str, page: &mut ListObjectsResult) {
    let count = page.objects.len() + page.common_prefixes.len();
    page.objects.retain(|it| it.key.starts_with(prefix));
    page.common_prefixes.retain(|it| {
        let name = it.strip_prefix(prefix).and_then(|it| it.strip_suffix(delimiter));
        name.is_some_and(|it| !it.is_empty() || delimiter.is_empty())
    });
    let removed = count - page.objects.len() - page.common_prefixes.len();
    if 0 < removed {
        tracing::warn!(prefix, removed, "the store listed names that do not begin with the prefix, they are ignored");
    }
}

fn hash(token: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    token.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use time::OffsetDateTime;

    use super::*;
    use crate::client::values::{ListedObject, nothing_listed, object_info};

    fn page(keys: &[&str], prefixes: &[&str], next: Option<&str>) -> ListObjectsResult {
        let object = |key: &&str| {
            object_info(ListedObject {
                key: (*key).to_owned(),
                size: 0,
                last_modified: OffsetDateTime::UNIX_EPOCH,
                storage_class: None,
                restore_status: None,
                etag: String::new(),
            })
        };
        let mut page = nothing_listed();
        page.objects = keys.iter().map(object).collect();
        page.common_prefixes = prefixes.iter().map(|it| (*it).to_owned()).collect();
        page.next_continuation_token = next.map(str::to_owned);
        page
    }

    #[test]
    fn names_that_do_not_begin_with_the_prefix_are_ignored() {
        let mut found = page(&["a/b/c", "a/b/", "a", "x", ""], &["a/b/d/", "a/b/", "a/", "é/", "a/b/e", ""], None);
        remove_foreign("a/b/", "/", &mut found);
        assert_eq!(found.objects.iter().map(|it| it.key.as_str()).collect::<Vec<_>>(), ["a/b/c", "a/b/"]);
        assert_eq!(found.common_prefixes, ["a/b/d/"]);
    }

    /// Asks for pages until there is no more, or an error. Answers how many were accepted.
    fn follow(next: impl Fn(u32) -> ListObjectsResult) -> (u32, Result<(), EndlessListing>) {
        let check = ListingCheck::default();
        let mut token: Option<String> = None;
        for number in 0..100_000 {
            let mut page = next(number);
            remove_foreign("", "/", &mut page);
            if let Err(error) = check.check(token.as_deref(), &page) {
                return (number, Err(error));
            }
            token = page.next_continuation_token;
            if token.is_none() {
                return (number + 1, Ok(()));
            }
        }
        panic!("it never ends");
    }

    #[test]
    fn a_token_that_comes_again_ends_the_listing() {
        assert_eq!(follow(|_| page(&["a"], &[], Some("same"))), (1, Err(EndlessListing::Repeated)));
        let alternating = |number: u32| page(&["a"], &[], Some(["one", "two", "three"][number as usize % 3]));
        assert_eq!(follow(alternating), (3, Err(EndlessListing::Repeated)));
    }

    #[test]
    fn a_page_that_was_refused_is_refused_again() {
        let check = ListingCheck::default();
        let to = |next| page(&["a"], &[], Some(next));
        assert_eq!(check.check(None, &to("one")), Ok(()));
        assert_eq!(check.check(Some("one"), &to("two")), Ok(()));
        for _ in 0..3 {
            assert_eq!(check.check(Some("two"), &to("one")), Err(EndlessListing::Repeated));
        }
        // Another listing of the same directory.
        assert_eq!(check.check(None, &to("one")), Ok(()));
    }

    #[test]
    fn ever_new_tokens_without_entries_end_the_listing() {
        let empty = |number: u32| page(&[], &[], Some(&number.to_string()));
        assert_eq!(follow(empty), (MOST_EMPTY_PAGES - 1, Err(EndlessListing::Empty)));
        // A name that does not belong there is none.
        let foreign = |number: u32| page(&[], &["", "/"], Some(&number.to_string()));
        assert_eq!(follow(foreign), (MOST_EMPTY_PAGES - 1, Err(EndlessListing::Empty)));
    }

    #[test]
    fn a_long_listing_comes_to_its_end() {
        let long = |number: u32| {
            let next = number.to_string();
            let keys: &[&str] = if number.is_multiple_of(500) { &["key"] } else { &[] };
            page(keys, &[], (number < 5000).then_some(next.as_str()))
        };
        assert_eq!(follow(long), (5001, Ok(())));
    }

    #[test]
    fn abandoned_listings_do_not_pile_up() {
        let check = ListingCheck::default();
        for number in 0..10_000 {
            check.check(None, &page(&["a"], &[], Some(&number.to_string()))).unwrap();
        }
        assert_eq!(check.listings.lock().len(), MOST_LISTINGS);
    }

    proptest! {
        /// What the file system does with every page.
        #[test]
        fn names_of_a_checked_page_never_panic(prefix in "[aé/]{0,4}", names in prop::collection::vec("[aé/]{0,6}", 0..8)) {
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            let mut page = page(&names, &names, None);
            remove_foreign(&prefix, "/", &mut page);
            for name in &page.common_prefixes {
                prop_assert!(!name[prefix.len()..name.len() - 1].is_empty());
            }
            for object in &page.objects {
                let _ = &object.key[prefix.len()..];
            }
        }
    }
}
