//! The smallest FUSE server: it answers INIT and GETATTR, until a test makes it stop answering or exit.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};

const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const INIT: u32 = 26;
const INTERRUPT: u32 = 36;
const BATCH_FORGET: u32 = 42;
const NOT_IMPLEMENTED: i32 = -38;
const HEADER_BYTES: usize = 40;

pub struct Server {
    is_silent: Arc<AtomicBool>,
    error: Arc<AtomicI32>,
    received: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    pub fn start(descriptor: OwnedFd) -> Self {
        let is_silent = Arc::new(AtomicBool::new(false));
        let error = Arc::new(AtomicI32::new(0));
        let received = Arc::new(AtomicU64::new(0));
        let thread = thread::spawn({
            let (is_silent, error, received) = (Arc::clone(&is_silent), Arc::clone(&error), Arc::clone(&received));
            move || serve(File::from(descriptor), &is_silent, &error, &received)
        });
        Self { is_silent, error, received, thread: Some(thread) }
    }

    /// From now on the attributes of the root are an error.
    pub fn answer_with(&self, errno: i32) {
        self.error.store(-errno, Ordering::SeqCst);
    }

    /// From now on requests are taken and never answered, as by an engine that is stuck in one.
    pub fn fall_silent(&self) {
        self.is_silent.store(true, Ordering::SeqCst);
    }

    /// How many requests were taken.
    pub fn received(&self) -> u64 {
        self.received.load(Ordering::SeqCst)
    }

    /// Wait for its end, which comes when the connection does.
    pub fn join(mut self) {
        self.thread.take().unwrap().join().unwrap();
    }
}

fn serve(mut connection: File, is_silent: &AtomicBool, error: &AtomicI32, received: &AtomicU64) {
    let mut request = vec![0; 1024 * 1024];
    // The kernel answers ENODEV when the connection has ended.
    while let Ok(length) = connection.read(&mut request) {
        assert!(HEADER_BYTES <= length);
        received.fetch_add(1, Ordering::SeqCst);
        if is_silent.load(Ordering::SeqCst) {
            continue;
        }
        let operation = u32::from_ne_bytes(request[4..8].try_into().unwrap());
        let unique = &request[8..16];
        let (error, body) = match operation {
            FORGET | BATCH_FORGET | INTERRUPT => continue,
            INIT => (0, init()),
            GETATTR => match error.load(Ordering::SeqCst) {
                0 => (0, attributes_of_the_root()),
                error => (error, Vec::new()),
            },
            _ => (NOT_IMPLEMENTED, Vec::new()),
        };
        let mut answer = Vec::new();
        answer.extend(u32::try_from(16 + body.len()).unwrap().to_ne_bytes());
        answer.extend(error.to_ne_bytes());
        answer.extend(unique);
        answer.extend(body);
        // The request may have been interrupted, or the connection ended meanwhile.
        let _ = connection.write(&answer);
    }
}

/// `struct fuse_init_out` of version 7.31: no feature is asked for.
fn init() -> Vec<u8> {
    let [version, revision, read_ahead, flags] = [7_u32, 31, 128 * 1024, 0];
    let background = 0x0009_000c_u32;
    let maximum_write = 128 * 1024_u32;
    let granularity = 1_u32;
    let mut body = words(&[version, revision, read_ahead, flags, background, maximum_write, granularity]);
    body.resize(64, 0);
    body
}

/// `struct fuse_attr_out`, valid for no time at all.
fn attributes_of_the_root() -> Vec<u8> {
    let validity = [0_u32; 4];
    let number = [1_u32, 0];
    let size_blocks_times = [0_u32; 10];
    let nanoseconds = [0_u32; 3];
    let [mode, links, user, group, device, block_size, flags] = [0o040_755_u32, 2, 0, 0, 0, 4096, 0];
    let mut body = words(&validity);
    body.extend(words(&number));
    body.extend(words(&size_blocks_times));
    body.extend(words(&nanoseconds));
    body.extend(words(&[mode, links, user, group, device, block_size, flags]));
    body
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|it| it.to_ne_bytes()).collect()
}
