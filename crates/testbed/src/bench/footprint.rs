//! Memory, threads and processor time of running programs, as the kernel counts them.

use std::collections::HashSet;
use std::fs;
use std::time::Duration;

use anyhow::Context as _;
use rustix::process::Pid;

/// The unit of processor times in `/proc`: 100 per second on every machine Rust and this project run on.
const TICK: Duration = Duration::from_millis(10);

/// What one process occupies right now.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    pub resident_kib: u64,
    /// Pages shared with other processes count in part only.
    pub proportional_kib: u64,
    pub threads: u64,
}

/// What a process and its descendants used up since they started.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    pub peak_kib: u64,
    pub processor: Duration,
}

pub fn memory(pid: Pid) -> anyhow::Result<Memory> {
    let maps = read(pid, "smaps_rollup")?;
    let status = read(pid, "status")?;
    Ok(Memory {
        resident_kib: number(&maps, "Rss:")?,
        proportional_kib: number(&maps, "Pss:")?,
        threads: number(&status, "Threads:")?,
    })
}

pub fn usage(root: Pid) -> anyhow::Result<Usage> {
    let mut usage = Usage::default();
    for pid in tree(root) {
        // A helper program may have ended since it was seen; its time is then counted by its parent.
        let (Ok(status), Ok(stat)) = (read(pid, "status"), read(pid, "stat")) else { continue };
        usage.peak_kib += number(&status, "VmHWM:").unwrap_or(0);
        usage.processor += processor_time(&stat).with_context(|| format!("/proc/{pid}/stat reads {stat:?}"))?;
    }
    anyhow::ensure!(usage.peak_kib > 0, "process {root} is gone");
    Ok(usage)
}

fn tree(root: Pid) -> HashSet<Pid> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|it| it.file_name().to_str()?.parse().ok().and_then(Pid::from_raw));
    let parents: Vec<(Pid, i32)> = pids.filter_map(|it| Some((it, parent(&read(it, "stat").ok()?)?))).collect();
    let mut found = HashSet::from([root]);
    loop {
        let known = |it: &i32| found.iter().any(|pid| pid.as_raw_nonzero().get() == *it);
        let more: Vec<Pid> = parents.iter().filter(|(_, parent)| known(parent)).map(|(pid, _)| *pid).collect();
        let before = found.len();
        found.extend(more);
        if found.len() == before {
            return found;
        }
    }
}

/// The fields after the name, which may itself contain anything: state, parent, …
fn fields(stat: &str) -> impl Iterator<Item = &str> {
    stat.rsplit_once(')').map_or("", |it| it.1).split_whitespace()
}

fn parent(stat: &str) -> Option<i32> {
    fields(stat).nth(1)?.parse().ok()
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
    use super::*;

    const STAT: &str = "42 (a ) b) S 7 1 1 0 -1 4194560 100 0 0 0 250 30 15 5 20 0 4 0 100 1000 10";

    #[test]
    fn parent_and_times_are_found_behind_any_name() {
        assert_eq!(parent(STAT), Some(7));
        assert_eq!(processor_time(STAT), Some(Duration::from_secs(3)));
    }

    #[test]
    fn our_own_process_is_in_its_tree() {
        let own = rustix::process::getpid();
        assert!(tree(own).contains(&own));
        assert!(usage(own).unwrap().peak_kib > 0);
        assert!(memory(own).unwrap().threads > 0);
    }
}
