//! Keeps the memory of programs that hold keys from others.

use rustix::process::{DumpableBehavior, Resource, Rlimit, set_dumpable_behavior, setrlimit};

/// A dump of this process's memory would outlive it on a disk.
pub fn forbid_core_dumps() {
    // It only takes away, which never fails.
    let _ = setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) });
}

/// Processes of the same user, such as the engines of other volumes, can neither attach to this one (`ptrace`) nor read its memory
/// and its environment. The files in its `/proc` directory belong to root from now on.
pub fn forbid_inspection() {
    // It only takes away, which never fails.
    let _ = set_dumpable_behavior(DumpableBehavior::NotDumpable);
}

#[cfg(test)]
mod tests {
    use rustix::process::{dumpable_behavior, getrlimit};

    use super::*;

    #[test]
    fn a_process_can_be_neither_dumped_nor_inspected() {
        forbid_core_dumps();
        forbid_inspection();
        assert_eq!(getrlimit(Resource::Core), Rlimit { current: Some(0), maximum: Some(0) });
        assert_eq!(dumpable_behavior(), Ok(DumpableBehavior::NotDumpable));
    }
}
