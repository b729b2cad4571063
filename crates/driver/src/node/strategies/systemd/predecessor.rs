//! Mounts that version 1 of the driver made. They are kept as they are, so their keys are refreshed where their engines
//! read them, and taken away with them.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use s3csi_core::credentials::Keys;

use super::units::Unit;
use super::{SystemdUnits, log_if_failed};
use crate::credentials;
use crate::host::{Beneath, FilesError};
use crate::node::repairs::CREDENTIALS_REMOVED;
use crate::systemd::SystemdError;

/// Version 1 named its profiles `<workload>-<volume>-s3-csi`.
const PROFILE_END: &str = "-s3-csi";
const CONFIG_END: &str = "-config";
const CREDENTIALS_END: &str = "-credentials";

/// As version 1 wrote them.
const FILE_MODE: u32 = 0o640;

/// During an update a last process of version 1 may have written files whose unit we do not see yet.
const FORGOTTEN_AFTER: Duration = Duration::from_mins(10);

/// Where the engine of an earlier driver has its keys from.
pub(super) enum Origin {
    Files(Profile),
    /// From its environment: they stay what they are until it ends.
    Fixed,
}

/// A profile of version 1: two files in the plugin's directory, named after it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Profile(String);

impl Profile {
    /// The one that an engine's environment names, if its files are in `directory`.
    fn of(environment: &[String], directory: &Path) -> Option<Self> {
        let value = |key: &str| environment.iter().find_map(|it| it.strip_prefix(key)?.strip_prefix('='));
        let name = value("AWS_PROFILE").filter(|it| is_profile(it))?;
        let is_in = |key, end| value(key).is_some_and(|it| Path::new(it) == directory.join(format!("{name}{end}")));
        let is_complete = is_in("AWS_CONFIG_FILE", CONFIG_END) && is_in("AWS_SHARED_CREDENTIALS_FILE", CREDENTIALS_END);
        is_complete.then(|| Self(name.to_owned()))
    }

    /// The one that a file belongs to.
    fn of_file(file: &str) -> Option<Self> {
        let name = file.strip_suffix(CONFIG_END).or_else(|| file.strip_suffix(CREDENTIALS_END))?;
        is_profile(name).then(|| Self(name.to_owned()))
    }

    fn config(&self) -> String {
        format!("{}{CONFIG_END}", self.0)
    }

    fn credentials(&self) -> String {
        format!("{}{CREDENTIALS_END}", self.0)
    }
}

/// What is written into a file between brackets, and is a file's name, must be one plain word.
fn is_profile(name: &str) -> bool {
    name.ends_with(PROFILE_END) && !name.contains(|it: char| it.is_control() || matches!(it, '/' | '[' | ']'))
}

impl SystemdUnits {
    /// Where the keys of a served target come from, if not from its `place`.
    pub(super) fn predecessor(
        &self,
        target: &Path,
        place: &str,
        deadline: Instant,
    ) -> Result<Option<Origin>, SystemdError> {
        let (_, ours) = credentials::paths(&self.places_view.join(place));
        let ours = format!("AWS_SHARED_CREDENTIALS_FILE={ours}");
        let units = self.known.list(&self.systemd, &self.kubelet, deadline)?;
        let serving = units.into_iter().find(|it| it.target == target && it.active.is_running());
        let environment = serving.map(|it| it.command.environment).filter(|it| !it.contains(&ours));
        Ok(environment.map(|it| self.profile(&it).map_or(Origin::Fixed, Origin::Files)))
    }

    /// Brings the keys to an engine of version 1.
    pub(super) fn refresh(&self, profile: &Profile, keys: &Keys) -> Result<(), FilesError> {
        let files = keys.profile_files_named(&profile.0);
        let directory = Beneath::open(self.plugin_directory())?;
        directory.write_atomic(&profile.config(), files.config.as_bytes(), FILE_MODE, Some(0))?;
        directory.write_atomic(&profile.credentials(), files.credentials.expose().as_bytes(), FILE_MODE, Some(0))
    }

    pub(super) fn remove_profile(&self, profile: &Profile) -> Result<(), FilesError> {
        let directory = Beneath::open(self.plugin_directory())?;
        directory.remove_file(&profile.credentials())?;
        directory.remove_file(&profile.config())
    }

    /// Profiles that no unit uses any more: after a restart of the node there are no units of version 1.
    pub(super) fn sweep_profiles(&self, units: &[Unit]) {
        let used: BTreeSet<Profile> = units.iter().filter_map(|it| self.profile(&it.command.environment)).collect();
        let Ok(entries) = fs::read_dir(self.plugin_directory()) else { return };
        let is_old = |it: &fs::DirEntry| {
            let age = it.metadata().and_then(|it| it.modified()).ok().and_then(|it| it.elapsed().ok());
            age.is_some_and(|it| it > FORGOTTEN_AFTER)
        };
        let old = entries.flatten().filter(is_old).filter_map(|it| Profile::of_file(it.file_name().to_str()?));
        for profile in old.collect::<BTreeSet<_>>().difference(&used) {
            let removed = self.remove_profile(profile);
            if removed.is_ok() {
                self.repairs.done(CREDENTIALS_REMOVED, Path::new(&profile.0), "");
            }
            log_if_failed("keys of version 1 not removed", removed);
        }
    }

    fn profile(&self, environment: &[String]) -> Option<Profile> {
        Profile::of(environment, self.places_view.parent()?)
    }

    /// Where version 1 wrote its files; our places are beneath it.
    fn plugin_directory(&self) -> &Path {
        self.places.parent().unwrap_or(&self.places)
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
    fn profiles_of_version_1_are_known_by_their_names_and_their_place() {
        let files = ["/plugins/s3/uid-vol-s3-csi-config", "/plugins/s3/uid-vol-s3-csi-credentials"];
        check("uid-vol-s3-csi", files[0], files[1], Some("uid-vol-s3-csi"));
        // Ours, which are elsewhere and have one name for all.
        check("s3-csi", "/plugins/s3/systemd/mp-1/s3-csi-config", "/plugins/s3/systemd/mp-1/s3-csi-credentials", None);
        check("other-vol-s3-csi", files[0], files[1], None);
        check("uid-vol-s3-csi", "/etc/uid-vol-s3-csi-config", "/etc/uid-vol-s3-csi-credentials", None);
        check("../x-s3-csi", "/plugins/s3/../x-s3-csi-config", "/plugins/s3/../x-s3-csi-credentials", None);
        check("uid-vol-s3-csi", files[0], "", None);
    }

    #[test]
    fn other_files_of_the_plugin_are_no_profiles() {
        assert_eq!(Profile::of_file("a-b-s3-csi-credentials"), Some(Profile("a-b-s3-csi".to_owned())));
        assert_eq!(Profile::of_file("a-b-s3-csi-config"), Some(Profile("a-b-s3-csi".to_owned())));
        for other in ["csi.sock", "systemd", "s3-csi-credentials", "a-b-s3-csi", "credentials"] {
            assert_eq!(Profile::of_file(other), None, "{other}");
        }
    }
}
