//! A forward proxy on loopback: `CONNECT` for TLS, and requests with the whole URL. It alone knows the addresses of its hosts, so whoever
//! reaches them has used it.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

/// More than any head of a request.
const LONGEST_HEAD_BYTES: usize = 64 << 10;

/// A running proxy. Dropping it stops it; connections end with their peers.
pub struct ForwardProxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    /// `host:port` as clients write it, and where that is.
    hosts: BTreeMap<String, SocketAddr>,
    log: Mutex<Vec<String>>,
    is_stopping: AtomicBool,
}

impl ForwardProxy {
    /// Reaches these hosts (`host:port`) at these ports of loopback, and no others.
    pub fn start(hosts: &[(&str, u16)]) -> io::Result<Self> {
        Self::start_at((Ipv4Addr::LOCALHOST, 0).into(), hosts)
    }

    /// The same for clients elsewhere.
    pub fn start_at(listen: SocketAddr, hosts: &[(&str, u16)]) -> io::Result<Self> {
        let place = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let hosts = hosts.iter().map(|(host, port)| ((*host).to_owned(), place(*port))).collect();
        let shared = Arc::new(Shared { hosts, log: Mutex::default(), is_stopping: AtomicBool::new(false) });
        let listener = TcpListener::bind(listen)?;
        let address = listener.local_addr()?;
        let accepting = Arc::clone(&shared);
        let thread = thread::Builder::new().name("proxy".to_owned()).spawn(move || accept(&listener, &accepting))?;
        Ok(Self { address, shared, thread: Some(thread) })
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// `METHOD host:port` of every connection, also of refused ones.
    pub fn connections(&self) -> Vec<String> {
        self.shared.log.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for ForwardProxy {
    fn drop(&mut self) {
        self.shared.is_stopping.store(true, Ordering::SeqCst);
        // Wakes the thread up.
        let _ = TcpStream::connect(self.address);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    for client in listener.incoming() {
        if shared.is_stopping.load(Ordering::SeqCst) {
            return;
        }
        let Ok(client) = client else { continue };
        let shared = Arc::clone(shared);
        // An error ends this connection only.
        thread::spawn(move || drop(serve(client, &shared)));
    }
}

fn serve(mut client: TcpStream, shared: &Shared) -> io::Result<()> {
    let head = read_head(&mut client)?;
    let line = String::from_utf8_lossy(&head).lines().next().unwrap_or_default().to_owned();
    let mut words = line.split_whitespace();
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let url = target.strip_prefix("http://").unwrap_or(target);
    let host = url.split('/').next().unwrap_or_default();
    shared.log.lock().unwrap_or_else(PoisonError::into_inner).push(format!("{method} {host}"));
    let Some(address) = shared.hosts.get(host) else {
        return client.write_all(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n");
    };
    let mut server = TcpStream::connect(address)?;
    if method == "CONNECT" {
        client.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n")?;
    } else {
        server.write_all(for_server(&String::from_utf8_lossy(&head)).as_bytes())?;
    }
    let (mut from_server, mut to_client) = (server.try_clone()?, client.try_clone()?);
    let answers = thread::spawn(move || {
        let _ = io::copy(&mut from_server, &mut to_client);
        let _ = to_client.shutdown(Shutdown::Both);
    });
    let _ = io::copy(&mut client, &mut server);
    let _ = server.shutdown(Shutdown::Both);
    let _ = answers.join();
    Ok(())
}

/// The head with the path in place of the URL. Only the first request of a connection is read, so there is no second one.
fn for_server(head: &str) -> String {
    let mut lines = head.split("\r\n").filter(|it| !it.is_empty());
    let words: Vec<&str> = lines.next().unwrap_or_default().splitn(3, ' ').collect();
    let path =
        words.get(1).and_then(|it| it.strip_prefix("http://")?.find('/').map(|slash| &it["http://".len() + slash..]));
    let first = format!("{} {} HTTP/1.1", words.first().unwrap_or(&""), path.unwrap_or("/"));
    let is_kept = |it: &&str| !it.to_ascii_lowercase().starts_with("connection:");
    let mut all = vec![first.as_str()];
    all.extend(lines.filter(is_kept));
    all.push("Connection: close\r\n\r\n");
    all.join("\r\n")
}

/// Byte by byte: what follows is not the proxy's.
fn read_head(client: &mut TcpStream) -> io::Result<Vec<u8>> {
    let (mut head, mut byte) = (Vec::new(), [0]);
    while !head.ends_with(b"\r\n\r\n") && head.len() < LONGEST_HEAD_BYTES {
        client.read_exact(&mut byte)?;
        head.push(byte[0]);
    }
    Ok(head)
}
