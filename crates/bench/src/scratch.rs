//! Memory as a disk, and the S3 server on it, so that no disk is measured.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use s3csi_s3_server::Transport;
use s3csi_s3_server::store::Store as _;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::versitygw::Versitygw;

pub const BUCKET: &str = "bench";

/// The server, and a directory for its and its clients' files.
pub struct Scratch {
    // Before the memory it lives in.
    store: Versitygw,
    caches: PathBuf,
    _memory: [MemoryDisk; 2],
}

impl Scratch {
    pub fn prepare(fixture: &Fixture) -> anyhow::Result<Self> {
        let memory = [MemoryDisk::mount(&fixture.path("versitygw"))?, MemoryDisk::mount(&fixture.path("caches"))?];
        let store = Versitygw::start(fixture, Transport::Plain)?;
        store.create_bucket(BUCKET, store.account())?;
        Ok(Self { store, caches: fixture.path("caches"), _memory: memory })
    }

    pub fn store(&self) -> &Versitygw {
        &self.store
    }

    pub fn server(&self) -> anyhow::Result<SocketAddr> {
        let endpoint = self.store.endpoint();
        endpoint.trim_start_matches("http://").parse().with_context(|| format!("{endpoint} is no address"))
    }

    /// Where an object lies as a file.
    pub fn object(&self, key: &str) -> PathBuf {
        self.store.bucket_directory(BUCKET).join(key)
    }

    /// A new directory for one client's own files.
    pub fn cache(&self, name: &str) -> anyhow::Result<PathBuf> {
        let path = self.caches.join(name);
        fs::create_dir_all(&path).with_context(|| format!("failed to make {}", path.display()))?;
        Ok(path)
    }
}

struct MemoryDisk(PathBuf);

impl MemoryDisk {
    fn mount(at: &Path) -> anyhow::Result<Self> {
        fs::create_dir_all(at).with_context(|| format!("failed to make {}", at.display()))?;
        mount("tmpfs", at, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, None)
            .with_context(|| format!("failed to mount tmpfs at {}", at.display()))?;
        Ok(Self(at.to_owned()))
    }
}

impl Drop for MemoryDisk {
    fn drop(&mut self) {
        // What still uses it was killed a moment ago.
        let _ = unmount(&self.0, UnmountFlags::DETACH);
    }
}
