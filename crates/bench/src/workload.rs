//! What is done with a mount, and how its result is checked: a client that stores or delivers other bytes has no figure.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use crate::clients::MountedFileSystem;
use crate::content::{BLOCK_BYTES, BLOCKS_PER_CHUNK, CHUNK_BYTES, Content, PseudoRandom, stamp};
use crate::limit::LimitClient;
use crate::scratch::{BUCKET, Scratch};
use crate::statistics::mebibytes;
use crate::tree::{TreeSize, TreeWork};
use s3csi_s3_server::store::Store as _;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Measurement {
    Write,
    Read,
    /// The same file once more through the same mount.
    ReadAgain,
    /// Once more after the kernel has dropped its pages, with a disk cache.
    ReadCached,
    ReadParallel,
    /// Of a file that was not read before.
    Random,
    /// Of a file that was read as a whole before.
    RandomAgain,
    CreateSmall,
    ReadSmall,
    List,
    Tree(TreeWork),
}

/// Which of two figures is the better one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    Higher,
    Lower,
}

#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub big_bytes: u64,
    pub small_files: u64,
    pub listed: u64,
    pub random: Duration,
    pub tree: TreeSize,
}

const BIG: &str = "big";
const SMALL: &str = "small";
const LISTED: &str = "listed";
const LISTED_BYTES: usize = 100;
const READERS: u64 = 8;

/// Many times what the slowest client needs: it hangs.
const LIMIT: Duration = Duration::from_mins(10);

/// Clients that upload in the background after close need some seconds for a big file.
const UPLOAD_LIMIT: Duration = Duration::from_mins(2);

/// How exactly the moment is known at which an object is on the server.
const PAUSE: Duration = Duration::from_millis(1);

impl Measurement {
    pub const ALL: [Self; 15] = [
        Self::Write,
        Self::Read,
        Self::ReadAgain,
        Self::ReadCached,
        Self::ReadParallel,
        Self::Random,
        Self::RandomAgain,
        Self::CreateSmall,
        Self::ReadSmall,
        Self::List,
        Self::Tree(TreeWork::Find),
        Self::Tree(TreeWork::DiskUsage),
        Self::Tree(TreeWork::Copy),
        Self::Tree(TreeWork::Archive),
        Self::Tree(TreeWork::Remove),
    ];

    pub fn title(self, sizes: &Sizes) -> String {
        let Sizes { big_bytes, small_files, listed, tree, .. } = sizes;
        let big = mebibytes(*big_bytes);
        match self {
            Self::Write => format!("sequential write {big} MiB, MiB/s"),
            Self::Read => format!("sequential read {big} MiB, MiB/s"),
            Self::ReadAgain => "second read, MiB/s".to_owned(),
            Self::ReadCached => "second read, disk cache, pages dropped, MiB/s".to_owned(),
            Self::ReadParallel => format!("{READERS} readers of one file, MiB/s"),
            Self::CreateSmall => format!("create {small_files} × 4 KiB, s"),
            Self::ReadSmall => format!("read {small_files} × 4 KiB, s"),
            Self::List => format!("`ls -l` of {listed}, s"),
            Self::Tree(work) => {
                format!("`{}` of {} files in {} directories, s", work.command(), tree.total(), tree.directories)
            }
            Self::Random => "random 4 KiB reads per s, cold file".to_owned(),
            Self::RandomAgain => "random 4 KiB reads per s, file read before".to_owned(),
        }
    }

    pub fn better(self) -> Better {
        match self {
            Self::Write
            | Self::Read
            | Self::ReadAgain
            | Self::ReadCached
            | Self::ReadParallel
            | Self::Random
            | Self::RandomAgain => Better::Higher,
            Self::CreateSmall | Self::ReadSmall | Self::List | Self::Tree(_) => Better::Lower,
        }
    }
}

/// What all tests need.
pub struct Dataset<'a> {
    pub scratch: &'a Scratch,
    pub content: Content,
}

impl Dataset<'_> {
    /// Puts the objects that are read into the bucket, past the server.
    pub fn prepare(&self, sizes: &Sizes) -> anyhow::Result<()> {
        let put =
            |key: &str, first, bytes| self.scratch.store().put_object(BUCKET, key, &self.content.bytes(first, bytes));
        put(BIG, 0, usize::try_from(sizes.big_bytes)?)?;
        for number in 0..sizes.small_files {
            put(&format!("{SMALL}/{number}"), number, BLOCK_BYTES)?;
        }
        for number in 0..sizes.listed {
            put(&format!("{LISTED}/{number}"), number, LISTED_BYTES)?;
        }
        sizes.tree.prepare(self.scratch, &self.content)
    }

    /// The test's figure. `name` is part of the keys that are written, and is used once.
    pub fn run(
        &self,
        test: Measurement,
        sizes: &Sizes,
        mounted: &MountedFileSystem,
        name: &str,
    ) -> anyhow::Result<f64> {
        mounted.within(LIMIT, || match test {
            Measurement::Write => self.write(sizes, mounted, name),
            Measurement::Read => self.read(sizes, &mounted.path(BIG)),
            Measurement::ReadAgain => {
                self.check_file(&mounted.path(BIG), sizes.big_bytes)?;
                self.read(sizes, &mounted.path(BIG))
            }
            Measurement::ReadCached => {
                self.check_file(&mounted.path(BIG), sizes.big_bytes)?;
                drop_pages(&mounted.path(BIG))?;
                self.read(sizes, &mounted.path(BIG))
            }
            Measurement::ReadParallel => self.read_in_parallel(sizes, mounted),
            Measurement::CreateSmall => self.create_small(sizes, mounted, name),
            Measurement::ReadSmall => self.read_small(sizes, mounted),
            Measurement::List => list(sizes, mounted),
            Measurement::Tree(work) => sizes.tree.run(work, self.scratch, &self.content, mounted, name),
            Measurement::Random => self.read_randomly(sizes, &mounted.path(BIG)),
            Measurement::RandomAgain => {
                self.check_file(&mounted.path(BIG), sizes.big_bytes)?;
                self.read_randomly(sizes, &mounted.path(BIG))
            }
        })
    }

    /// The best that is possible: the same work on a file in memory, or by the same client without a file system.
    pub fn limit(&self, test: Measurement, sizes: &Sizes, endpoint: &str) -> anyhow::Result<Option<f64>> {
        let in_memory = self.scratch.object(BIG);
        match test {
            Measurement::Read => {
                let client = LimitClient::new(self.scratch.store(), endpoint)?;
                let start = Instant::now();
                client.read(BUCKET, BIG, sizes.big_bytes, |at, bytes| Ok(self.content.check_at(at, bytes)?))?;
                Ok(Some(mebibytes(sizes.big_bytes) / start.elapsed().as_secs_f64()))
            }
            Measurement::ReadAgain => self.read(sizes, &in_memory).map(Some),
            Measurement::RandomAgain => self.read_randomly(sizes, &in_memory).map(Some),
            _ => Ok(None),
        }
    }

    /// Until the file is closed and its object is on the server.
    fn write(&self, sizes: &Sizes, mounted: &MountedFileSystem, name: &str) -> anyhow::Result<f64> {
        let key = format!("written-{name}");
        let mut chunk = self.content.bytes(0, CHUNK_BYTES);
        let start = Instant::now();
        let mut file = File::create(mounted.path(&key)).context("failed to create the file")?;
        for number in 0..sizes.big_bytes / CHUNK_BYTES as u64 {
            stamp(&mut chunk, number * BLOCKS_PER_CHUNK);
            file.write_all(&chunk).context("failed to write")?;
        }
        // An error of close stays hidden here; a failed upload is noticed by what the server holds.
        drop(file);
        let object = self.scratch.object(&key);
        wait_for_object(&object, sizes.big_bytes)?;
        let took = start.elapsed();
        self.check_file(&object, sizes.big_bytes).context("the object is not what was written")?;
        fs::remove_file(&object).context("failed to remove the object")?;
        Ok(mebibytes(sizes.big_bytes) / took.as_secs_f64())
    }

    /// The bytes are compared on the way: an application, too, looks at what it reads.
    fn read(&self, sizes: &Sizes, path: &Path) -> anyhow::Result<f64> {
        let start = Instant::now();
        self.check_file(path, sizes.big_bytes)?;
        Ok(mebibytes(sizes.big_bytes) / start.elapsed().as_secs_f64())
    }

    fn check_file(&self, path: &Path, bytes: u64) -> anyhow::Result<()> {
        let mut file = File::open(path).context("failed to open the file")?;
        let mut chunk = vec![0; CHUNK_BYTES];
        for number in 0..bytes / CHUNK_BYTES as u64 {
            file.read_exact(&mut chunk).context("failed to read")?;
            self.content.check(number * BLOCKS_PER_CHUNK, &chunk)?;
        }
        ensure!(file.read(&mut chunk).context("failed to read to the end")? == 0, "the file is too long");
        Ok(())
    }

    /// Each reader has a part of the file, and opens it by itself.
    fn read_in_parallel(&self, sizes: &Sizes, mounted: &MountedFileSystem) -> anyhow::Result<f64> {
        let chunks = sizes.big_bytes / CHUNK_BYTES as u64;
        let read = |reader: u64| {
            let file = File::open(mounted.path(BIG)).context("failed to open the file")?;
            let mut chunk = vec![0; CHUNK_BYTES];
            for number in reader * chunks / READERS..(reader + 1) * chunks / READERS {
                file.read_exact_at(&mut chunk, number * CHUNK_BYTES as u64).context("failed to read")?;
                self.content.check(number * BLOCKS_PER_CHUNK, &chunk)?;
            }
            Ok::<(), anyhow::Error>(())
        };
        let start = Instant::now();
        std::thread::scope(|scope| {
            let readers: Vec<_> = (0..READERS).map(|reader| scope.spawn(move || read(reader))).collect();
            readers.into_iter().try_for_each(|it| it.join().map_err(|_| anyhow::anyhow!("a reader panicked"))?)
        })?;
        Ok(mebibytes(sizes.big_bytes) / start.elapsed().as_secs_f64())
    }

    /// Until the last file is on the server.
    fn create_small(&self, sizes: &Sizes, mounted: &MountedFileSystem, name: &str) -> anyhow::Result<f64> {
        let directory = format!("created-{name}");
        fs::create_dir(mounted.path(&directory)).context("failed to make the directory")?;
        let mut block = self.content.bytes(0, BLOCK_BYTES);
        let start = Instant::now();
        for number in 0..sizes.small_files {
            stamp(&mut block, number);
            let write = || {
                let mut file = File::create(mounted.path(&format!("{directory}/{number}")))?;
                file.write_all(&block)
            };
            write().with_context(|| format!("failed to write file {number}"))?;
        }
        let object = |number: u64| self.scratch.object(&format!("{directory}/{number}"));
        for number in 0..sizes.small_files {
            wait_for_object(&object(number), BLOCK_BYTES as u64)?;
        }
        let took = start.elapsed();
        for number in 0..sizes.small_files {
            let bytes = fs::read(object(number)).context("failed to read an object")?;
            self.content.check(number, &bytes).context("an object is not what was written")?;
        }
        fs::remove_dir_all(self.scratch.object(&directory)).context("failed to remove the objects")?;
        Ok(took.as_secs_f64())
    }

    fn read_small(&self, sizes: &Sizes, mounted: &MountedFileSystem) -> anyhow::Result<f64> {
        let start = Instant::now();
        for number in 0..sizes.small_files {
            let bytes = fs::read(mounted.path(&format!("{SMALL}/{number}")))
                .with_context(|| format!("failed to read file {number}"))?;
            ensure!(bytes.len() == BLOCK_BYTES, "file {number} has {} bytes", bytes.len());
            self.content.check(number, &bytes)?;
        }
        Ok(start.elapsed().as_secs_f64())
    }

    fn read_randomly(&self, sizes: &Sizes, path: &Path) -> anyhow::Result<f64> {
        let blocks = sizes.big_bytes / BLOCK_BYTES as u64;
        let file = File::open(path).context("failed to open the file")?;
        let mut numbers = PseudoRandom::new();
        let mut block = [0; BLOCK_BYTES];
        let mut count = 0_u32;
        let start = Instant::now();
        while start.elapsed() < sizes.random {
            let number = numbers.next() % blocks;
            file.read_exact_at(&mut block, number * BLOCK_BYTES as u64).context("failed to read")?;
            self.content.check(number, &block)?;
            count += 1;
        }
        Ok(f64::from(count) / start.elapsed().as_secs_f64())
    }
}

/// As if the kernel had needed the memory for something else.
fn drop_pages(path: &Path) -> anyhow::Result<()> {
    let file = File::open(path).context("failed to open the file")?;
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).context("failed to drop the pages")
}

/// As a user does it: names, sizes and times of all files.
fn list(sizes: &Sizes, mounted: &MountedFileSystem) -> anyhow::Result<f64> {
    let mut command = Command::new("ls");
    command.arg("-l").arg(mounted.path(LISTED)).env("LC_ALL", "C");
    let start = Instant::now();
    let output = command.output().context("failed to run ls")?;
    let took = start.elapsed();
    ensure!(output.status.success(), "ls failed: {}", String::from_utf8_lossy(&output.stderr));
    // Permissions, links, owner, group, size, …; the first line is the total.
    let text = String::from_utf8_lossy(&output.stdout);
    let sizes_found = text.lines().skip(1).map(|it| it.split_whitespace().nth(4).and_then(|it| it.parse().ok()));
    let right = sizes_found.filter(|it| *it == Some(LISTED_BYTES)).count();
    ensure!(right as u64 == sizes.listed, "ls shows {right} of {} files with the right size", sizes.listed);
    Ok(took.as_secs_f64())
}

/// The server moves a finished object to its place, so the right size means the whole object.
fn wait_for_object(path: &Path, bytes: u64) -> anyhow::Result<()> {
    let start = Instant::now();
    while fs::metadata(path).map_or(0, |it| it.len()) != bytes {
        ensure!(start.elapsed() < UPLOAD_LIMIT, "the object does not appear on the server");
        std::thread::sleep(PAUSE);
    }
    Ok(())
}
