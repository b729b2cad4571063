//! `s3csi-testbed`: the testbed's parts as programs, for a terminal.
#![forbid(unsafe_code)]

mod cli;

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    match cli::Cli::parse().run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("s3csi-testbed: {error:#}");
            ExitCode::FAILURE
        }
    }
}
