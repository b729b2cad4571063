//! The page of the kill matrix, which `make kill-matrix` writes from a run.

use s3csi_testbed::environment::workspace;
use s3csi_testbed::kill_matrix::page::{NOT_RUN, parse, render};
use s3csi_testbed::kill_matrix::{MatrixRow, MatrixStrategy, MatrixWorkload, rows};

const PAGE: &str = "docs/reliability-matrix.md";

#[test]
fn the_page_lists_every_cell_of_the_matrix() {
    let page = super::read(PAGE);
    let cells = parse(&page);
    assert!(render(&cells) == page, "{PAGE} has other rows than the code; run: make kill-matrix");
    for strategy in MatrixStrategy::ALL {
        for (victim, disruption, row) in rows(strategy) {
            let found = cells.get(&(strategy.name(), victim.name().to_owned(), disruption.name().to_owned()));
            if !matches!(row, MatrixRow::Measured(_)) {
                continue;
            }
            let found = found.unwrap_or_else(|| panic!("{strategy:?}, {victim:?}, {disruption:?} is missing"));
            for (workload, text) in MatrixWorkload::ALL.iter().zip(found) {
                let is_missing = workload.missing(strategy).is_some();
                assert!(
                    if is_missing { text == "–" } else { text.contains(" / ") || text == NOT_RUN },
                    "{strategy:?}, {victim:?}, {disruption:?}, {workload:?}: {text:?} was not measured"
                );
            }
        }
    }
}

#[test]
fn tests_that_show_a_cell_exist() {
    for strategy in MatrixStrategy::ALL {
        for (_, _, row) in rows(strategy) {
            let MatrixRow::Shown { test } = row else { continue };
            let [program, module, name] = test.split("::").collect::<Vec<_>>()[..] else { panic!("{test}") };
            let path = format!("crates/testbed/tests/{program}/{module}.rs");
            let source = std::fs::read_to_string(workspace().join(&path)).unwrap_or_default();
            assert!(source.contains(&format!("fn {name}(")), "there is no test {name} in {path}");
        }
    }
}
