//! [`Host`] on the real kernel. Each call says why it cannot wait for a FUSE server.

use std::ffi::{CString, OsStr, OsString};
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, StatxAttributes, StatxFlags, chmod, mkdir, open, openat, readlink, rmdir,
    statx,
};
use rustix::io::Errno;
use rustix::mount::{
    MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, mount, mount_bind, mount_change,
    mount_remount, move_mount, open_tree, unmount,
};
use rustix::thread::UnshareFlags;
use s3csi_core::mountinfo::OUR_SOURCE;
use s3csi_handoff::read_ahead;

use super::probe::Prober;
use super::{Access, Device, FuseOptions, Host, HostError, MountTable, Probe};

/// Flags of every mount: a bucket holds no device files and no set-user-ID programs.
const FLAGS: MountFlags = MountFlags::NODEV.union(MountFlags::NOSUID).union(MountFlags::NOATIME);

/// How often the mount table is read again because it changed while it was read. After that the last text is used: since
/// Linux 5.8 it contains every mount that did not change meanwhile.
const TABLE_ATTEMPTS: u32 = 20;

/// The mount point of `fusectl`, with one directory per FUSE connection. Often not mounted in containers.
const FUSE_CONNECTIONS: &str = "/sys/fs/fuse/connections";

/// The real kernel. Needs root, `/proc` and Linux 5.8.
#[derive(Clone, Debug)]
pub struct Kernel {
    prober: Prober,
    fuse_control: PathBuf,
    last_table: Arc<Mutex<Option<LastTable>>>,
}

/// The mount table as it was last read. It is large where there are many volumes, and each call needs it several times.
#[derive(Debug)]
struct LastTable {
    /// The kernel reports for each open file whether the table has changed.
    file: File,
    table: Arc<MountTable>,
}

impl Kernel {
    pub fn new() -> Self {
        Self::with_fuse_control(FUSE_CONNECTIONS)
    }

    /// With another mount point of `fusectl`, or none.
    pub fn with_fuse_control(directory: impl Into<PathBuf>) -> Self {
        Self { prober: Prober::default(), fuse_control: directory.into(), last_table: Arc::default() }
    }

    /// The number of probes that still wait for their file system.
    pub fn probes_in_flight(&self) -> usize {
        self.prober.in_flight()
    }
}

impl Default for Kernel {
    fn default() -> Self {
        Self::new()
    }
}

impl Host for Kernel {
    /// Generated from kernel data structures; no file system is accessed. Read again only if the kernel reports a change.
    fn mount_table(&self) -> Result<Arc<MountTable>, HostError> {
        let failed = |cause: io::Error| HostError::ReadTable { cause };
        // Held while the table is read: concurrent calls share the result.
        let mut last = self.last_table.lock();
        let mut file = match last.take() {
            Some(it) if !has_changed(&it.file).map_err(failed)? => return Ok(last.insert(it).table.clone()),
            Some(LastTable { file, .. }) => file,
            None => File::open("/proc/self/mountinfo").map_err(failed)?,
        };
        let mut text = Vec::with_capacity(64 * 1024);
        let mut is_stable = false;
        for _ in 0..TABLE_ATTEMPTS {
            text.clear();
            file.rewind().map_err(failed)?;
            file.read_to_end(&mut text).map_err(failed)?;
            // The text is read in pages, and mounts may change between two pages. poll(2) reports whether the table
            // changed since the file was opened or last polled.
            is_stable = !has_changed(&file).map_err(failed)?;
            if is_stable {
                break;
            }
        }
        let table = Arc::new(MountTable::parse(&text).map_err(|cause| HostError::InvalidTable { cause })?);
        if is_stable {
            *last = Some(LastTable { file, table: table.clone() });
        }
        Ok(table)
    }

    /// The kernel's own attributes of the directory, which it has without asking a FUSE server.
    fn mounted_at(&self, path: &Path) -> Result<Option<Device>, HostError> {
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC;
        match statx(CWD, path, flags, StatxFlags::empty()) {
            Ok(found) if found.stx_attributes_mask.contains(StatxAttributes::MOUNT_ROOT) => {
                let device = Device { major: found.stx_dev_major, minor: found.stx_dev_minor };
                Ok(found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT).then_some(device))
            }
            Err(Errno::NOENT | Errno::NOTDIR) => Ok(None),
            // Older kernels do not say it, and file systems of others may refuse to answer.
            Ok(_) | Err(_) => Ok(self.mount_table()?.at(path).map(|it| it.device)),
        }
    }

    /// Only the parent directory is resolved, and our mounts are never nested.
    fn resolve(&self, path: &Path) -> Result<PathBuf, HostError> {
        let failed = |cause: io::Error| HostError::Resolve { path: path.to_owned(), cause };
        let (parent, name) = open_parent(path).map_err(failed)?;
        Ok(location(&parent).map_err(failed)?.join(name))
    }

    /// A new FUSE mount sends INIT without waiting for the reply; the kernel makes up the attributes of the root.
    fn mount_fuse(&self, at: &Path, options: &FuseOptions) -> Result<OwnedFd, HostError> {
        let FuseOptions { access, allow_other } = *options;
        let failed = |cause: io::Error| HostError::MountFuse { at: at.to_owned(), cause };
        let directory = open_vacant(at)?;
        let fuse = open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .map_err(|it| HostError::OpenFuse { cause: it.into() })?;

        let allow_other = if allow_other { ",allow_other" } else { "" };
        let descriptor = fuse.as_raw_fd();
        let data = format!("fd={descriptor},rootmode=40000,user_id=0,group_id=0,default_permissions{allow_other}");
        let data = CString::new(data).map_err(|it| failed(it.into()))?;
        let flags = match access {
            Access::ReadOnly => FLAGS | MountFlags::RDONLY,
            Access::ReadWrite => FLAGS,
        };
        mount(OUR_SOURCE, by_descriptor(&directory), "fuse", flags, data.as_c_str()).map_err(|it| failed(it.into()))?;
        Ok(fuse)
    }

    /// A bind mount only adds an entry to the kernel's mount tree; the file system is not accessed.
    fn bind(&self, source: &Path, target: &Path, access: Access) -> Result<(), HostError> {
        let failed =
            |cause: io::Error| HostError::Bind { source_path: source.to_owned(), target: target.to_owned(), cause };
        let directory = open_vacant(target)?;
        let tree = copy_with(source, access).map_err(failed)?;
        // Attached in one step, so an error or a crash leaves nothing behind: until here the detached copy vanishes with
        // its descriptor.
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        move_mount(&tree, "", &directory, "", flags).map_err(|it| failed(it.into()))
    }

    fn bind_beneath(&self, source: &Path, target: &Path, access: Access) -> Result<(), HostError> {
        attach_at_mount(source, target, access, MoveMountFlags::MOVE_MOUNT_BENEATH)
    }

    fn bind_over(&self, source: &Path, target: &Path, access: Access) -> Result<(), HostError> {
        attach_at_mount(source, target, access, MoveMountFlags::empty())
    }

    /// Without `MNT_FORCE` the kernel sends nothing to the server.
    fn unmount(&self, at: &Path) -> Result<(), HostError> {
        self.remove_mount(at, UnmountFlags::NOFOLLOW)
    }

    /// As `unmount`; open files stay open until their owners close them.
    fn detach(&self, at: &Path) -> Result<(), HostError> {
        self.remove_mount(at, UnmountFlags::NOFOLLOW | UnmountFlags::DETACH)
    }

    /// Both ways abort the connection inside the kernel, whatever its server does.
    fn abort(&self, device: Device) -> Result<(), HostError> {
        // FUSE file systems on a block device (`fuseblk`) have another major number and are never ours.
        if device.major == 0 && self.abort_by_control_file(device)? {
            return Ok(());
        }
        let table = self.mount_table()?;
        let mut mounts = table.of_device(device).filter(|it| it.is_fuse()).peekable();
        if mounts.peek().is_none() {
            return Ok(());
        }
        for mount in mounts {
            // Another mount may cover this one or one of its parents.
            let Ok(root) = open_directory(&mount.at) else { continue };
            if mount_id(&root).is_ok_and(|it| it == mount.id) {
                return abort_by_force(&root).map_err(|cause| HostError::Abort { device, cause });
            }
        }
        Err(HostError::AbortHidden { device })
    }

    /// A setting of the kernel for each file system; the server is not involved.
    fn set_read_ahead(&self, device: Device) -> Result<(), HostError> {
        let Device { major, minor } = device;
        read_ahead::extend(major, minor).map_err(|cause| HostError::ReadAhead { device, cause })
    }

    /// The only call that accesses the file system, so it runs on its own thread with a deadline.
    fn probe(&self, at: &Path, deadline: Instant) -> Probe {
        self.prober.probe(at, deadline)
    }

    /// mkdir looks the name up in the directory above and does not look at what is mounted on it.
    fn create_directory(&self, path: &Path, mode: u32) -> Result<(), HostError> {
        let failed = |cause: io::Error| HostError::CreateDirectory { path: path.to_owned(), cause };
        match make_directory(path, mode) {
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => {
                let parent = path.parent().filter(|it| !it.as_os_str().is_empty());
                self.create_directory(parent.ok_or_else(|| failed(cause))?, mode)?;
                make_directory(path, mode).map_err(failed)
            }
            result => result.map_err(failed),
        }
    }

    /// As for mkdir; a mount point is refused before its file system is accessed.
    fn remove_directory(&self, path: &Path) -> Result<(), HostError> {
        match rmdir(path) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(Errno::BUSY) => Err(HostError::Busy { at: path.to_owned() }),
            Err(errno) => Err(HostError::RemoveDirectory { path: path.to_owned(), cause: errno.into() }),
        }
    }
}

impl Kernel {
    fn remove_mount(&self, at: &Path, flags: UnmountFlags) -> Result<(), HostError> {
        match unmount(at, flags) {
            Ok(()) => Ok(()),
            // Nothing is mounted where the path leads to. A mount that the table shows there is hidden.
            Err(Errno::INVAL | Errno::NOENT) => match self.mount_table()?.at(at) {
                Some(mount) => Err(HostError::Hidden { at: at.to_owned(), device: mount.device }),
                None => Ok(()),
            },
            Err(Errno::BUSY) => Err(HostError::Busy { at: at.to_owned() }),
            Err(errno) => Err(HostError::Unmount { at: at.to_owned(), cause: errno.into() }),
        }
    }

    /// Returns whether there was a control file for the connection.
    fn abort_by_control_file(&self, device: Device) -> Result<bool, HostError> {
        let file = self.fuse_control.join(device.minor.to_string()).join("abort");
        match OpenOptions::new().write(true).open(file) {
            Ok(mut file) => {
                file.write_all(b"1").map_err(|cause| HostError::Abort { device, cause })?;
                Ok(true)
            }
            // No fusectl, or not writable: the caller uses MNT_FORCE.
            Err(_) => Ok(false),
        }
    }
}

fn has_changed(table: &File) -> io::Result<bool> {
    let mut polled = [PollFd::new(table, PollFlags::PRI)];
    poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))?;
    Ok(polled[0].revents().intersects(PollFlags::PRI | PollFlags::ERR))
}

/// `O_PATH` does not open the file, so a FUSE server gets no request; the kernel knows that the root of a mount is a
/// directory.
fn open_directory(path: &Path) -> Result<OwnedFd, Errno> {
    open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
}

/// As `bind`, where something is mounted. `O_PATH` does not ask the server of that mount.
fn attach_at_mount(source: &Path, target: &Path, access: Access, how: MoveMountFlags) -> Result<(), HostError> {
    let failed =
        |cause: io::Error| HostError::Bind { source_path: source.to_owned(), target: target.to_owned(), cause };
    let top = open_directory(target).map_err(|it| failed(it.into()))?;
    let tree = copy_with(source, access).map_err(failed)?;
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH | how;
    move_mount(&tree, "", &top, "", flags).map_err(|it| failed(it.into()))
}

/// Opens a directory to mount on. A mount point is refused, because its mount would be hidden.
fn open_vacant(path: &Path) -> Result<OwnedFd, HostError> {
    let failed = |cause: io::Error| HostError::OpenDirectory { path: path.to_owned(), cause };
    let (parent, name) = open_parent(path).map_err(failed)?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = openat(&parent, name, flags, Mode::empty()).map_err(|it| failed(it.into()))?;
    // A directory is on the same mount as its parent, unless it is a mount point.
    if mount_id(&directory).map_err(failed)? != mount_id(&parent).map_err(failed)? {
        return Err(HostError::Occupied { at: path.to_owned() });
    }
    Ok(directory)
}

/// The parent directory of a path, with links resolved, and the last component.
fn open_parent(path: &Path) -> io::Result<(OwnedFd, &OsStr)> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidFilename.into());
    };
    let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
    Ok((open(parent, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?, name))
}

/// A path to the file that a descriptor refers to, independent of its real path.
pub(super) fn by_descriptor(descriptor: impl AsFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", descriptor.as_fd().as_raw_fd()))
}

fn location(descriptor: impl AsFd) -> io::Result<PathBuf> {
    let path = readlink(by_descriptor(descriptor), Vec::new())?;
    Ok(PathBuf::from(OsString::from_vec(path.into_bytes())))
}

/// The ID of the mount that a descriptor refers to, from `/proc`; the file system is not accessed.
fn mount_id(descriptor: impl AsFd) -> io::Result<u64> {
    let number = descriptor.as_fd().as_raw_fd();
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{number}"))?;
    text.lines()
        .find_map(|it| it.strip_prefix("mnt_id:"))
        .and_then(|it| it.trim().parse().ok())
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "the kernel shows no mount id"))
}

fn make_directory(path: &Path, mode: u32) -> io::Result<()> {
    let mode = Mode::from_raw_mode(mode);
    match mkdir(path, mode) {
        // The umask may have cleared bits. The directory is new, so nothing is mounted on it yet.
        Ok(()) => Ok(chmod(path, mode)?),
        Err(Errno::EXIST) if is_directory(path)? => Ok(()),
        Err(Errno::EXIST) => Err(Errno::NOTDIR.into()),
        Err(errno) => Err(errno.into()),
    }
}

/// `DONT_SYNC`: the kernel knows the type of the root of a mount, so the server gets no request.
fn is_directory(path: &Path) -> io::Result<bool> {
    let flags = AtFlags::STATX_DONT_SYNC | AtFlags::SYMLINK_NOFOLLOW;
    let found = statx(CWD, path, flags, StatxFlags::TYPE)?;
    Ok(FileType::from_raw_mode(found.stx_mode.into()) == FileType::Directory)
}

fn copy_with(source: &Path, access: Access) -> io::Result<OwnedFd> {
    match access {
        Access::ReadOnly => read_only_copy(source),
        Access::ReadWrite => Ok(copy(source)?),
    }
}

/// A detached copy of the mount at `source`. It is not the source's peer: what covers one target of a source, and is removed with it,
/// must not appear at the others.
fn copy(source: &Path) -> Result<OwnedFd, Errno> {
    let root = open_directory(source)?;
    let flags = OpenTreeFlags::AT_EMPTY_PATH | OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let tree = open_tree(&root, "", flags)?;
    mount_change(by_descriptor(&tree), MountPropagationFlags::PRIVATE)?;
    Ok(tree)
}

/// The same, read-only.
///
/// The usual way, a bind followed by a remount, has two faults. A crash between the two leaves a writable bind; and a
/// remount does not propagate, so where kubelet's directory is shared between the plugin's container and the host,
/// the host (and with it the workload) keeps the writable one. Hence the mount must be read-only before it is attached.
/// There is no safe wrapper for `mount_setattr`, so the copy is prepared in the private mount namespace of a short-lived
/// thread.
fn read_only_copy(source: &Path) -> io::Result<OwnedFd> {
    let source = source.to_owned();
    let thread = thread::Builder::new().name("read-only-bind".to_owned()).spawn(move || {
        enter_private_namespace()?;
        mount_bind(&source, &source)?;
        mount_remount(&source, FLAGS | MountFlags::BIND | MountFlags::RDONLY, "")?;
        copy(&source)
    })?;
    let copied = thread.join().map_err(|_| io::Error::other("the thread that prepares the bind panicked"))?;
    Ok(copied?)
}

#[expect(deprecated, reason = "unsafe for UnshareFlags::FILES only, which is not used; unsafe code is forbidden here")]
fn enter_private_namespace() -> Result<(), Errno> {
    rustix::thread::unshare(UnshareFlags::FS | UnshareFlags::NEWNS)?;
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
}

/// `MNT_FORCE` aborts the connection before the kernel checks whether the mount is in use. The descriptor held here keeps it
/// in use, so the mount itself stays, as it does after an abort through fusectl.
fn abort_by_force(root: &OwnedFd) -> io::Result<()> {
    match unmount(by_descriptor(root), UnmountFlags::FORCE) {
        Ok(()) | Err(Errno::BUSY) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}
