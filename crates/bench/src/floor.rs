//! The least that any mount can cost: the kernel's FUSE mount and a server that answers INIT and GETATTR and does nothing.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use rustix::io::Errno;
use s3csi_driver::host::{Access, FuseOptions, Host as _, Kernel};

use crate::latency::{LIMIT, ensure_alive, remove};

/// Until the mount answers; it is gone again afterwards.
pub fn measure(host: &Kernel, at: &Path) -> anyhow::Result<Duration> {
    let start = Instant::now();
    let fuse = host.mount_fuse(at, &FuseOptions { access: Access::ReadWrite, allow_other: true })?;
    let server = std::thread::spawn(move || serve(&fuse));
    let answer = host.probe(at, start + LIMIT);
    let took = start.elapsed();
    remove(host, at)?;
    ensure_alive(&answer)?;
    server.join().map_err(|_| anyhow::anyhow!("the floor's server panicked"))?.context("the floor's server failed")?;
    Ok(took)
}

/// Operations of the FUSE protocol, version 7.
mod operation {
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const INIT: u32 = 26;
    pub const INTERRUPT: u32 = 36;
    pub const BATCH_FORGET: u32 = 42;
}

/// The kernel refuses to hand out requests to a smaller buffer.
const BUFFER_BYTES: usize = 128 << 10;

const DIRECTORY: u32 = 0o040_755;

/// Answers until the mount is gone.
fn serve(fuse: &OwnedFd) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        let length = match rustix::io::read(fuse, &mut buffer) {
            Ok(length) => length,
            Err(Errno::NODEV) => return Ok(()),
            Err(Errno::INTR | Errno::AGAIN | Errno::NOENT) => continue,
            Err(errno) => return Err(errno.into()),
        };
        let Some(answer) = answer(&buffer[..length]) else { continue };
        match rustix::io::write(fuse, &answer) {
            // The request was interrupted.
            Ok(_) | Err(Errno::NOENT) => {}
            Err(Errno::NODEV) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        }
    }
}

fn answer(request: &[u8]) -> Option<Vec<u8>> {
    let (_length, rest) = request.split_first_chunk::<4>()?;
    let (operation, rest) = rest.split_first_chunk::<4>()?;
    let (unique, rest) = rest.split_first_chunk::<8>()?;
    // Node, user, group, process and padding are of no interest.
    let arguments = rest.get(24..)?;
    let (error, body) = match u32::from_ne_bytes(*operation) {
        operation::FORGET | operation::BATCH_FORGET | operation::INTERRUPT => return None,
        operation::INIT => (0, initialised(arguments)?),
        operation::GETATTR => (0, attributes()),
        _ => (-Errno::NOSYS.raw_os_error(), Vec::new()),
    };
    let length = u32::try_from(16 + body.len()).ok()?;
    Some([&length.to_ne_bytes()[..], &error.to_ne_bytes(), unique, &body].concat())
}

/// The kernel's own version and read-ahead, no optional feature.
fn initialised(arguments: &[u8]) -> Option<Vec<u8>> {
    const BACKGROUND: u16 = 12;
    const CONGESTION: u16 = 9;
    const MOST_WRITTEN: u32 = 4096;
    const NANOSECONDS: u32 = 1;
    let version_and_read_ahead = arguments.get(..12)?;
    let mut body = version_and_read_ahead.to_vec();
    body.extend(0_u32.to_ne_bytes());
    body.extend(BACKGROUND.to_ne_bytes());
    body.extend(CONGESTION.to_ne_bytes());
    body.extend(MOST_WRITTEN.to_ne_bytes());
    body.extend(NANOSECONDS.to_ne_bytes());
    body.resize(64, 0);
    Some(body)
}

/// Of an empty directory that belongs to root, not to be remembered.
fn attributes() -> Vec<u8> {
    let mut body = vec![0; 16];
    // Inode; size, blocks and three times; their nanoseconds.
    body.extend(1_u64.to_ne_bytes());
    body.resize(body.len() + 5 * 8 + 3 * 4, 0);
    body.extend(DIRECTORY.to_ne_bytes());
    body.extend(2_u32.to_ne_bytes());
    // User, group, device, block size and flags.
    body.resize(104, 0);
    body
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(operation: u32, arguments: &[u8]) -> Vec<u8> {
        let length = u32::try_from(40 + arguments.len()).unwrap();
        [&length.to_ne_bytes()[..], &operation.to_ne_bytes(), &7_u64.to_ne_bytes(), &[0; 24], arguments].concat()
    }

    #[track_caller]
    fn check(request: &[u8], length: Option<usize>) {
        let answer = answer(request);
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
        check(&request(52, &[0; 24]), Some(16));
        check(&request(operation::FORGET, &[0; 8]), None);
        check(&[0; 10], None);
    }
}
