//! `s3csi-bench`, run by `make bench`: what publishing costs above the engine's own start, how soon workloads get their Mountpoint
//! Pods, our driver beside AWS's, our data path beside other S3 file systems, and the pause when an engine dies. Never shipped.
//! Everything that is compared is measured in one run, in turns, so that noise of the machine affects all alike.
#![forbid(unsafe_code)]

mod at_once;
mod cli;
mod clients;
mod content;
mod controller;
mod data;
mod delay;
mod drivers;
mod floor;
mod footprint;
mod latency;
mod limit;
mod machine;
mod pod;
mod pod_start;
mod publish;
mod publisher;
mod report;
mod resume;
mod rounds;
mod run;
mod scratch;
mod start;
mod statistics;
mod systemd;
mod tree;
mod verdicts;
mod workload;

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    match cli::Cli::parse().run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("s3csi-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}
