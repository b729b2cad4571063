//! Renames a directory: copies every object below it, compares, and then deletes the old ones.
//!
//! Nothing is deleted before everything is copied, so a failure leaves the source as it was. A successor that gets the request
//! again repeats it: copying twice changes nothing.

use std::collections::HashMap;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use futures::executor::block_on;
use mountpoint_s3_client::ObjectClient;
use parking_lot::Mutex;

use super::bucket::WriteCondition;
use super::names::Name;
use super::open_files::OpenFile;
use super::resume::Delivery;
use super::staged::{InitialContent, StagedFile};
use super::{Front, FsError, FsResult};
use crate::client::UserMetadata;
use crate::state::NEW;

/// Requests at the same time.
const PARALLEL: usize = 16;
/// A line in the log after so many objects.
const PROGRESS: usize = 1000;

impl<C: ObjectClient + Clone + Send + Sync + 'static> Front<C> {
    pub(super) fn rename_directory(&self, delivery: Delivery, node: u64, from: Name<'_>, to: Name<'_>) -> FsResult<()> {
        let path = self.table.path(to.parent).join(to.name);
        let source = format!("{}/", self.bucket.key(&self.table.path(node))?);
        let destination = format!("{}/", self.bucket.key(&path)?);
        let copies = self.store_below(node)?;
        let renamed = self.move_objects(delivery, &source, &destination).and_then(|etags| {
            let inode = self.inode(node)?;
            let released = self.table.renamed(from.parent, from.name.as_bytes(), to.parent, to.name.as_bytes())?;
            self.give_back(released);
            let _ = block_on(self.metablock.getattr(inode, true));
            self.find_again_below(node, &etags)?;
            self.bind_directory(node, to.parent, to.name)
        });
        for file in copies {
            match &renamed {
                Ok(()) => self.claim_renamed(&file)?,
                Err(_) => self.claim_again(&file),
            }
            self.release_copy(&file);
        }
        renamed
    }

    /// Everything below the directory is in the bucket, and no upload is in progress. Answers the copies of files below, each
    /// with one handle more.
    fn store_below(&self, directory: u64) -> FsResult<Vec<Arc<StagedFile>>> {
        let mut copies = Vec::new();
        for node in self.table.below(directory) {
            let is_local = self.table.has(node, NEW) || self.has_writer(node);
            if !self.table.is_file(node)
                || self.table.is_unlinked(node)
                || (!is_local && self.staged.get(node).is_none())
            {
                continue;
            }
            let stored = self.stage(node, InitialContent::Current).and_then(|file| {
                let stored = self.store_for_rename(&file);
                copies.push(file);
                stored
            });
            if let Err(error) = stored {
                for file in &copies {
                    self.claim_again(file);
                    self.release_copy(file);
                }
                return Err(FsError::new(libc::EBUSY, format!("a file below the directory is in use: {error}")));
            }
        }
        Ok(copies)
    }

    /// Answers the `ETag`s of the new objects, by key.
    fn move_objects(&self, delivery: Delivery, source: &str, destination: &str) -> FsResult<HashMap<String, String>> {
        let most = self.config.max_rename_objects;
        let keys = self.bucket.list(source, most.saturating_add(1))?;
        if most < keys.len() {
            return Err(FsError::new(
                libc::E2BIG,
                format!("the directory has more than {most} objects; raise --max-rename-objects to rename it"),
            ));
        }
        let existing = self.bucket.list(destination, 2)?;
        if delivery == Delivery::First && existing.iter().any(|it| it != destination) {
            return Err(FsError::new(libc::ENOTEMPTY, "the destination is not empty".into()));
        }
        let renamed = |key: &str| format!("{destination}{}", &key[source.len()..]);
        let etags = Mutex::new(HashMap::new());
        let copied = in_parallel(&keys, |key| {
            let copy = renamed(key);
            // Not every store copies the marker of a directory.
            let etag = if key.ends_with('/') {
                if self.metadata.latest(key).is_none() {
                    // The answer is seen by the cache.
                    self.bucket.head(key)?;
                }
                let metadata = self.metadata.latest(key).map(|it| it.metadata.clone()).unwrap_or_default();
                self.bucket.put(&copy, Vec::new(), WriteCondition::None, &metadata)?
            } else {
                self.bucket.copy(key, &copy)?
            };
            etags.lock().insert(copy, etag);
            Ok(())
        });
        if let Err(error) = copied {
            let made: Vec<String> = etags.into_inner().into_keys().collect();
            let _ = in_parallel(&made, |key| Ok(self.bucket.delete(key)?));
            return Err(error);
        }
        if !keys.iter().any(|it| it == source) {
            self.bucket.put(destination, Vec::new(), WriteCondition::None, &UserMetadata::new())?;
        }
        in_parallel(&keys, |key| Ok(self.bucket.delete(key)?))?;
        Ok(etags.into_inner())
    }

    /// The nodes below have other objects now: they are resolved again, and their handles are opened again, on next use.
    fn find_again_below(&self, directory: u64, etags: &HashMap<String, String>) -> FsResult<()> {
        for node in self.table.below(directory) {
            for number in self.table.handles_of(node) {
                let Some(OpenFile::Direct(handle)) = self.handles.get(number) else { continue };
                let _ = self.release_inner(handle.inode, handle.inner, libc::O_RDONLY);
                self.handles.remove(number);
                let key = self.bucket.key(&self.table.path(node))?;
                if let Some(etag) = etags.get(&key) {
                    self.table.set_handle_etag(number, etag.as_bytes())?;
                }
            }
        }
        self.give_back(self.table.unbind_below(directory));
        Ok(())
    }
}

/// Runs `work` for each key with several threads. Answers the first error, after all threads have stopped.
fn in_parallel(keys: &[String], work: impl Fn(&str) -> FsResult<()> + Sync) -> FsResult<()> {
    let next = AtomicUsize::new(0);
    let failed = Mutex::new(None);
    thread::scope(|scope| {
        for _ in 0..PARALLEL.min(keys.len()) {
            scope.spawn(|| {
                while failed.lock().is_none() {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let Some(key) = keys.get(number) else { return };
                    if let Err(error) = work(key) {
                        failed.lock().get_or_insert(error);
                    }
                    if number > 0 && number.is_multiple_of(PROGRESS) {
                        tracing::info!(done = number, of = keys.len(), "renaming a directory");
                    }
                }
            });
        }
    });
    failed.into_inner().map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_keys_are_worked_on_once_unless_one_fails() {
        let keys: Vec<String> = (0..100).map(|it| it.to_string()).collect();
        let seen = Mutex::new(Vec::new());
        in_parallel(&keys, |key| {
            seen.lock().push(key.to_owned());
            Ok(())
        })
        .unwrap();
        let mut seen = seen.into_inner();
        seen.sort_by_key(|it| it.parse::<u32>().unwrap());
        assert_eq!(seen, keys);
        let failed = in_parallel(&keys, |key| match key {
            "7" => Err(FsError::new(libc::EIO, "seven".into())),
            _ => Ok(()),
        });
        assert_eq!(failed.unwrap_err().reason, "seven");
    }
}
