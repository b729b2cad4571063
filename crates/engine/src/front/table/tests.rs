//! Laws of the table, tried with arbitrary sequences of what a kernel may do.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

#[test]
fn the_root_has_the_id_that_the_protocol_fixes() {
    let table = Table::new();
    assert_eq!(table.inode(ROOT), Ok(ROOT));
    assert_eq!(table.path(ROOT), PathBuf::from("/"));
    assert_eq!(table.forget(ROOT, 1000), []);
    assert_eq!(table.inode(ROOT), Ok(ROOT));
}

#[test]
fn an_id_that_was_given_back_is_stale_for_ever() {
    let table = Table::new();
    let first = table.entry(ROOT, b"a", Kind::File, 10).unwrap();
    assert_eq!(table.forget(first, 1), [Unneeded { inode: 10, count: 1 }]);
    let second = table.entry(ROOT, b"b", Kind::File, 11).unwrap();
    assert_eq!(number(first), number(second), "the slot is used again");
    assert_eq!(table.inode(first), Err(TableError::Stale));
    assert_eq!(table.inode(second), Ok(11));
}

#[test]
fn a_node_stays_while_it_has_handles_or_children() {
    let table = Table::new();
    let directory = table.entry(ROOT, b"d", Kind::Directory, 10).unwrap();
    let file = table.entry(directory, b"f", Kind::File, 11).unwrap();
    let handle = table.add_handle(Kind::ReadHandle, file, 0).unwrap();
    assert_eq!(table.forget(directory, 1), []);
    assert_eq!(table.forget(file, 1), []);
    assert_eq!(table.inode(file), Ok(11));
    let all = [Unneeded { inode: 11, count: 1 }, Unneeded { inode: 10, count: 1 }];
    assert_eq!(table.drop_handle(handle), all);
    assert!(table.handle(handle).is_err());
}

#[test]
fn a_withdrawn_entry_leaves_no_reference() {
    let table = Table::new();
    let told = table.entry(ROOT, b"a", Kind::File, 10).unwrap();
    assert_eq!(table.entry(ROOT, b"a", Kind::File, 10), Ok(told));
    assert_eq!(table.withdraw(told), None);
    assert_eq!(table.forget(told, 1), [Unneeded { inode: 10, count: 1 }]);
    let untold = table.entry(ROOT, b"a", Kind::File, 10).unwrap();
    assert_eq!(table.withdraw(untold), None);
    assert_eq!(table.inode(untold), Err(TableError::Stale));
}

#[test]
fn a_renamed_node_keeps_its_id_and_changes_its_path() {
    let table = Table::new();
    let long = "n".repeat(255);
    let old = table.entry(ROOT, b"old", Kind::Directory, 10).unwrap();
    let new = table.entry(ROOT, b"new", Kind::Directory, 11).unwrap();
    let file = table.entry(old, b"f", Kind::File, 12).unwrap();
    assert_eq!(table.renamed(old, b"f", new, long.as_bytes()), Ok(vec![]));
    assert_eq!(table.path(file), PathBuf::from("/new").join(&long));
    assert_eq!(table.parent(file), new);
    assert_eq!(table.forget(old, 1), [Unneeded { inode: 10, count: 1 }]);
}

#[test]
fn a_name_can_get_another_inode_under_the_same_id() {
    let table = Table::new();
    let file = table.entry(ROOT, b"f", Kind::File, 10).unwrap();
    assert_eq!(table.rebind(ROOT, b"f", 10), Unneeded { inode: 10, count: 1 }, "nothing changed");
    assert_eq!(table.rebind(ROOT, b"f", 11), Unneeded { inode: 10, count: 1 });
    assert_eq!(table.inode(file), Ok(11));
    assert_eq!(table.forget(file, 1), [Unneeded { inode: 11, count: 1 }]);
    assert_eq!(table.rebind(ROOT, b"f", 12), Unneeded { inode: 12, count: 1 }, "the name is not known");
}

#[test]
fn long_names_are_kept_whole() {
    let table = Table::new();
    for length in [1, INLINE_TEXT - 1, INLINE_TEXT, INLINE_TEXT + 1, 255, 1024] {
        let name = "x".repeat(length);
        let node = table.entry(ROOT, name.as_bytes(), Kind::File, length as u64 + 100).unwrap();
        assert_eq!(table.path(node), PathBuf::from("/").join(&name));
    }
}

#[derive(Clone, Debug)]
enum Step {
    Lookup { directory: usize, inode: u64 },
    Forget { node: usize },
    Open { node: usize },
    Close { handle: usize },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        (0..8_usize, 2..12_u64).prop_map(|(directory, inode)| Step::Lookup { directory, inode }),
        (0..8_usize).prop_map(|node| Step::Forget { node }),
        (0..8_usize).prop_map(|node| Step::Open { node }),
        (0..8_usize).prop_map(|handle| Step::Close { handle }),
    ];
    prop::collection::vec(step, 0..200)
}

proptest! {
    /// What the file system beneath gave us is what we give back in the end, and never more.
    #[test]
    fn references_are_balanced(steps in steps()) {
        let table = Table::new();
        let mut held: BTreeMap<u64, u64> = BTreeMap::new();
        let mut known: Vec<u64> = Vec::new();
        let mut handles: Vec<u64> = Vec::new();
        let give_back = |held: &mut BTreeMap<u64, u64>, unneeded: Vec<Unneeded>| {
            for it in unneeded {
                let left = held.get_mut(&it.inode).map(|held| { *held -= it.count; *held });
                assert_eq!(left, Some(0));
            }
        };
        for step in steps {
            match step {
                Step::Lookup { directory, inode } => {
                    let parent = known.get(directory).copied().unwrap_or(ROOT);
                    let name = format!("name of inode {inode} {}", "long ".repeat(30));
                    let node = table.entry(parent, name.as_bytes(), Kind::Directory, inode).unwrap();
                    prop_assert_eq!(table.inode(node), Ok(inode));
                    *held.entry(inode).or_default() += 1;
                    known.push(node);
                }
                Step::Forget { node } if node < known.len() => {
                    let node = known.swap_remove(node);
                    give_back(&mut held, table.forget(node, 1));
                }
                Step::Open { node } if node < known.len() => {
                    handles.push(table.add_handle(Kind::WriteHandle, known[node], 2).unwrap());
                }
                Step::Close { handle } if handle < handles.len() => {
                    let handle = handles.swap_remove(handle);
                    give_back(&mut held, table.drop_handle(handle));
                    prop_assert!(table.handle(handle).is_err());
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
        prop_assert!(held.values().all(|it| *it == 0), "{:?}", held);
        let index = table.index();
        prop_assert_eq!(index.nodes.len(), 1);
        prop_assert_eq!((index.by_inode.len(), index.by_name.len()), (1, 0));
        prop_assert_eq!(index.free.len(), (index.next - ROOT_SLOT - 1) as usize, "every slot but the root's is free");
    }
}
