//! Copies that outlive an engine: a successor finds them by their slots and goes on.

use std::sync::Arc;
use std::time::Duration;

use mountpoint_s3_client::ObjectClient;

use super::file::{NewCopy, Object, StagedFile};
use crate::front::Front;

/// A store that is away for a while is asked as often.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

impl<C: ObjectClient + Clone + Send + Sync + 'static> Front<C> {
    /// Finds the copies of previous engines. Needs no request to the bucket, and is called before any request is served.
    pub(in crate::front) fn recover_staged(&self) {
        for (id, node) in self.table.all_staged() {
            let Ok(slot) = self.table.staged(id) else { continue };
            let key = self.bucket.key(&self.table.path(node)).unwrap_or_default();
            let object = Object::parse(None, key, &self.table.etag(slot));
            let new = NewCopy { node, id, claim: self.staged.claim(), object };
            let file = Arc::new(StagedFile::reopen(new, &self.state, &self.staged.directory));
            self.adopt(Arc::clone(&file));
            if file.is_lost() {
                tracing::error!(path = ?self.table.path(node), "{}", file.lost());
                if !file.has_handles() {
                    self.drop_copy(&file);
                }
            }
        }
    }

    fn adopt(&self, file: Arc<StagedFile>) {
        file.set_ready();
        for number in self.handles_of_copy(file.node) {
            self.forget_upload(number);
            self.handles.insert_staged(number, Arc::clone(&file));
            file.add_handle();
        }
        self.staged.files.write().insert(file.node, file);
    }

    /// Tells the superblock of the copies of previous engines, and stores what nothing else will store. Called once, while
    /// requests are served already.
    pub(in crate::front) fn restore_staged(&self) {
        for file in self.staged.all() {
            // Not one that is dropped meanwhile: the superblock would take its file for one that is being written for ever.
            if file.has_handles()
                && let Some(Err(error)) = self.with_copy(file.node, |it| self.claim_recovered(it))
            {
                tracing::debug!(%error, "cannot claim a staged file yet");
            }
        }
        self.store_unused();
    }

    fn claim_recovered(&self, file: &StagedFile) -> super::FsResult<()> {
        let _turn = file.lock();
        let object = file.object();
        if object.inode.is_some() || self.table.is_unlinked(file.node) {
            return Ok(());
        }
        let inode = self.inode(file.node)?;
        file.set_object(Object { inode: Some(inode), ..object });
        self.claim(file)
    }

    /// Stores the copies that no handle uses: their last close could not.
    pub fn store_unused(&self) {
        for node in self.staged.unused() {
            let Some(file) = self.staged.acquire(node) else { continue };
            if let Err(error) = self.store_if_unused(&file) {
                tracing::warn!(path = ?self.table.path(file.node), %error, "a closed file is still not stored, retrying");
            }
            self.release_copy(&file);
        }
    }

    /// The mount has ended: stores what is left.
    pub fn store_all(&self) {
        let mut is_complete = true;
        for file in self.staged.all() {
            if let Err(error) = self.store(&file) {
                is_complete = false;
                tracing::error!(path = ?self.table.path(file.node), %error, "a file that was edited is not stored");
            }
        }
        if is_complete {
            self.staged.directory.remove_all();
        }
    }
}

/// Stores closed files whose last close could not, until the process ends.
pub fn start_retries<C>(front: &Arc<Front<C>>) -> std::io::Result<()>
where
    C: ObjectClient + Clone + Send + Sync + 'static,
{
    let front = Arc::downgrade(front);
    let retry = move || {
        while let Some(front) = front.upgrade() {
            front.store_unused();
            drop(front);
            std::thread::sleep(RETRY_INTERVAL);
        }
    };
    std::thread::Builder::new().name("store-retries".into()).spawn(retry).map(drop)
}
