//! Strategy `pod`: one Mountpoint Pod per source. The controller assigns workloads to Mountpoint Pods; the node mounts the source,
//! hands it over to the Pod, and bind-mounts it to targets. Mounts and their users are looked up in the kernel's mount table.
//!
//! The Pod is not trusted: in the directory that it shares with the node no link is followed, and reads are bounded.

mod sweep;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use s3csi_core::attachment::is_mountpoint_pod_name;
use s3csi_core::chain::Chain;
use s3csi_core::credentials::Keys;
use s3csi_core::identifiers::{PvName, WorkloadUid};
use s3csi_core::publish::Publish;
use s3csi_core::target::TargetPath;
use s3csi_handoff::{COMMUNICATION_VOLUME, MountRequest};

use crate::api::recorder::PodReference;
use crate::credentials;
use crate::host::{SafeDir, SafeDirError};
use crate::keyed_locks::KeyedLocks;
use crate::node::assignment::{Assignments, LocalMountpointPod};
use crate::node::engine_config::{EngineConfig, fuse_options};
use crate::node::error::{PublishError, UnpublishError};
use crate::node::failpoints::Failpoint;
use crate::node::other_mounts::{self, OtherMounts, ServedBy, ServedTarget};
use crate::node::reporter::MountOutcome;
use crate::node::source::{Mounter, MounterKind, SourceManager, SourceSpec};
use crate::node::strategies::{PublishOutcome, PublishResult, mount_and_bind};
use crate::node::timing::{CallPhase, CallTimer};
use crate::node::workload_condition::WorkloadConditions;
use crate::node::{bind, legacy_v1};

/// Reserved for the engine's start after its Mountpoint Pod runs: the engine gives up after 30 seconds.
const ENGINE_START_TIME: Duration = Duration::from_secs(35);

pub struct MountpointPods {
    pub manager: SourceManager,
    pub assignments: Arc<Assignments>,
    /// Kubelet's root directory.
    pub kubelet: PathBuf,
    /// The directory in which sources are mounted, named after their first Mountpoint Pods.
    pub sources: PathBuf,
    /// The communication directory as a mounter sees it.
    pub view: PathBuf,
    pub engine_config: EngineConfig,
    /// One change per source at a time.
    pub locks: KeyedLocks,
    pub other_mounts: OtherMounts,
    pub workload_conditions: WorkloadConditions,
}

impl MountpointPods {
    pub fn publish(
        &self,
        publish: &Publish,
        workload: Option<&PodReference>,
        deadline: Instant,
        timer: &CallTimer,
    ) -> PublishResult {
        let keys = &self.engine_config.keys(publish)?;
        // Invalid options are refused before anything is waited for.
        let engine = self.engine_config.command(publish, &self.view)?;
        let request = MountRequest {
            bucket_name: publish.bucket.to_string(),
            args: engine.arguments,
            env: engine.environment,
            ..MountRequest::default()
        };
        // kubelet repeats the call for a mounted volume. Then the assignment is not needed, so an outage of the API server or the
        // controller, or a deleted Mountpoint Pod object, does not affect a running workload.
        let host = self.manager.host.as_ref();
        let served = other_mounts::served_by(host, &self.sources, |_| false, publish, deadline)?;
        if let Some(target) = served.filter(|it| !self.give_up_if_replaced(publish, it)) {
            return timer.time(CallPhase::Credentials, || self.refresh_served(publish, keys, target));
        }
        let volume = &publish.volume;
        let dead = workload.filter(|_| other_mounts::has_dead_unit(host, &self.sources, &publish.target, deadline));
        if let Some(workload) = dead.filter(|_| self.assignments.is_unassigned(publish.target.workload(), volume)) {
            self.workload_conditions.mount_died(workload, volume.as_str());
        }
        // Mostly waited for already, without a thread: see `wait_until_assigned`.
        let pod = self.assigned(publish, assignment_deadline(Instant::now(), deadline))?;
        let busy = || PublishError::SourceBusy { bucket: publish.bucket.to_string() };
        let _held = self.locks.lock(&pod.source, deadline).ok_or_else(busy)?;
        self.manager.failpoints.hit(Failpoint::Locked);
        // It may have been retired or created again while we waited for the lock; not while we hold it.
        let pod = self.assigned(publish, Instant::now()).ok().filter(|it| it.source == pod.source).ok_or_else(busy)?;
        let outcome = self.ensure(publish, keys, &pod, request, deadline, timer);
        match &outcome {
            Ok(_) => self.manager.failpoints.hit(Failpoint::Bound),
            Err(_) => self.tidy(&pod),
        }
        if let Some(workload) = dead.filter(|_| outcome.is_ok()) {
            self.workload_conditions.remounted(workload, volume.as_str());
        }
        // The target may have been a bind mount of another source, which is now unused.
        self.assignments.request_sweep();
        outcome.map(|mounted| PublishOutcome { mounted, source: Some(pod.source) })
    }

    /// Waits for the Mountpoint Pod of a target that is not mounted yet. Returns how long that took.
    pub async fn wait_until_assigned(
        &self,
        target: &TargetPath,
        volume: &PvName,
        deadline: Instant,
    ) -> Option<Duration> {
        let host = self.manager.host.as_ref();
        // Neither call waits for a file system.
        let resolved = host.resolve(target.path()).unwrap_or_else(|_| target.path().to_owned());
        if host.mounted_at(&resolved).ok()?.is_some() {
            return None;
        }
        let start = Instant::now();
        let deadline = assignment_deadline(start, deadline);
        // The directory is in memory.
        let is_listening =
            |it: &LocalMountpointPod| self.communication(&it.uid).is_ok_and(|it| it.has_socket(s3csi_handoff::SOCKET));
        self.assignments.wait_until_assigned(target.workload(), volume, deadline, is_listening).await;
        Some(start.elapsed())
    }

    fn assigned(&self, publish: &Publish, deadline: Instant) -> Result<LocalMountpointPod, PublishError> {
        let waited = self.assignments.wait_for(publish.target.workload(), &publish.volume, deadline);
        waited.map_err(|cause| PublishError::Assignment {
            bucket: publish.bucket.to_string(),
            target: publish.target.path().to_owned(),
            cause,
        })
    }

    /// Refreshes the keys of a mounted target; they may be what a silent engine waits for.
    fn refresh_served(
        &self,
        publish: &Publish,
        keys: &Keys,
        ServedTarget { by, silence }: ServedTarget,
    ) -> Result<PublishOutcome, PublishError> {
        let source = match by {
            ServedBy::Source(name) if is_mountpoint_pod_name(&name) => {
                self.refresh(publish, keys, &name)?;
                Some(name)
            }
            // A mount of another strategy or of version 1 stays until its workload ends.
            ServedBy::Source(_) | ServedBy::OwnMount => {
                let failed = |cause| PublishError::Credentials { bucket: publish.bucket.to_string(), cause };
                self.other_mounts.refresh(publish, keys).map_err(failed)?;
                None
            }
        };
        match silence {
            Some(silence) => Err(PublishError::Silent { target: publish.target.path().to_owned(), silence }),
            None => Ok(PublishOutcome { mounted: MountOutcome::AlreadyMounted, source }),
        }
    }

    /// Gives up a mount that waits for a mounter although its Mountpoint Pod is gone and the workload was assigned to another one.
    fn give_up_if_replaced(&self, publish: &Publish, target: &ServedTarget) -> bool {
        let ServedTarget { by: ServedBy::Source(name), silence: Some(_) } = target else { return false };
        let path = self.sources.join(name);
        let is_unserved = self.manager.held_mounts.find(&path).is_some_and(|it| it.outage().is_some());
        let is_replaced = is_unserved
            && self.assignments.pods_of(name).is_empty()
            && self.assigned(publish, Instant::now()).is_ok_and(|it| it.source != *name);
        if is_replaced && let Err(error) = self.manager.clear(&path) {
            tracing::warn!(source = name, error = %Chain(&error), "source of a Mountpoint Pod that is gone not removed");
        }
        is_replaced
    }

    /// Writes the credentials again: this is how rotated keys reach a running engine, and one that is about to take over.
    fn refresh(&self, publish: &Publish, keys: &Keys, name: &str) -> Result<(), PublishError> {
        let failed = |cause| PublishError::Credentials { bucket: publish.bucket.to_string(), cause };
        let held = self.manager.held_mounts.find(&self.sources.join(name));
        if let Some(held) = &held {
            held.set_keys(keys);
        }
        let pods = self.assignments.pods_of(name);
        let mut is_refreshed = false;
        for pod in &pods {
            let Ok(communication) = self.communication(&pod.uid) else { continue };
            let group = communication.group().map_err(failed)?;
            credentials::ensure(&communication, keys, group).map_err(failed)?;
            let directory = communication.directory(credentials::DIRECTORY).map_err(failed)?;
            legacy_v1::refresh_profiles_in(&directory, keys, group).map_err(failed)?;
            is_refreshed = true;
        }
        if !is_refreshed {
            tracing::warn!(source = name, "credentials not refreshed: the Mountpoint Pod does not exist");
        }
        // Another Pod may have waited for the keys, if this plugin was restarted before.
        if 1 < pods.len() || held.is_some_and(|it| it.outage().is_some()) {
            self.assignments.request_sweep();
        }
        Ok(())
    }

    /// Ensures credentials, source and bind mount. The caller holds the source's lock and tidies up after an error.
    fn ensure(
        &self,
        publish: &Publish,
        keys: &Keys,
        pod: &LocalMountpointPod,
        request: MountRequest,
        deadline: Instant,
        timer: &CallTimer,
    ) -> Result<MountOutcome, PublishError> {
        let bucket = || publish.bucket.to_string();
        let unusable = |cause| PublishError::MounterDirectory {
            bucket: bucket(),
            directory: self.communication_path(&pod.uid),
            cause,
        };
        let communication = self.communication(&pod.uid).map_err(unusable)?;
        let group = communication.group().map_err(unusable)?;
        self.manager.failpoints.hit(Failpoint::DirectoryCreated);
        timer
            .time(CallPhase::Credentials, || credentials::ensure(&communication, keys, group))
            .map_err(|cause| PublishError::Credentials { bucket: bucket(), cause })?;
        self.manager.failpoints.hit(Failpoint::CredentialsWritten);

        let spec = SourceSpec {
            name: pod.source.clone(),
            path: self.sources.join(&pod.source),
            options: fuse_options(publish),
            request,
        };
        let mounter = Mounter {
            kind: MounterKind::Dedicated,
            directory: communication,
            error_directory: self.communication(&pod.uid).map_err(unusable)?,
            pod: Some(pod.uid.clone()),
        };
        let hint = format!("kubectl logs -n {} {}", self.assignments.namespace(), pod.name);
        let outcome = mount_and_bind(&self.manager, publish, (&spec, &mounter), hint, deadline, timer)?;
        self.manager.held_mounts.find(&spec.path).into_iter().for_each(|it| it.set_keys(keys));
        Ok(outcome)
    }

    /// Removes what a failed publish created for a source that is not mounted. The caller holds its lock.
    fn tidy(&self, pod: &LocalMountpointPod) {
        let path = self.sources.join(&pod.source);
        let is_mounted = self.manager.host.mount_table().map_or(true, |table| table.at(&path).is_some());
        if is_mounted {
            return;
        }
        if let Err(error) = self.manager.host.remove_directory(&path) {
            tracing::warn!(source = pod.source, error = %Chain(&error), "directory not removed; the next sweep retries");
        }
        let forgotten = self.communication(&pod.uid).and_then(|it| it.remove_tree(credentials::DIRECTORY));
        if let Err(error) = forgotten {
            tracing::warn!(source = pod.source, error = %Chain(&error), "credentials not removed");
        }
    }

    /// Removes only the bind mount: the source may have other users, and the controller decides when it is retired.
    pub fn unpublish(&self, volume_id: &str, target: &Path) -> Result<(), UnpublishError> {
        let host = self.manager.host.as_ref();
        // A target without a parent directory has no mount either; then the plain path serves.
        let target = &host.resolve(target).unwrap_or_else(|_| target.to_owned());
        self.manager.failpoints.hit(Failpoint::Locked);
        let outcome = bind::remove(host, target, self.manager.failpoints);
        if outcome.is_ok() {
            self.other_mounts.forget(target, volume_id);
        }
        // The source may be unused now.
        self.assignments.request_sweep();
        outcome
    }

    fn communication(&self, pod: &WorkloadUid) -> Result<SafeDir, SafeDirError> {
        SafeDir::open(&self.communication_path(pod))
    }

    /// The host path of the Pod's volume `comm`. Only its content is writable for the Pod.
    fn communication_path(&self, pod: &WorkloadUid) -> PathBuf {
        self.kubelet.join("pods").join(pod.as_str()).join("volumes/kubernetes.io~empty-dir").join(COMMUNICATION_VOLUME)
    }
}

/// Waiting for the assignment must leave time for the engine's start.
fn assignment_deadline(now: Instant, deadline: Instant) -> Instant {
    let left = deadline.saturating_duration_since(now);
    now + left.saturating_sub(ENGINE_START_TIME).max(left * 2 / 3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_engine_start_gets_its_share_of_the_deadline() {
        let now = Instant::now();
        let check = |seconds, expected| {
            let deadline = assignment_deadline(now, now + Duration::from_secs(seconds));
            assert_eq!(deadline - now, Duration::from_secs(expected));
        };
        check(110, 75);
        check(90, 60);
        check(3, 2);
        check(0, 0);
    }
}
