//! Whether the keys that an engine signs with were changed.
//!
//! The AWS library believes what it read for a quarter of an hour. Keys that were withdrawn meanwhile would be errors for everybody
//! who uses the mount, so an engine with new keys takes over as soon as they are there, if they work.

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hasher as _};
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// Longer files are not ours.
const LONGEST_FILE: u64 = 1 << 16;

/// Says that two files differ, and nothing else about what is in them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fingerprint(u64);

/// The file with the keys, and what was in it when it was looked at last.
#[derive(Debug)]
pub struct Keys {
    file: Option<PathBuf>,
    seen: Option<(Version, Fingerprint)>,
}

/// The node writes another file each time, mostly with the same keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Version {
    inode: u64,
    modified: (i64, i64),
}

impl Keys {
    pub fn in_file(file: Option<&Path>) -> Self {
        Self { file: file.map(Path::to_owned), seen: None }
    }

    /// What is in the file now. Nothing if there is none: then nobody needs it any more.
    pub fn look(&mut self) -> Option<Fingerprint> {
        let file = self.file.as_deref()?;
        let version = Version::of(&fs::metadata(file).ok()?);
        match self.seen {
            Some((seen, fingerprint)) if seen == version => Some(fingerprint),
            Some(_) | None => {
                let fingerprint = Fingerprint::of(file)?;
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
    fn of(file: &Path) -> Option<Self> {
        let mut bytes = Vec::new();
        File::open(file).ok()?.take(LONGEST_FILE).read_to_end(&mut bytes).ok()?;
        let mut hasher = DefaultHasher::new();
        hasher.write(&bytes);
        Some(Self(hasher.finish()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_other_keys_are_a_change() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("credentials");
        let mut keys = Keys::in_file(Some(&file));
        assert_eq!(keys.look(), None);
        let mut put = |text: &str| {
            let new = directory.path().join("new");
            fs::write(&new, text).unwrap();
            fs::rename(&new, &file).unwrap();
            keys.look().unwrap()
        };
        let first = put("one");
        assert_eq!(put("one"), first);
        let second = put("two");
        assert_ne!(second, first);
        assert_eq!(put("one"), first);
        fs::remove_file(&file).unwrap();
        assert_eq!(keys.look(), None);
    }

    #[test]
    fn an_engine_without_a_file_of_keys_never_gets_others() {
        assert_eq!(Keys::in_file(None).look(), None);
    }
}
