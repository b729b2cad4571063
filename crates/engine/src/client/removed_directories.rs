//! Directories that are being removed. The file system beneath forgets a directory when the store has neither the directory nor an
//! object of its name. The store has just been asked, so it is not asked again for that.

use parking_lot::Mutex;

#[derive(Default)]
pub struct RemovedDirectories(Mutex<Vec<String>>);

/// While it exists, the file system beneath finds nothing under the directory's name.
#[must_use]
pub struct RemovedDirectory<'a> {
    directories: &'a RemovedDirectories,
    name: &'a str,
}

impl RemovedDirectories {
    /// `directory` is its key, with a slash at the end.
    pub fn note<'a>(&'a self, directory: &'a str) -> RemovedDirectory<'a> {
        let name = name(directory);
        self.0.lock().push(name.to_owned());
        RemovedDirectory { directories: self, name }
    }

    /// `key` is that of an object, or of a directory with a slash at its end.
    pub fn contains(&self, key: &str) -> bool {
        let key = name(key);
        self.0.lock().iter().any(|it| it == key)
    }
}

impl Drop for RemovedDirectory<'_> {
    fn drop(&mut self) {
        let mut directories = self.directories.0.lock();
        if let Some(at) = directories.iter().position(|it| it == self.name) {
            directories.swap_remove(at);
        }
    }
}

fn name(key: &str) -> &str {
    key.strip_suffix('/').unwrap_or(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_gone_under_both_its_keys_while_it_is_removed() {
        let directories = RemovedDirectories::default();
        let [first, second] = ["a/b/", "a/b/"].map(|it| directories.note(it));
        let found = ["a/b", "a/b/", "a", "a/b/c", "a/bc"].map(|it| directories.contains(it));
        assert_eq!(found, [true, true, false, false, false]);
        drop(first);
        assert!(directories.contains("a/b"));
        drop(second);
        assert!(!directories.contains("a/b"));
    }
}
