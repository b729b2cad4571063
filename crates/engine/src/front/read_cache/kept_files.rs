//! The directory of `--cache`: cache files that stay when the last handle is closed, and when the engine dies.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::PathBuf;
use std::time::SystemTime;

use parking_lot::Mutex;

use super::ObjectVersion;
use super::cache_file::CacheFile;

/// How much the files may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeptLimit {
    Bytes(u64),
    /// Leave a twentieth of the file system free.
    FreeSpace,
}

#[derive(Debug)]
pub struct KeptFiles {
    directory: PathBuf,
    limit: KeptLimit,
    index: Mutex<Index>,
}

#[derive(Debug, Default)]
struct Index {
    /// What previous engines left was counted.
    is_loaded: bool,
    used: u64,
    /// Files that no handle uses.
    closed: HashMap<String, ClosedFile>,
    /// The same, the one that was closed first is the first one.
    by_age: BTreeMap<u64, String>,
    next_age: u64,
}

#[derive(Clone, Copy, Debug)]
struct ClosedFile {
    age: u64,
    bytes: u64,
}

impl KeptFiles {
    /// The directory must not be read before the previous engine of the mount has ended, which is when the first file is opened.
    pub fn new(directory: PathBuf, limit: KeptLimit) -> Self {
        Self { directory, limit, index: Mutex::default() }
    }

    /// The file of this version, with what is known of it. The caller has no other one open under this name.
    pub fn open(&self, name: &str, version: &ObjectVersion) -> io::Result<CacheFile> {
        let mut index = self.index.lock();
        self.load(&mut index);
        if let Some(before) = index.forget(name) {
            index.used = index.used.saturating_sub(before.bytes);
        }
        let path = self.directory.join(name);
        let mut options = OpenOptions::new();
        options.read(true).write(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        let cache = match options.open(&path).and_then(|file| CacheFile::reopen(file, version)) {
            Ok(cache) => cache,
            Err(_) => CacheFile::create(self.create(&mut options, &path)?, version)?,
        };
        index.used += cache.bytes();
        Ok(cache)
    }

    fn create(&self, options: &mut OpenOptions, path: &std::path::Path) -> io::Result<File> {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            Ok(()) | Err(_) => {}
        }
        options.create_new(true);
        match options.open(path) {
            // Another program removed the directory.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)?;
                options.open(path)
            }
            opened => opened,
        }
    }

    /// The last handle of a file was closed.
    pub fn close(&self, name: &str, bytes: u64) {
        let mut index = self.index.lock();
        index.add(name.to_owned(), bytes);
    }

    /// Makes room for that many bytes, if necessary by removing files that no handle uses.
    pub fn reserve(&self, bytes: u64) -> bool {
        let mut index = self.index.lock();
        self.load(&mut index);
        while !self.has_room(index.used, bytes) {
            let Some(oldest) = index.by_age.first_key_value().map(|(_, name)| name.clone()) else { return false };
            let Some(file) = index.forget(&oldest) else { return false };
            index.used = index.used.saturating_sub(file.bytes);
            if let Err(error) = fs::remove_file(self.directory.join(&oldest)) {
                tracing::debug!(%error, "cannot remove a cache file");
            }
        }
        index.used += bytes;
        true
    }

    pub fn release(&self, bytes: u64) {
        let mut index = self.index.lock();
        index.used = index.used.saturating_sub(bytes);
    }

    fn has_room(&self, used: u64, bytes: u64) -> bool {
        match self.limit {
            KeptLimit::Bytes(limit) => used.saturating_add(bytes) <= limit,
            KeptLimit::FreeSpace => rustix::fs::statvfs(&self.directory)
                .is_ok_and(|it| it.f_blocks / 20 <= it.f_bavail.saturating_sub(bytes / it.f_frsize.max(1))),
        }
    }

    /// Counts what previous engines left, and removes what is not ours.
    fn load(&self, index: &mut Index) {
        if std::mem::replace(&mut index.is_loaded, true) {
            return;
        }
        let mut found: Vec<(SystemTime, String, u64)> = Vec::new();
        for entry in fs::read_dir(&self.directory).into_iter().flatten().flatten() {
            let (Ok(metadata), Ok(name)) = (entry.metadata(), entry.file_name().into_string()) else { continue };
            if metadata.is_file() && is_name(&name) {
                found.push((metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH), name, metadata.blocks() * 512));
            } else if metadata.is_dir() {
                // The blocks of earlier versions of this program.
                let _ = fs::remove_dir_all(entry.path());
            }
        }
        found.sort();
        for (_, name, bytes) in found {
            index.used += bytes;
            index.add(name, bytes);
        }
    }
}

impl Index {
    fn add(&mut self, name: String, bytes: u64) {
        let age = self.next_age;
        self.next_age += 1;
        self.by_age.insert(age, name.clone());
        self.closed.insert(name, ClosedFile { age, bytes });
    }

    fn forget(&mut self, name: &str) -> Option<ClosedFile> {
        let file = self.closed.remove(name)?;
        self.by_age.remove(&file.age);
        Some(file)
    }
}

fn is_name(name: &str) -> bool {
    name.len() == 32 && name.bytes().all(|it| it.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::front::read_cache::cache_file::BLOCK;

    fn version(key: &str) -> ObjectVersion {
        ObjectVersion { key: key.into(), etag: "\"e\"".into(), size: BLOCK }
    }

    /// Opens, fills and closes the file of a whole block.
    fn fill(files: &KeptFiles, key: &str) {
        let name = version(key).name();
        let file = files.open(&name, &version(key)).unwrap();
        assert!(files.reserve(BLOCK));
        file.write(0, &vec![7; 1 << 20]).unwrap();
        files.close(&name, BLOCK);
    }

    fn has(files: &KeptFiles, key: &str) -> bool {
        files.directory.join(version(key).name()).exists()
    }

    #[test]
    fn the_limit_counts_what_previous_engines_left_and_the_oldest_go_first() {
        let directory = tempfile::tempdir().unwrap();
        let limit = KeptLimit::Bytes(3 * BLOCK + BLOCK / 2);
        let first = KeptFiles::new(directory.path().into(), limit);
        for key in ["a", "b"] {
            fill(&first, key);
        }
        fs::create_dir(directory.path().join("V2")).unwrap();
        let next = KeptFiles::new(directory.path().into(), limit);
        fill(&next, "c");
        assert!(has(&next, "a") && has(&next, "b"));
        assert!(!directory.path().join("V2").exists());
        // It is used once more, so it is not the oldest any longer.
        let name = version("a").name();
        assert_eq!(next.open(&name, &version("a")).unwrap().bytes(), BLOCK);
        next.close(&name, BLOCK);
        fill(&next, "d");
        assert_eq!(["a", "b", "c", "d"].map(|key| has(&next, key)), [true, false, true, true]);
    }

    #[test]
    fn files_that_are_open_are_not_removed() {
        let directory = tempfile::tempdir().unwrap();
        let files = KeptFiles::new(directory.path().into(), KeptLimit::Bytes(BLOCK));
        let _open = files.open(&version("a").name(), &version("a")).unwrap();
        assert!(files.reserve(BLOCK) && !files.reserve(1));
        files.release(1);
        assert!(files.reserve(1));
    }

    #[test]
    fn a_directory_that_another_program_removed_is_made_again_and_is_private() {
        let parent = tempfile::tempdir().unwrap();
        let directory = parent.path().join("cache");
        let files = KeptFiles::new(directory.clone(), KeptLimit::FreeSpace);
        fill(&files, "a");
        fs::remove_dir_all(&directory).unwrap();
        fill(&files, "a");
        assert!(has(&files, "a"));
        assert_eq!(fs::metadata(&directory).unwrap().mode() & 0o777, 0o700);
    }

    #[test]
    fn what_is_no_cache_file_of_the_version_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let name = version("a").name();
        fs::write(directory.path().join(&name), "something else").unwrap();
        let files = KeptFiles::new(directory.path().into(), KeptLimit::FreeSpace);
        assert_eq!(files.open(&name, &version("a")).unwrap().bytes(), 0);
    }
}
