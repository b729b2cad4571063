//! The source files of the workspace as text, with comments and literals blanked out where only code counts.
//! This is no parser: it knows just enough of Rust's surface to answer the questions of the rules.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

/// Crates whose programs are installed somewhere. The testbed is not among them and may do what a test needs.
const PRODUCT_CRATES: [&str; 6] =
    ["crates/core", "crates/driver", "crates/engine", "crates/handoff", "crates/mounter", "crates/supervisor"];

pub fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

pub fn read(path: &str) -> String {
    fs::read_to_string(workspace().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Words of all `…_TESTS :=` lines of the Makefile.
pub fn test_lists(makefile: &str) -> Vec<String> {
    let lists = makefile.lines().filter_map(|line| line.split_once("_TESTS :=")).map(|(_, words)| words);
    lists.flat_map(str::split_whitespace).map(String::from).collect()
}

pub struct Sources(BTreeMap<String, Source>);

pub struct Source {
    /// Relative to the workspace.
    pub path: String,
    pub text: String,
    /// The text with comments, strings and characters replaced by blanks; every line keeps its number.
    pub code: String,
}

/// Read once for all rules.
pub fn all() -> &'static Sources {
    static SOURCES: LazyLock<Sources> = LazyLock::new(Sources::load);
    &SOURCES
}

impl Sources {
    fn load() -> Self {
        let mut files = BTreeMap::new();
        collect(&workspace(), "crates", &mut files);
        assert!(files.len() > 5, "found no sources, so the rules would check nothing");
        Self(files)
    }

    pub fn all(&self) -> impl Iterator<Item = &Source> {
        self.0.values()
    }

    pub fn handwritten(&self) -> impl Iterator<Item = &Source> {
        self.all().filter(|it| !it.path.contains("/generated"))
    }

    /// What is installed somewhere: no tests, no testbed.
    pub fn product(&self) -> impl Iterator<Item = &Source> {
        self.all().filter(|it| Source::is_product(&it.path))
    }

    pub fn beneath(&self, directory: &str) -> impl Iterator<Item = &Source> {
        self.all().filter(move |it| it.is_beneath(directory))
    }

    #[track_caller]
    pub fn get(&self, path: &str) -> &Source {
        self.0.get(path).unwrap_or_else(|| panic!("there is no file {path}"))
    }

    pub fn has(&self, path: &str) -> bool {
        self.0.contains_key(path)
    }

    /// Whether the modules of this file are in a directory of its name beside it.
    pub fn has_children_beside(&self, file: &Source) -> bool {
        let directory = file.path.trim_end_matches(".rs");
        self.all().any(|it| it.path.starts_with(&format!("{directory}/")))
    }

    /// Paths of the files that `mod` declarations lead to from the given ones.
    pub fn reachable_from(&self, roots: &BTreeSet<String>) -> BTreeSet<String> {
        let mut found = roots.clone();
        let mut waiting: Vec<(String, PathBuf)> =
            roots.iter().map(|it| (it.clone(), Path::new(it).parent().unwrap().into())).collect();
        while let Some((path, directory)) = waiting.pop() {
            let file = self.get(&path);
            let modules = file.declared_modules().into_iter().flat_map(|module| {
                let inside = directory.join(&module);
                let candidates = [directory.join(format!("{module}.rs")), inside.join("mod.rs")];
                candidates.map(|it| (it.display().to_string(), inside.clone()))
            });
            let parent = Path::new(&path).parent().unwrap();
            let included = file.included_files().map(|it| (parent.join(it).display().to_string(), parent.to_owned()));
            for (candidate, inside) in modules.chain(included).filter(|(it, _)| self.0.contains_key(it)) {
                if found.insert(candidate.clone()) {
                    waiting.push((candidate, inside));
                }
            }
        }
        found
    }
}

impl Source {
    /// Whether the file is part of what is installed somewhere.
    pub fn is_product(path: &str) -> bool {
        PRODUCT_CRATES.iter().any(|room| Path::new(path).starts_with(format!("{room}/src")))
    }

    /// Names of the types that other files can see, but for those of its tests.
    pub fn public_types(&self) -> Vec<String> {
        let code = self.code.split_once("#[cfg(test)]\nmod tests {").map_or(self.code.as_str(), |(code, _)| code);
        let mut names = Vec::new();
        for visibility in ["pub ", "pub(crate) ", "pub(super) "] {
            for keyword in ["struct ", "enum ", "trait ", "type "] {
                let declaration = format!("{visibility}{keyword}");
                for at in words(code, &declaration) {
                    let rest = &code[at + declaration.len()..];
                    // An associated type of a trait's implementation is no declaration; it is not public either.
                    names.push(rest.chars().take_while(|it| is_word(*it)).collect());
                }
            }
        }
        names
    }

    pub fn is_beneath(&self, directory: &str) -> bool {
        Path::new(&self.path).starts_with(directory) || self.path == format!("{directory}.rs")
    }

    pub fn is_command_line(&self) -> bool {
        let mut parts = self.path.split('/');
        parts.any(|it| matches!(it, "cli" | "cli.rs" | "main.rs"))
    }

    pub fn line_count(&self) -> usize {
        self.text.lines().count()
    }

    /// A file of unit tests needs none: it belongs to the module whose rules it holds.
    pub fn has_header(&self) -> bool {
        self.path.ends_with("/tests.rs") || self.text.lines().any(|line| line.starts_with("//! "))
    }

    /// Numbers of the lines whose code mentions a path such as `std::fs`, spelled out or as `use std::{fs, …}`.
    pub fn lines_that_mention(&self, path: &str) -> impl Iterator<Item = usize> {
        let mut lines: BTreeSet<usize> = words(&self.code, path).map(|at| self.line_of(at)).collect();
        if let Some((parent, child)) = path.rsplit_once("::")
            && !child.is_empty()
        {
            let group = format!("{parent}::{{");
            for at in words(&self.code, &group) {
                let start = at + group.len();
                let end = start + closing_brace(&self.code[start..]);
                lines.extend(words(&self.code[start..end], child).map(|it| self.line_of(start + it)));
            }
        }
        lines.into_iter()
    }

    /// Numbers of the lines with a clap attribute that names an environment variable.
    pub fn arguments_with_environment(&self) -> impl Iterator<Item = usize> {
        let attributes = words(&self.code, "#[arg(").chain(words(&self.code, "#[clap("));
        let with_environment = attributes.filter(|at| {
            let end = self.code[*at..].find(")]").map_or(self.code.len(), |it| at + it);
            words(&self.code[*at..end], "env").next().is_some()
        });
        with_environment.map(|at| self.line_of(at))
    }

    /// Numbers of the lines of test code that sleep outside a function named `wait_…` or `eventually…`.
    pub fn sleeps_in_tests(&self) -> impl Iterator<Item = usize> {
        let tests_start =
            if self.path.contains("/tests/") { 0 } else { self.code.find("#[cfg(test)]").unwrap_or(self.code.len()) };
        words(&self.code, "sleep(")
            .filter(move |at| tests_start <= *at && !self.is_in_waiting_function(*at))
            .map(|at| self.line_of(at))
    }

    fn is_in_waiting_function(&self, at: usize) -> bool {
        let name = words(&self.code[..at], "fn ").last().map_or("", |start| &self.code[start + "fn ".len()..]);
        name.starts_with("wait_") || name.starts_with("eventually")
    }

    fn declared_modules(&self) -> Vec<String> {
        let declarations = words(&self.code, "mod ").filter_map(|at| self.code[at + "mod ".len()..].split_once(';'));
        declarations.map(|(name, _)| name.trim().to_owned()).filter(|it| it.chars().all(is_word)).collect()
    }

    /// Files named by `include!("…")`.
    fn included_files(&self) -> impl Iterator<Item = &str> {
        self.text.split("include!(\"").skip(1).filter_map(|it| it.split_once('"')).map(|(path, _)| path)
    }

    fn line_of(&self, at: usize) -> usize {
        self.code[..at].matches('\n').count() + 1
    }
}

fn collect(workspace: &Path, directory: &str, files: &mut BTreeMap<String, Source>) {
    for entry in fs::read_dir(workspace.join(directory)).unwrap() {
        let entry = entry.unwrap();
        let path = format!("{directory}/{}", entry.file_name().to_str().unwrap());
        if entry.file_type().unwrap().is_dir() {
            collect(workspace, &path, files);
        } else if entry.path().extension().is_some_and(|it| it == "rs") {
            let text = fs::read_to_string(entry.path()).unwrap();
            let code = code_of(&text);
            files.insert(path.clone(), Source { path, text, code });
        }
    }
}

/// Where a word or path occurs and does not merely begin or end a longer one.
pub fn words<'a>(code: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let starts_open = !word.starts_with(is_word);
    let ends_open = !word.ends_with(is_word);
    code.match_indices(word).map(|(at, _)| at).filter(move |at| {
        let before = code[..*at].chars().next_back();
        let after = code[at + word.len()..].chars().next();
        (starts_open || !before.is_some_and(is_word)) && (ends_open || !after.is_some_and(is_word))
    })
}

pub fn is_word(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

fn closing_brace(code: &str) -> usize {
    let mut depth = 1;
    for (at, character) in code.char_indices() {
        match character {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at;
        }
    }
    code.len()
}

/// Blanks out comments and the contents of literals.
fn code_of(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let length = match first {
            '/' if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
            '/' if rest.starts_with("/*") => rest.find("*/").map_or(rest.len(), |it| it + 2),
            '"' => 1 + literal_end(&rest[1..], '"'),
            'r' if !code.ends_with(is_word) || code.ends_with('b') => raw_string_length(rest),
            '\'' => character_length(rest),
            _ => 0,
        };
        if length == 0 {
            code.push(first);
            rest = &rest[first.len_utf8()..];
        } else {
            code.extend(rest[..length].chars().map(|it| if it == '\n' { '\n' } else { ' ' }));
            rest = &rest[length..];
        }
    }
    code
}

/// How long a literal is after its opening quote, the closing one included.
fn literal_end(rest: &str, quote: char) -> usize {
    let mut is_escaped = false;
    for (at, character) in rest.char_indices() {
        if character == quote && !is_escaped {
            return at + 1;
        }
        is_escaped = character == '\\' && !is_escaped;
    }
    rest.len()
}

/// The length of `r"…"` or `r#"…"#`, or nothing if no raw string starts here.
fn raw_string_length(rest: &str) -> usize {
    let hashes = rest[1..].chars().take_while(|it| *it == '#').count();
    let start = 1 + hashes;
    if !rest[start..].starts_with('"') {
        return 0;
    }
    let end = format!("\"{}", "#".repeat(hashes));
    rest[start + 1..].find(&end).map_or(rest.len(), |it| start + 1 + it + end.len())
}

/// The length of a character literal, or nothing for a lifetime.
fn character_length(rest: &str) -> usize {
    let mut following = rest[1..].chars();
    match (following.next(), following.next()) {
        (Some('\\'), _) => 1 + literal_end(&rest[1..], '\''),
        (Some(character), Some('\'')) => 2 + character.len_utf8(),
        _ => 0,
    }
}

mod tests {
    use super::*;

    fn source(text: &str) -> Source {
        Source { path: "crates/x/tests/x.rs".into(), text: text.into(), code: code_of(text) }
    }

    #[track_caller]
    fn check(text: &str, path: &str, expected: &[usize]) {
        assert_eq!(source(text).lines_that_mention(path).collect::<Vec<_>>(), expected, "{path} in {text:?}");
    }

    #[test]
    fn mentions_are_found_in_code() {
        check("use std::fs;\nuse std::fs::File;", "std::fs", &[1, 2]);
        check("use std::{\n    fs::File,\n    path::Path,\n};", "std::fs", &[2]);
        check("use tonic::{Code, Status};", "tonic::Code", &[1]);
        check("Code::Internal", "Code::", &[1]);
    }

    #[test]
    fn longer_words_are_no_mention() {
        check("use std::fsx; ExitCode::SUCCESS; unsafe_code", "std::fs", &[]);
        check("ExitCode::SUCCESS", "Code::", &[]);
        check("unsafe_code", "unsafe", &[]);
    }

    #[test]
    fn comments_and_literals_are_no_mention() {
        check("// std::fs\n/* std::fs */\n\"std::fs \\\" std::fs\" r#\"std::fs\" \"#", "std::fs", &[]);
        check("let quote = '\"'; std::fs", "std::fs", &[1]);
        check("let quote = '\\''; fn f<'a>(x: &'a str) { std::fs }", "std::fs", &[1]);
    }

    #[test]
    fn sleeping_is_for_waiting_functions() {
        let sleeps = |text: &str| source(text).sleeps_in_tests().count();
        assert_eq!(sleeps("fn wait_for() { loop { thread::sleep(TICK); } }"), 0);
        assert_eq!(sleeps("fn a_rule() { thread::sleep(TICK); }"), 1);
    }

    #[test]
    fn public_types_are_found() {
        let text = "pub struct A<T>(T);\nenum B {}\npub trait C: D {}\npub(crate) enum F {}\n#[cfg(test)]\nmod tests { pub struct E; }";
        assert_eq!(source(text).public_types(), ["A", "C", "F"]);
        assert_eq!(source("#[cfg(test)]\nmod tests;\npub enum A {}").public_types(), ["A"]);
    }

    #[test]
    fn modules_are_found() {
        assert_eq!(source("pub mod a;\nmod b;\nmod tests { }\n// mod c;").declared_modules(), ["a", "b"]);
    }
}
