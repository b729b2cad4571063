//! What kubelet asks of a node: publish and unpublish, with one call per target at a time.

pub mod assignment;
pub mod bind;
pub mod error;
pub mod life_line;
pub mod locks;
pub mod orders;
pub mod retire;
pub mod source;
pub mod steps;
pub mod strategies;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use s3csi_core::publish::{Publish, RawPublish};

use self::error::{PublishError, UnpublishError};
use self::locks::Locks;
use self::strategies::Strategy;

/// How often sources without a workload are looked for. Normally there are none; a crash between two steps leaves one.
const SWEEP_EVERY: Duration = Duration::from_mins(2);

pub struct Node {
    strategy: Strategy,
    targets: Locks,
}

impl Node {
    pub fn new(strategy: Strategy) -> Self {
        Self { strategy, targets: Locks::default() }
    }

    pub fn publish(&self, raw: &RawPublish<'_>, deadline: Instant) -> Result<(), PublishError> {
        let publish = Publish::parse(raw).map_err(PublishError::Invalid)?;
        let target = publish.target.path().to_owned();
        let busy = || PublishError::TargetBusy { target: target.clone() };
        let _held = self.targets.try_lock(&target.to_string_lossy()).ok_or_else(busy)?;
        self.strategy.publish(publish, raw, deadline)
    }

    pub fn unpublish(&self, volume_id: &str, target: &Path, deadline: Instant) -> Result<(), UnpublishError> {
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
        self.strategy.unpublish(target, deadline)
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
