//! docs/reliability-matrix.md: the whole table, with the results of a run.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::Path;

use super::run::CellResult;
use super::{Expectation, MatrixRow, MatrixStrategy, MatrixWorkload, rows};

/// Cells of a measured row, in the order of [`MatrixWorkload::ALL`], by strategy, victim and disruption.
pub type PageCells = BTreeMap<(&'static str, String, String), Vec<String>>;

/// The results that the tests of one strategy have written.
pub type StrategyResults = BTreeMap<String, BTreeMap<String, CellResult>>;

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
unit, directory or credential is left at the end. Rows that a run did not reach say \"not run\".

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

/// Writes the page from what the tests of all strategies have left in a directory.
pub fn write(results: &Path, page: &Path) -> io::Result<()> {
    let mut cells = PageCells::new();
    for strategy in MatrixStrategy::ALL {
        let file = results.join(format!("{}.json", strategy.name()));
        let text = fs::read_to_string(&file).map_err(|it| io::Error::other(format!("{}: {it}", file.display())))?;
        let rows: StrategyResults = serde_json::from_str(&text)?;
        for (row, found) in rows {
            let (victim, disruption) = row.split_once(", ").unwrap_or((&row, ""));
            let text = |it: &MatrixWorkload| found.get(it.name()).map_or_else(|| "–".to_owned(), CellResult::text);
            let row = MatrixWorkload::ALL.iter().map(text).collect();
            cells.insert((strategy.name(), victim.to_owned(), disruption.to_owned()), row);
        }
    }
    fs::write(page, render(&cells))
}

/// The whole page. Cells that were not measured are empty.
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
            for number in 0..MatrixWorkload::ALL.len() {
                let _ = write!(page, " {} |", found.and_then(|it| it.get(number)).map_or("", String::as_str));
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
