//! What kubelet asks of a node: publish and unpublish, with one call per target at a time.

pub mod assignment;
pub mod bind;
pub mod census;
pub mod conditions;
pub mod error;
pub mod life_line;
pub mod locks;
pub mod orders;
pub mod phases;
pub mod repairs;
pub mod retire;
pub mod source;
pub mod steps;
pub mod strategies;
pub mod taint;
pub mod teller;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use s3csi_core::policy::{self, Removed};
use s3csi_core::publish::{Publish, RawPublish};

use self::error::{PublishError, UnpublishError};
use self::locks::Locks;
use self::phases::Phases;
use self::strategies::{Done, Strategy};
use self::teller::{Mounted, Published, Teller};
use crate::api::event::{Kind, Listener};

/// How often sources without a workload are looked for. Normally there are none; a crash between two steps leaves one.
const SWEEP_EVERY: Duration = Duration::from_mins(2);

/// What kubelet adds to a volume's attributes (`podInfoOnMount`).
const WORKLOAD_NAME: &str = "csi.storage.k8s.io/pod.name";
const WORKLOAD_NAMESPACE: &str = "csi.storage.k8s.io/pod.namespace";

/// An Event: whoever wrote the option believes that it means something.
const OPTION_IGNORED: &str = "MountOptionIgnored";

pub struct Node {
    strategy: Strategy,
    targets: Locks,
    teller: Arc<Teller>,
}

impl Node {
    pub fn new(strategy: Strategy, teller: Arc<Teller>) -> Self {
        Self { strategy, targets: Locks::default(), teller }
    }

    pub fn publish(&self, raw: &RawPublish<'_>, deadline: Instant, phases: &Phases) -> Result<(), PublishError> {
        let publish = Publish::parse(raw).map_err(PublishError::Invalid)?;
        let target = publish.target.path().to_owned();
        let busy = || PublishError::TargetBusy { target: target.clone() };
        let _held = self.targets.try_lock(&target.to_string_lossy()).ok_or_else(busy)?;
        let attribute = |key: &str| raw.volume_context.get(key).filter(|it| !it.is_empty()).cloned();
        let listener = |namespace, name| Listener { namespace, name, uid: publish.target.workload().to_string() };
        let workload = attribute(WORKLOAD_NAMESPACE)
            .zip(attribute(WORKLOAD_NAME))
            .map(|(namespace, name)| listener(namespace, name));
        let bucket = publish.bucket.to_string();
        let ignored = policy::removed(&publish.arguments);
        let Done { mounted, source } = self.strategy.publish(publish, raw, deadline, phases)?;
        let served_by = self.strategy.server(source.as_deref());
        let published = Published { workload, bucket, source, refreshed: Instant::now() };
        self.teller.published(&target, published, mounted, &served_by);
        for Removed { option, reason } in ignored.iter().filter(|_| mounted != Mounted::Before) {
            let text = format!("mount option {option} has no effect: {reason}");
            self.teller.tell(&target, Kind::Warning, OPTION_IGNORED, &text);
        }
        Ok(())
    }

    pub fn unpublish(
        &self,
        volume_id: &str,
        target: &Path,
        deadline: Instant,
        phases: &Phases,
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
        self.strategy.unpublish(target, deadline, phases)?;
        self.teller.unpublished(target);
        Ok(())
    }

    /// Takes away, now and then, what a crash left behind.
    pub async fn sweep_forever(self: Arc<Self>) {
        let mut pace = tokio::time::interval(SWEEP_EVERY);
        loop {
            tokio::select! {
                _ = pace.tick() => {}
                () = self.strategy.asked_to_sweep() => {}
            }
            let node = self.clone();
            // A panic in there is logged by the runtime; the next round tries again.
            let _ = tokio::task::spawn_blocking(move || node.strategy.sweep()).await;
        }
    }
}

/// Where things are on a node; all of it derives from kubelet's directory and the driver's name.
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

    /// Sources are mounted in here, one directory each.
    pub fn sources(&self) -> PathBuf {
        self.plugin_directory().join("mnt")
    }

    pub fn mounter_dir(&self) -> PathBuf {
        self.plugin_directory().join("mounter")
    }

    /// Kubelet's requests name this very path as the host they are for, with `%2F` for each slash. Our HTTP library refuses such a host, but
    /// not such a user: what comes before an `@`.
    pub fn registration_socket(&self) -> PathBuf {
        self.kubelet.join("plugins_registry").join(format!("s3csi@{}-reg.sock", self.driver_name))
    }
}
