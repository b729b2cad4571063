//! fsx, a program that many file systems are tested with: random operations on one file, compared with a model.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use s3csi_core::chain::Chain;

use crate::environment::{fsx_time, tool};
use crate::fixture::Fixture;

const CONFIG: &str = "flen = 3000000\n\
    [opsize]\nmax = 200000\n\
    [weights]\nclose_open = 2\ntruncate = 5\nfsync = 1\nposix_fallocate = 0\npunch_hole = 0\ncopy_file_range = 0\nsendfile = 3\n";
/// So many take a few seconds.
const OPERATIONS: &str = "300";
const USUAL_ROUNDS: u64 = 2;

/// Runs it on files of a directory: twice for a few seconds, or for as long as the environment asks for. Panics at a wrong byte.
#[track_caller]
pub fn check(fixture: &Fixture, directory: &Path) {
    let config = fixture.path("fsx.toml");
    fs::write(&config, CONFIG).unwrap_or_else(|error| panic!("{}: {error}", config.display()));
    let artefacts = fixture.create_directory("fsx");
    let start = Instant::now();
    let mut seed = 1;
    while seed <= USUAL_ROUNDS || fsx_time().is_some_and(|time| start.elapsed() < time) {
        let file = directory.join(format!("file-{seed}"));
        round(seed, &config, &artefacts, &file);
        fs::remove_file(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        seed += 1;
    }
    println!("fsx: {} rounds of {OPERATIONS} operations in {:?}", seed - 1, start.elapsed());
}

#[track_caller]
fn round(seed: u64, config: &Path, artefacts: &Path, file: &Path) {
    let program = tool("fsx").unwrap_or_else(|error| panic!("{}", Chain(&error)));
    let output = Command::new(program)
        .args(["-S", &seed.to_string(), "-N", OPERATIONS, "-f"])
        .arg(config)
        .arg("-P")
        .arg(artefacts)
        .arg(file)
        .output()
        .unwrap_or_else(|error| panic!("fsx does not start: {error}"));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "seed {seed}: {text}{}", String::from_utf8_lossy(&output.stderr));
}
