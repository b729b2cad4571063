//! The files that an engine reads its keys from. They are written atomically, for its group only, on every publish, so that
//! rotated keys reach a running engine.

pub mod driver;
mod http;
mod issued;
pub mod issuer;
pub mod profile;
mod timestamp;
pub mod workload;

use std::path::Path;

use s3csi_core::credentials::Keys;

use crate::host::{SafeDir, SafeDirError};

pub const DIRECTORY: &str = "credentials";
const CONFIG: &str = "s3-csi-config";
const CREDENTIALS: &str = "s3-csi-credentials";

/// The mounter runs as another user and has access through its group.
const DIRECTORY_MODE: u32 = 0o2750;
const FILE_MODE: u32 = 0o640;

/// Writes the keys into the directory of one source, readable for `group`.
pub fn ensure(parent: &SafeDir, keys: &Keys, group: u32) -> Result<(), SafeDirError> {
    let directory = parent.make_directory(DIRECTORY, DIRECTORY_MODE, Some(group))?;
    let files = keys.profile_files();
    directory.write_atomic(CONFIG, files.config.as_bytes(), FILE_MODE, Some(group))?;
    directory.write_atomic(CREDENTIALS, files.credentials.expose().as_bytes(), FILE_MODE, Some(group))
}

/// The two files as the engine sees them, when it sees the source's directory at `view`.
pub fn paths(view: &Path) -> (String, String) {
    let path = |name| view.join(DIRECTORY).join(name).to_string_lossy().into_owned();
    (path(CONFIG), path(CREDENTIALS))
}
