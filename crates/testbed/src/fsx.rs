//! fsx, a program that many file systems are tested with: random operations on one file, compared with a model.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use s3csi_core::chain::Chain;

use crate::environment::{fsx_time, tool};
use crate::fixture::Fixture;

/// Length and number of operations: of a file that is staged in memory, and of one that is staged on disk. Each takes a few
/// seconds.
const KINDS: [(u32, &str); 2] = [(3_000_000, "300"), (12_000_000, "120")];
/// One of each kind.
const USUAL_ROUNDS: u64 = 2;

fn config(length: u32) -> String {
    format!(
        "flen = {length}\n\
         [opsize]\nmax = 200000\n\
         [weights]\nclose_open = 2\ntruncate = 5\nfsync = 1\nposix_fallocate = 0\npunch_hole = 0\ncopy_file_range = 0\nsendfile = 3\n"
    )
}

/// Runs it on files of a directory: twice for a few seconds, or for as long as the environment asks for. Panics at a wrong byte.
#[track_caller]
pub fn check(fixture: &Fixture, directory: &Path) {
    let kinds = KINDS.map(|(length, operations)| {
        let path = fixture.path(&format!("fsx-{length}.toml"));
        fs::write(&path, config(length)).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        (path, operations)
    });
    let artefacts = fixture.create_directory("fsx");
    let start = Instant::now();
    let mut seed = 1;
    for (config, operations) in kinds.iter().cycle() {
        if USUAL_ROUNDS < seed && fsx_time().is_none_or(|time| time < start.elapsed()) {
            break;
        }
        let file = directory.join(format!("file-{seed}"));
        Round { seed, config, operations, artefacts: &artefacts, file: &file }.run();
        fs::remove_file(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        seed += 1;
    }
    println!("fsx: {} rounds in {:?}", seed - 1, start.elapsed());
}

/// One run of the program.
struct Round<'a> {
    seed: u64,
    config: &'a Path,
    operations: &'a str,
    /// Where it leaves the bytes that should have been in the file, if it fails.
    artefacts: &'a Path,
    file: &'a Path,
}

impl Round<'_> {
    #[track_caller]
    fn run(&self) {
        let Self { seed, config, operations, artefacts, file } = self;
        let program = tool("fsx").unwrap_or_else(|error| panic!("{}", Chain(&error)));
        let output = Command::new(program)
            .args(["-S", &seed.to_string(), "-N", operations, "-f"])
            .arg(config)
            .arg("-P")
            .arg(artefacts)
            .arg(file)
            .output()
            .unwrap_or_else(|error| panic!("fsx does not start: {error}"));
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "seed {seed}: {text}{}", String::from_utf8_lossy(&output.stderr));
    }
}
