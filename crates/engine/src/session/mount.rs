//! Where the file system appears: a directory that we mount ourselves, or a FUSE descriptor that is mounted already.

use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType, recvmsg, socketpair,
};
use s3csi_handoff::read_ahead;

use super::{AllowedUsers, MountOptions, descriptor};

/// Shown as the device of the mount; scripts look for it.
const SOURCE: &str = "mountpoint-s3";
const DEVICE: &str = "/dev/fuse";
/// Linux's fixed number of /dev/fuse. Its path says nothing, because the descriptor may come from another mount namespace.
const DEVICE_NUMBER: (u32, u32) = (10, 229);
const HELPER: &str = "fusermount3";

#[derive(Debug, thiserror::Error)]
pub enum MountError {
    #[error("mount point {path:?} does not exist")]
    Missing { path: PathBuf },

    #[error("mount point {path:?} is not a directory")]
    NotADirectory { path: PathBuf },

    #[error("mount point {path:?} is mounted already; unmount it first")]
    InUse { path: PathBuf },

    #[error("mount point {path:?} is a dead mount whose process ended; run: umount {}", path.display())]
    Dead { path: PathBuf },

    #[error("cannot stat mount point {path:?}")]
    Unreadable {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },

    #[error("mount point /dev/fd/{number} is not an open descriptor")]
    NotOpen {
        number: RawFd,
        #[source]
        cause: io::Error,
    },

    #[error("mount point /dev/fd/{number} is not a descriptor of /dev/fuse")]
    NotFuse { number: RawFd },

    #[error("the service manager stored the mount without its state; unmount it and mount it again")]
    NoState,

    #[error("{DEVICE} cannot be opened; is FUSE available here?")]
    Device {
        #[source]
        cause: io::Error,
    },

    #[error("mounting {path:?} failed")]
    Mount {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },

    #[error(
        "{HELPER} cannot be run; it is needed to mount without root and for --auto-unmount (Debian: apt install fuse3)"
    )]
    NoHelper {
        #[source]
        cause: io::Error,
    },

    #[error("{HELPER} refused to mount {path:?}")]
    HelperRefused { path: PathBuf },
}

pub enum MountPoint {
    Directory(PathBuf),
    Device(File),
}

/// A mounted FUSE connection.
pub struct Connection {
    pub device: File,
    /// How to take the mount away; none for an inherited descriptor, whose owner unmounts it.
    pub unmount: Option<Unmount>,
}

pub struct Unmount {
    path: PathBuf,
    method: UnmountMethod,
}

enum UnmountMethod {
    Ourselves,
    /// The helper unmounts when this socket is closed, if it was asked to.
    Helper {
        _lifeline: OwnedFd,
    },
}

impl MountPoint {
    pub fn from_directory(path: PathBuf) -> Result<Self, MountError> {
        let metadata = match fs::metadata(&path) {
            Ok(metadata) => metadata,
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Err(MountError::Missing { path }),
            Err(cause) if cause.raw_os_error() == Some(libc::ENOTCONN) => return Err(MountError::Dead { path }),
            Err(cause) => return Err(MountError::Unreadable { path, cause }),
        };
        if !metadata.is_dir() {
            return Err(MountError::NotADirectory { path });
        }
        let path = path.canonicalize().map_err(|cause| MountError::Unreadable { path, cause })?;
        // Without /proc we cannot know; mounting on top of a mount is a mistake, but does no harm.
        let table = fs::read("/proc/self/mountinfo").unwrap_or_default();
        if is_mounted(&table, &path) {
            return Err(MountError::InUse { path });
        }
        Ok(Self::Directory(path))
    }

    pub fn from_descriptor(number: RawFd) -> Result<Self, MountError> {
        let device = File::from(descriptor::inherited(number).map_err(|cause| MountError::NotOpen { number, cause })?);
        let metadata = device.metadata().map_err(|cause| MountError::NotOpen { number, cause })?;
        let is_fuse = metadata.file_type().is_char_device()
            && DEVICE_NUMBER == (rustix::fs::major(metadata.rdev()), rustix::fs::minor(metadata.rdev()));
        if !is_fuse {
            return Err(MountError::NotFuse { number });
        }
        Ok(Self::Device(device))
    }

    pub fn connect(self, options: &MountOptions) -> Result<Connection, MountError> {
        let path = match self {
            Self::Device(device) => return Ok(Connection { device, unmount: None }),
            Self::Directory(path) => path,
        };
        let is_root = rustix::process::geteuid().is_root();
        if is_root && !options.unmounts_itself {
            mount_ourselves(path, options)
        } else {
            mount_with_helper(path, options)
        }
    }
}

impl Unmount {
    /// For a mount of an earlier process. Does not look at the path: nothing serves the mount yet.
    pub fn of_earlier_process(path: &Path) -> io::Result<Self> {
        Ok(Self { path: std::path::absolute(path)?, method: UnmountMethod::Ourselves })
    }

    /// Whether the mount stays when this process dies.
    pub fn outlives_process(&self) -> bool {
        matches!(self.method, UnmountMethod::Ourselves)
    }

    /// Makes the kernel read far ahead of those who read in order, if we may. The kernel must have been answered.
    pub fn read_far_ahead(&self) {
        let at = |flags| statx(CWD, &self.path, flags, StatxFlags::empty());
        // A statx that needs no answer from the file system.
        let outcome = at(AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_DONT_SYNC)
            .map_err(io::Error::from)
            .and_then(|it| read_ahead::extend(it.stx_dev_major, it.stx_dev_minor));
        if let Err(error) = outcome {
            tracing::debug!(%error, "cannot raise the read-ahead of the mount");
        }
    }

    /// Takes the mount away from the directory at once; files that are open go on working until they are closed.
    pub fn detach(&self) -> io::Result<()> {
        match &self.method {
            UnmountMethod::Ourselves => {
                Ok(rustix::mount::unmount(&self.path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)?)
            }
            UnmountMethod::Helper { .. } => {
                let status =
                    Command::new(HELPER).args(["-u", "-z", "--"]).arg(&self.path).stdin(Stdio::null()).status()?;
                if status.success() { Ok(()) } else { Err(io::Error::other(format!("{HELPER} failed: {status}"))) }
            }
        }
    }
}

fn mount_ourselves(path: PathBuf, options: &MountOptions) -> Result<Connection, MountError> {
    let device =
        OpenOptions::new().read(true).write(true).open(DEVICE).map_err(|cause| MountError::Device { cause })?;
    let mut flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOATIME;
    if options.is_read_only {
        flags |= MountFlags::RDONLY;
    }
    let mut data = format!(
        "fd={},rootmode=40000,user_id={},group_id={},default_permissions",
        device.as_raw_fd(),
        rustix::process::geteuid().as_raw(),
        rustix::process::getegid().as_raw()
    );
    if options.access != AllowedUsers::Owner {
        data.push_str(",allow_other");
    }
    let mounted = CString::new(data)
        .map_err(io::Error::other)
        .and_then(|data| Ok(rustix::mount::mount(SOURCE, &path, "fuse", flags, data.as_c_str())?));
    match mounted {
        Ok(()) => Ok(Connection { device, unmount: Some(Unmount { path, method: UnmountMethod::Ourselves }) }),
        Err(cause) => Err(MountError::Mount { path, cause }),
    }
}

/// The helper mounts with its own rights and sends the descriptor through a socket, which is its standard input.
fn mount_with_helper(path: PathBuf, options: &MountOptions) -> Result<Connection, MountError> {
    let mut words = vec![
        format!("fsname={SOURCE}"),
        "default_permissions".into(),
        "noatime".into(),
        "nosuid".into(),
        "nodev".into(),
    ];
    if options.is_read_only {
        words.push("ro".into());
    }
    // The helper unmounts by itself only what others may use, too; the session then keeps the others out.
    if options.access != AllowedUsers::Owner || options.unmounts_itself {
        words.push("allow_other".into());
    }
    if options.unmounts_itself {
        words.push("auto_unmount".into());
    }
    let no_helper = |cause| MountError::NoHelper { cause };
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
        .map_err(|error| no_helper(error.into()))?;
    let mut helper = Command::new(HELPER)
        .arg("-o")
        .arg(words.join(","))
        .arg("--")
        .arg(&path)
        .env("_FUSE_COMMFD", "0")
        .stdin(theirs)
        .spawn()
        .map_err(no_helper)?;
    let received = receive_descriptor(&ours);
    // The helper of an auto-unmount mount lives as long as the mount does.
    if !options.unmounts_itself {
        let _ = helper.wait();
    }
    match received {
        Ok(Some(device)) => Ok(Connection {
            device: device.into(),
            unmount: Some(Unmount { path, method: UnmountMethod::Helper { _lifeline: ours } }),
        }),
        Ok(None) => Err(MountError::HelperRefused { path }),
        Err(cause) => Err(MountError::Mount { path, cause }),
    }
}

fn receive_descriptor(socket: &OwnedFd) -> io::Result<Option<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    recvmsg(socket, &mut [io::IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(mut descriptors) = message {
            return Ok(descriptors.next());
        }
    }
    Ok(None)
}

/// Looks for the path among the mount points of mountinfo. An autofs mount waits for exactly our mount, so it does not count.
fn is_mounted(mountinfo: &[u8], path: &Path) -> bool {
    mountinfo.split(|it| *it == b'\n').any(|line| {
        let mut fields = line.split(|it| *it == b' ');
        let is_here = fields.nth(4).is_some_and(|it| unescaped(it) == path.as_os_str().as_bytes());
        let file_system = fields.skip_while(|it| *it != b"-").nth(1);
        is_here && file_system != Some(b"autofs")
    })
}

/// The kernel writes blanks and a few others in mountinfo as a backslash and three octal digits.
fn unescaped(field: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, tail)) = rest.split_first() {
        let code = tail
            .get(..3)
            .filter(|_| *first == b'\\')
            .and_then(|it| u8::from_str_radix(std::str::from_utf8(it).ok()?, 8).ok());
        plain.push(code.unwrap_or(*first));
        rest = if code.is_some() { &tail[3..] } else { tail };
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &[u8] = b"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n\
        30 22 0:40 / /mnt/my\\040bucket rw,nosuid shared:5 - fuse mountpoint-s3 rw\n\
        31 22 0:41 / /mnt/auto rw - autofs systemd-1 rw\n";

    fn check(path: &str, expected: bool) {
        assert_eq!(is_mounted(TABLE, Path::new(path)), expected, "{path}");
    }

    #[test]
    fn a_directory_is_in_use_if_anything_but_autofs_is_mounted_there() {
        check("/", true);
        check("/mnt/my bucket", true);
        check("/mnt/my", false);
        check("/mnt/auto", false);
        check("/mnt", false);
    }

    #[test]
    fn only_a_descriptor_of_the_fuse_device_is_accepted() {
        assert!(matches!(MountPoint::from_descriptor(9999), Err(MountError::NotOpen { number: 9999, .. })));
        let file = tempfile::tempfile().unwrap();
        let number = std::os::fd::IntoRawFd::into_raw_fd(file);
        assert!(matches!(MountPoint::from_descriptor(number), Err(MountError::NotFuse { .. })));
    }

    #[test]
    fn a_mount_point_must_be_a_directory() {
        let directory = tempfile::tempdir().unwrap();
        assert!(matches!(MountPoint::from_directory(directory.path().join("x")), Err(MountError::Missing { .. })));
        fs::write(directory.path().join("f"), "").unwrap();
        assert!(matches!(
            MountPoint::from_directory(directory.path().join("f")),
            Err(MountError::NotADirectory { .. })
        ));
        assert!(matches!(MountPoint::from_directory(directory.path().into()), Ok(MountPoint::Directory(_))));
        assert!(matches!(MountPoint::from_directory("/".into()), Err(MountError::InUse { .. })));
    }
}
