//! The mount table: a parser for `/proc/<pid>/mountinfo` and lookups in the result. Reading the file is the caller's job.
//!
//! The `procfs` crate is not used: it reads mountinfo as UTF-8 text and leaves octal escapes in paths as they are, so one
//! mount point with an unusual name would hide the whole table or itself. A table that is incomplete makes the node
//! believe that nothing uses a mount.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fmt;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The mount source of every FUSE mount of this driver, in all its versions.
pub const OUR_SOURCE: &str = "mountpoint-s3";

/// The mounts of one namespace at one moment, in the kernel's order.
#[derive(Clone, Debug, Default)]
pub struct MountTable {
    mounts: Vec<Mount>,
    /// Made by the first lookup. A sweep looks up each of its sources, so that a search of the whole table would take time with the
    /// square of the number of volumes.
    index: OnceLock<Index>,
}

/// Positions of mounts, in the kernel's order.
#[derive(Clone, Debug, Default)]
struct Index {
    /// By the hash of their path.
    by_path: HashMap<u64, Vec<usize>>,
    by_device: HashMap<Device, Vec<usize>>,
}

/// One mount, as the kernel describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    pub id: u64,
    pub parent: u64,
    /// The file system: all binds of one FUSE connection have the same.
    pub device: Device,
    /// The directory of the file system that is mounted here.
    pub root: PathBuf,
    pub at: PathBuf,
    /// Whether this mount is read-only; `super_read_only` is the same for the file system.
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

/// A line that is not in the format of proc(5). It is not skipped, because it may be a mount that is in use.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("mount table line {line:?} has no valid {field}")]
pub struct InvalidLine {
    line: String,
    field: &'static str,
}

impl MountTable {
    pub fn parse(text: &[u8]) -> Result<Self, InvalidLine> {
        let lines = text.split(|it| *it == b'\n').filter(|it| !it.is_empty());
        lines.map(parse_line).collect()
    }

    pub fn entries(&self) -> &[Mount] {
        &self.mounts
    }

    /// The topmost mount at exactly this path, which must be spelled as the kernel does (see `Host::resolve`).
    pub fn at(&self, path: &Path) -> Option<&Mount> {
        // A mount moved beneath another (MOVE_MOUNT_BENEATH) is listed after the one that covers it, so the order does not
        // decide: the topmost mount is the one that is the parent of no other mount at this path.
        let all: Vec<&Mount> = self.all_at(path).collect();
        let is_covered = |mount: &&&Mount| all.iter().any(|it| it.parent == mount.id && it.id != mount.id);
        all.iter().rev().find(|it| !is_covered(it)).or(all.last()).copied()
    }

    /// Every mount at exactly this path, including those covered by another one.
    pub fn all_at<'a>(&'a self, path: &Path) -> impl Iterator<Item = &'a Mount> {
        let found = self.index().by_path.get(&hash_of(path)).map_or(&[][..], Vec::as_slice);
        found.iter().map(|it| &self.mounts[*it]).filter(move |it| it.at == path)
    }

    /// Every mount of one file system: the source and its bind mounts.
    pub fn of_device(&self, device: Device) -> impl Iterator<Item = &Mount> {
        let found = self.index().by_device.get(&device).map_or(&[][..], Vec::as_slice);
        found.iter().map(|it| &self.mounts[*it])
    }

    /// Every mount somewhere below a directory, the directory itself excluded.
    pub fn beneath<'a>(&'a self, directory: &Path) -> impl Iterator<Item = &'a Mount> {
        self.mounts.iter().filter(move |it| it.at != directory && it.at.starts_with(directory))
    }

    fn index(&self) -> &Index {
        self.index.get_or_init(|| {
            let mut index = Index::default();
            for (position, mount) in self.mounts.iter().enumerate() {
                index.by_path.entry(hash_of(&mount.at)).or_default().push(position);
                index.by_device.entry(mount.device).or_default().push(position);
            }
            index
        })
    }
}

/// Equal paths have equal hashes, however they are spelled.
fn hash_of(path: &Path) -> u64 {
    let mut hasher = DefaultHasher::new();
    path.hash(&mut hasher);
    hasher.finish()
}

impl PartialEq for MountTable {
    fn eq(&self, other: &Self) -> bool {
        self.mounts == other.mounts
    }
}

impl Eq for MountTable {}

impl FromIterator<Mount> for MountTable {
    fn from_iter<T: IntoIterator<Item = Mount>>(mounts: T) -> Self {
        Self { mounts: mounts.into_iter().collect(), index: OnceLock::new() }
    }
}

impl Mount {
    /// A FUSE mount of an engine, made by any version of this driver.
    pub fn is_ours(&self) -> bool {
        self.source == OUR_SOURCE && self.is_fuse()
    }

    pub fn is_fuse(&self) -> bool {
        self.kind == "fuse" || self.kind.starts_with("fuse.")
    }
}

impl fmt::Display for Device {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.major, self.minor)
    }
}

/// `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue`, see proc(5).
fn parse_line(line: &[u8]) -> Result<Mount, InvalidLine> {
    let invalid = |field| InvalidLine { line: String::from_utf8_lossy(line).into_owned(), field };
    // Split at every single space: the source field may be empty.
    let mut fields = line.split(|it| *it == b' ');

    let id = fields.next().and_then(number).ok_or_else(|| invalid("mount id"))?;
    let parent = fields.next().and_then(number).ok_or_else(|| invalid("parent id"))?;
    let device = fields.next().and_then(device).ok_or_else(|| invalid("device"))?;
    let root = fields.next().filter(|it| !it.is_empty()).ok_or_else(|| invalid("root"))?;
    let at = fields.next().filter(|it| it.starts_with(b"/")).ok_or_else(|| invalid("mount point"))?;
    let options = fields.next().filter(|it| !it.is_empty()).ok_or_else(|| invalid("mount options"))?;
    // Any number of optional fields (`shared:7`), terminated by a dash.
    fields.find(|it| *it == b"-").ok_or_else(|| invalid("separator"))?;
    let kind = fields.next().filter(|it| !it.is_empty()).ok_or_else(|| invalid("file system type"))?;
    let source = fields.next().ok_or_else(|| invalid("source"))?;
    let super_options = fields.next().ok_or_else(|| invalid("file system options"))?;

    Ok(Mount {
        id,
        parent,
        device,
        root: unescaped_path(root),
        at: unescaped_path(at),
        read_only: is_read_only(options),
        super_read_only: is_read_only(super_options),
        kind: unescaped_text(kind),
        source: unescaped_text(source),
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

fn unescaped_path(text: &[u8]) -> PathBuf {
    PathBuf::from(OsString::from_vec(unescaped(text)))
}

fn unescaped_text(text: &[u8]) -> String {
    String::from_utf8_lossy(&unescaped(text)).into_owned()
}

/// The kernel escapes space, tab, newline, backslash (and `#` in some fields) as a backslash and three octal digits.
fn unescaped(text: &[u8]) -> Vec<u8> {
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SOURCE: &str = "61 27 0:53 / /mnt/source rw,nosuid,nodev,noatime shared:7 - fuse mountpoint-s3 rw,user_id=0";

    fn check(line: &str) -> Mount {
        let table = MountTable::parse(line.as_bytes()).unwrap();
        assert_eq!(table.entries().len(), 1);
        table.entries()[0].clone()
    }

    fn check_invalid(line: &str, expected: &str) {
        assert_eq!(MountTable::parse(line.as_bytes()).unwrap_err().to_string(), expected);
    }

    fn table(lines: &[&str]) -> MountTable {
        MountTable::parse(lines.join("\n").as_bytes()).unwrap()
    }

    #[test]
    fn every_field_is_read() {
        let expected = Mount {
            id: 61,
            parent: 27,
            device: Device { major: 0, minor: 53 },
            root: "/".into(),
            at: "/mnt/source".into(),
            read_only: false,
            super_read_only: false,
            kind: "fuse".to_owned(),
            source: "mountpoint-s3".to_owned(),
        };
        assert_eq!(check(SOURCE), expected);
        assert_eq!(expected.device.to_string(), "0:53");
    }

    #[test]
    fn any_number_of_optional_fields() {
        for optional in ["", "shared:1 ", "shared:1 master:2 ", "unbindable ", "propagate_from:3 new-in-linux-9:x "] {
            let mount = check(&format!("1 2 0:3 / /at rw {optional}- fuse.mountpoint-s3 mountpoint-s3 rw"));
            assert_eq!(mount.kind, "fuse.mountpoint-s3", "{optional}");
        }
    }

    #[test]
    fn read_only_mounts_and_read_only_file_systems() {
        let flags = |line| {
            let mount = check(line);
            (mount.read_only, mount.super_read_only)
        };
        assert_eq!(flags("1 2 0:3 / /at ro,relatime - tmpfs x rw,ro_something=1"), (true, false));
        assert_eq!(flags("1 2 0:3 / /at rw,relatime - tmpfs x ro,size=4k"), (false, true));
        assert_eq!(flags("1 2 0:3 / /at rw,errors=remount-ro - tmpfs x rw"), (false, false));
    }

    #[test]
    fn octal_escapes_are_decoded() {
        let at = |text: &str| check(&format!("1 2 0:3 / {text} rw - fuse x rw")).at;
        assert_eq!(at(r"/a\040b\011c\012d\134e\043f"), Path::new("/a b\tc\nd\\e#f"));
        assert_eq!(at(r"/a\134040b"), Path::new(r"/a\040b"));
        assert_eq!(at(r"/a\047\170"), Path::new("/a'x"));
        assert_eq!(at(r"/not\escaped\09\4000\"), Path::new(r"/not\escaped\09\4000\"));
        assert_eq!(at("/ünïcødé-🪣"), Path::new("/ünïcødé-🪣"));
    }

    #[test]
    fn paths_need_not_be_utf8() {
        let table = MountTable::parse(b"1 2 0:3 / /\xff\\040\xfe rw - fuse x rw\n").unwrap();
        assert_eq!(table.entries()[0].at, PathBuf::from(OsString::from_vec(b"/\xff \xfe".to_vec())));
    }

    #[test]
    fn unusual_lines_that_kernels_write() {
        assert_eq!(check("1 2 0:3 / /at rw - tmpfs  rw").source, "");
        assert_eq!(
            check("1 2 0:3 net:[4026531992] /run/netns/a rw shared:1 - nsfs nsfs rw").root,
            Path::new("net:[4026531992]")
        );
        assert_eq!(check("1 2 0:3 /gone//deleted /at rw - tmpfs x rw").root, Path::new("/gone//deleted"));
        assert_eq!(check("1 1 0:3 / / rw - - - rw").kind, "-");
        assert_eq!(MountTable::parse(b"").unwrap(), MountTable::default());
        assert_eq!(MountTable::parse(b"\n\n").unwrap(), MountTable::default());
    }

    #[test]
    fn a_malformed_line_is_an_error() {
        check_invalid(
            "x 2 0:3 / /at rw - fuse x rw",
            "mount table line \"x 2 0:3 / /at rw - fuse x rw\" has no valid mount id",
        );
        check_invalid("1", "mount table line \"1\" has no valid parent id");
        check_invalid("1 2 03 / /at", "mount table line \"1 2 03 / /at\" has no valid device");
        check_invalid("1 2 0:3", "mount table line \"1 2 0:3\" has no valid root");
        check_invalid("1 2 0:3 / at", "mount table line \"1 2 0:3 / at\" has no valid mount point");
        check_invalid("1 2 0:3 / /at", "mount table line \"1 2 0:3 / /at\" has no valid mount options");
        check_invalid("1 2 0:3 / /at rw x", "mount table line \"1 2 0:3 / /at rw x\" has no valid separator");
        check_invalid("1 2 0:3 / /at rw -", "mount table line \"1 2 0:3 / /at rw -\" has no valid file system type");
        check_invalid("1 2 0:3 / /at rw - fuse", "mount table line \"1 2 0:3 / /at rw - fuse\" has no valid source");
        check_invalid(
            "1 2 0:3 / /at rw - fuse x",
            "mount table line \"1 2 0:3 / /at rw - fuse x\" has no valid file system options",
        );
    }

    #[test]
    fn ours_are_the_fuse_mounts_with_our_mount_source() {
        let is_ours = |kind: &str, source: &str| check(&format!("1 2 0:3 / /at rw - {kind} {source} rw")).is_ours();
        assert!(is_ours("fuse", "mountpoint-s3"));
        assert!(is_ours("fuse.mountpoint-s3", "mountpoint-s3"));
        assert!(!is_ours("fuse.s3fs", "s3fs"));
        assert!(!is_ours("fuseblk", "mountpoint-s3"));
        assert!(!is_ours("fusectl", "mountpoint-s3"));
        assert!(!is_ours("tmpfs", "mountpoint-s3"));
    }

    #[test]
    fn the_topmost_mount_is_the_one_that_nothing_covers() {
        let stacked = table(&["5 1 0:5 / /at rw - tmpfs below rw", "6 5 0:6 / /at rw - tmpfs above rw"]);
        assert_eq!(stacked.at(Path::new("/at")).unwrap().source, "above");
        let beside = table(&["5 1 0:5 / /at rw - tmpfs one rw", "6 1 0:6 / /at rw - tmpfs later rw"]);
        assert_eq!(beside.at(Path::new("/at")).unwrap().source, "later");
        assert_eq!(stacked.all_at(Path::new("/at")).count(), 2);
        // A mount moved beneath another has a higher ID than the one above it.
        let beneath = table(&["6 7 0:6 / /at rw - tmpfs above rw", "7 1 0:7 / /at rw - tmpfs below rw"]);
        assert_eq!(beneath.at(Path::new("/at")).unwrap().source, "above");
        assert_eq!(beneath.at(Path::new("/at/")).unwrap().source, "above");
        assert_eq!(beneath.at(Path::new("/")), None);
        // The root of a namespace may be its own parent.
        assert_eq!(table(&["1 1 0:3 / / rw - rootfs none rw"]).at(Path::new("/")).unwrap().id, 1);
    }

    #[test]
    fn mounts_are_found_by_device_and_by_directory() {
        let mounts = table(&[
            SOURCE,
            "62 27 0:53 / /pods/a/mount ro - fuse mountpoint-s3 rw",
            "63 27 0:54 / /pods/ab rw - fuse mountpoint-s3 rw",
            "64 27 0:55 / /pods/a rw - tmpfs x rw",
        ]);
        let at = |found: Vec<&Mount>| found.iter().map(|it| it.at.to_str().unwrap().to_owned()).collect::<Vec<_>>();
        assert_eq!(at(mounts.of_device(Device { major: 0, minor: 53 }).collect()), ["/mnt/source", "/pods/a/mount"]);
        assert_eq!(at(mounts.beneath(Path::new("/pods/a")).collect()), ["/pods/a/mount"]);
        assert_eq!(at(mounts.beneath(Path::new("/pods")).collect()), ["/pods/a/mount", "/pods/ab", "/pods/a"]);
    }

    #[test]
    fn thousands_of_mounts() {
        let lines: Vec<String> =
            (0..20_000).map(|it| format!("{it} 1 0:{it} / /mnt/{it} rw - fuse mountpoint-s3 rw")).collect();
        let mounts = MountTable::parse(lines.join("\n").as_bytes()).unwrap();
        assert_eq!(mounts.entries().len(), 20_000);
        assert_eq!(mounts.at(Path::new("/mnt/19999")).unwrap().id, 19_999);
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(text in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = MountTable::parse(&text);
        }

        #[test]
        fn no_text_that_looks_like_a_table_makes_the_parser_panic(text in "([0-9:/,\\\\ -]|rw|fuse|\n){0,80}") {
            let _ = MountTable::parse(text.as_bytes());
        }

        #[test]
        fn every_path_survives_the_kernels_escapes(name in prop::collection::vec(1_u8.., 0..40)) {
            let mut path = b"/".to_vec();
            path.extend(name);
            let mut line = b"1 2 0:3 / ".to_vec();
            for byte in &path {
                match byte {
                    b' ' | b'\t' | b'\n' | b'\\' => line.extend(format!("\\{byte:03o}").bytes()),
                    _ => line.push(*byte),
                }
            }
            line.extend(b" rw - fuse x rw\n");
            let table = MountTable::parse(&line).unwrap();
            prop_assert_eq!(&table.entries()[0].at, &PathBuf::from(OsString::from_vec(path)));
        }
    }
}
