//! The flags of all programs, as `--help` prints them.

use std::fmt::Write as _;

use s3csi_testbed::environment::product;
use s3csi_testbed::process::command;

use crate::check_page;

/// Heading, program and arguments of each command with flags of its own.
const COMMANDS: [(&str, &str, &[&str]); 6] = [
    ("s3csi node", "s3csi", &["node"]),
    ("s3csi controller", "s3csi", &["controller"]),
    ("s3csi install-engine", "s3csi", &["install-engine"]),
    ("s3csi crd", "s3csi", &["crd"]),
    ("s3csi-mounter", "s3csi-mounter", &[]),
    ("mount-s3", "mount-s3", &[]),
];

const INTRODUCTION: &str = "\
# Command line

Generated from `--help` of each program by `make update-generated`; do not edit. Flags with `[env: …]` can be set by
that variable as well. The chart sets those that matter in a cluster: [values.md](values.md).
";

#[test]
fn the_commands_page_is_what_the_programs_print() {
    let mut page = INTRODUCTION.to_owned();
    for (heading, program, arguments) in COMMANDS {
        write!(page, "\n## {heading}\n\n```text\n{}\n```\n", help(program, arguments)).unwrap();
    }
    check_page("docs/reference/commands.md", &page);
}

#[track_caller]
fn help(program: &str, arguments: &[&str]) -> String {
    // Without the environment: help texts show the values of variables that are set.
    let output = command(&product(program).unwrap())
        .env_clear()
        .env("COLUMNS", "110")
        .args(arguments)
        .arg("--help")
        .output()
        .unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<&str> = text.trim_end().lines().map(str::trim_end).collect();
    lines.join("\n")
}
