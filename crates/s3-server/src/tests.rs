use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::store::{Account, Store as _};
use crate::{Config, Effect, Fault, S3Operation, S3Server};

fn server() -> S3Server {
    S3Server::start_blocking(Config { buckets: vec!["bucket".to_owned()], ..Config::default() }).unwrap()
}

fn send(server: &S3Server, request: &str) -> TcpStream {
    let mut stream = TcpStream::connect(("127.0.0.1", server.port())).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.write_all(format!("{request} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n").as_bytes()).unwrap();
    stream
}

/// These requests are not signed, so without a fault the answer is 403.
fn ask(server: &S3Server, request: &str) -> String {
    let mut answer = String::new();
    // A dropped connection may be a reset as well as an end.
    let _ = send(server, request).read_to_string(&mut answer);
    answer
}

#[track_caller]
fn check(answer: &str, status: &str, code: &str) {
    assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")) && answer.contains(code), "{answer}");
}

fn wait_until(condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(Instant::now() < deadline, "the condition does not come true");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_request_without_signature_is_refused() {
    let server = server();
    check(&ask(&server, "GET /bucket?list-type=2"), "403", "<Code>AccessDenied</Code>");
    check(&ask(&server, "GET /"), "403", "<Code>AccessDenied</Code>");
}

#[test]
fn faults_answer_what_they_are_named_after() {
    let server = server();
    let get = || Fault::new(Effect::NotFound).operation(S3Operation::GetObject);
    server.inject(get().times(1));
    check(&ask(&server, "GET /bucket/key"), "404", "<Code>NoSuchKey</Code>");
    server.inject(Fault::new(Effect::NotFound).times(1));
    check(&ask(&server, "GET /bucket?list-type=2"), "404", "<Code>NoSuchBucket</Code>");
    server.inject(Fault::new(Effect::Unavailable).times(1));
    check(&ask(&server, "GET /bucket/key"), "503", "<Code>SlowDown</Code>");
    server.inject(Fault::new(Effect::Dropped).times(1));
    assert_eq!(ask(&server, "GET /bucket/key"), "");
    server.inject(Fault::new(Effect::Slow(Duration::from_millis(50))).times(1));
    let started = Instant::now();
    check(&ask(&server, "GET /bucket/key"), "403", "<Code>AccessDenied</Code>");
    assert!(Duration::from_millis(50) <= started.elapsed());
    assert_eq!(server.count(S3Operation::GetObject), 4);
    assert_eq!(server.count(S3Operation::ListObjectsV2), 1);
}

#[test]
fn a_truncated_answer_promises_more_than_it_gives() {
    let server = server();
    server.inject(Fault::new(Effect::Truncated { after: 20 }));
    let answer = ask(&server, "GET /bucket/key");
    check(&answer, "403", "<?xml version=");
    assert!(!answer.contains("<Error>"), "{answer}");
    // This is how an answer in chunks ends.
    assert!(!answer.ends_with("\r\n0\r\n\r\n"), "{answer}");
}

#[test]
fn a_frozen_request_is_answered_once_it_is_released() {
    let server = server();
    let fault = server.inject(Fault::new(Effect::Frozen));
    let mut stream = send(&server, "GET /bucket/key");
    stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let mut answer = [0; 12];
    wait_until(|| fault.hits() == 1);
    stream.read_exact(&mut answer).unwrap_err();
    fault.release();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"HTTP/1.1 403");
}

#[test]
fn a_dropped_server_is_gone_with_its_connections() {
    let server = server();
    server.inject(Fault::new(Effect::Frozen));
    let port = server.port();
    let mut stream = send(&server, "GET /bucket/key");
    drop(server);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    TcpStream::connect(("127.0.0.1", port)).unwrap_err();
}

#[test]
fn objects_are_there_without_a_request() {
    let server = server();
    server.create_bucket("other", &Account::named("other")).unwrap();
    server.put_object("other", "key", b"content").unwrap();
    assert_eq!(server.object("other", "key").unwrap(), "content");
    assert_eq!(server.keys("other"), ["key"]);
    assert_eq!(server.keys("missing"), Vec::<String>::new());
    server.put_object("missing", "key", b"").unwrap_err();
    assert_eq!(server.requests(), []);
}

#[test]
fn an_account_is_printed_without_its_secret() {
    assert_eq!(format!("{:?}", Account::named("alice")), "Account(\"alice\")");
}
