//! The side of the node plugin: connects to a mounter and sends one request.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FileType, Mode, OFlags};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use crate::MountRequest;

#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The mounter has not started yet, or has ended.
    #[error("no mounter listens on {path:?}")]
    NotListening {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },

    #[error("{path:?} is not a socket")]
    NotASocket { path: PathBuf },

    #[error("failed to connect to the mounter on {path:?}")]
    Connect {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
}

#[derive(Debug, thiserror::Error)]
pub enum SendError {
    #[error("failed to write the mount request as JSON")]
    Render {
        #[source]
        cause: serde_json::Error,
    },

    #[error("failed to send the mount request")]
    Send {
        #[source]
        cause: io::Error,
    },

    #[error("only {sent} of {length} bytes of the mount request were sent")]
    Short { sent: usize, length: usize },

    #[error("failed to complete the mount request")]
    End {
        #[source]
        cause: io::Error,
    },
}

/// Connects to the socket of a mounter. Connecting and later writes take at most `timeout`; reads are not limited.
///
/// The Mountpoint Pod owns its directory, so a link in place of the socket is not followed. Connecting through the descriptor
/// also lifts the limit of 107 bytes for the path of a socket.
pub fn connect(path: &Path, timeout: Duration) -> Result<UnixStream, ConnectError> {
    let failed = |cause: rustix::io::Errno| {
        let path = path.to_owned();
        match cause {
            rustix::io::Errno::NOENT | rustix::io::Errno::CONNREFUSED => {
                ConnectError::NotListening { path, cause: cause.into() }
            }
            _ => ConnectError::Connect { path, cause: cause.into() },
        }
    };
    let node =
        rustix::fs::open(path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty()).map_err(failed)?;
    let status = rustix::fs::fstat(&node).map_err(failed)?;
    if FileType::from_raw_mode(status.st_mode) != FileType::Socket {
        return Err(ConnectError::NotASocket { path: path.to_owned() });
    }
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
        .map_err(failed)?;
    set_socket_timeout(&socket, Timeout::Send, Some(timeout)).map_err(failed)?;
    let address = SocketAddrUnix::new(format!("/proc/self/fd/{}", node.as_raw_fd())).map_err(failed)?;
    rustix::io::retry_on_intr(|| rustix::net::connect(&socket, &address)).map_err(failed)?;
    Ok(UnixStream::from(socket))
}

/// Sends the request and its FUSE descriptor as one message, then shuts down the writing half, which completes the request
/// for all mounters. The stream must be blocking; its write timeout limits the time.
///
/// The caller keeps its copy of the descriptor. While it does, requests for a mount without an engine wait instead of failing.
pub fn send(stream: &UnixStream, request: &MountRequest, fuse: BorrowedFd<'_>) -> Result<(), SendError> {
    send_with(stream, request, &[fuse])
}

/// Sends a request to resume a mount, as [`send`] does, with the state that an earlier engine has left.
pub fn send_resume(
    stream: &UnixStream,
    request: &MountRequest,
    fuse: BorrowedFd<'_>,
    state: BorrowedFd<'_>,
) -> Result<(), SendError> {
    debug_assert!(request.resume, "a state belongs to a mount that is to be resumed");
    send_with(stream, request, &[fuse, state])
}

fn send_with(stream: &UnixStream, request: &MountRequest, descriptors: &[BorrowedFd<'_>]) -> Result<(), SendError> {
    let message = serde_json::to_vec(request).map_err(|cause| SendError::Render { cause })?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let has_room = control.push(SendAncillaryMessage::ScmRights(descriptors));
    debug_assert!(has_room, "the space was made for two descriptors");

    let parts = [IoSlice::new(&message)];
    let sent =
        rustix::io::retry_on_intr(|| rustix::net::sendmsg(stream.as_fd(), &parts, &mut control, SendFlags::NOSIGNAL))
            .map_err(|cause| SendError::Send { cause: cause.into() })?;
    if sent != message.len() {
        return Err(SendError::Short { sent, length: message.len() });
    }
    stream.shutdown(Shutdown::Write).map_err(|cause| SendError::End { cause })
}
