//! Mode, owner, times and extended attributes of files as object metadata, in the spelling of s3fs. rclone reads it, but for
//! extended attributes.

mod change;
mod links;
mod pending;
mod xattrs;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{FileAttr, FileType, Request};

use crate::client::UserMetadata;

pub use xattrs::is_user_xattr;

const MODE: &str = "mode";
const UID: &str = "uid";
const GID: &str = "gid";
const MTIME: &str = "mtime";
const PERMISSIONS: u32 = 0o7777;
/// The largest decimal value that is a mode. rclone writes octal digits, which are larger as a decimal number.
const LARGEST_MODE: u32 = 0o177_777;

/// How chmod(2), chown(2), utimensat(2), symlink(2) and setxattr(2) are handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetadataMode {
    /// Refused on stored files.
    Refuse,
    /// Succeeds without an effect.
    Ignore,
    /// Stored with the object.
    Store,
}

/// Attributes that were set by a program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoredAttributes {
    /// With the type of the file.
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub mtime: Option<SystemTime>,
}

/// Who makes a file or directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Creator {
    pub uid: u32,
    pub gid: u32,
}

impl Creator {
    pub fn of(request: &Request<'_>) -> Self {
        Self { uid: request.uid(), gid: request.gid() }
    }
}

/// Which stored attributes a flag of the mount overrides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag that is given or not")]
pub struct Overrides {
    pub uid: bool,
    pub gid: bool,
    pub file_mode: bool,
    pub dir_mode: bool,
}

impl StoredAttributes {
    pub fn parse(metadata: &UserMetadata) -> Self {
        let number = |name: &str| metadata.get(name).and_then(|it| it.parse().ok());
        Self {
            mode: metadata.get(MODE).and_then(|it| parse_mode(it)),
            uid: number(UID),
            gid: number(GID),
            mtime: metadata.get(MTIME).and_then(|it| parse_time(it)),
        }
    }

    /// Writes what is set, and leaves everything else as it is.
    pub fn write(&self, metadata: &mut UserMetadata) {
        let mut put = |name: &str, value: Option<String>| {
            if let Some(value) = value {
                metadata.insert(name.to_owned(), value);
            }
        };
        put(MODE, self.mode.map(|it| it.to_string()));
        put(UID, self.uid.map(|it| it.to_string()));
        put(GID, self.gid.map(|it| it.to_string()));
        put(MTIME, self.mtime.map(format_time));
    }

    pub fn is_link(&self) -> bool {
        self.mode.is_some_and(|it| it & libc::S_IFMT == libc::S_IFLNK)
    }

    /// These attributes instead of the usual ones.
    pub fn apply(&self, attributes: FileAttr, overrides: Overrides) -> FileAttr {
        let kind = if self.is_link() && attributes.kind == FileType::RegularFile {
            FileType::Symlink
        } else {
            attributes.kind
        };
        let is_mode_fixed = match kind {
            FileType::Directory => overrides.dir_mode,
            _ => overrides.file_mode,
        };
        let perm = self.mode.filter(|_| !is_mode_fixed).and_then(|it| u16::try_from(it & PERMISSIONS).ok());
        FileAttr {
            kind,
            perm: perm.unwrap_or(attributes.perm),
            uid: self.uid.filter(|_| !overrides.uid).unwrap_or(attributes.uid),
            gid: self.gid.filter(|_| !overrides.gid).unwrap_or(attributes.gid),
            mtime: self.mtime.unwrap_or(attributes.mtime),
            ..attributes
        }
    }
}

/// What was written to a file replaces the time that a program gave it.
pub fn without_time(mut metadata: UserMetadata) -> UserMetadata {
    metadata.remove(MTIME);
    metadata
}

/// s3fs writes the whole mode as a decimal number, rclone as octal digits.
fn parse_mode(text: &str) -> Option<u32> {
    let is_known = |mode: u32| {
        let kind = mode & libc::S_IFMT;
        [0, libc::S_IFREG, libc::S_IFDIR, libc::S_IFLNK].contains(&kind)
    };
    let decimal = text.parse().ok().filter(|it| *it <= LARGEST_MODE && is_known(*it));
    decimal.or_else(|| u32::from_str_radix(text, 8).ok().filter(|it| is_known(*it)))
}

/// Seconds, with nanoseconds after a point: always nine digits, because s3fs reads `.5` as 5 ns.
fn format_time(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{}.{:09}", since.as_secs(), since.subsec_nanos())
}

fn parse_time(text: &str) -> Option<SystemTime> {
    let (seconds, fraction) = text.split_once('.').unwrap_or((text, ""));
    let digits: String = fraction.chars().chain("000000000".chars()).take(9).collect();
    Some(UNIX_EPOCH + Duration::new(seconds.parse().ok()?, digits.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata(pairs: &[(&str, &str)]) -> UserMetadata {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    fn check(text: &str, expected: Option<u32>) {
        assert_eq!(StoredAttributes::parse(&metadata(&[("mode", text)])).mode, expected, "{text}");
    }

    #[test]
    fn modes_are_read_as_s3fs_and_rclone_write_them() {
        check("33261", Some(0o100_755));
        check("100755", Some(0o100_755));
        check("0100664", Some(0o100_664));
        check("41471", Some(0o120_777));
        check("120777", Some(0o120_777));
        check("493", Some(0o755));
        check("rwx", None);
    }

    #[test]
    fn times_have_nanoseconds() {
        let time = UNIX_EPOCH + Duration::new(1_577_934_245, 67_890);
        assert_eq!(format_time(time), "1577934245.000067890");
        assert_eq!(parse_time("1577934245.000067890"), Some(time));
        assert_eq!(parse_time("1577934245"), Some(UNIX_EPOCH + Duration::from_secs(1_577_934_245)));
        assert_eq!(parse_time("soon"), None);
    }

    #[test]
    fn what_is_set_is_written_and_the_rest_is_kept() {
        let mut metadata = metadata(&[("mode", "33188"), ("colour", "blue")]);
        StoredAttributes { mode: Some(0o100_755), ..StoredAttributes::default() }.write(&mut metadata);
        assert_eq!(metadata["mode"], "33261");
        assert_eq!(metadata["colour"], "blue");
        assert_eq!(metadata.len(), 2);
    }
}
