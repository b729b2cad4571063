//! Parts of the driver and of the node end and come back; workloads notice nothing.

use rustix::process::{Signal, kill_process};
use s3csi_testbed::cluster::{ClusterHost, ServiceAction};

use crate::world::{
    CLUSTER, DRIVER, NAMESPACE, NODE, OTHER_NODE, SteadyWorkload, Volume, Workload, alone, engines_of, eventually,
    is_registered, mountpoint_pods, objects, pod, wait_for_rollout, wait_for_serving_pod,
};

const NODE_PLUGIN: &str = "daemonset/s3-csi-node";

/// Ends the node plugin on a node, and waits for the next one.
#[track_caller]
pub fn restart_plugin(namespace: &str, place: ClusterHost) {
    let node = format!("spec.nodeName={}", place.name());
    let path =
        format!("/api/v1/namespaces/{namespace}/pods?labelSelector=app=scality-s3-csi-node&fieldSelector={node}");
    let uids = || objects(&path).iter().map(|it| it["metadata"]["uid"].clone()).collect::<Vec<_>>();
    let before = uids();
    let selectors = ["--selector=app=scality-s3-csi-node", &format!("--field-selector={node}")];
    CLUSTER.kubectl(&["delete", "pod", "--namespace", namespace, selectors[0], selectors[1]]).unwrap();
    eventually("there is another Pod of the node plugin", || !uids().is_empty() && uids() != before);
    wait_for_rollout(&CLUSTER, namespace, NODE_PLUGIN);
}

#[test]
fn a_restart_of_the_node_plugin_and_a_republish_change_nothing() {
    let _alone = alone();
    Volume::new("steady").create();
    let workload = Workload::new("steady", "steady").on(OTHER_NODE).start();
    workload.run("echo hello > /data/file");
    let pods = mountpoint_pods("steady");
    let look = || workload.run("grep ' /data ' /proc/self/mountinfo; cat /data/file");
    let before = look();

    restart_plugin(NAMESPACE, OTHER_NODE);
    eventually("kubelet knows the driver", || is_registered(OTHER_NODE, DRIVER));
    // kubelet checks a Pod's volumes again when the Pod changes.
    CLUSTER.kubectl(&["annotate", "pod", "steady", "test/changed=yes"]).unwrap();
    let selectors = ["--namespace", NAMESPACE, "--selector=app=scality-s3-csi-node", "--prefix", "--tail=-1"];
    eventually("the volume is published again", || {
        let logs = CLUSTER.kubectl(&[["logs"].as_slice(), &selectors].concat()).unwrap_or_default();
        logs.lines().any(|it| it.contains("NodePublishVolume") && it.contains("steady"))
    });

    assert_eq!(look(), before);
    assert_eq!(mountpoint_pods("steady"), pods);
    assert_eq!(pod("steady")["status"]["containerStatuses"][0]["restartCount"], 0);
    workload.delete();
}

#[test]
fn the_registration_survives_a_restart_of_kubelet_and_of_the_plugin() {
    let _alone = alone();
    Volume::new("registered").create();
    let old = Workload::new("registered-before", "registered").on(OTHER_NODE).start();
    old.run("echo hello > /data/file");

    CLUSTER.service(OTHER_NODE, ServiceAction::Restart, "kubelet").unwrap();
    let new = Workload::new("registered-after", "registered").on(OTHER_NODE).start();
    assert!(is_registered(OTHER_NODE, DRIVER));
    assert_eq!(new.run("cat /data/file"), "hello\n");
    new.delete();

    restart_plugin(NAMESPACE, OTHER_NODE);
    let newer = Workload::new("registered-later", "registered").on(OTHER_NODE).start();
    assert!(is_registered(OTHER_NODE, DRIVER));
    let table = CLUSTER.kubectl(&["get", "csinode", &OTHER_NODE.name(), "--output=jsonpath={.spec.drivers[*].name}"]);
    assert!(table.unwrap().split_whitespace().any(|it| it == DRIVER));
    assert_eq!(newer.run("cat /data/file"), "hello\n");
    newer.delete();

    assert_eq!(old.run("cat /data/file"), "hello\n");
    assert_eq!(pod("registered-before")["status"]["containerStatuses"][0]["restartCount"], 0);
    old.delete();
}

#[test]
fn a_reader_sees_no_error_when_its_engine_is_killed() {
    let workload = SteadyWorkload::start(&Volume::new("engine-killed"), NODE);
    for kill in 1..=3 {
        let engines = engines_of("engine-killed");
        let [engine] = engines.as_slice() else { panic!("engines: {engines:?}") };
        kill_process(*engine, Signal::KILL).unwrap();
        eventually("another engine serves", || {
            let now = engines_of("engine-killed");
            now.len() == 1 && now != engines
        });
        workload.check_undisturbed(&format!("kill {kill} of its engine"));
    }
    let restarts = &wait_for_serving_pod("engine-killed")["status"]["containerStatuses"][0]["restartCount"];
    assert_eq!(*restarts, 0, "the Mountpoint Pod stays as it is");
    workload.finish();
}
