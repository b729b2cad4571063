//! docs/reliability-matrix.md: the whole table, with the results of the last run of each row.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::run::CellResult;
use super::{Disruption, Expectation, MatrixRow, MatrixStrategy, MatrixWorkload, Victim, rows};

/// Cells of a measured row, in the order of [`MatrixWorkload::ALL`], by strategy, victim and disruption.
pub type PageCells = BTreeMap<(&'static str, String, String), Vec<String>>;

/// The cells of a row by the names of its workloads. None if the row has failed.
pub type RowResults = BTreeMap<String, CellResult>;

/// What the page has for a row that was never run.
pub const NOT_RUN: &str = "not run";

/// What the page has for a row whose last run has failed.
const FAILED: &str = "failed";

/// What the page has for a workload that a strategy does not have.
const MISSING: &str = "–";

/// The rows that are to be run, such as `daemon/S3 server;pod/`: beginnings of their names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowFilter(Vec<String>);

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("no row of the kill matrix begins with {beginning:?}; one of them is \"daemon/node plugin, kill -9\"")]
pub struct UnknownRow {
    beginning: String,
}

impl RowFilter {
    pub fn parse(text: &str) -> Result<Self, UnknownRow> {
        let beginnings: Vec<String> =
            text.split(';').map(str::trim).filter(|it| !it.is_empty()).map(str::to_owned).collect();
        let names: Vec<String> = measured().map(|(strategy, victim, by)| row_name(strategy, victim, by)).collect();
        match beginnings.iter().find(|it| !names.iter().any(|name| name.starts_with(it.as_str()))) {
            Some(unknown) => Err(UnknownRow { beginning: unknown.clone() }),
            None => Ok(Self(beginnings)),
        }
    }

    pub fn accepts(&self, name: &str) -> bool {
        self.0.iter().any(|it| name.starts_with(it.as_str()))
    }
}

/// What a row is called on the command line, in the output and in the directory of results.
pub fn row_name(strategy: MatrixStrategy, victim: Victim, disruption: Disruption) -> String {
    format!("{}/{}, {}", strategy.name(), victim.name(), disruption.name())
}

fn measured() -> impl Iterator<Item = (MatrixStrategy, Victim, Disruption)> {
    MatrixStrategy::ALL.into_iter().flat_map(|strategy| {
        let is_measured = |row| matches!(row, MatrixRow::Measured(_));
        rows(strategy).filter(move |it| is_measured(it.2)).map(move |(victim, by, _)| (strategy, victim, by))
    })
}

const HEAD: &str = "# Kill matrix

This page lists what applications see when a part of the driver, or of what it needs, is killed, stopped or restarted.
`make kill-matrix` writes it, from a run on real mounts: engine, mounter, node plugin, kernel and S3 servers are real.
[Reliability](reliability.md) describes the behaviour in words.

All workloads of a row run at the same time on one node while the part is ended several times. A cell has the median
and the longest pause of its workload: the longest single round (an open and a read, a listing, a write with `fsync`, a
publish) that was affected. All of them share the cores of the machine with the part that starts again, and with what
else runs there; [benchmarks.md](benchmarks.md#resume) has the pause on an idle machine. A round of \"writing big\"
writes 10 MiB, so most of its time is work. Stopped parts continue after three seconds, and an engine without heartbeat
is replaced after two (`--frozen-after 2s`; ten with strategy `systemd`).

Each row verifies that every file that was closed or synced without an error is in the bucket as a whole, that a file
whose writer got an error is there as a whole or not at all, that the mount is the same one, and that no mount, process,
unit, directory or credential is left at the end. Each row has the figures of its last run:
`make kill-matrix ROWS='daemon/S3 server;pod/'` runs some of them, without `ROWS` all.

| expected | meaning |
|---|---|
| pause | no workload sees an error |
| writer error | only the writer of a new file of more than 8 MiB may get `EIO`; all others see a pause |
| store errors | the errors of an unreachable store while it is away; then all go on with the same mount |
| lost | errors until the volume is published again; open files stay broken, and containers have to be restarted |

\"Both\" are the node plugin and the whole container of the mounter at the same moment. With strategy `systemd`, the
container is the unit.
";

impl Expectation {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pause => "pause",
            Self::WriterError => "writer error",
            Self::StoreErrors => "store errors",
            Self::Lost => "lost",
        }
    }
}

impl CellResult {
    /// The text of a cell.
    pub fn text(&self) -> String {
        let pause = if self.longest_ms < 1000 {
            format!("{} / {} ms", self.median_ms, self.longest_ms)
        } else {
            let seconds = |it: u64| format!("{}.{}", it / 1000, it % 1000 / 100);
            format!("{} / {} s", seconds(self.median_ms), seconds(self.longest_ms))
        };
        match self.errors {
            0 => pause,
            1 => format!("{pause}, 1 error"),
            many => format!("{pause}, {many} errors"),
        }
    }
}

/// Keeps the results of a row in a directory, in place of those of an earlier run.
pub fn keep(results: &Path, row: &str, found: &RowResults) -> io::Result<()> {
    let file = file_of(results, row);
    fs::create_dir_all(file.parent().unwrap_or(results))?;
    fs::write(file, serde_json::to_string_pretty(found)?)
}

fn file_of(results: &Path, row: &str) -> PathBuf {
    results.join(format!("{row}.json"))
}

/// Writes the results that are in a directory to the page. Other rows stay as they are.
pub fn update(results: &Path, page: &Path) -> io::Result<()> {
    let mut cells = parse(&fs::read_to_string(page)?);
    for (strategy, victim, disruption) in measured() {
        let text = match fs::read_to_string(file_of(results, &row_name(strategy, victim, disruption))) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        let found: RowResults = serde_json::from_str(&text)?;
        let absent = if found.is_empty() { FAILED } else { MISSING };
        let text = |it: &MatrixWorkload| found.get(it.name()).map_or_else(|| absent.to_owned(), CellResult::text);
        let key = (strategy.name(), victim.name().to_owned(), disruption.name().to_owned());
        cells.insert(key, MatrixWorkload::ALL.iter().map(text).collect());
    }
    fs::write(page, render(&cells))
}

/// The whole page.
pub fn render(cells: &PageCells) -> String {
    let mut page = HEAD.to_owned();
    for strategy in MatrixStrategy::ALL {
        let _ = write!(page, "\n## Strategy {}\n\n| victim | by | expected |", strategy.name());
        for workload in MatrixWorkload::ALL {
            let _ = write!(page, " {} |", workload.name());
        }
        let _ = writeln!(page, "\n|---|---|---|{}", "---|".repeat(MatrixWorkload::ALL.len()));
        for (victim, disruption, row) in rows(strategy) {
            let MatrixRow::Measured(expectation) = row else { continue };
            let _ = write!(page, "| {} | {} | {} |", victim.name(), disruption.name(), expectation.name());
            let key = (strategy.name(), victim.name().to_owned(), disruption.name().to_owned());
            let found = cells.get(&key);
            for (number, workload) in MatrixWorkload::ALL.iter().enumerate() {
                let absent = if workload.missing(strategy).is_some() { MISSING } else { NOT_RUN };
                let _ = write!(page, " {} |", found.and_then(|it| it.get(number)).map_or(absent, String::as_str));
            }
            page.push('\n');
        }
        for workload in MatrixWorkload::ALL {
            if let Some(reason) = workload.missing(strategy) {
                let _ = writeln!(page, "\n–: not \"{}\", because {reason}.", workload.name());
            }
        }
        render_rest(&mut page, strategy);
    }
    page
}

/// Rows that other tests show, and those that do not apply, each with neighbours of the same victim.
fn render_rest(page: &mut String, strategy: MatrixStrategy) {
    let mut rest: Vec<(&str, Vec<&str>, String)> = Vec::new();
    for (victim, disruption, row) in rows(strategy) {
        let text = match row {
            MatrixRow::Measured(_) => continue,
            MatrixRow::Shown { test } => format!("test `{test}`"),
            MatrixRow::NotApplicable { reason } => reason.to_owned(),
        };
        match rest.iter_mut().find(|it| it.0 == victim.name() && it.2 == text) {
            Some((_, disruptions, _)) => disruptions.push(disruption.name()),
            None => rest.push((victim.name(), vec![disruption.name()], text)),
        }
    }
    let _ = writeln!(page, "\n| victim | by | shown by, or why there is no such case |\n|---|---|---|");
    for (victim, disruptions, text) in rest {
        let _ = writeln!(page, "| {victim} | {} | {text} |", disruptions.join(", "));
    }
}

/// The measured cells of a page.
pub fn parse(page: &str) -> PageCells {
    let mut cells = PageCells::new();
    let mut strategy = "";
    for line in page.lines() {
        if let Some(name) = line.strip_prefix("## Strategy ") {
            strategy = MatrixStrategy::ALL.iter().map(|it| it.name()).find(|it| *it == name).unwrap_or_default();
        }
        let columns: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        if columns.len() == MatrixWorkload::ALL.len() + 3 && columns[0] != "victim" && !columns[0].starts_with('-') {
            let key = (strategy, columns[0].to_owned(), columns[1].to_owned());
            cells.insert(key, columns[3..].iter().map(|it| (*it).to_owned()).collect());
        }
    }
    cells
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_chosen_by_the_beginning_of_their_name() {
        let filter = RowFilter::parse("daemon/S3 server; pod/node plugin, kill").unwrap();
        assert!(filter.accepts("daemon/S3 server, kill -9") && filter.accepts("daemon/S3 server, SIGSTOP"));
        assert!(filter.accepts("pod/node plugin, kill -9") && !filter.accepts("pod/node plugin, SIGSTOP"));
        let unknown = RowFilter::parse("daemon/").and(RowFilter::parse("daemon/kubelet")).unwrap_err();
        assert!(unknown.to_string().contains("\"daemon/kubelet\""), "{unknown}");
    }

    #[test]
    fn a_run_of_some_rows_changes_these_rows_of_the_page() {
        let directory = tempfile::tempdir().unwrap();
        let (results, page) = (directory.path().join("results"), directory.path().join("page.md"));
        fs::write(&page, render(&PageCells::new())).unwrap();
        let row = |number: usize| {
            let cells = parse(&fs::read_to_string(&page).unwrap());
            let (strategy, victim, disruption) = measured().nth(number).unwrap();
            cells[&(strategy.name(), victim.name().to_owned(), disruption.name().to_owned())][0].clone()
        };
        let keep_row = |number: usize, found: &RowResults| {
            let (strategy, victim, disruption) = measured().nth(number).unwrap();
            keep(&results, &row_name(strategy, victim, disruption), found).unwrap();
            update(&results, &page).unwrap();
        };
        let measured = |longest_ms| {
            let result = CellResult { median_ms: 1, longest_ms, ..CellResult::default() };
            RowResults::from([(MatrixWorkload::Idle.name().to_owned(), result)])
        };
        keep_row(0, &measured(2));
        assert_eq!([row(0), row(1)], ["1 / 2 ms", NOT_RUN]);
        fs::remove_dir_all(&results).unwrap();
        keep_row(1, &measured(3));
        assert_eq!([row(0), row(1)], ["1 / 2 ms", "1 / 3 ms"]);
        keep_row(1, &RowResults::new());
        assert_eq!([row(0), row(1)], ["1 / 2 ms", FAILED]);
    }
}
