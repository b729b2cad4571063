//! Symbolic links: small objects whose content is the target and whose stored mode says what they are.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::SystemTime;

use fuser::FileAttr;
use futures::executor::block_on;
use mountpoint_s3_client::ObjectClient;
use mountpoint_s3_client::types::ETag;
use mountpoint_s3_fs::fs::{Entry, ToErrno};

use super::{Creator, MetadataMode, StoredAttributes};
use crate::client::{ObjectHeaders, UserMetadata};
use crate::front::attributes::STAT_BLOCK;
use crate::front::bucket::WriteCondition;
use crate::front::names::Name;
use crate::front::resume::Delivery;
use crate::front::{Front, FsError, FsResult};

/// The kernel accepts no longer target.
const LONGEST_TARGET: u64 = 4096;
const LINK_MODE: u32 = libc::S_IFLNK | 0o777;

impl<C: ObjectClient + Clone + Send + Sync + 'static> Front<C> {
    pub(in crate::front) fn make_link(
        &self,
        delivery: Delivery,
        Name { parent, name }: Name<'_>,
        target: &Path,
        creator: Creator,
    ) -> FsResult<Entry> {
        if self.config.metadata != MetadataMode::Store {
            return Err(FsError::new(
                libc::EPERM,
                "symbolic links are object metadata; mount with --metadata store to have them".into(),
            ));
        }
        let directory = self.inode(parent)?;
        // Created as a file first: the superblock may remember for a moment that the name does not exist.
        let created = match block_on(self.files.mknod(directory, name, libc::S_IFREG | 0o644, 0, 0)) {
            Err(error) if delivery == Delivery::Resent && error.to_errno() == libc::EEXIST => {
                return self.lookup(parent, name);
            }
            other => other?,
        };
        let inode = created.attr.ino;
        let key = self.bucket.key(&self.table.path(parent).join(name))?;
        let content = target.as_os_str().as_bytes().to_vec();
        let size = content.len() as u64;
        if let Err(error) = self.store_link(inode, &key, content, creator) {
            let _ = block_on(self.metablock.getattr(inode, true));
            block_on(self.files.forget(inode, 1));
            return Err(error);
        }
        let entry = self.remember(parent, name, created, 0)?;
        self.table.stored(entry.attr.ino);
        let attr = FileAttr { size, blocks: size.div_ceil(STAT_BLOCK), ..entry.attr };
        Ok(Entry { attr: self.with_metadata(attr.ino, attr), ..entry })
    }

    fn store_link(&self, inode: u64, key: &str, content: Vec<u8>, creator: Creator) -> FsResult<()> {
        let length = content.len();
        let mut metadata = UserMetadata::new();
        StoredAttributes { mode: Some(LINK_MODE), ..self.owner_to_store(creator) }.write(&mut metadata);
        let claim = self.claim_inode(inode)?;
        let stored = self.bucket.put(key, content, WriteCondition::None, &metadata);
        let etag = stored.as_deref().ok().map(ETag::from);
        let finished = block_on(async {
            if etag.is_some() {
                self.metablock.inc_file_size(inode, length).await?;
            }
            self.metablock.finish_writing(inode, etag, claim).await
        });
        let etag = stored?;
        finished.map_err(|error| FsError::new(error.to_errno(), error.to_string()))?;
        self.metadata.insert(key, ObjectHeaders::new(&etag, metadata).written_at(SystemTime::now()));
        Ok(())
    }

    pub(in crate::front) fn read_link(&self, node: u64) -> FsResult<Vec<u8>> {
        let key = self.bucket.key(&self.table.path(node))?;
        let found = self.bucket.head(&key)?.ok_or_else(|| FsError::new(libc::ENOENT, "the link is gone".into()))?;
        if found.size == 0 || LONGEST_TARGET < found.size {
            return Err(FsError::new(libc::EINVAL, "the object is not a symbolic link".into()));
        }
        Ok(self.bucket.fetch(&key, &found.etag, 0..found.size)?.into())
    }
}
