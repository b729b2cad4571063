//! Laws of the table, tried with arbitrary sequences of what a kernel may do.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::state::{INCOMPLETE, INLINE_TEXT, POISONED, SPOOLED};

pub(super) fn table() -> Table {
    let table = Table::new(State::private().unwrap());
    table.load();
    table
}

/// What a successor finds after a crash.
pub(super) fn successor(table: &Table) -> Table {
    let table = Table::new(table.state.clone());
    table.load();
    table
}

pub(super) fn found(kind: SlotKind, inode: u64) -> EntryInfo {
    EntryInfo { kind, inode, size: 7, stamp: 1000, flags: 0 }
}

pub(super) fn handle(kind: SlotKind, open_flags: i32) -> NewHandle<'static> {
    NewHandle { kind, open_flags, opener: 42, text: b"\"etag\"", flags: 0 }
}

fn bound_to(table: &Table, node: u64) -> Result<u64, TableError> {
    match table.binding(node)? {
        Binding::Bound(inode) => Ok(inode),
        Binding::Unresolved { .. } => Ok(0),
    }
}

#[test]
fn the_root_has_the_id_that_the_protocol_fixes() {
    let table = table();
    assert_eq!(bound_to(&table, ROOT), Ok(ROOT));
    assert_eq!(table.path(ROOT), PathBuf::from("/"));
    assert_eq!(table.forget(ROOT, 1000), []);
    assert_eq!(bound_to(&table, ROOT), Ok(ROOT));
}

#[test]
fn an_id_that_was_given_back_is_stale_for_ever() {
    let table = table();
    let first = table.entry(ROOT, b"a", found(SlotKind::File, 10)).unwrap();
    assert_eq!(table.forget(first, 1), [InodeReferences { inode: 10, count: 1 }]);
    let second = table.entry(ROOT, b"b", found(SlotKind::File, 11)).unwrap();
    assert_eq!(number(first), number(second), "the slot is used again");
    assert_eq!(bound_to(&table, first), Err(TableError::Stale));
    assert_eq!(bound_to(&table, second), Ok(11));
}

#[test]
fn a_node_stays_while_it_has_handles_or_children() {
    let table = table();
    let directory = table.entry(ROOT, b"d", found(SlotKind::Directory, 10)).unwrap();
    let file = table.entry(directory, b"f", found(SlotKind::File, 11)).unwrap();
    let handle = table.add_handle(file, handle(SlotKind::ReadHandle, 0)).unwrap();
    assert_eq!(table.forget(directory, 1), []);
    assert_eq!(table.forget(file, 1), []);
    assert_eq!(bound_to(&table, file), Ok(11));
    let all = [InodeReferences { inode: 11, count: 1 }, InodeReferences { inode: 10, count: 1 }];
    assert_eq!(table.drop_handle(handle), all);
    assert!(table.handle(handle).is_err());
}

#[test]
fn a_withdrawn_entry_leaves_no_reference() {
    let table = table();
    let told = table.entry(ROOT, b"a", found(SlotKind::File, 10)).unwrap();
    assert_eq!(table.entry(ROOT, b"a", found(SlotKind::File, 10)), Ok(told));
    assert!(table.withdraw(told).is_empty());
    assert_eq!(table.forget(told, 1), [InodeReferences { inode: 10, count: 1 }]);
    let untold = table.entry(ROOT, b"a", found(SlotKind::File, 10)).unwrap();
    assert!(table.withdraw(untold).is_empty());
    assert_eq!(bound_to(&table, untold), Err(TableError::Stale));
}

#[test]
fn a_renamed_node_keeps_its_id_and_changes_its_path() {
    let table = table();
    let long = "n".repeat(255);
    let old = table.entry(ROOT, b"old", found(SlotKind::Directory, 10)).unwrap();
    let new = table.entry(ROOT, b"new", found(SlotKind::Directory, 11)).unwrap();
    let file = table.entry(old, b"f", found(SlotKind::File, 12)).unwrap();
    assert_eq!(table.renamed(old, b"f", new, long.as_bytes()), Ok(vec![]));
    assert_eq!(table.path(file), PathBuf::from("/new").join(&long));
    assert_eq!(table.parent(file), new);
    assert_eq!(table.forget(old, 1), [InodeReferences { inode: 10, count: 1 }]);
}

#[test]
fn a_name_can_get_another_inode_under_the_same_id() {
    let table = table();
    let file = table.entry(ROOT, b"f", found(SlotKind::File, 10)).unwrap();
    assert_eq!(table.rebind(ROOT, b"f", 10), InodeReferences { inode: 10, count: 1 }, "nothing changed");
    assert_eq!(table.rebind(ROOT, b"f", 11), InodeReferences { inode: 10, count: 1 });
    assert_eq!(bound_to(&table, file), Ok(11));
    assert_eq!(table.forget(file, 1), [InodeReferences { inode: 11, count: 1 }]);
    assert_eq!(table.rebind(ROOT, b"f", 12), InodeReferences { inode: 12, count: 1 }, "the name is not known");
}

#[test]
fn long_names_are_kept_whole() {
    let table = table();
    for length in [1, INLINE_TEXT - 1, INLINE_TEXT, INLINE_TEXT + 1, 255, 1024] {
        let name = "x".repeat(length);
        let node = table.entry(ROOT, name.as_bytes(), found(SlotKind::File, length as u64 + 100)).unwrap();
        assert_eq!(table.path(node), PathBuf::from("/").join(&name));
    }
}

#[test]
fn a_successor_finds_nodes_by_their_names_under_the_same_ids() {
    let table = table();
    let long = "n".repeat(255);
    let directory = table.entry(ROOT, b"d", found(SlotKind::Directory, 10)).unwrap();
    let file = table.entry(directory, long.as_bytes(), found(SlotKind::File, 11)).unwrap();
    let table = successor(&table);
    let lost =
        Binding::Unresolved { parent: directory, name: long.clone().into(), kind: SlotKind::File, is_new: false };
    assert_eq!(table.binding(file), Ok(lost));
    assert_eq!(table.entry(ROOT, b"d", found(SlotKind::Directory, 20)), Ok(directory));
    assert_eq!(table.entry(directory, long.as_bytes(), found(SlotKind::File, 21)), Ok(file));
    assert_eq!((bound_to(&table, directory), bound_to(&table, file)), (Ok(20), Ok(21)));
    // Two references of the kernel, one of them told by the dead engine.
    assert_eq!(table.forget(file, 1), []);
    assert_eq!(table.forget(file, 1), [InodeReferences { inode: 21, count: 1 }]);
}

#[test]
fn a_node_that_is_found_again_twice_is_bound_once() {
    let table = table();
    let file = table.entry(ROOT, b"f", found(SlotKind::File, 11)).unwrap();
    let table = successor(&table);
    assert_eq!(table.bind(file, 21, SlotKind::Directory), Err(TableError::Stale));
    assert_eq!(table.bind(file, 21, SlotKind::File), Ok(21));
    assert_eq!(table.bind(file, 21, SlotKind::File), Ok(21));
    assert_eq!(table.bind(file, 22, SlotKind::File), Err(TableError::Stale));
    assert_eq!(table.forget(file, 1), [InodeReferences { inode: 21, count: 2 }]);
}

#[test]
fn a_file_that_was_replaced_during_a_crash_gets_another_id() {
    let table = table();
    let old = table.entry(ROOT, b"f", found(SlotKind::File, 11)).unwrap();
    let table = successor(&table);
    let new = table.entry(ROOT, b"f", EntryInfo { size: 8, ..found(SlotKind::File, 21) }).unwrap();
    assert_ne!(old, new);
    assert_eq!(table.binding(old), Err(TableError::Stale));
    let table = successor(&table);
    assert_eq!(table.binding(old), Err(TableError::Stale));
    assert_eq!(table.entry(ROOT, b"f", EntryInfo { size: 8, ..found(SlotKind::File, 31) }), Ok(new));
}

#[test]
fn names_that_are_gone_are_not_found_by_a_successor() {
    let table = table();
    let made = EntryInfo { flags: NEW, ..found(SlotKind::Directory, 11) };
    let removed = table.entry(ROOT, b"removed", made).unwrap();
    let moved = table.entry(ROOT, b"old", found(SlotKind::File, 12)).unwrap();
    let replaced = table.entry(ROOT, b"new", found(SlotKind::File, 13)).unwrap();
    table.unlinked(ROOT, b"removed");
    table.renamed(ROOT, b"old", ROOT, b"new").unwrap();
    let table = successor(&table);
    assert_eq!(table.binding(removed), Err(TableError::Stale));
    assert_eq!(table.binding(replaced), Err(TableError::Stale));
    assert_eq!(table.path(moved), PathBuf::from("/new"));
    assert!(table.all_lost_new().is_empty());
}

#[test]
fn what_was_made_and_not_stored_is_known_to_a_successor() {
    let table = table();
    let made = |kind, inode| EntryInfo { flags: NEW, ..found(kind, inode) };
    let directory = table.entry(ROOT, b"d", made(SlotKind::Directory, 10)).unwrap();
    let empty = table.entry(directory, b"empty", made(SlotKind::File, 11)).unwrap();
    let other = table.entry(ROOT, b"other", made(SlotKind::Directory, 12)).unwrap();
    let stored = table.entry(other, b"stored", made(SlotKind::File, 13)).unwrap();
    table.stored(stored);
    let table = successor(&table);
    let mut lost = table.all_lost_new();
    lost.sort_unstable();
    assert_eq!(lost, [directory, empty]);
    assert_eq!(table.lost_new(ROOT, b"d"), Some(directory));
    assert_eq!(table.lost_new(ROOT, b"other"), None);
    table.bind(directory, 20, SlotKind::Directory).unwrap();
    assert_eq!(table.lost_new(ROOT, b"d"), None);
}

#[test]
fn only_data_that_is_not_stored_poisons_a_handle() {
    let table = table();
    let handle_of = |inode: u64| {
        let name = inode.to_string();
        let node =
            table.entry(ROOT, name.as_bytes(), EntryInfo { flags: NEW, ..found(SlotKind::File, inode) }).unwrap();
        table.add_handle(node, handle(SlotKind::WriteHandle, 1)).unwrap()
    };
    let (unused, written, stored) = (handle_of(10), handle_of(11), handle_of(12));
    for number in [written, stored] {
        table.begin_writing(table.handle(number).unwrap());
    }
    assert_eq!(table.state.unstored().load(Acquire), 2);
    table.end_writing(table.handle(stored).unwrap());
    assert_eq!(table.state.unstored().load(Acquire), 1);

    let table = successor(&table);
    let is_poisoned = |number| table.handle(number).unwrap().has(POISONED);
    assert_eq!([unused, written, stored].map(is_poisoned), [false, true, false]);
    assert_eq!(table.state.unstored().load(Acquire), 0);
    assert_eq!(table.lost_new(ROOT, b"11"), None, "its name is lost with its data");
    assert!(table.lost_new(ROOT, b"10").is_some());
    assert_eq!(table.etag(table.handle(unused).unwrap()), b"\"etag\"");
}

fn read_spooled(table: &Table, handle: u64) -> Vec<u8> {
    let length = table.handle(handle).unwrap().count.load(Acquire);
    let mut bytes = vec![0; usize::try_from(length).unwrap()];
    table.read_spooled(handle, 0, &mut bytes).unwrap();
    bytes
}

fn kept_handle(table: &Table, inode: u64) -> u64 {
    let found = EntryInfo { flags: NEW, ..found(SlotKind::File, inode) };
    let node = table.entry(ROOT, inode.to_string().as_bytes(), found).unwrap();
    table.add_handle(node, NewHandle { flags: SPOOLED, ..handle(SlotKind::WriteHandle, 1) }).unwrap()
}

fn write(table: &Table, handle: u64, data: &[u8]) {
    let slot = table.handle(handle).unwrap();
    table.begin_writing(slot);
    table.wrote(handle, slot, data);
}

#[test]
fn what_is_kept_of_a_file_is_known_to_a_successor_and_poisons_nothing() {
    let table = table();
    let (begun, written) = (kept_handle(&table, 10), kept_handle(&table, 11));
    // As if the engine had died inside the first write.
    table.begin_writing(table.handle(begun).unwrap());
    write(&table, written, b"one ");
    write(&table, written, b"two");
    assert_eq!(table.state.unstored().load(Acquire), 0, "nothing would be lost");
    let table = successor(&successor(&table));
    assert_eq!(table.spooled_by_previous_engine(), [begun, written]);
    assert_eq!((read_spooled(&table, begun), read_spooled(&table, written)), (Vec::new(), b"one two".to_vec()));
    assert!([begun, written].iter().all(|it| !table.handle(*it).unwrap().has(POISONED)));
    assert!(table.lost_new(ROOT, b"11").is_some());
}

#[test]
fn a_file_that_is_too_long_to_be_kept_is_at_risk_until_it_is_stored() {
    let table = table();
    let handle = kept_handle(&table, 10);
    write(&table, handle, &vec![1; 8 << 20]);
    assert_eq!(table.state.unstored().load(Acquire), 0);
    write(&table, handle, b"x");
    assert_eq!(table.state.unstored().load(Acquire), 1);
    let slot = table.handle(handle).unwrap();
    assert!(!slot.has(SPOOLED));
    table.end_writing(slot);
    assert_eq!(table.state.unstored().load(Acquire), 0);
    write(&table, handle, b"y");
    let table = successor(&table);
    assert!(table.handle(handle).unwrap().has(POISONED));
}

#[test]
fn a_file_with_a_copy_stays_the_same_node_when_its_object_is_replaced() {
    let table = table();
    let node = table.entry(ROOT, b"file", found(SlotKind::File, 10)).unwrap();
    let copy = table.add_staged(node, b"\"etag\"").unwrap();
    assert_eq!(table.entry(ROOT, b"file", EntryInfo { size: 8, ..found(SlotKind::File, 11) }), Ok(node));
    assert_eq!(bound_to(&table, node), Ok(11));
    assert!(!table.is_unlinked(node));
    assert_eq!(table.forget(node, 1), [InodeReferences { inode: 10, count: 1 }]);
    table.drop_staged(copy);
    let other = table.entry(ROOT, b"file", found(SlotKind::File, 12)).unwrap();
    assert_ne!(other, node, "without a copy it is another version");
}

#[test]
fn a_copy_that_was_being_made_or_dropped_is_gone_for_a_successor() {
    let table = table();
    let node = table.entry(ROOT, b"file", found(SlotKind::File, 10)).unwrap();
    let copy = table.add_staged(node, b"\"etag\"").unwrap();
    table.staged(copy).unwrap().clear(INCOMPLETE);
    let table = successor(&table);
    assert_eq!(table.all_staged(), [(copy, node)]);
    table.staged(copy).unwrap().set(INCOMPLETE);
    assert!(successor(&table).all_staged().is_empty());
}

proptest! {
    /// Whatever is written, closed and crashed in between: what is kept is what was written.
    #[test]
    fn a_successor_reads_what_was_written(
        pieces in prop::collection::vec((0..4_usize, 0..9000_usize, prop::bool::ANY), 0..40),
    ) {
        let mut table = table();
        let mut open: Vec<(u64, Vec<u8>)> = (10..14).map(|it| (kept_handle(&table, it), Vec::new())).collect();
        for (number, (file, length, is_crash)) in (0_u8..).zip(pieces) {
            let piece = vec![number; length];
            if length == 0 {
                table.drop_handle(open[file].0);
                open[file] = (kept_handle(&table, 20 + u64::from(number)), Vec::new());
            } else {
                write(&table, open[file].0, &piece);
                open[file].1.extend(piece);
            }
            if is_crash {
                table = successor(&table);
            }
        }
        for (handle, expected) in &open {
            prop_assert!(read_spooled(&table, *handle) == *expected);
        }
    }
}

#[test]
fn nodes_that_never_reached_the_kernel_are_free_again() {
    let table = table();
    let kept = table.entry(ROOT, b"kept", found(SlotKind::File, 10)).unwrap();
    let used = table.state.used();
    let name = "x".repeat(300);
    // As if the engine had died right before it counted the reference.
    let untold = table.entry(ROOT, name.as_bytes(), found(SlotKind::File, 11)).unwrap();
    table.current(untold).unwrap().count.store(0, Relaxed);
    let orphan = table.allocate(&mut table.index()).unwrap();
    table.slot(orphan).unwrap().set_kind(SlotKind::Continuation);
    let table = successor(&table);
    assert_eq!(table.binding(untold), Err(TableError::Stale));
    assert!(table.binding(kept).is_ok());
    assert_eq!(table.index().free.len(), (table.state.used() - used) as usize);
}

#[derive(Clone, Debug)]
enum Step {
    Lookup { directory: usize, inode: u64 },
    Forget { node: usize },
    Open { node: usize },
    Close { handle: usize },
    Crash,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        (0..8_usize, 2..12_u64).prop_map(|(directory, inode)| Step::Lookup { directory, inode }),
        (0..8_usize).prop_map(|node| Step::Forget { node }),
        (0..8_usize).prop_map(|node| Step::Open { node }),
        (0..8_usize).prop_map(|handle| Step::Close { handle }),
        Just(Step::Crash),
    ];
    prop::collection::vec(step, 0..200)
}

proptest! {
    /// What `S3Filesystem` gave us is what we give back in the end, and never more.
    #[test]
    fn references_are_balanced(steps in steps()) {
        let mut table = table();
        let mut held: BTreeMap<u64, u64> = BTreeMap::new();
        let mut known: Vec<u64> = Vec::new();
        let mut handles: Vec<u64> = Vec::new();
        let give_back = |held: &mut BTreeMap<u64, u64>, released: Vec<InodeReferences>| {
            for it in released {
                let left = held.remove(&it.inode).map(|held| held - it.count);
                assert_eq!(left, Some(0));
            }
        };
        for step in steps {
            match step {
                Step::Lookup { directory, inode } => {
                    let parent = known.get(directory).copied().unwrap_or(ROOT);
                    let name = format!("name of inode {inode} {}", "long ".repeat(30));
                    let node = table.entry(parent, name.as_bytes(), found(SlotKind::Directory, inode)).unwrap();
                    prop_assert_eq!(bound_to(&table, node), Ok(inode));
                    *held.entry(inode).or_default() += 1;
                    known.push(node);
                }
                Step::Forget { node } if node < known.len() => {
                    let node = known.swap_remove(node);
                    give_back(&mut held, table.forget(node, 1));
                }
                Step::Open { node } if node < known.len() => {
                    handles.push(table.add_handle(known[node], handle(SlotKind::WriteHandle, 2)).unwrap());
                }
                Step::Close { handle } if handle < handles.len() => {
                    let handle = handles.swap_remove(handle);
                    give_back(&mut held, table.drop_handle(handle));
                    prop_assert!(table.handle(handle).is_err());
                }
                Step::Crash => {
                    // `S3Filesystem` dies with the engine; the kernel's references do not.
                    table = successor(&table);
                    held.clear();
                }
                Step::Forget { .. } | Step::Open { .. } | Step::Close { .. } => {}
            }
        }
        for handle in handles {
            give_back(&mut held, table.drop_handle(handle));
        }
        for node in known {
            give_back(&mut held, table.forget(node, 1));
        }
        prop_assert!(held.is_empty(), "{:?}", held);
        let index = table.index();
        prop_assert_eq!(index.nodes.len(), 1);
        prop_assert_eq!((index.by_inode.len(), index.by_name.len()), (1, 0));
        prop_assert_eq!(index.free.len(), (table.state.used() - ROOT_SLOT - 1) as usize, "every slot but the root's is free");
    }
}
