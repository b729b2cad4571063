//! Files in the directory of the mounter or of one source. Opens names relative to a directory descriptor and never follows
//! links.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use rustix::io::Errno;
use s3csi_handoff::SourceName;

/// A directory that is held open.
#[derive(Debug)]
pub struct Directory {
    descriptor: OwnedFd,
    path: PathBuf,
}

impl Directory {
    /// Follows links: the path comes from the command line.
    pub fn open(path: &Path) -> io::Result<Self> {
        let descriptor = rustix::fs::openat(CWD, path, FLAGS, Mode::empty())?;
        Ok(Self { descriptor, path: path.to_owned() })
    }

    /// The directory of a source: a sub-directory made by the node plugin, or this one.
    pub fn of(&self, source: Option<&SourceName>) -> io::Result<Self> {
        let Some(name) = source else {
            return Ok(Self { descriptor: self.descriptor.try_clone()?, path: self.path.clone() });
        };
        let descriptor = rustix::fs::openat(&self.descriptor, name.as_str(), FLAGS | OFlags::NOFOLLOW, Mode::empty())?;
        Ok(Self { descriptor, path: self.path.join(name.as_str()) })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn has(&self, name: &str) -> bool {
        rustix::fs::statat(&self.descriptor, name, AtFlags::SYMLINK_NOFOLLOW).is_ok()
    }

    /// Succeeds when nothing is there.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        match rustix::fs::unlinkat(&self.descriptor, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(cause) => Err(cause.into()),
        }
    }

    /// Writes a file that only its owner (and root) may read. It appears whole or not at all and replaces what has its name.
    pub fn write(&self, name: &str, contents: &[u8]) -> io::Result<()> {
        let draft = format!(".{name}.{}", DRAFTS.fetch_add(1, Ordering::Relaxed));
        // A killed process may have left it.
        self.remove(&draft)?;
        let result = self.write_draft(&draft, contents).and_then(|()| {
            rustix::fs::renameat(&self.descriptor, draft.as_str(), &self.descriptor, name)?;
            Ok(())
        });
        if result.is_err() {
            let _ = self.remove(&draft);
        }
        result
    }

    fn write_draft(&self, draft: &str, contents: &[u8]) -> io::Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.descriptor, draft, flags, Mode::RUSR | Mode::WUSR)?;
        io::Write::write_all(&mut std::fs::File::from(file), contents)
    }
}

impl AsFd for Directory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

const FLAGS: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// Makes the names of drafts unique in this process, the only one here due to the lock on the directory.
static DRAFTS: AtomicU64 = AtomicU64::new(0);

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn a_written_file_replaces_a_link_and_not_what_it_points_to() {
        let place = tempfile::tempdir().unwrap();
        let victim = place.path().join("victim");
        std::fs::write(&victim, "precious").unwrap();
        symlink(&victim, place.path().join("mount.err")).unwrap();

        let directory = Directory::open(place.path()).unwrap();
        directory.write("mount.err", b"words").unwrap();

        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
        let written = place.path().join("mount.err");
        assert_eq!(std::fs::read_to_string(&written).unwrap(), "words");
        let metadata = std::fs::symlink_metadata(&written).unwrap();
        assert!(metadata.is_file());
        assert_eq!(metadata.permissions().mode() & 0o7777, 0o600);
        assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 2, "no draft stays");
    }

    #[test]
    fn a_failed_write_leaves_no_draft() {
        let place = tempfile::tempdir().unwrap();
        std::fs::create_dir(place.path().join("mount.err")).unwrap();
        let directory = Directory::open(place.path()).unwrap();
        directory.write("mount.err", b"words").unwrap_err();
        assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 1);
    }

    #[test]
    fn the_directory_of_a_source_is_not_reached_through_a_link() {
        let place = tempfile::tempdir().unwrap();
        std::fs::create_dir(place.path().join("real")).unwrap();
        symlink("real", place.path().join("link")).unwrap();
        let directory = Directory::open(place.path()).unwrap();
        directory.of(Some(&"real".parse().unwrap())).unwrap();
        directory.of(Some(&"link".parse().unwrap())).unwrap_err();
        directory.of(Some(&"none".parse().unwrap())).unwrap_err();
    }

    #[test]
    fn removing_nothing_succeeds() {
        let place = tempfile::tempdir().unwrap();
        let directory = Directory::open(place.path()).unwrap();
        directory.remove("mount.err").unwrap();
        assert!(!directory.has("mount.err"));
        directory.write("mount.err", b"").unwrap();
        assert!(directory.has("mount.err"));
        directory.remove("mount.err").unwrap();
        assert!(!directory.has("mount.err"));
    }
}
