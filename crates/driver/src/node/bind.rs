//! The target: a bind of the source, made, renewed and taken away.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use s3csi_core::publish::Access;

use super::error::{PublishError, UnpublishError};
use super::steps::{Step, Steps};
use super::teller::Mounted;
use crate::host::{Device, Host, HostError, Mount, Probe};

/// The source has just answered, so its bind does, too.
const ANSWERS_WITHIN: Duration = Duration::from_secs(10);

/// Kubelet and monitors look into volumes now and then, for a moment only. Who uses one stays longer.
const FREE_WITHIN: Duration = Duration::from_secs(2);

/// How often a target in use is tried again; the kernel tells nobody when it is free.
const TRY_EVERY: Duration = Duration::from_millis(20);

/// Kubelet makes the directories above with this mode, too.
const TARGET_MODE: u32 = 0o750;

/// The target shows the source with this access, and it answered. A dead or outdated bind of ours is replaced.
pub fn ensure(
    host: &dyn Host,
    source: &Path,
    device: Device,
    target: &Path,
    access: Access,
    deadline: Instant,
) -> Result<Mounted, PublishError> {
    let is_wanted = |mount: &Mount| mount.device == device && mount.read_only == (access == Access::ReadOnly);
    host.create_directory(target, TARGET_MODE)
        .map_err(|cause| PublishError::Target { target: target.to_owned(), cause })?;
    let target = &host.resolve(target).map_err(|cause| PublishError::Target { target: target.to_owned(), cause })?;
    let mut mounted = Mounted::Now;
    loop {
        let table = host.mount_table().map_err(|cause| PublishError::Look { cause })?;
        let Some(mount) = table.at(target) else { break };
        if !mount.is_ours() {
            let (kind, device) = (mount.kind.clone(), mount.source.clone());
            return Err(PublishError::ForeignMount { target: target.clone(), kind, device });
        }
        if is_wanted(mount) {
            return answers(host, device, target, deadline).map(|()| Mounted::Before);
        }
        if mount.device != device {
            mounted = Mounted::Anew;
        }
        tracing::info!(?target, "replacing a bind of a source that is gone or has other access");
        host.detach(target).map_err(|cause| PublishError::Target { target: target.clone(), cause })?;
    }
    host.bind(source, target, access).map_err(|cause| PublishError::Bind {
        source_path: source.to_owned(),
        target: target.clone(),
        cause,
    })?;
    answers(host, device, target, deadline).map(|()| mounted)
}

/// What kubelet will show to the workload is the engine's own file system, and it is alive.
fn answers(host: &dyn Host, device: Device, target: &Path, deadline: Instant) -> Result<(), PublishError> {
    match host.probe(target, deadline.min(Instant::now() + ANSWERS_WITHIN)) {
        Probe::Alive { device: seen } if seen == device => Ok(()),
        found => Err(PublishError::NotServed { target: target.to_owned(), found }),
    }
}

/// Every mount of ours at the target is gone. Works on dead and hung ones, too: nothing here asks the engine.
pub fn remove(host: &dyn Host, target: &Path, steps: Steps) -> Result<(), UnpublishError> {
    loop {
        let table = host.mount_table().map_err(|cause| UnpublishError::Look { cause })?;
        let Some(mount) = table.at(target) else { break };
        if !mount.is_ours() {
            return Err(UnpublishError::ForeignMount { target: target.to_owned(), kind: mount.kind.clone() });
        }
        match host.unmount(target) {
            Ok(()) => {}
            Err(cause @ HostError::Busy { .. }) => release(host, target, mount.device, cause)?,
            Err(cause) => return Err(UnpublishError::Unmount { target: target.to_owned(), cause }),
        }
    }
    steps.done(Step::Unbound);
    host.remove_directory(target).map_err(|cause| UnpublishError::Remove { path: target.to_owned(), cause })?;
    steps.done(Step::TargetRemoved);
    Ok(())
}

/// A target with open files: somebody else on this host uses it. Alive, that is an error they can end if it lasts; dead,
/// nobody gets anything from it any more and it goes at once.
fn release(host: &dyn Host, target: &Path, device: Device, busy: HostError) -> Result<(), UnpublishError> {
    match host.probe(target, Instant::now() + Duration::from_secs(2)) {
        Probe::Alive { .. } | Probe::Unknown(_) => return unmount_once_free(host, target, busy),
        Probe::Hung => {
            if let Err(error) = host.abort(device) {
                tracing::warn!(?target, %error, "hung connection not aborted");
            }
        }
        Probe::Dead(_) | Probe::Missing => {}
    }
    host.detach(target).map_err(|cause| UnpublishError::Unmount { target: target.to_owned(), cause })
}

fn unmount_once_free(host: &dyn Host, target: &Path, mut busy: HostError) -> Result<(), UnpublishError> {
    tracing::debug!(?target, "target is in use, trying again for a moment");
    let deadline = Instant::now() + FREE_WITHIN;
    while Instant::now() < deadline {
        thread::sleep(TRY_EVERY);
        match host.unmount(target) {
            Ok(()) => return Ok(()),
            Err(again @ HostError::Busy { .. }) => busy = again,
            Err(cause) => return Err(UnpublishError::Unmount { target: target.to_owned(), cause }),
        }
    }
    Err(UnpublishError::InUse { target: target.to_owned(), cause: busy })
}
