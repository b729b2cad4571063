//! Answers on a connection, with the descriptors that are attached to some of them.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};

use crate::{Answer, InvalidAnswer, MAX_ANSWER_BYTES};

/// FUSE descriptor and state.
const MAX_DESCRIPTORS: usize = 2;

/// Sends an answer without ever blocking: the peer may be gone, or an older node plugin that never reads. Returns whether the
/// peer can have received it.
pub fn send_answer(stream: &UnixStream, answer: &Answer, descriptors: &[BorrowedFd<'_>]) -> bool {
    let line = answer.to_line();
    let mut rest = line.as_bytes();
    let mut attached = descriptors;
    while !rest.is_empty() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !attached.is_empty() {
            let has_space = control.push(SendAncillaryMessage::ScmRights(attached));
            debug_assert!(has_space, "no answer has more descriptors");
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match rustix::net::sendmsg(stream, &[IoSlice::new(rest)], &mut control, flags) {
            Ok(sent) => {
                rest = &rest[sent..];
                attached = &[];
            }
            Err(Errno::INTR) => {}
            Err(_) => return false,
        }
    }
    true
}

/// Reads answers and their descriptors, which arrive only with recvmsg(2): read(2) would drop them.
#[derive(Debug)]
pub struct AnswerReader {
    stream: UnixStream,
    bytes: Vec<u8>,
    /// Descriptors that arrived and were not taken yet, in their order.
    descriptors: VecDeque<OwnedFd>,
}

/// An answer and the descriptors attached to it, which have `CLOEXEC` set.
#[derive(Debug)]
pub struct ReceivedAnswer {
    pub answer: Answer,
    pub descriptors: Vec<OwnedFd>,
}

#[derive(Debug, thiserror::Error)]
pub enum ReadAnswerError {
    #[error("failed to read from the mounter")]
    Read {
        #[source]
        cause: io::Error,
    },

    #[error("the mounter sent an answer that is too long")]
    TooLong,

    #[error(transparent)]
    Invalid(InvalidAnswer),
}

impl AnswerReader {
    pub fn new(stream: UnixStream) -> Self {
        Self { stream, bytes: Vec::new(), descriptors: VecDeque::new() }
    }

    /// How long [`Self::next_answer`] waits; without one, for ever. Then it fails with [`io::ErrorKind::WouldBlock`].
    pub fn set_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.stream.set_read_timeout(timeout)
    }

    /// Ends the connection, whatever other copies of it there are.
    pub fn shut_down(&self) {
        // It fails if the peer has ended it already.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// The next answer; `None` at the end of the stream.
    pub fn next_answer(&mut self) -> Result<Option<ReceivedAnswer>, ReadAnswerError> {
        loop {
            if let Some(length) = self.bytes.iter().position(|&it| it == b'\n') {
                let line: Vec<u8> = self.bytes.drain(..=length).collect();
                let answer = Answer::from_line(&String::from_utf8_lossy(&line)).map_err(ReadAnswerError::Invalid)?;
                // Only this answer has descriptors, and they arrive before the end of its line.
                let descriptors = match answer {
                    Answer::Held { .. } => self.descriptors.drain(..).collect(),
                    _ => Vec::new(),
                };
                return Ok(Some(ReceivedAnswer { answer, descriptors }));
            }
            if MAX_ANSWER_BYTES < self.bytes.len() {
                return Err(ReadAnswerError::TooLong);
            }
            if self.receive().map_err(|cause| ReadAnswerError::Read { cause })? == 0 {
                return Ok(None);
            }
        }
    }

    fn receive(&mut self) -> io::Result<usize> {
        let mut part = [0; 4096];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = rustix::io::retry_on_intr(|| {
            let parts = &mut [IoSliceMut::new(&mut part)];
            rustix::net::recvmsg(&self.stream, parts, &mut control, RecvFlags::CMSG_CLOEXEC)
        })?;
        for it in control.drain() {
            if let RecvAncillaryMessage::ScmRights(arrived) = it {
                self.descriptors.extend(arrived);
            }
        }
        // A peer that sends more than it should must not make us hold them.
        self.descriptors.truncate(MAX_DESCRIPTORS);
        self.bytes.extend_from_slice(&part[..received.bytes]);
        Ok(received.bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn descriptors_belong_to_the_answer_they_were_sent_with() {
        let (mounter, node) = UnixStream::pair().unwrap();
        let file = File::open("/dev/null").unwrap();
        let held = Answer::Held { request: None };
        assert!(send_answer(&mounter, &Answer::Ready, &[]));
        assert!(send_answer(&mounter, &held, &[file.as_fd(), file.as_fd()]));
        assert!(send_answer(&mounter, &Answer::Released, &[]));
        drop(mounter);
        let mut reader = AnswerReader::new(node);
        let mut next = || reader.next_answer().unwrap().map(|it| (it.answer, it.descriptors.len()));
        assert_eq!(next(), Some((Answer::Ready, 0)));
        assert_eq!(next(), Some((held, 2)));
        assert_eq!(next(), Some((Answer::Released, 0)));
        assert_eq!(next(), None);
    }

    #[test]
    fn endless_answers_are_an_error() {
        let (mounter, node) = UnixStream::pair().unwrap();
        let sender = std::thread::spawn(move || {
            let part = [b'x'; 4096];
            while rustix::net::send(&mounter, &part, SendFlags::NOSIGNAL).is_ok() {}
        });
        let mut reader = AnswerReader::new(node);
        assert!(matches!(reader.next_answer(), Err(ReadAnswerError::TooLong)));
        drop(reader);
        sender.join().unwrap();
    }

    #[test]
    fn a_peer_that_is_gone_receives_nothing() {
        let (mounter, node) = UnixStream::pair().unwrap();
        drop(node);
        assert!(!send_answer(&mounter, &Answer::Ready, &[]));
    }
}
