//! The page of programs, which `make compatibility` writes from a run.

use s3csi_testbed::compatibility::page::parse;
use s3csi_testbed::compatibility::{ComparedFileSystem, GROUPS, PROGRAM_REASONS, ProgramGroup};

const PAGE: &str = "docs/compatibility-programs.md";

#[test]
fn the_page_lists_every_program_with_its_results() {
    let found = parse(&super::read(PAGE));
    let names: Vec<&str> = GROUPS.iter().flat_map(ProgramGroup::programs).map(|it| it.0).collect();
    for (number, name) in names.iter().enumerate() {
        assert!(!names[..number].contains(name), "two programs are called {name:?}");
    }
    for group in GROUPS {
        for (name, _) in group.programs() {
            let cells =
                found.get(name).unwrap_or_else(|| panic!("{name:?} is missing in {PAGE}; run: make compatibility"));
            assert_eq!(cells.len(), group.file_systems.len(), "{name}");
            for (file_system, cell) in group.file_systems.iter().zip(cells) {
                assert!(!cell.is_empty(), "{name:?} was not run on {}", file_system.title());
            }
            let has_reason = PROGRAM_REASONS.iter().any(|it| it.0 == name);
            assert_eq!(cells[0] == "ok", !has_reason, "{name:?} with {}", ComparedFileSystem::Default.title());
        }
    }
}

#[test]
fn reasons_are_those_of_programs_that_exist() {
    for (program, _) in PROGRAM_REASONS {
        let is_there = GROUPS.iter().any(|group| group.programs().iter().any(|it| it.0 == *program));
        assert!(is_there, "there is no program {program:?}");
    }
}
