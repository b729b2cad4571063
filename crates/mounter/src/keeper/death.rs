//! Why an engine has ended, in words for the log and for the node.

use std::fmt::Write as _;
use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};

use crate::engine::Ended;
use crate::output::shorten;

/// The number of SIGKILL. An engine never sends it to itself.
pub const KILL: i32 = 9;

const CGROUPS: &str = "/sys/fs/cgroup";

/// How often the kernel has killed somebody in the cgroup of an engine because its memory was used up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryKills {
    file: PathBuf,
    count: u64,
}

impl MemoryKills {
    /// Nothing if the cgroup of that process cannot be looked at.
    pub fn of(process: u32) -> Self {
        let groups = fs::read_to_string(format!("/proc/{process}/cgroup")).unwrap_or_default();
        Self::read(&groups, Path::new(CGROUPS)).unwrap_or_default()
    }

    fn read(groups: &str, root: &Path) -> Option<Self> {
        files(groups, root).find_map(|file| count(&file).map(|count| Self { file, count }))
    }

    /// Whether somebody was killed since. A process that has ended has no cgroup any more, so the same one is asked.
    pub fn are_more_now(&self) -> bool {
        count(&self.file).is_some_and(|it| it > self.count)
    }
}

fn count(file: &Path) -> Option<u64> {
    let text = fs::read_to_string(file).ok()?;
    text.lines().find_map(|it| it.strip_prefix("oom_kill "))?.trim().parse().ok()
}

/// Where the count may be found for a line `number:controllers:path` of /proc/PID/cgroup. In a container the path may be
/// that of the host, and what is mounted is its own cgroup.
fn files(groups: &str, root: &Path) -> impl Iterator<Item = PathBuf> {
    groups.lines().flat_map(move |line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let controllers = fields.next().unwrap_or_default();
        let path = fields.next().unwrap_or_default().trim_start_matches('/').trim_end_matches(" (deleted)");
        let (root, name) = match controllers {
            "" => (Some(root.to_owned()), "memory.events"),
            "memory" => (Some(root.join("memory")), "memory.oom_control"),
            _ => (None, ""),
        };
        let places = root.map(|root| [root.join(path).join(name), root.join(name)]);
        places.into_iter().flatten()
    })
}

/// What the engine died of.
pub fn cause(ended: &Ended, is_out_of_memory: bool) -> String {
    let mut cause = match &ended.status {
        Ok(status) => match (status.code(), status.signal()) {
            (Some(code), _) => format!("ended with code {code}"),
            (None, Some(KILL)) if is_out_of_memory => "killed by the kernel, out of memory (OOM)".to_owned(),
            (None, Some(signal)) => format!("ended by signal {signal}"),
            (None, None) => "ended".to_owned(),
        },
        Err(cause) => format!("ended in an unknown way ({cause})"),
    };
    if let Some(words) = ended.stderr.lines().next_back() {
        let _ = write!(cause, ": {words}");
    }
    shorten(&cause)
}

#[cfg(test)]
mod tests {
    use std::process::ExitStatus;

    use super::*;

    #[test]
    fn a_death_is_described_with_the_last_words() {
        check(9, false, "", "ended by signal 9");
        check(9, true, "", "killed by the kernel, out of memory (OOM)");
        check(6, true, "", "ended by signal 6");
        check(1 << 8, false, "one\ntwo\n", "ended with code 1: two");
    }

    #[track_caller]
    fn check(status: i32, is_out_of_memory: bool, stderr: &str, expected: &str) {
        let ended = Ended { status: Ok(ExitStatus::from_raw(status)), stderr: stderr.to_owned() };
        assert_eq!(cause(&ended, is_out_of_memory), expected);
    }

    #[test]
    fn kills_are_counted_in_both_versions_of_cgroups() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let read = |groups: &str| MemoryKills::read(groups, root.path()).unwrap_or_default();
        write("memory/a/b/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n");
        write("c/memory.events", "low 0\noom 2\noom_kill 1\n");
        let (old, new) = (read("9:pids:/x\n4:memory:/a/b\n0::/\n"), read("0::/c\n"));
        assert_eq!((old.count, new.count), (3, 1));
        assert!(!new.are_more_now());
        write("c/memory.events", "low 0\noom 2\noom_kill 2\n");
        assert!(new.are_more_now() && !old.are_more_now());
        assert_eq!(read("nonsense"), MemoryKills::default());
        assert!(!read("nonsense").are_more_now());
    }
}
