//! `s3csi install-engine`.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;

use crate::install;

/// File name of the engine.
const ENGINE: &str = "mount-s3";

#[derive(Args, Debug)]
pub struct InstallEngineArgs {
    /// Directory to install into; created if it does not exist.
    #[arg(value_name = "DIRECTORY")]
    directory: PathBuf,

    /// The engine to install [default: the `mount-s3` beside this program]
    #[arg(long, value_name = "PATH")]
    from: Option<PathBuf>,
}

impl InstallEngineArgs {
    pub fn run(self) -> anyhow::Result<()> {
        let Self { directory, from } = self;
        let engine = match from {
            Some(engine) => engine,
            None => std::env::current_exe().context("failed to find the path of this program")?.with_file_name(ENGINE),
        };
        let installed = install::engine(&engine, &directory, ENGINE)?;
        println!("installed {}", installed.display());
        Ok(())
    }
}
