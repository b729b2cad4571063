//! One cluster with the driver for all tests, and words for what tests say to it.
//!
//! Tests run side by side, with names of their own, and their workloads are on the first node. The second one is for those who restart,
//! drain or crowd something; they do it [`alone`], so that tests that measure seconds [`in_peace`] are not disturbed. Drivers have Pods
//! on both nodes, so they are installed [`in_peace`].

mod look;
mod steady;
mod workload;

use std::sync::{LazyLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use s3csi_testbed::cluster::{Cluster, ClusterHost};
use s3csi_testbed::image;
use s3csi_testbed::wait::wait_patiently_until;

pub use look::{
    attachments, engines_of, events, existing_mountpoint_pods, mountpoint_pods, mounts, objects, one_mountpoint_pod,
    pod, serving_pod, wait_for_serving_pod,
};
pub use steady::{SteadyWorkload, seed};
pub use workload::{Volume, Workload, delete_pods};

pub const DRIVER: &str = "s3.csi.scality.com";

/// Where the release is.
pub const NAMESPACE: &str = "kube-system";

/// For all workloads that do not say otherwise.
pub const NODE: ClusterHost = ClusterHost::Node(1);

/// The node whose parts may be restarted, by tests that are [`alone`].
pub const OTHER_NODE: ClusterHost = ClusterHost::Node(2);

/// Pods run after some seconds on an idle machine; CI machines are not idle.
pub const PATIENCE: Duration = Duration::from_mins(2);

/// How long anything of a workload may be there after it.
pub const CLEAN_UP: Duration = Duration::from_secs(10);

/// With our image on its nodes and the driver installed from the chart.
pub static CLUSTER: LazyLock<Cluster> = LazyLock::new(|| {
    let directory = tempfile::Builder::new().prefix("s3csi-test-").tempdir_in("/tmp").unwrap();
    let archive = directory.path().join("s3csi.tar");
    image::write(&archive).unwrap();
    let cluster = Cluster::start("cluster", 2).unwrap();
    cluster.load(&archive).unwrap();
    let authority = authority(&cluster);
    cluster.install_driver(NAMESPACE, DRIVER, &settings(&authority)).unwrap();
    cluster
});

/// Helm's argument for the authority of the cluster's S3 server with TLS.
pub fn authority(cluster: &Cluster) -> String {
    format!("tls.caCertData={}", cluster.directory().join("pki/ca.crt").display())
}

/// What every driver of these tests is installed with.
pub fn settings(authority: &str) -> Vec<&str> {
    vec!["--set", "tls.caCertConfigMap=private-ca", "--set-file", authority, "--set", "inlineVolumes.enabled=true"]
}

static PEACE: RwLock<()> = RwLock::new(());

/// As long as it is held, no test restarts or crowds anything.
pub fn in_peace() -> RwLockReadGuard<'static, ()> {
    PEACE.read().unwrap_or_else(PoisonError::into_inner)
}

/// For those who restart or crowd what others need, one at a time.
pub fn alone() -> RwLockWriteGuard<'static, ()> {
    PEACE.write().unwrap_or_else(PoisonError::into_inner)
}

/// Panics with all that a person would look at when it does not run soon.
#[track_caller]
pub fn wait_for_pod(cluster: &Cluster, namespace: &str, name: &str) {
    let path = format!("/api/v1/namespaces/{namespace}/pods/{name}");
    let is_ready = || {
        let conditions = cluster.get(&path).map(|it| it["status"]["conditions"].clone()).unwrap_or_default();
        conditions.as_array().into_iter().flatten().any(|it| it["type"] == "Ready" && it["status"] == "True")
    };
    if !wait_patiently_until(Instant::now() + PATIENCE, is_ready) {
        let look = |arguments: &[&str]| cluster.kubectl(arguments).unwrap_or_else(|it| it.to_string());
        panic!(
            "Pod {name} is not ready after {PATIENCE:?}\n{}\n{}\n{}",
            look(&["describe", "pod", "--namespace", namespace, name]),
            look(&["get", "pods", "--all-namespaces", "--output", "wide"]),
            look(&["get", "s3pa", "--output", "wide"]),
        );
    }
}

/// Until every Pod of a `DaemonSet` or Deployment is ready.
#[track_caller]
pub fn wait_for_rollout(cluster: &Cluster, namespace: &str, what: &str) {
    let timeout = format!("--timeout={}s", PATIENCE.as_secs());
    let waited = cluster.kubectl(&["rollout", "status", "--namespace", namespace, what, &timeout]);
    if let Err(error) = waited {
        let look = |arguments: &[&str]| cluster.kubectl(arguments).unwrap_or_else(|it| it.to_string());
        panic!(
            "{error}\n{}\n{}",
            look(&["describe", "pods", "--namespace", namespace]),
            look(&["logs", "--namespace", namespace, what, "--all-containers", "--tail=50"])
        );
    }
}

/// Whether `kubectl get csinode` shows the driver on this node. Volumes of Pods that come before wait for kubelet's back-off.
pub fn is_registered(place: ClusterHost, driver: &str) -> bool {
    let node = CLUSTER.get(&format!("/apis/storage.k8s.io/v1/csinodes/{}", place.name())).unwrap_or_default();
    node["spec"]["drivers"].as_array().into_iter().flatten().any(|it| it["name"] == driver)
}

/// For conditions that somebody else has to be asked for.
#[track_caller]
pub fn eventually(what: &str, condition: impl FnMut() -> bool) {
    assert!(wait_patiently_until(Instant::now() + PATIENCE, condition), "waited {PATIENCE:?} in vain: {what}");
}
