//! Which close(2) of a written file completes its upload.
//!
//! A file may be open in several processes (a shell and its command, a parent and its child), and each of them closes it. An
//! upload that the wrong one completes is truncated. So only the process that opened the file completes it; if another process
//! closes it last, RELEASE completes the upload a moment later.
//!
//! The kernel reports process ids in the pid namespace of the process that called mount(2), and 0 for processes outside it.
//! Then the lock owner identifies processes: there is one per process, shared by all its threads.

use std::fs;

use parking_lot::{Mutex, MutexGuard};

/// Ids that no process has: `S3Filesystem` does not find them in /proc and only compares them.
const OPENER: u32 = u32::MAX;
const OTHER_PROCESS: u32 = u32::MAX - 1;

/// The rule for one handle, chosen when it is opened.
#[derive(Debug)]
pub struct CloseRule {
    /// The thread that opened the file; 0 if it cannot be seen.
    opener: u32,
    owners: Mutex<Owners>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Owners {
    pub closed_before_writing: Option<u64>,
    /// The opener's, if its thread was seen with one; else the first writer's.
    pub presumed: Option<u64>,
}

impl CloseRule {
    pub fn for_process(opener: u32) -> Self {
        Self { opener, owners: Mutex::default() }
    }

    /// The rule of a handle that a previous engine opened.
    pub fn recorded(opener: u32, owners: Owners) -> Self {
        Self { opener, owners: Mutex::new(owners) }
    }

    /// The process to record for a successor.
    pub fn process(&self) -> u32 {
        self.opener
    }

    pub fn owners(&self) -> Owners {
        *self.lock()
    }

    /// The id that `S3Filesystem` records as the opener's.
    pub fn opener() -> u32 {
        OPENER
    }

    /// The kernel names the lock owner of a write only if the file bypasses the page cache.
    pub fn needs_direct_io(&self) -> bool {
        self.opener == 0
    }

    pub fn wrote(&self, lock_owner: Option<u64>) {
        if self.opener == 0 {
            let mut owners = self.lock();
            owners.presumed = owners.presumed.or(lock_owner);
        }
    }

    /// The id to pass to `S3Filesystem` for a close.
    pub fn closer(&self, pid: u32, lock_owner: u64, bytes_written: u64) -> u32 {
        let is_opener = if self.opener == 0 {
            self.is_presumed_opener(lock_owner, bytes_written)
        } else {
            self.is_opening_process(pid, lock_owner)
        };
        if is_opener { OPENER } else { OTHER_PROCESS }
    }

    fn is_opening_process(&self, pid: u32, lock_owner: u64) -> bool {
        let mut owners = self.lock();
        if pid == self.opener {
            owners.presumed = Some(lock_owner);
        }
        pid == self.opener || owners.presumed == Some(lock_owner) || is_same_process(pid, self.opener)
    }

    fn is_presumed_opener(&self, lock_owner: u64, bytes_written: u64) -> bool {
        let mut owners = self.lock();
        if bytes_written == 0 {
            // Shells, dd and touch open, duplicate and close the original at once: so this is the opener. Nothing was
            // written, so `S3Filesystem` completes nothing.
            owners.closed_before_writing.get_or_insert(lock_owner);
            return true;
        }
        owners.closed_before_writing.or(owners.presumed).is_none_or(|it| it == lock_owner)
    }

    fn lock(&self) -> MutexGuard<'_, Owners> {
        self.owners.lock()
    }
}

/// Whether two threads belong to one process, as far as we can see them.
fn is_same_process(one: u32, other: u32) -> bool {
    let process = process_of(one);
    // If the kernel's numbers are those of another namespace, they may mean threads of ours here. We open nothing of our own.
    process.is_some_and(|it| it != std::process::id()) && process == process_of(other)
}

fn process_of(thread: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{thread}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("Tgid:"))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHELL: u64 = 1;
    const COMMAND: u64 = 2;

    fn invisible() -> CloseRule {
        CloseRule::for_process(0)
    }

    fn completes(rule: &CloseRule, pid: u32, lock_owner: u64, bytes_written: u64) -> bool {
        rule.closer(pid, lock_owner, bytes_written) == CloseRule::opener()
    }

    #[test]
    fn visible_processes_are_identified_by_pid() {
        let rule = CloseRule::for_process(4_000_001);
        assert!(!completes(&rule, 4_000_002, COMMAND, 10));
        assert!(completes(&rule, 4_000_001, SHELL, 10));
        assert!(completes(&rule, 4_000_003, SHELL, 10), "another thread of the same process, by its lock owner");
        assert!(!rule.needs_direct_io());
    }

    #[test]
    fn threads_of_the_engine_never_count_as_opener() {
        let rule = CloseRule::for_process(std::process::id());
        let other_thread = std::thread::spawn(|| rustix::thread::gettid().as_raw_pid().cast_unsigned()).join().unwrap();
        assert!(!completes(&rule, other_thread, COMMAND, 10));
    }

    #[test]
    fn one_process_that_opens_writes_and_closes_completes() {
        let rule = invisible();
        rule.wrote(Some(COMMAND));
        assert!(completes(&rule, 0, COMMAND, 10));
    }

    #[test]
    fn a_child_that_closes_after_its_parent_wrote_completes_nothing() {
        let rule = invisible();
        rule.wrote(Some(SHELL));
        assert!(!completes(&rule, 0, COMMAND, 10));
        assert!(completes(&rule, 0, SHELL, 10));
    }

    #[test]
    fn the_first_that_closes_before_anything_is_written_is_the_opener() {
        let rule = invisible();
        assert!(completes(&rule, 0, SHELL, 0));
        assert!(completes(&rule, 0, COMMAND, 0), "there is nothing to complete");
        rule.wrote(Some(COMMAND));
        assert!(!completes(&rule, 0, COMMAND, 10));
        assert!(completes(&rule, 0, SHELL, 10));
    }

    #[test]
    fn a_successor_applies_the_recorded_rule() {
        let rule = invisible();
        completes(&rule, 0, SHELL, 0);
        let rule = CloseRule::recorded(rule.process(), rule.owners());
        rule.wrote(Some(COMMAND));
        assert!(!completes(&rule, 0, COMMAND, 10));
        assert!(completes(&rule, 0, SHELL, 10));
    }

    #[test]
    fn several_commands_of_a_shell_into_one_file_are_completed_by_the_shell() {
        let rule = invisible();
        completes(&rule, 0, SHELL, 0);
        rule.wrote(Some(COMMAND));
        assert!(!completes(&rule, 0, COMMAND, 10));
        rule.wrote(Some(3));
        assert!(!completes(&rule, 0, 3, 20));
        assert!(completes(&rule, 0, SHELL, 20));
    }
}
