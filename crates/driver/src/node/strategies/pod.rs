//! Strategy `pod`: a Mountpoint Pod per source. The controller says which one serves a workload; here its source is mounted,
//! handed over to it, and bound to targets. What is mounted is asked of the kernel, who uses it as well.
//!
//! The Pod is not trusted: in the directory it shares with us no link is followed, and nothing is read without a bound.

mod sweep;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use s3csi_core::attachment::is_mountpoint_pod_name;
use s3csi_core::chain::Chain;
use s3csi_core::credentials::Keys;
use s3csi_core::identifiers::WorkloadUid;
use s3csi_core::publish::{Access, Publish};
use s3csi_mounter::handoff::MountRequest;

use crate::credentials;
use crate::host::{Beneath, FilesError, Host, Probe};
use crate::node::assignment::{Assignments, MountpointPod};
use crate::node::bind;
use crate::node::error::{PublishError, UnpublishError};
use crate::node::locks::Locks;
use crate::node::orders::{Orders, fuse_options};
use crate::node::phases::{Phase, Phases};
use crate::node::repairs::Repairs;
use crate::node::source::{self, Mounter, Source};
use crate::node::steps::{Step, Steps};
use crate::node::strategies::Done;
use crate::node::teller::{Mounted, Teller};

/// Of a call's time, what the engine needs after its Mountpoint Pod runs: it gives up by itself after 30 seconds.
const LEFT_FOR_THE_ENGINE: Duration = Duration::from_secs(35);

/// A healthy engine answers for its root at once and without S3. Whoever takes longer is looked at again with more patience.
const ANSWERS_WITHIN: Duration = Duration::from_secs(5);

pub struct MountpointPods {
    pub host: Arc<dyn Host>,
    pub assignments: Arc<Assignments>,
    /// Kubelet's directory.
    pub kubelet: PathBuf,
    /// Sources are mounted in here, one directory each, named after their Mountpoint Pods.
    pub sources: PathBuf,
    /// The communication directory as a mounter sees it.
    pub view: PathBuf,
    pub orders: Orders,
    /// One change per source at a time.
    pub locks: Locks,
    pub steps: Steps,
    pub repairs: Repairs,
    pub teller: Arc<Teller>,
}

/// A target that shows what it should, and it answers.
enum Served {
    ByMountpointPod(String),
    /// By a mount that strategy `systemd` or `daemon` made, of us or of a driver before us. It stays until its workload is over.
    Otherwise,
}

impl MountpointPods {
    pub fn publish(&self, publish: &Publish, deadline: Instant, phases: &Phases) -> Result<Done, PublishError> {
        let keys = self.orders.keys(publish)?;
        // Wrong options are refused before anybody waits for anything.
        let order = self.orders.order(publish, &self.view)?;
        let request = MountRequest {
            bucket_name: publish.bucket.to_string(),
            args: order.arguments,
            env: order.environment,
            source: None,
        };
        match self.served(publish, deadline)? {
            Some(Served::ByMountpointPod(name)) => {
                phases.time(Phase::Credentials, || self.refresh(publish, keys, &name))?;
                return Ok(Done { mounted: Mounted::Before, source: Some(name) });
            }
            Some(Served::Otherwise) => return Ok(Done { mounted: Mounted::Before, source: None }),
            None => {}
        }
        let wait = || self.assigned(publish, assignment_deadline(Instant::now(), deadline));
        let pod = phases.time(Phase::Assignment, wait)?;
        let busy = || PublishError::SourceBusy { bucket: publish.bucket.to_string() };
        let _held = self.locks.lock(&pod.name, deadline).ok_or_else(busy)?;
        self.steps.done(Step::Locked);
        // While we waited for the lock it may have been taken away or made anew; nothing of that happens while we hold it.
        let pod = self.assigned(publish, Instant::now()).ok().filter(|it| it.name == pod.name).ok_or_else(busy)?;
        let outcome = self.ensure(publish, keys, &pod, request, deadline, phases);
        match &outcome {
            Ok(_) => self.steps.done(Step::Bound),
            Err(_) => self.tidy(&pod),
        }
        // The target may have shown another source before, which nobody uses any more.
        self.assignments.wake();
        outcome.map(|mounted| Done { mounted, source: Some(pod.name) })
    }

    fn assigned(&self, publish: &Publish, deadline: Instant) -> Result<MountpointPod, PublishError> {
        let waited = self.assignments.wait_for(publish.target.workload(), publish.target.volume(), deadline);
        waited.map_err(|cause| PublishError::Assignment {
            bucket: publish.bucket.to_string(),
            target: publish.target.path().to_owned(),
            cause,
        })
    }

    /// Kubelet calls again and again for a volume that is mounted. Then nobody is waited for, so that a running workload has
    /// nothing to fear from an API server, a controller or a Mountpoint Pod object that is gone.
    fn served(&self, publish: &Publish, deadline: Instant) -> Result<Option<Served>, PublishError> {
        let host = self.host.as_ref();
        let Ok(target) = host.resolve(publish.target.path()) else { return Ok(None) };
        let table = host.mount_table().map_err(|cause| PublishError::Look { cause })?;
        let is_wanted = |read_only: bool| read_only == (publish.access == Access::ReadOnly);
        let Some(mount) = table.at(&target).filter(|it| it.is_ours() && is_wanted(it.read_only)) else {
            return Ok(None);
        };
        match host.probe(&target, deadline.min(Instant::now() + ANSWERS_WITHIN)) {
            Probe::Alive { device } if device == mount.device => {}
            _ => return Ok(None),
        }
        let mut sources = table.of_device(mount.device).filter(|it| it.at.parent() == Some(&self.sources));
        let name = sources.find_map(|it| it.at.file_name()?.to_str());
        Ok(Some(match name.filter(|it| is_mountpoint_pod_name(it)) {
            Some(name) => Served::ByMountpointPod(name.to_owned()),
            None => Served::Otherwise,
        }))
    }

    /// How a rotated key gets to a running engine.
    fn refresh(&self, publish: &Publish, keys: &Keys, name: &str) -> Result<(), PublishError> {
        let communication = self.assignments.pod(name).and_then(|it| self.communication(&it.uid).ok());
        let Some(communication) = communication else {
            tracing::warn!(source = name, "credentials not refreshed: the Mountpoint Pod is not to be seen");
            return Ok(());
        };
        let failed = |cause| PublishError::Credentials { bucket: publish.bucket.to_string(), cause };
        let group = communication.group().map_err(failed)?;
        credentials::ensure(&communication, keys, group).map_err(failed)
    }

    /// Credentials, source and bind, each looked at first. The caller holds the source's lock and tidies up after an error.
    fn ensure(
        &self,
        publish: &Publish,
        keys: &Keys,
        pod: &MountpointPod,
        request: MountRequest,
        deadline: Instant,
        phases: &Phases,
    ) -> Result<Mounted, PublishError> {
        let bucket = || publish.bucket.to_string();
        let unusable = |cause| PublishError::MounterDirectory {
            bucket: bucket(),
            directory: self.communication_path(&pod.uid),
            cause,
        };
        let communication = self.communication(&pod.uid).map_err(unusable)?;
        let group = communication.group().map_err(unusable)?;
        self.steps.done(Step::PlaceMade);
        phases
            .time(Phase::Credentials, || credentials::ensure(&communication, keys, group))
            .map_err(|cause| PublishError::Credentials { bucket: bucket(), cause })?;
        self.steps.done(Step::CredentialsWritten);

        let source = Source {
            name: pod.name.clone(),
            path: self.sources.join(&pod.name),
            options: fuse_options(publish),
            request,
            mounter: Mounter::OfItsOwn { directory: communication },
            words: self.communication(&pod.uid).map_err(unusable)?,
            steps: self.steps,
            repairs: self.repairs.clone(),
            teller: self.teller.clone(),
        };
        let target = publish.target.path();
        let ensured = phases.time(Phase::Source, || source::ensure(&self.host, &source, deadline));
        let device = ensured.map_err(|cause| PublishError::Source {
            bucket: bucket(),
            target: target.to_owned(),
            hint: format!("kubectl logs -n {} {}", self.assignments.namespace(), pod.name),
            cause,
        })?;
        self.steps.done(Step::Served);
        phases.time(Phase::Bind, || {
            bind::ensure(self.host.as_ref(), &source.path, device, target, publish.access, deadline)
        })
    }

    /// After a failed publish: what was made for a source that is not mounted goes away again. The caller holds its lock.
    fn tidy(&self, pod: &MountpointPod) {
        let path = self.sources.join(&pod.name);
        let is_mounted = self.host.mount_table().map_or(true, |table| table.at(&path).is_some());
        if is_mounted {
            return;
        }
        if let Err(error) = self.host.remove_directory(&path) {
            tracing::warn!(source = pod.name, error = %Chain(&error), "directory not removed; the next sweep tries again");
        }
        let forgotten = self.communication(&pod.uid).and_then(|it| it.remove_tree(credentials::DIRECTORY));
        if let Err(error) = forgotten {
            tracing::warn!(source = pod.name, error = %Chain(&error), "credentials not removed");
        }
    }

    /// Only the bind goes: others may be served by the source, and the controller says when it is not needed any more.
    pub fn unpublish(&self, target: &Path) -> Result<(), UnpublishError> {
        let host = self.host.as_ref();
        // A target whose parent directory is gone has no mount either; the plain path then serves as well.
        let target = &host.resolve(target).unwrap_or_else(|_| target.to_owned());
        self.steps.done(Step::Locked);
        let outcome = bind::remove(host, target, self.steps);
        // A source that waited for its last workload waits no longer.
        self.assignments.wake();
        outcome
    }

    fn communication(&self, pod: &WorkloadUid) -> Result<Beneath, FilesError> {
        Beneath::open(&self.communication_path(pod))
    }

    /// Where kubelet keeps the volume `comm` of a Pod. Only what is in it belongs to the Pod.
    fn communication_path(&self, pod: &WorkloadUid) -> PathBuf {
        self.kubelet.join("pods").join(pod.as_str()).join("volumes/kubernetes.io~empty-dir/comm")
    }
}

/// Waiting for others must not use up the time in which the engine starts.
fn assignment_deadline(now: Instant, deadline: Instant) -> Instant {
    let left = deadline.saturating_duration_since(now);
    now + left.saturating_sub(LEFT_FOR_THE_ENGINE).max(left * 2 / 3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_engine_gets_its_share_of_the_time() {
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
