//! Files in a directory that a less trusted process may write to, such as a mounter's directory.
//!
//! The node plugin is root, so a symbolic link must not redirect it, and a FIFO, a device or an endless file must not
//! block it. Every name is a single path component below an open directory, no link is followed, no mount is crossed,
//! and a file is opened for reading only after its type was checked.

use std::ffi::CStr;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{
    AtFlags, Dir, FileType, Gid, Mode, OFlags, ResolveFlags, chmod, chownat, fchmod, fchown, fstat, mkdirat, open,
    openat, openat2, renameat, unlinkat,
};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use super::kernel::by_descriptor;

/// An open directory. All operations happen in it, even if it is moved or its path is replaced.
#[derive(Debug)]
pub struct SafeDir {
    descriptor: OwnedFd,
    /// For error messages only.
    path: PathBuf,
}

#[derive(Debug, thiserror::Error)]
pub enum SafeDirError {
    #[error("{name:?} is not a plain file name")]
    InvalidName { name: String },

    #[error("failed to open {path:?}")]
    Open {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },

    #[error("{path:?} is not a {expected}")]
    WrongType { path: PathBuf, expected: &'static str },

    #[error("failed to read {path:?}")]
    Read {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },

    #[error("failed to write {path:?}")]
    Write {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },

    #[error("failed to create directory {path:?}")]
    CreateDirectory {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },

    #[error("failed to remove {path:?}")]
    Remove {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },

    #[error("failed to connect to {path:?}")]
    Connect {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
}

/// A file type and its name in error messages.
struct Expected {
    kind: FileType,
    name: &'static str,
}

const REGULAR_FILE: Expected = Expected { kind: FileType::RegularFile, name: "regular file" };
const SOCKET: Expected = Expected { kind: FileType::Socket, name: "socket" };

/// We create no deeper trees; the limit keeps a hostile tree from exhausting stack and descriptors.
const MAXIMUM_DEPTH: usize = 16;

/// We create no larger trees; the limit ends a race with a process that creates entries as fast as we remove them.
const MAXIMUM_ENTRIES: usize = 100_000;

/// Makes temporary file names unique within this process.
static TEMPORARY_FILES: AtomicU64 = AtomicU64::new(0);

impl SafeDir {
    /// Open a directory. Its parents are trusted; its last component must not be a symbolic link.
    pub fn open(directory: &Path) -> Result<Self, SafeDirError> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let descriptor = open(directory, flags, Mode::empty())
            .map_err(|it| SafeDirError::Open { path: directory.to_owned(), cause: it.into() })?;
        Ok(Self { descriptor, path: directory.to_owned() })
    }

    /// The path that it was opened with.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { descriptor: self.descriptor.try_clone()?, path: self.path.clone() })
    }

    /// Whether there is a regular file of this name.
    pub fn exists(&self, name: &str) -> bool {
        self.look(name, &REGULAR_FILE).is_ok_and(|it| it.is_some())
    }

    pub fn has_socket(&self, name: &str) -> bool {
        self.look(name, &SOCKET).is_ok_and(|it| it.is_some())
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The group that owns it.
    pub fn group(&self) -> Result<u32, SafeDirError> {
        let found =
            fstat(&self.descriptor).map_err(|it| SafeDirError::Read { path: self.path.clone(), cause: it.into() })?;
        Ok(found.st_gid)
    }

    /// At most the first `maximum` bytes of a regular file; `None` if there is no such name.
    pub fn read_bounded(&self, name: &str, maximum: usize) -> Result<Option<Vec<u8>>, SafeDirError> {
        let Some(seen) = self.look(name, &REGULAR_FILE)? else { return Ok(None) };
        let failed = |cause: io::Error| SafeDirError::Read { path: self.path.join(name), cause };
        // NONBLOCK: the holder of a lease on the file (fcntl(2)) could otherwise block us for 45 seconds.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = File::from(open(by_descriptor(&seen), flags, Mode::empty()).map_err(|it| failed(it.into()))?);
        let mut bytes = Vec::new();
        file.take(maximum as u64).read_to_end(&mut bytes).map_err(failed)?;
        Ok(Some(bytes))
    }

    /// Write a file atomically, with exactly this mode and group.
    ///
    /// It is not flushed to disk: the content serves a running mount, which does not survive a crash of the machine.
    pub fn write_atomic(&self, name: &str, bytes: &[u8], mode: u32, group: Option<u32>) -> Result<(), SafeDirError> {
        plain(name)?;
        let failed = |cause: io::Error| SafeDirError::Write { path: self.path.join(name), cause };
        let (temporary, file) = self.create_temporary(name).map_err(failed)?;
        let written = fill(file, bytes, Mode::from_raw_mode(mode), group)
            .and_then(|()| Ok(renameat(&self.descriptor, &temporary, &self.descriptor, name)?));
        written.map_err(|cause| {
            // Best effort: the first error is the one to report.
            let _ = unlinkat(&self.descriptor, &temporary, AtFlags::empty());
            failed(cause)
        })
    }

    /// Ensure that a regular file of this name exists; an existing one is left unchanged.
    pub fn create_empty(&self, name: &str, mode: u32) -> Result<(), SafeDirError> {
        plain(name)?;
        let failed = |cause: io::Error| SafeDirError::Write { path: self.path.join(name), cause };
        match self.create_exclusively(name) {
            Ok(file) => fill(file, b"", Mode::from_raw_mode(mode), None).map_err(failed),
            Err(Errno::EXIST) => self.look(name, &REGULAR_FILE)?.map(drop).ok_or_else(|| failed(Errno::NOENT.into())),
            Err(errno) => Err(failed(errno.into())),
        }
    }

    /// Ensure that a directory of this name exists with exactly this mode and group, and open it.
    pub fn make_directory(&self, name: &str, mode: u32, group: Option<u32>) -> Result<Self, SafeDirError> {
        plain(name)?;
        let path = self.path.join(name);
        let failed = |cause: io::Error| SafeDirError::CreateDirectory { path: path.clone(), cause };
        match mkdirat(&self.descriptor, name, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => (),
            Err(errno) => return Err(failed(errno.into())),
        }
        let opened = self.directory(name)?;
        let found = fstat(&opened.descriptor).map_err(|it| failed(it.into()))?;
        if let Some(group) = group.filter(|it| *it != found.st_gid) {
            let group = Some(Gid::from_raw(group));
            chownat(&opened.descriptor, "", None, group, AtFlags::EMPTY_PATH).map_err(|it| failed(it.into()))?;
        }
        // A change of the group may clear the set-group-ID bit, so the mode is set last.
        chmod(by_descriptor(&opened.descriptor), Mode::from_raw_mode(mode)).map_err(|it| failed(it.into()))?;
        Ok(opened)
    }

    /// Open an existing directory.
    pub fn directory(&self, name: &str) -> Result<Self, SafeDirError> {
        plain(name)?;
        let path = self.path.join(name);
        match open_beneath(&self.descriptor, name, OFlags::PATH | OFlags::DIRECTORY) {
            Ok(descriptor) => Ok(Self { descriptor, path }),
            Err(Errno::NOTDIR | Errno::LOOP) => Err(SafeDirError::WrongType { path, expected: "directory" }),
            Err(errno) => Err(SafeDirError::Open { path, cause: errno.into() }),
        }
    }

    /// Remove anything but a directory. A missing name is success.
    pub fn remove_file(&self, name: &str) -> Result<(), SafeDirError> {
        plain(name)?;
        match unlinkat(&self.descriptor, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(SafeDirError::Remove { path: self.path.join(name), cause: errno.into() }),
        }
    }

    /// Remove a directory and its content, or a file. A missing name is success. Links are removed, not followed; a
    /// mount point is refused.
    pub fn remove_tree(&self, name: &str) -> Result<(), SafeDirError> {
        plain(name)?;
        let failed = |cause| SafeDirError::Remove { path: self.path.join(name), cause };
        let name = std::ffi::CString::new(name).map_err(|it| failed(it.into()))?;
        let mut budget = MAXIMUM_ENTRIES;
        remove_any(&self.descriptor, &name, MAXIMUM_DEPTH, &mut budget).map_err(failed)
    }

    /// Connect to a socket. Its path may be longer than the 107 bytes that fit into an address. A full accept queue is
    /// an error (`WouldBlock`), not a wait.
    pub fn connect(&self, name: &str) -> Result<UnixStream, SafeDirError> {
        let failed = |cause: io::Error| SafeDirError::Connect { path: self.path.join(name), cause };
        let seen = self.look(name, &SOCKET)?.ok_or_else(|| failed(Errno::NOENT.into()))?;
        let stream = connected(&by_descriptor(&seen)).map_err(|it| failed(it.into()))?;
        let stream = UnixStream::from(stream);
        stream.set_nonblocking(false).map_err(failed)?;
        Ok(stream)
    }

    /// Open a name with `O_PATH` and check its file type.
    fn look(&self, name: &str, expected: &Expected) -> Result<Option<OwnedFd>, SafeDirError> {
        plain(name)?;
        let failed = |errno: Errno| SafeDirError::Open { path: self.path.join(name), cause: errno.into() };
        let wrong = || SafeDirError::WrongType { path: self.path.join(name), expected: expected.name };
        let seen = match open_beneath(&self.descriptor, name, OFlags::PATH) {
            Ok(seen) => seen,
            Err(Errno::NOENT) => return Ok(None),
            // With NO_SYMLINKS the kernel does not open a link even with O_PATH.
            Err(Errno::LOOP) => return Err(wrong()),
            Err(errno) => return Err(failed(errno)),
        };
        let found = fstat(&seen).map_err(failed)?;
        if FileType::from_raw_mode(found.st_mode) == expected.kind { Ok(Some(seen)) } else { Err(wrong()) }
    }

    fn create_temporary(&self, name: &str) -> io::Result<(String, File)> {
        loop {
            let number = TEMPORARY_FILES.fetch_add(1, Ordering::Relaxed);
            let temporary = format!(".{name}.{}-{number}.tmp", std::process::id());
            match self.create_exclusively(&temporary) {
                Ok(file) => return Ok((temporary, file)),
                // Left behind by an earlier process with the same ID.
                Err(Errno::EXIST) => (),
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// EXCL follows no link and opens no existing file. Only root can open it until its final mode is set.
    fn create_exclusively(&self, name: &str) -> Result<File, Errno> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        openat(&self.descriptor, name, flags, Mode::RUSR | Mode::WUSR).map(File::from)
    }
}

impl SafeDirError {
    /// The socket does not exist yet or nothing accepts on it: worth a retry.
    pub fn is_not_listening(&self) -> bool {
        use io::ErrorKind::{ConnectionRefused, NotFound, WouldBlock};

        match self {
            Self::Connect { cause, .. } => matches!(cause.kind(), NotFound | ConnectionRefused | WouldBlock),
            _ => false,
        }
    }
}

fn plain(name: &str) -> Result<(), SafeDirError> {
    let is_plain = !matches!(name, "" | "." | "..") && !name.contains(['/', '\0']);
    if is_plain { Ok(()) } else { Err(SafeDirError::InvalidName { name: name.to_owned() }) }
}

/// Open one path component below a directory. No link is followed and no mount crossed, so this cannot reach a FUSE server.
fn open_beneath<Name: rustix::path::Arg + Copy>(
    directory: &OwnedFd,
    name: Name,
    flags: OFlags,
) -> Result<OwnedFd, Errno> {
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve =
        ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_XDEV;
    match openat2(directory, name, flags, Mode::empty(), resolve) {
        // Kernels before 5.6, and sandboxes that do not know the call. For a single component, NOFOLLOW is equivalent
        // except for mounts, which an unprivileged process cannot create.
        Err(Errno::NOSYS | Errno::PERM) => openat(directory, name, flags, Mode::empty()),
        opened => opened,
    }
}

fn fill(mut file: File, bytes: &[u8], mode: Mode, group: Option<u32>) -> io::Result<()> {
    file.write_all(bytes)?;
    if let Some(group) = group {
        fchown(&file, None, Some(Gid::from_raw(group)))?;
    }
    Ok(fchmod(&file, mode)?)
}

fn connected(path: &Path) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

fn remove_any(directory: &OwnedFd, name: &CStr, depth: usize, budget: &mut usize) -> io::Result<()> {
    *budget = budget.checked_sub(1).ok_or_else(|| io::Error::other("there are too many files"))?;
    // Linux answers EISDIR for a directory.
    match unlinkat(directory, name, AtFlags::empty()) {
        Err(Errno::ISDIR) => (),
        Ok(()) | Err(Errno::NOENT) => return Ok(()),
        Err(errno) => return Err(errno.into()),
    }
    let depth = depth.checked_sub(1).ok_or_else(|| io::Error::other("the directories are nested too deeply"))?;
    loop {
        match unlinkat(directory, name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => return Ok(()),
            Err(Errno::NOTEMPTY) => remove_content(directory, name, depth, budget)?,
            Err(errno) => return Err(errno.into()),
        }
    }
}

fn remove_content(directory: &OwnedFd, name: &CStr, depth: usize, budget: &mut usize) -> io::Result<()> {
    *budget = budget.checked_sub(1).ok_or_else(|| io::Error::other("there are too many files"))?;
    let opened = open_beneath(directory, name, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NONBLOCK)?;
    for entry in Dir::read_from(&opened)? {
        let entry = entry?;
        if entry.file_name() != c"." && entry.file_name() != c".." {
            remove_any(&opened, entry.file_name(), depth, budget)?;
        }
    }
    Ok(())
}
