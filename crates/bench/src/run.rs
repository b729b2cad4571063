//! One run of one benchmark: a fixture, the measurement, the report.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::Context as _;
use s3csi_testbed::environment;
use s3csi_testbed::fixture::Fixture;

use crate::report::{self, Section};

/// How thorough a run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Thoroughness {
    /// Small sizes, to try the harness. The figures mean nothing.
    Quick,
    Full,
}

pub struct Options {
    pub thoroughness: Thoroughness,
    /// How often everything is measured, if not as often as the thoroughness says.
    pub repetitions: Option<usize>,
    /// Measure only rows whose title contains this.
    pub only: Option<String>,
    /// The document to write the figures to; without one they are only printed.
    pub output: Option<PathBuf>,
}

/// Reports how far a run is. On standard error, so that the tables alone can be kept.
pub struct Progress {
    start: Instant,
}

impl Progress {
    pub fn say(&self, text: &str) {
        eprintln!("[{:7.1} s] {text}", self.start.elapsed().as_secs_f64());
    }
}

pub type Measure = fn(&Fixture, &Options, &Progress) -> anyhow::Result<Section>;

pub fn run(name: &str, options: &Options, measure: Measure) -> anyhow::Result<()> {
    let progress = Progress { start: Instant::now() };
    let fixture = Fixture::prepare(&format!("bench-{name}"))?;
    let measured = measure(&fixture, options, &progress);
    // Without a directory for logs they vanish with the fixture.
    if measured.is_err() && environment::log_directory().is_some() {
        progress.say(&format!("the logs of all parts are in {}", fixture.logs().display()));
    }
    let finished = fixture.finish().context("the benchmark left something behind");
    let section = measured?;
    finished?;
    println!("{}", section.text);
    if let Some(output) = &options.output {
        report::write(output, name, &section.text)?;
        progress.say(&format!("written to {}", output.display()));
    }
    // A target that was missed is a figure like any other; a program that failed is not.
    anyhow::ensure!(section.failures.is_empty(), "this went wrong:\n  {}", section.failures.join("\n  "));
    Ok(())
}
