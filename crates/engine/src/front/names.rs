//! Names in directories: lookup, creation, removal, rename.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use futures::executor::block_on;
use mountpoint_s3_client::ObjectClient;
use mountpoint_s3_fs::fs::{Attr, Entry, Error, ToErrno};

use super::resume::Delivery;
use super::staged::{CopyAttributes, StagedFile, Writes};
use super::{AfterRename, Front, FsError, FsResult};
use crate::state::NEW;

/// What `statfs` reports, and most stores with a file system behind them allow.
const USUAL_NAME_BYTES: usize = 255;

/// A name in a directory.
#[derive(Clone, Copy, Debug)]
pub struct Name<'a> {
    pub parent: u64,
    pub name: &'a OsStr,
}

impl<C: ObjectClient + Clone + Send + Sync + 'static> Front<C> {
    pub(super) fn lookup(&self, parent: u64, name: &OsStr) -> FsResult<Entry> {
        while self.config.hang_on_lookup.as_deref() == Some(name) {
            std::thread::park();
        }
        let directory = self.inode(parent)?;
        self.remake(parent, name)?;
        let drops = self.staged.drops();
        let mut found = block_on(self.files.lookup(directory, name));
        if found.as_ref().is_err_and(|error| error.to_errno() == libc::ENOENT)
            && let Some(node) = self.table.node(parent, name.as_bytes())
            && self.revive_directory(node).is_ok()
        {
            found = block_on(self.files.lookup(directory, name));
        }
        let found = found.map_err(|error| name_error(name, error.into()))?;
        let mut entry = self.remember(parent, name, found, 0)?;
        let node = entry.attr.ino;
        let attr = self.with_fetched_metadata(node, entry.attr);
        (entry.attr, entry.ttl) = match self.staged.attributes_since(drops, node, attr) {
            CopyAttributes::Known(attr) => (attr, entry.ttl),
            CopyAttributes::Outdated(_) => self.attributes(node).map(|Attr { attr, ttl }| (attr, ttl))?,
        };
        if self.has_writer(node) {
            // Its time changes when it is closed.
            entry.ttl = Duration::ZERO;
        }
        Ok(entry)
    }

    /// Takes what mknod or mkdir has made. Sent again, it may find what a previous engine had made.
    pub(super) fn made(
        &self,
        delivery: Delivery,
        parent: u64,
        name: &OsStr,
        made: Result<Entry, Error>,
    ) -> FsResult<Entry> {
        match made {
            Err(error) if delivery == Delivery::Resent && error.to_errno() == libc::EEXIST => {
                let entry = block_on(self.files.lookup(self.inode(parent)?, name))?;
                self.remember(parent, name, entry, NEW)
            }
            other => self.remember(parent, name, other?, NEW),
        }
    }

    /// Takes the outcome of unlink or rmdir. Sent again, it may find that it was done by a previous engine.
    pub(super) fn removed(
        &self,
        delivery: Delivery,
        parent: u64,
        name: &OsStr,
        removed: Result<(), Error>,
    ) -> FsResult<()> {
        match removed {
            Err(error) if delivery == Delivery::Resent && error.to_errno() == libc::ENOENT => {}
            other => other?,
        }
        self.table.unlinked(parent, name.as_bytes());
        Ok(())
    }

    pub(super) fn unlink_name(&self, delivery: Delivery, parent: u64, inode: u64, name: &OsStr) -> FsResult<()> {
        if let Some(file) = self.copy_of_name(parent, name)? {
            let unlinked = self.unlink_staged(parent, name, &file);
            self.release_copy(&file);
            return unlinked;
        }
        let node = self.table.node(parent, name.as_bytes());
        self.removed(delivery, parent, name, block_on(self.files.unlink(inode, name)))?;
        if let Some(node) = node {
            self.forget_pending(node);
        }
        self.emptied.note(parent);
        Ok(())
    }

    pub(super) fn rename(&self, delivery: Delivery, from: Name<'_>, to: Name<'_>, flags: u32) -> FsResult<()> {
        if !self.config.allow_delete {
            return Err(FsError::new(
                libc::EPERM,
                "renaming deletes the old name, and deleting is disabled; mount with --allow-delete to enable it"
                    .into(),
            ));
        }
        self.remake(from.parent, from.name)?;
        if let Some(node) = self.table.node(from.parent, from.name.as_bytes())
            && !self.table.is_file(node)
            && self.config.writes != Writes::Sequential
        {
            self.rename_directory(delivery, node, from, to)?;
        } else {
            self.rename_file(delivery, from, to, flags)?;
        }
        self.emptied.note(from.parent);
        Ok(())
    }

    fn rename_file(&self, delivery: Delivery, from: Name<'_>, to: Name<'_>, flags: u32) -> FsResult<()> {
        let moved = self.copy_of_name(from.parent, from.name)?;
        let replaced = match self.copy_of_name(to.parent, to.name) {
            Ok(replaced) => replaced,
            Err(error) => {
                if let Some(file) = &moved {
                    self.release_copy(file);
                }
                return Err(error);
            }
        };
        let renamed = self.rename_with_copies(delivery, (from, moved.as_deref()), (to, replaced.as_deref()), flags);
        for file in moved.iter().chain(&replaced) {
            if renamed.is_err() {
                self.claim_again(file);
            }
            self.release_copy(file);
        }
        renamed
    }

    fn rename_with_copies(
        &self,
        delivery: Delivery,
        (from, moved): (Name<'_>, Option<&StagedFile>),
        (to, replaced): (Name<'_>, Option<&StagedFile>),
        flags: u32,
    ) -> FsResult<()> {
        if let Some(file) = moved {
            self.store_for_rename(file)?;
        }
        if let Some(file) = replaced {
            self.unclaim(file)?;
        }
        let (source, destination) = (self.inode(from.parent)?, self.inode(to.parent)?);
        let key_of = |name: Name<'_>| self.metadata_key(self.table.node(name.parent, name.name.as_bytes())?).ok();
        let old_key = key_of(from);
        match block_on(self.files.rename(source, from.name, destination, to.name, flags.into())) {
            Err(error) if delivery == Delivery::Resent && error.to_errno() == libc::ENOENT => {
                // Done by a previous engine, if the file is there.
                let moved = block_on(self.files.lookup(destination, to.name))?.attr.ino;
                block_on(self.files.forget(moved, 1));
            }
            other => other?,
        }
        if let Some(node) = self.table.node(to.parent, to.name.as_bytes()) {
            self.forget_pending(node);
        }
        self.give_back(self.table.renamed(from.parent, from.name.as_bytes(), to.parent, to.name.as_bytes())?);
        if let Some((old, new)) = old_key.zip(key_of(to)) {
            self.metadata.moved(&old, &new);
        }
        if self.config.after_rename == AfterRename::Revalidate
            && let Err(error) = self.revalidate(to.parent, destination, to.name)
        {
            // The rename itself succeeded. At worst the file cannot be read until the cached attributes expire.
            tracing::debug!(%error, "cannot revalidate a renamed file");
        }
        if let Some(file) = replaced {
            file.disconnect();
        }
        moved.map_or(Ok(()), |file| self.claim_renamed(file))
    }

    /// A copy may have another `ETag`, and `S3Filesystem` then takes it for another file: an inode of its own. The
    /// kernel goes on to use the id it knows, so that must mean the new inode.
    pub(super) fn revalidate(&self, parent: u64, directory: u64, name: &OsStr) -> FsResult<()> {
        let remembered = block_on(self.files.lookup(directory, name))?.attr.ino;
        // Opening for direct I/O makes `S3Filesystem` ask the server, whatever it remembers. It refuses to open an
        // inode that was replaced; then the next lookup finds the new one.
        let opened =
            block_on(self.files.open(remembered, (libc::O_RDONLY | libc::O_DIRECT).into(), std::process::id()));
        if let Ok(opened) = opened {
            self.release_inner(remembered, opened.fh, libc::O_RDONLY)?;
        }
        block_on(self.files.forget(remembered, 1));
        let current = block_on(self.files.lookup(directory, name))?.attr.ino;
        self.give_back(vec![self.table.rebind(parent, name.as_bytes(), current)]);
        Ok(())
    }
}

/// Not every store has an error for a long name, and some have one that means something else.
fn name_error(name: &OsStr, error: FsError) -> FsError {
    let is_unlikely_name = USUAL_NAME_BYTES < name.len() && error.errno != libc::ENOENT;
    if is_unlikely_name { FsError { errno: libc::ENAMETOOLONG, ..error } } else { error }
}
