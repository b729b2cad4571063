//! Messages to the service manager that started this process (`sd_notify`): a status text, and descriptors that it keeps while
//! it restarts the service (systemd's file descriptor store).

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use crate::StatusReport;

/// The socket of a service manager.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceManager {
    socket: PathBuf,
}

/// What a descriptor in the store is, which the manager passes on to the next process of the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredDescriptor {
    /// The connection of the mount.
    Fuse,
    /// The memory in which engines store what they know of the mount.
    State,
}

impl StoredDescriptor {
    /// The name in the store.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fuse => "fuse",
            Self::State => "state",
        }
    }

    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Fuse, Self::State].into_iter().find(|it| it.name() == name)
    }
}

impl ServiceManager {
    /// The manager at the address in `NOTIFY_SOCKET`.
    pub fn at(socket: PathBuf) -> Self {
        Self { socket }
    }

    /// Sets the status text of the service.
    pub fn report_status(&self, report: &StatusReport) -> io::Result<()> {
        self.send(&format!("STATUS={report}"), None)
    }

    /// Stores a copy of a descriptor. Without room for it (`FileDescriptorStoreMax=`) the manager closes the copy. It does not
    /// poll the copy for errors: each request of the kernel would wake the manager.
    pub fn store(&self, kind: StoredDescriptor, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        self.send(&format!("FDSTORE=1\nFDPOLL=0\nFDNAME={}", kind.name()), Some(descriptor))
    }

    /// Closes the copy of a stored descriptor.
    pub fn remove(&self, kind: StoredDescriptor) -> io::Result<()> {
        self.send(&format!("FDSTOREREMOVE=1\nFDNAME={}", kind.name()), None)
    }

    fn send(&self, message: &str, descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
        let descriptors: Vec<_> = descriptor.into_iter().collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            let has_room = control.push(SendAncillaryMessage::ScmRights(&descriptors));
            debug_assert!(has_room, "the space was made for one descriptor");
        }
        let (address, parts) = (address(&self.socket)?, [IoSlice::new(message.as_bytes())]);
        let send = || rustix::net::sendmsg_addr(&socket, &address, &parts, &mut control, SendFlags::NOSIGNAL);
        Ok(rustix::io::retry_on_intr(send).map(drop)?)
    }
}

/// A path, or an abstract name after an `@`.
fn address(socket: &Path) -> io::Result<SocketAddrUnix> {
    Ok(match socket.as_os_str().as_bytes() {
        [b'@', name @ ..] => SocketAddrUnix::new_abstract_name(name)?,
        _ => SocketAddrUnix::new(socket)?,
    })
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{IoSliceMut, Read as _, Seek as _, Write as _};
    use std::os::fd::AsFd as _;
    use std::os::linux::net::SocketAddrExt as _;
    use std::os::unix::net::{SocketAddr, UnixDatagram};

    use rustix::fs::MemfdFlags;
    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};

    use super::*;

    /// A message as a manager receives it, and the descriptor that came with it.
    fn receive(socket: &UnixDatagram) -> (String, Option<File>) {
        let mut bytes = [0; 256];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let parts = &mut [IoSliceMut::new(&mut bytes)];
        let length = rustix::net::recvmsg(socket, parts, &mut control, RecvFlags::CMSG_CLOEXEC).unwrap().bytes;
        let descriptor = control.drain().find_map(|it| match it {
            RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
            _ => None,
        });
        (String::from_utf8(bytes[..length].to_vec()).unwrap(), descriptor.map(File::from))
    }

    /// A manager with an abstract name.
    fn listen(name: &str) -> (UnixDatagram, ServiceManager) {
        let name = format!("s3csi-notify-{name}-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        (UnixDatagram::bind_addr(&address).unwrap(), ServiceManager::at(format!("@{name}").into()))
    }

    #[test]
    fn messages_and_descriptors_reach_the_manager() {
        let (socket, manager) = listen("messages");
        let mut state = File::from(rustix::fs::memfd_create("state", MemfdFlags::CLOEXEC).unwrap());
        state.write_all(b"content").unwrap();
        manager.store(StoredDescriptor::State, state.as_fd()).unwrap();
        let (message, received) = receive(&socket);
        assert_eq!(message, "FDSTORE=1\nFDPOLL=0\nFDNAME=state");
        let (mut received, mut content) = (received.unwrap(), String::new());
        received.rewind().unwrap();
        received.read_to_string(&mut content).unwrap();
        assert_eq!(content, "content");

        manager.remove(StoredDescriptor::Fuse).unwrap();
        let (message, received) = receive(&socket);
        assert_eq!((message.as_str(), received.is_none()), ("FDSTOREREMOVE=1\nFDNAME=fuse", true));
        let report = StatusReport { engines: 2, cause: "x".into(), stall_milliseconds: 1, is_planned: true };
        manager.report_status(&report).unwrap();
        assert_eq!(receive(&socket).0, format!("STATUS={report}"));
    }

    #[test]
    fn a_manager_that_is_gone_is_an_error() {
        assert!(ServiceManager::at("/no/such/directory/notify".into()).remove(StoredDescriptor::Fuse).is_err());
        let (socket, manager) = listen("gone");
        drop(socket);
        assert!(manager.remove(StoredDescriptor::Fuse).is_err());
    }

    #[test]
    fn stored_descriptors_are_known_by_their_names() {
        for kind in [StoredDescriptor::Fuse, StoredDescriptor::State] {
            assert_eq!(StoredDescriptor::from_name(kind.name()), Some(kind));
        }
        assert_eq!(StoredDescriptor::from_name("stored"), None);
    }
}
