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

/// The same over a Unix socket, for servers that may be away.
pub fn get_over(socket: &Path, path: &str) -> io::Result<HttpResponse> {
    ask_over(socket, &format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n"))
}

/// Sends JSON over a Unix socket.
pub fn post_over(socket: &Path, path: &str, json: &str) -> io::Result<HttpResponse> {
    let length = json.len();
    let head = "Host: localhost\r\nContent-Type: application/json";
    ask_over(socket, &format!("POST {path} HTTP/1.0\r\n{head}\r\nContent-Length: {length}\r\n\r\n{json}"))
}

/// In HTTP 1.0, where an answer comes in one piece.
fn ask_over(socket: &Path, request: &str) -> io::Result<HttpResponse> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(ANSWERS_WITHIN))?;
    stream.write_all(request.as_bytes())?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    parse(&text).ok_or_else(|| io::Error::other(format!("no answer: {text:?}")))
}

fn parse(text: &str) -> Option<HttpResponse> {
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    Some(HttpResponse { status, head: head.to_owned(), body: body.to_owned() })
}
