//! How a workload of a test notices its end: its standard input is closed.

use std::io;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};

/// Whether the standard input is closed within this time.
pub fn is_closed(within: Duration) -> bool {
    let input = io::stdin();
    let mut watched = [PollFd::new(&input, PollFlags::IN)];
    let timeout = Timespec::try_from(within).unwrap_or_default();
    let polled = rustix::event::poll(&mut watched, Some(&timeout));
    polled.is_ok() && watched[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
}
