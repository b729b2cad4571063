//! The certificates that the client trusts: those of the system or of `--ca-bundle`, and those that the volume brings.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};

use rustix::fs::MemfdFlags;

/// A file in memory with all certificates: the client library takes a path. It exists as long as this value.
pub struct TrustFile {
    file: File,
}

impl TrustFile {
    /// `None` if there are no additional ones: then the client trusts what it trusts by itself.
    pub fn new(base: Option<&Path>, additional: Option<&Path>) -> io::Result<Option<Self>> {
        let additional = match additional.map(fs::read) {
            None => return Ok(None),
            Some(Err(error)) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Some(content) => content?,
        };
        let base = base.or(s3csi_supervisor::system_ca_bundle()).map(fs::read).transpose()?;
        let mut file = File::from(rustix::fs::memfd_create("certificates", MemfdFlags::CLOEXEC)?);
        file.write_all(&base.unwrap_or_default())?;
        // PEM is line by line, and the last line of a file may lack its end.
        file.write_all(b"\n")?;
        file.write_all(&additional)?;
        Ok(Some(Self { file }))
    }

    pub fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.file.as_raw_fd()).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn additional_certificates_follow_the_others() {
        let place = tempfile::tempdir().unwrap();
        let [base, additional] = ["base", "additional"].map(|it| place.path().join(it));
        fs::write(&base, "base").unwrap();
        let trusted = TrustFile::new(Some(&base), Some(&additional)).unwrap();
        assert!(trusted.is_none(), "the volume brings none at the moment");
        fs::write(&additional, "additional").unwrap();
        let trusted = TrustFile::new(Some(&base), Some(&additional)).unwrap().unwrap();
        assert_eq!(fs::read_to_string(trusted.path()).unwrap(), "base\nadditional");
        assert!(TrustFile::new(Some(&base), None).unwrap().is_none());
    }
}
