//! The documents: line length, links that `make docs` does not see, and facts that must be the same everywhere. Words and
//! phrases are in `words`.

use std::path::Path;
use std::process::Command;

use crate::check;
use crate::sources::{read, workspace};

/// `benchmarks.md` is written by the benchmark and keeps what a run printed.
const WRITTEN_BY_RUNS: &str = "docs/benchmarks.md";

const LONGEST_LINE: usize = 120;

/// Files of the repository whose name ends so, below one of these paths.
fn files(paths: &[&str], endings: &[&str]) -> Vec<String> {
    let mut git = Command::new("git");
    git.arg("-C").arg(workspace()).args(["ls-files", "--cached", "--others", "--exclude-standard", "--"]).args(paths);
    let output = git.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let names = String::from_utf8(output.stdout).unwrap();
    let is_meant = |it: &&str| endings.iter().any(|ending| it.ends_with(ending)) && workspace().join(it).is_file();
    let found: Vec<String> = names.lines().filter(is_meant).map(String::from).collect();
    assert!(!found.is_empty(), "no files below {paths:?}");
    found
}

fn markdown() -> Vec<String> {
    files(&["*.md"], &[".md"]).into_iter().filter(|it| it != WRITTEN_BY_RUNS).collect()
}

#[test]
fn lines_of_markdown_are_short() {
    let mut places = Vec::new();
    for file in markdown() {
        for (number, line) in read(&file).lines().enumerate() {
            // A row of a table cannot be broken.
            let is_row = line.trim_start().starts_with('|');
            let length = line.chars().count();
            if length > LONGEST_LINE && !is_row {
                places.push(format!("{file}:{} has {length} columns", number + 1));
            }
        }
    }
    check("lines of Markdown have at most 120 columns, but for rows of tables", places);
}

/// `make docs` checks links between pages below docs/; these documents are outside.
#[test]
fn links_of_the_documents_in_the_root_lead_somewhere() {
    let mut places = Vec::new();
    for file in files(&["*.md", ".github"], &[".md"]).iter().filter(|it| !it.starts_with("docs/")) {
        for link in links(&read(file)) {
            let (path, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let target = Path::new(file).parent().unwrap_or(Path::new("")).join(path);
            let target = if path.is_empty() { file.clone() } else { target.to_str().unwrap().to_owned() };
            if !workspace().join(&target).exists() {
                places.push(format!("{file} links to {link}, which does not exist"));
            } else if !anchor.is_empty() && !headings(&read(&target)).iter().any(|it| it == anchor) {
                places.push(format!("{file} links to {link}, but {target} has no such heading"));
            }
        }
    }
    check("links of README.md and its siblings lead to files and headings that exist", places);
}

/// Targets of the links of a document that are not addresses.
fn links(text: &str) -> Vec<String> {
    let targets = text.split("](").skip(1).filter_map(|it| it.split_once(')')).map(|(target, _)| target);
    targets.filter(|it| !it.contains("://")).map(String::from).collect()
}

/// Anchors of the headings of a document, as GitHub makes them.
fn headings(text: &str) -> Vec<String> {
    let titles = text.lines().filter(|it| it.starts_with('#')).map(|it| it.trim_start_matches('#').trim());
    titles
        .map(|it| it.to_lowercase().replace(' ', "-"))
        .map(|it| it.chars().filter(|it| it.is_alphanumeric() || "-_".contains(*it)).collect())
        .collect()
}

#[test]
fn the_supported_version_of_kubernetes_is_the_same_everywhere() {
    let chart = read("charts/s3csi/Chart.yaml");
    let version = chart.split_once("kubeVersion: \">=").and_then(|(_, rest)| rest.split_once(".0-0\"")).unwrap().0;
    let api = format!("\"v{}\"", version.replace('.', "_"));
    let mut wrong = Vec::new();
    if !read("Cargo.toml").contains(&api) {
        wrong.push(format!("Cargo.toml does not select the API {api} of k8s-openapi"));
    }
    let required = format!("Kubernetes {version} or later");
    if !read("docs/install.md").contains(&required) {
        wrong.push(format!("docs/install.md does not say {required:?}"));
    }
    for file in markdown().iter().filter(|it| *it != "docs/install.md" && *it != "CHANGELOG.md") {
        if read(file).contains(&required) {
            wrong.push(format!("{file} states the requirement a second time"));
        }
    }
    check("the chart requires the oldest API that we compile against, and docs/install.md alone says so", wrong);
}
