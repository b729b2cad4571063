//! The strategies: how engines are run on a node, behind one interface. After a change of the strategy the earlier one serves what it
//! has mounted until its workloads end.

pub mod daemon;
pub mod pod;
pub mod systemd;

use std::iter;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use s3csi_core::attachment::is_mountpoint_pod_name;
use s3csi_core::limits::ResourceLimits;
use s3csi_core::mountpoint_pod::PodShape;
use s3csi_core::publish::{AccessType, Publish, RawPublish};

use self::daemon::{Daemon, is_source_name};
use self::pod::MountpointPods;
use self::systemd::SystemdUnits;
use super::bind;
use super::error::{PublishError, UnpublishError};
use super::failpoints::Failpoint;
use super::held_mounts::HeldMounts;
use super::other_mounts;
use super::reporter::MountOutcome;
use super::source::{Mounter, SourceManager, SourceSpec};
use super::timing::{CallPhase, CallTimer};
use super::workload;
use crate::host::Host;
use crate::systemd::Limits;

/// The result of a publish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishOutcome {
    pub mounted: MountOutcome,
    /// The name of its source, if it can be shared.
    pub source: Option<String>,
}

pub type PublishResult = Result<PublishOutcome, PublishError>;

/// The strategy of new mounts, and earlier ones.
pub struct Strategies {
    pub host: Arc<dyn Host>,
    /// The directory in which all strategies mount sources.
    pub sources: PathBuf,
    pub present: Strategy,
    /// Earlier strategies, which serve what they have mounted. Units need none: `other_mounts` is enough for them.
    pub draining: Vec<Strategy>,
}

impl Strategies {
    /// `publish` is the parsed request; from `raw` each strategy parses the attributes that only it supports.
    pub fn publish(
        &self,
        publish: Publish,
        raw: &RawPublish<'_>,
        deadline: Instant,
        timer: &CallTimer,
    ) -> PublishResult {
        self.serving(publish.target.path()).publish(publish, raw, deadline, timer)
    }

    pub fn unpublish(
        &self,
        volume_id: &str,
        target: &Path,
        deadline: Instant,
        timer: &CallTimer,
    ) -> Result<(), UnpublishError> {
        self.serving(target).unpublish(volume_id, target, deadline, timer)
    }

    /// An earlier strategy for a bind mount of its source, dead or not; otherwise the present one.
    fn serving(&self, target: &Path) -> &Strategy {
        let find = || {
            let target = self.host.resolve(target).ok()?;
            let table = self.host.mount_table().ok()?;
            let mount = table.at(&target).filter(|it| it.is_ours())?;
            let source = other_mounts::source_of(&table, mount.device, &self.sources)?;
            self.draining.iter().find(|it| it.has_source(source))
        };
        if self.draining.is_empty() { &self.present } else { find().unwrap_or(&self.present) }
    }

    /// The mounts that outlive their mounter; units have none.
    pub fn held_mounts(&self) -> Option<&HeldMounts> {
        self.all().find_map(Strategy::held_mounts)
    }

    /// Removes what a crash left behind, and what strategies left that are neither used nor drained.
    pub fn sweep(&self) {
        self.all().for_each(Strategy::sweep);
        let is_source = |name: &str| is_mountpoint_pod_name(name) || is_source_name(name);
        let is_left = |name: &str| is_source(name) && !self.all().any(|it| it.has_source(name));
        self.present.sweep_others(&self.sources, is_left);
    }

    /// Completes when a sweep is due before its period.
    pub async fn sweep_requested(&self) {
        let pods = self.all().find_map(|it| match it {
            Strategy::Pod(pods) => Some(pods),
            Strategy::Daemon(_) | Strategy::Systemd(_) => None,
        });
        match pods {
            Some(pods) => pods.assignments.sweep_requested().await,
            None => std::future::pending().await,
        }
    }

    fn all(&self) -> impl Iterator<Item = &Strategy> {
        iter::once(&self.present).chain(&self.draining)
    }
}

/// Describes who serves a source, for Events.
pub fn describe_server(source: Option<&str>) -> String {
    match source {
        Some(pod) if is_mountpoint_pod_name(pod) => format!("Mountpoint Pod {pod}"),
        Some(_) => "the mounter of this node".to_owned(),
        None => "a unit of the node's systemd".to_owned(),
    }
}

pub enum Strategy {
    Pod(Box<MountpointPods>),
    Daemon(Box<Daemon>),
    Systemd(Arc<SystemdUnits>),
}

impl Strategy {
    fn publish(
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
                pods.publish(&publish, workload(&publish, raw).as_ref(), deadline, timer)
            }
            // The limits of the mounter's own container apply to all engines together.
            Self::Daemon(daemon) => daemon.publish(&publish, deadline, timer),
            Self::Systemd(units) => {
                let ResourceLimits { memory_bytes, cpu_millis, tasks } = limits;
                units.publish(&publish, Limits { memory_bytes, cpu_millis, tasks }, deadline, timer)
            }
        }
    }

    fn unpublish(
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

    /// The mounts that outlive their mounter; units have none.
    fn held_mounts(&self) -> Option<&HeldMounts> {
        match self {
            Self::Pod(pods) => Some(&pods.manager.held_mounts),
            Self::Daemon(daemon) => Some(&daemon.manager.held_mounts),
            Self::Systemd(_) => None,
        }
    }

    /// Removes what a crash left behind.
    fn sweep(&self) {
        match self {
            Self::Pod(pods) => pods.sweep(),
            Self::Daemon(daemon) => daemon.sweep(),
            Self::Systemd(units) => units.sweep(),
        }
    }

    /// Removes keys of version 1 and of units, and unused sources, that other strategies left.
    fn sweep_others(&self, sources: &Path, is_left: impl Fn(&str) -> bool) {
        match self {
            Self::Pod(pods) => pods.other_mounts.sweep(&pods.manager, sources, is_left),
            Self::Daemon(daemon) => daemon.other_mounts.sweep(&daemon.manager, sources, is_left),
            // Its own sweep removes the keys.
            Self::Systemd(units) => units.retire_sources(sources, is_left),
        }
    }

    /// Whether a source of this name is of this strategy.
    fn has_source(&self, name: &str) -> bool {
        match self {
            Self::Pod(_) => is_mountpoint_pod_name(name),
            Self::Daemon(_) => is_source_name(name),
            Self::Systemd(_) => false,
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
