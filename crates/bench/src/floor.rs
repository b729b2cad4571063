//! The least that any mount can cost: the kernel's FUSE mount and a server that does nothing. It answers INIT and GETATTR, and serves
//! one file, whose bytes are zero and come from memory.

use std::fs::{self, File};
use std::io::{self, IoSlice, Read as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use rustix::io::Errno;
use s3csi_driver::host::{Access, FuseOptions, Host as _, Kernel};
use s3csi_handoff::read_ahead;

use crate::content::CHUNK_BYTES;
use crate::latency::{LIMIT, ensure_alive, remove};

/// Until the mount answers; it is gone again afterwards.
pub fn measure(host: &Kernel, at: &Path) -> anyhow::Result<Duration> {
    let start = Instant::now();
    let fuse = host.mount_fuse(at, &FuseOptions { access: Access::ReadWrite, allow_other: true })?;
    let server = std::thread::spawn(move || serve(&fuse, 0));
    let answer = host.probe(at, start + LIMIT);
    let took = start.elapsed();
    remove(host, at)?;
    ensure_alive(&answer)?;
    server.join().map_err(|_| anyhow::anyhow!("the floor's server panicked"))?.context("the floor's server failed")?;
    Ok(took)
}

/// A mount with the file.
pub struct Floor {
    host: Kernel,
    at: PathBuf,
    servers: Vec<JoinHandle<io::Result<()>>>,
}

impl Floor {
    /// The kernel reads as far ahead as on a mount of ours.
    pub fn mount(at: &Path, file_bytes: u64) -> anyhow::Result<Self> {
        fs::create_dir_all(at).with_context(|| format!("failed to make {}", at.display()))?;
        let host = Kernel::default();
        let fuse = Arc::new(host.mount_fuse(at, &FuseOptions { access: Access::ReadWrite, allow_other: true })?);
        let serve = |_| {
            let fuse = Arc::clone(&fuse);
            std::thread::spawn(move || serve(&fuse, file_bytes))
        };
        let servers = (0..SERVERS).map(serve).collect();
        let mounted = Self { host, at: at.to_owned(), servers };
        let device = fs::metadata(at).context("the floor does not answer")?.dev();
        read_ahead::extend(rustix::fs::major(device), rustix::fs::minor(device))
            .context("failed to let the kernel read ahead")?;
        Ok(mounted)
    }

    /// Reads the file from beginning to end. `check` gets each piece.
    pub fn read(&self, check: impl Fn(&[u8]) -> anyhow::Result<()>) -> anyhow::Result<()> {
        let mut file = File::open(self.at.join(FILE)).context("failed to open the floor's file")?;
        let mut chunk = vec![0; CHUNK_BYTES];
        loop {
            let count = file.read(&mut chunk).context("failed to read the floor's file")?;
            if count == 0 {
                return Ok(());
            }
            check(&chunk[..count])?;
        }
    }

    /// Fails if a piece of the file is not what it should be.
    pub fn check(piece: &[u8]) -> anyhow::Result<()> {
        ensure!(ZEROS[..piece.len()] == *piece, "the floor's file has other bytes");
        Ok(())
    }

    pub fn unmount(mut self) -> anyhow::Result<()> {
        remove(&self.host, &self.at)?;
        for server in self.servers.drain(..) {
            server.join().map_err(|_| anyhow::anyhow!("the floor's server panicked"))??;
        }
        Ok(())
    }
}

const FILE: &str = "file";
const SERVERS: usize = 4;

/// Operations of the FUSE protocol, version 7.
mod operation {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const RELEASE: u32 = 18;
    pub const INIT: u32 = 26;
    pub const INTERRUPT: u32 = 36;
    pub const BATCH_FORGET: u32 = 42;
}

/// The kernel refuses to hand out requests to a smaller buffer.
const BUFFER_BYTES: usize = 128 << 10;

const DIRECTORY: u32 = 0o040_755;
const REGULAR: u32 = 0o100_444;
const ROOT_NODE: u64 = 1;
const FILE_NODE: u64 = 2;
const BLOCK_BYTES: u32 = 4096;

/// The most that the kernel asks for at once.
static ZEROS: [u8; 1 << 20] = [0; 1 << 20];

/// Answers until the mount is gone.
fn serve(fuse: &OwnedFd, file_bytes: u64) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        let length = match rustix::io::read(fuse, &mut buffer) {
            Ok(length) => length,
            Err(Errno::NODEV) => return Ok(()),
            Err(Errno::INTR | Errno::AGAIN | Errno::NOENT) => continue,
            Err(errno) => return Err(errno.into()),
        };
        let Some((answer, zeros)) = answer(&buffer[..length], file_bytes) else { continue };
        match rustix::io::writev(fuse, &[IoSlice::new(&answer), IoSlice::new(zeros)]) {
            // The request was interrupted.
            Ok(_) | Err(Errno::NOENT) => {}
            Err(Errno::NODEV) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// The answer, and content behind it.
fn answer(request: &[u8], file_bytes: u64) -> Option<(Vec<u8>, &'static [u8])> {
    let (_length, rest) = request.split_first_chunk::<4>()?;
    let (operation, rest) = rest.split_first_chunk::<4>()?;
    let (unique, rest) = rest.split_first_chunk::<8>()?;
    let (node, _) = rest.split_first_chunk::<8>()?;
    // User, group, process and padding are of no interest.
    let arguments = rest.get(24..)?;
    let mut zeros = &ZEROS[..0];
    let (error, body) = match u32::from_ne_bytes(*operation) {
        operation::FORGET | operation::BATCH_FORGET | operation::INTERRUPT => return None,
        operation::INIT => (0, initialised(arguments)?),
        operation::GETATTR => (0, [&[0; 16][..], &attributes(u64::from_ne_bytes(*node), file_bytes)].concat()),
        operation::LOOKUP if 0 < file_bytes && arguments.starts_with(FILE.as_bytes()) => (0, entry(file_bytes)),
        operation::LOOKUP => (-Errno::NOENT.raw_os_error(), Vec::new()),
        // No handle, no flags.
        operation::OPEN => (0, vec![0; 16]),
        operation::RELEASE => (0, Vec::new()),
        operation::READ => {
            zeros = content(arguments, file_bytes)?;
            (0, Vec::new())
        }
        _ => (-Errno::NOSYS.raw_os_error(), Vec::new()),
    };
    let length = u32::try_from(16 + body.len() + zeros.len()).ok()?;
    Some(([&length.to_ne_bytes()[..], &error.to_ne_bytes(), unique, &body].concat(), zeros))
}

/// What a READ asks for.
fn content(arguments: &[u8], file_bytes: u64) -> Option<&'static [u8]> {
    let (_handle, rest) = arguments.split_first_chunk::<8>()?;
    let (offset, rest) = rest.split_first_chunk::<8>()?;
    let (size, _) = rest.split_first_chunk::<4>()?;
    let left = file_bytes.saturating_sub(u64::from_ne_bytes(*offset));
    let size = left.min(u32::from_ne_bytes(*size).into());
    ZEROS.get(..usize::try_from(size).ok()?)
}

/// The kernel's own version and read-ahead; reads at once, of up to a mebibyte.
fn initialised(arguments: &[u8]) -> Option<Vec<u8>> {
    const BACKGROUND: u16 = 12;
    const CONGESTION: u16 = 9;
    const MOST_WRITTEN: u32 = 4096;
    const NANOSECONDS: u32 = 1;
    const ASYNC_READ: u32 = 1;
    const MAX_PAGES: u32 = 1 << 22;
    const PAGES: u16 = 256;
    let version_and_read_ahead = arguments.get(..12)?;
    let mut body = version_and_read_ahead.to_vec();
    body.extend((ASYNC_READ | MAX_PAGES).to_ne_bytes());
    body.extend(BACKGROUND.to_ne_bytes());
    body.extend(CONGESTION.to_ne_bytes());
    body.extend(MOST_WRITTEN.to_ne_bytes());
    body.extend(NANOSECONDS.to_ne_bytes());
    body.extend(PAGES.to_ne_bytes());
    body.resize(64, 0);
    Some(body)
}

/// The file's node, not to be remembered.
fn entry(file_bytes: u64) -> Vec<u8> {
    // Generation; how long name and attributes are believed, and the nanoseconds of both.
    [&FILE_NODE.to_ne_bytes()[..], &[0; 32], &attributes(FILE_NODE, file_bytes)].concat()
}

/// Of a directory, or of the file in it. Both belong to root.
fn attributes(node: u64, file_bytes: u64) -> Vec<u8> {
    let (mode, bytes) = if node == ROOT_NODE { (DIRECTORY, 0) } else { (REGULAR, file_bytes) };
    let mut body = Vec::new();
    body.extend(node.to_ne_bytes());
    body.extend(bytes.to_ne_bytes());
    // Blocks and three times; their nanoseconds.
    body.resize(body.len() + 4 * 8 + 3 * 4, 0);
    body.extend(mode.to_ne_bytes());
    body.extend(2_u32.to_ne_bytes());
    // User, group and device.
    body.resize(body.len() + 3 * 4, 0);
    body.extend(BLOCK_BYTES.to_ne_bytes());
    // Flags.
    body.resize(88, 0);
    body
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE_BYTES: u64 = 5000;

    fn request(operation: u32, arguments: &[u8]) -> Vec<u8> {
        let length = u32::try_from(40 + arguments.len()).unwrap();
        [&length.to_ne_bytes()[..], &operation.to_ne_bytes(), &7_u64.to_ne_bytes(), &[0; 24], arguments].concat()
    }

    #[track_caller]
    fn check(request: &[u8], length: Option<usize>) {
        let answer = answer(request, FILE_BYTES).map(|(answer, zeros)| [&answer, zeros].concat());
        assert_eq!(answer.as_ref().map(Vec::len), length);
        if let Some(answer) = answer {
            assert_eq!(answer[..4], u32::try_from(answer.len()).unwrap().to_ne_bytes());
            assert_eq!(answer[8..16], 7_u64.to_ne_bytes());
        }
    }

    #[test]
    fn answers_have_the_sizes_the_kernel_expects() {
        check(&request(operation::INIT, &[0; 64]), Some(16 + 64));
        check(&request(operation::GETATTR, &[0; 16]), Some(16 + 104));
        check(&request(operation::LOOKUP, b"file\0"), Some(16 + 128));
        check(&request(operation::LOOKUP, b"other\0"), Some(16));
        check(&request(operation::OPEN, &[0; 8]), Some(16 + 16));
        let read = |offset: u64| [&[0; 8][..], &offset.to_ne_bytes(), &1000_u32.to_ne_bytes(), &[0; 20]].concat();
        check(&request(operation::READ, &read(0)), Some(16 + 1000));
        check(&request(operation::READ, &read(FILE_BYTES - 10)), Some(16 + 10));
        check(&request(52, &[0; 24]), Some(16));
        check(&request(operation::FORGET, &[0; 8]), None);
        check(&[0; 10], None);
    }
}
