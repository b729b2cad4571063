//! Describes why an engine exited, for the log and for the node plugin.

use std::fmt::Write as _;
use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};

use s3csi_handoff::EngineFailure;

use crate::engine::EngineExit;
use crate::output::shorten;

/// SIGKILL, which an engine never sends to itself.
pub const SIGKILL: i32 = 9;

const CGROUPS: &str = "/sys/fs/cgroup";

/// The number of OOM kills in the cgroup of an engine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OomKills {
    file: PathBuf,
    count: u64,
}

impl OomKills {
    /// Zero if the cgroup of the process cannot be read.
    pub fn of(process: u32) -> Self {
        let groups = fs::read_to_string(format!("/proc/{process}/cgroup")).unwrap_or_default();
        Self::read(&groups, Path::new(CGROUPS)).unwrap_or_default()
    }

    fn read(groups: &str, root: &Path) -> Option<Self> {
        files(groups, root).find_map(|file| count(&file).map(|count| Self { file, count }))
    }

    /// Whether there were further kills since. A process that has ended has no cgroup any more, so the path is kept.
    pub fn have_increased(&self) -> bool {
        count(&self.file).is_some_and(|it| it > self.count)
    }
}

fn count(file: &Path) -> Option<u64> {
    let text = fs::read_to_string(file).ok()?;
    text.lines().find_map(|it| it.strip_prefix("oom_kill "))?.trim().parse().ok()
}

/// Possible files with the count for a line `number:controllers:path` of /proc/PID/cgroup. In a container the path may be
/// that of the host, while its own cgroup is mounted at the root.
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
        let candidates = root.map(|root| [root.join(path).join(name), root.join(name)]);
        candidates.into_iter().flatten()
    })
}

/// Why the engine exited, with its last error line.
pub fn describe(exit: &EngineExit, is_out_of_memory: bool) -> String {
    let mut cause = match &exit.status {
        Ok(status) => match (status.code(), status.signal()) {
            (Some(code), _) => format!("exited with code {code}"),
            (None, Some(SIGKILL)) if is_out_of_memory => "killed by the kernel, out of memory (OOM)".to_owned(),
            (None, Some(signal)) => format!("killed by signal {signal}"),
            (None, None) => "exited".to_owned(),
        },
        Err(cause) => format!("exited with unknown status ({cause})"),
    };
    let failure = EngineFailure::from_error_output(&exit.stderr);
    if let Some(line) = failure.message.lines().next_back() {
        let _ = write!(cause, ": {line}");
    }
    shorten(&cause)
}

#[cfg(test)]
mod tests {
    use std::process::ExitStatus;

    use super::*;

    #[test]
    fn causes_end_with_the_last_error_line() {
        check(9, false, "", "killed by signal 9");
        check(9, true, "", "killed by the kernel, out of memory (OOM)");
        check(6, true, "", "killed by signal 6");
        check(1 << 8, false, "one\ntwo\n", "exited with code 1: two");
        check(1 << 8, false, "one\n{\"code\":\"other\",\"message\":\"two\"}\n", "exited with code 1: two");
    }

    #[track_caller]
    fn check(status: i32, is_out_of_memory: bool, stderr: &str, expected: &str) {
        let exit = EngineExit { status: Ok(ExitStatus::from_raw(status)), stderr: stderr.to_owned() };
        assert_eq!(describe(&exit, is_out_of_memory), expected);
    }

    #[test]
    fn kills_are_counted_in_both_versions_of_cgroups() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let read = |groups: &str| OomKills::read(groups, root.path()).unwrap_or_default();
        write("memory/a/b/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n");
        write("c/memory.events", "low 0\noom 2\noom_kill 1\n");
        let (v1, v2) = (read("9:pids:/x\n4:memory:/a/b\n0::/\n"), read("0::/c\n"));
        assert_eq!((v1.count, v2.count), (3, 1));
        assert!(!v2.have_increased());
        write("c/memory.events", "low 0\noom 2\noom_kill 2\n");
        assert!(v2.have_increased() && !v1.have_increased());
        assert_eq!(read("nonsense"), OomKills::default());
        assert!(!read("nonsense").have_increased());
    }
}
