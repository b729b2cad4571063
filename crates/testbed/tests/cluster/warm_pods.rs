//! Warm Mountpoint Pods, with a driver of their own beside the others: real kubelets, the real mounter, the chart's roles.

use s3csi_testbed::cluster::AuditEvent;
use serde_json::Value;

use crate::strategies::Installed;
use crate::world::{
    CLUSTER, NODE, OTHER_NODE, Volume, Workload, authority, eventually, in_peace, is_registered, objects, settings,
};

const WARM: Installed = Installed { strategy: "pod", driver: "warm.s3csi.test", namespace: "s3-warm" };

fn install(warm: &str) {
    let authority = authority(&CLUSTER);
    let mut arguments = settings(&authority);
    let names = ["mountpointPod.namespace=mount-s3-warm", "mountpointPod.priorityClassName=mount-s3-warm"];
    for setting in [warm, names[0], names[1]] {
        arguments.extend(["--set", setting]);
    }
    CLUSTER.install_driver(WARM.namespace, WARM.driver, &arguments).unwrap();
}

/// The names of Mountpoint Pods of the first node that run and have a label.
fn running(label: &str) -> Vec<String> {
    let selector = format!("labelSelector={}/{label}&fieldSelector=spec.nodeName={}", WARM.driver, NODE.name());
    let pods = objects(&format!("/api/v1/namespaces/mount-s3-warm/pods?{selector}"));
    let is_running = |it: &&Value| it["status"]["phase"] == "Running" && it["metadata"]["deletionTimestamp"].is_null();
    pods.iter().filter(is_running).filter_map(|it| it["metadata"]["name"].as_str().map(str::to_owned)).collect()
}

#[test]
fn the_first_pod_of_a_volume_is_served_by_a_warm_mountpoint_pod() {
    // Warm Pods are on both nodes.
    let _peace = in_peace();
    install("mountpointPod.warm=1");
    for place in [NODE, OTHER_NODE] {
        eventually("kubelet knows the driver", || is_registered(place, WARM.driver));
    }
    eventually("the node has a warm Mountpoint Pod", || running("warm").len() == 1);
    let warm = running("warm");

    Volume { driver: WARM.driver, ..Volume::new("warmed") }.create();
    let workload = Workload::new("warmed", "warmed").start();
    workload.run("echo hello > /data/file");
    assert_eq!(CLUSTER.object("warmed", "file").unwrap(), b"hello\n");
    assert_eq!(running("volume-name=warmed"), warm, "the volume has adopted the warm Pod");
    eventually("there is another warm one", || running("warm").len() == 1 && running("warm") != warm);

    let account = format!("system:serviceaccount:{}:s3-csi-driver-controller-sa", WARM.namespace);
    let asked: Vec<AuditEvent> = CLUSTER.audit().into_iter().filter(|it| it.user.username == account).collect();
    let about_nodes = |verb: &str| {
        let is_about = |it: &AuditEvent| it.object_ref.as_ref().is_some_and(|it| it.resource == "csinodes");
        asked.iter().any(|it| it.verb == verb && is_about(it))
    };
    assert!(about_nodes("list") && about_nodes("watch"), "the controller uses its rights");
    let refused = asked.iter().filter(|it| it.response_status.as_ref().is_some_and(|it| it.code == 403));
    assert_eq!(refused.map(|it| &it.request_uri).collect::<Vec<_>>(), Vec::<&String>::new());

    // The pool ends, and the adopted Pod serves on.
    install("mountpointPod.warm=0");
    eventually("no Mountpoint Pod is warm", || {
        let selector = format!("labelSelector={}/warm", WARM.driver);
        objects(&format!("/api/v1/namespaces/mount-s3-warm/pods?{selector}")).is_empty()
    });
    assert_eq!(workload.run("cat /data/file"), "hello\n");
    assert_eq!(running("volume-name=warmed"), warm);
    workload.delete();
    eventually("the adopted Pod ends with its last workload", || {
        objects("/api/v1/namespaces/mount-s3-warm/pods").is_empty()
    });
    CLUSTER.helm(&["uninstall", "s3csi", "--namespace", WARM.namespace]).unwrap();
}
