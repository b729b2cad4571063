//! Reads and changes the attributes that are stored with an object.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::time::Duration;

use fuser::{FileAttr, FileType};
use futures::FutureExt as _;
use futures::executor::block_on;
use mountpoint_s3_client::ObjectClient;

use super::{Creator, MetadataMode, StoredAttributes, without_time};
use crate::client::{ObjectHeaders, UserMetadata};
use crate::front::{Front, FsError, FsResult};
use crate::state::NEW;

/// How long a lookup waits for attributes that only the object knows.
const PATIENCE: Duration = Duration::from_secs(1);
const SET_IDS: u32 = libc::S_ISUID | libc::S_ISGID;

impl<C: ObjectClient + Clone + Send + Sync + 'static> Front<C> {
    fn stores_metadata(&self) -> bool {
        self.config.metadata == MetadataMode::Store
    }

    /// The key of a node: that of its object, or of the marker of a directory.
    pub(in crate::front) fn metadata_key(&self, node: u64) -> FsResult<String> {
        let key = self.bucket.key(&self.table.path(node))?;
        Ok(if self.table.is_file(node) { key } else { format!("{key}/") })
    }

    /// The attributes with what is known of them beside what the superblock knows, without a request.
    pub(in crate::front) fn with_metadata(&self, node: u64, attributes: FileAttr) -> FileAttr {
        if !self.stores_metadata() {
            return attributes;
        }
        let attributes = self.with_stored_attributes(node, attributes);
        match self.table.directory_time(node).filter(|_| attributes.kind == FileType::Directory) {
            Some(time) => FileAttr { atime: time, mtime: time, ctime: time, ..attributes },
            None => attributes,
        }
    }

    fn with_stored_attributes(&self, node: u64, attributes: FileAttr) -> FileAttr {
        if node == super::super::table::ROOT {
            return attributes;
        }
        match self.known_headers(node) {
            Some(known) => {
                let attributes = match known.written {
                    Some(time) => FileAttr { mtime: time, ctime: time, ..attributes },
                    None => attributes,
                };
                let attributes = StoredAttributes::parse(&known.metadata).apply(attributes, self.config.overrides);
                if u32::from(attributes.perm) & SET_IDS != 0 {
                    self.has_set_ids.store(true, Ordering::Relaxed);
                }
                attributes
            }
            None => attributes,
        }
    }

    /// Clears the set-user-ID and set-group-ID bits of a file that is changed by a process that may not keep them.
    pub(in crate::front) fn clear_set_ids(&self, node: u64) -> FsResult<()> {
        // Most mounts never show such a file.
        if !self.stores_metadata() || !self.has_set_ids.load(Ordering::Relaxed) || !self.table.is_file(node) {
            return Ok(());
        }
        let metadata = self.current_metadata(node, &self.metadata_key(node)?)?;
        match StoredAttributes::parse(&metadata).mode.filter(|it| it & SET_IDS != 0) {
            // Without permission to execute, the set-group-ID bit means something else.
            Some(mode) if mode & libc::S_IXGRP == 0 => self.set_mode(node, mode & !libc::S_ISUID),
            Some(mode) => self.set_mode(node, mode & !SET_IDS),
            None => Ok(()),
        }
    }

    fn set_mode(&self, node: u64, mode: u32) -> FsResult<()> {
        self.set_metadata(node, &StoredAttributes { mode: Some(mode), ..StoredAttributes::default() })
    }

    /// What is known without a request. Of a file that is being written that is only what programs have set.
    fn known_headers(&self, node: u64) -> Option<Arc<ObjectHeaders>> {
        if let Some(pending) = self.pending_metadata(node) {
            return Some(Arc::new(ObjectHeaders::new("", pending)));
        }
        let key = self.metadata_key(node).ok()?;
        if !self.table.is_file(node) {
            return self.metadata.latest(&key);
        }
        self.metadata.get(&key, &self.etag_of(node)?)
    }

    /// The `ETag` that the superblock knows, without a request.
    fn etag_of(&self, node: u64) -> Option<String> {
        if let Some(file) = self.staged.get(node) {
            return file.object().etag;
        }
        let super::super::table::Binding::Bound(inode) = self.table.binding(node).ok()? else { return None };
        let known = self.metablock.getattr(inode, false).now_or_never()?.ok()?;
        known.stat().etag.as_deref().map(str::to_owned)
    }

    /// The headers of a stored object, asked for if they are not known.
    pub(super) fn headers_of(&self, node: u64, key: &str) -> FsResult<Arc<ObjectHeaders>> {
        let known = self.etag_of(node).and_then(|etag| self.metadata.get(key, &etag));
        if let Some(known) = known {
            return Ok(known);
        }
        // The answer is seen by the cache.
        let is_there = self.bucket.head(key)?.is_some();
        Ok(self.metadata.latest(key).filter(|_| is_there).unwrap_or_default())
    }

    /// What is stored with a file or directory, or will be, asked for if it is not known.
    pub(super) fn current_metadata(&self, node: u64, key: &str) -> FsResult<UserMetadata> {
        if let Some(pending) = self.pending_metadata(node) {
            return Ok(pending);
        }
        if self.table.is_file(node) && self.table.has(node, NEW) {
            return Ok(UserMetadata::new());
        }
        if !self.table.is_file(node)
            && let Some(known) = self.metadata.latest(key)
        {
            return Ok(known.metadata.clone());
        }
        Ok(self.headers_of(node, key)?.metadata.clone())
    }

    /// The attributes after a look at the object, if a listing could not tell them.
    pub(in crate::front) fn with_fetched_metadata(&self, node: u64, attributes: FileAttr) -> FileAttr {
        if self.stores_metadata()
            && attributes.kind == FileType::Directory
            && node != super::super::table::ROOT
            && !self.table.has(node, NEW)
            && let Ok(key) = self.metadata_key(node)
            && self.metadata.is_marker_worth_asking(&key)
        {
            self.ask_for_headers(key);
        }
        let is_unknown = self.stores_metadata()
            && attributes.kind == FileType::RegularFile
            && !self.table.has(node, NEW)
            && self.known_headers(node).is_none()
            && self.etag_of(node).is_some();
        if is_unknown
            && let Ok(key) = self.metadata_key(node)
            && self.metadata.is_worth_asking(&key)
        {
            self.ask_for_headers(key);
        }
        self.with_metadata(node, attributes)
    }

    /// The attributes of a listed file. One object of each directory is asked about, so that the kernel keeps the attributes of
    /// a listing only where they are probably right.
    pub(in crate::front) fn with_listed_metadata(&self, node: u64, attributes: FileAttr) -> FileAttr {
        if self.stores_metadata()
            && attributes.kind == FileType::RegularFile
            && !self.table.has(node, NEW)
            && let Ok(key) = self.metadata_key(node)
            && self.metadata.is_first_beside(&key)
            && self.known_headers(node).is_none()
            && self.metadata.is_worth_asking(&key)
        {
            // The superblock does not know the inode before it is listed, so this tells of the directory, not of the file.
            self.ask_for_headers(key);
        }
        self.with_metadata(node, attributes)
    }

    /// Looks at an object, for as long as attributes are worth it: a store that is away must not make every lookup slow.
    fn ask_for_headers(&self, key: String) {
        let bucket = Arc::clone(&self.bucket);
        let (sender, answered) = channel();
        // The answer is seen by the cache, also if it comes too late.
        std::thread::spawn(move || sender.send(bucket.head(&key).is_ok()));
        let _ = answered.recv_timeout(PATIENCE);
    }

    /// Whether the attributes of a listed file are not known but probably stored: the kernel must ask before it uses them.
    pub(in crate::front) fn has_unknown_metadata(&self, node: u64, attributes: &FileAttr) -> bool {
        self.stores_metadata()
            && attributes.kind == FileType::RegularFile
            && self.metadata_key(node).is_ok_and(|key| self.metadata.has_metadata_beside(&key))
            && self.known_headers(node).is_none()
    }

    /// What is stored with the marker of a new directory: its creator, and the permissions that it asked for.
    pub(in crate::front) fn marker_metadata(&self, mode: u32, creator: Creator) -> UserMetadata {
        let mut metadata = UserMetadata::new();
        if self.stores_metadata() {
            let permissions = mode & super::PERMISSIONS;
            let is_usual = permissions == u32::from(self.config.attributes.dir_mode);
            let mode = (!is_usual).then_some(libc::S_IFDIR | permissions);
            StoredAttributes { mode, ..self.owner_to_store(creator) }.write(&mut metadata);
        }
        metadata
    }

    /// A new file belongs to its creator, and has the permissions that it asked for.
    pub(in crate::front) fn note_new_file(&self, node: u64, mode: u32, creator: Creator) -> FsResult<()> {
        if !self.stores_metadata() {
            return Ok(());
        }
        let key = self.metadata_key(node)?;
        // What was to be sent with an earlier file of that name does not belong to this one.
        self.forget_pending(node);
        self.metadata.take_outgoing(&key);
        let is_usual = mode & super::PERMISSIONS == u32::from(self.config.attributes.file_mode);
        let attributes = StoredAttributes { mode: (!is_usual).then_some(mode), ..self.owner_to_store(creator) };
        if attributes == StoredAttributes::default() {
            return Ok(());
        }
        let mut metadata = UserMetadata::new();
        attributes.write(&mut metadata);
        self.set_pending(node, &key, metadata)
    }

    /// The owner of something new, as far as it is not the usual one. What root makes belongs to the usual owner: root needs no
    /// permission, and most containers run as root, whose files would all need metadata.
    pub(super) fn owner_to_store(&self, creator: Creator) -> StoredAttributes {
        let Creator { uid, gid } = creator;
        let (usual, overrides) = (self.config.attributes, self.config.overrides);
        let is_stored = uid != 0;
        StoredAttributes {
            uid: Some(uid).filter(|it| is_stored && *it != usual.uid && !overrides.uid),
            gid: Some(gid).filter(|it| is_stored && *it != usual.gid && !overrides.gid),
            ..StoredAttributes::default()
        }
    }

    /// A stored file is being replaced: what is known of it stays, but for its time.
    pub(in crate::front) fn keep_metadata(&self, node: u64) -> FsResult<()> {
        if !self.stores_metadata() || self.table.has(node, NEW) || self.pending_metadata(node).is_some() {
            return Ok(());
        }
        let key = self.metadata_key(node)?;
        self.metadata.take_outgoing(&key);
        let kept = self.metadata.latest(&key).map(|it| without_time(it.metadata.clone()));
        match kept.filter(|it| !it.is_empty()) {
            Some(kept) => self.set_pending(node, &key, kept),
            None => Ok(()),
        }
    }

    /// The metadata for the upload of a staged file.
    pub(in crate::front) fn metadata_to_store(&self, node: u64, key: &str) -> FsResult<UserMetadata> {
        if !self.stores_metadata() {
            return Ok(UserMetadata::new());
        }
        if let Some(pending) = self.pending_metadata(node) {
            return Ok(pending);
        }
        if self.table.has(node, NEW) {
            return Ok(UserMetadata::new());
        }
        Ok(without_time(self.headers_of(node, key)?.metadata.clone()))
    }

    /// A staged file was stored.
    pub(in crate::front) fn note_metadata(&self, node: u64, key: &str, headers: ObjectHeaders) {
        self.forget_pending(node);
        self.metadata.insert(key, headers);
    }

    /// chmod(2), chown(2), utimensat(2).
    pub(in crate::front) fn set_metadata(&self, node: u64, change: &StoredAttributes) -> FsResult<()> {
        self.change_metadata(node, |metadata| {
            change.write(metadata);
            Ok(())
        })
    }

    /// Changes what is stored with a file or directory: with its next upload, or now.
    pub(super) fn change_metadata(
        &self,
        node: u64,
        change: impl Fn(&mut UserMetadata) -> FsResult<()>,
    ) -> FsResult<()> {
        let key = self.metadata_key(node)?;
        if !self.table.is_file(node) {
            return self.change_directory(node, &key, change);
        }
        if self.is_uploading(node) {
            return self.change_pending(node, &key, change);
        }
        if !self.config.allow_overwrite {
            return Err(FsError::new(
                libc::EPERM,
                "changing an existing file is disabled; mount with --allow-overwrite to enable it".into(),
            ));
        }
        let headers = self.headers_of(node, &key)?;
        let mut metadata = headers.metadata.clone();
        change(&mut metadata)?;
        if metadata == headers.metadata {
            return Ok(());
        }
        if StoredAttributes::parse(&metadata).mtime.is_none() {
            // The time of the object is that of its copy.
            let mtime = Some(self.attributes(node)?.attr.mtime);
            StoredAttributes { mtime, ..StoredAttributes::default() }.write(&mut metadata);
        }
        self.bucket.replace_metadata(&key, &metadata, &headers)?;
        self.revalidate_node(node)
    }

    fn change_pending(&self, node: u64, key: &str, change: impl Fn(&mut UserMetadata) -> FsResult<()>) -> FsResult<()> {
        let change = || {
            let mut metadata = self.metadata_to_store(node, key)?;
            change(&mut metadata)?;
            self.set_pending(node, key, metadata)
        };
        let changed = self.with_copy(node, |file| {
            // What is being stored now is not changed.
            let _turn = file.lock();
            if file.is_lost() {
                return Err(file.lost());
            }
            change()?;
            file.slot().set(crate::state::DIRTY);
            Ok(())
        });
        if let Some(changed) = changed {
            return changed;
        }
        change()?;
        // The upload may have been completed meanwhile, or the file was staged.
        self.with_copy(node, |file| file.slot().set(crate::state::DIRTY));
        if !self.is_uploading(node) {
            self.send_late_metadata(node);
        }
        Ok(())
    }

    fn change_directory(
        &self,
        node: u64,
        key: &str,
        change: impl Fn(&mut UserMetadata) -> FsResult<()>,
    ) -> FsResult<()> {
        if node == super::super::table::ROOT || !self.config.allow_delete {
            return Ok(());
        }
        let before = self.current_metadata(node, key)?;
        let mut metadata = before.clone();
        change(&mut metadata)?;
        if metadata == before {
            return Ok(());
        }
        let etag = self.bucket.put(key, Vec::new(), crate::front::bucket::WriteCondition::None, &metadata)?;
        self.metadata.insert(key, ObjectHeaders::new(&etag, metadata));
        Ok(())
    }

    /// The object has new metadata, and perhaps another `ETag`.
    pub(super) fn revalidate_node(&self, node: u64) -> FsResult<()> {
        self.table.forget_pages(node);
        let (parent, name) = self.table.location(node)?;
        let directory = self.inode(parent)?;
        let inode = self.inode(node)?;
        let _ = block_on(self.metablock.getattr(inode, true));
        self.revalidate(parent, directory, &name)
    }
}
