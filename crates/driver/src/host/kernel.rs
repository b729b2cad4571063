//! [`Host`] on the real kernel. Each call says why it cannot wait for a FUSE server.

use std::ffi::{CString, OsStr, OsString};
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, StatxFlags, chmod, mkdir, open, openat, readlink, rmdir, statx,
};
use rustix::io::Errno;
use rustix::mount::{
    MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, mount, mount_bind, mount_change,
    mount_remount, move_mount, open_tree, unmount,
};
use rustix::thread::UnshareFlags;
use s3csi_mounter::read_ahead;

use super::probe::Prober;
use super::table::OUR_SOURCE;
use super::{Access, Device, FuseOptions, Host, HostError, MountTable, Probe};

/// What every mount of ours has: a bucket holds no device files and no programs that change the user.
const FLAGS: MountFlags = MountFlags::NODEV.union(MountFlags::NOSUID).union(MountFlags::NOATIME);

/// How often the mount table is read anew because it changed meanwhile. After that the last text is taken as it is: since
/// Linux 5.8 it has every mount that stayed where it was, and the others were about to change anyway.
const TABLE_ATTEMPTS: u32 = 20;

/// Where the kernel shows one directory per FUSE connection, if somebody mounted `fusectl` there. Containers often
/// have none.
const FUSE_CONNECTIONS: &str = "/sys/fs/fuse/connections";

/// The machine itself. Needs root, `/proc` and Linux 5.8.
#[derive(Clone, Debug)]
pub struct Kernel {
    prober: Prober,
    fuse_control: PathBuf,
}

impl Kernel {
    pub fn new() -> Self {
        Self::with_fuse_control(FUSE_CONNECTIONS)
    }

    /// With `fusectl` mounted at another place than usual, or nowhere.
    pub fn with_fuse_control(directory: impl Into<PathBuf>) -> Self {
        Self { prober: Prober::default(), fuse_control: directory.into() }
    }

    /// How many probes still wait for their file system.
    pub fn probes_in_flight(&self) -> usize {
        self.prober.asking()
    }
}

impl Default for Kernel {
    fn default() -> Self {
        Self::new()
    }
}

impl Host for Kernel {
    /// The kernel writes this from its own lists; no file system is asked.
    fn mount_table(&self) -> Result<MountTable, HostError> {
        let failed = |cause: io::Error| HostError::ReadTable { cause };
        let mut file = File::open("/proc/self/mountinfo").map_err(failed)?;
        let mut text = Vec::with_capacity(64 * 1024);
        for _ in 0..TABLE_ATTEMPTS {
            text.clear();
            file.rewind().map_err(failed)?;
            file.read_to_end(&mut text).map_err(failed)?;
            // The text comes page by page, and a mount may come or go between two pages. The kernel counts changes,
            // and reports one here if the count is not what it was at open or at the last question.
            if !has_changed(&file).map_err(failed)? {
                break;
            }
        }
        MountTable::parse(&text).map_err(|cause| HostError::OddTable { cause })
    }

    /// Only the directory above is walked to, and our mounts are never inside one another.
    fn resolve(&self, path: &Path) -> Result<PathBuf, HostError> {
        let failed = |cause: io::Error| HostError::Resolve { path: path.to_owned(), cause };
        let (parent, name) = open_parent(path).map_err(failed)?;
        Ok(location(&parent).map_err(failed)?.join(name))
    }

    /// A new FUSE mount sends INIT and does not wait for the answer; the root's attributes are made up by the kernel.
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

    /// A bind is a new entry in the kernel's tree for a root that is already known; the file system is not asked.
    fn bind(&self, source: &Path, target: &Path, access: Access) -> Result<(), HostError> {
        let failed =
            |cause: io::Error| HostError::Bind { source_path: source.to_owned(), target: target.to_owned(), cause };
        let directory = open_vacant(target)?;
        let tree = match access {
            Access::ReadOnly => read_only_copy(source).map_err(failed)?,
            Access::ReadWrite => copy(source).map_err(|it| failed(it.into()))?,
        };
        // One step, so there is no half-made bind to clean up after an error or a crash: until here the copy hangs
        // nowhere and vanishes with its descriptor.
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        move_mount(&tree, "", &directory, "", flags).map_err(|it| failed(it.into()))
    }

    /// Without `MNT_FORCE` nothing is sent to the server, which learns of the end when its descriptor reports it.
    fn unmount(&self, at: &Path) -> Result<(), HostError> {
        remove_mount(at, UnmountFlags::NOFOLLOW)
    }

    /// As `unmount`; what is still open is closed later, by whoever holds it.
    fn detach(&self, at: &Path) -> Result<(), HostError> {
        remove_mount(at, UnmountFlags::NOFOLLOW | UnmountFlags::DETACH)
    }

    /// Both ways end the connection inside the kernel, whatever its server does.
    fn abort(&self, device: Device) -> Result<(), HostError> {
        // FUSE file systems on a block device (`fuseblk`) have another major number, and are none of our business.
        if device.major == 0 && self.abort_by_control_file(device)? {
            return Ok(());
        }
        let table = self.mount_table()?;
        let mut mounts = table.of_device(device).filter(|it| it.is_fuse()).peekable();
        if mounts.peek().is_none() {
            return Ok(());
        }
        for mount in mounts {
            // The path may lead to another mount, on top of this one or of a directory above.
            let Ok(root) = open_directory(&mount.at) else { continue };
            if mount_id(&root).is_ok_and(|it| it == mount.id) {
                return abort_by_force(&root).map_err(|cause| HostError::Abort { device, cause });
            }
        }
        Err(HostError::AbortHidden { device })
    }

    /// A number that the kernel keeps for each file system; the server is not asked.
    fn read_far_ahead(&self, device: Device) -> Result<(), HostError> {
        let Device { major, minor } = device;
        read_ahead::extend(major, minor).map_err(|cause| HostError::ReadAhead { device, cause })
    }

    /// The one call that asks the file system, so it has a thread of its own and a deadline.
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

    /// As for mkdir; a name with a mount on it is refused before the file system is asked.
    fn remove_directory(&self, path: &Path) -> Result<(), HostError> {
        match rmdir(path) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(Errno::BUSY) => Err(HostError::Busy { at: path.to_owned() }),
            Err(errno) => Err(HostError::RemoveDirectory { path: path.to_owned(), cause: errno.into() }),
        }
    }
}

impl Kernel {
    /// Returns whether there was a control file for the connection.
    fn abort_by_control_file(&self, device: Device) -> Result<bool, HostError> {
        let file = self.fuse_control.join(device.minor.to_string()).join("abort");
        match OpenOptions::new().write(true).open(file) {
            Ok(mut file) => {
                file.write_all(b"1").map_err(|cause| HostError::Abort { device, cause })?;
                Ok(true)
            }
            // No fusectl, or one that may not be written to: there is another way.
            Err(_) => Ok(false),
        }
    }
}

fn has_changed(table: &File) -> io::Result<bool> {
    let mut question = [PollFd::new(table, PollFlags::PRI)];
    poll(&mut question, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))?;
    Ok(question[0].revents().intersects(PollFlags::PRI | PollFlags::ERR))
}

/// `O_PATH` opens the name and not the file: a FUSE server gets no request, and the kernel knows from the mount that
/// its root is a directory.
fn open_directory(path: &Path) -> Result<OwnedFd, Errno> {
    open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
}

/// A directory to mount on. What is mounted there already would only be hidden, so it is refused.
fn open_vacant(path: &Path) -> Result<OwnedFd, HostError> {
    let failed = |cause: io::Error| HostError::OpenDirectory { path: path.to_owned(), cause };
    let (parent, name) = open_parent(path).map_err(failed)?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = openat(&parent, name, flags, Mode::empty()).map_err(|it| failed(it.into()))?;
    // A directory belongs to the same mount as the one above it, unless something is mounted on it.
    if mount_id(&directory).map_err(failed)? != mount_id(&parent).map_err(failed)? {
        return Err(HostError::Occupied { at: path.to_owned() });
    }
    Ok(directory)
}

/// The directory above a path, links in it followed, and the last component.
fn open_parent(path: &Path) -> io::Result<(OwnedFd, &OsStr)> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidFilename.into());
    };
    let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
    Ok((open(parent, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?, name))
}

/// A path which leads to what the descriptor refers to, however often the real path changes its meaning meanwhile.
pub(super) fn by_descriptor(descriptor: impl AsFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", descriptor.as_fd().as_raw_fd()))
}

fn location(descriptor: impl AsFd) -> io::Result<PathBuf> {
    let path = readlink(by_descriptor(descriptor), Vec::new())?;
    Ok(PathBuf::from(OsString::from_vec(path.into_bytes())))
}

/// Which mount a descriptor refers to. `/proc` knows that without asking the file system.
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
        // The umask may have taken bits away. The directory is new and ours, so nothing is mounted on it yet.
        Ok(()) => Ok(chmod(path, mode)?),
        Err(Errno::EXIST) if is_directory(path)? => Ok(()),
        Err(Errno::EXIST) => Err(Errno::NOTDIR.into()),
        Err(errno) => Err(errno.into()),
    }
}

/// `DONT_SYNC`: the type of a mount's root is known to the kernel, so a silent server is not asked.
fn is_directory(path: &Path) -> io::Result<bool> {
    let flags = AtFlags::STATX_DONT_SYNC | AtFlags::SYMLINK_NOFOLLOW;
    let found = statx(CWD, path, flags, StatxFlags::TYPE)?;
    Ok(FileType::from_raw_mode(found.stx_mode.into()) == FileType::Directory)
}

/// A mount like the one at `source`, hanging nowhere yet.
fn copy(source: &Path) -> Result<OwnedFd, Errno> {
    let root = open_directory(source)?;
    open_tree(
        &root,
        "",
        OpenTreeFlags::AT_EMPTY_PATH | OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC,
    )
}

/// The same, read-only.
///
/// The usual way, a bind followed by a remount, has two faults. A crash between the two leaves a writable bind; and a
/// remount does not propagate, so where kubelet's directory is shared between the plugin's container and the host,
/// the host (and with it the workload) would keep the writable one. Hence the mount must be read-only before it
/// appears. With no safe call for `mount_setattr` at hand, it is prepared in a mount namespace which only a thread
/// of its own can see, and which goes when that thread ends.
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

fn remove_mount(at: &Path, flags: UnmountFlags) -> Result<(), HostError> {
    match unmount(at, flags) {
        // EINVAL is the answer for a path where nothing is mounted.
        Ok(()) | Err(Errno::INVAL | Errno::NOENT) => Ok(()),
        Err(Errno::BUSY) => Err(HostError::Busy { at: at.to_owned() }),
        Err(errno) => Err(HostError::Unmount { at: at.to_owned(), cause: errno.into() }),
    }
}

/// `MNT_FORCE` aborts the connection before it looks whether the mount is in use. It is, by the descriptor held here,
/// so the mount itself stays, as it does after the other way of aborting.
fn abort_by_force(root: &OwnedFd) -> io::Result<()> {
    match unmount(by_descriptor(root), UnmountFlags::FORCE) {
        Ok(()) | Err(Errno::BUSY) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}
