//! Units of ours: how they are named, which there are, and for which target each of them works.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::systemd::{ActiveState, Systemd, SystemdError, UnitCommand, random_uuid};

const PREFIX: &str = "mount-s3-";
const UMOUNT_PREFIX: &str = "mount-s3-umount-";
const PATTERN: &str = "mount-s3-*.service";

/// A unit that serves, served or will serve a target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    pub name: String,
    pub active: ActiveState,
    pub has_job: bool,
    pub target: PathBuf,
    pub command: UnitCommand,
}

/// What units run cannot change, so it is asked for once. It is also what is known of a unit after its end.
#[derive(Debug, Default)]
pub struct Known(Mutex<HashMap<String, Facts>>);

#[derive(Debug)]
struct Facts {
    command: UnitCommand,
    /// How many engines it was heard to have had.
    engines: u64,
}

pub fn mount_unit_name() -> Result<String, SystemdError> {
    let uuid = random_uuid().map_err(|cause| SystemdError::Random { cause })?;
    Ok(format!("{PREFIX}{}-{uuid}.service", env!("CARGO_PKG_VERSION")))
}

pub fn umount_unit_name() -> Result<String, SystemdError> {
    let uuid = random_uuid().map_err(|cause| SystemdError::Random { cause })?;
    Ok(format!("{UMOUNT_PREFIX}{uuid}.service"))
}

/// Whether a unit of this name serves a mount, ours or a predecessor's.
pub fn is_mount_unit(name: &str) -> bool {
    name.starts_with(PREFIX) && !name.starts_with(UMOUNT_PREFIX) && name.ends_with(".service")
}

/// The engine's last argument.
pub fn target_of(command: &UnitCommand) -> Option<&Path> {
    command.command.last().map(Path::new).filter(|it| it.is_absolute())
}

impl Known {
    pub fn insert(&self, unit: &str, command: UnitCommand) {
        self.map().insert(unit.to_owned(), Facts { command, engines: 1 });
    }

    /// Whether this number of engines was not heard of before. systemd repeats what a unit says whenever something else changes.
    pub fn is_news(&self, unit: &str, engines: u64) -> bool {
        let mut map = self.map();
        let Some(facts) = map.get_mut(unit).filter(|it| it.engines < engines) else { return false };
        facts.engines = engines;
        true
    }

    pub fn get(&self, unit: &str) -> Option<UnitCommand> {
        self.map().get(unit).map(|it| it.command.clone())
    }

    pub fn forget(&self, unit: &str) {
        self.map().remove(unit);
    }

    pub fn names(&self) -> Vec<String> {
        self.map().keys().cloned().collect()
    }

    /// Every unit that works for a target beneath kubelet's directory.
    pub fn list(&self, systemd: &Systemd, kubelet: &Path, deadline: Instant) -> Result<Vec<Unit>, SystemdError> {
        let mut units = Vec::new();
        for row in systemd.list(PATTERN, deadline)? {
            if !is_mount_unit(&row.name) {
                continue;
            }
            let command = match self.get(&row.name) {
                Some(command) => command,
                // It may have ended since it was listed.
                None => match systemd.command(&row.name, deadline)? {
                    Some(command) => {
                        self.insert(&row.name, command.clone());
                        command
                    }
                    None => continue,
                },
            };
            if let Some(target) = target_of(&command).filter(|it| it.starts_with(kubelet)) {
                let target = target.to_owned();
                units.push(Unit { name: row.name, active: row.active, has_job: row.has_job, target, command });
            }
        }
        Ok(units)
    }

    fn map(&self) -> MutexGuard<'_, HashMap<String, Facts>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_mounts_from_unmounts() {
        assert!(is_mount_unit(&mount_unit_name().unwrap()));
        assert!(is_mount_unit("mount-s3-v1.12.0-a1b2c3d4-e5f6-7890-abcd-ef1234567890.service"));
        assert!(!is_mount_unit(&umount_unit_name().unwrap()));
        assert!(!is_mount_unit("mount-s3.service"));
        assert!(!is_mount_unit("mount-s3-x.mount"));
    }
}
