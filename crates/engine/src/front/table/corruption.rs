//! Whatever is in the memory that an engine left behind, its successor starts: it neither panics nor searches for ever, and uses no
//! slot for two things.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::state::SPOOLED;

/// One change that no engine makes.
#[derive(Clone, Copy, Debug)]
struct Damage {
    slot: u32,
    field: Field,
    value: u64,
}

#[derive(Clone, Copy, Debug)]
enum Field {
    Kind,
    Generation,
    Owner,
    Count,
    Flags,
    TextLength,
    Next,
    Used,
}

const SLOTS: u32 = 24;

fn damage() -> impl Strategy<Value = Damage> {
    use Field::{Count, Flags, Generation, Kind, Next, Owner, TextLength, Used};
    let field = prop::sample::select(vec![Kind, Generation, Owner, Count, Flags, TextLength, Next, Used]);
    let small = 0..u64::from(SLOTS);
    let value =
        prop_oneof![4 => small.clone(), 1 => small.prop_map(|it| it | 1 << 32), 1 => any::<u64>(), 1 => Just(u64::MAX)];
    (0..SLOTS, field, value).prop_map(|(slot, field, value)| Damage { slot, field, value })
}

#[expect(clippy::cast_possible_truncation, reason = "any bits will do")]
fn apply(table: &Table, Damage { slot, field, value }: Damage) {
    const KINDS: [SlotKind; 9] = [
        SlotKind::Free,
        SlotKind::Directory,
        SlotKind::File,
        SlotKind::Continuation,
        SlotKind::ReadHandle,
        SlotKind::WriteHandle,
        SlotKind::DirectoryHandle,
        SlotKind::StagedFile,
        SlotKind::Metadata,
    ];
    let damaged = table.state.slot(slot).unwrap();
    match field {
        Field::Kind => damaged.set_kind(KINDS[value as usize % KINDS.len()]),
        Field::Generation => damaged.generation.store(value as u32, Relaxed),
        Field::Owner => damaged.owner.store(value, Relaxed),
        Field::Count => damaged.count.store(value, Relaxed),
        Field::Flags => damaged.flags.store(value as u32, Relaxed),
        Field::TextLength => damaged.text_length.store(value as u32, Relaxed),
        Field::Next => damaged.next.store(value as u32, Relaxed),
        // All four million slots take a second to look at.
        Field::Used => table.state.set_used(value as u32 % (2 * SLOTS)),
    }
}

/// Directories, files with long names, and handles.
fn table() -> Table {
    let table = Table::new(State::private().unwrap());
    table.load();
    let found = |kind, inode| EntryInfo { kind, inode, size: 7, stamp: 1000, flags: 0 };
    let directory = table.entry(ROOT, b"directory", found(SlotKind::Directory, 10)).unwrap();
    let deep = table.entry(directory, &[b'd'; 150], found(SlotKind::Directory, 11)).unwrap();
    for number in 0..3_u8 {
        let file = table.entry(deep, &[b'a' + number; 130], found(SlotKind::File, 20 + u64::from(number))).unwrap();
        let kind = if number == 0 { SlotKind::WriteHandle } else { SlotKind::ReadHandle };
        let new = NewHandle { kind, open_flags: 0, opener: 42, text: &[b'e'; 70], flags: SPOOLED };
        table.add_handle(file, new).unwrap();
        table.set_metadata(file, &[b'm'; 80]).unwrap();
    }
    table
}

/// Everything that is in use is distinct from what is used from now on.
fn check_slots_are_used_once(table: &Table, tag: &str) {
    let mut used: BTreeSet<u32> =
        table.all().filter(|(_, slot)| slot.kind() != SlotKind::Free).map(|(number, _)| number).collect();
    used.insert(ROOT_SLOT);
    let name = |number: u64| format!("{tag}{number:0>200}");
    let found = |inode| EntryInfo { kind: SlotKind::File, inode, size: 0, stamp: 0, flags: 0 };
    let new: Vec<u64> =
        (0..40).map(|number| table.entry(ROOT, name(number).as_bytes(), found(1000 + number)).unwrap()).collect();
    for (node, number) in new.iter().zip(0..) {
        let mut next = self::number(*node);
        // Its own slot, and those in which its name continues.
        while next != 0 {
            assert!(used.insert(next), "slot {next} was in use");
            next = table.slot(next).unwrap().next.load(Relaxed);
        }
        assert_eq!(table.path(*node), PathBuf::from("/").join(name(number)));
    }
}

#[test]
fn a_header_that_says_that_all_slots_are_used_is_survived() {
    let table = table();
    table.state.set_used(u32::MAX);
    let successor = Table::new(table.state.clone());
    successor.load();
    check_slots_are_used_once(&successor, "second");
}

proptest! {
    #[test]
    fn a_corrupted_table_is_loaded_and_its_slots_are_used_once(damages in prop::collection::vec(damage(), 1..12)) {
        let table = table();
        for damage in damages {
            apply(&table, damage);
        }
        let successor = Table::new(table.state.clone());
        successor.load();
        check_slots_are_used_once(&successor, "second");
        // What the kernel still asks about is answered.
        for (number, slot) in successor.all().map(|(number, slot)| (number, id(number, slot))).collect::<Vec<_>>() {
            let _ = successor.binding(slot);
            let _ = successor.path(slot);
            let _ = successor.below(slot);
            let _ = successor.drop_handle(slot);
            let _ = successor.forget(slot, u64::MAX);
            prop_assert!(number < MOST_SLOTS);
        }
        let third = Table::new(successor.state.clone());
        third.load();
        check_slots_are_used_once(&third, "third");
    }
}
