//! What is still there of a fixture: mounts beneath its directory, processes that know it, sockets and credentials in it.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Pid, Signal, kill_process};

/// Names of files that hold keys; they must be gone before their directory is.
const CREDENTIAL_FILES: [&str; 1] = ["s3-csi-credentials"];

#[derive(Debug, Default)]
pub struct Leftovers {
    mounts: Vec<PathBuf>,
    processes: Vec<(Pid, String)>,
    files: Vec<PathBuf>,
}

impl Leftovers {
    /// `known` are processes that the test itself started; they count while they run, whatever they mention.
    pub(crate) fn of(directory: &Path, known: &[(Pid, String)]) -> Self {
        let mounts = mounts_beneath(directory);
        let mut processes: Vec<(Pid, String)> = processes_that_mention(directory);
        let found: BTreeSet<i32> = processes.iter().map(|it| it.0.as_raw_nonzero().get()).collect();
        let alive = known.iter().filter(|(pid, _)| is_our_child(*pid) && !found.contains(&pid.as_raw_nonzero().get()));
        processes.extend(alive.cloned());
        // A walk into a FUSE mount could hang; the mounts are reported anyway.
        let files = if mounts.is_empty() { telling_files(directory) } else { Vec::new() };
        Self { mounts, processes, files }
    }

    pub fn is_empty(&self) -> bool {
        self.mounts.is_empty() && self.processes.is_empty() && self.files.is_empty()
    }

    /// Removes what can be removed by force, so that one failed test does not spoil the next.
    pub(crate) fn clean(&self) {
        for (pid, _) in &self.processes {
            let _ = kill_process(*pid, Signal::KILL);
        }
        // The deepest and latest first.
        for mount in self.mounts.iter().rev() {
            let _ = unmount(mount, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW);
        }
        for file in &self.files {
            let _ = fs::remove_file(file);
        }
    }
}

impl fmt::Display for Leftovers {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for mount in &self.mounts {
            writeln!(formatter, "  mount {}", mount.display())?;
        }
        for (pid, what) in &self.processes {
            writeln!(formatter, "  process {} ({what})", pid.as_raw_nonzero())?;
        }
        for file in &self.files {
            writeln!(formatter, "  file {}", file.display())?;
        }
        Ok(())
    }
}

/// In the order of the mount table: parents come before children.
pub fn mounts_beneath(directory: &Path) -> Vec<PathBuf> {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let points = table.lines().filter_map(|line| line.split(' ').nth(4)).map(unescape);
    points.filter(|it| it.starts_with(directory)).collect()
}

/// Octal escapes of the mount table: blank, tab, new line and backslash.
fn unescape(field: &str) -> PathBuf {
    let mut text = field.to_owned();
    for (escape, character) in [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")] {
        text = text.replace(escape, character);
    }
    PathBuf::from(text)
}

/// Other processes whose command line, environment, working directory or open files mention the directory.
fn processes_that_mention(directory: &Path) -> Vec<(Pid, String)> {
    let own = std::process::id();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|it| it.file_name().to_str()?.parse::<u32>().ok()).filter(|it| *it != own);
    pids.filter_map(|pid| {
        let process = Path::new("/proc").join(pid.to_string());
        let pid = Pid::from_raw(i32::try_from(pid).ok()?)?;
        mentions(&process, directory).then(|| (pid, describe(&process)))
    })
    .collect()
}

fn mentions(process: &Path, directory: &Path) -> bool {
    let needle = directory.as_os_str().as_bytes();
    let has_needle = |file: &str| {
        fs::read(process.join(file)).is_ok_and(|it| it.windows(needle.len()).any(|window| window == needle))
    };
    let links_there = |link: &Path| fs::read_link(link).is_ok_and(|it| it.starts_with(directory));
    let holds_file_there = || {
        let descriptors = fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
        descriptors.into_iter().any(|it| links_there(&it.path()))
    };
    has_needle("cmdline") || has_needle("environ") || links_there(&process.join("cwd")) || holds_file_there()
}

fn describe(process: &Path) -> String {
    let line = fs::read(process.join("cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&line).replace('\0', " ").trim().to_owned()
}

fn is_our_child(pid: Pid) -> bool {
    let status = fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero())).unwrap_or_default();
    let field = |name: &str| status.lines().find_map(|it| it.strip_prefix(name)).map(str::trim);
    field("PPid:") == Some(&std::process::id().to_string()) && !field("State:").is_none_or(|it| it.starts_with('Z'))
}

/// Sockets and files with keys.
fn telling_files(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut waiting = vec![directory.to_owned()];
    while let Some(directory) = waiting.pop() {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            let Ok(kind) = entry.file_type() else { continue };
            let is_credential = CREDENTIAL_FILES.iter().any(|it| entry.file_name() == *it);
            if kind.is_dir() {
                waiting.push(entry.path());
            } else if kind.is_socket() || is_credential {
                found.push(entry.path());
            }
        }
    }
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_of_the_mount_table_are_decoded() {
        assert_eq!(unescape(r"/a\040b\134c"), Path::new("/a b\\c"));
    }

    #[test]
    fn sockets_and_credentials_are_found_and_other_files_are_not() {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("credentials")).unwrap();
        fs::write(directory.path().join("credentials/s3-csi-credentials"), "").unwrap();
        fs::write(directory.path().join("a.log"), "").unwrap();
        let _listener = std::os::unix::net::UnixListener::bind(directory.path().join("mount.sock")).unwrap();
        let expected = ["credentials/s3-csi-credentials", "mount.sock"].map(|it| directory.path().join(it));
        assert_eq!(telling_files(directory.path()), expected);
    }

    #[test]
    fn a_process_is_found_by_its_working_directory() {
        let directory = tempfile::tempdir().unwrap();
        let mut child = std::process::Command::new("sleep").arg("60").current_dir(directory.path()).spawn().unwrap();
        let found = processes_that_mention(directory.path());
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(found.iter().map(|it| it.0).collect::<Vec<_>>(), [Pid::from_child(&child)]);
    }
}
