//! Detects that the credentials file of an engine has changed.
//!
//! The AWS library caches what it read for a quarter of an hour. Keys that were revoked meanwhile would be errors for all users of
//! the mount, so an engine with the new keys takes over as soon as they exist, if they work.

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hasher as _};
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// The node plugin writes no longer ones.
const MAX_FILE_BYTES: u64 = 1 << 16;

/// A hash of the content, which reveals nothing of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fingerprint(u64);

/// The credentials file and the fingerprint of its last known content.
#[derive(Debug)]
pub struct CredentialsFile {
    path: Option<PathBuf>,
    seen: Option<(Version, Fingerprint)>,
}

/// Distinguishes files by metadata: the node plugin writes a new one each time, mostly with the same keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Version {
    inode: u64,
    modified: (i64, i64),
}

impl CredentialsFile {
    pub fn at(path: Option<&Path>) -> Self {
        Self { path: path.map(Path::to_owned), seen: None }
    }

    /// The fingerprint of the current content; `None` without a file.
    pub fn fingerprint(&mut self) -> Option<Fingerprint> {
        let path = self.path.as_deref()?;
        let version = Version::of(&fs::metadata(path).ok()?);
        match self.seen {
            Some((seen, fingerprint)) if seen == version => Some(fingerprint),
            Some(_) | None => {
                let fingerprint = Fingerprint::of(path)?;
                self.seen = Some((version, fingerprint));
                Some(fingerprint)
            }
        }
    }
}

impl Version {
    fn of(metadata: &fs::Metadata) -> Self {
        Self { inode: metadata.ino(), modified: (metadata.mtime(), metadata.mtime_nsec()) }
    }
}

impl Fingerprint {
    fn of(path: &Path) -> Option<Self> {
        let mut bytes = Vec::new();
        File::open(path).ok()?.take(MAX_FILE_BYTES).read_to_end(&mut bytes).ok()?;
        let mut hasher = DefaultHasher::new();
        hasher.write(&bytes);
        Some(Self(hasher.finish()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_other_content_is_a_change() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("credentials");
        let mut credentials = CredentialsFile::at(Some(&file));
        assert_eq!(credentials.fingerprint(), None);
        let mut put = |text: &str| {
            let new = directory.path().join("new");
            fs::write(&new, text).unwrap();
            fs::rename(&new, &file).unwrap();
            credentials.fingerprint().unwrap()
        };
        let first = put("one");
        assert_eq!(put("one"), first);
        let second = put("two");
        assert_ne!(second, first);
        assert_eq!(put("one"), first);
        fs::remove_file(&file).unwrap();
        assert_eq!(credentials.fingerprint(), None);
    }

    #[test]
    fn without_a_file_there_is_no_fingerprint() {
        assert_eq!(CredentialsFile::at(None).fingerprint(), None);
    }
}
