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
use crate::floor::Floor;
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
    /// By several writers at once, in one directory.
    CreateSmallParallel,
    ReadSmallParallel,
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
/// Of an upload, by default.
const PART_BYTES: usize = 8 << 20;
const PARTS_AT_ONCE: u64 = 8;
/// Many programs that work with small files.
const PROGRAMS: u64 = 16;

/// Many times what the slowest client needs: it hangs.
const LIMIT: Duration = Duration::from_mins(10);

/// Clients that upload in the background after close need some seconds for a big file.
const UPLOAD_LIMIT: Duration = Duration::from_mins(2);

/// How exactly the moment is known at which an object is on the server.
const PAUSE: Duration = Duration::from_millis(1);

impl Measurement {
    pub const ALL: [Self; 17] = [
        Self::Write,
        Self::Read,
        Self::ReadAgain,
        Self::ReadCached,
        Self::ReadParallel,
        Self::Random,
        Self::RandomAgain,
        Self::CreateSmall,
        Self::ReadSmall,
        Self::CreateSmallParallel,
        Self::ReadSmallParallel,
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
            Self::CreateSmallParallel => format!("create {small_files} × 4 KiB, {PROGRAMS} at once, s"),
            Self::ReadSmallParallel => format!("read {small_files} × 4 KiB, {PROGRAMS} at once, s"),
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
            Self::CreateSmall
            | Self::ReadSmall
            | Self::CreateSmallParallel
            | Self::ReadSmallParallel
            | Self::List
            | Self::Tree(_) => Better::Lower,
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
            Measurement::CreateSmall => self.create_small(sizes, mounted, name, 1),
            Measurement::ReadSmall => self.read_small(sizes, mounted, 1),
            Measurement::CreateSmallParallel => self.create_small(sizes, mounted, name, PROGRAMS),
            Measurement::ReadSmallParallel => self.read_small(sizes, mounted, PROGRAMS),
            Measurement::List => list(sizes, mounted),
            Measurement::Tree(work) => sizes.tree.run(work, self.scratch, &self.content, mounted, name),
            Measurement::Random => self.read_randomly(sizes, &mounted.path(BIG)),
            Measurement::RandomAgain => {
                self.check_file(&mounted.path(BIG), sizes.big_bytes)?;
                self.read_randomly(sizes, &mounted.path(BIG))
            }
        })
    }

    /// The best that is possible: the same work on a file in memory, or by the same client without a file system. `name` is part
    /// of the keys that are written, and is used once.
    pub fn limit(&self, test: Measurement, sizes: &Sizes, endpoint: &str, name: &str) -> anyhow::Result<Option<f64>> {
        let in_memory = self.scratch.object(BIG);
        let client = || LimitClient::new(self.scratch.store(), endpoint);
        match test {
            Measurement::Read => {
                let client = client()?;
                let start = Instant::now();
                client.read(BUCKET, BIG, sizes.big_bytes, |at, bytes| Ok(self.content.check_at(at, bytes)?))?;
                Ok(Some(mebibytes(sizes.big_bytes) / start.elapsed().as_secs_f64()))
            }
            Measurement::ReadAgain => self.read(sizes, &in_memory).map(Some),
            Measurement::ReadCached => {
                let floor = self.floor(sizes, name)?;
                let start = Instant::now();
                floor.read(Floor::check)?;
                let took = start.elapsed();
                floor.unmount()?;
                Ok(Some(mebibytes(sizes.big_bytes) / took.as_secs_f64()))
            }
            Measurement::RandomAgain => self.read_randomly(sizes, &in_memory).map(Some),
            Measurement::CreateSmall => self.limit_of_creating(sizes, &client()?, name).map(Some),
            Measurement::ReadSmall => {
                let client = client()?;
                let start = Instant::now();
                for number in 0..sizes.small_files {
                    let key = format!("{SMALL}/{number}");
                    let check = |_, bytes: &[u8]| Ok(self.content.check(number, bytes)?);
                    client.read(BUCKET, &key, BLOCK_BYTES as u64, check)?;
                }
                Ok(Some(start.elapsed().as_secs_f64()))
            }
            Measurement::List => {
                let client = client()?;
                let start = Instant::now();
                let listed = client.list(BUCKET, &format!("{LISTED}/"))?;
                ensure!(listed == sizes.listed, "{listed} of {} names are listed", sizes.listed);
                Ok(Some(start.elapsed().as_secs_f64()))
            }
            Measurement::Write => self.limit_of_writing(sizes, &client()?, name).map(Some),
            Measurement::ReadParallel
            | Measurement::Random
            | Measurement::CreateSmallParallel
            | Measurement::ReadSmallParallel
            | Measurement::Tree(_) => Ok(None),
        }
    }

    /// As in the limit of a sequential read, while as many bytes pass through the kernel's FUSE to a program that reads them.
    pub fn read_beside_floor(&self, sizes: &Sizes, endpoint: &str, name: &str) -> anyhow::Result<f64> {
        let client = LimitClient::new(self.scratch.store(), endpoint)?;
        let floor = self.floor(sizes, name)?;
        let start = Instant::now();
        std::thread::scope(|scope| {
            let through_floor = scope.spawn(|| floor.read(|_| Ok(())));
            client.read(BUCKET, BIG, sizes.big_bytes, |at, bytes| Ok(self.content.check_at(at, bytes)?))?;
            through_floor.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?
        })?;
        let took = start.elapsed();
        floor.unmount()?;
        Ok(mebibytes(sizes.big_bytes) / took.as_secs_f64())
    }

    fn floor(&self, sizes: &Sizes, name: &str) -> anyhow::Result<Floor> {
        Floor::mount(&self.scratch.cache(&format!("floor-{name}"))?, sizes.big_bytes)
    }

    fn limit_of_creating(&self, sizes: &Sizes, client: &LimitClient, name: &str) -> anyhow::Result<f64> {
        let directory = format!("limit-{name}");
        let mut block = self.content.bytes(0, BLOCK_BYTES);
        let start = Instant::now();
        for number in 0..sizes.small_files {
            stamp(&mut block, number);
            client.put(BUCKET, &format!("{directory}/{number}"), block.clone())?;
        }
        let took = start.elapsed();
        fs::remove_dir_all(self.scratch.object(&directory)).context("failed to remove the objects")?;
        Ok(took.as_secs_f64())
    }

    /// As many bytes in objects as large as the parts of an upload, several at once: an upload of the library waits for each part,
    /// which a mount does not do.
    fn limit_of_writing(&self, sizes: &Sizes, client: &LimitClient, name: &str) -> anyhow::Result<f64> {
        let directory = format!("limit-{name}");
        let store = |writer: u64| {
            let mut content = self.content.bytes(0, PART_BYTES);
            for number in part(writer, PARTS_AT_ONCE, sizes.big_bytes / PART_BYTES as u64) {
                stamp(&mut content, number);
                client.put(BUCKET, &format!("{directory}/{number}"), content.clone())?;
            }
            Ok(())
        };
        let start = Instant::now();
        at_once(PARTS_AT_ONCE, store)?;
        let took = start.elapsed();
        fs::remove_dir_all(self.scratch.object(&directory)).context("failed to remove the objects")?;
        Ok(mebibytes(sizes.big_bytes) / took.as_secs_f64())
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
            for number in part(reader, READERS, chunks) {
                file.read_exact_at(&mut chunk, number * CHUNK_BYTES as u64).context("failed to read")?;
                self.content.check(number * BLOCKS_PER_CHUNK, &chunk)?;
            }
            Ok(())
        };
        let start = Instant::now();
        at_once(READERS, read)?;
        Ok(mebibytes(sizes.big_bytes) / start.elapsed().as_secs_f64())
    }

    /// Until the last file is on the server.
    fn create_small(
        &self,
        sizes: &Sizes,
        mounted: &MountedFileSystem,
        name: &str,
        programs: u64,
    ) -> anyhow::Result<f64> {
        let directory = format!("created-{name}");
        fs::create_dir(mounted.path(&directory)).context("failed to make the directory")?;
        let create = |program: u64| {
            let mut block = self.content.bytes(0, BLOCK_BYTES);
            for number in part(program, programs, sizes.small_files) {
                stamp(&mut block, number);
                let write = || {
                    let mut file = File::create(mounted.path(&format!("{directory}/{number}")))?;
                    file.write_all(&block)
                };
                write().with_context(|| format!("failed to write file {number}"))?;
            }
            Ok(())
        };
        let start = Instant::now();
        at_once(programs, create)?;
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

    fn read_small(&self, sizes: &Sizes, mounted: &MountedFileSystem, programs: u64) -> anyhow::Result<f64> {
        let read = |program: u64| {
            for number in part(program, programs, sizes.small_files) {
                let bytes = fs::read(mounted.path(&format!("{SMALL}/{number}")))
                    .with_context(|| format!("failed to read file {number}"))?;
                ensure!(bytes.len() == BLOCK_BYTES, "file {number} has {} bytes", bytes.len());
                self.content.check(number, &bytes)?;
            }
            Ok(())
        };
        let start = Instant::now();
        at_once(programs, read)?;
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

/// What one of several takes of so many.
fn part(number: u64, of: u64, all: u64) -> std::ops::Range<u64> {
    number * all / of..(number + 1) * all / of
}

fn at_once(count: u64, work: impl Fn(u64) -> anyhow::Result<()> + Sync) -> anyhow::Result<()> {
    let work = &work;
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..count).map(|number| scope.spawn(move || work(number))).collect();
        all.into_iter().try_for_each(|it| it.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?)
    })
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
