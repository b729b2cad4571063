//! Which names of a directory are directories, for many small files of it that are read.
//!
//! A directory hides an object of the same name, so each lookup asks for a name in such a directory, too: with many stores that is
//! the most expensive request of a small file. Where small files of a directory are read one after the other, its directories are
//! listed once a second instead. A name that was not among them is not searched for if its object was found. A missing object is
//! always searched for as a directory, so new directories are seen as soon as ever.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::channel::oneshot;
use futures::future::{BoxFuture, FutureExt as _, Shared};
use parking_lot::Mutex;

/// Only a directory that others make where an object has the same name is seen so late.
const BELIEVED: Duration = Duration::from_secs(1);
/// The request for a name in a directory costs a store as much as so many names of a listing; versitygw was measured with 47.
const NAMES_PER_LOOK: usize = 40;
/// Lookups of one directory in a second, for a first listing of unknown length.
const FIRST_LOOKS: usize = 16;
/// They bound the memory.
const MOST_DIRECTORIES: usize = 16;

/// None if it could not be listed.
pub type Siblings = Shared<BoxFuture<'static, Option<Arc<ListedSiblings>>>>;

/// The first page of a directory's listing, as far as it matters here.
pub struct ListedSiblings {
    /// Keys with a slash at the end.
    pub directories: HashSet<String>,
    pub names: usize,
    /// The last key of the page, if there are more.
    pub last: Option<String>,
}

/// Whether the object of a name was found.
pub type Found = Shared<BoxFuture<'static, bool>>;

#[derive(Default)]
pub struct SiblingDirectories {
    listed: Mutex<HashMap<String, Directory>>,
    /// Lookups of objects that have not been answered, by key.
    looking: Mutex<HashMap<String, Found>>,
}

struct Directory {
    since: Instant,
    looks: usize,
    /// How many names the last listing had.
    names: Option<usize>,
    siblings: Option<Siblings>,
}

/// Tells others what was found; dropped without that, that nothing was.
pub struct ObjectLook<'a> {
    all: &'a SiblingDirectories,
    key: String,
    found: Option<oneshot::Sender<bool>>,
}

impl SiblingDirectories {
    /// Notes that an object is looked up.
    pub fn look(&self, key: &str) -> ObjectLook<'_> {
        let (found, answer) = oneshot::channel();
        let answer = answer.map(|it| it.unwrap_or(false)).boxed().shared();
        self.looking.lock().insert(key.to_owned(), answer);
        ObjectLook { all: self, key: key.to_owned(), found: Some(found) }
    }

    /// The lookup of the object whose name a directory might have, if a listing says that there is none. Otherwise `list` may be
    /// called to request one.
    pub fn object(&self, now: Instant, directory: &str, list: impl FnOnce(&str) -> Siblings) -> Option<Found> {
        let key = directory.strip_suffix('/')?;
        let parent = key.rfind('/').map_or("", |it| &key[..=it]);
        if !self.lacks(now, parent, directory, list) {
            return None;
        }
        self.looking.lock().get(key).cloned()
    }

    fn lacks(&self, now: Instant, parent: &str, directory: &str, list: impl FnOnce(&str) -> Siblings) -> bool {
        let mut listed = self.listed.lock();
        if !listed.contains_key(parent) && MOST_DIRECTORIES <= listed.len() {
            let oldest = listed.iter().min_by_key(|(_, it)| it.since).map(|(name, _)| name.clone());
            listed.remove(&oldest.unwrap_or_default());
        }
        let new = || Directory { since: now, looks: 0, names: None, siblings: None };
        let entry = listed.entry(parent.to_owned()).or_insert_with(new);
        if BELIEVED < now.saturating_duration_since(entry.since) {
            *entry = Directory { names: entry.names, ..new() };
        }
        entry.looks += 1;
        if let Some(siblings) = &entry.siblings {
            let Some(Some(siblings)) = siblings.clone().now_or_never() else { return false };
            entry.names = Some(siblings.names);
            return siblings.lack(directory);
        }
        let enough = entry.names.map_or(FIRST_LOOKS, |it| it.div_ceil(NAMES_PER_LOOK));
        if enough <= entry.looks {
            // From when it is requested on.
            entry.since = now;
            entry.siblings = Some(list(parent));
        }
        false
    }
}

impl ListedSiblings {
    fn lack(&self, directory: &str) -> bool {
        let is_listed = self.last.as_ref().is_none_or(|last| directory < last.as_str());
        is_listed && !self.directories.contains(directory)
    }
}

impl ObjectLook<'_> {
    pub fn answer(mut self, is_found: bool) {
        if let Some(found) = self.found.take() {
            // Perhaps none of the others waits.
            let _ = found.send(is_found);
        }
    }
}

impl Drop for ObjectLook<'_> {
    fn drop(&mut self) {
        self.all.looking.lock().remove(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listing(last: Option<&str>) -> Siblings {
        let directories = HashSet::from(["d/sub/".to_owned()]);
        let page = ListedSiblings { directories, names: 100, last: last.map(str::to_owned) };
        futures::future::ready(Some(Arc::new(page))).boxed().shared()
    }

    /// How many lookups it takes until a listing is requested.
    fn looks_until_listed(siblings: &SiblingDirectories, now: Instant, last: Option<&str>) -> usize {
        let mut is_listed = false;
        for looks in 1..100 {
            assert!(
                siblings
                    .object(now, "d/x/", |_| {
                        is_listed = true;
                        listing(last)
                    })
                    .is_none()
            );
            if is_listed {
                return looks;
            }
        }
        panic!("never listed");
    }

    fn found(siblings: &SiblingDirectories, now: Instant, directory: &str) -> bool {
        siblings.object(now, directory, |_| listing(None)).is_some()
    }

    #[test]
    fn a_name_that_is_no_directory_is_not_searched_for_while_its_object_is_looked_up() {
        let (siblings, now) = (SiblingDirectories::default(), Instant::now());
        assert_eq!(looks_until_listed(&siblings, now, None), FIRST_LOOKS);
        assert!(!found(&siblings, now, "d/x/"), "nothing is looked up");
        let look = siblings.look("d/x");
        let other = siblings.look("d/sub");
        let waiting = siblings.object(now, "d/x/", |_| listing(None)).unwrap();
        assert!(!found(&siblings, now, "d/sub/"), "it is a directory");
        look.answer(true);
        assert_eq!(waiting.now_or_never(), Some(true));
        drop(other);
        assert!(siblings.looking.lock().is_empty());
    }

    #[test]
    fn a_lookup_that_is_given_up_has_found_nothing() {
        let (siblings, now) = (SiblingDirectories::default(), Instant::now());
        looks_until_listed(&siblings, now, None);
        let look = siblings.look("d/x");
        let waiting = siblings.object(now, "d/x/", |_| listing(None)).unwrap();
        drop(look);
        assert_eq!(waiting.now_or_never(), Some(false));
    }

    #[test]
    fn a_listing_is_believed_for_a_second_and_repeated_if_it_pays() {
        let (siblings, now) = (SiblingDirectories::default(), Instant::now());
        looks_until_listed(&siblings, now, None);
        let _look = siblings.look("d/x");
        assert!(found(&siblings, now + BELIEVED, "d/x/"));
        let later = now + BELIEVED + Duration::from_millis(1);
        // A hundred names are worth three lookups.
        assert_eq!(looks_until_listed(&siblings, later, None), 3);
    }

    #[test]
    fn names_beyond_the_page_are_searched_for() {
        let (siblings, now) = (SiblingDirectories::default(), Instant::now());
        looks_until_listed(&siblings, now, Some("d/m"));
        let _looks = ["d/a", "d/z"].map(|it| siblings.look(it));
        assert!(found(&siblings, now, "d/a/"));
        assert!(!found(&siblings, now, "d/z/"));
    }
}
