//! Public types that share a name. One word means one thing in the whole workspace, so each pair needs a reason.

use std::collections::BTreeMap;

use crate::sources::Source;

/// Names that several public types may have, with the reason.
pub const ALLOWED: [(&str, &str); 3] = [
    ("Cli", "the command line of each program; never imported elsewhere"),
    ("Failpoint", "the points of one room, for the one mechanism in crates/driver/src/failpoints.rs"),
    (
        "Failpoints",
        "the alias of each room for the one type in crates/driver/src/failpoints.rs with its own failpoints",
    ),
];

/// Names of public types with the files that declare them, where there is more than one.
pub fn find<'a>(files: impl Iterator<Item = &'a Source>) -> BTreeMap<String, Vec<String>> {
    let mut declared: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for file in files {
        for name in file.public_types() {
            declared.entry(name).or_default().push(file.path.clone());
        }
    }
    declared.retain(|_, files| files.len() > 1);
    declared
}
