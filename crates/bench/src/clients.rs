//! The S3 file systems that are compared: how each is started, watched and stopped.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use s3csi_driver::host::{Host as _, Kernel};

use crate::footprint::{self, ResourceUsage};
use crate::latency::{LIMIT, ensure_alive, remove};
use crate::scratch::{BUCKET, Scratch};
use s3csi_s3_server::store::Store;
use s3csi_testbed::environment;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::leftovers::mounts_beneath;
use s3csi_testbed::peers::{self, PeerMount, RcloneCache};
use s3csi_testbed::process::{Process, command};
use s3csi_testbed::wait::wait_until;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum S3FileSystem {
    Ours,
    OursWithTimeToLive,
    /// Ours, but the FUSE front of the library.
    LibraryFront,
    /// Ours, without staged files and attributes.
    OursSequential,
    S3fs,
    RcloneOff,
    RcloneFull,
}

impl S3FileSystem {
    pub const ALL: [Self; 5] = [Self::Ours, Self::OursWithTimeToLive, Self::S3fs, Self::RcloneOff, Self::RcloneFull];
    pub const OURS: [Self; 2] = [Self::Ours, Self::OursWithTimeToLive];
    pub const PEERS: [Self; 3] = [Self::S3fs, Self::RcloneOff, Self::RcloneFull];

    pub fn title(self) -> &'static str {
        match self {
            Self::Ours => "mount-s3",
            Self::OursWithTimeToLive => "mount-s3, TTL 60 s",
            Self::LibraryFront => "mount-s3, front of the library",
            Self::OursSequential => "mount-s3 --writes sequential --metadata refuse",
            Self::S3fs => "s3fs",
            Self::RcloneOff => "rclone off",
            Self::RcloneFull => "rclone full",
        }
    }

    /// Whether a file is on the server when it is closed. Who uploads later does so side by side, and close promises nothing.
    pub fn stores_at_close(self) -> bool {
        self != Self::RcloneFull
    }

    /// One word, for files and keys.
    pub fn word(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::OursWithTimeToLive => "ours-ttl",
            Self::LibraryFront => "library",
            Self::OursSequential => "ours-sequential",
            Self::S3fs => "s3fs",
            Self::RcloneOff => "rclone-off",
            Self::RcloneFull => "rclone-full",
        }
    }

    /// In the foreground. Defaults but for what the server, and a fair comparison, need.
    fn command(
        self,
        store: &dyn Store,
        endpoint: &str,
        mount_point: &Path,
        cache: &Path,
        disk_cache: DiskCache,
    ) -> anyhow::Result<Command> {
        let account = store.account();
        let peer = PeerMount { store, endpoint, bucket: BUCKET, mount_point, cache };
        match self {
            Self::Ours | Self::OursWithTimeToLive | Self::LibraryFront | Self::OursSequential => {
                let mut command = command(&environment::product("mount-s3")?);
                command.arg(BUCKET).arg(mount_point).args(["--foreground", "--allow-delete", "--allow-overwrite"]);
                command.args(["--force-path-style", "--endpoint-url", endpoint, "--region", store.region()]);
                command.env("AWS_ACCESS_KEY_ID", &account.access_key).env("AWS_SECRET_ACCESS_KEY", &account.secret_key);
                command.env("AWS_EC2_METADATA_DISABLED", "true").env("TMPDIR", cache);
                if self == Self::OursWithTimeToLive {
                    command.args(["--metadata-ttl", "60"]);
                }
                if self == Self::OursSequential {
                    command.args(["--writes", "sequential", "--metadata", "refuse"]);
                }
                if disk_cache == DiskCache::On {
                    command.arg("--cache").arg(cache);
                }
                if self == Self::LibraryFront {
                    command.env("S3CSI_ENGINE_TRIALS", "library-front");
                }
                Ok(command)
            }
            Self::S3fs => Ok(peers::s3fs(&peer)?),
            Self::RcloneOff => Ok(peers::rclone(&peer, RcloneCache::Off)?),
            Self::RcloneFull => Ok(peers::rclone(&peer, RcloneCache::Full)?),
        }
    }
}

/// Whether ours keeps what was read on disk. s3fs and `rclone full` always do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskCache {
    Off,
    On,
}

/// A client that serves its mount. Dropped, it is killed and its mount removed by force.
pub struct MountedFileSystem {
    process: Process,
    directory: PathBuf,
    host: Kernel,
}

/// How one mount is made.
pub struct MountSettings<'a> {
    pub fixture: &'a Fixture,
    pub scratch: &'a Scratch,
    /// The server's own, or one in front of it.
    pub endpoint: &'a str,
    /// For directory and logs; no two mounts of a run have the same.
    pub name: &'a str,
    pub disk_cache: DiskCache,
}

impl MountedFileSystem {
    pub fn start(client: S3FileSystem, mounting: &MountSettings<'_>) -> anyhow::Result<Self> {
        let MountSettings { fixture, scratch, endpoint, name, disk_cache } = mounting;
        let directory = fixture.path("mounts").join(name);
        std::fs::create_dir_all(&directory).with_context(|| format!("failed to make {}", directory.display()))?;
        let mut command = client.command(scratch.store(), endpoint, &directory, &scratch.cache(name)?, *disk_cache)?;
        let process = fixture.start(name, &mut command)?;
        let mounted = Self { process, directory, host: Kernel::default() };
        let is_there = || mounts_beneath(&mounted.directory).contains(&mounted.directory);
        let in_time = wait_until(Instant::now() + LIMIT, || is_there() || !mounted.process.is_running());
        ensure!(in_time && is_there(), "{} does not mount: {}", client.title(), mounted.process);
        ensure_alive(&mounted.host.probe(&mounted.directory, Instant::now() + LIMIT))
            .with_context(|| format!("{} said: {}", client.title(), mounted.process))?;
        Ok(mounted)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    pub fn usage(&self) -> anyhow::Result<ResourceUsage> {
        footprint::usage(self.process.pid())
    }

    /// Unmounts, and waits until the client has ended by itself.
    pub fn stop(self) -> anyhow::Result<()> {
        remove(&self.host, &self.directory)?;
        self.process.wait(LIMIT).context("it does not end after its mount is gone")?;
        Ok(())
    }

    /// Does something with the mount. When that takes longer than the limit the client is killed, and the process that waits
    /// for its mount gets an error.
    pub fn within<T>(&self, limit: Duration, work: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T> {
        std::thread::scope(|scope| {
            let (done, is_done) = std::sync::mpsc::channel::<()>();
            let watch = scope.spawn(move || {
                let is_late = is_done.recv_timeout(limit) == Err(std::sync::mpsc::RecvTimeoutError::Timeout);
                if is_late {
                    self.process.kill();
                }
                is_late
            });
            let outcome = work();
            drop(done);
            match watch.join() {
                Ok(true) => outcome.and_then(|_| anyhow::bail!("it ended")).context(format!("not done in {limit:?}")),
                _ => outcome,
            }
        })
    }
}

impl Drop for MountedFileSystem {
    fn drop(&mut self) {
        if self.process.is_running() || mounts_beneath(&self.directory).contains(&self.directory) {
            self.process.kill();
            let _ = self.host.detach(&self.directory);
        }
    }
}
