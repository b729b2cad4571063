//! Directories that the node plugin creates before it serves.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

/// The mode of a directory that a group writes to, and whose content belongs to the group.
const SHARED_DIRECTORY_MODE: u32 = 0o2770;

/// Creates a directory for a group, or gives it to the group. In a container it is a mount point; its parent belongs to root.
pub fn share_directory(path: &Path, group: u32) -> anyhow::Result<()> {
    let failed = || format!("failed to create {} for group {group}", path.display());
    std::fs::create_dir_all(path).with_context(failed)?;
    std::os::unix::fs::chown(path, None, Some(group)).with_context(failed)?;
    // After the owner, whose change clears the bit for the group.
    std::fs::set_permissions(path, Permissions::from_mode(SHARED_DIRECTORY_MODE)).with_context(failed)
}

/// Creates a directory and returns its path as the mount table spells it: kubelet's directory is a symbolic link on some nodes.
pub fn resolved_directory(path: &Path) -> anyhow::Result<PathBuf> {
    std::fs::create_dir_all(path).with_context(|| format!("failed to create {}", path.display()))?;
    path.canonicalize().with_context(|| format!("failed to resolve {}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn a_directory_of_the_mounter_belongs_to_its_group_whichever_process_created_it() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("run/driver");
        let group = std::fs::metadata(root.path()).unwrap().gid();
        share_directory(&directory, group).unwrap();
        std::fs::write(directory.join("kept"), "").unwrap();
        share_directory(&directory, group).unwrap();
        let found = std::fs::metadata(&directory).unwrap();
        assert_eq!((found.gid(), found.mode() & 0o7777), (group, SHARED_DIRECTORY_MODE));
        assert!(directory.join("kept").exists());
    }
}
