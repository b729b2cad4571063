//! A workload that reads, compares and lists all the time and remembers every error: for tests of what applications see while
//! something dies.
//!
//! It is a process of its own. A process with an open file in a mount without an engine cannot start others: fork and exec
//! close the file in the child, which is a FUSE request without an answer.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::environment::product;
use crate::input;
use crate::process::command;
use crate::wait::{SOON, wait_for, wait_until};

/// How long the reader rests between two rounds. It is also how it notices its end: its standard input is closed.
const REST: Duration = Duration::from_millis(2);

/// Must be ended with [`SteadyReader::finish`].
pub struct SteadyReader {
    process: Child,
    files: TempDir,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReaderReport {
    pub rounds: u64,
    /// The longest single round: how long the application was blocked.
    pub longest: Duration,
    pub errors: Vec<String>,
}

impl SteadyReader {
    /// Reads `name` in `directory`, which has this content, once by path and once through a descriptor that stays open.
    #[track_caller]
    pub fn start(directory: &Path, name: &str, content: &[u8]) -> Self {
        let files = tempfile::tempdir().unwrap();
        fs::write(files.path().join("expected"), content).unwrap();
        let mut command = command(&product("s3csi-testbed").unwrap());
        command.arg("steady-reader").arg(directory).arg(name).arg(files.path());
        let process = command.stdin(Stdio::piped()).spawn().unwrap();
        let reader = Self { process, files };
        reader.wait_for_rounds(3);
        reader
    }

    /// Waits until the reader has done so many rounds from now on.
    #[track_caller]
    pub fn wait_for_rounds(&self, count: u64) {
        let until = self.report().rounds + count;
        wait_for("the reader gets on", || self.report().rounds >= until);
    }

    #[track_caller]
    pub fn finish(mut self) -> ReaderReport {
        drop(self.process.stdin.take());
        let has_ended = wait_until(Instant::now() + SOON, || matches!(self.process.try_wait(), Ok(Some(_))));
        assert!(has_ended, "the reader hangs: {:?}", self.report());
        self.report()
    }

    /// Ends the reader, which must not have seen an error.
    #[track_caller]
    pub fn finish_without_errors(self) -> ReaderReport {
        let report = self.finish();
        assert_eq!(report.errors, Vec::<String>::new(), "{report:?}");
        report
    }

    fn report(&self) -> ReaderReport {
        ReaderReport::read(&self.files.path().join("report")).unwrap_or_default()
    }
}

/// The reader itself. Ends when its standard input is closed.
pub fn run(directory: &Path, name: &str, files: &Path) -> io::Result<()> {
    let expected = fs::read(files.join("expected"))?;
    let path = directory.join(name);
    let open = File::open(&path)?;
    let mut report = ReaderReport::default();
    while !input::is_closed(REST) {
        let begun = Instant::now();
        if let Err(error) = round(directory, &path, &open, &expected) {
            report.errors.push(error.to_string());
        }
        report.longest = report.longest.max(begun.elapsed());
        report.rounds += 1;
        report.write(files)?;
    }
    Ok(())
}

impl ReaderReport {
    /// Replaced as a whole, so that it is never read half written.
    fn write(&self, files: &Path) -> io::Result<()> {
        let mut text = format!("{}\n{}\n", self.rounds, self.longest.as_millis());
        for error in &self.errors {
            let _ = writeln!(text, "{}", error.replace('\n', " "));
        }
        fs::write(files.join("draft"), text)?;
        fs::rename(files.join("draft"), files.join("report"))
    }

    fn read(path: &Path) -> Option<Self> {
        Self::parse(&fs::read_to_string(path).ok()?)
    }

    /// The number of rounds, the longest one in milliseconds, and the errors, one in each line. Nothing if it is not complete.
    pub fn parse(text: &str) -> Option<Self> {
        let mut lines = text.lines();
        let rounds = lines.next()?.parse().ok()?;
        let longest = Duration::from_millis(lines.next()?.parse().ok()?);
        Some(Self { rounds, longest, errors: lines.map(str::to_owned).collect() })
    }
}

fn round(directory: &Path, path: &PathBuf, open: &File, expected: &[u8]) -> io::Result<()> {
    let same = |what: &str, bytes: &[u8]| {
        if bytes == expected { Ok(()) } else { Err(io::Error::other(format!("{what}: other content"))) }
    };
    let at = |what: &'static str| move |error: io::Error| io::Error::other(format!("{what}: {error}"));
    same("read by path", &fs::read(path).map_err(at("read by path"))?)?;
    let mut bytes = vec![0; expected.len()];
    open.read_exact_at(&mut bytes, 0).map_err(at("read through the open file"))?;
    same("read through the open file", &bytes)?;
    fs::metadata(path).map_err(at("stat"))?;
    let names =
        fs::read_dir(directory).map_err(at("readdir"))?.collect::<io::Result<Vec<_>>>().map_err(at("readdir"))?;
    if names.iter().any(|it| it.path() == *path) {
        Ok(())
    } else {
        Err(io::Error::other("readdir: the file is missing"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_are_read_as_they_are_written() {
        let files = tempfile::tempdir().unwrap();
        let report =
            ReaderReport { rounds: 3, longest: Duration::from_millis(7), errors: vec!["stat: no".into(), "x".into()] };
        report.write(files.path()).unwrap();
        assert_eq!(ReaderReport::read(&files.path().join("report")), Some(report));
    }
}
