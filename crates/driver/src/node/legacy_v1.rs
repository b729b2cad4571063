//! The key files of mounts that version 1 of the driver made. These mounts keep running under every strategy, so their keys are
//! refreshed in the files that their engines read, and removed with the mounts.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use s3csi_core::credentials::Keys;
use s3csi_core::identifiers::WorkloadUid;

use super::remediation::{CREDENTIALS_REMOVED, Remediations};
use crate::host::{SafeDir, SafeDirError};

/// Version 1 named its profiles `<workload>-<volume>-s3-csi`.
const PROFILE_END: &str = "-s3-csi";
const CONFIG_END: &str = "-config";
const CREDENTIALS_END: &str = "-credentials";

pub const CREDENTIALS_VARIABLE: &str = "AWS_SHARED_CREDENTIALS_FILE";

/// As version 1 wrote them.
const FILE_MODE: u32 = 0o640;

/// During an upgrade a last process of version 1 may have written files whose unit is not listed yet.
const GRACE_PERIOD: Duration = Duration::from_mins(10);

/// The profiles of version 1: two files each in the plugin's directory.
pub struct LegacyProfiles {
    pub directory: PathBuf,
    /// The same directory as the host sees it.
    pub host_view: PathBuf,
}

/// A profile of version 1, by name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Profile(String);

impl Profile {
    /// The profile in an engine's environment, if its files are in `directory`.
    fn of(environment: &[String], directory: &Path) -> Option<Self> {
        let value = |key: &str| environment.iter().find_map(|it| it.strip_prefix(key)?.strip_prefix('='));
        let name = value("AWS_PROFILE").filter(|it| is_profile(it))?;
        let is_in = |key, end| value(key).is_some_and(|it| Path::new(it) == directory.join(format!("{name}{end}")));
        let is_complete = is_in("AWS_CONFIG_FILE", CONFIG_END) && is_in(CREDENTIALS_VARIABLE, CREDENTIALS_END);
        is_complete.then(|| Self(name.to_owned()))
    }

    /// Whether a volume of this workload uses it.
    pub fn is_of(&self, workload: &WorkloadUid) -> bool {
        self.0.strip_prefix(workload.as_str()).is_some_and(|it| it.starts_with('-'))
    }

    /// The profile that a file belongs to.
    fn of_file(file: &str) -> Option<Self> {
        let name = file.strip_suffix(CONFIG_END).or_else(|| file.strip_suffix(CREDENTIALS_END))?;
        is_profile(name).then(|| Self(name.to_owned()))
    }

    fn write(&self, directory: &SafeDir, keys: &Keys, group: u32) -> Result<(), SafeDirError> {
        let files = keys.profile_files_named(&self.0);
        directory.write_atomic(&self.config(), files.config.as_bytes(), FILE_MODE, Some(group))?;
        directory.write_atomic(&self.credentials(), files.credentials.expose().as_bytes(), FILE_MODE, Some(group))
    }

    fn config(&self) -> String {
        format!("{}{CONFIG_END}", self.0)
    }

    fn credentials(&self) -> String {
        format!("{}{CREDENTIALS_END}", self.0)
    }
}

/// The name is written between brackets into a file and is part of a file name.
fn is_profile(name: &str) -> bool {
    name.ends_with(PROFILE_END) && !name.contains(|it: char| it.is_control() || matches!(it, '/' | '[' | ']'))
}

/// A Mountpoint Pod has one profile for each workload that an earlier driver published; a hostile one may have any number.
const MAXIMUM_PROFILES: usize = 64;

/// Writes new keys for the engine of a Mountpoint Pod that an earlier driver mounted: into the same files in its credentials directory.
pub fn refresh_profiles_in(directory: &SafeDir, keys: &Keys, group: u32) -> Result<(), SafeDirError> {
    let Ok(entries) = fs::read_dir(directory.path()) else { return Ok(()) };
    let files = entries.flatten().filter_map(|it| it.file_name().into_string().ok());
    let profiles: BTreeSet<Profile> = files.filter_map(|it| Profile::of_file(&it)).take(MAXIMUM_PROFILES).collect();
    for profile in &profiles {
        profile.write(directory, keys, group)?;
    }
    Ok(())
}

impl LegacyProfiles {
    /// The profile in an engine's environment.
    pub fn of_environment(&self, environment: &[String]) -> Option<Profile> {
        Profile::of(environment, &self.host_view)
    }

    /// The profile of a workload's volume, if version 1 wrote one: its name has both, with `~` for `/`.
    pub fn of_workload(&self, workload: &WorkloadUid, volume_id: &str) -> Option<Profile> {
        let escaped = |it: &str| it.replace('/', "~");
        let name = format!("{}-{}{PROFILE_END}", escaped(workload.as_str()), escaped(volume_id));
        let profile = is_profile(&name).then_some(Profile(name))?;
        self.directory.join(profile.credentials()).symlink_metadata().is_ok().then_some(profile)
    }

    /// Writes new keys for an engine of version 1.
    pub fn refresh(&self, profile: &Profile, keys: &Keys) -> Result<(), SafeDirError> {
        profile.write(&SafeDir::open(&self.directory)?, keys, 0)
    }

    pub fn remove(&self, profile: &Profile) -> Result<(), SafeDirError> {
        let directory = SafeDir::open(&self.directory)?;
        directory.remove_file(&profile.credentials())?;
        directory.remove_file(&profile.config())
    }

    /// Removes profiles without a mount: those of a node that was rebooted, and those that 2.x left when their workloads ended.
    pub fn remove_unused(&self, is_used: impl Fn(&Profile) -> bool, remediations: &Remediations) {
        let Ok(entries) = fs::read_dir(&self.directory) else { return };
        let is_old = |it: &fs::DirEntry| {
            let age = it.metadata().and_then(|it| it.modified()).ok().and_then(|it| it.elapsed().ok());
            age.is_some_and(|it| it > GRACE_PERIOD)
        };
        let old = entries.flatten().filter(is_old).filter_map(|it| Profile::of_file(it.file_name().to_str()?));
        for profile in old.collect::<BTreeSet<_>>().into_iter().filter(|it| !is_used(it)) {
            match self.remove(&profile) {
                Ok(()) => remediations.record(CREDENTIALS_REMOVED, Path::new(&profile.0), ""),
                Err(error) => tracing::warn!(%error, "keys of version 1 not removed; the next sweep retries"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(profile: &str, config: &str, credentials: &str, expected: Option<&str>) {
        let environment = [
            "AWS_REGION=eu-1".to_owned(),
            format!("AWS_PROFILE={profile}"),
            format!("AWS_CONFIG_FILE={config}"),
            format!("AWS_SHARED_CREDENTIALS_FILE={credentials}"),
        ];
        let found = Profile::of(&environment, Path::new("/plugins/s3/"));
        assert_eq!(found.map(|it| it.0).as_deref(), expected);
    }

    #[test]
    fn profiles_of_version_1_are_recognised_by_name_and_directory() {
        let files = ["/plugins/s3/uid-vol-s3-csi-config", "/plugins/s3/uid-vol-s3-csi-credentials"];
        check("uid-vol-s3-csi", files[0], files[1], Some("uid-vol-s3-csi"));
        // Ours: another directory, and the same profile name for all.
        check("s3-csi", "/plugins/s3/systemd/mp-1/s3-csi-config", "/plugins/s3/systemd/mp-1/s3-csi-credentials", None);
        check("other-vol-s3-csi", files[0], files[1], None);
        check("uid-vol-s3-csi", "/etc/uid-vol-s3-csi-config", "/etc/uid-vol-s3-csi-credentials", None);
        check("../x-s3-csi", "/plugins/s3/../x-s3-csi-config", "/plugins/s3/../x-s3-csi-credentials", None);
        check("uid-vol-s3-csi", files[0], "", None);
    }

    #[test]
    fn a_workloads_profile_is_found_by_its_files() {
        let directory = tempfile::tempdir().unwrap();
        let profiles = LegacyProfiles { directory: directory.path().to_owned(), host_view: "/plugins/s3".into() };
        let workload: WorkloadUid = "5a6c1b6e-1111-4111-8111-111111111111".parse().unwrap();
        assert_eq!(profiles.of_workload(&workload, "a/b"), None);
        let name = format!("{}-a~b-s3-csi", workload.as_str());
        fs::write(directory.path().join(format!("{name}-credentials")), "").unwrap();
        let found = profiles.of_workload(&workload, "a/b").unwrap();
        assert_eq!(found, Profile(name));
        assert!(found.is_of(&workload));
        assert!(!found.is_of(&"5a6c1b6e-2222-4222-8222-222222222222".parse().unwrap()));
    }

    #[test]
    fn other_files_are_no_profiles() {
        assert_eq!(Profile::of_file("a-b-s3-csi-credentials"), Some(Profile("a-b-s3-csi".to_owned())));
        assert_eq!(Profile::of_file("a-b-s3-csi-config"), Some(Profile("a-b-s3-csi".to_owned())));
        for other in ["csi.sock", "systemd", "s3-csi-credentials", "a-b-s3-csi", "credentials"] {
            assert_eq!(Profile::of_file(other), None, "{other}");
        }
    }
}
