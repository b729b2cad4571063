//! The errors that CSI calls answer with: gRPC code and message of each, from the sources that define them.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use s3csi_testbed::environment::workspace;

use crate::{check_page, read};

const INTRODUCTION: &str = "\
# Errors

Generated from the error types of the driver by `make update-generated`; do not edit. A CSI call that fails answers with
one of these codes and the whole chain of causes, of which these messages are the links; `{…}` stands for a name or a
value. Kubelet shows the text in an Event of the Pod, the external-provisioner in an Event of the claim or the
PersistentVolume. [troubleshooting.md](../troubleshooting.md) explains the frequent ones.
";

/// Where codes are chosen; the heading of their table.
const CODES: [(&str, &str); 2] = [
    ("Mounting and unmounting", "crates/driver/src/csi/status.rs"),
    ("Provisioning", "crates/driver/src/csi/provision_status.rs"),
];

#[test]
fn the_errors_page_is_what_the_error_types_say() {
    let messages = messages();
    let mut page = INTRODUCTION.to_owned();
    for (title, file) in CODES {
        write!(page, "\n## {title}\n\n| code | message |\n|---|---|\n").unwrap();
        let mut rows: Vec<(String, &String)> = codes(&read(file))
            .into_iter()
            .filter_map(|(variant, code)| messages.get(&variant).map(|message| (code, message)))
            .collect();
        assert!(rows.len() > 20, "{file} was not understood: {} errors", rows.len());
        rows.sort();
        rows.dedup();
        for (code, message) in rows {
            writeln!(page, "| `{code}` | {} |", message.replace('|', "\\|").replace('<', "&lt;")).unwrap();
        }
    }
    check_page("docs/reference/errors.md", &page);
}

/// The message of each `Enum::Variant` with an `#[error("…")]` attribute. Transparent ones have none.
fn messages() -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for file in ["crates/core/src", "crates/driver/src"].iter().flat_map(|it| rust_files(&workspace().join(it))) {
        let source = std::fs::read_to_string(file).unwrap();
        for (start, attribute) in source.match_indices("#[error(") {
            let name = source[..start].rsplit("enum ").next().and_then(|it| it.split([' ', '<', '{']).next());
            let Some(rest) = source[start + attribute.len()..].trim_start().strip_prefix('"') else { continue };
            let Some(end) = end_of_literal(rest) else { continue };
            let message = rest[..end].replace("\\\"", "\"").replace("\\\\", "\\");
            let variant = rest[end..].split_once("]\n").and_then(|(_, after)| first_identifier(after));
            if let (Some(name), Some(variant)) = (name, variant) {
                found.insert(format!("{name}::{variant}"), joined(&message).replace(":?}", "}").replace("{}", "{…}"));
            }
        }
    }
    found
}

/// Without the line continuations of a long literal.
fn joined(message: &str) -> String {
    let lines: Vec<&str> = message.split("\\\n").map(str::trim_start).collect();
    lines.concat()
}

fn end_of_literal(text: &str) -> Option<usize> {
    let mut is_escaped = false;
    text.char_indices().find_map(|(at, it)| match it {
        '"' if !is_escaped => Some(at),
        _ => {
            is_escaped = it == '\\' && !is_escaped;
            None
        }
    })
}

/// The name of the variant behind its attribute; further attributes and comments may stand between.
fn first_identifier(text: &str) -> Option<&str> {
    let line = text.lines().map(str::trim).find(|it| !it.is_empty() && !it.starts_with(['#', '/']))?;
    let end = line.find(|it: char| !it.is_ascii_alphanumeric()).unwrap_or(line.len());
    (end > 0).then(|| &line[..end])
}

/// The code of each `Enum::Variant` that a match arm maps to one directly.
fn codes(source: &str) -> Vec<(String, String)> {
    let is_part = |it: char| it.is_ascii_alphanumeric() || "_:=>".contains(it);
    let mut found = Vec::new();
    let mut pattern: Vec<&str> = Vec::new();
    let mut is_answer = false;
    for word in source.split(|it| !is_part(it)) {
        match word.strip_prefix("Code::") {
            _ if word == "=>" => is_answer = true,
            Some(code) if is_answer => {
                found.extend(pattern.drain(..).map(|it| (it.to_owned(), screaming(code))));
                is_answer = false;
            }
            None if word.contains("::") && word.starts_with(|it: char| it.is_ascii_uppercase()) => {
                // The arm before was answered by something else than a code.
                if is_answer {
                    pattern.clear();
                    is_answer = false;
                }
                pattern.push(word);
            }
            _ => {}
        }
    }
    found
}

/// `InvalidArgument` as `INVALID_ARGUMENT`.
fn screaming(code: &str) -> String {
    let mut name = String::new();
    for letter in code.chars() {
        if letter.is_ascii_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.push(letter.to_ascii_uppercase());
    }
    name
}

pub fn rust_files(directory: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(rust_files(&path));
        } else if path.extension().is_some_and(|it| it == "rs") {
            files.push(path);
        }
    }
    files.sort();
    files
}

#[test]
fn sources_are_understood() {
    let source = "match error {\n A::One { .. } => Code::Aborted,\n A::Two(_)\n | A::Three { .. } => {\n Code::NotFound\n }\n \
                  A::Four { cause } => of(cause),\n A::Five => Code::Internal,\n}";
    let found = codes(source);
    let expected = [("A::One", "ABORTED"), ("A::Two", "NOT_FOUND"), ("A::Three", "NOT_FOUND"), ("A::Five", "INTERNAL")];
    assert_eq!(found, expected.map(|(variant, code)| (variant.to_owned(), code.to_owned())));
}
