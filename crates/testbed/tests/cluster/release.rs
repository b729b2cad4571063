//! The life of a release, in a cluster of its own: taken over from the chart before ours, upgraded beneath a workload, uninstalled.

use std::io::Write as _;

use s3csi_testbed::chart::{directory, write_earlier_chart};
use s3csi_testbed::cluster::{Cluster, ClusterHost};
use s3csi_testbed::image;
use s3csi_testbed::steady_reader::ReaderReport;
use s3csi_testbed::steady_script::{SEED, SHOW_REPORT, STOP, SteadyAccess, created, steady_script};
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
    let workload = Workload::new("kept", "kept").script(&steady_script("/data", SteadyAccess::CreateAndAppend));
    cluster.create_bucket("kept").unwrap();
    cluster.put_object("kept", SEED, "seed\n").unwrap();
    for object in [&volume, &claim, &workload.object] {
        cluster.apply(&object.to_string()).unwrap();
    }
    wait_for_pod(&cluster, "default", "kept");
    let run = |script: &str| cluster.kubectl(&["exec", "kept", "--", "sh", "-ec", script]).unwrap();
    let report = || ReaderReport::parse(&run(SHOW_REPORT)).unwrap_or_default();
    let look = || run("grep ' /data ' /proc/self/mountinfo");
    let seen = look();
    let check_undisturbed = |by: &str| {
        let before = report().rounds;
        eventually("the workload goes on", || before + 5 <= report().rounds);
        let _ = writeln!(std::io::stderr(), "release: {by}: the longest round took {:?}", report().longest);
        assert_eq!(report().errors, Vec::<String>::new(), "{by}");
        assert_eq!(look(), seen, "the mount is the same after {by}");
    };
    let next = image::NAME.replace(":test", ":next");
    let node = ClusterHost::Node(1);
    cluster.run(node, &["ctr", "--namespace", "k8s.io", "images", "tag", image::NAME, &next]).unwrap();
    let chart = directory();
    let mut upgrade = vec!["upgrade", "s3csi", chart.to_str().unwrap(), "--namespace", NAMESPACE, "--reuse-values"];
    upgrade.extend(["--set", "node.logLevel=5", "--set", "image.tag=next"]);
    cluster.helm(&upgrade).unwrap();
    for part in ["daemonset/s3-csi-node", "deployment/s3-csi-controller"] {
        wait_for_rollout(&cluster, NAMESPACE, part);
    }
    check_undisturbed("helm upgrade");
    assert_eq!(selector(), before);
    check_mountpoint_pod_is_replaced(&cluster, &next);
    check_undisturbed("the replacement of an older Mountpoint Pod");
    run(STOP);
    let rounds = report().rounds;
    let stored = |round: u64| cluster.object("kept", &created(round));
    let lost: Vec<u64> = (1..=rounds).filter(|it| stored(*it) != Some(format!("{it}\n").into_bytes())).collect();
    assert_eq!(lost, Vec::<u64>::new(), "of {rounds} rounds");

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

/// The image that is built here has one version only, so the Pod gets the label of an earlier one.
fn check_mountpoint_pod_is_replaced(cluster: &Cluster, image: &str) {
    let pods = || {
        let list = cluster.get("/api/v1/namespaces/mount-s3/pods").unwrap_or_default();
        list["items"].as_array().cloned().unwrap_or_default()
    };
    let [old] = pods().try_into().unwrap();
    assert_ne!(old["spec"]["containers"][0]["image"], image, "the same version stays");
    let name = old["metadata"]["name"].as_str().unwrap();
    let label = format!("{DRIVER}/mounted-by-csi-driver-version=0.0.1");
    cluster.kubectl(&["label", "pod", "--namespace", "mount-s3", name, "--overwrite", &label]).unwrap();
    // kubelet publishes the volumes of a Pod that changes again, which brings the keys to the restarted node plugin.
    cluster.kubectl(&["annotate", "pod", "kept", "test/changed=yes"]).unwrap();
    eventually("a Mountpoint Pod of the new image serves", || {
        let pods = pods();
        let conditions = |pod: &Value| pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let mounted = format!("{DRIVER}/Mounted");
        pods.len() == 1
            && pods[0]["spec"]["containers"][0]["image"] == image
            && conditions(&pods[0]).iter().any(|it| it["type"] == mounted.as_str() && it["status"] == "True")
    });
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
