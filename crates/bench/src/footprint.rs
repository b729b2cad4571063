//! Memory, threads and processor time of running programs, as the kernel counts them.

use std::fs;
use std::iter::Sum;
use std::time::Duration;

use anyhow::Context as _;
use rustix::process::Pid;

/// The unit of processor times in `/proc`: 100 per second on every machine Rust and this project run on.
const TICK: Duration = Duration::from_millis(10);

/// What one process occupies right now, or several do.
#[derive(Clone, Copy, Debug, Default)]
pub struct MemoryUsage {
    pub resident_kib: u64,
    /// Pages shared with other processes count in part only.
    pub proportional_kib: u64,
    /// Part of it that the kernel cannot drop and read again from a file, as it can with a program's code.
    pub anonymous_kib: u64,
    pub threads: u64,
}

impl Sum for MemoryUsage {
    fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
        parts.fold(Self::default(), |sum, it| Self {
            resident_kib: sum.resident_kib + it.resident_kib,
            proportional_kib: sum.proportional_kib + it.proportional_kib,
            anonymous_kib: sum.anonymous_kib + it.anonymous_kib,
            threads: sum.threads + it.threads,
        })
    }
}

/// What a process and its descendants used up since they started.
#[derive(Clone, Copy, Debug, Default)]
pub struct ResourceUsage {
    pub peak_kib: u64,
    pub processor: Duration,
}

pub fn memory(pid: Pid) -> anyhow::Result<MemoryUsage> {
    let maps = read(pid, "smaps_rollup")?;
    let status = read(pid, "status")?;
    Ok(MemoryUsage {
        resident_kib: number(&maps, "Rss:")?,
        proportional_kib: number(&maps, "Pss:")?,
        anonymous_kib: number(&maps, "Pss_Anon:")?,
        threads: number(&status, "Threads:")?,
    })
}

pub fn usage(root: Pid) -> anyhow::Result<ResourceUsage> {
    let mut usage = ResourceUsage::default();
    for pid in tree(root) {
        // A helper program may have ended since it was seen; its time is then counted by its parent.
        let (Ok(status), Ok(stat)) = (read(pid, "status"), read(pid, "stat")) else { continue };
        usage.peak_kib += number(&status, "VmHWM:").unwrap_or(0);
        usage.processor += processor_time(&stat).with_context(|| format!("/proc/{pid}/stat reads {stat:?}"))?;
    }
    anyhow::ensure!(usage.peak_kib > 0, "process {root} is gone");
    Ok(usage)
}

/// Programs called `name` among a process's descendants.
pub fn descendants_named(root: Pid, name: &str) -> Vec<Pid> {
    tree(root).into_iter().skip(1).filter(|it| program(*it) == name).collect()
}

/// Processes whose cgroups have a name in their paths that only they have, such as the ID of a container.
pub fn in_cgroup(name: &str) -> Vec<Pid> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|it| it.file_name().to_str()?.parse().ok().and_then(Pid::from_raw));
    pids.filter(|it| read(*it, "cgroup").is_ok_and(|it| it.contains(name))).collect()
}

/// What the kernel calls the program of a process: the first 15 characters of its name. Nothing if it has ended.
pub fn program(pid: Pid) -> String {
    read(pid, "comm").unwrap_or_default().trim_end().to_owned()
}

/// A process, and then all its descendants. No other process is read: to read about a stranger that is stuck in execve,
/// say because it closes a file of a frozen file system there, takes as long as that does.
pub fn tree(root: Pid) -> Vec<Pid> {
    let mut found = vec![root];
    let mut next = 0;
    while let Some(pid) = found.get(next) {
        let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        let lists = threads.filter_map(|it| fs::read_to_string(it.path().join("children")).ok());
        let children: Vec<Pid> = lists
            .flat_map(|it| it.split_whitespace().filter_map(|it| Pid::from_raw(it.parse().ok()?)).collect::<Vec<_>>())
            .collect();
        found.extend(children);
        next += 1;
    }
    found
}

/// The fields after the name, which may itself contain anything: state and so on.
fn fields(stat: &str) -> impl Iterator<Item = &str> {
    stat.rsplit_once(')').map_or("", |it| it.1).split_whitespace()
}

/// In user and in kernel mode, of the process and of the children it has waited for.
fn processor_time(stat: &str) -> Option<Duration> {
    let ticks: Vec<u32> = fields(stat).skip(11).take(4).map_while(|it| it.parse().ok()).collect();
    (ticks.len() == 4).then(|| TICK * ticks.iter().sum())
}

fn read(pid: Pid, file: &str) -> anyhow::Result<String> {
    fs::read_to_string(format!("/proc/{pid}/{file}")).with_context(|| format!("failed to read /proc/{pid}/{file}"))
}

fn number(text: &str, field: &str) -> anyhow::Result<u64> {
    let value = text.lines().find_map(|it| it.strip_prefix(field));
    value.and_then(|it| it.split_whitespace().next()?.parse().ok()).with_context(|| format!("there is no {field}"))
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use s3csi_testbed::wait::{SOON, wait_until};

    const STAT: &str = "42 (a ) b) S 7 1 1 0 -1 4194560 100 0 0 0 250 30 15 5 20 0 4 0 100 1000 10";

    #[test]
    fn times_are_found_behind_any_name() {
        assert_eq!(processor_time(STAT), Some(Duration::from_secs(3)));
    }

    #[test]
    fn a_child_is_in_our_tree() {
        let own = rustix::process::getpid();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = Pid::from_child(&child);
        // It runs before it has its name.
        let is_found = wait_until(Instant::now() + SOON, || descendants_named(own, "sleep").contains(&pid));
        let (usage, memory) = (usage(own), memory(own));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(is_found, "{pid} is not found");
        assert!(usage.unwrap().peak_kib > 0 && memory.unwrap().threads > 0);
    }
}
