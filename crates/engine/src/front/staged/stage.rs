//! Makes the local copy of a file: of its object, or of what was written so far.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::SystemTime;

use futures::executor::block_on;
use mountpoint_s3_client::ObjectClient;
use mountpoint_s3_fs::fs::{OpenFlags, ToErrno};
use mountpoint_s3_fs::metablock::WriteMode;

use super::file::{NewCopy, Object, StagedWrite};
use super::{InitialContent, LargeUploads, StagedFile};
use crate::front::close_rule::CloseRule;
use crate::front::metadata::StoredAttributes;
use crate::front::open_files::{Handle, OpenFile};
use crate::front::resume::{Delivery, not_open};
use crate::front::{CommitPoint, Front, FsError, FsResult};
use crate::state::{DIRTY, INCOMPLETE, LONGEST_SPOOLED, NEW, POISONED, SPOOLED, Slot, SlotKind};

impl<C: ObjectClient + Clone + Send + Sync + 'static> Front<C> {
    /// The copy of a file, made now if there is none. It has one handle more, which the caller uses or releases.
    pub(in crate::front) fn stage(&self, node: u64, content: InitialContent) -> FsResult<Arc<StagedFile>> {
        self.stage_with(node, content, LargeUploads::Continue)
    }

    /// The same for a change that the writer itself makes.
    pub(in crate::front) fn stage_with(
        &self,
        node: u64,
        content: InitialContent,
        large_uploads: LargeUploads,
    ) -> FsResult<Arc<StagedFile>> {
        if let Some(file) = self.staged.acquire(node) {
            return Ok(file);
        }
        let _exclusive = self.staged.lock(node).write();
        if let Some(file) = self.staged.acquire(node) {
            return Ok(file);
        }
        // From here on the kernel's pages are those of the copy.
        self.table.forget_pages(node);
        let uploaded = self.stop_uploads(node, large_uploads)?;
        let object = self.object_of(node, uploaded.is_some())?;
        let etag = object.etag.clone().unwrap_or_default();
        let id = self.table.add_staged(node, etag.as_bytes())?;
        let size = object.size;
        let object = Object { inode: Some(object.inode), etag: object.etag, key: object.key, attempts: Vec::new() };
        let new = NewCopy { node, id, claim: self.staged.claim(), object };
        let file = Arc::new(StagedFile::new(new, &self.state, &self.staged.directory));
        let made = self.fill(&file, content, uploaded.as_deref(), size).and_then(|()| {
            self.take_readers(node)?;
            // The superblock takes the file for an empty one from its claim on, so the attributes are the copy's before.
            self.staged.files.write().insert(node, Arc::clone(&file));
            self.claim(&file)
        });
        if let Err(error) = made {
            self.staged.files.write().remove(&node);
            file.free();
            self.give_back(self.table.drop_staged(id));
            return Err(error);
        }
        if uploaded.is_some() {
            file.slot().set(DIRTY);
        }
        file.slot().clear(INCOMPLETE);
        for number in self.handles_of_copy(node) {
            self.forget_upload(number);
            self.handles.insert_staged(number, Arc::clone(&file));
            file.add_handle();
        }
        file.add_handle();
        file.set_ready();
        tracing::debug!(path = ?self.table.path(node), size = file.length(), "staged");
        Ok(file)
    }

    fn fill(&self, file: &StagedFile, content: InitialContent, uploaded: Option<&[u8]>, size: u64) -> FsResult<()> {
        file.set_modified(self.time_of_copy(file.node, content, uploaded.is_some())?);
        if let Some(bytes) = uploaded {
            return if file.fill(bytes) { Ok(()) } else { fill_from_memory(file, bytes) };
        }
        if content == InitialContent::Empty || size == 0 {
            return Ok(());
        }
        if size <= LONGEST_SPOOLED {
            let object = file.object();
            let fetched = self.bucket.fetch(&object.key, object.etag.as_deref().unwrap_or_default(), 0..size)?;
            if file.fill(&fetched) {
                return Ok(());
            }
        }
        file.fill_lazily(size)
    }

    /// The time of a copy of which nothing was changed yet.
    fn time_of_copy(&self, node: u64, content: InitialContent, was_uploading: bool) -> FsResult<SystemTime> {
        let set_by_program = self.pending_metadata(node).and_then(|it| StoredAttributes::parse(&it).mtime);
        match set_by_program {
            Some(time) => Ok(time),
            None if was_uploading || content == InitialContent::Empty => Ok(SystemTime::now()),
            None => Ok(self.attributes(node)?.attr.mtime),
        }
    }

    /// Ends the upload of a file that is still small enough to be in the spool. Answers what was written, if anything is being
    /// uploaded. The upload of a larger file is completed, if the caller wants it; then the object is what was written.
    fn stop_uploads(&self, node: u64, large_uploads: LargeUploads) -> FsResult<Option<Vec<u8>>> {
        let (mut is_emptied, mut is_stored) = (false, false);
        for number in self.table.handles_of(node) {
            let Ok(slot) = self.table.handle(number) else { continue };
            if slot.kind() != SlotKind::WriteHandle || slot.has(POISONED) {
                continue;
            }
            if self.handles.get(number).is_none() && !slot.has(DIRTY) {
                // Of a previous engine. What was written through it is stored; if nothing was, the file is empty until something is
                // stored through another handle.
                is_emptied |= slot.has(SPOOLED) && slot.count.load(Ordering::Acquire) == 0;
                continue;
            }
            let handle = self.handle(number)?;
            let _turn = handle.turn.lock();
            if handle.is_complete.load(Ordering::Acquire) {
                is_stored = true;
                continue;
            }
            if !slot.has(SPOOLED)
                && large_uploads == LargeUploads::Complete
                && self.config.commit_point == CommitPoint::Close
            {
                self.complete_upload(number, slot, &handle)?;
                is_stored = true;
                continue;
            }
            if !slot.has(SPOOLED) {
                return Err(FsError::new(
                    libc::EINVAL,
                    "the upload of this file is too far to continue in another way than from beginning to end; \
                     mount with --writes staged to stage every file"
                        .into(),
                ));
            }
            let length = slot.count.load(Ordering::Acquire);
            let mut bytes = vec![0; usize::try_from(length).unwrap_or(usize::MAX)];
            self.table
                .read_spooled(number, 0, &mut bytes)
                .map_err(|error| FsError::new(libc::EIO, format!("cannot read the spool: {error}")))?;
            self.abort_upload(&handle, length);
            if self.table.has(node, NEW) {
                self.create_again(node)?;
            }
            return Ok(Some(bytes));
        }
        Ok((is_emptied && !is_stored).then(Vec::new))
    }

    /// What was written so far becomes the object, of which the server copies what does not change. The caller has the handle's turn.
    fn complete_upload(&self, number: u64, slot: &Slot, handle: &Handle) -> FsResult<()> {
        block_on(self.files.fsync(handle.inode, handle.inner, false)).inspect_err(|_| self.poison(number, slot))?;
        handle.is_complete.store(true, Ordering::Release);
        self.note_stored(slot);
        Ok(())
    }

    /// The crates have no call for it: a write at a wrong offset ends the upload, and nothing of it is stored.
    fn abort_upload(&self, handle: &Handle, length: u64) {
        let wrong = i64::try_from(length).unwrap_or(0) + 1;
        let _ = block_on(self.files.write(handle.inode, handle.inner, wrong, b"-", 0, 0, None));
        let _ = self.release_inner(handle.inode, handle.inner, libc::O_WRONLY);
    }

    /// The superblock forgets a new file whose upload ended, so it is created once more, under another inode.
    fn create_again(&self, node: u64) -> FsResult<()> {
        let (parent, name) = self.table.location(node)?;
        let directory = self.inode(parent)?;
        if let Ok(inode) = self.inode(node) {
            let _ = block_on(self.metablock.getattr(inode, true));
        }
        let inode = block_on(self.files.mknod(directory, &name, libc::S_IFREG | 0o644, 0, 0))?.attr.ino;
        let released = self.table.rebind_node(node, inode)?;
        self.give_back(vec![released]);
        Ok(())
    }

    /// The object behind a node.
    fn object_of(&self, node: u64, was_uploading: bool) -> FsResult<FoundObject> {
        let inode = self.inode(node)?;
        let key = self.bucket.key(&self.table.path(node))?;
        if self.table.has(node, NEW) || was_uploading {
            return Ok(FoundObject { inode, key, etag: None, size: 0 });
        }
        let inner = block_on(self.files.open(inode, libc::O_RDONLY.into(), CloseRule::opener()))?.fh;
        let opened = self.records.take_opened(inner).ok_or_else(not_open);
        self.release_inner(inode, inner, libc::O_RDONLY)?;
        let opened = opened?;
        Ok(FoundObject { inode, key: opened.key, etag: Some(opened.etag), size: opened.size })
    }

    /// Closes the handles that read from the bucket: they read from the copy from now on.
    fn take_readers(&self, node: u64) -> FsResult<()> {
        for number in self.table.handles_of(node) {
            if let Some(OpenFile::Direct(handle)) = self.handles.get(number) {
                let is_closed = handle.close_rule.is_some() && !handle.is_complete.load(Ordering::Acquire);
                if !is_closed {
                    self.release_inner(handle.inode, handle.inner, libc::O_RDONLY)?;
                }
            }
        }
        Ok(())
    }

    /// What was written through this handle is in the copy.
    pub(super) fn forget_upload(&self, number: u64) {
        if let Ok(slot) = self.table.handle(number)
            && slot.kind() == SlotKind::WriteHandle
        {
            self.table.end_writing(slot);
            self.table.stop_spooling(number, slot);
        }
    }

    /// Tells the superblock that the file is being written. The superblock knows nothing of the copy if that fails.
    pub(super) fn claim(&self, file: &StagedFile) -> FsResult<()> {
        let Some(inode) = file.object().inode else { return Ok(()) };
        let mut claimed = self.claim_as(inode, file.claim);
        if claimed.as_ref().is_err_and(|error| error.errno == libc::ESTALE) {
            // The object was replaced since the inode was looked up: a request of an engine that died may still be carried out.
            claimed = self.look_up_copy(file).and_then(|inode| self.claim_as(inode, file.claim));
        }
        claimed.inspect_err(|_| file.disconnect())
    }

    /// The superblock has another inode for another version of an object.
    fn look_up_copy(&self, file: &StagedFile) -> FsResult<u64> {
        let (parent, name) = self.table.location(file.node)?;
        let inode = block_on(self.files.lookup(self.inode(parent)?, &name))?.attr.ino;
        let released = self.table.rebind_node(file.node, inode)?;
        self.give_back(vec![released]);
        file.set_object(Object { inode: Some(inode), ..file.object() });
        Ok(inode)
    }

    /// Tells the superblock that an inode is being written. Answers the number of the claim.
    pub(in crate::front) fn claim_inode(&self, inode: u64) -> FsResult<u64> {
        let claim = self.staged.claim();
        self.claim_as(inode, claim).map(|()| claim)
    }

    fn claim_as(&self, inode: u64, claim: u64) -> FsResult<()> {
        let mode = WriteMode { allow_overwrite: true, incremental_upload: false };
        let flags = OpenFlags::from(libc::O_WRONLY | libc::O_TRUNC);
        block_on(self.metablock.open_handle(inode, claim, &mode, flags, None))
            .map(drop)
            .map_err(|error| FsError::new(error.to_errno(), error.to_string()))
    }
}

struct FoundObject {
    inode: u64,
    key: String,
    etag: Option<String>,
    size: u64,
}

/// Takes bytes for which the spool has no room.
fn fill_from_memory(file: &StagedFile, bytes: &[u8]) -> FsResult<()> {
    let write = StagedWrite { unique: 0, delivery: Delivery::First, offset: 0, data: bytes, is_append: false };
    file.write(&write, &|_| None)
}
