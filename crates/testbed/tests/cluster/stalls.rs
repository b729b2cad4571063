//! A store that stalls is not a dead engine: all who wait for it go on after it, on the same mount.

use std::time::{Duration, Instant};

use s3csi_testbed::cluster::ClusterHost;
use s3csi_testbed::environment;
use s3csi_testbed::steady_script::{SEED, SteadyAccess};
use s3csi_testbed::wait::wait_patiently_until;
use serde_json::{Value, json};

use crate::world::{
    CLUSTER, NODE, SteadyWorkload, Volume, Workload, delete_pods, events, eventually, mounts, one_mountpoint_pod, seed,
    wait_for_serving_pod,
};

/// Beside the one that all other volumes use.
const ENDPOINT: &str = "http://10.200.0.1:7071";

/// Files that each Pod reads for the first time while the store stalls: 42 readers, more than an engine has threads.
const WAITING_READERS: usize = 14;

/// In every run; `make soak` has more time.
const STALL: Duration = Duration::from_mins(2);

/// An S3 server with the same buckets, for one test that stops it.
struct SecondStore {
    process: String,
}

impl SecondStore {
    fn start() -> Self {
        let program = environment::tool("versitygw").unwrap();
        let buckets = CLUSTER.directory().join("s3/buckets");
        let accounts = CLUSTER.directory().join("s3/accounts");
        let script = format!(
            "ROOT_ACCESS_KEY=testbed ROOT_SECRET_KEY=testbed-NeverPrintThis setsid {} --port 10.200.0.1:7071 --iam-dir {} --keep-alive \
             --quiet posix {} </dev/null >/dev/null 2>&1 & echo $!",
            program.display(),
            accounts.display(),
            buckets.display()
        );
        let process = CLUSTER.run(ClusterHost::ControlPlane, &["sh", "-c", &script]).unwrap();
        Self { process: process.trim().to_owned() }
    }

    fn signal(&self, signal: &str) {
        CLUSTER.run(ClusterHost::ControlPlane, &["kill", signal, &self.process]).unwrap();
    }
}

impl Drop for SecondStore {
    fn drop(&mut self) {
        let _ = CLUSTER.run(ClusterHost::ControlPlane, &["kill", "-KILL", &self.process]);
    }
}

#[test]
fn a_store_that_stalls_is_waited_for() {
    let store = SecondStore::start();
    let keys = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "stalled", "namespace": "default" },
        "stringData": { "access_key_id": "testbed", "secret_access_key": "testbed-NeverPrintThis" },
    });
    CLUSTER.apply(&keys.to_string()).unwrap();
    let attributes = &[("endpointUrl", ENDPOINT)];
    Volume { secret: Some("stalled"), attributes, ..Volume::new("stalled") }.create();
    CLUSTER.put_object("stalled", SEED, &seed()).unwrap();
    for number in 1..=WAITING_READERS {
        CLUSTER.put_object("stalled", &format!("file-{number}"), &format!("{number}\n")).unwrap();
    }
    let [read, write] = [SteadyAccess::Read, SteadyAccess::CreateAndAppend];
    let readers = [("stalled-1", read), ("stalled-2", read), ("stalled-3", write)]
        .map(|(name, access)| SteadyWorkload::of(Workload::new(name, "stalled").on(NODE), "stalled", access));
    let source = one_mountpoint_pod("stalled");
    let found = || mounts(NODE, &format!("/mnt/{source} "));
    let (before, server) = (found(), wait_for_serving_pod("stalled"));
    assert_eq!(before.len(), 1, "all share one source");

    store.signal("-STOP");
    let begun = Instant::now();
    for reader in &readers {
        let script = format!(
            "for number in $(seq {WAITING_READERS}); do \
             (cat /data/file-$number 2>&1 >>/tmp/read || true) >>/tmp/failed 2>/dev/null </dev/null & done"
        );
        reader.workload.run(&script);
        // kubelet publishes the volumes of a Pod that changes again.
        CLUSTER.kubectl(&["annotate", "pod", &reader.workload.name, "test/changed=yes"]).unwrap();
    }
    let is_replaced = wait_patiently_until(begun + environment::soak_stall().unwrap_or(STALL), || found() != before);
    assert!(!is_replaced, "the mount was {before:?} and is {:?}", found());
    store.signal("-CONT");

    for reader in &readers {
        let read = || reader.workload.run("cat /tmp/read /tmp/failed").lines().count();
        eventually("every waiting reader has ended", || WAITING_READERS <= read());
        assert_eq!(reader.workload.run("cat /tmp/failed"), "", "{} waited", reader.workload.name);
        reader.check_undisturbed("a stall of the S3 server");
        assert_eq!(events(&reader.workload.name, "VolumeRemounted"), Vec::<String>::new());
    }
    assert_eq!(found(), before);
    let containers = |pod: &Value| pod["status"]["containerStatuses"][0]["containerID"].clone();
    assert_eq!(containers(&wait_for_serving_pod("stalled")), containers(&server), "the same mounter serves");
    delete_pods(&readers.each_ref().map(|it| &it.workload));
}
