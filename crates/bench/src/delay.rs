//! A proxy that makes the way to a server longer: every byte arrives a fixed time after it was sent. It limits nothing else.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::Context as _;
use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio::time::Instant;

/// Large, so that few wake-ups are needed for much data.
const CHUNK_BYTES: usize = 256 << 10;

/// How many chunks of a connection may be on their way. The server alone, at some GB/s, has far fewer in 5 ms.
const CHUNKS_ON_THE_WAY: usize = 4096;

/// The runtime's timers are late by up to two milliseconds, which is much beside five. So they are set to an earlier time,
/// and the rest is slept by the thread itself.
const TIMER_ERROR: Duration = Duration::from_millis(2);

/// More than there are processors, because they sleep.
const THREADS: usize = 16;

/// Runs until it is dropped.
pub struct DelayProxy {
    _runtime: Runtime,
    port: u16,
}

impl DelayProxy {
    /// `one_way` is half of the round trip.
    pub fn start(server: SocketAddr, one_way: Duration) -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(THREADS)
            .enable_all()
            .build()
            .context("failed to start the delay proxy's runtime")?;
        let listener =
            runtime.block_on(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))).context("the delay proxy has no port")?;
        let port = listener.local_addr().context("the delay proxy has no port")?.port();
        runtime.spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(connect(client, server, one_way));
            }
        });
        Ok(Self { _runtime: runtime, port })
    }

    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }
}

async fn connect(client: TcpStream, server: SocketAddr, one_way: Duration) {
    let Ok(server) = TcpStream::connect(server).await else { return };
    // Held back by Nagle's algorithm, small packets would be later than they should be.
    if client.set_nodelay(true).and(server.set_nodelay(true)).is_err() {
        return;
    }
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    for (from, to) in [(from_client, to_server), (from_server, to_client)] {
        let (sender, receiver) = mpsc::channel(CHUNKS_ON_THE_WAY);
        tokio::spawn(receive(from, sender, one_way));
        tokio::spawn(deliver(receiver, to));
    }
}

/// An empty chunk is the end, which arrives as late as everything else.
type Chunk = (Instant, Bytes);

async fn receive(mut from: OwnedReadHalf, chunks: mpsc::Sender<Chunk>, one_way: Duration) {
    let mut buffer = BytesMut::new();
    loop {
        buffer.reserve(CHUNK_BYTES);
        let is_over = !matches!(from.read_buf(&mut buffer).await, Ok(1..));
        let chunk = (Instant::now() + one_way, buffer.split().freeze());
        if chunks.send(chunk).await.is_err() || is_over {
            return;
        }
    }
}

async fn deliver(mut chunks: mpsc::Receiver<Chunk>, mut to: OwnedWriteHalf) {
    while let Some((due, chunk)) = chunks.recv().await {
        tokio::time::sleep_until(due - TIMER_ERROR).await;
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        if chunk.is_empty() || to.write_all(&chunk).await.is_err() {
            break;
        }
    }
    let _ = to.shutdown().await;
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};

    use super::*;

    const ONE_WAY: Duration = Duration::from_millis(5);

    /// Sends everything back.
    fn echo() -> SocketAddr {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut writer = stream.try_clone().unwrap();
            std::io::copy(&mut stream, &mut writer).unwrap();
            writer.shutdown(std::net::Shutdown::Write).unwrap();
        });
        address
    }

    #[test]
    fn bytes_come_back_complete_and_not_before_a_round_trip() {
        let proxy = DelayProxy::start(echo(), ONE_WAY).unwrap();
        let mut stream = std::net::TcpStream::connect((Ipv4Addr::LOCALHOST, proxy.port)).unwrap();
        let mut answer = [0];
        for _ in 0..3 {
            let start = std::time::Instant::now();
            stream.write_all(b"x").unwrap();
            stream.read_exact(&mut answer).unwrap();
            assert!(start.elapsed() >= 2 * ONE_WAY, "{:?}", start.elapsed());
        }
        let sent: Vec<u8> = (0..=255).cycle().take(8 << 20).collect();
        let mut writer = stream.try_clone().unwrap();
        let copy = sent.clone();
        std::thread::spawn(move || {
            writer.write_all(&copy).unwrap();
            writer.shutdown(std::net::Shutdown::Write).unwrap();
        });
        let mut received = Vec::new();
        stream.read_to_end(&mut received).unwrap();
        assert!(received == sent, "{} bytes came back", received.len());
    }
}
