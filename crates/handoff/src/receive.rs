//! The side of the mounter: receives one request and its descriptor.
//!
//! A received descriptor is owned from the first moment, so every error closes it: with a FUSE descriptor that stays open
//! without an engine, every access to the mount would hang.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags};

use crate::{MountRequest, SourceCommand};

/// A request of the node plugin.
#[derive(Debug)]
pub enum Request {
    Mount(ReceivedMount),
    Command(SourceCommand),
}

/// A mount request and its descriptors, which have `CLOEXEC` set.
#[derive(Debug)]
pub struct ReceivedMount {
    pub request: MountRequest,
    pub fuse: OwnedFd,
    /// Present exactly if the mount is to be resumed.
    pub state: Option<OwnedFd>,
}

/// Limits of size and time for one request.
#[derive(Clone, Copy, Debug)]
pub struct ReceiveLimits {
    pub bytes: usize,
    /// For the whole request, not for each part.
    pub deadline: Instant,
}

impl ReceiveLimits {
    /// Real requests have some kilobytes. Arguments and environment of a process cannot be much larger than this.
    pub const DEFAULT_BYTES: usize = 1024 * 1024;

    pub fn until(deadline: Instant) -> Self {
        Self { bytes: Self::DEFAULT_BYTES, deadline }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ReceiveError {
    #[error("failed to receive the mount request")]
    Receive {
        #[source]
        cause: io::Error,
    },

    #[error("the mount request was not complete in time; {received} bytes were received")]
    Deadline { received: usize },

    #[error("the mount request is larger than {limit} bytes")]
    TooLarge { limit: usize },

    #[error("the connection was closed without a mount request")]
    Empty,

    #[error("the mount request has {count} descriptors instead of {expected}")]
    Descriptors { count: usize, expected: usize },

    #[error("the mount request has more descriptors than can be received")]
    ControlTruncated,

    /// Does not quote the request: older node plugins send secrets in it.
    #[error("the mount request is not valid: {problem} in line {line}, column {column}")]
    Json { problem: &'static str, line: usize, column: usize },
}

/// Receives one request up to the end of the stream. A mount request has one descriptor, or two if the mount is to be resumed.
pub fn receive(stream: &UnixStream, limits: ReceiveLimits) -> Result<Request, ReceiveError> {
    let mut message = Vec::new();
    let mut descriptors: Vec<OwnedFd> = Vec::new();
    let mut part = [0; 16 * 1024];
    loop {
        wait_readable(stream, limits.deadline, message.len())?;
        // Space for three: the third one proves an invalid request, the kernel drops the rest.
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let received = match rustix::net::recvmsg(stream, &mut [IoSliceMut::new(&mut part)], &mut control, flags) {
            Ok(received) => received,
            Err(Errno::INTR | Errno::AGAIN) => continue,
            Err(cause) => return Err(ReceiveError::Receive { cause: cause.into() }),
        };
        for it in control.drain() {
            if let RecvAncillaryMessage::ScmRights(arrived) = it {
                descriptors.extend(arrived);
            }
        }
        if received.flags.contains(ReturnFlags::CTRUNC) {
            return Err(ReceiveError::ControlTruncated);
        }
        if 2 < descriptors.len() {
            return Err(ReceiveError::Descriptors { count: descriptors.len(), expected: 1 });
        }
        if received.bytes == 0 {
            break;
        }
        if limits.bytes < message.len() + received.bytes {
            return Err(ReceiveError::TooLarge { limit: limits.bytes });
        }
        message.extend_from_slice(&part[..received.bytes]);
    }
    if message.is_empty() && descriptors.is_empty() {
        return Err(ReceiveError::Empty);
    }
    let count = descriptors.len();
    let mut descriptors = descriptors.into_iter();
    let Some(fuse) = descriptors.next() else {
        return parse_without_descriptor(&message).map(Request::Command);
    };
    let (request, state) = (parse(&message)?, descriptors.next());
    // A first engine on a resumed mount would take any request of the kernel for FUSE_INIT.
    if request.resume != state.is_some() {
        return Err(ReceiveError::Descriptors { count, expected: 1 + usize::from(request.resume) });
    }
    Ok(Request::Mount(ReceivedMount { request, fuse, state }))
}

fn wait_readable(stream: &UnixStream, deadline: Instant, received: usize) -> Result<(), ReceiveError> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ReceiveError::Deadline { received });
        }
        // A time that does not fit is as good as no limit.
        let timeout = Timespec::try_from(left).ok();
        let mut sets = [PollFd::from_borrowed_fd(stream.as_fd(), PollFlags::IN)];
        match rustix::event::poll(&mut sets, timeout.as_ref()) {
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(cause) => return Err(ReceiveError::Receive { cause: cause.into() }),
        }
    }
}

/// Only commands have no descriptor. Anything else is reported as an invalid mount request.
pub(crate) fn parse_without_descriptor(message: &[u8]) -> Result<SourceCommand, ReceiveError> {
    match serde_json::from_slice(message) {
        Ok(command) => Ok(command),
        Err(_) => parse(message).and(Err(ReceiveError::Descriptors { count: 0, expected: 1 })),
    }
}

pub(crate) fn parse(message: &[u8]) -> Result<MountRequest, ReceiveError> {
    serde_json::from_slice(message).map_err(|cause| {
        let problem = match cause.classify() {
            serde_json::error::Category::Data => "a field is missing or of the wrong type",
            serde_json::error::Category::Eof => "it is truncated",
            serde_json::error::Category::Syntax | serde_json::error::Category::Io => "it is not JSON",
        };
        ReceiveError::Json { problem, line: cause.line(), column: cause.column() }
    })
}
