//! The file systems that are compared: how each is mounted, and unmounted.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use s3csi_driver::host::{Host as _, Kernel, Probe};
use s3csi_s3_server::store::Store;

use crate::engine::{EngineLauncher, EngineMount};
use crate::fixture::Fixture;
use crate::leftovers::mounts_beneath;
use crate::peers::{self, PeerMount, RcloneCache};
use crate::process::Process;
use crate::wait::{SOON, wait_until};

/// How long a mount may take to answer before it counts as broken.
const ALIVE_LIMIT: Duration = Duration::from_secs(20);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ComparedFileSystem {
    Default,
    Staged,
    /// As AWS's program.
    Sequential,
    S3fs,
    Rclone,
    /// Shows that a script is right. Not on the page.
    LocalDisk,
}

impl ComparedFileSystem {
    pub const ON_PAGE: [Self; 5] = [Self::Default, Self::Staged, Self::Sequential, Self::S3fs, Self::Rclone];

    pub const fn title(self) -> &'static str {
        match self {
            Self::Default => "mount-s3",
            Self::Staged => "`--writes staged`",
            Self::Sequential => "`--writes sequential --metadata refuse`",
            Self::S3fs => "s3fs",
            Self::Rclone => "rclone",
            Self::LocalDisk => "local disk",
        }
    }

    /// One word, for files and keys.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Staged => "staged",
            Self::Sequential => "sequential",
            Self::S3fs => "s3fs",
            Self::Rclone => "rclone",
            Self::LocalDisk => "local",
        }
    }

    const fn arguments(self) -> &'static [&'static str] {
        match self {
            Self::Staged => &["--writes=staged"],
            Self::Sequential => &["--writes=sequential", "--metadata=refuse"],
            Self::Default | Self::S3fs | Self::Rclone | Self::LocalDisk => &[],
        }
    }
}

/// One of them, mounted. Other users may use it.
pub struct ComparedMount<'a> {
    pub directory: PathBuf,
    served_by: ServedBy<'a>,
}

enum ServedBy<'a> {
    Disk,
    Engine(EngineMount<'a>),
    Peer(Process),
}

impl<'a> ComparedMount<'a> {
    pub fn start(
        file_system: ComparedFileSystem,
        fixture: &'a Fixture,
        store: &'a dyn Store,
        bucket: &str,
        number: usize,
    ) -> anyhow::Result<Self> {
        let name = format!("{}-{number}", file_system.word());
        let cache = fixture.create_directory(&format!("caches/{name}"));
        let directory = fixture.path("compared").join(&name);
        match file_system {
            ComparedFileSystem::LocalDisk => {
                make(&directory)?;
                Ok(Self { directory, served_by: ServedBy::Disk })
            }
            ComparedFileSystem::Default | ComparedFileSystem::Staged | ComparedFileSystem::Sequential => {
                let mut engine = EngineLauncher::new(fixture, store, bucket).writable().argument("--allow-other");
                if file_system != ComparedFileSystem::Sequential {
                    engine = engine.argument("--stage").argument(cache);
                }
                let engine = file_system.arguments().iter().fold(engine, EngineLauncher::argument).mount();
                Ok(Self { directory: engine.directory().to_owned(), served_by: ServedBy::Engine(engine) })
            }
            ComparedFileSystem::S3fs | ComparedFileSystem::Rclone => {
                make(&directory)?;
                let endpoint = store.endpoint();
                let peer = PeerMount { store, endpoint: &endpoint, bucket, mount_point: &directory, cache: &cache };
                let mut command = peer_command(file_system, &peer)?;
                let process = fixture.start(&name, &mut command)?;
                let is_there = || mounts_beneath(&directory).contains(&directory);
                let in_time = wait_until(Instant::now() + SOON, || is_there() || !process.is_running());
                ensure!(in_time && is_there(), "{} does not mount: {process}", file_system.title());
                let mounted = Self { directory, served_by: ServedBy::Peer(process) };
                ensure!(mounted.is_alive(), "{} does not answer", file_system.title());
                Ok(mounted)
            }
        }
    }

    /// Whether it still answers.
    pub fn is_alive(&self) -> bool {
        match &self.served_by {
            ServedBy::Disk => true,
            ServedBy::Engine(_) | ServedBy::Peer(_) => {
                matches!(Kernel::default().probe(&self.directory, Instant::now() + ALIVE_LIMIT), Probe::Alive { .. })
            }
        }
    }

    /// Unmounts it; a peer that does not end is killed.
    pub fn stop(self) -> anyhow::Result<()> {
        let Self { directory, served_by } = self;
        match served_by {
            ServedBy::Disk => fs::remove_dir_all(&directory).context("failed to remove the local directory"),
            ServedBy::Engine(mount) => {
                mount.unmount();
                Ok(())
            }
            ServedBy::Peer(process) => {
                let host = Kernel::default();
                if !wait_until(Instant::now() + ALIVE_LIMIT, || host.unmount(&directory).is_ok()) {
                    host.detach(&directory)?;
                }
                if process.wait(ALIVE_LIMIT).is_none() {
                    process.kill();
                }
                Ok(())
            }
        }
    }

    /// Removes one that is dead.
    pub fn discard(self) {
        let _ = Kernel::default().detach(&self.directory);
        if let ServedBy::Peer(process) = &self.served_by {
            process.kill();
        }
    }
}

fn make(directory: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(directory).with_context(|| format!("failed to make {}", directory.display()))
}

fn peer_command(file_system: ComparedFileSystem, peer: &PeerMount<'_>) -> anyhow::Result<Command> {
    if file_system == ComparedFileSystem::S3fs {
        let mut command = peers::s3fs(peer)?;
        command.args(["-o", "allow_other"]);
        return Ok(command);
    }
    let mut command = peers::rclone(peer, RcloneCache::Full)?;
    command.arg("--allow-other");
    Ok(command)
}
