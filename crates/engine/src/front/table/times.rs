//! When names in a directory were changed here. Programs compare the time of a directory to learn whether they must list it again;
//! a store has no such time.

use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::Table;
use crate::state::SlotKind;

impl Table {
    /// A name in the directory was made, removed or renamed, or a program has set the directory's time.
    pub fn set_directory_time(&self, directory: u64, time: SystemTime) {
        if let Ok(slot) = self.current(directory)
            && slot.kind() == SlotKind::Directory
        {
            let nanoseconds = time.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
            slot.owner_of_locks.store(u64::try_from(nanoseconds).unwrap_or_default(), Release);
        }
    }

    /// None if nothing was changed here.
    pub fn directory_time(&self, directory: u64) -> Option<SystemTime> {
        let slot = self.current(directory).ok().filter(|it| it.kind() == SlotKind::Directory)?;
        let nanoseconds = slot.owner_of_locks.load(Acquire);
        (nanoseconds != 0).then(|| UNIX_EPOCH + Duration::from_nanos(nanoseconds))
    }
}

#[cfg(test)]
mod tests {
    use super::super::ROOT;
    use super::super::tests::{found, successor, table};
    use super::*;

    #[test]
    fn the_time_of_a_directory_survives_a_rename_and_the_engine() {
        let table = table();
        let time = UNIX_EPOCH + Duration::new(1_577_934_245, 67_890);
        let directory = table.entry(ROOT, b"d", found(SlotKind::Directory, 20)).unwrap();
        let file = table.entry(directory, b"f", found(SlotKind::File, 21)).unwrap();
        assert_eq!(table.directory_time(directory), None);
        for node in [directory, file, ROOT] {
            table.set_directory_time(node, time);
        }
        table.renamed(ROOT, b"d", ROOT, b"e").unwrap();
        table.forget_pages(directory);
        for table in [&table, &successor(&table)] {
            assert_eq!([directory, file, ROOT].map(|it| table.directory_time(it)), [Some(time), None, Some(time)]);
        }
    }
}
