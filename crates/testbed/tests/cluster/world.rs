//! One cluster with the driver for all tests that leave its parts alone, and words for what tests say to it.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use s3csi_testbed::cluster::Cluster;
use s3csi_testbed::image;
use s3csi_testbed::wait::wait_patiently_until;

/// Pods run after some seconds on an idle machine; CI machines are not idle.
pub const PATIENCE: Duration = Duration::from_mins(2);

/// With our image on its nodes and the driver installed from `deploy/`. Each test has names of its own in it.
pub static CLUSTER: LazyLock<Cluster> = LazyLock::new(|| {
    let directory = tempfile::Builder::new().prefix("s3csi-test-").tempdir_in("/tmp").unwrap();
    let archive = directory.path().join("s3csi.tar");
    image::write(&archive).unwrap();
    let cluster = Cluster::start("cluster", 1).unwrap();
    cluster.load(&archive).unwrap();
    cluster.install_driver().unwrap();
    cluster
});

/// A bucket, a static volume for it and a claim, all of one name.
pub struct Volume<'a> {
    pub name: &'a str,
    pub driver: &'a str,
}

impl Volume<'_> {
    #[track_caller]
    pub fn create(&self) {
        let Self { name, driver } = self;
        CLUSTER.create_bucket(name).unwrap();
        let yaml = format!(
            "
apiVersion: v1
kind: PersistentVolume
metadata: {{name: {name}}}
spec:
  capacity: {{storage: 1Gi}}
  accessModes: [ReadWriteMany]
  storageClassName: ''
  claimRef: {{namespace: default, name: {name}}}
  mountOptions: [allow-delete, allow-overwrite, metadata-ttl 0]
  csi: {{driver: {driver}, volumeHandle: {name}, volumeAttributes: {{bucketName: {name}}}}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {{name: {name}, namespace: default}}
spec: {{accessModes: [ReadWriteMany], storageClassName: '', volumeName: {name}, resources: {{requests: {{storage: 1Gi}}}}}}
"
        );
        CLUSTER.apply(&yaml).unwrap();
    }
}

/// A Pod with one volume at `/data` and a shell script to run, after which it sleeps.
pub struct Workload<'a> {
    pub name: &'a str,
    pub claim: &'a str,
    pub group: Option<u32>,
    pub script: &'a str,
}

impl Workload<'_> {
    #[track_caller]
    pub fn create(&self) {
        let Self { name, claim, group, script } = self;
        let group = group.map(|it| format!("{{fsGroup: {it}}}")).unwrap_or_else(|| "{}".to_owned());
        let yaml = format!(
            "
apiVersion: v1
kind: Pod
metadata: {{name: {name}, namespace: default}}
spec:
  terminationGracePeriodSeconds: 1
  securityContext: {group}
  containers:
  - name: main
    image: localhost/busybox:1
    imagePullPolicy: Never
    command: [sh, -ec, \"{script}; exec sleep 100000\"]
    volumeMounts: [{{name: data, mountPath: /data}}]
  volumes: [{{name: data, persistentVolumeClaim: {{claimName: {claim}}}}}]
"
        );
        CLUSTER.apply(&yaml).unwrap();
    }

    /// Panics with all that a person would look at when it does not run soon.
    #[track_caller]
    pub fn wait_until_it_runs(&self) {
        wait_for_pod(&CLUSTER, "default", self.name);
    }

    /// What a command in the Pod printed.
    #[track_caller]
    pub fn run(&self, script: &str) -> String {
        CLUSTER.kubectl(&["exec", self.name, "--", "sh", "-ec", script]).unwrap()
    }

    /// Returns when the API server has forgotten it: its volumes are gone then.
    #[track_caller]
    pub fn delete(&self) {
        CLUSTER.kubectl(&["delete", "pod", self.name, "--timeout=120s"]).unwrap();
    }
}

#[track_caller]
pub fn wait_for_pod(cluster: &Cluster, namespace: &str, name: &str) {
    let timeout = format!("--timeout={}s", PATIENCE.as_secs());
    let pod = format!("pod/{name}");
    let waited = cluster.kubectl(&["wait", "--namespace", namespace, "--for=condition=Ready", &pod, &timeout]);
    if let Err(error) = waited {
        let look = |arguments: &[&str]| cluster.kubectl(arguments).unwrap_or_else(|it| it.to_string());
        panic!(
            "{error}\n{}\n{}",
            look(&["describe", "pod", "--namespace", namespace, name]),
            look(&["get", "pods", "--all-namespaces", "--output", "wide"])
        );
    }
}

/// Until every Pod of a DaemonSet or Deployment is ready.
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

/// Until kubelet knows the driver. Volumes of Pods that come before wait for kubelet's back-off, many seconds.
#[track_caller]
pub fn wait_for_registration(cluster: &Cluster, driver: &str) {
    eventually("the driver is registered with kubelet", || {
        let drivers = cluster.kubectl(&["get", "csinodes", "--output", "jsonpath={.items[*].spec.drivers[*].name}"]);
        drivers.is_ok_and(|it| it.split_whitespace().any(|it| it == driver))
    });
}

/// For conditions that kubectl has to be asked for.
#[track_caller]
pub fn eventually(what: &str, condition: impl FnMut() -> bool) {
    assert!(wait_patiently_until(Instant::now() + PATIENCE, condition), "waited {PATIENCE:?} in vain: {what}");
}
