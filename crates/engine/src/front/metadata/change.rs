//! Reads and changes the attributes that are stored with an object.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use fuser::{FileAttr, FileType};
use futures::FutureExt as _;
use futures::executor::block_on;
use mountpoint_s3_client::ObjectClient;

use super::{MetadataMode, StoredAttributes, without_time};
use crate::client::{ObjectHeaders, UserMetadata};
use crate::front::{Front, FsError, FsResult};
use crate::state::NEW;

/// How long a lookup waits for attributes that only the object knows.
const PATIENCE: Duration = Duration::from_secs(1);

impl<C: ObjectClient + Clone + Send + Sync + 'static> Front<C> {
    fn stores_metadata(&self) -> bool {
        self.config.metadata == MetadataMode::Store
    }

    /// The key of a node: that of its object, or of the marker of a directory.
    fn metadata_key(&self, node: u64) -> FsResult<String> {
        let key = self.bucket.key(&self.table.path(node))?;
        Ok(if self.table.is_file(node) { key } else { format!("{key}/") })
    }

    /// The attributes with what is stored of them, as far as that is known without a request.
    pub(in crate::front) fn with_metadata(&self, node: u64, attributes: FileAttr) -> FileAttr {
        if !self.stores_metadata() || node == super::super::table::ROOT {
            return attributes;
        }
        match self.known_metadata(node) {
            Some(metadata) => StoredAttributes::parse(&metadata).apply(attributes, self.config.overrides),
            None => attributes,
        }
    }

    fn known_metadata(&self, node: u64) -> Option<UserMetadata> {
        let key = self.metadata_key(node).ok()?;
        if let Some(outgoing) = self.metadata.outgoing(&key) {
            return Some(outgoing);
        }
        if !self.table.is_file(node) {
            return self.metadata.latest(&key).map(|it| it.metadata.clone());
        }
        self.metadata.get(&key, &self.etag_of(node)?).map(|it| it.metadata.clone())
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
    fn headers_of(&self, node: u64, key: &str) -> FsResult<Arc<ObjectHeaders>> {
        let known = self.etag_of(node).and_then(|etag| self.metadata.get(key, &etag));
        if let Some(known) = known {
            return Ok(known);
        }
        // The answer is seen by the cache.
        self.bucket.head(key)?;
        Ok(self.metadata.latest(key).unwrap_or_default())
    }

    /// The attributes after a look at the object, if a listing could not tell them.
    pub(in crate::front) fn with_fetched_metadata(&self, node: u64, attributes: FileAttr) -> FileAttr {
        let is_unknown = self.stores_metadata()
            && attributes.kind == FileType::RegularFile
            && !self.table.has(node, NEW)
            && self.known_metadata(node).is_none()
            && self.etag_of(node).is_some();
        if is_unknown
            && let Ok(key) = self.metadata_key(node)
            && self.metadata.is_worth_asking(&key)
        {
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
            && self.known_metadata(node).is_none()
    }

    /// A new file has the permissions that its creator asked for.
    pub(in crate::front) fn note_mode(&self, node: u64, mode: u32, usual: u16) {
        let permissions = mode & super::PERMISSIONS;
        if self.stores_metadata()
            && permissions != u32::from(usual)
            && let Ok(key) = self.metadata_key(node)
        {
            let mut metadata = UserMetadata::new();
            StoredAttributes { mode: Some(mode), ..StoredAttributes::default() }.write(&mut metadata);
            self.metadata.send(&key, metadata);
        }
    }

    /// Before a stored file is replaced: what is known of it stays, but for its time.
    pub(in crate::front) fn keep_metadata(&self, node: u64) {
        if self.stores_metadata()
            && !self.table.has(node, NEW)
            && let Ok(key) = self.metadata_key(node)
            && self.metadata.outgoing(&key).is_none()
            && let Some(known) = self.metadata.latest(&key)
        {
            let kept = without_time(known.metadata.clone());
            if !kept.is_empty() {
                self.metadata.send(&key, kept);
            }
        }
    }

    /// The metadata for the upload of a staged file.
    pub(in crate::front) fn metadata_to_store(&self, node: u64, key: &str) -> UserMetadata {
        if !self.stores_metadata() {
            return UserMetadata::new();
        }
        if let Some(outgoing) = self.metadata.outgoing(key) {
            return outgoing;
        }
        if self.table.has(node, NEW) {
            return UserMetadata::new();
        }
        self.headers_of(node, key).map(|it| without_time(it.metadata.clone())).unwrap_or_default()
    }

    /// A staged file was stored with this metadata.
    pub(in crate::front) fn note_metadata(&self, key: &str, etag: &str, metadata: UserMetadata) {
        self.metadata.take_outgoing(key);
        self.metadata.insert(key, ObjectHeaders::new(etag, metadata));
    }

    /// chmod(2), chown(2), utimensat(2).
    pub(in crate::front) fn set_metadata(&self, node: u64, change: &StoredAttributes) -> FsResult<()> {
        let key = self.metadata_key(node)?;
        let is_uploading = self.table.has(node, NEW) || self.staged.get(node).is_some() || self.has_writer(node);
        if self.table.is_file(node) && is_uploading {
            let mut metadata = self.metadata_to_store(node, &key);
            change.write(&mut metadata);
            self.metadata.send(&key, metadata);
            self.with_copy(node, |file| {
                file.slot().set(crate::state::DIRTY);
            });
            return Ok(());
        }
        if !self.table.is_file(node) {
            return self.set_directory_metadata(node, &key, change);
        }
        if !self.config.allow_overwrite {
            return Err(FsError::new(
                libc::EPERM,
                "changing an existing file is disabled; mount with --allow-overwrite to enable it".into(),
            ));
        }
        let headers = self.headers_of(node, &key)?;
        let mut metadata = headers.metadata.clone();
        change.write(&mut metadata);
        if metadata == headers.metadata {
            return Ok(());
        }
        self.bucket.replace_metadata(&key, &metadata, &headers)?;
        self.revalidate_node(node)
    }

    fn set_directory_metadata(&self, node: u64, key: &str, change: &StoredAttributes) -> FsResult<()> {
        let mut metadata = self.metadata.latest(key).map(|it| it.metadata.clone()).unwrap_or_default();
        change.write(&mut metadata);
        if node == super::super::table::ROOT || !self.config.allow_delete {
            return Ok(());
        }
        let etag = self.bucket.put(key, Vec::new(), crate::front::bucket::WriteCondition::None, &metadata)?;
        self.note_metadata(key, &etag, metadata);
        Ok(())
    }

    /// The object has new metadata, and perhaps another `ETag`.
    fn revalidate_node(&self, node: u64) -> FsResult<()> {
        self.table.forget_pages(node);
        let (parent, name) = self.table.location(node)?;
        let directory = self.inode(parent)?;
        let inode = self.inode(node)?;
        let _ = block_on(self.metablock.getattr(inode, true));
        self.revalidate(parent, directory, &name)
    }

    /// An upload was completed: sends what was set too late to go along with it.
    pub(in crate::front) fn send_late_metadata(&self, node: u64) {
        let Ok(key) = self.metadata_key(node) else { return };
        let Some(metadata) = self.metadata.take_outgoing(&key).filter(|it| !it.is_empty()) else { return };
        let sent = self.headers_of(node, &key).and_then(|headers| {
            if headers.metadata == metadata {
                return Ok(());
            }
            self.bucket.replace_metadata(&key, &metadata, &headers)?;
            self.revalidate_node(node)
        });
        if let Err(error) = sent {
            tracing::warn!(key, %error, "cannot store the attributes of a file");
        }
    }
}
