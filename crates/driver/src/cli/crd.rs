//! `s3csi crd`.

use std::io::{self, Write as _};

use anyhow::Context as _;
use clap::Args;

use crate::api;

#[derive(Args, Debug)]
pub struct CrdArgs {
    /// Name of the driver; the API group derives from it.
    #[arg(long, env = "DRIVER_NAME", value_name = "NAME", default_value = "s3.csi.scality.com")]
    driver_name: String,
}

impl CrdArgs {
    pub fn run(self) -> anyhow::Result<()> {
        let Self { driver_name } = self;
        let definition = api::attachment_definition_yaml(&driver_name).context("failed to write the definition")?;
        io::stdout().write_all(definition.as_bytes()).context("failed to print the definition")
    }
}
