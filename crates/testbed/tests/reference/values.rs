//! The values of the chart with their defaults and comments.

use std::fmt::Write as _;

use serde_json::Value;

use crate::{check_page, read};

const INTRODUCTION: &str = "\
# Chart values

Generated from `charts/s3csi/values.yaml` by `make update-generated`; do not edit. Helm rejects values that are not
listed here.
";

/// A key of the values file that has a comment.
struct Key {
    path: Vec<String>,
    comment: Vec<String>,
}

#[test]
fn the_values_page_is_what_the_values_file_says() {
    let file = read("charts/s3csi/values.yaml");
    let defaults: Value = serde_saphyr::from_str(&file).unwrap();
    let keys = commented_keys(&file);
    let is_group = |key: &Key| keys.iter().any(|it| it.path.len() > key.path.len() && it.path.starts_with(&key.path));

    let mut page = INTRODUCTION.to_owned();
    write_table(&mut page, "General", &[], keys.iter().filter(|it| it.path.len() == 1 && !is_group(it)), &defaults);
    let mut sections: Vec<&String> = Vec::new();
    for section in keys.iter().filter(|it| it.path.len() > 1).map(|it| &it.path[0]) {
        if !sections.contains(&section) {
            sections.push(section);
        }
    }
    for section in sections {
        let comment = keys.iter().find(|it| it.path == [section.clone()]).map_or(&[][..], |it| &it.comment);
        let members = keys.iter().filter(|it| it.path.len() > 1 && it.path[0] == *section && !is_group(it));
        write_table(&mut page, section, comment, members, &defaults);
    }
    write_ignored(&mut page);
    check_page("docs/reference/values.md", &page);
}

/// The keys of the file in their order, each with the lines of the comment above it.
fn commented_keys(file: &str) -> Vec<Key> {
    let mut keys = Vec::new();
    let mut parents: Vec<(usize, String)> = Vec::new();
    let mut comment: Vec<String> = Vec::new();
    for line in file.lines() {
        let content = line.trim_start();
        let indent = line.len() - content.len();
        if let Some(text) = content.strip_prefix('#') {
            comment.push(text.strip_prefix(' ').unwrap_or(text).to_owned());
            continue;
        }
        if let Some((name, _)) = content.split_once(':') {
            parents.retain(|(depth, _)| *depth < indent);
            parents.push((indent, name.to_owned()));
            if !comment.is_empty() {
                let path = parents.iter().map(|(_, name)| name.clone()).collect();
                keys.push(Key { path, comment: comment.clone() });
            }
        }
        comment.clear();
    }
    keys
}

fn write_table<'a>(
    page: &mut String,
    title: &str,
    comment: &[String],
    keys: impl Iterator<Item = &'a Key>,
    defaults: &Value,
) {
    write!(page, "\n## {title}\n").unwrap();
    if !comment.is_empty() {
        write!(page, "\n{}\n", comment.join("\n")).unwrap();
    }
    page.push_str("\n| value | default | meaning |\n|---|---|---|\n");
    for Key { path, comment } in keys {
        let default = path.iter().fold(defaults, |value, name| &value[name.as_str()]);
        writeln!(page, "| `{}` | `{default}` | {} |", path.join("."), cell(comment)).unwrap();
    }
}

/// A comment as the content of a table cell: paragraphs are joined, indented lines (a list) are kept apart.
fn cell(comment: &[String]) -> String {
    let mut text = String::new();
    for line in comment {
        let is_item = line.starts_with("  ") && !line.starts_with("     ");
        if !text.is_empty() {
            text.push_str(if is_item { "<br>" } else { " " });
        }
        match line.trim().split_once("  ") {
            Some((name, meaning)) if is_item => write!(text, "`{name}`: {}", meaning.trim()).unwrap(),
            _ => text.push_str(line.trim()),
        }
    }
    text.replace('|', "\\|").replace("<driverName>", "&lt;driverName&gt;")
}

/// Values of the Scality chart that are accepted without effect.
fn write_ignored(page: &mut String) {
    let schema: Value = serde_json::from_str(&read("charts/s3csi/values.schema.json")).unwrap();
    let mut ignored = Vec::new();
    collect_ignored(&mut ignored, "", &schema);
    assert!(!ignored.is_empty(), "the schema was not understood");
    page.push_str("\n## Accepted without effect\n\n| value | reason |\n|---|---|\n");
    for (path, description) in ignored {
        writeln!(page, "| `{path}` | {description} |").unwrap();
    }
}

fn collect_ignored(found: &mut Vec<(String, String)>, path: &str, schema: &Value) {
    if schema["deprecated"] == true {
        found.push((path.to_owned(), schema["description"].as_str().unwrap().to_owned()));
        return;
    }
    for (name, member) in schema["properties"].as_object().into_iter().flatten() {
        let separator = if path.is_empty() { "" } else { "." };
        collect_ignored(found, &format!("{path}{separator}{name}"), member);
    }
}
