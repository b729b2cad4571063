//! Extended attributes of users (`user.*`), all in the one piece of metadata in which s3fs keeps them.
//!
//! Metadata of S3 is limited to 2 KiB for each object, so attributes are for short values. Other namespaces are answered without
//! looking at anything: the kernel asks for `security.capability` before it writes.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use mountpoint_s3_client::ObjectClient;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

use super::{GID, MODE, MTIME, MetadataMode, UID};
use crate::client::UserMetadata;
use crate::front::resume::Delivery;
use crate::front::{Front, FsError, FsResult};

const XATTR: &str = "xattr";
const USER: &[u8] = b"user.";
/// S3's limit for all names and values of an object's metadata.
const MOST_METADATA: usize = 2048;
/// Room that is left for mode, owner and time, which may be set later.
const RESERVED: usize = 128;
/// As s3fs does it.
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b'/');

/// Whether an attribute is one of those that can be stored.
pub fn is_user_xattr(name: &OsStr) -> bool {
    name.as_bytes().starts_with(USER)
}

/// The extended attributes of one file, also those of other namespaces that another program stored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Xattrs(BTreeMap<String, Vec<u8>>);

impl Xattrs {
    /// None if another program wrote something that is not understood here.
    fn parse(metadata: &UserMetadata) -> Option<Self> {
        let Some(text) = metadata.get(XATTR).filter(|it| !it.is_empty()) else { return Some(Self::default()) };
        let json = percent_decode_str(text).decode_utf8().ok()?;
        let encoded: BTreeMap<String, String> = serde_json::from_str(&json).ok()?;
        let decoded = encoded.into_iter().map(|(name, value)| Some((name, STANDARD.decode(value).ok()?)));
        decoded.collect::<Option<_>>().map(Self)
    }

    fn write(&self, metadata: &mut UserMetadata) -> FsResult<()> {
        if self.0.is_empty() {
            metadata.remove(XATTR);
            return Ok(());
        }
        let encoded: BTreeMap<&String, String> =
            self.0.iter().map(|(name, value)| (name, STANDARD.encode(value))).collect();
        let json = serde_json::to_string(&encoded)
            .map_err(|error| FsError::new(libc::EINVAL, format!("cannot encode the attribute: {error}")))?;
        metadata.insert(XATTR.to_owned(), utf8_percent_encode(&json, ENCODED).to_string());
        let is_attribute = |name: &str| [MODE, UID, GID, MTIME].contains(&name);
        let others = metadata.iter().filter(|(name, _)| !is_attribute(name));
        let size: usize = others.map(|(name, value)| name.len() + value.len()).sum();
        if MOST_METADATA - RESERVED < size {
            return Err(FsError::new(
                libc::ENOSPC,
                format!("an object has at most {MOST_METADATA} bytes of metadata; use shorter or fewer attributes"),
            ));
        }
        Ok(())
    }

    /// setxattr(2) with its flags.
    fn set(&mut self, name: &str, value: &[u8], flags: i32) -> FsResult<()> {
        match self.0.contains_key(name) {
            true if flags & libc::XATTR_CREATE != 0 => {
                Err(FsError::new(libc::EEXIST, "the attribute exists already".into()))
            }
            false if flags & libc::XATTR_REPLACE != 0 => Err(no_such_attribute()),
            _ => {
                self.0.insert(name.to_owned(), value.to_owned());
                Ok(())
            }
        }
    }
}

impl<C: ObjectClient + Clone + Send + Sync + 'static> Front<C> {
    pub(in crate::front) fn get_xattr(&self, node: u64, name: &OsStr) -> FsResult<Vec<u8>> {
        let name = name.to_str().ok_or_else(no_such_attribute)?;
        self.xattrs(node)?.0.remove(name).ok_or_else(no_such_attribute)
    }

    /// The names, each followed by a zero.
    pub(in crate::front) fn list_xattrs(&self, node: u64) -> FsResult<Vec<u8>> {
        let mut names: Vec<String> = self.xattrs(node)?.0.into_keys().collect();
        names.retain(|it| it.as_bytes().starts_with(USER));
        Ok(names.into_iter().flat_map(|it| it.into_bytes().into_iter().chain([0])).collect())
    }

    pub(in crate::front) fn set_xattr(
        &self,
        delivery: Delivery,
        node: u64,
        name: &OsStr,
        value: &[u8],
        flags: i32,
    ) -> FsResult<()> {
        let name = name
            .to_str()
            .ok_or_else(|| FsError::new(libc::EINVAL, "the name of the attribute is not valid UTF-8".into()))?;
        self.change_xattrs(node, |xattrs| {
            let is_done = delivery == Delivery::Resent && xattrs.0.get(name).is_some_and(|it| it == value);
            if is_done { Ok(()) } else { xattrs.set(name, value, flags) }
        })
    }

    pub(in crate::front) fn remove_xattr(&self, delivery: Delivery, node: u64, name: &OsStr) -> FsResult<()> {
        let name = name.to_str().ok_or_else(no_such_attribute)?;
        self.change_xattrs(node, |xattrs| match xattrs.0.remove(name) {
            None if delivery == Delivery::First => Err(no_such_attribute()),
            Some(_) | None => Ok(()),
        })
    }

    fn xattrs(&self, node: u64) -> FsResult<Xattrs> {
        if self.config.metadata != MetadataMode::Store || self.has_no_object(node) {
            return Ok(Xattrs::default());
        }
        let key = self.metadata_key(node)?;
        Ok(Xattrs::parse(&self.current_metadata(node, &key)?).unwrap_or_default())
    }

    fn change_xattrs(&self, node: u64, change: impl Fn(&mut Xattrs) -> FsResult<()>) -> FsResult<()> {
        if self.config.metadata == MetadataMode::Ignore {
            return Ok(());
        }
        if self.has_no_object(node) {
            let reason = "extended attributes are stored with an object, and there is none for this file".into();
            return Err(FsError::new(libc::ENOTSUP, reason));
        }
        if !self.table.is_file(node) && !self.config.allow_delete {
            let reason = "directories have objects of their own with --allow-delete only".into();
            return Err(FsError::new(libc::EPERM, reason));
        }
        self.change_metadata(node, |metadata| {
            let mut xattrs = Xattrs::parse(metadata).ok_or_else(|| {
                let reason = "another program wrote extended attributes (x-amz-meta-xattr) that cannot be read here; \
                    remove them from the object to set others";
                FsError::new(libc::EIO, reason.into())
            })?;
            change(&mut xattrs)?;
            xattrs.write(metadata)
        })
    }

    /// The root of the mount, and files whose name is gone.
    fn has_no_object(&self, node: u64) -> bool {
        node == crate::front::table::ROOT || self.table.is_unlinked(node)
    }
}

fn no_such_attribute() -> FsError {
    FsError::new(libc::ENODATA, "there is no such attribute".into())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn metadata(text: &str) -> UserMetadata {
        UserMetadata::from([(XATTR.to_owned(), text.to_owned())])
    }

    fn check(text: &str, expected: Option<&[(&str, &[u8])]>) {
        let expected =
            expected.map(|it| Xattrs(it.iter().map(|(name, value)| ((*name).to_owned(), value.to_vec())).collect()));
        assert_eq!(Xattrs::parse(&metadata(text)), expected, "{text}");
    }

    #[test]
    fn attributes_are_read_as_s3fs_writes_them() {
        check("", Some(&[]));
        check("%7B%7D", Some(&[]));
        check("%7B%22user.k%22%3A%22dmFsdWU%3D%22%7D", Some(&[("user.k", b"value")]));
        check(
            "%7B%22user.a%22%3A%22AA%3D%3D%22%2C%22system.posix_acl_access%22%3A%22%22%7D",
            Some(&[("system.posix_acl_access", b""), ("user.a", b"\0")]),
        );
        check("{\"user.k\":\"dmFsdWU=\"}", Some(&[("user.k", b"value")]));
        check("user.k=value", None);
        check("%7B%22user.k%22%3A%22?%22%7D", None);
    }

    #[test]
    fn attributes_are_written_as_s3fs_writes_them() {
        let mut written = UserMetadata::new();
        let mut xattrs = Xattrs::default();
        xattrs.set("user.k", b"value", 0).unwrap();
        xattrs.write(&mut written).unwrap();
        assert_eq!(written, metadata("%7B%22user.k%22%3A%22dmFsdWU%3D%22%7D"));
        Xattrs::default().write(&mut written).unwrap();
        assert_eq!(written, UserMetadata::new());
    }

    #[test]
    fn there_is_a_limit_and_mode_owner_and_time_fit_beside() {
        let mut xattrs = Xattrs::default();
        xattrs.set("user.long", &[b'x'; 1300], 0).unwrap();
        let mut written = UserMetadata::from([("mode".to_owned(), "33188".to_owned())]);
        xattrs.write(&mut written).unwrap();
        xattrs.set("user.more", &[b'x'; 200], 0).unwrap();
        assert_eq!(xattrs.write(&mut written).unwrap_err().errno, libc::ENOSPC);
    }

    #[test]
    fn the_flags_of_setxattr() {
        let mut xattrs = Xattrs::default();
        assert_eq!(xattrs.set("user.k", b"1", libc::XATTR_REPLACE).unwrap_err().errno, libc::ENODATA);
        xattrs.set("user.k", b"1", libc::XATTR_CREATE).unwrap();
        assert_eq!(xattrs.set("user.k", b"2", libc::XATTR_CREATE).unwrap_err().errno, libc::EEXIST);
        xattrs.set("user.k", b"2", libc::XATTR_REPLACE).unwrap();
        assert_eq!(xattrs.0["user.k"], b"2");
    }

    proptest! {
        #[test]
        fn attributes_are_read_as_they_were_written(name in "\\PC{0,20}", value in prop::collection::vec(any::<u8>(), 0..50)) {
            let xattrs = Xattrs(BTreeMap::from([(format!("user.{name}"), value)]));
            let mut written = UserMetadata::new();
            xattrs.write(&mut written).unwrap();
            prop_assert!(written[XATTR].is_ascii());
            prop_assert_eq!(Xattrs::parse(&written), Some(xattrs));
        }

        #[test]
        fn what_others_wrote_never_makes_the_parser_panic(text in ".*") {
            let _ = Xattrs::parse(&metadata(&text));
        }
    }
}
