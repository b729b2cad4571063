//! The certificates that engines trust if an administrator gives some: those of the system, and these.
//!
//! AWS's meaning of `AWS_CA_BUNDLE` is "instead of the system's". Drivers have always added a private CA to the system's, so the engine
//! gets a file with both.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::{fs, io};

use crate::log;

/// Where Linux distributions keep the system's bundle; the image has the first.
const SYSTEM_BUNDLES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// The certificates that programs of this system trust.
pub fn system_ca_bundle() -> Option<&'static Path> {
    SYSTEM_BUNDLES.iter().map(Path::new).find(|it| it.is_file())
}

/// The name of the file with both.
const COMBINED: &str = "ca-bundle.crt";

/// Makes the names of drafts unique in this process.
static DRAFTS: AtomicU64 = AtomicU64::new(0);

/// Certificates that are trusted in addition to the system's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CaBundle {
    given: PathBuf,
    combined: PathBuf,
}

impl CaBundle {
    /// The file with both is written to `directory`.
    pub fn new(given: PathBuf, directory: &Path) -> Self {
        Self { given, combined: directory.join(COMBINED) }
    }

    /// The file that an engine reads. It is written for each engine, because the given file is part of a `ConfigMap`, which changes.
    /// If that fails, the given certificates alone are trusted.
    pub fn prepare(&self) -> &Path {
        match self.combine(system_ca_bundle()) {
            Ok(()) => &self.combined,
            Err(error) => {
                let file = self.given.display();
                log::warn("only the given CA certificates are trusted", &[("file", &file), ("error", &error)]);
                &self.given
            }
        }
    }

    fn combine(&self, system: Option<&Path>) -> io::Result<()> {
        let mut both = system.map(fs::read).transpose()?.unwrap_or_default();
        // PEM is line by line, and the last line of a file may lack its end.
        both.push(b'\n');
        both.extend(fs::read(&self.given)?);
        let draft = self.combined.with_file_name(format!(".{COMBINED}.{}", DRAFTS.fetch_add(1, Ordering::Relaxed)));
        fs::write(&draft, both).and_then(|()| fs::rename(&draft, &self.combined)).inspect_err(|_| {
            let _ = fs::remove_file(&draft);
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_given_certificates_are_added_to_those_of_the_system() {
        let place = tempfile::tempdir().unwrap();
        let (system, given) = (place.path().join("system"), place.path().join("given"));
        fs::write(&system, "system").unwrap();
        let bundle = CaBundle::new(given.clone(), place.path());
        for content in ["given", "changed"] {
            fs::write(&given, content).unwrap();
            bundle.combine(Some(&system)).unwrap();
            assert_eq!(fs::read_to_string(place.path().join(COMBINED)).unwrap(), format!("system\n{content}"));
        }
        bundle.combine(None).unwrap();
        assert_eq!(fs::read_to_string(place.path().join(COMBINED)).unwrap(), "\nchanged");
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 3, "no draft stays");
    }

    #[test]
    fn where_nothing_can_be_written_the_given_certificates_are_trusted() {
        let bundle = CaBundle::new("/given".into(), Path::new("/no/such/directory"));
        assert_eq!(bundle.prepare(), Path::new("/given"));
    }
}
