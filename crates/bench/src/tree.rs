//! Work with many directories of small files, as programs do it: `find`, `du`, `cp -r`, `tar c` and `rm -r`.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, ensure};

use crate::clients::MountedFileSystem;
use crate::content::{BLOCK_BYTES, Content};
use crate::scratch::{BUCKET, Scratch};
use s3csi_s3_server::store::Store as _;

/// Directories, and files of 4 KiB in each of them.
#[derive(Clone, Copy, Debug)]
pub struct TreeSize {
    pub directories: u64,
    pub files: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TreeWork {
    Find,
    DiskUsage,
    Copy,
    Archive,
    Remove,
}

const TREE: &str = "tree";

impl TreeWork {
    pub fn command(self) -> &'static str {
        match self {
            Self::Find => "find",
            Self::DiskUsage => "du -s",
            Self::Copy => "cp -r",
            Self::Archive => "tar c",
            Self::Remove => "rm -r",
        }
    }
}

impl TreeSize {
    pub fn total(&self) -> u64 {
        self.directories * self.files
    }

    /// Number and name of each file.
    fn names(&self) -> impl Iterator<Item = (u64, String)> {
        let files = self.files;
        (0..self.total()).map(move |number| (number, format!("{}/{}", number / files, number % files)))
    }

    /// Puts the objects into the bucket, past the server.
    pub fn prepare(&self, scratch: &Scratch, content: &Content) -> anyhow::Result<()> {
        self.put(scratch, content, TREE)
    }

    fn put(&self, scratch: &Scratch, content: &Content, root: &str) -> anyhow::Result<()> {
        for (number, name) in self.names() {
            scratch.store().put_object(BUCKET, &format!("{root}/{name}"), &content.bytes(number, BLOCK_BYTES))?;
        }
        Ok(())
    }

    /// How long it takes, in seconds. Copies and archives are in memory.
    pub fn run(
        &self,
        work: TreeWork,
        scratch: &Scratch,
        content: &Content,
        mounted: &MountedFileSystem,
        name: &str,
    ) -> anyhow::Result<f64> {
        let (tree, local) = (mounted.path(TREE), scratch.cache(name)?.join("local"));
        match work {
            TreeWork::Find => {
                let (took, output) = time(Command::new("find").arg(&tree))?;
                let found = output.lines().count() as u64;
                ensure!(found == 1 + self.directories + self.total(), "find has found {found} names");
                Ok(took)
            }
            TreeWork::DiskUsage => {
                let (took, output) = time(Command::new("du").args(["-s", "--apparent-size", "-B1"]).arg(&tree))?;
                let bytes: u64 = output.split_whitespace().next().unwrap_or_default().parse().context("not a size")?;
                ensure!(self.total() * BLOCK_BYTES as u64 <= bytes, "du has found {bytes} bytes");
                Ok(took)
            }
            TreeWork::Copy => {
                let (took, _) = time(Command::new("cp").arg("-r").arg(&tree).arg(&local))?;
                for (number, name) in self.names() {
                    let bytes = fs::read(local.join(&name)).with_context(|| format!("{name} was not copied"))?;
                    ensure!(bytes.len() == BLOCK_BYTES, "{name} has {} bytes", bytes.len());
                    content.check(number, &bytes)?;
                }
                fs::remove_dir_all(&local).context("failed to remove the copy")?;
                Ok(took)
            }
            TreeWork::Archive => {
                let (took, _) = time(Command::new("tar").arg("cf").arg(&local).arg("-C").arg(&tree).arg("."))?;
                let bytes = fs::metadata(&local).context("there is no archive")?.len();
                ensure!(self.total() * BLOCK_BYTES as u64 <= bytes, "the archive has {bytes} bytes");
                fs::remove_file(&local).context("failed to remove the archive")?;
                Ok(took)
            }
            TreeWork::Remove => {
                let root = format!("removed-{name}");
                self.put(scratch, content, &root)?;
                let (took, _) = time(Command::new("rm").arg("-r").arg(mounted.path(&root)))?;
                let object = scratch.object(&root);
                let left = files_below(&object);
                ensure!(left == 0, "{left} files are left");
                // The server may keep directories of objects that are gone.
                let _ = fs::remove_dir_all(object);
                Ok(took)
            }
        }
    }
}

/// The seconds that a command takes, and its output.
fn time(command: &mut Command) -> anyhow::Result<(f64, String)> {
    let start = Instant::now();
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("failed to run {command:?}"))?;
    let took = start.elapsed().as_secs_f64();
    ensure!(output.status.success(), "{command:?} failed: {}", String::from_utf8_lossy(&output.stderr));
    Ok((took, String::from_utf8_lossy(&output.stdout).into_owned()))
}

fn files_below(directory: &Path) -> usize {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|it| if it.path().is_dir() { files_below(&it.path()) } else { 1 }).sum()
}
