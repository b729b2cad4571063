//! systemd's private socket as a transport that zbus accepts.
//!
//! systemd sets the sender of every message on this socket to the well-known name `org.freedesktop.systemd1`, and zbus rejects
//! senders that are not unique names, which start with a colon. So the first letter of the sender is replaced by a colon in every
//! incoming message. The length stays the same, and the sender is never used: there is only one peer.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use zbus::connection::socket::{ReadHalf, Socket, Split, WriteHalf};
use zbus::export::async_trait::async_trait;

#[derive(Debug)]
pub struct PrivateSocket(UnixStream);

impl PrivateSocket {
    pub async fn connect(path: &Path) -> io::Result<Self> {
        UnixStream::connect(path).await.map(Self)
    }
}

impl Socket for PrivateSocket {
    type ReadHalf = Reader;
    type WriteHalf = Writer;

    fn split(self) -> Split<Reader, Writer> {
        let (reader, writer) = self.0.into_split();
        Split::new(Reader { stream: reader, frames: Frames::default() }, Writer(writer))
    }
}

#[derive(Debug)]
pub struct Reader {
    stream: OwnedReadHalf,
    frames: Frames,
}

#[async_trait]
impl ReadHalf for Reader {
    async fn recvmsg(&mut self, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
        while self.frames.is_empty() {
            if self.stream.read_buf(self.frames.incoming()).await? == 0 {
                return Ok((0, Vec::new()));
            }
            self.frames.advance()?;
        }
        Ok((self.frames.take(buffer), Vec::new()))
    }
}

#[derive(Debug)]
pub struct Writer(OwnedWriteHalf);

#[async_trait]
impl WriteHalf for Writer {
    async fn sendmsg(&mut self, buffer: &[u8], _descriptors: &[BorrowedFd<'_>]) -> io::Result<usize> {
        self.0.write(buffer).await
    }

    async fn close(&mut self) -> io::Result<()> {
        self.0.shutdown().await
    }
}

/// The longest message and the longest header that D-Bus allows.
const LONGEST_MESSAGE: usize = 128 << 20;
const LONGEST_HEADER: usize = 64 << 20;

/// Byte order, type, flags, version, length of the body, serial number, length of the header fields.
const FIXED_HEADER: usize = 16;

/// The number of the header field that names the sender.
const SENDER: u8 = 7;

/// Incoming bytes. Only complete, corrected messages are passed on.
#[derive(Debug, Default)]
struct Frames {
    bytes: Vec<u8>,
    /// Everything before this offset is corrected.
    ready: usize,
    /// Everything before this offset is consumed.
    taken: usize,
    is_authenticated: bool,
}

impl Frames {
    fn is_empty(&self) -> bool {
        self.taken == self.ready
    }

    /// The buffer to append to. Consumed bytes are dropped.
    fn incoming(&mut self) -> &mut Vec<u8> {
        self.bytes.drain(..self.taken);
        self.ready -= self.taken;
        self.taken = 0;
        &mut self.bytes
    }

    fn take(&mut self, buffer: &mut [u8]) -> usize {
        let count = buffer.len().min(self.ready - self.taken);
        buffer[..count].copy_from_slice(&self.bytes[self.taken..self.taken + count]);
        self.taken += count;
        count
    }

    /// Corrects every complete message.
    fn advance(&mut self) -> io::Result<()> {
        if !self.is_authenticated {
            // We do not negotiate descriptor passing, so the server sends exactly one line.
            let Some(end) = self.bytes[self.ready..].windows(2).position(|it| it == b"\r\n") else { return Ok(()) };
            self.ready += end + 2;
            self.is_authenticated = true;
        }
        while let Some(length) = correct_sender(&mut self.bytes[self.ready..])? {
            self.ready += length;
        }
        Ok(())
    }
}

/// The length of the first message after correcting its sender; `None` if it is incomplete.
fn correct_sender(bytes: &mut [u8]) -> io::Result<Option<usize>> {
    let invalid = |text| io::Error::new(io::ErrorKind::InvalidData, text);
    if bytes.len() < FIXED_HEADER {
        return Ok(None);
    }
    let from_bytes = match bytes[0] {
        b'l' => u32::from_le_bytes,
        b'B' => u32::from_be_bytes,
        _ => return Err(invalid("a message from systemd has no byte order")),
    };
    let number = |bytes: &[u8], at: usize| -> Option<usize> {
        let four: [u8; 4] = bytes.get(at..at + 4)?.try_into().ok()?;
        usize::try_from(from_bytes(four)).ok()
    };
    let (Some(body), Some(fields)) = (number(bytes, 4), number(bytes, 12)) else { return Ok(None) };
    if body > LONGEST_MESSAGE || fields > LONGEST_HEADER {
        return Err(invalid("a message from systemd is too long"));
    }
    let end = FIXED_HEADER + fields;
    let length = end.next_multiple_of(8) + body;
    if bytes.len() < length {
        return Ok(None);
    }
    let mut at = FIXED_HEADER;
    // Each field: its number, a signature of one letter, the value. An unknown signature ends the search; zbus reports it.
    while at + 4 <= end {
        let (field, value) = (bytes[at], at + 4);
        let next = match (bytes[at + 1], bytes[at + 2]) {
            (1, b's' | b'o') => match number(bytes, value) {
                Some(count) if value + 4 + count < end => {
                    if field == SENDER && count > 1 {
                        bytes[value + 4] = b':';
                    }
                    value + 4 + count + 1
                }
                _ => break,
            },
            (1, b'g') => value + 1 + usize::from(bytes[value.min(end - 1)]) + 1,
            (1, b'u') => value + 4,
            _ => break,
        };
        at = next.next_multiple_of(8);
    }
    Ok(Some(length))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A signal with a sender field between two others, and a body of five bytes.
    fn message(sender: &str) -> Vec<u8> {
        let mut fields = Vec::new();
        let mut text = |field: u8, kind: u8, value: &str| {
            fields.resize(fields.len().next_multiple_of(8), 0);
            fields.extend([field, 1, kind, 0]);
            fields.extend(u32::try_from(value.len()).unwrap().to_le_bytes());
            fields.extend(value.as_bytes());
            fields.push(0);
        };
        text(1, b'o', "/a");
        text(SENDER, b's', sender);
        text(3, b's', "Member");
        let mut bytes = vec![b'l', 4, 0, 1];
        bytes.extend(5_u32.to_le_bytes());
        bytes.extend(1_u32.to_le_bytes());
        bytes.extend(u32::try_from(fields.len()).unwrap().to_le_bytes());
        bytes.extend(fields);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        bytes.extend(b"body!");
        bytes
    }

    /// What leaves when the bytes arrive in pieces of this size.
    fn passed(bytes: &[u8], piece: usize) -> Vec<u8> {
        let mut frames = Frames::default();
        let mut out = Vec::new();
        for part in bytes.chunks(piece) {
            frames.incoming().extend(part);
            frames.advance().unwrap();
            let mut buffer = [0; 7];
            while !frames.is_empty() {
                let count = frames.take(&mut buffer);
                out.extend(&buffer[..count]);
            }
        }
        out
    }

    #[test]
    fn only_the_sender_is_changed_however_the_bytes_arrive() {
        let hello = b"OK 1234\r\n".as_slice();
        let two = |sender: &str| [hello, &message(sender), &message(sender)].concat();
        for piece in [1, 3, 64, 4096] {
            assert_eq!(passed(&two("org.freedesktop.systemd1"), piece), two(":rg.freedesktop.systemd1"));
        }
    }

    #[test]
    fn half_a_message_waits_for_the_rest() {
        let whole = [b"OK\r\n".as_slice(), &message("org.x")].concat();
        assert_eq!(passed(&whole[..whole.len() - 1], 1024), b"OK\r\n");
    }

    #[test]
    fn nonsense_is_an_error_and_no_panic() {
        let mut frames = Frames { is_authenticated: true, ..Frames::default() };
        frames.incoming().extend([b'x'; 32]);
        assert!(frames.advance().is_err());
        let mut frames = Frames { is_authenticated: true, ..Frames::default() };
        frames.incoming().extend([b'l', 1, 0, 1, 255, 255, 255, 255, 1, 0, 0, 0, 8, 0, 0, 0]);
        assert!(frames.advance().is_err());
        let mut frames = Frames { is_authenticated: true, ..Frames::default() };
        frames.incoming().extend([b'l', 1, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, 7, 1, b's', 0, 200, 0, 0, 0]);
        frames.advance().unwrap();
    }
}
