//! Removes sources of Mountpoint Pods that are marked for unmount or gone, and dead mounts that a crash left; keeps mounts whose
//! Mountpoint Pod is lost or replaced. Runs at every change of a Mountpoint Pod, after each unpublish, and periodically.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use s3csi_core::attachment::{is_mountpoint_pod_name, newest_first};
use s3csi_core::chain::Chain;
use s3csi_core::credentials::Keys;

use super::MountpointPods;
use crate::credentials;
use crate::host::{Probe, SafeDir};
use crate::node::assignment::LocalMountpointPod;
use crate::node::held_mounts::{HeldMount, MounterAddress};
use crate::node::remediation::{DEAD_SOURCE_REMOVED, ORPHANED_SOURCE_REMOVED};
use crate::node::retire::{EXIT_FILE_MODE, RetireOutcome, retire};
use crate::node::source::Adoption;
use crate::node::{deadlines, engine_monitor, source};

/// The name of a Mountpoint Pod's source in commands.
const ONLY_SOURCE: &str = "";

/// A prepared engine takes over within milliseconds.
const TAKEOVER_TIMEOUT: Duration = Duration::from_secs(5);
const TAKEOVER_RETRY: Duration = Duration::from_millis(50);

impl MountpointPods {
    pub fn sweep(&self) {
        // Before the first complete list an unknown Pod may exist.
        let Some(pods) = self.assignments.pods() else { return };
        // Also those without a source: their mounters wait for the exit file.
        for pod in pods.iter().filter(|it| it.is_retired) {
            self.retire(&pod.source, Some(pod));
        }
        for name in source_names(&self.sources) {
            let of_source = newest_first(pods.iter().filter(|it| it.source == name), LocalMountpointPod::identity);
            if of_source.is_empty() {
                self.retire(&name, None);
            }
            let kept: Vec<&LocalMountpointPod> = of_source.into_iter().filter(|it| !it.is_retired).collect();
            if let Some(newest) = kept.first() {
                self.clear_if_dead(newest);
                self.keep(&name, &kept);
            }
        }
    }

    /// Holds a mount that an earlier process of this plugin handed over, lets the next Pod resume one without a mounter, and moves
    /// one whose Pod is replaced.
    fn keep(&self, name: &str, pods: &[&LocalMountpointPod]) {
        let Some(_held) = self.locks.try_lock(name) else { return };
        let path = self.sources.join(name);
        match self.manager.held_mounts.find(&path) {
            None => self.adopt(name, &path, pods),
            Some(held) if held.outage().is_some() => self.resume(&held, pods),
            Some(held) => self.move_to_newest(name, &path, &held, pods),
        }
    }

    fn adopt(&self, name: &str, path: &Path, pods: &[&LocalMountpointPod]) {
        let adopt = |pod: &LocalMountpointPod| match self.address(pod) {
            Some(address) => self.manager.adopt(name, path, address, ONLY_SOURCE),
            None => Adoption::NotServed,
        };
        let mut prepared = None;
        for pod in pods {
            match adopt(pod) {
                Adoption::Held => return,
                Adoption::Prepared => prepared = prepared.or(Some(*pod)),
                Adoption::NotServed => {}
            }
        }
        // This plugin ended in the middle of a move, and the Pod that served has released the mount or is gone.
        let Some((pod, directory)) = prepared.and_then(|it| Some((it, self.communication(&it.uid).ok()?))) else {
            return;
        };
        engine_monitor::tell_to_take_over(&directory, ONLY_SOURCE);
        let deadline = Instant::now() + TAKEOVER_TIMEOUT;
        while adopt(pod) != Adoption::Held && Instant::now() < deadline {
            thread::sleep(TAKEOVER_RETRY);
        }
    }

    /// The mounter needs its credentials before it gets the mount.
    fn resume(&self, held: &HeldMount, pods: &[&LocalMountpointPod]) {
        let Some(pod) = pods.iter().find(|it| it.is_available()) else { return };
        let Some((keys, address)) = held.keys().zip(self.address(pod)) else { return };
        if write_credentials(pod, &address.directory, &keys) {
            held.set_mounter(address);
        }
    }

    fn move_to_newest(&self, name: &str, path: &Path, held: &Arc<HeldMount>, pods: &[&LocalMountpointPod]) {
        let Some(newest) = pods.first().filter(|it| it.is_available()) else { return };
        if held.pod().as_ref() == Some(&newest.uid) {
            return pods.iter().skip(1).for_each(|it| self.end_replaced(it));
        }
        // Without keys the next publish requests another sweep.
        let Some((keys, address)) = held.keys().zip(self.address(newest)) else { return };
        // A mounter that does not execute commands cannot be told to wait.
        if !address.directory.exists(s3csi_handoff::COMMANDS_FILE) || !held.claim_move() {
            return;
        }
        if !write_credentials(newest, &address.directory, &keys) {
            held.end_move(false);
            return;
        }
        let assignments = self.assignments.clone();
        let on_end = Box::new(move || assignments.request_sweep());
        self.manager.start_move(name, path, held, address, ONLY_SOURCE, on_end);
    }

    /// Ends the mounter of a Pod whose mount has moved to another one.
    fn end_replaced(&self, pod: &LocalMountpointPod) {
        let Ok(communication) = self.communication(&pod.uid) else { return };
        if let Err(error) = communication.create_empty(s3csi_handoff::EXIT_FILE, EXIT_FILE_MODE) {
            tracing::warn!(pod = pod.name, error = %Chain(&error), "failed to write the exit file of the mounter");
        }
        if let Err(error) = communication.remove_tree(credentials::DIRECTORY) {
            tracing::warn!(pod = pod.name, error = %Chain(&error), "credentials not removed; they are deleted with the Mountpoint Pod");
        }
    }

    fn address(&self, pod: &LocalMountpointPod) -> Option<MounterAddress> {
        Some(MounterAddress { directory: self.communication(&pod.uid).ok()?, pod: Some(pod.uid.clone()) })
    }

    fn retire(&self, name: &str, pod: Option<&LocalMountpointPod>) {
        // A locked source is being worked on; the next sweep retries.
        let Some(_held) = self.locks.try_lock(name) else { return };
        // Meanwhile it may have been created again under the same name.
        let is_current = match pod {
            Some(pod) => self.assignments.pod(&pod.name).is_some_and(|it| it.uid == pod.uid && it.is_retired),
            None => self.assignments.pods_of(name).is_empty(),
        };
        if !is_current {
            return;
        }
        let path = self.sources.join(name);
        // Without its directory the Pod needs no exit file.
        let communication = pod.and_then(|it| self.communication(&it.uid).ok());
        let host = self.manager.host.as_ref();
        match retire(host, &self.manager.held_mounts, &path, communication.as_ref(), self.manager.failpoints) {
            Ok(RetireOutcome::Unmounted) => {
                tracing::info!(source = name, "source unmounted");
                if pod.is_none() {
                    self.manager.remediations.record(ORPHANED_SOURCE_REMOVED, &path, name);
                }
            }
            Ok(RetireOutcome::NotMounted) => {}
            Ok(RetireOutcome::InUse) => tracing::debug!(source = name, "source is marked for unmount but still in use"),
            Err(error) => {
                tracing::warn!(source = name, error = %Chain(&error), "source not unmounted; the next sweep retries");
            }
        }
    }

    /// A crash in the middle of a publish leaves such a mount. The next publish would repair it, but there may be none.
    fn clear_if_dead(&self, pod: &LocalMountpointPod) {
        let path = self.sources.join(&pod.source);
        let Some(_held) = self.locks.try_lock(&pod.source) else { return };
        let Ok(table) = self.manager.host.mount_table() else { return };
        let is_dead = match table.at(&path) {
            Some(mount) if !mount.is_ours() || !source::is_unused(&table, &path, mount.device) => return,
            Some(_) => matches!(self.manager.host.probe(&path, Instant::now() + deadlines::CHECK), Probe::Dead(_)),
            None => true,
        };
        if !is_dead {
            return;
        }
        match self.manager.clear(&path) {
            Ok(()) => {
                self.manager.remediations.record(DEAD_SOURCE_REMOVED, &path, &pod.source);
                self.tidy(pod);
            }
            Err(error) => tracing::warn!(source = pod.source, error = %Chain(&error), "dead source not removed"),
        }
    }
}

fn write_credentials(pod: &LocalMountpointPod, directory: &SafeDir, keys: &Keys) -> bool {
    let written = directory.group().and_then(|it| credentials::ensure(directory, keys, it));
    if let Err(error) = &written {
        tracing::warn!(pod = pod.name, error = %Chain(error), "credentials not written");
    }
    written.is_ok()
}

/// Directory entries that have the form of a Mountpoint Pod's name; others are not ours.
fn source_names(directory: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    entries.filter_map(|it| it.ok()?.file_name().into_string().ok()).filter(|it| is_mountpoint_pod_name(it)).collect()
}
