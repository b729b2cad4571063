//! Which version of a file the kernel may have pages of, so that it keeps them when the file is opened again.
//!
//! The slot of a file holds the version, which is odd; or the mark of an open that makes the kernel drop all pages, which is
//! even; or 0, if nothing is known. The kernel drops pages after it has read the reply to OPEN. So the version is recorded when
//! the first request with the new handle arrives: until then another open could be told to keep pages of an older version.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use super::Table;
use crate::state::{Slot, SlotKind};

/// A version of a file's content. The number is the same in every build, because a successor may be another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageVersion(u64);

/// What the kernel does with its pages of a file that is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelPages {
    Keep,
    Drop,
}

impl PageVersion {
    /// FNV-1a. None without an `ETag`: such a file is not in the bucket yet.
    pub fn of(etag: &str, size: u64) -> Option<Self> {
        const OFFSET_BASIS: u64 = 0xcbf2_9ce4_8422_2325;
        const PRIME: u64 = 0x0100_0000_01b3;
        let bytes = etag.bytes().chain([0]).chain(size.to_le_bytes());
        let hash = bytes.fold(OFFSET_BASIS, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(PRIME));
        (!etag.is_empty()).then_some(Self(hash | 1))
    }
}

impl Table {
    /// A file was opened for reading; called before the reply.
    pub fn open_pages(&self, node: u64, handle: u64, version: PageVersion) -> KernelPages {
        let Ok(slot) = self.current(node) else { return KernelPages::Drop };
        if slot.owner_of_locks.load(Acquire) == version.0 {
            return KernelPages::Keep;
        }
        slot.owner_of_locks.store(mark(handle), Release);
        KernelPages::Drop
    }

    /// The kernel has dropped the pages that it had before this handle was opened.
    pub fn confirm_pages(&self, node: u64, handle: u64, version: PageVersion) {
        if let Ok(slot) = self.current(node) {
            // It fails if the file was changed since, or opened once more.
            let _ = slot.owner_of_locks.compare_exchange(mark(handle), version.0, AcqRel, Relaxed);
        }
    }

    /// The content of the file changes, or may be another one.
    pub fn forget_pages(&self, node: u64) {
        if let Ok(slot) = self.current(node) {
            forget(slot);
        }
    }
}

/// The same for the slot of a node.
pub(super) fn forget(node: &Slot) {
    // The slot of a directory has its time there.
    if node.kind() == SlotKind::File {
        node.owner_of_locks.store(0, Release);
    }
}

/// Handles have no number twice, so two opens have no common mark.
fn mark(handle: u64) -> u64 {
    handle << 1
}

#[cfg(test)]
mod tests {
    use super::super::tests::{found, handle, successor, table};
    use super::super::{NewHandle, ROOT};
    use super::*;

    fn version(etag: &str) -> PageVersion {
        PageVersion::of(etag, 5).unwrap()
    }

    fn file(table: &Table) -> u64 {
        table.entry(ROOT, b"f", found(SlotKind::File, 10)).unwrap()
    }

    fn reader(table: &Table, node: u64) -> u64 {
        table.add_handle(node, NewHandle { flags: 0, ..handle(SlotKind::ReadHandle, 1) }).unwrap()
    }

    #[test]
    fn versions_are_the_same_in_every_build() {
        assert_eq!(
            PageVersion::of("\"9e107d9d372bb6826bd81d3542a419d6\"", 43),
            Some(PageVersion(0x03bd_42c3_2416_b723))
        );
        assert_eq!(PageVersion::of("", 43), None);
        assert_ne!(PageVersion::of("a", 1), PageVersion::of("a", 2));
    }

    #[test]
    fn pages_are_kept_once_the_kernel_has_dropped_older_ones() {
        let table = table();
        let node = file(&table);
        let (first, second) = (reader(&table, node), reader(&table, node));
        assert_eq!(table.open_pages(node, first, version("a")), KernelPages::Drop);
        assert_eq!(
            table.open_pages(node, second, version("a")),
            KernelPages::Drop,
            "the first open may not be complete"
        );
        table.confirm_pages(node, first, version("a"));
        assert_eq!(table.open_pages(node, second, version("a")), KernelPages::Drop, "opened once more since");
        table.confirm_pages(node, second, version("a"));
        assert_eq!(table.open_pages(node, first, version("a")), KernelPages::Keep);
        assert_eq!(table.open_pages(node, first, version("b")), KernelPages::Drop);
        table.confirm_pages(node, first, version("b"));
        assert_eq!(table.open_pages(node, second, version("a")), KernelPages::Drop);
    }

    #[test]
    fn a_change_between_open_and_first_use_is_not_overlooked() {
        let table = table();
        let node = file(&table);
        let first = reader(&table, node);
        table.open_pages(node, first, version("a"));
        table.forget_pages(node);
        table.confirm_pages(node, first, version("a"));
        assert_eq!(table.open_pages(node, first, version("a")), KernelPages::Drop);
    }

    #[test]
    fn a_successor_knows_the_version_of_the_pages() {
        let table = table();
        let node = file(&table);
        let first = reader(&table, node);
        table.open_pages(node, first, version("a"));
        let unconfirmed = successor(&table);
        let second = reader(&unconfirmed, node);
        assert_eq!(unconfirmed.open_pages(node, second, version("a")), KernelPages::Drop);
        unconfirmed.confirm_pages(node, second, version("a"));
        let confirmed = successor(&unconfirmed);
        assert_eq!(confirmed.open_pages(node, second, version("a")), KernelPages::Keep);
        assert_eq!(confirmed.open_pages(node, second, version("b")), KernelPages::Drop);
    }

    #[test]
    fn writing_and_other_objects_under_the_name_forget_the_pages() {
        let table = table();
        let node = file(&table);
        let (first, writer) = (reader(&table, node), table.add_handle(node, handle(SlotKind::WriteHandle, 1)).unwrap());
        let check = |what: &str, change: &dyn Fn()| {
            table.open_pages(node, first, version("a"));
            table.confirm_pages(node, first, version("a"));
            assert_eq!(table.open_pages(node, first, version("a")), KernelPages::Keep);
            change();
            assert_eq!(table.open_pages(node, first, version("a")), KernelPages::Drop, "{what}");
        };
        check("write", &|| table.begin_writing(table.handle(writer).unwrap()));
        check("rebind", &|| {
            let _ = table.rebind(ROOT, b"f", 11);
        });
        check("rebind_node", &|| {
            let _ = table.rebind_node(node, 12);
        });
        check("unbind", &|| drop(table.unbind_below(ROOT)));
        check("unlink", &|| table.unlinked(ROOT, b"f"));
    }
}
