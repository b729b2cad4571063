//! Which close(2) of a written file completes its upload.
//!
//! A file may be open in several processes (a shell and its command, a parent and its child), and each of them closes it. An
//! upload that is completed by the wrong one is truncated. The file system beneath completes when the closing process is the
//! one that opened the file, which it tells by process ids. The kernel translates those into the pid namespace of whoever
//! called mount(2), and gives 0 for a process that namespace cannot see. Then the lock owner tells processes apart: it is one
//! per process, the same for all its threads.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// Ids that no process has, so that the file system beneath does not find them in /proc and only compares them.
const OPENER: u32 = u32::MAX;
const SOMEBODY_ELSE: u32 = u32::MAX - 1;

/// The rule for one handle, chosen when it is opened.
#[derive(Debug)]
pub enum CloseRule {
    /// We see the processes of the users.
    ProcessId {
        opener: u32,
    },
    LockOwner(Mutex<Owners>),
}

#[derive(Debug, Default)]
pub struct Owners {
    closed_before_writing: Option<u64>,
    first_writer: Option<u64>,
}

impl CloseRule {
    pub fn for_process(pid: u32) -> Self {
        let is_visible = pid != 0 && Path::new("/proc").join(pid.to_string()).exists();
        if is_visible { Self::ProcessId { opener: pid } } else { Self::LockOwner(Mutex::default()) }
    }

    /// The rule of a handle that an engine before this one opened.
    pub fn recorded(opener: u32, closed_before_writing: u64) -> Self {
        if opener != 0 {
            return Self::ProcessId { opener };
        }
        let closed_before_writing = Some(closed_before_writing).filter(|it| *it != 0);
        Self::LockOwner(Mutex::new(Owners { closed_before_writing, first_writer: None }))
    }

    /// What to record for an engine after this one; 0 if lock owners decide.
    pub fn process(&self) -> u32 {
        match self {
            Self::ProcessId { opener } => *opener,
            Self::LockOwner(_) => 0,
        }
    }

    /// The lock owner that counts as opener because it closed the file before anything was written.
    pub fn closed_before_writing(&self) -> Option<u64> {
        match self {
            Self::ProcessId { .. } => None,
            Self::LockOwner(owners) => owners.lock().unwrap_or_else(PoisonError::into_inner).closed_before_writing,
        }
    }

    /// The id the file system beneath shall note as the opener's.
    pub fn opener(&self) -> u32 {
        match self {
            Self::ProcessId { opener } => *opener,
            Self::LockOwner(_) => OPENER,
        }
    }

    /// The kernel names the lock owner of a write only if the file bypasses the page cache.
    pub fn needs_direct_io(&self) -> bool {
        matches!(self, Self::LockOwner(_))
    }

    pub fn wrote(&self, lock_owner: Option<u64>) {
        if let Self::LockOwner(owners) = self {
            let mut owners = owners.lock().unwrap_or_else(PoisonError::into_inner);
            owners.first_writer = owners.first_writer.or(lock_owner);
        }
    }

    /// The id to tell the file system beneath for a close.
    pub fn closer(&self, pid: u32, lock_owner: u64, bytes_written: u64) -> u32 {
        let owners = match self {
            Self::ProcessId { .. } => return pid,
            Self::LockOwner(owners) => owners,
        };
        let mut owners = owners.lock().unwrap_or_else(PoisonError::into_inner);
        if bytes_written == 0 {
            // Shells, dd and touch open, duplicate and close the original at once: so this is the opener. Nothing was
            // written, so the file system beneath completes nothing.
            owners.closed_before_writing.get_or_insert(lock_owner);
            return OPENER;
        }
        let opener = owners.closed_before_writing.or(owners.first_writer).unwrap_or(lock_owner);
        if opener == lock_owner { OPENER } else { SOMEBODY_ELSE }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHELL: u64 = 1;
    const COMMAND: u64 = 2;

    fn invisible() -> CloseRule {
        CloseRule::for_process(0)
    }

    #[test]
    fn visible_processes_are_told_by_their_ids() {
        let rule = CloseRule::for_process(std::process::id());
        assert_eq!((rule.opener(), rule.closer(7, SHELL, 10), rule.needs_direct_io()), (std::process::id(), 7, false));
    }

    #[test]
    fn one_process_that_opens_writes_and_closes_completes() {
        let rule = invisible();
        rule.wrote(Some(COMMAND));
        assert_eq!(rule.closer(0, COMMAND, 10), rule.opener());
    }

    #[test]
    fn a_child_that_closes_after_its_parent_wrote_completes_nothing() {
        let rule = invisible();
        rule.wrote(Some(SHELL));
        assert_ne!(rule.closer(0, COMMAND, 10), rule.opener());
        assert_eq!(rule.closer(0, SHELL, 10), rule.opener());
    }

    #[test]
    fn a_successor_applies_the_recorded_rule() {
        let rule = invisible();
        rule.closer(0, SHELL, 0);
        let rule = CloseRule::recorded(rule.process(), rule.closed_before_writing().unwrap());
        rule.wrote(Some(COMMAND));
        assert_ne!(rule.closer(0, COMMAND, 10), rule.opener());
        assert_eq!(rule.closer(0, SHELL, 10), rule.opener());
        assert_eq!(CloseRule::recorded(7, 0).opener(), 7, "whether or not that process is still there");
    }

    #[test]
    fn several_commands_of_a_shell_into_one_file_are_completed_by_the_shell() {
        let rule = invisible();
        rule.closer(0, SHELL, 0);
        rule.wrote(Some(COMMAND));
        assert_ne!(rule.closer(0, COMMAND, 10), rule.opener());
        rule.wrote(Some(3));
        assert_ne!(rule.closer(0, 3, 20), rule.opener());
        assert_eq!(rule.closer(0, SHELL, 20), rule.opener());
    }
}
