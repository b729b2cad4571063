//! Tables, and the document that keeps them: one section per benchmark, each replaced as a whole by its next run.

use std::fmt;
use std::fs;
use std::io;
use std::path::Path;

use anyhow::Context as _;

/// What one benchmark found.
pub struct Section {
    pub text: String,
    /// What did not work, as opposed to: was slow.
    pub failures: Vec<String>,
}

/// A table that reads well in a terminal and is Markdown, too.
pub struct MarkdownTable {
    rows: Vec<Vec<String>>,
}

impl MarkdownTable {
    pub fn new<T: Into<String>>(headers: impl IntoIterator<Item = T>) -> Self {
        Self { rows: vec![headers.into_iter().map(Into::into).collect()] }
    }

    pub fn add<T: Into<String>>(&mut self, cells: impl IntoIterator<Item = T>) {
        self.rows.push(cells.into_iter().map(Into::into).collect());
    }
}

impl fmt::Display for MarkdownTable {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows.first().map_or(0, Vec::len);
        let width = |column: usize| self.rows.iter().filter_map(|it| it.get(column)).map(|it| it.chars().count()).max();
        let widths: Vec<usize> = (0..columns).map(|it| width(it).unwrap_or(0).max(3)).collect();
        for (number, row) in self.rows.iter().enumerate() {
            for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
                // Names to the left, figures to the right.
                if column == 0 {
                    write!(formatter, "| {cell:<width$} ")?;
                } else {
                    write!(formatter, "| {cell:>width$} ")?;
                }
            }
            writeln!(formatter, "|")?;
            if number == 0 {
                for (column, width) in widths.iter().enumerate() {
                    let line = "-".repeat(width + 1);
                    write!(formatter, "{}", if column == 0 { format!("|:{line}") } else { format!("|{line}:") })?;
                }
                writeln!(formatter, "|")?;
            }
        }
        Ok(())
    }
}

const INTRODUCTION: &str = "\
# Benchmarks

Written by `make bench`; do not edit. S3FileSystem, server and kernel share one machine, so only the ratios within one run mean
anything, and two runs differ by some ten per cent.
";

/// Replaces the section of this name in the document, and leaves the others as they are.
pub fn write(document: &Path, name: &str, text: &str) -> anyhow::Result<()> {
    let before = match fs::read_to_string(document) {
        Ok(before) => before,
        Err(error) if error.kind() == io::ErrorKind::NotFound => INTRODUCTION.to_owned(),
        Err(error) => return Err(error).with_context(|| format!("failed to read {}", document.display())),
    };
    let after = replace(&before, name, text);
    fs::write(document, after).with_context(|| format!("failed to write {}", document.display()))
}

fn replace(document: &str, name: &str, text: &str) -> String {
    let (begin, end) = (format!("<!-- {name}: begin -->\n"), format!("<!-- {name}: end -->\n"));
    let section = format!("{begin}\n{}\n\n{end}", text.trim());
    let found = document.find(&begin).zip(document.find(&end));
    match found {
        Some((from, to)) if from < to => format!("{}{section}{}", &document[..from], &document[to + end.len()..]),
        _ => format!("{}\n\n{section}", document.trim_end()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_section_is_added_and_then_replaced() {
        let first = replace("# Title\n", "a", "one");
        assert_eq!(first, "# Title\n\n<!-- a: begin -->\n\none\n\n<!-- a: end -->\n");
        let both = replace(&first, "b", "other");
        let again = replace(&both, "a", "two\n");
        assert_eq!(again, both.replace("one", "two"));
        assert_eq!(again.matches("begin").count(), 2);
    }

    #[test]
    fn a_table_is_markdown() {
        let mut table = MarkdownTable::new(["what", "ms"]);
        table.add(["a long name", "1.5"]);
        assert_eq!(table.to_string(), "| what        |  ms |\n|:------------|----:|\n| a long name | 1.5 |\n");
    }
}
