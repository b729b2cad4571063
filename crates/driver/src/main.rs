//! The `s3csi` binary.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    s3csi_driver::cli::Cli::parse().run()
}
