//! The first exchange with the kernel (`FUSE_INIT`), done by ourselves.
//!
//! The FUSE library believes what it reads from its device. So it is first given one end of a socket, reads the kernel's
//! question and an end-of-file from it and returns; then the real device takes over the same descriptor number. This way we
//! know the moment the kernel was answered, and an engine that takes over a mount can start without a question: it asks the
//! library what the kernel asked the first engine, and must get the same answer.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;

use fuser::{Filesystem, Session, SessionACL};
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, shutdown, socketpair};

use super::{Resending, descriptor};
use crate::state::{Start, State};

/// Operation code of `FUSE_INIT`, in the fifth byte of a request.
const INIT: u8 = 26;
/// Header and body of the question and of the answer are shorter than this in every version of the protocol.
const LONGEST_MESSAGE: usize = 256;
const REQUEST_HEADER: usize = 40;
const REPLY_HEADER: usize = 16;
/// The kernel refuses to be read with a smaller buffer.
const READ_BUFFER: usize = 1 << 16;
/// `FUSE_NOTIFY_RESEND`: what an engine has read and not answered goes back to the queue. A message of 16 bytes: its length,
/// the code, and no request.
const SEND_AGAIN: [u32; 4] = [16, 7, 0, 0];

#[derive(Debug, thiserror::Error)]
pub enum InitError {
    #[error("failed to read the kernel's first request")]
    Read {
        #[source]
        cause: io::Error,
    },

    #[error("the kernel's first request is not FUSE_INIT; is the descriptor served by another process?")]
    NotInit,

    #[error("failed to hand the request to the FUSE library")]
    Exchange {
        #[source]
        cause: io::Error,
    },

    #[error("the FUSE library refused the kernel's request (error {errno})")]
    Refused { errno: i32 },

    #[error("failed to reply to the kernel")]
    Answer {
        #[source]
        cause: io::Error,
    },

    #[error("this engine negotiates other FUSE features than the previous engine")]
    Incompatible,
}

/// A session that has everything but the kernel.
pub struct Prepared<F: Filesystem> {
    session: Session<F>,
    answer: Vec<u8>,
    start: Start,
}

/// Lets the FUSE library answer the kernel's first question, which the kernel asked now or a previous engine.
pub fn prepare<F: Filesystem>(
    files: F,
    device: &File,
    access: SessionACL,
    state: &State,
) -> Result<Prepared<F>, InitError> {
    let start = state.start();
    let question = match state.question() {
        Some(question) if start == Start::Resumed => question,
        Some(_) | None => read_question(device).map_err(|cause| InitError::Read { cause })?,
    };
    let is_init = (REQUEST_HEADER..=LONGEST_MESSAGE).contains(&question.len()) && question[4] == INIT;
    if !is_init {
        return Err(InitError::NotInit);
    }
    let (session, answer) = ask(files, &question, access).map_err(|cause| InitError::Exchange { cause })?;
    let errno = answer.get(4..8).map(|it| i32::from_ne_bytes([it[0], it[1], it[2], it[3]]));
    if answer.len() < REPLY_HEADER || errno != Some(0) {
        return Err(InitError::Refused { errno: errno.map_or(libc::EIO, i32::saturating_neg) });
    }
    match start {
        Start::First => state.note_exchange(&question, &answer),
        Start::Resumed if state.answer().as_ref() == Some(&answer) => {}
        Start::Resumed => return Err(InitError::Incompatible),
    }
    Ok(Prepared { session, answer, start })
}

/// What becomes of requests that an engine had read when it died.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unanswered {
    /// The kernel sends them again, or there are none.
    SentAgain,
    /// They must be answered here.
    Lost,
}

impl<F: Filesystem> Prepared<F> {
    /// From now on the session reads from the device. No other engine may.
    pub fn attach(self, mut device: &File, resending: Resending) -> Result<(Session<F>, Unanswered), InitError> {
        // First the exchange, then the message: the kernel sends requests as soon as it has it.
        descriptor::replace(&self.session, device).map_err(|cause| InitError::Exchange { cause })?;
        let unanswered = match (self.start, resending) {
            (Start::First, _) => {
                device.write_all(&self.answer).map_err(|cause| InitError::Answer { cause })?;
                Unanswered::SentAgain
            }
            (Start::Resumed, Resending::Never) => Unanswered::Lost,
            (Start::Resumed, Resending::IfPossible) => {
                let message = SEND_AGAIN.map(u32::to_ne_bytes).concat();
                match device.write_all(&message) {
                    Ok(()) => Unanswered::SentAgain,
                    Err(error) => {
                        // Linux before 6.9, or the mount is gone.
                        tracing::warn!(%error, "cannot resend the requests of the previous engine; failing them");
                        Unanswered::Lost
                    }
                }
            }
        };
        Ok((self.session, unanswered))
    }
}

/// Whether the kernel sends requests again on demand, as its `FUSE_INIT` says (`FUSE_HAS_RESEND`, Linux 6.9).
pub fn has_resend(question: &[u8]) -> bool {
    const FLAGS: usize = REQUEST_HEADER + 12;
    const INIT_EXTENDED: u32 = 1 << 30;
    const HAS_RESEND: u32 = 1 << (39 - 32);
    let number = |at: usize| question.get(at..at + 4).map(|it| u32::from_ne_bytes([it[0], it[1], it[2], it[3]]));
    let (flags, more_flags) = (number(FLAGS).unwrap_or_default(), number(FLAGS + 4).unwrap_or_default());
    flags & INIT_EXTENDED != 0 && more_flags & HAS_RESEND != 0
}

/// Answers a request that a previous engine had read and could not answer; `errno` 0 is success.
pub fn answer(mut device: &File, unique: u64, errno: i32) {
    let mut message = Vec::with_capacity(REPLY_HEADER);
    message.extend(u32::try_from(REPLY_HEADER).unwrap_or(16).to_ne_bytes());
    message.extend((-errno).to_ne_bytes());
    message.extend(unique.to_ne_bytes());
    if let Err(error) = device.write_all(&message) {
        // It was answered, but its note was not removed any longer.
        tracing::debug!(%error, "request was already answered");
    }
}

fn read_question(mut device: &File) -> io::Result<Vec<u8>> {
    let mut buffer = vec![0; READ_BUFFER];
    loop {
        match device.read(&mut buffer) {
            Ok(length) => {
                buffer.truncate(length);
                return Ok(buffer);
            }
            // A request was interrupted before we got it.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::ENOENT | libc::EAGAIN)) => {}
            Err(error) => return Err(error),
        }
    }
}

/// Lets the FUSE library answer the question.
fn ask<F: Filesystem>(files: F, question: &[u8], access: SessionACL) -> io::Result<(Session<F>, Vec<u8>)> {
    // All data is written before it is read, so neither end blocks.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (library_end, our_end): (OwnedFd, OwnedFd) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    let mut our_end = File::from(our_end);
    our_end.write_all(question)?;
    shutdown(&our_end, Shutdown::Write)?;
    let session = Session::from_fd(files, library_end, access);
    // Answers the question, finds the end of the file and returns: no thread is left that reads.
    session.run()?;
    let mut answer = vec![0; LONGEST_MESSAGE];
    let length = our_end.read(&mut answer)?;
    answer.truncate(length);
    Ok((session, answer))
}
