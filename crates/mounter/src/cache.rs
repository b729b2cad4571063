//! The disk cache of an engine: a new directory each, removed when the engine has exited.
//!
//! Engines must not share one, because an engine empties its cache when it starts, and the path of the user does not exist
//! inside of a mounter.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use s3csi_core::Chain;
use s3csi_supervisor::log;

use crate::directory::Directory;

/// Where the caches of this mounter are.
#[derive(Debug)]
pub struct Caches {
    base: PathBuf,
    next: AtomicU64,
}

/// The cache of one engine; removed when dropped.
#[derive(Debug)]
pub struct CacheDirectory {
    path: PathBuf,
}

#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    #[error("failed to create a cache directory in {base:?}")]
    Create {
        base: PathBuf,
        #[source]
        cause: io::Error,
    },

    #[error("cache directory {base:?} belongs to another user")]
    Foreign { base: PathBuf },
}

impl Caches {
    /// Removes the caches of a killed mounter. The base is named after the mounter's directory, whose lock we hold.
    pub fn open(root: &Path, directory: &Directory) -> io::Result<Self> {
        let status = rustix::fs::fstat(directory)?;
        let base = root.join(format!("mountpoint-s3-cache-{:x}-{:x}", status.st_dev, status.st_ino));
        remove(&base);
        Ok(Self { base, next: AtomicU64::new(0) })
    }

    pub fn create(&self) -> Result<CacheDirectory, CacheError> {
        let failed = |cause| CacheError::Create { base: self.base.clone(), cause };
        let mut builder = DirBuilder::new();
        builder.mode(0o700);
        match builder.create(&self.base) {
            Err(cause) if cause.kind() != io::ErrorKind::AlreadyExists => return Err(failed(cause)),
            Ok(()) | Err(_) => {}
        }
        let metadata = std::fs::symlink_metadata(&self.base).map_err(failed)?;
        // The root may be world-writable.
        if !metadata.is_dir() || metadata.uid() != rustix::process::geteuid().as_raw() {
            return Err(CacheError::Foreign { base: self.base.clone() });
        }
        let path = self.base.join(self.next.fetch_add(1, Ordering::Relaxed).to_string());
        builder.create(&path).map_err(failed)?;
        Ok(CacheDirectory { path })
    }

    /// Removes the base if no cache is left in it.
    pub fn close(&self) {
        let _ = std::fs::remove_dir(&self.base);
    }
}

impl CacheDirectory {
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for CacheDirectory {
    fn drop(&mut self) {
        remove(&self.path);
    }
}

fn remove(path: &Path) {
    match std::fs::remove_dir_all(path) {
        Err(cause) if cause.kind() != io::ErrorKind::NotFound => {
            log::warn("cache not removed", &[("path", &path.display()), ("error", &Chain(&cause))]);
        }
        Ok(()) | Err(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn caches_are_fresh_distinct_and_removed() {
        let place = tempfile::tempdir().unwrap();
        let root = tempfile::tempdir().unwrap();
        let directory = Directory::open(place.path()).unwrap();
        let caches = Caches::open(root.path(), &directory).unwrap();
        let (one, two) = (caches.create().unwrap(), caches.create().unwrap());
        assert_ne!(one.path(), two.path());
        std::fs::write(one.path().join("block"), "x").unwrap();
        assert_eq!(std::fs::read_dir(two.path()).unwrap().count(), 0);
        let path = one.path().to_owned();
        drop(one);
        assert!(!path.exists());
        assert!(two.path().exists());
        drop(two);
        caches.close();
        assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0);
    }

    #[test]
    fn leftovers_of_a_killed_mounter_are_removed() {
        let place = tempfile::tempdir().unwrap();
        let root = tempfile::tempdir().unwrap();
        let directory = Directory::open(place.path()).unwrap();
        let killed = Caches::open(root.path(), &directory).unwrap();
        std::mem::forget(killed.create().unwrap());
        let caches = Caches::open(root.path(), &directory).unwrap();
        assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0);
        caches.create().unwrap();
    }

    #[test]
    fn a_link_in_place_of_the_base_is_refused() {
        let place = tempfile::tempdir().unwrap();
        let root = tempfile::tempdir().unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        let directory = Directory::open(place.path()).unwrap();
        let caches = Caches::open(root.path(), &directory).unwrap();
        symlink(elsewhere.path(), &caches.base).unwrap();
        assert!(matches!(caches.create().unwrap_err(), CacheError::Foreign { .. }));
        assert_eq!(std::fs::read_dir(elsewhere.path()).unwrap().count(), 0);
    }
}
