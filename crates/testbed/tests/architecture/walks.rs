//! The walks of ARCHITECTURE: which files a reader passes, in order, from a call to its effect.

/// One walk: its title and the files it names.
#[derive(Debug, PartialEq, Eq)]
pub struct Walk {
    pub title: String,
    pub files: Vec<String>,
}

const HEADING: &str = "### Walk: ";

/// Numbered lines below a heading `### Walk: …`; each starts with a file in backticks.
pub fn all(document: &str) -> Vec<Walk> {
    let sections = document.split(HEADING).skip(1);
    sections
        .map(|section| {
            let (title, rest) = section.split_once('\n').unwrap_or((section, ""));
            let rest = rest.split_once("\n#").map_or(rest, |(rest, _)| rest);
            Walk { title: title.to_owned(), files: rest.lines().filter_map(file).collect() }
        })
        .collect()
}

fn file(line: &str) -> Option<String> {
    let (number, rest) = line.trim_start().split_once(". `")?;
    let (path, _) = rest.split_once('`')?;
    number.parse::<usize>().is_ok().then(|| path.to_owned())
}

mod tests {
    use super::*;

    #[test]
    fn files_are_read_in_order() {
        let document = "# A\n### Walk: one\ntext\n1. `a/b.rs`: does it\n2. `c.rs`\n\n## B\n3. `d.rs`\n";
        assert_eq!(all(document), [Walk { title: "one".into(), files: vec!["a/b.rs".into(), "c.rs".into()] }]);
    }
}
