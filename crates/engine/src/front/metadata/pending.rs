//! Attributes that were set before a file is stored: they go along with its upload, or follow it.
//!
//! They are in the slot of the node until they are in the bucket, so a successor sends them. The client has them, too, by key,
//! because an upload knows nothing of nodes.

use mountpoint_s3_client::ObjectClient;

use super::MetadataMode;
use crate::client::UserMetadata;
use crate::front::{Front, FsResult};
use crate::state::NEW;

impl<C: ObjectClient + Clone + Send + Sync + 'static> Front<C> {
    pub(in crate::front) fn pending_metadata(&self, node: u64) -> Option<UserMetadata> {
        self.table.metadata(node).map(|text| decode(&text))
    }

    pub(super) fn set_pending(&self, node: u64, key: &str, metadata: UserMetadata) -> FsResult<()> {
        self.table.set_metadata(node, &encode(&metadata))?;
        self.metadata.send(key, metadata);
        Ok(())
    }

    /// They are stored, or the file never will be.
    pub(in crate::front) fn forget_pending(&self, node: u64) {
        if self.table.clear_metadata(node)
            && let Ok(key) = self.metadata_key(node)
        {
            self.metadata.take_outgoing(&key);
        }
    }

    /// Whether the next upload of a file carries its attributes.
    pub(super) fn is_uploading(&self, node: u64) -> bool {
        self.table.has(node, NEW) || self.staged.get(node).is_some() || self.has_writer(node)
    }

    /// An upload was completed: sends what was set too late to go along with it.
    pub(in crate::front) fn send_late_metadata(&self, node: u64) {
        let Some(metadata) = self.pending_metadata(node) else { return };
        let sent = self.metadata_key(node).and_then(|key| self.send_metadata(node, &key, &metadata));
        if let Err(error) = sent {
            tracing::warn!(path = ?self.table.path(node), %error, "cannot store the attributes of a file");
        }
        self.forget_pending(node);
    }

    fn send_metadata(&self, node: u64, key: &str, metadata: &UserMetadata) -> FsResult<()> {
        let is_sent = metadata.is_empty() || self.metadata.latest(key).is_some_and(|it| it.metadata == *metadata);
        if is_sent {
            return Ok(());
        }
        let headers = self.headers_of(node, key)?;
        if headers.etag.is_empty() || headers.metadata == *metadata {
            return Ok(());
        }
        self.bucket.replace_metadata(key, metadata, &headers)?;
        self.revalidate_node(node)
    }

    /// Finds what previous engines had to send. Needs no request to the bucket, and is called before any request is served.
    pub(in crate::front) fn recover_pending(&self) {
        for node in self.table.with_metadata() {
            let metadata = self.pending_metadata(node).filter(|_| self.config.metadata == MetadataMode::Store);
            match (metadata, self.metadata_key(node)) {
                (Some(metadata), Ok(key)) if !self.table.is_unlinked(node) => self.metadata.send(&key, metadata),
                _ => self.forget_pending(node),
            }
        }
    }

    /// Sends what no upload will carry. Called once, while requests are served already.
    pub(in crate::front) fn restore_pending(&self) {
        for node in self.table.with_metadata() {
            if !self.is_uploading(node) {
                self.send_late_metadata(node);
            }
        }
    }
}

fn encode(metadata: &UserMetadata) -> Vec<u8> {
    metadata
        .iter()
        .flat_map(|(name, value)| [name.as_bytes(), b"\0", value.as_bytes(), b"\0"])
        .flatten()
        .copied()
        .collect()
}

/// What is cut off is ignored.
fn decode(text: &[u8]) -> UserMetadata {
    let mut fields: Vec<&[u8]> = text.split(|it| *it == 0).collect();
    fields.pop();
    let text = |field: &[u8]| String::from_utf8_lossy(field).into_owned();
    fields.chunks_exact(2).map(|pair| (text(pair[0]), text(pair[1]))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_successor_reads_what_was_noted() {
        let metadata = UserMetadata::from([("mode".into(), "33188".into()), ("empty".into(), String::new())]);
        assert_eq!(decode(&encode(&metadata)), metadata);
        assert_eq!(decode(&encode(&UserMetadata::new())), UserMetadata::new());
        let expected = UserMetadata::from([("mode".into(), "33188".into())]);
        for damaged in ["mode\x0033188\0uid", "mode\x0033188\0uid\0", "mode\x0033188\0uid\x0012"] {
            assert_eq!(decode(damaged.as_bytes()), expected, "{damaged:?}");
        }
    }
}
