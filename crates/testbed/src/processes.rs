//! Finds running programs of a test by name and by the directory they work for.

use std::fs;
use std::path::Path;

use rustix::process::{Pid, Signal, kill_process};

use crate::wait::wait_for;

/// Processes called `name` whose program lies in `directory`, or whose environment or arguments mention it; the oldest first.
pub fn running(name: &str, directory: &Path) -> Vec<Pid> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let mut found: Vec<Pid> = entries
        .filter_map(|it| it.ok()?.file_name().to_str()?.parse().ok().and_then(Pid::from_raw))
        .filter(|pid| is_running(*pid, name) && (lies_in(*pid, directory) || mentions(*pid, directory)))
        .collect();
    // Numbers begin again at the lowest when the highest was given away.
    found.sort_by_key(|it| (started(*it), it.as_raw_nonzero()));
    found
}

/// When a process was started, in the kernel's clock ticks.
fn started(pid: Pid) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(19)?.parse().ok()
}

/// Who started a process that still runs.
pub fn parent(pid: Pid) -> Option<Pid> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // `pid (name) state parent …`
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(1)?.parse().ok().and_then(Pid::from_raw)
}

/// How much memory a process has in use.
#[track_caller]
pub fn resident_kilobytes(pid: Pid) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|it| it.strip_prefix("VmRSS:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

/// Stops a process and waits until each of its threads has: the signal alone lets them go on for a moment.
#[track_caller]
pub fn freeze(pid: Pid) {
    kill_process(pid, Signal::STOP).unwrap();
    wait_for("the process stands still", || {
        let Ok(mut threads) = fs::read_dir(format!("/proc/{pid}/task")) else { return false };
        threads.all(|it| it.is_ok_and(|it| is_stopped(&it.path())))
    });
}

fn is_stopped(thread: &Path) -> bool {
    let stat = fs::read_to_string(thread.join("stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('T'))
}

/// Whether a process has this name and is not just waiting to be reaped.
fn is_running(pid: Pid, name: &str) -> bool {
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    // `pid (name) state …`; the name may contain anything, so look from the last parenthesis on.
    let Some((head, rest)) = stat.rsplit_once(')') else { return false };
    head.split_once('(').is_some_and(|(_, it)| it == name) && !rest.trim_start().starts_with(['Z', 'X'])
}

/// Looked at first: this needs no lock of the process, which one that is just ending can hold for long.
fn lies_in(pid: Pid, directory: &Path) -> bool {
    fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|it| it.starts_with(directory))
}

fn mentions(pid: Pid, directory: &Path) -> bool {
    let wanted = directory.as_os_str().as_encoded_bytes();
    ["environ", "cmdline"].iter().any(|file| {
        fs::read(format!("/proc/{pid}/{file}")).is_ok_and(|it| it.windows(wanted.len()).any(|window| window == wanted))
    })
}
