//! pjdfstest, a test of the rules of POSIX for file systems: runs it group by group and reads its report.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use serde::{Deserialize, Serialize};

use crate::environment::tool;
use crate::fixture::Fixture;
use crate::process::command;

/// The names of its modules with cases for Linux.
pub const PJDFSTEST_GROUPS: [&str; 15] = [
    "chmod",
    "chown",
    "ftruncate",
    "link",
    "mkdir",
    "mkfifo",
    "mknod",
    "open",
    "posix_fallocate",
    "rename",
    "rmdir",
    "symlink",
    "truncate",
    "unlink",
    "utimensat",
];

const CONFIG: &str = "[features]\nposix_fallocate = {}\nutime_now = {}\nutimensat = {}\n\
    [settings]\nnaptime = 0.02\nallow_remount = false\n\
    [dummy_auth]\nentries = [[\"nobody\", \"nogroup\"], [\"daemon\", \"daemon\"]]\n";

const GROUP_LIMIT: Duration = Duration::from_mins(10);

/// How one of its cases ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CaseOutcome {
    Passed,
    Skipped,
    /// What it said.
    Failed(String),
}

/// Runs all groups in a directory.
pub fn run(
    fixture: &Fixture,
    directory: &Path,
    is_selected: impl Fn(&str) -> bool,
) -> anyhow::Result<BTreeMap<String, CaseOutcome>> {
    let program = tool("pjdfstest")?;
    let config = fixture.path("pjdfstest.toml");
    fs::write(&config, CONFIG).context("failed to write the configuration of pjdfstest")?;
    let mut cases = BTreeMap::new();
    for group in PJDFSTEST_GROUPS {
        if !is_selected(group) {
            continue;
        }
        let mut command = command(&program);
        command.arg("-c").arg(&config).arg("-p").arg(directory).arg(format!("tests::{group}::")).env("NO_COLOR", "1");
        let process = fixture.start(&format!("pjdfstest-{group}"), &mut command)?;
        let Some(_) = process.wait(GROUP_LIMIT) else { bail!("group {group} of pjdfstest does not end: {process}") };
        let report = process.output();
        ensure!(report.contains("Summary"), "group {group} of pjdfstest ended without a summary: {process}");
        let found = parse(&report);
        ensure!(!found.is_empty(), "there is no group {group} of pjdfstest: {report}");
        println!("pjdfstest {group}: {}", report.lines().last().unwrap_or_default());
        cases.extend(found);
    }
    Ok(cases)
}

/// The cases of a report. A line per case, and the reason of a failure indented below it.
fn parse(report: &str) -> BTreeMap<String, CaseOutcome> {
    let mut cases = BTreeMap::new();
    let mut failed: Option<String> = None;
    for line in report.lines() {
        if let Some(text) = line.strip_prefix('\t') {
            if let Some(CaseOutcome::Failed(message)) = failed.as_ref().and_then(|it| cases.get_mut(it))
                && message.is_empty()
            {
                text.trim().clone_into(message);
            }
            continue;
        }
        failed = None;
        let mut words = line.split_whitespace();
        let (Some(name), Some(outcome)) = (words.next(), words.next()) else { continue };
        let outcome = match outcome {
            "ok" => CaseOutcome::Passed,
            "skipped" => CaseOutcome::Skipped,
            "FAILED" => {
                failed = Some(name.to_owned());
                CaseOutcome::Failed(String::new())
            }
            _ => continue,
        };
        cases.insert(name.to_owned(), outcome);
    }
    cases
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_are_read_case_by_case() {
        let report = "chmod::change_perm::regular      ok\nchmod::eftype::fifo    FAILED\n\tcalled `Result::unwrap()`: EPERM\n\tmore\n\
            mkfifo::x   skipped\n\trequires root\n\nSummary: 1 failed, 1 skipped, 1 passed, 0 expected failures, 3 total\n";
        let cases = parse(report);
        assert_eq!(cases.len(), 3);
        assert_eq!(cases["chmod::change_perm::regular"], CaseOutcome::Passed);
        assert_eq!(cases["chmod::eftype::fifo"], CaseOutcome::Failed("called `Result::unwrap()`: EPERM".into()));
        assert_eq!(cases["mkfifo::x"], CaseOutcome::Skipped);
    }
}
