//! The reference pages of the documentation equal what the programs, the chart and the sources say. `make update-generated` rewrites
//! them.
#![forbid(unsafe_code)]

mod commands;
mod compatibility;
mod errors;
mod events;
mod kill_matrix;
mod values;

use s3csi_testbed::environment::workspace;

/// Compares a generated page with the committed one, or writes it if `UPDATE` is set.
#[track_caller]
fn check_page(path: &str, generated: &str) {
    let file = workspace().join(path);
    if s3csi_testbed::environment::updates_generated_files() {
        std::fs::write(&file, generated).unwrap();
    }
    let committed = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(committed == generated, "{path} is out of date; run: make update-generated");
}

/// A file of the repository.
#[track_caller]
fn read(path: &str) -> String {
    std::fs::read_to_string(workspace().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}
