//! The life of a release, in a cluster of its own: taken over from the chart before ours, upgraded beneath a workload, uninstalled.

use s3csi_testbed::chart::{directory, write_earlier_chart};
use s3csi_testbed::cluster::{Cluster, ClusterHost};
use s3csi_testbed::image;
use serde_json::Value;

use crate::world::{DRIVER, NAMESPACE, PATIENCE, Volume, Workload, eventually, wait_for_pod, wait_for_rollout};

const DEFINITION: &str = "mountpoints3podattachments.s3.csi.scality.com";

#[test]
fn a_release_is_taken_over_upgraded_and_uninstalled() {
    let home = tempfile::Builder::new().prefix("s3csi-test-").tempdir_in("/tmp").unwrap();
    let archive = home.path().join("s3csi.tar");
    image::write(&archive).unwrap();
    let cluster = Cluster::start("release", 1).unwrap();
    cluster.load(&archive).unwrap();

    let earlier = home.path().join("earlier");
    write_earlier_chart(&earlier).unwrap();
    cluster.helm(&["install", "s3csi", earlier.to_str().unwrap(), "--namespace", NAMESPACE]).unwrap();
    let selector = || {
        cluster.get("/apis/apps/v1/namespaces/kube-system/daemonsets/s3-csi-node").unwrap()["spec"]["selector"].clone()
    };
    let before = selector();
    cluster.install_driver(NAMESPACE, DRIVER, &["--reset-then-reuse-values", "--take-ownership"]).unwrap();
    assert_eq!(selector(), before, "selectors cannot change");
    assert_eq!(before["matchLabels"]["app"], "s3-csi-node");

    let [volume, claim] = Volume::new("kept").objects();
    let workload = Workload::new("kept", "kept");
    cluster.create_bucket("kept").unwrap();
    for object in [&volume, &claim, &workload.object] {
        cluster.apply(&object.to_string()).unwrap();
    }
    wait_for_pod(&cluster, "default", "kept");
    let run = |script: &str| cluster.kubectl(&["exec", "kept", "--", "sh", "-ec", script]).unwrap();
    run("echo hello > /data/file");
    let look = || run("grep ' /data ' /proc/self/mountinfo; cat /data/file");
    let seen = look();
    let chart = directory();
    let upgrade = [
        "upgrade",
        "s3csi",
        chart.to_str().unwrap(),
        "--namespace",
        NAMESPACE,
        "--reuse-values",
        "--set",
        "node.logLevel=5",
    ];
    cluster.helm(&upgrade).unwrap();
    for part in ["daemonset/s3-csi-node", "deployment/s3-csi-controller"] {
        wait_for_rollout(&cluster, NAMESPACE, part);
    }
    assert_eq!(look(), seen, "the workload notices nothing");
    assert_eq!(selector(), before);

    cluster.kubectl(&["delete", "pod", "kept", "--timeout=120s"]).unwrap();
    let attachments = format!("/apis/{DRIVER}/v2/mountpoints3podattachments");
    let count = |path: &str| cluster.get(path).unwrap()["items"].as_array().map_or(0, Vec::len);
    eventually("no workload is served any more", || {
        count(&attachments) == 0 && count("/api/v1/namespaces/mount-s3/pods") == 0
    });
    let timeout = format!("{}s", PATIENCE.as_secs());
    cluster.helm(&["uninstall", "s3csi", "--namespace", NAMESPACE, "--wait", "--timeout", &timeout]).unwrap();
    eventually("kubelet has forgotten the driver", || {
        let node = cluster.get("/apis/storage.k8s.io/v1/csinodes/node1").unwrap();
        node["spec"]["drivers"].as_array().is_none_or(Vec::is_empty)
    });
    assert_eq!(
        left(&cluster),
        [format!("customresourcedefinition.apiextensions.k8s.io/{DEFINITION}"), "namespace/mount-s3".to_owned()]
    );
    let files = cluster.run(
        ClusterHost::Node(1),
        &["find", "/var/lib/kubelet/plugins", "/var/lib/kubelet/plugins_registry", "-not", "-type", "d"],
    );
    assert_eq!(files.unwrap(), "", "sockets of the plugin");
    // What the documents say how to remove it by hand.
    cluster.kubectl(&["delete", "namespace", "mount-s3", "--timeout=120s"]).unwrap();
    cluster.kubectl(&["delete", "crd", DEFINITION, "--timeout=120s"]).unwrap();
    assert_eq!(left(&cluster), Vec::<String>::new());
}

/// All objects of the release that exist, of every kind that the chart knows.
fn left(cluster: &Cluster) -> Vec<String> {
    let kinds = "customresourcedefinitions,namespaces,csidrivers,priorityclasses,clusterroles,clusterrolebindings,roles,rolebindings,\
                 serviceaccounts,configmaps,services,daemonsets,deployments,poddisruptionbudgets,networkpolicies,leases,\
                 validatingadmissionpolicies,validatingadmissionpolicybindings";
    let selector = "--selector=app.kubernetes.io/managed-by=Helm";
    let said = cluster.kubectl(&["get", kinds, "--all-namespaces", selector, "--output=json"]).unwrap();
    let list: Value = serde_json::from_str(&said).unwrap();
    let text = |it: &Value| it.as_str().unwrap_or_default().to_owned();
    let mut names: Vec<String> = list["items"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|it| {
            let group =
                text(&it["apiVersion"]).split_once('/').map(|(group, _)| format!(".{group}")).unwrap_or_default();
            format!("{}{group}/{}", text(&it["kind"]).to_lowercase(), text(&it["metadata"]["name"]))
        })
        .collect();
    names.sort();
    names
}
