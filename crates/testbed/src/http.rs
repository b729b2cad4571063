//! One plain HTTP request, as a probe or a scraper would send it.

use std::io::{self, Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// What takes longer hangs.
const ANSWERS_WITHIN: Duration = Duration::from_secs(30);

/// Status, head and body of an answer.
pub struct HttpResponse {
    pub status: u16,
    pub head: String,
    pub body: String,
}

#[track_caller]
pub fn get(address: &str, path: &str) -> HttpResponse {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(ANSWERS_WITHIN)).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    parse(&text).unwrap()
}

/// The same over a Unix socket, for servers that may be away. In HTTP 1.0, where an answer comes in one piece.
pub fn get_over(socket: &Path, path: &str) -> io::Result<HttpResponse> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(ANSWERS_WITHIN))?;
    write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    parse(&text).ok_or_else(|| io::Error::other(format!("no answer: {text:?}")))
}

fn parse(text: &str) -> Option<HttpResponse> {
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    Some(HttpResponse { status, head: head.to_owned(), body: body.to_owned() })
}
