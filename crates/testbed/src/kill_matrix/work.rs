//! The workload of a cell, as a process of its own: a process with an open file in a mount without an engine cannot start others.
//! It notes each round with its beginning, its length and what became of it.

use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::fs::Advice;

use super::MatrixWorkload;
use crate::input;
use crate::noise::noise;

/// Between two rounds. It is also how the process notices its end: its standard input is closed.
const REST: Duration = Duration::from_millis(5);

/// The object that readers read, in the root and in [`DIRECTORY`].
pub const READ: &str = "read";

/// The directory that is listed, and the subPath.
pub const DIRECTORY: &str = "dir";

/// How many objects are in [`DIRECTORY`], without [`READ`].
pub const LISTED: usize = 20;

/// Larger than what a supervisor keeps of a file being written.
const BIG_BYTES: usize = 10 << 20;

/// What each write of a big file adds.
const PIECE: usize = 1 << 20;

/// Big files are written again and again under these many names.
const BIG_FILES: u64 = 3;

const SMALL_BYTES: usize = 10_000;

/// Maps a file and reads a page of it in each round, which the kernel has to ask the engine for.
const MAPPED: &str = "
import mmap, os, select, sys, time
file = os.open(sys.argv[1] + '/read', os.O_RDONLY)
size = os.fstat(file).st_size
expected = open(sys.argv[2] + '/expected', 'rb').read()
mapping = mmap.mmap(file, size, prot=mmap.PROT_READ)
log = open(sys.argv[2] + '/rounds', 'a')
number = 0
while not select.select([sys.stdin], [], [], 0.005)[0]:
    number += 1
    mapping.madvise(mmap.MADV_DONTNEED)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    begun, clock = time.time_ns(), time.monotonic_ns()
    offset = (number * 7919 * 4096) % (size - 4096)
    is_same = mapping[offset:offset + 4096] == expected[offset:offset + 4096]
    took = time.monotonic_ns() - clock
    log.write('%d %d %s\\n' % (begun // 1000, took // 1000, 'ok' if is_same else 'error other content'))
    log.flush()
";

/// The content of [`READ`].
pub fn read_content() -> Vec<u8> {
    noise(1, 300_000)
}

/// The content of a file that a workload has written.
pub fn written_content(seed: u64, is_big: bool) -> Vec<u8> {
    noise(seed + 100, if is_big { BIG_BYTES } else { SMALL_BYTES })
}

/// A round of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkRound {
    /// Since the beginning of 1970.
    pub begun: Duration,
    pub took: Duration,
    pub result: WorkResult,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkResult {
    Good,
    Failed(String),
    /// The file was synced or closed without an error.
    Stored {
        key: String,
        seed: u64,
    },
    NotStored {
        key: String,
        seed: u64,
        error: String,
    },
}

impl WorkRound {
    /// Complete lines of a log.
    pub fn parse(log: &str) -> Vec<Self> {
        let complete = log.rsplit_once('\n').map_or("", |(lines, _)| lines);
        complete.lines().filter_map(Self::parse_line).collect()
    }

    fn parse_line(line: &str) -> Option<Self> {
        let mut words = line.splitn(3, ' ');
        let begun = Duration::from_micros(words.next()?.parse().ok()?);
        let took = Duration::from_micros(words.next()?.parse().ok()?);
        let result = words.next()?;
        let (kind, rest) = result.split_once(' ').unwrap_or((result, ""));
        let mut rest_words = rest.splitn(3, ' ');
        let result = match kind {
            "ok" => WorkResult::Good,
            "error" => WorkResult::Failed(rest.to_owned()),
            "stored" => {
                WorkResult::Stored { key: rest_words.next()?.to_owned(), seed: rest_words.next()?.parse().ok()? }
            }
            "unstored" => WorkResult::NotStored {
                key: rest_words.next()?.to_owned(),
                seed: rest_words.next()?.parse().ok()?,
                error: rest_words.next().unwrap_or_default().to_owned(),
            },
            _ => return None,
        };
        Some(Self { begun, took, result })
    }

    pub fn error(&self) -> Option<&str> {
        match &self.result {
            WorkResult::Failed(error) | WorkResult::NotStored { error, .. } => Some(error),
            WorkResult::Good | WorkResult::Stored { .. } => None,
        }
    }

    fn line(&self) -> String {
        let mut line = format!("{} {} ", self.begun.as_micros(), self.took.as_micros());
        let _ = match &self.result {
            WorkResult::Good => write!(line, "ok"),
            WorkResult::Failed(error) => write!(line, "error {}", error.replace('\n', " ")),
            WorkResult::Stored { key, seed } => write!(line, "stored {key} {seed}"),
            WorkResult::NotStored { key, seed, error } => {
                write!(line, "unstored {key} {seed} {}", error.replace('\n', " "))
            }
        };
        line.push('\n');
        line
    }
}

/// The command that runs a workload. It ends when its standard input is closed.
pub fn command(program: &Path, workload: MatrixWorkload, directory: &Path, files: &Path) -> Command {
    if workload == MatrixWorkload::Mmap {
        let mut command = crate::process::command(Path::new("python3"));
        command.args(["-c", MAPPED]).arg(directory).arg(files);
        return command;
    }
    let mut command = crate::process::command(program);
    let number = MatrixWorkload::ALL.iter().position(|it| *it == workload).unwrap_or_default();
    command.arg("steady-work").arg(number.to_string()).arg(directory).arg(files);
    command
}

/// The workload itself, by its number in [`MatrixWorkload::ALL`].
pub fn run(number: usize, directory: &Path, files: &Path) -> io::Result<()> {
    let Some(workload) = MatrixWorkload::ALL.get(number).copied() else {
        return Err(io::Error::other("there is no such workload"));
    };
    let mut log = OpenOptions::new().append(true).create(true).open(files.join("rounds"))?;
    let open = File::open(directory.join(READ))?;
    let expected = read_content();
    let mut rounds = 0;
    let mut note = |work: &mut dyn FnMut() -> WorkResult| {
        let begun = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let clock = Instant::now();
        let result = work();
        let round = WorkRound { begun, took: clock.elapsed(), result };
        log.write_all(round.line().as_bytes())
    };
    if workload == MatrixWorkload::Idle {
        note(&mut || WorkResult::Good)?;
        while !input::is_closed(REST) {}
        return note(&mut || judge(read(directory, &open, &expected, 0)));
    }
    while !input::is_closed(REST) {
        rounds += 1;
        note(&mut || match workload {
            MatrixWorkload::WritingSmall => write_small(directory, files, rounds),
            MatrixWorkload::WritingBig => write_big(directory, rounds),
            MatrixWorkload::Listing => judge(list(directory)),
            MatrixWorkload::ReadOnly => {
                judge(read(directory, &open, &expected, rounds).and_then(|()| fail_to_write(directory)))
            }
            _ => judge(read(directory, &open, &expected, rounds)),
        })?;
    }
    Ok(())
}

fn judge(result: io::Result<()>) -> WorkResult {
    match result {
        Ok(()) => WorkResult::Good,
        Err(error) => WorkResult::Failed(error.to_string()),
    }
}

/// By path, and through a descriptor that stays open; the kernel has to ask the engine.
fn read(directory: &Path, open: &File, expected: &[u8], round: u64) -> io::Result<()> {
    let mut piece = vec![0; 64 << 10];
    let offset = usize::try_from(round * 7_654_321).unwrap_or_default() % (expected.len() - piece.len());
    // Evicting pages of a mount that is gone fails, and so does the read.
    let _ = rustix::fs::fadvise(open, 0, None, Advice::DontNeed);
    open.read_exact_at(&mut piece, offset as u64)?;
    if piece != expected[offset..offset + piece.len()] {
        return Err(io::Error::other("other content in the open file"));
    }
    if fs::read(directory.join(READ))? != expected {
        return Err(io::Error::other("other content"));
    }
    Ok(())
}

fn list(directory: &Path) -> io::Result<()> {
    let entries = fs::read_dir(directory.join(DIRECTORY))?;
    let found = entries.map(|it| it?.metadata()).collect::<io::Result<Vec<_>>>()?.len();
    if found == LISTED + 1 { Ok(()) } else { Err(io::Error::other(format!("{found} files instead of {}", LISTED + 1))) }
}

fn fail_to_write(directory: &Path) -> io::Result<()> {
    match File::create(directory.join("forbidden")) {
        Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => Ok(()),
        Err(error) => Err(error),
        Ok(_) => Err(io::Error::other("a read-only volume was written to")),
    }
}

/// Every other file is closed by cp(1), which reports that close(2) failed; the rest is synced.
fn write_small(directory: &Path, files: &Path, seed: u64) -> WorkResult {
    let key = format!("small-{seed}");
    let (path, content) = (directory.join(&key), written_content(seed, false));
    let written = if seed.is_multiple_of(2) { copy(files, &path, &content) } else { sync(&path, &content) };
    match written {
        Ok(()) => WorkResult::Stored { key, seed },
        Err(error) => WorkResult::NotStored { key, seed, error: error.to_string() },
    }
}

fn copy(files: &Path, path: &Path, content: &[u8]) -> io::Result<()> {
    let source = files.join("source");
    fs::write(&source, content)?;
    let output = Command::new("cp").arg(&source).arg(path).stdin(Stdio::null()).output()?;
    if output.status.success() { Ok(()) } else { Err(io::Error::other(String::from_utf8_lossy(&output.stderr).trim())) }
}

fn sync(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    for piece in content.chunks(PIECE) {
        file.write_all(piece)?;
    }
    file.sync_all()
}

fn write_big(directory: &Path, seed: u64) -> WorkResult {
    let key = format!("big-{}", seed % BIG_FILES);
    match sync(&directory.join(&key), &written_content(seed, true)) {
        Ok(()) => WorkResult::Stored { key, seed },
        Err(error) => WorkResult::NotStored { key, seed, error: error.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(result: WorkResult) {
        let round = WorkRound { begun: Duration::from_micros(7), took: Duration::from_micros(8), result };
        assert_eq!(WorkRound::parse(&format!("{}half a line", round.line())), [round]);
    }

    #[test]
    fn logs_are_read_as_they_are_written() {
        let key = "small-1".to_owned();
        check(WorkResult::Good);
        check(WorkResult::Failed("no such file".to_owned()));
        check(WorkResult::Stored { key: key.clone(), seed: 1 });
        check(WorkResult::NotStored { key, seed: 1, error: "input output error".to_owned() });
    }
}
