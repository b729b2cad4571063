//! The files that an engine reads its keys from, and the certificates that it trusts. They are written atomically, for its group only,
//! on every publish, so that rotated keys reach a running engine.

pub mod driver;
mod http;
mod issued;
pub mod issuer;
pub mod profile;
mod timestamp;
pub mod workload;

use std::path::{Path, PathBuf};
use std::{fs, io};

use s3csi_core::ca_certificates::{CaCertificates, InvalidCaCertificates};
use s3csi_core::credentials::Keys;

use crate::host::{SafeDir, SafeDirError};

pub const DIRECTORY: &str = "credentials";
const CONFIG: &str = "s3-csi-config";
const CREDENTIALS: &str = "s3-csi-credentials";
const CA_BUNDLE: &str = "s3-csi-ca.crt";

/// The mounter runs as another user and has access through its group.
const DIRECTORY_MODE: u32 = 0o2750;
const FILE_MODE: u32 = 0o640;

/// The files as the engine sees them.
pub struct EngineFiles {
    pub config: String,
    pub credentials: String,
    /// It exists if the volume brings certificates.
    pub ca_bundle: String,
}

/// Writes the keys into the directory of one source, readable for `group`.
pub fn ensure(parent: &SafeDir, keys: &Keys, group: u32) -> Result<(), SafeDirError> {
    let directory = parent.make_directory(DIRECTORY, DIRECTORY_MODE, Some(group))?;
    let files = keys.profile_files();
    // Before the keys, whose change makes the mounter start an engine that reads both.
    match &files.ca_certificates {
        Some(pem) => directory.write_atomic(CA_BUNDLE, pem.as_str().as_bytes(), FILE_MODE, Some(group))?,
        None => directory.remove_file(CA_BUNDLE)?,
    }
    directory.write_atomic(CONFIG, files.config.as_bytes(), FILE_MODE, Some(group))?;
    directory.write_atomic(CREDENTIALS, files.credentials.expose().as_bytes(), FILE_MODE, Some(group))
}

/// Why the driver's own certificates for engines cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CaBundleError {
    #[error("failed to read {path:?}")]
    Read {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },

    #[error("{path:?} cannot be used; correct the ConfigMap that the chart value tls.caCertConfigMap names")]
    Invalid {
        path: PathBuf,
        #[source]
        cause: InvalidCaCertificates,
    },
}

/// The driver's own certificates for engines. Read for every publish: the file is part of a `ConfigMap`, which changes.
pub fn read_ca_bundle(path: &Path) -> Result<CaCertificates, CaBundleError> {
    let text = fs::read_to_string(path).map_err(|cause| CaBundleError::Read { path: path.to_owned(), cause })?;
    text.parse().map_err(|cause| CaBundleError::Invalid { path: path.to_owned(), cause })
}

/// The files of an engine that sees the source's directory at `view`.
pub fn paths(view: &Path) -> EngineFiles {
    let path = |name| view.join(DIRECTORY).join(name).to_string_lossy().into_owned();
    EngineFiles { config: path(CONFIG), credentials: path(CREDENTIALS), ca_bundle: path(CA_BUNDLE) }
}
