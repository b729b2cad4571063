//! The target: a bind mount of the source, created, replaced and removed.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use s3csi_core::Chain;
use s3csi_core::publish::Access;

use super::deadlines;
use super::error::{PublishError, UnpublishError};
use super::failpoints::{Failpoint, Failpoints};
use super::reporter::MountOutcome;
use crate::host::{Device, Host, HostError, MOST_STACKED, Mount, Probe};

/// Kubelet and monitoring agents open volumes for a moment now and then. Real users stay longer.
const BUSY_TIMEOUT: Duration = Duration::from_secs(2);

/// How often a busy target is tried again; the kernel sends no notification.
const BUSY_RETRY: Duration = Duration::from_millis(20);

/// The mode of the parent directories, which kubelet creates.
const TARGET_MODE: u32 = 0o750;

/// Ensures that the target is a bind mount of the source with this access, and that it answers. A dead bind of ours is covered, an
/// outdated one is replaced; in neither case is there a moment in which writes would reach the bare directory.
pub fn ensure(
    host: &dyn Host,
    source: &Path,
    device: Device,
    target: &Path,
    access: Access,
    deadline: Instant,
) -> Result<MountOutcome, PublishError> {
    let is_wanted = |mount: &Mount| mount.device == device && mount.read_only == (access == Access::ReadOnly);
    host.create_directory(target, TARGET_MODE)
        .map_err(|cause| PublishError::Target { target: target.to_owned(), cause })?;
    let target = &host.resolve(target).map_err(|cause| PublishError::Target { target: target.to_owned(), cause })?;
    let check_bound = |bound: Result<(), HostError>| {
        bound.map_err(|cause| PublishError::Bind { source_path: source.to_owned(), target: target.clone(), cause })?;
        check_alive(host, device, target, deadline)
    };
    let (mut mounted, mut is_replaced) = (MountOutcome::Mounted, false);
    for attempt in 0..=MOST_STACKED {
        let failed = |cause| PublishError::Look { cause };
        if host.mounted_at(target).map_err(failed)?.is_none() {
            break;
        }
        let table = host.mount_table().map_err(failed)?;
        let Some(mount) = table.at(target) else { break };
        if attempt == MOST_STACKED {
            let cause = HostError::TooManyMounts { at: target.clone() };
            return Err(PublishError::Target { target: target.clone(), cause });
        }
        if !mount.is_ours() {
            let (kind, device) = (mount.kind.clone(), mount.source.clone());
            return Err(PublishError::ForeignMount { target: target.clone(), kind, device });
        }
        if is_wanted(mount) {
            let outcome = if is_replaced { mounted } else { MountOutcome::AlreadyMounted };
            return check_alive(host, device, target, deadline).map(|()| outcome);
        }
        if mount.device != device {
            mounted = MountOutcome::Remounted;
        }
        if mount.device != device && is_dead(host, target, deadline) {
            if table.all_at(target).nth(1).is_none() {
                // In running containers the volume is a copy of that mount, and only what is mounted on it propagates to them. It is
                // removed with the target.
                tracing::info!(?target, "mounting over a dead mount");
                return check_bound(host.bind_over(source, target, access)).map(|()| mounted);
            }
            tracing::info!(?target, "removing a dead mount that covers another one");
            host.detach(target).map_err(|cause| PublishError::Target { target: target.clone(), cause })?;
            continue;
        }
        tracing::info!(?target, "replacing a bind mount of another source or with other access");
        // Where the kernel can do that (Linux 6.5).
        if !is_replaced {
            match host.bind_beneath(source, target, access) {
                Ok(()) => is_replaced = true,
                Err(cause) => tracing::debug!(?target, error = %Chain(&cause), "mount not swapped, mounting again"),
            }
        }
        host.detach(target).map_err(|cause| PublishError::Target { target: target.clone(), cause })?;
    }
    check_bound(host.bind(source, target, access)).map(|()| mounted)
}

/// A dead mount answers at once, whatever has become of its engine.
fn is_dead(host: &dyn Host, target: &Path, deadline: Instant) -> bool {
    matches!(host.probe(target, deadlines::within(deadlines::CHECK, deadline)), Probe::Dead(_))
}

/// Checks that the target is the engine's own file system and that it is alive.
fn check_alive(host: &dyn Host, device: Device, target: &Path, deadline: Instant) -> Result<(), PublishError> {
    match host.probe(target, deadlines::within(deadlines::BIND, deadline)) {
        Probe::Alive { device: seen } if seen == device => Ok(()),
        found => Err(PublishError::NotServed { target: target.to_owned(), found }),
    }
}

/// Removes every mount of ours at the target. Also works on dead and unresponsive ones: nothing here waits for the engine.
pub fn remove(host: &dyn Host, target: &Path, failpoints: Failpoints) -> Result<(), UnpublishError> {
    for attempt in 0..=MOST_STACKED {
        let failed = |cause| UnpublishError::Look { cause };
        // The table also has mounts that another one hides: those are not taken for removed.
        if attempt > 0 && host.mounted_at(target).map_err(failed)?.is_none() {
            break;
        }
        let table = host.mount_table().map_err(failed)?;
        let Some(mount) = table.at(target) else { break };
        if attempt == MOST_STACKED {
            let cause = HostError::TooManyMounts { at: target.to_owned() };
            return Err(UnpublishError::Unmount { target: target.to_owned(), cause });
        }
        if !mount.is_ours() {
            return Err(UnpublishError::ForeignMount { target: target.to_owned(), kind: mount.kind.clone() });
        }
        match host.unmount(target) {
            Ok(()) => {}
            Err(cause @ HostError::Busy { .. }) => release(host, target, cause)?,
            Err(cause) => return Err(UnpublishError::Unmount { target: target.to_owned(), cause }),
        }
    }
    failpoints.hit(Failpoint::Unbound);
    host.remove_directory(target).map_err(|cause| UnpublishError::Remove { path: target.to_owned(), cause })?;
    failpoints.hit(Failpoint::TargetRemoved);
    Ok(())
}

/// A target with open files is in use by another process on this host. If it is alive, that is an error unless it is freed
/// soon. A dead or silent one is detached: its users do not get anything from it, and the connection is not aborted, because other
/// targets may share it. It ends with its source.
fn release(host: &dyn Host, target: &Path, busy: HostError) -> Result<(), UnpublishError> {
    match host.probe(target, Instant::now() + deadlines::CHECK) {
        Probe::Alive { .. } | Probe::Unknown(_) => unmount_once_free(host, target, busy),
        Probe::Hung | Probe::Dead(_) | Probe::Missing => {
            host.detach(target).map_err(|cause| UnpublishError::Unmount { target: target.to_owned(), cause })
        }
    }
}

fn unmount_once_free(host: &dyn Host, target: &Path, mut busy: HostError) -> Result<(), UnpublishError> {
    tracing::debug!(?target, "target is in use, retrying for a moment");
    let deadline = Instant::now() + BUSY_TIMEOUT;
    while Instant::now() < deadline {
        thread::sleep(BUSY_RETRY);
        match host.unmount(target) {
            Ok(()) => return Ok(()),
            Err(again @ HostError::Busy { .. }) => busy = again,
            Err(cause) => return Err(UnpublishError::Unmount { target: target.to_owned(), cause }),
        }
    }
    Err(UnpublishError::InUse { target: target.to_owned(), cause: busy })
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;
    use crate::host::FuseOptions;
    use crate::host::fake::{Call, FakeHost, Operation};

    const SOURCE: &str = "/source";
    const TARGET: &str = "/target";

    /// A host with a source that is bound to a target.
    fn bound() -> (FakeHost, Device) {
        let host = FakeHost::new();
        for path in [SOURCE, TARGET] {
            host.create_directory(Path::new(path), 0o755).unwrap();
        }
        let options = FuseOptions { access: Access::ReadWrite, allow_other: true };
        host.mount_fuse(Path::new(SOURCE), &options).unwrap();
        host.bind(Path::new(SOURCE), Path::new(TARGET), Access::ReadWrite).unwrap();
        let device = host.mounts()[0].device;
        (host, device)
    }

    #[test]
    fn unpublish_of_a_silent_target_detaches_it_and_leaves_the_connection_to_the_other_sharers() {
        let (host, device) = bound();
        host.fail(Operation::Unmount, 1, Errno::BUSY);
        host.answer_probe(TARGET, Probe::Hung);
        remove(&host, Path::new(TARGET), Failpoints::default()).unwrap();
        assert!(host.calls().contains(&Call::Detach { at: TARGET.into() }));
        assert!(!host.calls().contains(&Call::Abort { device }), "{:?}", host.calls());
        assert_eq!(host.mounts().len(), 1, "the source stays");
    }

    /// Mounts another source in place of the first one, and returns its device.
    fn replace_source(host: &FakeHost) -> Device {
        host.detach(Path::new(SOURCE)).unwrap();
        let options = FuseOptions { access: Access::ReadWrite, allow_other: true };
        host.mount_fuse(Path::new(SOURCE), &options).unwrap();
        host.mounts().iter().find(|it| it.at == Path::new(SOURCE)).unwrap().device
    }

    #[track_caller]
    fn check_ensured(host: &FakeHost, device: Device, expected: &[Device]) {
        let (source, target) = (Path::new(SOURCE), Path::new(TARGET));
        let deadline = Instant::now() + Duration::from_mins(1);
        let outcome = ensure(host, source, device, target, Access::ReadWrite, deadline).unwrap();
        assert_eq!(outcome, MountOutcome::Remounted);
        let at_target: Vec<Device> =
            host.mounts().into_iter().filter(|it| it.at == target).map(|it| it.device).collect();
        assert_eq!(at_target, expected);
        let again = ensure(host, source, device, target, Access::ReadWrite, deadline).unwrap();
        assert_eq!(again, MountOutcome::AlreadyMounted);
    }

    #[test]
    fn an_outdated_target_is_replaced_with_and_without_a_kernel_that_can_swap_mounts() {
        // The first call succeeds, or fails.
        for failing in [2, 1] {
            let (host, _) = bound();
            host.fail(Operation::BindBeneath, failing, Errno::INVAL);
            let device = replace_source(&host);
            check_ensured(&host, device, &[device]);
        }
    }

    #[test]
    fn a_dead_target_is_covered_and_a_dead_cover_is_removed_first() {
        let (host, first) = bound();
        host.abort(first).unwrap();
        let second = replace_source(&host);
        check_ensured(&host, second, &[first, second]);
        assert!(!host.calls().contains(&Call::Detach { at: TARGET.into() }), "running containers have the dead mount");

        host.abort(second).unwrap();
        let third = replace_source(&host);
        check_ensured(&host, third, &[first, third]);
        remove(&host, Path::new(TARGET), Failpoints::default()).unwrap();
        assert!(!host.mounts().iter().any(|it| it.at == Path::new(TARGET)));
    }

    #[test]
    fn a_mount_that_does_not_go_away_is_an_error_and_no_endless_loop() {
        let (host, device) = bound();
        host.pin(TARGET);
        let error = remove(&host, Path::new(TARGET), Failpoints::default()).unwrap_err();
        assert!(matches!(error, UnpublishError::Unmount { cause: HostError::TooManyMounts { .. }, .. }), "{error:?}");

        let other = Device { minor: device.minor + 1, ..device };
        let deadline = Instant::now() + Duration::from_mins(1);
        let ensured = ensure(&host, Path::new(SOURCE), other, Path::new(TARGET), Access::ReadWrite, deadline);
        let error = ensured.unwrap_err();
        assert!(matches!(error, PublishError::Target { cause: HostError::TooManyMounts { .. }, .. }), "{error:?}");
    }
}
