//! The connections that receive the events of one engine: that of its mount request, and those of `hold` commands since.

use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, PoisonError};

use rustix::event::{PollFd, PollFlags, Timespec};
use s3csi_handoff::{Answer, send_answer};

/// Node plugins are restarted now and then; further connections replace the oldest one.
const MAX_CONNECTIONS: usize = 8;

#[derive(Debug)]
pub struct Subscribers(Mutex<Vec<UnixStream>>);

impl Subscribers {
    pub fn new(first: UnixStream) -> Self {
        Self(Mutex::new(vec![first]))
    }

    pub fn add(&self, stream: UnixStream) {
        let mut streams = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if MAX_CONNECTIONS <= streams.len() {
            streams.remove(0);
        }
        streams.push(stream);
    }

    /// Whether a node plugin is connected, which holds copies of the descriptors.
    pub fn is_connected(&self) -> bool {
        let streams = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        streams.iter().any(is_open)
    }

    /// Sends an event to all connections, never blocking, and forgets those that are closed.
    pub fn report(&self, event: &Answer, descriptors: &[BorrowedFd<'_>]) {
        let mut streams = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        streams.retain(|it| send_answer(it, event, descriptors));
    }
}

/// Node plugins shut down their writing half after the request, so only a hang-up of both halves is an end.
fn is_open(stream: &UnixStream) -> bool {
    let mut watched = [PollFd::new(stream, PollFlags::empty())];
    let polled = rustix::event::poll(&mut watched, Some(&Timespec::default()));
    polled.is_ok() && !watched[0].revents().contains(PollFlags::HUP)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader};

    use super::*;

    #[test]
    fn events_reach_all_connections_that_are_open() {
        let (first, node) = UnixStream::pair().unwrap();
        let (second, restarted_node) = UnixStream::pair().unwrap();
        let subscribers = Subscribers::new(first);
        subscribers.report(&Answer::Ready, &[]);
        subscribers.add(second);
        drop(node);
        subscribers.report(&Answer::Released, &[]);
        drop(subscribers);
        let lines: Vec<String> = BufReader::new(restarted_node).lines().map(Result::unwrap).collect();
        assert_eq!(lines, [r#"{"answer":"released"}"#]);
    }

    #[test]
    fn a_node_plugin_that_has_sent_its_request_is_connected() {
        let (ours, node) = UnixStream::pair().unwrap();
        let subscribers = Subscribers::new(ours);
        assert!(subscribers.is_connected());
        node.shutdown(std::net::Shutdown::Write).unwrap();
        assert!(subscribers.is_connected());
        drop(node);
        assert!(!subscribers.is_connected());
    }

    #[test]
    fn the_number_of_connections_is_bounded() {
        let pairs: Vec<_> = (0..=MAX_CONNECTIONS).map(|_| UnixStream::pair().unwrap()).collect();
        let (ours, theirs): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        let mut ours = ours.into_iter();
        let subscribers = Subscribers::new(ours.next().unwrap());
        ours.for_each(|it| subscribers.add(it));
        subscribers.report(&Answer::Ready, &[]);
        drop(subscribers);
        let counts: Vec<usize> = theirs.into_iter().map(|it| BufReader::new(it).lines().count()).collect();
        assert_eq!(counts[0], 0);
        assert!(counts[1..].iter().all(|it| *it == 1), "{counts:?}");
    }
}
