//! The node service: publish and unpublish, one call per target at a time.

pub mod assignment;
pub mod bind;
pub mod conditions;
pub mod deadlines;
pub mod engine_config;
pub mod engine_monitor;
pub mod error;
pub mod failpoints;
pub mod health;
pub mod held_mounts;
pub mod legacy_v1;
pub mod memory_kills;
pub mod mount_health;
pub mod other_mounts;
pub mod planned_move;
pub mod remediation;
pub mod reporter;
pub mod retire;
pub mod source;
pub mod strategies;
pub mod taint;
pub mod timing;
pub mod workload_condition;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use s3csi_core::policy::{self, Removed};
use s3csi_core::publish::{
    InlineVolumes, InvalidInline, InvalidPublish, Publish, RawPublish, SecretFallback, SingleNodeVolumes, is_inline,
    volume_name,
};
use s3csi_core::target::TargetPath;

use self::error::{PublishError, UnpublishError};
use self::health::{HealthError, VolumeHealth};
use self::reporter::{MountOutcome, PublishedVolume, Reporter};
use self::strategies::{PublishOutcome, Strategies, Strategy};
use self::timing::CallTimer;
use crate::api::recorder::{EventType, PodReference};
use crate::credentials::workload::WorkloadCredentials;
use crate::host::Host;
use crate::keyed_locks::KeyedLocks;

/// How often leftovers of crashes are looked for. Normally there are none.
const SWEEP_PERIOD: Duration = Duration::from_mins(2);

/// Volume attributes that kubelet adds (`podInfoOnMount`).
const WORKLOAD_NAME: &str = "csi.storage.k8s.io/pod.name";
pub const WORKLOAD_NAMESPACE: &str = "csi.storage.k8s.io/pod.namespace";

/// The reason of the Event for a mount option that has no effect.
const OPTION_IGNORED: &str = "MountOptionIgnored";

/// The reason of the Event for a volume without the Secret that it should have.
const DRIVER_KEYS_USED: &str = "DriverKeysUsed";
const DRIVER_KEYS_USED_NOTE: &str = "the volume says authenticationSource: secret, but names no Secret (nodePublishSecretRef); the \
    driver's keys are used, because this namespace is listed in legacy.secretFallsBackToDriver";

pub struct Node {
    host: Arc<dyn Host>,
    strategies: Strategies,
    targets: KeyedLocks,
    reporter: Arc<Reporter>,
    workload_credentials: Arc<WorkloadCredentials>,
    fallback: SecretFallback,
    inline_volumes: InlineVolumes,
}

impl Node {
    /// Only the controller of strategy `pod` knows what other nodes use.
    pub fn single_node_volumes(&self) -> SingleNodeVolumes {
        match &self.strategies.present {
            Strategy::Pod(_) => SingleNodeVolumes::Enforced,
            Strategy::Daemon(_) | Strategy::Systemd(_) => SingleNodeVolumes::Refused,
        }
    }

    pub fn new(
        strategies: Strategies,
        reporter: Arc<Reporter>,
        workload_credentials: Arc<WorkloadCredentials>,
        fallback: SecretFallback,
    ) -> Self {
        let (host, targets) = (strategies.host.clone(), KeyedLocks::default());
        let inline_volumes = InlineVolumes::Refused;
        Self { host, strategies, targets, reporter, workload_credentials, fallback, inline_volumes }
    }

    #[must_use]
    pub fn with_inline_volumes(self, inline_volumes: InlineVolumes) -> Self {
        Self { inline_volumes, ..self }
    }

    pub fn publish(&self, raw: &RawPublish<'_>, deadline: Instant, timer: &CallTimer) -> Result<(), PublishError> {
        if self.refuses(raw.volume_context) {
            return Err(PublishError::Invalid(InvalidPublish::Inline { cause: InvalidInline::Disabled }));
        }
        let publish = Publish::parse(raw, &self.fallback).map_err(PublishError::Invalid)?;
        let target = publish.target.path().to_owned();
        let busy = || PublishError::TargetBusy { target: target.clone() };
        let _held = self.targets.try_lock(&target.to_string_lossy()).ok_or_else(busy)?;
        let workload = workload(&publish, raw);
        let volume = publish.volume.to_string();
        let bucket = publish.bucket.to_string();
        let ignored = policy::removed(&publish.arguments);
        let has_fallen_back = publish.has_fallen_back();
        let identity = publish.identity.clone();
        let PublishOutcome { mounted, source } = self.strategies.publish(publish, raw, deadline, timer)?;
        let served_by = strategies::describe_server(source.as_deref());
        let published = PublishedVolume {
            workload,
            volume,
            bucket,
            source,
            authentication: identity.source(),
            refreshed: Instant::now(),
            expires: identity.workload().and_then(|it| self.workload_credentials.expiry(it)),
        };
        self.reporter.published(&target, published, mounted, &served_by);
        if mounted == MountOutcome::AlreadyMounted {
            return Ok(());
        }
        if has_fallen_back {
            let (reason, note) = (DRIVER_KEYS_USED, DRIVER_KEYS_USED_NOTE);
            tracing::warn!(?target, reason, note, "a volume without a Secret uses the driver's keys");
            self.reporter.report(&target, EventType::Warning, reason, note);
        }
        for Removed { option, reason } in &ignored {
            let text = format!("mount option {option} has no effect: {reason}");
            self.reporter.report_about(&target, option, EventType::Warning, OPTION_IGNORED, &text);
        }
        Ok(())
    }

    /// Waits until a publish to this target has what it needs from others, if it needs anything. Returns how long that took.
    pub async fn wait_until_assigned(
        &self,
        volume_id: &str,
        target: &str,
        volume_context: &BTreeMap<String, String>,
        deadline: Instant,
    ) -> Option<Duration> {
        let Strategy::Pod(pods) = &self.strategies.present else { return None };
        if self.refuses(volume_context) {
            return None;
        }
        let target: TargetPath = target.parse().ok()?;
        let volume = volume_name(volume_id, &target, volume_context).ok()?;
        pods.wait_until_assigned(&target, &volume, deadline).await
    }

    fn refuses(&self, volume_context: &BTreeMap<String, String>) -> bool {
        self.inline_volumes == InlineVolumes::Refused && is_inline(volume_context)
    }

    /// The health of a published volume. Asks the kernel and, with a short deadline, the engine; never S3.
    pub fn volume_health(&self, volume_id: &str, path: &Path, deadline: Instant) -> Result<VolumeHealth, HealthError> {
        let held_mounts = self.strategies.held_mounts();
        health::check(self.host.as_ref(), &self.reporter, held_mounts, volume_id, path, deadline)
    }

    pub fn unpublish(
        &self,
        volume_id: &str,
        target: &Path,
        deadline: Instant,
        timer: &CallTimer,
    ) -> Result<(), UnpublishError> {
        if volume_id.is_empty() {
            return Err(UnpublishError::VolumeIdMissing);
        }
        if target.as_os_str().is_empty() {
            return Err(UnpublishError::TargetMissing);
        }
        if !target.is_absolute() {
            return Err(UnpublishError::TargetRelative { target: target.to_owned() });
        }
        let busy = || UnpublishError::TargetBusy { target: target.to_owned() };
        let _held = self.targets.try_lock(&target.to_string_lossy()).ok_or_else(busy)?;
        self.strategies.unpublish(volume_id, target, deadline, timer)?;
        self.reporter.unpublished(target);
        Ok(())
    }

    /// Removes leftovers of crashes, periodically and on request of the strategy.
    pub async fn sweep_forever(self: Arc<Self>) {
        let mut pace = tokio::time::interval(SWEEP_PERIOD);
        loop {
            tokio::select! {
                _ = pace.tick() => {}
                () = self.strategies.sweep_requested() => {}
            }
            let node = self.clone();
            // A panic is logged by the runtime; the next round retries.
            let _ = tokio::task::spawn_blocking(move || node.strategies.sweep()).await;
        }
    }
}

/// The Pod of a publish. Unknown if the `CSIDriver` object does not set `podInfoOnMount`.
fn workload(publish: &Publish, raw: &RawPublish<'_>) -> Option<PodReference> {
    let attribute = |key: &str| raw.volume_context.get(key).filter(|it| !it.is_empty()).cloned();
    let (namespace, name) = attribute(WORKLOAD_NAMESPACE).zip(attribute(WORKLOAD_NAME))?;
    Some(PodReference { namespace, name, uid: publish.target.workload().to_string() })
}

/// The paths of the plugin, derived from kubelet's directory and the driver's name.
#[derive(Clone, Debug)]
pub struct Layout {
    kubelet: PathBuf,
    driver_name: String,
}

impl Layout {
    pub fn new(kubelet: &Path, driver_name: &str) -> Self {
        Self { kubelet: kubelet.to_owned(), driver_name: driver_name.to_owned() }
    }

    pub fn plugin_directory(&self) -> PathBuf {
        self.kubelet.join("plugins").join(&self.driver_name)
    }

    pub fn csi_socket(&self) -> PathBuf {
        self.plugin_directory().join("csi.sock")
    }

    /// The directory in which sources are mounted.
    pub fn sources(&self) -> PathBuf {
        self.plugin_directory().join("mnt")
    }

    pub fn mounter_dir(&self) -> PathBuf {
        self.plugin_directory().join("mounter")
    }

    /// kubelet sends this path as the `:authority` of its requests, with `%2F` for each slash. hyper rejects such a host name but
    /// accepts it as user information, hence the `@`.
    pub fn registration_socket(&self) -> PathBuf {
        self.kubelet.join("plugins_registry").join(format!("s3csi@{}-reg.sock", self.driver_name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_derive_from_the_driver_name() {
        let layout = Layout::new(Path::new("/var/lib/kubelet"), "s3.csi.example.com");
        assert_eq!(layout.csi_socket(), Path::new("/var/lib/kubelet/plugins/s3.csi.example.com/csi.sock"));
        assert_eq!(
            layout.registration_socket(),
            Path::new("/var/lib/kubelet/plugins_registry/s3csi@s3.csi.example.com-reg.sock")
        );
    }
}
