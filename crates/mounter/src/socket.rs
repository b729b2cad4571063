//! The listening socket in the mounter's directory: never taken from a running mounter, removed at exit.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{AtFlags, FlockOperation, Mode};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use s3csi_handoff::SOCKET;
use s3csi_handoff::{self as handoff, ConnectError};
use s3csi_supervisor::log;

use crate::directory::Directory;

/// The socket; its file is removed when dropped.
#[derive(Debug)]
pub struct Socket {
    listener: UnixListener,
    directory: Arc<Directory>,
}

#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    #[error("another mounter already serves {directory:?}")]
    Taken { directory: PathBuf },

    #[error("{path:?} is not a socket")]
    NotASocket { path: PathBuf },

    #[error("failed to find out whether another mounter listens on {path:?}")]
    Probe {
        path: PathBuf,
        #[source]
        cause: ConnectError,
    },

    #[error("failed to listen on {path:?}")]
    Listen {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
}

/// Nodes connect in bursts when many workloads start at once.
const BACKLOG: i32 = 512;

/// A running mounter accepts at once; one with a full queue is running, too.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);

impl Socket {
    pub fn listen(directory: Arc<Directory>) -> Result<Self, ListenError> {
        lock(&directory)?;
        remove_stale(&directory)?;
        let path = directory.path().join(SOCKET);
        let listener = bind(&directory).map_err(|cause| ListenError::Listen { path, cause })?;
        Ok(Self { listener, directory })
    }

    /// The next connection, or nothing if there is none right now.
    pub fn accept(&self) -> io::Result<Option<UnixStream>> {
        match self.listener.accept() {
            Ok((stream, _)) => Ok(Some(stream)),
            Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => Ok(None),
            // The peer is gone already, or we were interrupted: the loop tries again.
            Err(cause) if matches!(cause.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted) => {
                Ok(None)
            }
            Err(cause) => Err(cause),
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if let Err(cause) = self.directory.remove(SOCKET) {
            log::warn("socket not removed", &[("error", &cause)]);
        }
    }
}

/// Two mounters that start at the same time must not both find the socket stale. The lock ends with the process.
fn lock(directory: &Directory) -> Result<(), ListenError> {
    match rustix::fs::flock(directory, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::AGAIN) => Err(ListenError::Taken { directory: directory.path().to_owned() }),
        // On a file system without locks the probe has to suffice.
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Removes the socket of a killed mounter, which would prevent listening. Older mounters take no lock, so the socket is probed
/// as well.
fn remove_stale(directory: &Directory) -> Result<(), ListenError> {
    let path = directory.path().join(SOCKET);
    match handoff::connect(&path, PROBE_TIMEOUT) {
        Ok(_) => Err(ListenError::Taken { directory: directory.path().to_owned() }),
        Err(ConnectError::NotASocket { path }) => Err(ListenError::NotASocket { path }),
        Err(ConnectError::NotListening { .. }) => {
            directory.remove(SOCKET).map_err(|cause| ListenError::Listen { path, cause })
        }
        Err(ConnectError::Connect { cause, .. }) if cause.kind() == io::ErrorKind::WouldBlock => {
            Err(ListenError::Taken { directory: directory.path().to_owned() })
        }
        Err(cause @ ConnectError::Connect { .. }) => Err(ListenError::Probe { path, cause }),
    }
}

fn bind(directory: &Directory) -> io::Result<UnixListener> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // Through the descriptor: a socket address holds 107 bytes, and kubelet's paths are longer.
    let address = SocketAddrUnix::new(format!("/proc/self/fd/{}/{SOCKET}", directory.as_fd().as_raw_fd()))?;
    rustix::net::bind(&socket, &address)?;
    // A peer that can connect can run programs as this user. Before `listen` no peer can connect, so there is no moment with
    // other permissions. The group is that of the directory, for node plugins without CAP_DAC_OVERRIDE.
    let mode = Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::WGRP;
    rustix::fs::chmodat(directory, SOCKET, mode, AtFlags::empty())?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(UnixListener::from(socket))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::path::Path;

    use super::*;

    #[test]
    fn a_stale_socket_is_replaced_and_removed_at_the_end() {
        let place = tempfile::tempdir().unwrap();
        drop(UnixListener::bind(place.path().join(SOCKET)).unwrap());
        let socket = listen(place.path()).unwrap();
        handoff::connect(&place.path().join(SOCKET), PROBE_TIMEOUT).unwrap();
        assert!(socket.accept().unwrap().is_some());
        assert!(socket.accept().unwrap().is_none());
        let metadata = std::fs::symlink_metadata(place.path().join(SOCKET)).unwrap();
        assert_eq!(metadata.permissions().mode() & 0o777, 0o660);
        drop(socket);
        assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0);
    }

    #[test]
    fn the_socket_of_a_running_mounter_is_never_taken() {
        let place = tempfile::tempdir().unwrap();
        let expected = format!("another mounter already serves {:?}", place.path());
        let foreign = UnixListener::bind(place.path().join(SOCKET)).unwrap();
        assert_eq!(listen(place.path()).unwrap_err().to_string(), expected);
        drop(foreign);
        let _ours = listen(place.path()).unwrap();
        assert_eq!(listen(place.path()).unwrap_err().to_string(), expected);
        handoff::connect(&place.path().join(SOCKET), PROBE_TIMEOUT).unwrap();
    }

    #[test]
    fn something_that_is_not_a_socket_is_left_alone() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join(SOCKET);
        std::fs::write(&path, "precious").unwrap();
        assert_eq!(listen(place.path()).unwrap_err().to_string(), format!("{path:?} is not a socket"));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
    }

    #[test]
    fn links_to_sockets_are_not_followed() {
        let place = tempfile::tempdir().unwrap();
        let _listener = UnixListener::bind(place.path().join("real")).unwrap();
        let link = place.path().join(SOCKET);
        symlink("real", &link).unwrap();
        let error = handoff::connect(&link, PROBE_TIMEOUT).unwrap_err();
        assert_eq!(error.to_string(), format!("{link:?} is not a socket"));
    }

    #[test]
    fn long_paths_work() {
        let place = tempfile::tempdir().unwrap();
        let deep = place.path().join("x".repeat(100)).join("y".repeat(100));
        std::fs::create_dir_all(&deep).unwrap();
        let socket = listen(&deep).unwrap();
        handoff::connect(&deep.join(SOCKET), PROBE_TIMEOUT).unwrap();
        assert!(socket.accept().unwrap().is_some());
    }

    fn listen(path: &Path) -> Result<Socket, ListenError> {
        Socket::listen(Arc::new(Directory::open(path).unwrap()))
    }
}
