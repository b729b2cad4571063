//! The staging directories of engines: one for each source, where its engines keep large files that are edited in place.
//!
//! Unlike a cache, the directory outlives the mounter: an engine of the next mounter that resumes the mount continues with the files.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use s3csi_core::quantity::Quantity;
use s3csi_core::stage::usable_mebibytes;
use s3csi_handoff::SourceName;
use s3csi_supervisor::{StageSpec, log};

use crate::directory::Directory;

/// The staging directory of a mounter's only source.
const ONLY_SOURCE: &str = "source";

/// The parent of those of named sources.
const NAMED_SOURCES: &str = "sources";

/// Where the staging directories of this mounter are.
#[derive(Debug)]
pub struct Stages {
    root: PathBuf,
    /// For each source.
    mebibytes: u64,
    /// Has a directory for each named source that may be in use.
    sources: Arc<Directory>,
}

/// The staging directory of one source.
#[derive(Debug)]
pub struct SourceStage {
    path: PathBuf,
    mebibytes: u64,
}

#[derive(Debug, thiserror::Error)]
#[error("failed to create the staging directory {path:?}")]
pub struct StageError {
    path: PathBuf,
    #[source]
    cause: io::Error,
}

impl Stages {
    pub fn open(root: PathBuf, size: &Quantity, sources: Arc<Directory>) -> Self {
        Self { root, mebibytes: usable_mebibytes(size), sources }
    }

    /// The directory of a source. Files that its previous engines left are still there; the first engine of a mount removes them.
    pub fn create(&self, source: Option<&SourceName>) -> Result<SourceStage, StageError> {
        self.remove_unused();
        let path = match source {
            None => self.root.join(ONLY_SOURCE),
            Some(name) => self.root.join(NAMED_SOURCES).join(name.as_str()),
        };
        let created = DirBuilder::new().recursive(true).mode(0o700).create(&path);
        created.map_err(|cause| StageError { path: path.clone(), cause })?;
        Ok(SourceStage { path, mebibytes: self.mebibytes })
    }

    /// Removes what a killed mounter left of sources that are gone: the node plugin removes the directory of a source last.
    fn remove_unused(&self) {
        let Ok(entries) = std::fs::read_dir(self.root.join(NAMED_SOURCES)) else { return };
        for entry in entries.flatten() {
            if entry.file_name().to_str().is_some_and(|name| !self.sources.has(name)) {
                remove(&entry.path());
            }
        }
    }
}

impl SourceStage {
    pub fn spec(&self) -> StageSpec<'_> {
        StageSpec { path: &self.path, mebibytes: self.mebibytes }
    }

    /// The mount has ended.
    pub fn remove(self) {
        remove(&self.path);
    }
}

fn remove(path: &Path) {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            log::warn("staging directory not removed", &[("path", &path.display()), ("error", &error)]);
        }
        Ok(()) | Err(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn stages(root: &Path, sources: &Path) -> Stages {
        let sources = Arc::new(Directory::open(sources).unwrap());
        Stages::open(root.to_owned(), &"1Gi".parse().unwrap(), sources)
    }

    fn names_in(path: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(path).unwrap();
        entries.map(|it| it.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn a_source_finds_its_files_again_until_it_has_ended() {
        let (root, sources) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let stage = stages(root.path(), sources.path()).create(None).unwrap();
        let path = stage.spec().path.to_owned();
        assert_eq!(stage.spec().mebibytes, 972);
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
        std::fs::write(path.join("file"), "x").unwrap();
        let again = stages(root.path(), sources.path()).create(None).unwrap();
        assert_eq!(names_in(again.spec().path), ["file"]);
        again.remove();
        assert!(!path.exists());
    }

    #[test]
    fn the_directories_of_sources_that_are_gone_are_removed() {
        let (root, sources) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for name in ["one", "two", "three"] {
            std::fs::create_dir(sources.path().join(name)).unwrap();
        }
        let killed = stages(root.path(), sources.path());
        for name in ["one", "two"] {
            killed.create(Some(&name.parse().unwrap())).unwrap();
        }
        std::fs::remove_dir(sources.path().join("one")).unwrap();
        stages(root.path(), sources.path()).create(Some(&"three".parse().unwrap())).unwrap();
        let mut left = names_in(&root.path().join(NAMED_SOURCES));
        left.sort();
        assert_eq!(left, ["three", "two"]);
    }
}
