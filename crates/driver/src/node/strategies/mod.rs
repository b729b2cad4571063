//! How engines are run on a node: one door for publish and unpublish, whatever is behind it.

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
use super::error::{PublishError, UnpublishError};
use super::phases::{Phase, Phases};
use super::teller::Mounted;
use crate::systemd::Limits;

/// What a publish found and did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Done {
    pub mounted: Mounted,
    /// Who serves it, if that serves others, too.
    pub source: Option<String>,
}

pub enum Strategy {
    Pod(Box<MountpointPods>),
    Daemon(Box<Daemon>),
    Systemd(Arc<SystemdUnits>),
}

impl Strategy {
    /// What was understood of a request, and the request itself: what else it asks for depends on who runs the engine.
    pub fn publish(
        &self,
        mut publish: Publish,
        raw: &RawPublish<'_>,
        deadline: Instant,
        phases: &Phases,
    ) -> Result<Done, PublishError> {
        let limits = ResourceLimits::parse(raw.volume_context).map_err(|cause| PublishError::Limits { cause })?;
        match self {
            Self::Pod(pods) => {
                // The controller gave its container the limits, and a volume for the cache: the engine must be told of that.
                PodShape::parse(raw.volume_context, mount_options(raw))
                    .and_then(|it| it.set_cache_options(&mut publish.arguments))
                    .map_err(|cause| PublishError::Shape { cause })?;
                pods.publish(&publish, deadline, phases)
            }
            // One mounter runs all engines of the node: its own limits hold for all of them together.
            Self::Daemon(daemon) => daemon.publish(&publish, deadline, phases),
            Self::Systemd(units) => {
                let ResourceLimits { memory_bytes, cpu_millis, tasks } = limits;
                units.publish(&publish, Limits { memory_bytes, cpu_millis, tasks }, deadline, phases)
            }
        }
    }

    pub fn unpublish(&self, target: &Path, deadline: Instant, phases: &Phases) -> Result<(), UnpublishError> {
        match self {
            Self::Pod(pods) => phases.time(Phase::Unmount, || pods.unpublish(target)),
            Self::Daemon(daemon) => daemon.unpublish(target, deadline, phases),
            Self::Systemd(units) => phases.time(Phase::Unmount, || units.unpublish(target, deadline)),
        }
    }

    /// Who serves a source, for people.
    pub fn server(&self, source: Option<&str>) -> String {
        match (self, source) {
            (Self::Pod(_), Some(pod)) => format!("Mountpoint Pod {pod}"),
            (Self::Daemon(_), Some(_)) => "the mounter of this node".to_owned(),
            (Self::Pod(_) | Self::Daemon(_) | Self::Systemd(_), _) => "a unit of the node's systemd".to_owned(),
        }
    }

    /// Takes away, now and then, what a crash left behind.
    pub fn sweep(&self) {
        match self {
            Self::Pod(pods) => pods.sweep(),
            Self::Daemon(daemon) => daemon.sweep(),
            Self::Systemd(units) => units.sweep(),
        }
    }

    /// Completes when a sweep is wanted earlier than usual.
    pub async fn asked_to_sweep(&self) {
        match self {
            Self::Pod(pods) => pods.assignments.woken().await,
            Self::Daemon(_) | Self::Systemd(_) => std::future::pending().await,
        }
    }
}

fn mount_options<'a>(raw: &RawPublish<'a>) -> &'a [String] {
    match raw.capability.as_ref().map(|it| &it.access_type) {
        Some(AccessType::Mount { mount_flags, .. }) => mount_flags,
        Some(AccessType::Block | AccessType::Unset) | None => &[],
    }
}
