//! `make bench`: what publishing costs above the engine's own start, how soon workloads get their Mountpoint Pods, our
//! data path beside other S3 file systems, and the pause when an engine dies.
//! Everything that is compared is measured in one run, in turns, so that noise of the machine hits all alike.

mod clients;
mod content;
mod controller;
mod data;
mod delay;
mod floor;
mod footprint;
mod latency;
mod machine;
mod pod;
mod publish;
mod publisher;
mod report;
mod resume;
mod scratch;
mod statistics;
mod systemd;
mod verdicts;
mod workload;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::Context as _;

use crate::environment;
use crate::fixture::Fixture;
use report::Section;

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
    /// The document to write the figures to; without one they are only printed.
    pub output: Option<PathBuf>,
}

/// Latency of publishing, and memory of the plugin with many volumes.
pub fn publish(options: &Options) -> anyhow::Result<()> {
    run("publish", options, publish::measure)
}

/// Latency of publishing where systemd runs the engines.
pub fn systemd(options: &Options) -> anyhow::Result<()> {
    run("systemd", options, systemd::measure)
}

/// Latency of publishing where each source has a Mountpoint Pod.
pub fn pod(options: &Options) -> anyhow::Result<()> {
    run("pod", options, pod::measure)
}

/// How soon workloads are given Mountpoint Pods, and what the API server is asked for it.
pub fn controller(options: &Options) -> anyhow::Result<()> {
    run("controller", options, controller::measure)
}

/// Throughput, small files and listings beside s3fs and rclone.
pub fn data(options: &Options) -> anyhow::Result<()> {
    run("data", options, data::measure)
}

/// How long a mount stands still when its engine dies, and what our FUSE front costs.
pub fn resume(options: &Options) -> anyhow::Result<()> {
    run("resume", options, resume::measure)
}

/// Says how far a run is. On standard error, so that the tables alone can be kept.
struct Progress {
    start: Instant,
}

impl Progress {
    fn say(&self, text: &str) {
        eprintln!("[{:7.1} s] {text}", self.start.elapsed().as_secs_f64());
    }
}

type Measure = fn(&Fixture, &Options, &Progress) -> anyhow::Result<Section>;

fn run(name: &str, options: &Options, measure: Measure) -> anyhow::Result<()> {
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
