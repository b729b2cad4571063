//! Strategy `pod` in a cluster, installed from `deploy/`: what users see of workloads, Mountpoint Pods and attachments.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use s3csi_testbed::cluster::Place;
use s3csi_testbed::wait::wait_patiently_until;

use crate::world::{CLUSTER, Volume, Workload, eventually, wait_for_pod, wait_for_registration, wait_for_rollout};

const DRIVER: &str = "s3.csi.scality.com";

/// How long everything of a workload may be there after it.
const CLEAN_UP: Duration = Duration::from_secs(10);

#[track_caller]
fn create_volume(name: &str) {
    Volume { name, driver: DRIVER }.create();
}

/// A running workload that does nothing.
#[track_caller]
fn start_workload<'a>(name: &'a str, claim: &'a str, group: Option<u32>) -> Workload<'a> {
    let workload = Workload { name, claim, group, script: "true" };
    workload.create();
    workload.wait_until_it_runs();
    workload
}

/// The Mountpoint Pods that serve a volume, as its attachments say.
fn mountpoint_pods(volume: &str) -> BTreeSet<String> {
    let selector = format!("--field-selector=spec.persistentVolumeName={volume}");
    let said = CLUSTER.kubectl(&["get", "s3pa", &selector, "--output", "json"]).unwrap();
    let list: serde_json::Value = serde_json::from_str(&said).unwrap();
    let attachments = list["items"].as_array().unwrap().iter();
    let served = attachments.filter_map(|it| it["spec"]["mountpointS3PodAttachments"].as_object());
    served.flat_map(|it| it.keys().cloned()).collect()
}

fn existing_mountpoint_pods() -> BTreeSet<String> {
    let said = CLUSTER.kubectl(&["get", "pods", "--namespace", "mount-s3", "--output", "name"]).unwrap();
    said.lines().filter_map(|it| it.strip_prefix("pod/").map(str::to_owned)).collect()
}

/// The lines of the node's mount table that mention a text.
fn mounts_of_the_node(text: &str) -> Vec<String> {
    let table = CLUSTER.run(Place::Node(1), &["cat", "/proc/self/mountinfo"]).unwrap();
    table.lines().filter(|it| it.contains(text)).map(str::to_owned).collect()
}

#[test]
fn a_workload_with_a_static_volume_runs_and_its_file_is_in_the_bucket() {
    create_volume("file");
    let script = "echo from the Pod > /data/greeting";
    let writer = Workload { name: "file", claim: "file", group: None, script };
    writer.create();
    writer.wait_until_it_runs();
    eventually("the file is in the bucket", || {
        CLUSTER.object("file", "greeting").is_some_and(|it| it == b"from the Pod\n")
    });
    assert_eq!(writer.run("cat /data/greeting"), "from the Pod\n");
    writer.delete();
    check_nobody_was_refused();
}

#[test]
fn the_example_in_the_documentation_works() {
    let example = include_str!("../../../../docs/examples/static-volume.yaml");
    CLUSTER.create_bucket("my-bucket").unwrap();
    CLUSTER.apply(example).unwrap();
    wait_for_pod(&CLUSTER, "default", "my-pod");
    eventually("the file is in the bucket", || CLUSTER.object("my-bucket", "greeting").is_some());
    CLUSTER.delete(example).unwrap();
}

#[test]
fn workloads_of_a_node_share_a_mountpoint_pod_and_another_group_gets_its_own() {
    create_volume("shared");
    let one = start_workload("shared-1", "shared", None);
    let [first] = mountpoint_pods("shared").into_iter().collect::<Vec<_>>().try_into().unwrap();
    let other = start_workload("shared-2", "shared", None);
    assert_eq!(mountpoint_pods("shared"), BTreeSet::from([first.clone()]));
    one.run("echo hello > /data/from-1");
    assert_eq!(other.run("cat /data/from-1"), "hello\n");
    assert_eq!(mounts_of_the_node(&format!("/mnt/{first} ")).len(), 1, "one source for both");

    let third = start_workload("shared-3", "shared", Some(2000));
    let pods = mountpoint_pods("shared");
    assert_eq!(pods.len(), 2, "{pods:?}");
    assert!(pods.contains(&first), "{first} is not among {pods:?}");
    assert_eq!(third.run("stat -c %g /data/from-1"), "2000\n");

    for workload in [one, other, third] {
        workload.delete();
    }
}

#[test]
fn everything_of_a_deleted_workload_is_gone_within_ten_seconds() {
    create_volume("deleted");
    let workload = start_workload("deleted", "deleted", None);
    workload.run("echo last words > /data/file");
    let [pod] = mountpoint_pods("deleted").into_iter().collect::<Vec<_>>().try_into().unwrap();
    assert!(existing_mountpoint_pods().contains(&pod));
    workload.delete();

    let is_gone = || {
        mountpoint_pods("deleted").is_empty()
            && !existing_mountpoint_pods().contains(&pod)
            && mounts_of_the_node(&pod).is_empty()
    };
    let started = Instant::now();
    if !wait_patiently_until(started + CLEAN_UP, is_gone) {
        panic!(
            "after {CLEAN_UP:?}: attachments {:?}, Mountpoint Pods {:?}, mounts {:?}",
            mountpoint_pods("deleted"),
            existing_mountpoint_pods(),
            mounts_of_the_node(&pod)
        );
    }
    assert_eq!(CLUSTER.object("deleted", "file").unwrap(), b"last words\n");
}

#[test]
fn a_restart_of_the_node_plugin_and_a_republish_change_nothing() {
    create_volume("steady");
    let workload = start_workload("steady", "steady", None);
    workload.run("echo hello > /data/file");
    let pods = mountpoint_pods("steady");
    let look = || workload.run("grep ' /data ' /proc/self/mountinfo; cat /data/file");
    let before = look();

    let node_plugin = ["--namespace", "kube-system", "daemonset/s3-csi-node"];
    CLUSTER.kubectl(&[["rollout", "restart"].as_slice(), &node_plugin].concat()).unwrap();
    wait_for_rollout(&CLUSTER, "kube-system", "daemonset/s3-csi-node");
    wait_for_registration(&CLUSTER, DRIVER);
    // kubelet looks at a Pod's volumes anew when the Pod changes.
    CLUSTER.kubectl(&["annotate", "pod", "steady", "test/changed=yes"]).unwrap();
    eventually("the volume is published again", || {
        let logs = CLUSTER.kubectl(&[["logs", "--tail=-1"].as_slice(), &node_plugin].concat()).unwrap_or_default();
        logs.lines().any(|it| it.contains("NodePublishVolume") && it.contains("steady"))
    });

    assert_eq!(look(), before);
    assert_eq!(mountpoint_pods("steady"), pods);
    let restarts = "jsonpath={.status.containerStatuses[0].restartCount}";
    assert_eq!(CLUSTER.kubectl(&["get", "pod", "steady", "--output", restarts]).unwrap(), "0");
    workload.delete();
}

#[test]
fn kubectl_shows_who_is_served_by_whom() {
    create_volume("shown");
    let workload = start_workload("shown", "shown", None);
    let [pod] = mountpoint_pods("shown").into_iter().collect::<Vec<_>>().try_into().unwrap();

    let selector = "--field-selector=spec.persistentVolumeName=shown";
    let columns = || -> Vec<String> {
        let table = CLUSTER.kubectl(&["get", "s3pa", selector, "--no-headers"]).unwrap();
        table.split_whitespace().skip(1).take(4).map(str::to_owned).collect()
    };
    // Node, volume, workloads, Mountpoint Pods.
    eventually("the attachment's status is written", || columns() == ["node1", "shown", "1", "1"]);

    let table = CLUSTER.kubectl(&["get", "pods", "--namespace", "mount-s3", "--no-headers", &pod]).unwrap();
    let columns: Vec<&str> = table.split_whitespace().take(4).collect();
    assert_eq!(columns, [pod.as_str(), "1/1", "Running", "0"]);
    workload.delete();
}

#[test]
fn a_bucket_that_does_not_exist_is_named_in_an_event() {
    create_volume("missing");
    std::fs::remove_dir(CLUSTER.bucket("missing")).unwrap();
    let workload = Workload { name: "missing", claim: "missing", group: None, script: "true" };
    workload.create();
    let events = ["get", "events", "--field-selector=involvedObject.name=missing,reason=FailedMount"];
    let message = [events.as_slice(), &["--output", "jsonpath={.items[*].message}"]].concat();
    eventually("an event says what is wrong", || {
        let said = CLUSTER.kubectl(&message).unwrap_or_default();
        said.contains("missing") && said.to_lowercase().contains("bucket")
    });
    workload.delete();
}

/// The roles in `deploy/` grant all that the driver asks for.
#[track_caller]
fn check_nobody_was_refused() {
    let events = CLUSTER.audit().into_iter();
    let ours = events.filter(|it| it.user.username.starts_with("system:serviceaccount:kube-system:s3-csi-"));
    let refused = ours.filter(|it| it.response_status.as_ref().is_some_and(|it| it.code == 403));
    let refused: Vec<String> =
        refused.map(|it| format!("{} {} {}", it.user.username, it.verb, it.request_uri)).collect();
    assert!(refused.is_empty(), "the API server refused:\n{}", refused.join("\n"));
}
