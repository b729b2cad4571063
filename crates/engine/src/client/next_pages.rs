//! The next page of a listing, requested while the file system works on the page before it.
//!
//! A directory with many names takes a request for each thousand. Who reads one page nearly always reads the next, and making
//! entries of a page takes about as long as a request.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::first_pages::FirstPage;

/// From the request on: for as long as others' changes may stay unseen anyway.
const BELIEVED: Duration = Duration::from_millis(100);
/// They bound the memory.
const MOST_PAGES: usize = 4;

#[derive(Default)]
pub struct NextPages {
    requested: Mutex<VecDeque<NextPage>>,
}

struct NextPage {
    prefix: String,
    token: String,
    /// All keys of the page come after this one.
    after: String,
    requested: Instant,
    page: FirstPage,
}

impl NextPages {
    /// The page that this token stands for, if it was requested a moment ago.
    pub fn take(&self, now: Instant, prefix: &str, token: &str) -> Option<FirstPage> {
        let mut requested = self.requested.lock();
        let at = requested.iter().position(|it| it.prefix == prefix && it.token == token)?;
        let next = requested.remove(at)?;
        (now.saturating_duration_since(next.requested) <= BELIEVED).then_some(next.page)
    }

    pub fn keep(&self, now: Instant, prefix: &str, token: &str, after: String, page: FirstPage) {
        let mut requested = self.requested.lock();
        if requested.len() == MOST_PAGES {
            requested.pop_front();
        }
        let (prefix, token) = (prefix.to_owned(), token.to_owned());
        requested.push_back(NextPage { prefix, token, after, requested: now, page });
    }

    /// An object was changed by us: a page that may say something else is dropped.
    pub fn forget(&self, key: &str) {
        self.requested.lock().retain(|it| !key.starts_with(it.prefix.as_str()) || key <= it.after.as_str());
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    /// The page after `a/m` was requested.
    fn requested(now: Instant) -> NextPages {
        let pages = NextPages::default();
        pages.keep(now, "a/", "token", "a/m".to_owned(), futures::future::ready(None).boxed().shared());
        pages
    }

    #[test]
    fn a_page_is_used_once_for_its_token_and_for_a_moment() {
        let now = Instant::now();
        let pages = requested(now);
        assert!(pages.take(now, "a/", "other").is_none() && pages.take(now, "b/", "token").is_none());
        assert!(pages.take(now + BELIEVED, "a/", "token").is_some());
        assert!(pages.take(now, "a/", "token").is_none());
        assert!(requested(now).take(now + BELIEVED + Duration::from_millis(1), "a/", "token").is_none());
    }

    #[test]
    fn a_change_of_ours_drops_the_page_that_its_key_may_be_in() {
        let now = Instant::now();
        for (key, is_kept) in [("a/n", false), ("a/n/deep", false), ("a/m", true), ("a/b", true), ("b", true)] {
            let pages = requested(now);
            pages.forget(key);
            assert_eq!(pages.take(now, "a/", "token").is_some(), is_kept, "{key}");
        }
    }

    #[test]
    fn pages_do_not_pile_up() {
        let now = Instant::now();
        let pages = requested(now);
        for number in 0..100 {
            let page = futures::future::ready(None).boxed().shared();
            pages.keep(now, &format!("{number}/"), "token", String::new(), page);
        }
        assert_eq!(pages.requested.lock().len(), MOST_PAGES);
    }
}
