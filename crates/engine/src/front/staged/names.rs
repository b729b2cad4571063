//! What happens to a copy when the name of its file is removed or changed.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use futures::executor::block_on;
use mountpoint_s3_client::ObjectClient;

use super::file::Object;
use super::{InitialContent, StagedFile, Writes};
use crate::front::{Front, FsError, FsResult};
use crate::state::NEW;

impl<C: ObjectClient + Clone + Send + Sync + 'static> Front<C> {
    /// The copy of a file that cannot be unlinked or renamed otherwise: one that is staged, being uploaded or not stored yet.
    /// It has one handle more, which the caller releases.
    pub(in crate::front) fn copy_of_name(
        &self,
        parent: u64,
        name: &OsStr,
    ) -> FsResult<Option<std::sync::Arc<StagedFile>>> {
        let Some(node) = self.table.node(parent, name.as_bytes()) else { return Ok(None) };
        let is_local = self.table.has(node, NEW) || self.has_writer(node);
        let needs_copy = is_local && self.config.writes != Writes::Sequential && self.table.is_file(node);
        if self.staged.get(node).is_none() && !needs_copy {
            return Ok(None);
        }
        self.stage(node, InitialContent::Current).map(Some)
    }

    /// The name goes; the copy stays for those who have it open and is never stored.
    pub(in crate::front) fn unlink_staged(&self, parent: u64, name: &OsStr, file: &StagedFile) -> FsResult<()> {
        if !self.config.allow_delete {
            return Err(FsError::new(
                libc::EPERM,
                "deleting is disabled; mount with --allow-delete to enable it".into(),
            ));
        }
        let _turn = file.lock();
        if !self.table.has(file.node, NEW) {
            self.bucket.delete(&self.bucket.key(&self.table.path(file.node))?)?;
            self.emptied.note(parent);
        }
        self.table.unlinked(parent, name.as_bytes());
        self.forget_pending(file.node);
        self.disown(file);
        Ok(())
    }

    /// The superblock forgets the file of a copy whose name is gone.
    pub(in crate::front) fn disown(&self, file: &StagedFile) {
        if let Err(error) = self.finish_claim(file) {
            tracing::debug!(%error, "the superblock looks the file up again");
        }
        if let Some(inode) = file.object().inode {
            let _ = block_on(self.metablock.getattr(inode, true));
        }
        file.disconnect();
    }

    /// The superblock takes the file for an ordinary one, which may be replaced.
    pub(in crate::front) fn unclaim(&self, file: &StagedFile) -> FsResult<()> {
        let _turn = file.lock();
        self.finish_claim(file)
    }

    /// After a failed rename.
    pub(in crate::front) fn claim_again(&self, file: &StagedFile) {
        let _turn = file.lock();
        let claimed = self.inode(file.node).and_then(|inode| {
            file.set_object(Object { inode: Some(inode), ..file.object() });
            self.claim(file)
        });
        if let Err(error) = claimed {
            tracing::debug!(%error, "cannot claim a staged file again");
            file.disconnect();
        }
    }

    /// Before a rename: everything is in the bucket, and the superblock takes the file for an ordinary one.
    pub(in crate::front) fn store_for_rename(&self, file: &StagedFile) -> FsResult<()> {
        if self.table.has(file.node, NEW) {
            file.slot().set(crate::state::DIRTY);
        }
        self.store(file)?;
        let _turn = file.lock();
        self.finish_claim(file)
    }

    /// After a rename: the copy belongs to the object under its new name.
    pub(in crate::front) fn claim_renamed(&self, file: &StagedFile) -> FsResult<()> {
        let _turn = file.lock();
        let inode = self.inode(file.node)?;
        let key = self.bucket.key(&self.table.path(file.node))?;
        let etag = self.bucket.head(&key)?.map(|it| it.etag);
        self.table.set_staged_etag(file.id, etag.as_deref().unwrap_or_default().as_bytes())?;
        file.set_object(Object { inode: Some(inode), etag, key, attempts: Vec::new() });
        self.claim(file)
    }
}
