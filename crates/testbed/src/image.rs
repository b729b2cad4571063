//! The container image of our programs as they were built, for clusters of the testbed.

use std::io;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::environment::{self, MissingProgram};

/// What scripts/cluster.sh tells the chart to run.
pub const NAME: &str = "localhost/s3csi:test";

#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    #[error("the programs are missing")]
    Missing {
        #[source]
        cause: MissingProgram,
    },
    #[error("failed to run scripts/image.sh")]
    Run {
        #[source]
        cause: io::Error,
    },
    #[error("scripts/image.sh: {output}")]
    Failed { output: String },
}

/// Writes the archive and returns the image's digest.
pub fn write(output: &Path) -> Result<String, ImageError> {
    let program = environment::product("s3csi").map_err(|cause| ImageError::Missing { cause })?;
    let mut script = Command::new(environment::workspace().join("scripts/image.sh"));
    script.arg(program.parent().unwrap_or(Path::new("/"))).arg(output).arg(NAME).stdin(Stdio::null());
    let made = script.output().map_err(|cause| ImageError::Run { cause })?;
    if !made.status.success() {
        return Err(ImageError::Failed { output: String::from_utf8_lossy(&made.stderr).into_owned() });
    }
    Ok(String::from_utf8_lossy(&made.stdout).trim().to_owned())
}
