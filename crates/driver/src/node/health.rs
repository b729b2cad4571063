//! The health of one published volume, for `NodeGetVolumeStats`. It never hangs and asks no S3.

use std::path::{Path, PathBuf};
use std::time::Instant;

use super::deadlines;
use super::held_mounts::HeldMounts;
use super::reporter::{EngineEvent, Reporter};
use crate::host::{Host, HostError, Probe};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeHealth {
    pub is_abnormal: bool,
    /// What was observed, also of a healthy volume.
    pub message: String,
}

#[derive(Debug, thiserror::Error)]
pub enum HealthError {
    #[error("Volume ID not provided")]
    VolumeIdMissing,

    #[error("Volume path not provided")]
    PathMissing,

    #[error("volume {volume_id:?} is not mounted at {path:?}")]
    NotMounted { volume_id: String, path: PathBuf },

    #[error("failed to read the mount table")]
    Look {
        #[source]
        cause: HostError,
    },
}

pub fn check(
    host: &dyn Host,
    reporter: &Reporter,
    held_mounts: Option<&HeldMounts>,
    volume_id: &str,
    path: &Path,
    deadline: Instant,
) -> Result<VolumeHealth, HealthError> {
    if volume_id.is_empty() {
        return Err(HealthError::VolumeIdMissing);
    }
    if path.as_os_str().is_empty() {
        return Err(HealthError::PathMissing);
    }
    let not_mounted = || HealthError::NotMounted { volume_id: volume_id.to_owned(), path: path.to_owned() };
    let resolved = host.resolve(path).map_err(|_| not_mounted())?;
    let table = host.mount_table().map_err(|cause| HealthError::Look { cause })?;
    let mount = table.at(&resolved).filter(|it| it.is_ours()).ok_or_else(not_mounted)?;
    let found = host.probe(&resolved, deadlines::within(deadlines::CHECK, deadline));
    let event = reporter.last_event_of_target(path);
    Ok(match found {
        Probe::Alive { device } if device == mount.device => healthy(event),
        Probe::Alive { .. } | Probe::Missing => abnormal("the mount changed while it was checked"),
        Probe::Dead(_) => match event {
            Some(EngineEvent::Died { error }) => abnormal(&format!("the engine is gone: {error}")),
            Some(EngineEvent::Resumed { .. } | EngineEvent::Replaced { .. } | EngineEvent::NotMoved { .. }) | None => {
                abnormal("the engine is gone")
            }
        },
        Probe::Hung => match held_mounts.and_then(|it| it.outage(mount.device)) {
            Some(outage) => abnormal(&format!(
                "the mounter has been gone for {} s; the mount and its users wait for the next one",
                outage.as_secs()
            )),
            None => abnormal(
                "the engine does not answer: its S3 store may be slow or away, or it is stuck and about to be replaced",
            ),
        },
        // The server answered with an error, or could not be asked: nothing is known to be wrong with the mount.
        Probe::Unknown(cause) => VolumeHealth { is_abnormal: false, message: format!("not checked: {cause}") },
    })
}

fn healthy(event: Option<EngineEvent>) -> VolumeHealth {
    let message = match event {
        Some(EngineEvent::Resumed { cause, stall }) => {
            format!("mounted and served; an engine died ({cause}) and was replaced after {} ms", stall.as_millis())
        }
        Some(EngineEvent::Replaced { .. } | EngineEvent::NotMoved { .. } | EngineEvent::Died { .. }) | None => {
            "mounted and served".to_owned()
        }
    };
    VolumeHealth { is_abnormal: false, message }
}

fn abnormal(message: &str) -> VolumeHealth {
    VolumeHealth { is_abnormal: true, message: message.to_owned() }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;
    use std::time::Duration;

    use s3csi_core::publish::Access;

    use super::*;
    use crate::host::FuseOptions;
    use crate::host::fake::FakeHost;
    use crate::metrics::NodeMetrics;

    const TARGET: &str = "/target";

    #[track_caller]
    fn check_probe(probe: Option<Probe>, expected: (bool, &str)) {
        let host = FakeHost::new();
        host.create_directory(Path::new(TARGET), 0o755).unwrap();
        host.mount_fuse(Path::new(TARGET), &FuseOptions { access: Access::ReadWrite, allow_other: true }).unwrap();
        if let Some(probe) = probe {
            host.answer_probe(TARGET, probe);
        }
        let found = ask(&host, "volume", TARGET).unwrap();
        assert_eq!(found.is_abnormal, expected.0, "{found:?}");
        assert!(found.message.contains(expected.1), "{found:?}");
    }

    fn ask(host: &FakeHost, volume_id: &str, path: &str) -> Result<VolumeHealth, HealthError> {
        let reporter = Reporter::without_events(Arc::new(NodeMetrics::new()));
        check(host, &reporter, None, volume_id, Path::new(path), Instant::now() + Duration::from_mins(1))
    }

    #[test]
    fn a_volume_is_abnormal_when_its_engine_is_gone_or_silent() {
        check_probe(None, (false, "mounted and served"));
        check_probe(Some(Probe::Dead(io::ErrorKind::NotConnected.into())), (true, "the engine is gone"));
        check_probe(Some(Probe::Hung), (true, "does not answer"));
        check_probe(Some(Probe::Unknown(io::ErrorKind::TimedOut.into())), (false, "not checked"));
    }

    #[test]
    fn what_is_not_mounted_is_not_found() {
        let host = FakeHost::new();
        host.create_directory(Path::new(TARGET), 0o755).unwrap();
        assert!(matches!(ask(&host, "volume", TARGET), Err(HealthError::NotMounted { .. })));
        assert!(matches!(ask(&host, "", TARGET), Err(HealthError::VolumeIdMissing)));
        assert!(matches!(ask(&host, "volume", ""), Err(HealthError::PathMissing)));
    }
}
