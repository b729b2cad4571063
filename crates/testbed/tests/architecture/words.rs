//! Words that were retired: ARCHITECTURE lists them, and nothing of ours uses them any more.

use std::fs;
use std::path::Path;

use crate::sources::{self, Source, workspace};

/// One retired word, from the table in ARCHITECTURE.
#[derive(Debug, PartialEq, Eq)]
pub enum Retired {
    /// `keeper`: in no identifier, comment, message or document, in any case.
    Word(String),
    /// `Letter`: no type has this name; the ordinary word may be used.
    Type(String),
    /// `"is told"`: not in documents, comments or messages of what is shipped.
    Phrase(String),
}

const HEADING: &str = "### Retired words";

/// The list in the document: everything in backticks in the first column of the table below the heading.
pub fn retired(document: &str) -> Vec<Retired> {
    let section = document.split_once(HEADING).map_or("", |(_, rest)| rest);
    let section = section.split_once("\n#").map_or(section, |(section, _)| section);
    let rows = section.lines().filter_map(|line| line.strip_prefix('|')?.split('|').next());
    let names = rows.flat_map(|row| row.split('`').skip(1).step_by(2));
    names
        .map(|it| match it {
            phrase if phrase.starts_with('"') => Retired::Phrase(phrase.trim_matches('"').to_owned()),
            name if name.starts_with(char::is_uppercase) => Retired::Type(name.to_owned()),
            word => Retired::Word(word.to_owned()),
        })
        .collect()
}

/// Every use of a retired word in the text, as `path:line says word`.
pub fn uses(path: &str, text: &str, code: &str, retired: &[Retired]) -> Vec<String> {
    let mut found = Vec::new();
    for (number, (line, code)) in text.lines().zip(code.lines()).enumerate() {
        let parts = parts(line);
        let lower = line.to_lowercase();
        for it in retired {
            let (is_used, word) = match it {
                Retired::Word(word) => (says(&parts, word), word),
                Retired::Type(name) => (identifiers(code).any(|identifier| identifier == name), name),
                Retired::Phrase(phrase) => {
                    (is_shipped(path) && sources::words(&lower, phrase).next().is_some(), phrase)
                }
            };
            if is_used {
                found.push(format!("{path}:{} says {word:?}", number + 1));
            }
        }
    }
    found
}

/// Documents, chart, scripts and workflows: all that people read beside the code. The changelog tells history in the words of
/// its time.
pub fn documents() -> Vec<(String, String)> {
    const STARTS: [&str; 10] = [
        "README.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "mkdocs.yml",
        "docs",
        "charts",
        "scripts",
        "Makefile",
        ".ci",
        ".github",
    ];
    let mut found = Vec::new();
    for start in STARTS {
        collect(Path::new(start), &mut found);
    }
    found
}

fn collect(path: &Path, found: &mut Vec<(String, String)>) {
    let absolute = workspace().join(path);
    if absolute.is_dir() {
        let mut entries: Vec<_> = fs::read_dir(&absolute).unwrap().map(|it| it.unwrap().file_name()).collect();
        entries.sort();
        for entry in entries {
            collect(&path.join(entry), found);
        }
    } else if let Ok(text) = fs::read_to_string(&absolute) {
        // What is no text, such as a picture, has no words.
        found.push((path.display().to_string(), text));
    }
}

/// The section itself names the words.
pub fn without_the_list(path: &str, text: &str) -> String {
    if path != "docs/ARCHITECTURE.md" {
        return text.to_owned();
    }
    let mut is_inside = false;
    let blank = |line: &str| {
        if line.starts_with('#') {
            is_inside = line == HEADING;
        }
        if is_inside { String::new() } else { line.to_owned() }
    };
    text.lines().map(blank).collect::<Vec<_>>().join("\n")
}

/// Of what users install or read: programs, chart and documents, no tests and none of their scripts.
fn is_shipped(path: &str) -> bool {
    let is_for_developers = path.starts_with("crates/") || path.starts_with("scripts/");
    !is_for_developers || Source::is_product(path)
}

/// Whether the word is among the parts, or its plural; for `life_line` its parts one after the other.
fn says(parts: &[String], word: &str) -> bool {
    let wanted: Vec<&str> = word.split('_').collect();
    let is_form_of = |part: &str, word: &str| part == word || part.strip_suffix('s') == Some(word);
    parts.windows(wanted.len()).any(|found| found.iter().zip(&wanted).all(|(part, word)| is_form_of(part, word)))
}

fn identifiers(code: &str) -> impl Iterator<Item = &str> {
    code.split(|it| !sources::is_word(it)).filter(|it| !it.is_empty())
}

/// All parts of all identifiers and words, in lower case: `KeeperLink`, `keeper_link` and `keeper link` have the same.
fn parts(line: &str) -> Vec<String> {
    let mut parts = Vec::new();
    for identifier in identifiers(line) {
        let mut part = String::new();
        let mut was_lower = false;
        for character in identifier.chars() {
            let starts_part = character == '_' || (character.is_uppercase() && was_lower);
            if starts_part && !part.is_empty() {
                parts.push(std::mem::take(&mut part));
            }
            if character != '_' {
                part.extend(character.to_lowercase());
            }
            was_lower = character.is_lowercase();
        }
        if !part.is_empty() {
            parts.push(part);
        }
    }
    parts
}

mod tests {
    use super::*;

    fn list() -> Vec<Retired> {
        vec![Retired::Word("keeper".into()), Retired::Type("Letter".into()), Retired::Phrase("is told".into())]
    }

    #[track_caller]
    fn check(path: &str, line: &str, expected: usize) {
        assert_eq!(uses(path, line, line, &list()).len(), expected, "{line:?} in {path}");
    }

    #[test]
    fn words_are_found_in_every_spelling() {
        for line in ["keeper", "fn keeper_link()", "struct KeeperLink", "the keepers wait", "GATEKEEPER_keeper"] {
            check("crates/core/tests/x.rs", line, 1);
        }
        check("crates/core/tests/x.rs", "bookkeeper housekeeping goalkeeper", 0);
        let list = [Retired::Word("life_line".into())];
        for (line, expected) in [("LifeLine", 1), ("life_lines", 1), ("a life line", 1), ("a life on the line", 0)] {
            assert_eq!(uses("x", line, line, &list).len(), expected, "{line}");
        }
    }

    #[test]
    fn types_are_found_by_their_whole_name() {
        check("crates/core/src/x.rs", "struct Letter;", 1);
        check("crates/core/src/x.rs", "capital letters, LetterCase", 0);
    }

    #[test]
    fn phrases_count_in_what_is_shipped() {
        check("crates/core/src/x.rs", "// The node Is Told so.", 1);
        check("docs/x.md", "The node is told so.", 1);
        check("crates/testbed/src/x.rs", "// The node is told so.", 0);
        check("scripts/x.sh", "# The node is told so.", 0);
        check("scripts/x.sh", "# The keeper.", 1);
    }

    #[test]
    fn the_list_is_read_from_its_table() {
        let document = "# A\n| `other` | x |\n### Retired words\n| retired | instead |\n|---|---|\n| `keeper`, `Letter` | \
            `supervisor` |\n| `\"is told\"` | say who tells |\n\n## B\n| `later` | x |";
        assert_eq!(retired(document), list());
        assert_eq!(without_the_list("docs/ARCHITECTURE.md", document).matches("keeper").count(), 0);
        assert_eq!(without_the_list("docs/ARCHITECTURE.md", document).matches("later").count(), 1);
    }
}
