//! Ports on the loopback address for servers that must be told which, and that keep theirs over a restart.

use std::io;
use std::net::{Ipv4Addr, TcpListener};

/// Below the range that the kernel takes from for connections, so that no connection takes our port while its server restarts.
const FIRST: u16 = 20_000;
const COUNT: u16 = 10_000;

/// A port without a listener.
pub(super) fn free_port() -> io::Result<u16> {
    let mut attempts = 0;
    loop {
        let mut random = [0; 2];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
        let port = FIRST + u16::from_ne_bytes(random) % COUNT;
        match TcpListener::bind((Ipv4Addr::LOCALHOST, port)) {
            Ok(_) => return Ok(port),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && attempts < 100 => attempts += 1,
            Err(error) => return Err(error),
        }
    }
}
