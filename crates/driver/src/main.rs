//! The `s3csi` binary.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser as _;
use s3csi_handoff::core_dumps;

fn main() -> ExitCode {
    // This process holds the keys of all tenants of a node.
    core_dumps::forbid_core_dumps();
    core_dumps::forbid_inspection();
    s3csi_driver::cli::Cli::parse().run()
}
