//! docs/compatibility-programs.md.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::file_systems::ComparedFileSystem;
use super::pjdfstest::{CaseOutcome, PJDFSTEST_GROUPS};
use super::reasons::{CASE_REASONS, PROGRAM_REASONS};
use super::results::{CompatibilityResults, GROUPS};
use crate::programs::STRESSORS;

const HEAD: &str = "# Programs on a volume

This page lists programs that were run on a volume, on s3fs and on rclone, against the same S3 server (versitygw).
`make compatibility` writes it. [Compatibility](compatibility.md) describes the behaviour in words.

Each program is a shell script in `crates/testbed/src/programs` that checks its own result, in an empty directory; all
of them succeed on a local disk. The engine is mounted with `--allow-delete --allow-overwrite --allow-other` and, in the
columns that say so, with further options; s3fs with its defaults, rclone with `--vfs-cache-mode full` and
`--vfs-write-back 0s`. `--writes sequential --metadata refuse` is the behaviour of AWS's `mount-s3`. Empty cells were
not run.
";

const CASES_HEAD: &str = "
## pjdfstest

[pjdfstest](https://crates.io/crates/pjdfstest) tests rules of POSIX one by one. It runs as root on a volume with the
default options; cases that the suite itself skips on Linux do not count.

| group | passed | failed |
|---|---|---|
";

/// The text of a cell.
const WORKS: &str = "ok";
const FAILS: &str = "fails";

/// The whole page.
pub fn render(results: &CompatibilityResults) -> String {
    let mut page = HEAD.to_owned();
    let _ = writeln!(page, "\nVersions: {}.", results.versions);
    render_summary(&mut page, results);
    for group in GROUPS {
        let _ = writeln!(page, "\n## {}\n\n| |{}", group.title, titles(group.file_systems));
        let _ = writeln!(page, "|---|{}", "---|".repeat(group.file_systems.len()));
        for (name, _) in group.programs() {
            let _ = write!(page, "| {name} |");
            for file_system in group.file_systems {
                let _ = write!(page, " {} |", cell(results.works(name, *file_system)));
            }
            page.push('\n');
        }
    }
    page.push_str("\nStressors of the class \"filesystem\" that are not run:\n\n| stressor | why |\n|---|---|\n");
    for (name, reason) in STRESSORS {
        if let Some(reason) = reason {
            let _ = writeln!(page, "| `{name}` | {reason} |");
        }
    }
    page.push_str("\n## Why programs fail with the default options\n\n| program | why |\n|---|---|\n");
    for (program, reason) in PROGRAM_REASONS {
        let _ = writeln!(page, "| {program} | {reason} |");
    }
    render_cases(&mut page, results);
    page
}

fn titles(file_systems: &[ComparedFileSystem]) -> String {
    file_systems.iter().fold(String::new(), |titles, it| titles + " " + it.title() + " |")
}

const fn cell(works: Option<bool>) -> &'static str {
    match works {
        Some(true) => WORKS,
        Some(false) => FAILS,
        None => "",
    }
}

fn render_summary(page: &mut String, results: &CompatibilityResults) {
    let file_systems = ComparedFileSystem::ON_PAGE;
    let _ = writeln!(page, "\n| programs that work |{}", titles(&file_systems));
    let _ = writeln!(page, "|---|{}", "---|".repeat(file_systems.len()));
    for group in GROUPS {
        let _ = write!(page, "| {} |", group.title);
        for file_system in file_systems {
            let run: Vec<bool> =
                group.programs().iter().filter_map(|(name, _)| results.works(name, file_system)).collect();
            if run.is_empty() {
                page.push_str("  |");
            } else {
                let _ = write!(page, " {} of {} |", run.iter().filter(|it| **it).count(), run.len());
            }
        }
        page.push('\n');
    }
}

fn render_cases(page: &mut String, results: &CompatibilityResults) {
    page.push_str(CASES_HEAD);
    for group in PJDFSTEST_GROUPS {
        let of_group = results.cases.iter().filter(|(name, _)| group_of(name) == group);
        let (mut passed, mut failed) = (0, 0);
        for (_, outcome) in of_group {
            match outcome {
                CaseOutcome::Passed => passed += 1,
                CaseOutcome::Failed(_) => failed += 1,
                CaseOutcome::Skipped => {}
            }
        }
        let _ = writeln!(page, "| `{group}` | {passed} | {failed} |");
    }
    page.push_str("\nAll cases that fail, by reason:\n");
    let failed = results.failed_cases();
    for reason in CASE_REASONS {
        let Some(names) = failed.get(reason.reason) else { continue };
        let _ = writeln!(page, "\n**{}** ({} cases)\n", reason.reason, names.len());
        let mut groups: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for name in names {
            groups.entry(group_of(name)).or_default().push(name);
        }
        for (group, names) in groups {
            let shortened: Vec<String> = names.iter().map(|it| format!("`{}`", short(it))).collect();
            page.push_str(&wrapped(&format!("- {group}: {}", shortened.join(", "))));
        }
    }
}

fn group_of(case: &str) -> &str {
    case.split("::").next().unwrap_or_default()
}

/// A name without its group.
fn short(case: &str) -> &str {
    case.split_once("::").map_or(case, |it| it.1)
}

/// One entry of a list, in lines of 120 columns.
fn wrapped(text: &str) -> String {
    const COLUMNS: usize = 120;
    let mut lines = String::new();
    let mut column = 0;
    for word in text.split(' ') {
        if column > 0 && COLUMNS < column + 1 + word.len() {
            lines.push_str("\n ");
            column = 1;
        }
        if column > 0 {
            lines.push(' ');
            column += 1;
        }
        lines.push_str(word);
        column += word.len();
    }
    lines + "\n"
}

/// What a page says of the programs, for a comparison with their list: the cells of each, by name.
pub fn parse(page: &str) -> BTreeMap<String, Vec<String>> {
    let mut programs = BTreeMap::new();
    for line in page.lines().filter(|it| it.starts_with("| ") && !it.starts_with("| |")) {
        let columns: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let cells = &columns[1..];
        if cells.iter().all(|it| [WORKS, FAILS, ""].contains(it)) {
            programs.insert(columns[0].to_owned(), cells.iter().map(|it| (*it).to_owned()).collect());
        }
    }
    programs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lists_are_wrapped() {
        let text = format!("- a: {}", vec!["`word`"; 30].join(" "));
        let wrapped = wrapped(&text);
        assert!(wrapped.lines().all(|it| it.len() <= 120), "{wrapped}");
        assert!(wrapped.lines().skip(1).all(|it| it.starts_with("  `")), "{wrapped}");
        assert_eq!(wrapped.matches("word").count(), 30);
    }
}
