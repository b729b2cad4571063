//! How engines are run on a node: one door for publish and unpublish, whatever is behind it.

pub mod daemon;
pub mod systemd;

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use s3csi_core::limits::ResourceLimits;
use s3csi_core::publish::Publish;

use self::daemon::Daemon;
use self::systemd::SystemdUnits;
use super::error::{PublishError, UnpublishError};
use crate::systemd::Limits;

pub enum Strategy {
    Daemon(Box<Daemon>),
    Systemd(Arc<SystemdUnits>),
}

impl Strategy {
    pub fn publish(&self, publish: &Publish, limits: ResourceLimits, deadline: Instant) -> Result<(), PublishError> {
        match self {
            // One mounter runs all engines of the node: its own limits hold for all of them together.
            Self::Daemon(daemon) => daemon.publish(publish, deadline),
            Self::Systemd(units) => {
                let ResourceLimits { memory_bytes, cpu_millis, tasks } = limits;
                units.publish(publish, Limits { memory_bytes, cpu_millis, tasks }, deadline)
            }
        }
    }

    pub fn unpublish(&self, target: &Path, deadline: Instant) -> Result<(), UnpublishError> {
        match self {
            Self::Daemon(daemon) => daemon.unpublish(target, deadline),
            Self::Systemd(units) => units.unpublish(target, deadline),
        }
    }

    /// Takes away, now and then, what a crash left behind.
    pub fn sweep(&self) {
        match self {
            Self::Daemon(daemon) => daemon.sweep(),
            Self::Systemd(units) => units.sweep(),
        }
    }
}
