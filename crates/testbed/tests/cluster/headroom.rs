//! Room for Mountpoint Pods on a node that is full, with a driver of its own: the real scheduler, real kubelets, the chart's roles.

use s3csi_testbed::cluster::{AuditEvent, ClusterHost};
use serde_json::{Value, json};

use crate::strategies::Installed;
use crate::world::{
    CLUSTER, NODE, OTHER_NODE, Volume, Workload, alone, authority, delete_pods, events, eventually, is_registered,
    objects, pod, settings,
};

const ROOM: Installed = Installed { strategy: "pod", driver: "headroom.s3csi.test", namespace: "s3-headroom" };

/// Of each Mountpoint Pod, in thousandths of a processor.
const REQUEST: u64 = 500;

/// What is left of a full node.
const LEFT: u64 = 100;

/// A Deployment, and the label of its Pod.
const FILLER: &str = "room-filler";

fn install() {
    let authority = authority(&CLUSTER);
    let mut arguments = settings(&authority);
    for setting in [
        "mountpointPod.namespace=mount-s3-headroom",
        "mountpointPod.priorityClassName=room-critical",
        "mountpointPod.preemptingPriorityClassName=room-preempting",
        "mountpointPod.headroomPriorityClassName=room-headroom",
        "mountpointPod.reserveHeadroom=true",
    ] {
        arguments.extend(["--set", setting]);
    }
    CLUSTER.install_driver(ROOM.namespace, ROOM.driver, &arguments).unwrap();
}

/// Pods in the namespace of Mountpoint Pods that a label selects.
fn own_pods(selector: &str) -> Vec<Value> {
    objects(&format!("/api/v1/namespaces/mount-s3-headroom/pods?labelSelector={}/{selector}", ROOM.driver))
}

fn headroom_pods() -> Vec<Value> {
    own_pods("headroom-for-pod")
}

fn fillers() -> Vec<Value> {
    objects(&format!("/api/v1/namespaces/default/pods?labelSelector=app={FILLER}"))
}

/// Such as `250m` or `2`, in thousandths.
fn thousandths(quantity: &Value) -> u64 {
    let text = quantity.as_str().unwrap_or("0");
    match text.strip_suffix('m') {
        Some(number) => number.parse().unwrap(),
        None => text.parse::<u64>().unwrap() * 1000,
    }
}

/// What Pods request, in thousandths.
fn requested_processor(pods: &[Value]) -> u64 {
    let is_living = |it: &&Value| it["status"]["phase"] != "Succeeded" && it["status"]["phase"] != "Failed";
    let containers = pods.iter().filter(is_living).flat_map(|it| it["spec"]["containers"].as_array().unwrap());
    containers.map(|it| thousandths(&it["resources"]["requests"]["cpu"])).sum()
}

/// Takes all but a little of a node, so that no Mountpoint Pod has room.
fn fill(place: ClusterHost) {
    let node = CLUSTER.get(&format!("/api/v1/nodes/{}", place.name())).unwrap();
    let allocatable = thousandths(&node["status"]["allocatable"]["cpu"]);
    let is_filler = |it: &Value| it["metadata"]["labels"]["app"] == FILLER;
    let is_running = |it: &Value| it["status"]["phase"] == "Running" && it["metadata"]["deletionTimestamp"].is_null();
    eventually("the node is full", || {
        let pods = objects(&format!("/api/v1/pods?fieldSelector=spec.nodeName={}", place.name()));
        let (fillers, others): (Vec<Value>, Vec<Value>) = pods.into_iter().partition(is_filler);
        let room = allocatable - requested_processor(&others);
        let is_full = room.saturating_sub(requested_processor(&fillers)) < REQUEST;
        if is_full && matches!(fillers.as_slice(), [it] if is_running(it)) {
            return true;
        }
        // Again when Pods of other tests have come or ended meanwhile.
        CLUSTER.apply(&filler(place, room - LEFT).to_string()).unwrap();
        false
    });
}

fn filler(place: ClusterHost, request: u64) -> Value {
    json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": { "name": FILLER, "namespace": "default" },
        "spec": {
            "replicas": 1,
            // With another request the next Pod would wait for the room of this one.
            "strategy": { "type": "Recreate" },
            "selector": { "matchLabels": { "app": FILLER } },
            "template": {
                "metadata": { "labels": { "app": FILLER } },
                "spec": {
                    "terminationGracePeriodSeconds": 1,
                    "nodeSelector": { "kubernetes.io/hostname": place.name() },
                    "containers": [{
                        "name": "main", "image": "localhost/busybox:1", "imagePullPolicy": "Never",
                        "command": ["sleep", "100000"], "resources": { "requests": { "cpu": format!("{request}m") } },
                    }],
                },
            },
        },
    })
}

#[test]
fn a_workload_on_a_full_node_runs_if_room_was_reserved_for_it() {
    let _alone = alone();
    install();
    for place in [NODE, OTHER_NODE] {
        eventually("kubelet knows the driver", || is_registered(place, ROOM.driver));
    }
    let request = format!("{REQUEST}m");
    let attributes = [("mountpointContainerResourcesRequestsCpu", request.as_str())];
    let volume = |name| Volume { driver: ROOM.driver, attributes: &attributes, ..Volume::new(name) };
    volume("room-unreserved").create();
    // Its Mountpoint Pod comes late, because the volume is in use on another node.
    Volume { access_mode: "ReadWriteOnce", ..volume("room-reserved") }.create();
    let holder = Workload::new("room-holder", "room-reserved").start();

    let mut gated = Workload::new("room-gated", "room-reserved").on(OTHER_NODE);
    gated.object["spec"]["schedulingGates"] =
        json!([{ "name": format!("{}/reserve-headroom-for-mppod", ROOM.driver) }]);
    gated.create();
    eventually("the headroom Pod runs beside the workload", || {
        let node = json!(OTHER_NODE.name());
        let is_there = |it: &Value| it["spec"]["nodeName"] == node && it["status"]["phase"] == "Running";
        pod("room-gated")["spec"]["nodeName"] == node && headroom_pods().iter().any(is_there)
    });
    assert_eq!(headroom_pods()[0]["spec"]["containers"][0]["resources"]["requests"]["cpu"], request.as_str());
    fill(OTHER_NODE);
    let filler = fillers()[0]["metadata"]["uid"].clone();

    // Without headroom a workload waits.
    let waiting = Workload::new("room-waiting", "room-unreserved").on(OTHER_NODE);
    waiting.create();
    eventually("there is no room for its Mountpoint Pod", || {
        events("room-waiting", "VolumeNotServed").iter().any(|it| it.contains("Insufficient cpu"))
    });

    // With headroom it runs: the Mountpoint Pod preempts the headroom Pod, and nothing else.
    holder.delete();
    gated.wait_until_it_runs();
    gated.run("echo hello > /data/file");
    assert_eq!(CLUSTER.object("room-reserved", "file").unwrap(), b"hello\n");
    let is_on_full_node = |it: &&Value| it["spec"]["nodeName"] == OTHER_NODE.name();
    let serving = own_pods("volume-name=room-reserved");
    let serving = serving.iter().find(is_on_full_node).unwrap();
    assert_eq!(serving["spec"]["priorityClassName"], "room-preempting");
    eventually("the headroom Pod is gone", || headroom_pods().is_empty());
    let [still] = fillers().try_into().unwrap();
    assert_eq!((&still["metadata"]["uid"], &still["metadata"]["deletionTimestamp"]), (&filler, &Value::Null));
    assert_eq!(pod("room-waiting")["status"]["phase"], "Pending");

    CLUSTER.kubectl(&["delete", "deployment", FILLER]).unwrap();
    waiting.wait_until_it_runs();
    check_rights();
    delete_pods(&[&gated, &waiting]);
    eventually("every Pod of the driver has ended", || objects("/api/v1/namespaces/mount-s3-headroom/pods").is_empty());
    CLUSTER.helm(&["uninstall", "s3csi", "--namespace", ROOM.namespace]).unwrap();
}

/// The controller patches workloads, and was refused nothing.
fn check_rights() {
    let account = format!("system:serviceaccount:{}:s3-csi-driver-controller-sa", ROOM.namespace);
    let asked: Vec<AuditEvent> = CLUSTER.audit().into_iter().filter(|it| it.user.username == account).collect();
    let is_about_workload =
        |it: &AuditEvent| it.object_ref.as_ref().is_some_and(|it| it.resource == "pods" && it.namespace == "default");
    assert!(asked.iter().any(|it| it.verb == "patch" && is_about_workload(it)), "the controller uses its right");
    let refused = asked.iter().filter(|it| it.response_status.as_ref().is_some_and(|it| it.code == 403));
    assert_eq!(refused.map(|it| &it.request_uri).collect::<Vec<_>>(), Vec::<&String>::new());
}
