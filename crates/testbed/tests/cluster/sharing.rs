//! Who shares a Mountpoint Pod with whom, and how `kubectl` shows it.

use std::collections::BTreeSet;

use serde_json::json;

use crate::world::{
    CLUSTER, NODE, Volume, Workload, attachments, delete_pods, eventually, mountpoint_pods, mounts, objects,
    one_mountpoint_pod,
};

#[test]
fn three_replicas_on_one_node_share_a_mountpoint_pod() {
    Volume::new("replicas").create();
    let mut template = Workload::new("replicas", "replicas").object;
    template["metadata"] = json!({ "labels": { "app": "replicas" } });
    let deployment = json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": { "name": "replicas", "namespace": "default" },
        "spec": {
            "replicas": 3, "selector": { "matchLabels": { "app": "replicas" } },
            "template": { "metadata": template["metadata"], "spec": template["spec"] },
        },
    });
    CLUSTER.apply(&deployment.to_string()).unwrap();
    CLUSTER.kubectl(&["rollout", "status", "deployment/replicas", "--timeout=120s"]).unwrap();

    let shared = one_mountpoint_pod("replicas");
    let served = &attachments("replicas")[0]["spec"]["mountpointS3PodAttachments"][&shared];
    assert_eq!(served.as_array().unwrap().len(), 3, "{served}");
    let pods = objects("/api/v1/namespaces/default/pods?labelSelector=app=replicas");
    let names: Vec<&str> = pods.iter().filter_map(|it| it["metadata"]["name"].as_str()).collect();
    let run = |pod: &str, script: &str| CLUSTER.kubectl(&["exec", pod, "--", "sh", "-ec", script]).unwrap();
    run(names[0], "echo hello > /data/file");
    for reader in &names[1..] {
        assert_eq!(run(reader, "cat /data/file"), "hello\n");
    }
    assert_eq!(mounts(NODE, &format!("/mnt/{shared} ")).len(), 1, "one source for all of them");
    CLUSTER.kubectl(&["delete", "deployment", "replicas", "--cascade=foreground", "--timeout=180s"]).unwrap();
}

#[test]
fn pods_of_another_group_get_a_mountpoint_pod_of_their_own() {
    Volume::new("groups").create();
    CLUSTER.put_object("groups", "file", "content").unwrap();
    let with_group = |name: &str, group: u32| Workload::new(name, "groups").secured("fsGroup", group);
    let all = [with_group("group-1", 1000), with_group("group-2", 1000), with_group("group-3", 2000)];
    for workload in &all {
        workload.create();
    }
    for workload in &all {
        workload.wait_until_it_runs();
    }
    assert_eq!(mountpoint_pods("groups").len(), 2);
    let groups: BTreeSet<String> =
        attachments("groups").iter().map(|it| it["spec"]["workloadFSGroup"].to_string()).collect();
    assert_eq!(groups, BTreeSet::from([r#""1000""#.to_owned(), r#""2000""#.to_owned()]));
    let seen: Vec<String> = all.iter().map(|it| it.run("stat -c %g /data/file")).collect();
    assert_eq!(seen, ["1000\n", "1000\n", "2000\n"]);
    delete_pods(&all.each_ref());
}

#[test]
fn kubectl_shows_who_is_served_by_whom() {
    Volume::new("shown").create();
    let workload = Workload::new("shown", "shown").start();
    let pod = one_mountpoint_pod("shown");

    let selector = "--field-selector=spec.persistentVolumeName=shown";
    let columns = || -> Vec<String> {
        let table = CLUSTER.kubectl(&["get", "s3pa", selector, "--no-headers"]).unwrap();
        table.split_whitespace().skip(1).take(5).map(str::to_owned).collect()
    };
    // Node, volume, workloads, Mountpoint Pods, ready.
    eventually("the attachment's status is written", || columns() == ["node1", "shown", "1", "1", "1/1"]);

    let table = CLUSTER.kubectl(&["get", "pods", "--namespace", "mount-s3", "--no-headers", &pod]).unwrap();
    let columns: Vec<&str> = table.split_whitespace().take(4).collect();
    assert_eq!(columns, [pod.as_str(), "1/1", "Running", "0"]);
    workload.delete();
}
