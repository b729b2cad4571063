//! The end of workloads: what is taken away, when, and what must not be.

use std::time::Instant;

use s3csi_testbed::wait::wait_patiently_until;
use serde_json::json;

use crate::world::{
    CLEAN_UP, CLUSTER, DRIVER, NODE, OTHER_NODE, Volume, Workload, alone, attachments, eventually,
    existing_mountpoint_pods, in_peace, mountpoint_pods, mounts, one_mountpoint_pod, pod, wait_for_pod,
};

#[test]
fn everything_of_a_deleted_workload_is_gone_within_ten_seconds() {
    let _peace = in_peace();
    Volume::new("deleted").create();
    let workload = Workload::new("deleted", "deleted").start();
    workload.run("echo last words > /data/file");
    let serving = one_mountpoint_pod("deleted");
    assert!(existing_mountpoint_pods().contains(&serving));
    let uid = pod("deleted")["metadata"]["uid"].as_str().unwrap().to_owned();
    assert_eq!(mounts(NODE, &uid).iter().filter(|it| it.contains("mountpoint-s3")).count(), 1);
    workload.delete();
    // kubelet lets go of a Pod when its volumes are unmounted, and not before.
    assert_eq!(mounts(NODE, &uid), Vec::<String>::new());

    let is_gone = || {
        attachments("deleted").is_empty()
            && !existing_mountpoint_pods().contains(&serving)
            && mounts(NODE, &serving).is_empty()
    };
    let started = Instant::now();
    assert!(
        wait_patiently_until(started + CLEAN_UP, is_gone),
        "after {CLEAN_UP:?}: attachments {:?}, Mountpoint Pods {:?}, mounts {:?}",
        attachments("deleted"),
        existing_mountpoint_pods(),
        mounts(NODE, &serving)
    );
    assert_eq!(CLUSTER.object("deleted", "file").unwrap(), b"last words\n");
}

/// The workload of such an entry does not exist. The entry is stale after two minutes, and every two minutes is a reconciliation.
#[test]
fn a_stale_attachment_is_gone_within_four_minutes() {
    Volume::new("stale").create();
    let workload = Workload::new("stale", "stale").start();
    let serving = one_mountpoint_pod("stale");
    let name = attachments("stale")[0]["metadata"]["name"].as_str().unwrap().to_owned();
    let now = CLUSTER.run(NODE, &["date", "--utc", "+%Y-%m-%dT%H:%M:%SZ"]).unwrap();
    let unknown = json!({ "workloadPodUID": "11111111-2222-4333-8444-555555555555", "attachmentTime": now.trim() });
    let patch =
        json!([{ "op": "add", "path": format!("/spec/mountpointS3PodAttachments/{serving}/-"), "value": unknown }]);
    let patched = ["patch", "s3pa", &name, "--type=json", "--patch", &patch.to_string()];
    CLUSTER.kubectl(&patched).unwrap();
    let entered = Instant::now();
    workload.delete();
    // It might belong to a workload that the controller has not seen yet.
    assert_eq!(mountpoint_pods("stale").len(), 1);

    let is_gone = || attachments("stale").is_empty() && !existing_mountpoint_pods().contains(&serving);
    let deadline = entered + std::time::Duration::from_mins(4) + CLEAN_UP;
    assert!(wait_patiently_until(deadline, is_gone), "{DRIVER}: {:?}", attachments("stale"));
    assert_eq!(mounts(NODE, &serving), Vec::<String>::new());
}

#[test]
fn the_last_writes_of_a_workload_arrive_when_its_node_is_drained() {
    let _alone = alone();
    Volume::new("drained").create();
    let script =
        "trap 'sleep 6; echo last words > /data/last; exit 0' TERM\ntouch /data/first\nwhile :; do sleep 0.1; done";
    // Without --force only Pods that have a controller are evicted.
    let template = Workload::new("drained", "drained").script(script).on(OTHER_NODE).grace(30).object;
    let set = json!({
        "apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": { "name": "drained", "namespace": "default" },
        "spec": {
            "replicas": 1, "serviceName": "drained", "selector": { "matchLabels": { "app": "drained" } },
            "template": { "metadata": { "labels": { "app": "drained" } }, "spec": template["spec"] },
        },
    });
    CLUSTER.apply(&set.to_string()).unwrap();
    eventually("the workload is there", || !pod("drained-0").is_null());
    wait_for_pod(&CLUSTER, "default", "drained-0");
    let first = pod("drained-0");
    let serving = one_mountpoint_pod("drained");
    let node = OTHER_NODE.name();
    CLUSTER.kubectl(&["drain", &node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=90s"]).unwrap();
    assert_eq!(CLUSTER.object("drained", "last").as_deref(), Some(b"last words\n".as_slice()));
    assert_ne!(pod("drained-0")["metadata"]["uid"], first["metadata"]["uid"], "the workload is still there");
    eventually("nothing is left on the node", || {
        !existing_mountpoint_pods().contains(&serving)
            && mounts(OTHER_NODE, &serving).is_empty()
            && attachments("drained").is_empty()
    });
    CLUSTER.kubectl(&["delete", "statefulset", "drained", "--cascade=foreground", "--timeout=60s"]).unwrap();
    CLUSTER.kubectl(&["uncordon", &node]).unwrap();
}
