//! The mounter's end: takes one request and its descriptor from a connection, or nothing at all.
//!
//! A descriptor that arrives is owned from the first moment, so every way out of here but success closes it. That matters:
//! a FUSE descriptor that stays open without an engine behind it lets every access to its mount hang.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags};

use super::{MountRequest, StopRequest};

/// What a peer can ask for.
#[derive(Debug)]
pub enum Request {
    /// The descriptor is closed on exec.
    Mount(MountRequest, OwnedFd),
    Stop(StopRequest),
}

/// How much a peer may send, and until when it must have ended.
#[derive(Clone, Copy, Debug)]
pub struct ReceiveLimits {
    pub bytes: usize,
    /// For the whole message, not for each part of it.
    pub deadline: Instant,
}

impl ReceiveLimits {
    /// Real requests have some kilobytes; arguments and environment of a process cannot be much larger than this.
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

    #[error("the mount request did not end in time; {received} bytes had come")]
    Deadline { received: usize },

    #[error("the mount request is larger than {limit} bytes")]
    TooLarge { limit: usize },

    #[error("the connection was closed without a mount request")]
    Empty,

    #[error("the mount request came with {count} descriptors instead of one")]
    Descriptors { count: usize },

    #[error("the mount request came with more descriptors than could be taken")]
    ControlTruncated,

    /// Says where and of which kind the mistake is, but not what stands there: older nodes send keys in requests.
    #[error("the mount request is not valid: {problem} in line {line}, column {column}")]
    Json { problem: &'static str, line: usize, column: usize },
}

/// Takes one request up to the end of the stream; one for a mount must come with exactly one descriptor.
pub fn receive(stream: &UnixStream, limits: ReceiveLimits) -> Result<Request, ReceiveError> {
    let mut message = Vec::new();
    let mut descriptors: Vec<OwnedFd> = Vec::new();
    let mut part = [0; 16 * 1024];
    loop {
        wait_readable(stream, limits.deadline, message.len())?;
        // Room for two: the second one is proof enough of a wrong peer, the kernel drops the rest.
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
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
        if 1 < descriptors.len() {
            return Err(ReceiveError::Descriptors { count: descriptors.len() });
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
    match descriptors.pop() {
        Some(fuse) => parse(&message).map(|request| Request::Mount(request, fuse)),
        None => parse_without_descriptor(&message).map(Request::Stop),
    }
}

fn wait_readable(stream: &UnixStream, deadline: Instant, received: usize) -> Result<(), ReceiveError> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ReceiveError::Deadline { received });
        }
        // More than the kernel can express is as good as no limit.
        let timeout = Timespec::try_from(left).ok();
        let mut sets = [PollFd::from_borrowed_fd(stream.as_fd(), PollFlags::IN)];
        match rustix::event::poll(&mut sets, timeout.as_ref()) {
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(cause) => return Err(ReceiveError::Receive { cause: cause.into() }),
        }
    }
}

/// Only a request to stop has no descriptor. Anything else is described as the mount request it was probably meant to be.
fn parse_without_descriptor(message: &[u8]) -> Result<StopRequest, ReceiveError> {
    match serde_json::from_slice(message) {
        Ok(request) => Ok(request),
        Err(_) => parse(message).and(Err(ReceiveError::Descriptors { count: 0 })),
    }
}

fn parse(message: &[u8]) -> Result<MountRequest, ReceiveError> {
    serde_json::from_slice(message).map_err(|cause| {
        let problem = match cause.classify() {
            serde_json::error::Category::Data => "a field is missing or of the wrong type",
            serde_json::error::Category::Eof => "it stops too early",
            serde_json::error::Category::Syntax | serde_json::error::Category::Io => "it is not JSON",
        };
        ReceiveError::Json { problem, line: cause.line(), column: cause.column() }
    })
}
