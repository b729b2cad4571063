//! A pseudoterminal for the output of a unit while it starts.
//!
//! systemd opens the other end by its number in the host's `/dev/pts`, so the master must be opened on the host, too: through
//! `PTMX_PATH`. It must be read while the unit starts, because a terminal buffers only a few kilobytes and then blocks the
//! writer. The other end stays open here until the unit has started or failed: newer systemd opens and closes it once before
//! the program does, which would look like the end of the output.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags, open};
use rustix::io::{Errno, read};
use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, ptsname, unlockpt};

/// How much of the output is kept; the rest is read and dropped.
const LONGEST_BYTES: usize = 64 << 10;

pub struct Terminal {
    master: OwnedFd,
    /// The other end, kept open.
    peer: Option<OwnedFd>,
    path: String,
    output: Vec<u8>,
}

/// Whether more output may follow.
#[derive(PartialEq, Eq)]
enum Read {
    Ended,
    NothingNow,
}

impl Terminal {
    pub fn open(ptmx: &Path) -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let master = open(ptmx, flags, Mode::empty())?;
        grantpt(&master)?;
        unlockpt(&master)?;
        let peer = ioctl_tiocgptpeer(&master, OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        let path = ptsname(&master, Vec::new())?.into_string().map_err(io::Error::other)?;
        Ok(Self { master, peer: Some(peer), path, output: Vec::new() })
    }

    /// The path of the other end.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Reads until `done` becomes readable, or the deadline.
    pub fn drain_until(&mut self, done: &OwnedFd, deadline: Instant) -> io::Result<()> {
        loop {
            let mut watched = [PollFd::new(&self.master, PollFlags::IN), PollFd::new(done, PollFlags::IN)];
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            match poll(&mut watched, Some(&timespec(left))) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
            let is_done = !watched[1].revents().is_empty();
            self.read_now()?;
            if is_done {
                return Ok(());
            }
        }
    }

    /// The whole output. The program may hold the terminal for a moment after the end of its unit, hence the grace period.
    pub fn finish(mut self, grace: Duration) -> String {
        self.peer = None;
        let deadline = Instant::now() + grace;
        // An error ends the output, too: what was read so far is returned.
        while let Ok(Read::NothingNow) = self.read_now() {
            let left = deadline.saturating_duration_since(Instant::now());
            let mut watched = [PollFd::new(&self.master, PollFlags::IN)];
            if left.is_zero() || poll(&mut watched, Some(&timespec(left))).is_err() {
                break;
            }
        }
        clean(&self.output)
    }

    fn read_now(&mut self) -> io::Result<Read> {
        let mut buffer = [0; 4096];
        loop {
            match read(self.master.as_fd(), &mut buffer) {
                // EIO: the other end is closed.
                Ok(0) | Err(Errno::IO) => return Ok(Read::Ended),
                Ok(count) => {
                    let room = LONGEST_BYTES - self.output.len();
                    self.output.extend_from_slice(&buffer[..count.min(room)]);
                }
                Err(Errno::AGAIN) => return Ok(Read::NothingNow),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

fn timespec(duration: Duration) -> Timespec {
    // A day stands for no timeout.
    Timespec::try_from(duration).unwrap_or(Timespec { tv_sec: 86_400, tv_nsec: 0 })
}

/// Removes carriage returns, which the terminal adds, and escape sequences.
fn clean(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes).replace("\r\n", "\n");
    let mut plain = String::with_capacity(text.len());
    let mut rest = text.chars();
    while let Some(letter) = rest.next() {
        match letter {
            // An escape sequence ends with a letter.
            '\x1b' => drop(rest.by_ref().find(char::is_ascii_alphabetic)),
            '\n' | '\t' => plain.push(letter),
            it if it.is_control() => {}
            it => plain.push(it),
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::io::Write as _;
    use std::thread;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    const GRACE: Duration = Duration::from_secs(5);

    fn open_terminal() -> Terminal {
        Terminal::open(Path::new("/dev/ptmx")).unwrap()
    }

    #[test]
    fn output_is_returned_as_plain_lines() {
        let terminal = open_terminal();
        let mut program = OpenOptions::new().write(true).open(terminal.path()).unwrap();
        program.write_all(b"one\n\x1b[31mtwo\x1b[0m\nthree").unwrap();
        drop(program);
        assert_eq!(terminal.finish(GRACE), "one\ntwo\nthree");
    }

    #[test]
    fn long_output_does_not_block_and_is_bounded() {
        let mut terminal = open_terminal();
        let done = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let mut program = OpenOptions::new().write(true).open(terminal.path()).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                program.write_all(&vec![b'x'; 300_000]).unwrap();
                rustix::io::write(&done, &1_u64.to_ne_bytes()).unwrap();
            });
            terminal.drain_until(&done, Instant::now() + Duration::from_mins(1)).unwrap();
        });
        assert_eq!(terminal.finish(Duration::ZERO).len(), LONGEST_BYTES);
    }

    #[test]
    fn reading_ends_at_the_deadline_even_if_the_terminal_stays_open() {
        let mut terminal = open_terminal();
        let _program = OpenOptions::new().write(true).open(terminal.path()).unwrap();
        let done = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        terminal.drain_until(&done, Instant::now() + Duration::from_millis(1)).unwrap();
        assert_eq!(terminal.finish(Duration::from_millis(1)), "");
    }

    #[test]
    fn an_unused_terminal_returns_no_output_without_waiting() {
        let start = Instant::now();
        assert_eq!(open_terminal().finish(GRACE), "");
        assert!(start.elapsed() < GRACE);
    }
}
