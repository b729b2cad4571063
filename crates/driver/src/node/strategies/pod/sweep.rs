//! What is taken away without anybody asking for this target: sources of Mountpoint Pods that are to end or are gone, and
//! mounts that a crash left without an engine. It runs at every change of a Mountpoint Pod, after each unpublish and now and then.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use s3csi_core::attachment::is_mountpoint_pod_name;
use s3csi_core::chain::Chain;

use super::MountpointPods;
use crate::host::Probe;
use crate::node::assignment::MountpointPod;
use crate::node::repairs::{DEAD_SOURCE_REMOVED, ORPHANED_SOURCE_REMOVED};
use crate::node::retire::{Retired, retire};
use crate::node::source;

/// A sweep looks at many; a source that does not answer this soon is left to whoever publishes it.
const LOOKED_AT_WITHIN: Duration = Duration::from_secs(2);

impl MountpointPods {
    pub fn sweep(&self) {
        // Without having seen all of them, a Pod that we do not know of may well be there.
        let Some(pods) = self.assignments.pods() else { return };
        // Also those without a source: their mounters wait to be told that nobody will come.
        for pod in pods.iter().filter(|it| it.is_retired) {
            self.end(&pod.name, Some(pod));
        }
        for name in names_in(&self.sources) {
            match pods.iter().find(|it| it.name == name) {
                None => self.end(&name, None),
                Some(pod) if pod.is_retired => {}
                Some(pod) => self.clear_if_dead(pod),
            }
        }
    }

    fn end(&self, name: &str, pod: Option<&MountpointPod>) {
        // Somebody is working on it, and the next sweep comes.
        let Some(_held) = self.locks.try_lock(name) else { return };
        // While we waited it may have been made anew under the same name.
        if self.assignments.pod(name).as_ref().map(|it| (&it.uid, it.is_retired)) != pod.map(|it| (&it.uid, true)) {
            return;
        }
        let path = self.sources.join(name);
        // A Pod whose directory is gone needs to be told nothing.
        let communication = pod.and_then(|it| self.communication(&it.uid).ok());
        match retire(self.host.as_ref(), &path, communication.as_ref(), self.steps) {
            Ok(Retired::Now) => {
                tracing::info!(source = name, "source taken away");
                if pod.is_none() {
                    self.repairs.done(ORPHANED_SOURCE_REMOVED, &path, name);
                }
            }
            Ok(Retired::Before) => {}
            Ok(Retired::NotYet) => tracing::debug!(source = name, "source is to be taken away, but still in use"),
            Err(error) => {
                tracing::warn!(source = name, error = %Chain(&error), "source not taken away; the next sweep tries again");
            }
        }
    }

    /// A crash between two steps of a publish leaves such a mount. Whoever publishes next would repair it, but nobody may come.
    fn clear_if_dead(&self, pod: &MountpointPod) {
        let path = self.sources.join(&pod.name);
        let Some(_held) = self.locks.try_lock(&pod.name) else { return };
        let Ok(table) = self.host.mount_table() else { return };
        let is_dead = match table.at(&path) {
            Some(mount) if !mount.is_ours() || !source::is_unused(&table, &path, mount.device) => return,
            Some(_) => matches!(self.host.probe(&path, Instant::now() + LOOKED_AT_WITHIN), Probe::Dead(_)),
            None => true,
        };
        if !is_dead {
            return;
        }
        match source::clear(self.host.as_ref(), &path) {
            Ok(()) => {
                self.repairs.done(DEAD_SOURCE_REMOVED, &path, &pod.name);
                self.tidy(pod);
            }
            Err(error) => tracing::warn!(source = pod.name, error = %Chain(&error), "dead source not cleared away"),
        }
    }
}

/// Directories that have the form of a Mountpoint Pod's name; anything else in there is not ours to touch.
fn names_in(directory: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    entries.filter_map(|it| it.ok()?.file_name().into_string().ok()).filter(|it| is_mountpoint_pod_name(it)).collect()
}
