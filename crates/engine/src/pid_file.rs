//! The file with the ID of the process that a user signals to stop the mount.

use std::path::{Path, PathBuf};
use std::{fs, io, process};

#[derive(Debug, thiserror::Error)]
#[error("cannot write the process id to {path:?}")]
pub struct PidFileError {
    path: PathBuf,
    #[source]
    cause: io::Error,
}

pub fn write(path: &Path) -> Result<(), PidFileError> {
    fs::write(path, process::id().to_string()).map_err(|cause| PidFileError { path: path.to_owned(), cause })
}
