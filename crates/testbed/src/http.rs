//! One plain HTTP request, as a probe or a scraper would send it.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

/// What takes longer hangs.
const ANSWERS_WITHIN: Duration = Duration::from_secs(30);

/// Status, head and body of an answer.
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: String,
}

#[track_caller]
pub fn get(address: &str, path: &str) -> Answer {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(ANSWERS_WITHIN)).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    Answer { status, head: head.to_owned(), body: body.to_owned() }
}
