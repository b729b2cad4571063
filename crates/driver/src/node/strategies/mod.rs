//! The strategies: how engines are run on a node, behind one interface.

pub mod daemon;
pub mod pod;
pub mod systemd;

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use s3csi_core::limits::ResourceLimits;
use s3csi_core::mountpoint_pod::PodShape;
use s3csi_core::publish::{AccessType, Publish, RawPublish};

use self::daemon::Daemon;
use self::pod::MountpointPods;
use self::systemd::SystemdUnits;
use super::bind;
use super::error::{PublishError, UnpublishError};
use super::failpoints::Failpoint;
use super::held_mounts::HeldMounts;
use super::reporter::MountOutcome;
use super::source::{Mounter, SourceManager, SourceSpec};
use super::timing::{CallPhase, CallTimer};
use crate::systemd::Limits;

/// The result of a publish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishOutcome {
    pub mounted: MountOutcome,
    /// The name of its source, if it can be shared.
    pub source: Option<String>,
}

pub type PublishResult = Result<PublishOutcome, PublishError>;

pub enum Strategy {
    Pod(Box<MountpointPods>),
    Daemon(Box<Daemon>),
    Systemd(Arc<SystemdUnits>),
}

impl Strategy {
    /// `publish` is the parsed request; from `raw` each strategy parses the attributes that only it supports.
    pub fn publish(
        &self,
        mut publish: Publish,
        raw: &RawPublish<'_>,
        deadline: Instant,
        timer: &CallTimer,
    ) -> PublishResult {
        let limits = ResourceLimits::parse(raw.volume_context).map_err(|cause| PublishError::Limits { cause })?;
        match self {
            Self::Pod(pods) => {
                // The controller set the limits of the container and its cache volume; the engine must use the same.
                PodShape::parse(raw.volume_context, mount_options(raw))
                    .and_then(|it| it.set_cache_options(&mut publish.arguments))
                    .map_err(|cause| PublishError::Shape { cause })?;
                pods.publish(&publish, deadline, timer)
            }
            // The limits of the mounter's own container apply to all engines together.
            Self::Daemon(daemon) => daemon.publish(&publish, deadline, timer),
            Self::Systemd(units) => {
                let ResourceLimits { memory_bytes, cpu_millis, tasks } = limits;
                units.publish(&publish, Limits { memory_bytes, cpu_millis, tasks }, deadline, timer)
            }
        }
    }

    pub fn unpublish(
        &self,
        volume_id: &str,
        target: &Path,
        deadline: Instant,
        timer: &CallTimer,
    ) -> Result<(), UnpublishError> {
        match self {
            Self::Pod(pods) => timer.time(CallPhase::Unmount, || pods.unpublish(volume_id, target)),
            Self::Daemon(daemon) => daemon.unpublish(volume_id, target, deadline, timer),
            Self::Systemd(units) => timer.time(CallPhase::Unmount, || units.unpublish(target, deadline)),
        }
    }

    /// Describes who serves a source, for Events.
    pub fn describe_server(&self, source: Option<&str>) -> String {
        match (self, source) {
            (Self::Pod(_), Some(pod)) => format!("Mountpoint Pod {pod}"),
            (Self::Daemon(_), Some(_)) => "the mounter of this node".to_owned(),
            (Self::Pod(_) | Self::Daemon(_) | Self::Systemd(_), _) => "a unit of the node's systemd".to_owned(),
        }
    }

    /// The mounts that outlive their mounter; units have none.
    pub fn held_mounts(&self) -> Option<&HeldMounts> {
        match self {
            Self::Pod(pods) => Some(&pods.manager.held_mounts),
            Self::Daemon(daemon) => Some(&daemon.manager.held_mounts),
            Self::Systemd(_) => None,
        }
    }

    /// Removes what a crash left behind.
    pub fn sweep(&self) {
        match self {
            Self::Pod(pods) => pods.sweep(),
            Self::Daemon(daemon) => daemon.sweep(),
            Self::Systemd(units) => units.sweep(),
        }
    }

    /// Completes when a sweep is due before its period.
    pub async fn sweep_requested(&self) {
        match self {
            Self::Pod(pods) => pods.assignments.sweep_requested().await,
            Self::Daemon(_) | Self::Systemd(_) => std::future::pending().await,
        }
    }
}

/// Ensures the source and its bind mount at the target. `log_hint` is where a failure is explained.
fn mount_and_bind(
    manager: &SourceManager,
    publish: &Publish,
    source: (&SourceSpec, &Mounter),
    log_hint: String,
    deadline: Instant,
    timer: &CallTimer,
) -> Result<MountOutcome, PublishError> {
    let (spec, mounter) = source;
    let target = publish.target.path();
    let ensured = timer.time(CallPhase::Source, || manager.ensure(spec, mounter, deadline));
    let device = ensured.map_err(|cause| PublishError::Source {
        bucket: publish.bucket.to_string(),
        target: target.to_owned(),
        hint: log_hint,
        cause,
    })?;
    manager.failpoints.hit(Failpoint::Served);
    timer.time(CallPhase::Bind, || {
        bind::ensure(manager.host.as_ref(), &spec.path, device, target, publish.access, deadline)
    })
}

fn mount_options<'a>(raw: &RawPublish<'a>) -> &'a [String] {
    match raw.capability.as_ref().map(|it| &it.access_type) {
        Some(AccessType::Mount { mount_flags, .. }) => mount_flags,
        Some(AccessType::Block | AccessType::Unset) | None => &[],
    }
}
