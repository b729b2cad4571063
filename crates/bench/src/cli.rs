//! The command line of `s3csi-bench`.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::run::{Options, Thoroughness, run};
use crate::{controller, data, drivers, pod, publish, resume, start, systemd};

/// Measure, print tables and write them to a document.
#[derive(Parser)]
#[command(version)]
pub struct Cli {
    #[command(subcommand)]
    benchmark: Benchmark,
}

#[derive(Subcommand)]
enum Benchmark {
    /// Latency of publishing and memory of the node's processes, against the engine's own start.
    Publish(RunArgs),
    /// Latency of publishing where systemd runs the engines; to be run by scripts/with-systemd.sh.
    Systemd(RunArgs),
    /// Latency of publishing where each source has a Mountpoint Pod, against the engine's own start.
    Pod(RunArgs),
    /// How soon workloads are given Mountpoint Pods, the load on the API server, and the controller's memory.
    Controller(RunArgs),
    /// How long a Pod takes to run with a volume and without one, in a cluster.
    Start(RunArgs),
    /// Our driver beside AWS's in one cluster: how soon Pods run, and the memory of the node.
    Drivers(DriversArgs),
    /// Throughput, small files and listings, beside s3fs and rclone.
    Data(DataArgs),
    /// The pause when an engine dies, against the engine's own start; our FUSE front against the library's.
    Resume(RunArgs),
}

#[derive(Args)]
struct RunArgs {
    /// Small sizes: for trying the harness; the figures mean nothing.
    #[arg(long)]
    quick: bool,
    /// How often everything is measured (publish, systemd, pod: 200, controller and start: 20, drivers: 10, data: 3, resume: 7; fewer with --quick).
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u16).range(1..))]
    repetitions: Option<u16>,
    /// The document whose section is replaced.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

#[derive(Args)]
struct DriversArgs {
    #[command(flatten)]
    run: RunArgs,
    /// How both drivers run engines; the other strategy has a section of its own.
    #[arg(long)]
    strategy: ComparedStrategy,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ComparedStrategy {
    Systemd,
    Pod,
}

#[derive(Args)]
struct DataArgs {
    #[command(flatten)]
    run: RunArgs,
    /// Only rows whose title contains this, such as "directly, random"; the figures are printed and not written.
    #[arg(long, value_name = "TEXT", conflicts_with = "output")]
    only: Option<String>,
}

impl Cli {
    pub fn run(self) -> anyhow::Result<()> {
        match self.benchmark {
            Benchmark::Publish(it) => run("publish", &it.options(), publish::measure),
            Benchmark::Systemd(it) => run("systemd", &it.options(), systemd::measure),
            Benchmark::Pod(it) => run("pod", &it.options(), pod::measure),
            Benchmark::Controller(it) => run("controller", &it.options(), controller::measure),
            Benchmark::Start(it) => run("start", &it.options(), start::measure),
            Benchmark::Drivers(DriversArgs { run: it, strategy }) => match strategy {
                ComparedStrategy::Systemd => run("drivers-systemd", &it.options(), drivers::measure_systemd),
                ComparedStrategy::Pod => run("drivers-pod", &it.options(), drivers::measure_pod),
            },
            Benchmark::Data(DataArgs { run: it, only }) => {
                run("data", &Options { only, ..it.options() }, data::measure)
            }
            Benchmark::Resume(it) => run("resume", &it.options(), resume::measure),
        }
    }
}

impl RunArgs {
    fn options(self) -> Options {
        // No `..`: a flag without a use does not compile.
        let Self { quick, repetitions, output } = self;
        let thoroughness = if quick { Thoroughness::Quick } else { Thoroughness::Full };
        Options { thoroughness, repetitions: repetitions.map(usize::from), only: None, output }
    }
}
