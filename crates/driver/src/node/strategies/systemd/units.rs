//! Our units: their names, their targets, and a cache of their commands.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use uuid::Uuid;

use crate::systemd::{ActiveState, Systemd, SystemdError, UnitCommand};

const PREFIX: &str = "mount-s3-";
const UMOUNT_PREFIX: &str = "mount-s3-umount-";
const PATTERN: &str = "mount-s3-*.service";

/// A unit for a target, in any state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    pub name: String,
    pub active: ActiveState,
    pub has_job: bool,
    pub target: PathBuf,
    pub command: UnitCommand,
}

/// The commands of units, which never change. Also what is left of a unit after its end.
#[derive(Debug, Default)]
pub struct UnitCache {
    units: Mutex<HashMap<String, CachedUnit>>,
    /// Held while units are listed. Each list names all mounts of the node, and a hundred publishes may ask for it at once; systemd
    /// answers them one after the other anyway.
    listing: Mutex<()>,
}

#[derive(Debug)]
struct CachedUnit {
    command: UnitCommand,
    /// How many engines its supervisor has reported so far.
    engines: u64,
    /// When it was killed, until its next supervisor has reported an engine.
    killed: Option<Instant>,
}

impl Unit {
    /// Its processes may be running, or will be: systemd restarts it.
    pub const fn is_running(&self) -> bool {
        self.active.is_running() || self.has_job
    }
}

pub fn mount_unit_name() -> String {
    format!("{PREFIX}{}-{}.service", env!("CARGO_PKG_VERSION"), Uuid::new_v4())
}

pub fn umount_unit_name() -> String {
    format!("{UMOUNT_PREFIX}{}.service", Uuid::new_v4())
}

/// Whether a unit of this name serves a mount, in any version of the driver.
pub fn is_mount_unit(name: &str) -> bool {
    name.starts_with(PREFIX) && !name.starts_with(UMOUNT_PREFIX) && name.ends_with(".service")
}

/// The engine's last argument.
pub fn target_of(command: &UnitCommand) -> Option<&Path> {
    command.command.last().map(Path::new).filter(|it| it.is_absolute())
}

impl UnitCache {
    pub fn insert(&self, unit: &str, command: UnitCommand) {
        self.units.lock().insert(unit.to_owned(), CachedUnit { command, engines: 1, killed: None });
    }

    /// Whether this number of engines is new. systemd repeats the status text whenever another property changes.
    pub fn is_new_engine(&self, unit: &str, engines: u64) -> bool {
        let mut map = self.units.lock();
        let Some(cached) = map.get_mut(unit).filter(|it| it.engines < engines) else { return false };
        cached.engines = engines;
        true
    }

    /// Its next supervisor counts engines from the beginning. Returns whether this is new: systemd repeats the state, too.
    pub fn note_restart(&self, unit: &str) -> bool {
        let mut map = self.units.lock();
        let Some(cached) = map.get_mut(unit) else { return false };
        cached.engines = 1;
        let is_new = cached.killed.is_none();
        cached.killed.get_or_insert_with(Instant::now);
        is_new
    }

    /// How long a restarted unit did not serve its mount, once.
    pub fn take_outage(&self, unit: &str) -> Option<Duration> {
        self.units.lock().get_mut(unit)?.killed.take().map(|it| it.elapsed())
    }

    pub fn get(&self, unit: &str) -> Option<UnitCommand> {
        self.units.lock().get(unit).map(|it| it.command.clone())
    }

    pub fn forget(&self, unit: &str) {
        self.units.lock().remove(unit);
    }

    pub fn names(&self) -> Vec<String> {
        self.units.lock().keys().cloned().collect()
    }

    /// Every unit whose target is wanted.
    pub fn list(
        &self,
        systemd: &Systemd,
        is_wanted: impl Fn(&Path) -> bool,
        deadline: Instant,
    ) -> Result<Vec<Unit>, SystemdError> {
        let Some(_listing) = self.listing.try_lock_until(deadline) else {
            return Err(SystemdError::NoAnswer { call: "the list of units" });
        };
        // Copied only if it is wanted: a command with its environment is long.
        let wanted = |command: &UnitCommand| {
            let target = target_of(command).filter(|it| is_wanted(it))?.to_owned();
            Some((target, command.clone()))
        };
        let mut units = Vec::new();
        for row in systemd.list(PATTERN, deadline)?.into_iter().filter(|it| is_mount_unit(&it.name)) {
            let known = self.units.lock().get(&row.name).map(|it| wanted(&it.command));
            let found = match known {
                Some(found) => found,
                // It may have ended meanwhile.
                None => match systemd.command(&row.name, deadline)? {
                    Some(command) => {
                        let found = wanted(&command);
                        self.insert(&row.name, command);
                        found
                    }
                    None => continue,
                },
            };
            if let Some((target, command)) = found {
                units.push(Unit { name: row.name, active: row.active, has_job: row.has_job, target, command });
            }
        }
        Ok(units)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::systemd::Limits;

    #[test]
    fn names_tell_mounts_from_unmounts() {
        assert!(is_mount_unit(&mount_unit_name()));
        assert!(is_mount_unit("mount-s3-v1.12.0-a1b2c3d4-e5f6-7890-abcd-ef1234567890.service"));
        assert!(!is_mount_unit(&umount_unit_name()));
        assert!(!is_mount_unit("mount-s3.service"));
        assert!(!is_mount_unit("mount-s3-x.mount"));
    }

    #[test]
    fn engines_are_counted_from_the_beginning_after_a_restart() {
        let cache = UnitCache::default();
        let command = UnitCommand { command: vec![], environment: vec![], limits: Limits::default(), started: 0 };
        cache.insert("a", command);
        assert!(cache.is_new_engine("a", 2));
        assert!(!cache.is_new_engine("a", 2));
        assert_eq!(cache.take_outage("a"), None);
        assert!(cache.note_restart("a"));
        assert!(!cache.note_restart("a"));
        assert!(cache.is_new_engine("a", 2));
        assert!(cache.take_outage("a").is_some());
        assert_eq!(cache.take_outage("a"), None);
        assert!(!cache.note_restart("b"));
    }
}
