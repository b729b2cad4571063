//! The mount table: parsing `/proc/self/mountinfo` and asking questions about it. Pure; `kernel` reads the file.

use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

/// The source our FUSE mounts carry: how old and new drivers recognise their own.
pub(super) const OUR_SOURCE: &str = "mountpoint-s3";

/// The mounts of one namespace at one moment, in the kernel's order: of two mounts at one path, the later is on top.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MountTable {
    mounts: Vec<Mount>,
}

/// One mount, as the kernel describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    pub id: u64,
    pub parent: u64,
    /// The file system: all binds of one FUSE connection have the same.
    pub device: Device,
    /// The directory of the file system that is shown here.
    pub root: PathBuf,
    pub at: PathBuf,
    /// This mount is read-only. The file system may be so by itself, see `super_read_only`.
    pub read_only: bool,
    pub super_read_only: bool,
    /// The type of the file system, for example `fuse` or `fuse.mountpoint-s3`.
    pub kind: String,
    pub source: String,
}

/// The number of a file system. For FUSE, `minor` is also the number of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Device {
    pub major: u32,
    pub minor: u32,
}

/// A line which no kernel we know would write. Skipping it could hide a mount that somebody uses.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("mount table line {line:?} has no valid {field}")]
pub struct OddLine {
    line: String,
    field: &'static str,
}

impl MountTable {
    pub fn parse(text: &[u8]) -> Result<Self, OddLine> {
        let lines = text.split(|it| *it == b'\n').filter(|it| !it.is_empty());
        Ok(Self { mounts: lines.map(parse_line).collect::<Result<_, _>>()? })
    }

    pub fn entries(&self) -> &[Mount] {
        &self.mounts
    }

    /// The topmost mount at exactly this path, which must be spelled as the kernel does (see `Host::resolve`).
    pub fn at(&self, path: &Path) -> Option<&Mount> {
        // A mount that was moved beneath another comes later in the list than the one which covers it, so ask for
        // the one that carries no other mount at the same path.
        let all: Vec<&Mount> = self.all_at(path).collect();
        let is_covered = |mount: &&&Mount| all.iter().any(|it| it.parent == mount.id && it.id != mount.id);
        all.iter().rev().find(|it| !is_covered(it)).or(all.last()).copied()
    }

    /// Every mount at exactly this path, also those which are covered by another.
    pub fn all_at<'a>(&'a self, path: &Path) -> impl Iterator<Item = &'a Mount> {
        self.mounts.iter().filter(move |it| it.at == path)
    }

    /// Every mount of one file system: the source and all its binds.
    pub fn of_device(&self, device: Device) -> impl Iterator<Item = &Mount> {
        self.mounts.iter().filter(move |it| it.device == device)
    }

    /// Every mount somewhere below a directory, the directory itself excluded.
    pub fn beneath<'a>(&'a self, directory: &Path) -> impl Iterator<Item = &'a Mount> {
        self.mounts.iter().filter(move |it| it.at != directory && it.at.starts_with(directory))
    }

    pub(super) fn with_id(&self, id: u64) -> Option<&Mount> {
        self.mounts.iter().find(|it| it.id == id)
    }
}

impl FromIterator<Mount> for MountTable {
    fn from_iter<T: IntoIterator<Item = Mount>>(mounts: T) -> Self {
        Self { mounts: mounts.into_iter().collect() }
    }
}

impl Mount {
    /// A FUSE mount of an engine, made by this driver or a predecessor.
    pub fn is_ours(&self) -> bool {
        self.source == OUR_SOURCE && self.is_fuse()
    }

    pub(super) fn is_fuse(&self) -> bool {
        self.kind == "fuse" || self.kind.starts_with("fuse.")
    }
}

impl fmt::Display for Device {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.major, self.minor)
    }
}

/// `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue`, see proc(5).
fn parse_line(line: &[u8]) -> Result<Mount, OddLine> {
    let odd = |field| OddLine { line: String::from_utf8_lossy(line).into_owned(), field };
    // Fields are separated by single blanks, because one of them (the source) may be empty.
    let mut fields = line.split(|it| *it == b' ');

    let id = fields.next().and_then(number).ok_or_else(|| odd("mount id"))?;
    let parent = fields.next().and_then(number).ok_or_else(|| odd("parent id"))?;
    let device = fields.next().and_then(device).ok_or_else(|| odd("device"))?;
    let root = fields.next().filter(|it| !it.is_empty()).ok_or_else(|| odd("root"))?;
    let at = fields.next().filter(|it| it.starts_with(b"/")).ok_or_else(|| odd("mount point"))?;
    let options = fields.next().filter(|it| !it.is_empty()).ok_or_else(|| odd("mount options"))?;
    // Any number of optional fields (`shared:7`), ended by a dash.
    fields.find(|it| *it == b"-").ok_or_else(|| odd("separator"))?;
    let kind = fields.next().filter(|it| !it.is_empty()).ok_or_else(|| odd("file system type"))?;
    let source = fields.next().ok_or_else(|| odd("source"))?;
    let super_options = fields.next().ok_or_else(|| odd("file system options"))?;

    Ok(Mount {
        id,
        parent,
        device,
        root: decoded_path(root),
        at: decoded_path(at),
        read_only: is_read_only(options),
        super_read_only: is_read_only(super_options),
        kind: decoded_text(kind),
        source: decoded_text(source),
    })
}

fn number<T: std::str::FromStr>(text: &[u8]) -> Option<T> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

fn device(text: &[u8]) -> Option<Device> {
    let colon = text.iter().position(|it| *it == b':')?;
    Some(Device { major: number(&text[..colon])?, minor: number(&text[colon + 1..])? })
}

fn is_read_only(options: &[u8]) -> bool {
    options.split(|it| *it == b',').any(|it| it == b"ro")
}

fn decoded_path(text: &[u8]) -> PathBuf {
    PathBuf::from(OsString::from_vec(decoded(text)))
}

fn decoded_text(text: &[u8]) -> String {
    String::from_utf8_lossy(&decoded(text)).into_owned()
}

/// The kernel writes blank, tab, newline, backslash (and, in some fields, `#`) as a backslash and three octal digits.
fn decoded(text: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((first, after)) = rest.split_first() {
        if let (b'\\', [high @ b'0'..=b'3', middle @ b'0'..=b'7', low @ b'0'..=b'7', after @ ..]) = (first, after) {
            bytes.push((high - b'0') << 6 | (middle - b'0') << 3 | (low - b'0'));
            rest = after;
        } else {
            bytes.push(*first);
            rest = after;
        }
    }
    bytes
}
