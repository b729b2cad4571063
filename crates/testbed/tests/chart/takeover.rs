//! Helm from the Scality chart to ours: nothing that running workloads need is deleted, whatever the values say; what would be lost
//! is refused with a sentence; and back.

use s3csi_testbed::chart::write_earlier_chart;
use serde_json::{Value, json};

use crate::chart::{self, RELEASE, elements};
use crate::install::{Cluster, DEFINITION};

/// Ours over the earlier chart, as the documents say.
const TAKE_OVER: [&str; 2] = ["--reset-then-reuse-values", "--take-ownership"];

/// A cluster with the earlier chart installed.
fn with_earlier_chart(name: &str) -> Cluster {
    let cluster = Cluster::start(name);
    let earlier = cluster.home.path().join("earlier");
    write_earlier_chart(&earlier).unwrap();
    let mut install = cluster.helm(&["install", RELEASE]);
    install.arg(&earlier);
    chart::run(install).unwrap();
    cluster
}

fn take_over(cluster: &Cluster, settings: &[&str]) -> Result<String, String> {
    let mut arguments = TAKE_OVER.to_vec();
    arguments.extend(settings.iter().flat_map(|it| ["--set", it]));
    cluster.our_chart("upgrade", &arguments)
}

/// What running workloads cannot live without, by its identity: an object that was deleted and made again has another one.
fn identities(cluster: &Cluster) -> [Value; 2] {
    let identities = [("namespace", "mount-s3"), ("crd", DEFINITION)]
        .map(|(kind, name)| cluster.get(kind, name)["metadata"]["uid"].clone());
    assert!(identities.iter().all(Value::is_string), "{identities:?}");
    identities
}

#[test]
fn no_upgrade_deletes_the_namespace_or_the_definition() {
    let cluster = with_earlier_chart("chart-kept");
    let before = identities(&cluster);
    // The definition is deleted with the release from here on, but not by an upgrade.
    take_over(&cluster, &["strategy=daemon", "cleanupCRDOnUninstall=true"]).unwrap();
    assert_eq!(identities(&cluster), before, "directly to strategy daemon");
    for settings in [
        &["strategy=pod"][..],
        &["strategy=systemd"],
        &["strategy=pod", "mountpointPod.createNamespace=false"],
        &["strategy=daemon"],
        &["strategy=pod", "mountpointPod.createNamespace=true", "mountpointPod.namespace=elsewhere"],
    ] {
        let mut arguments = vec!["--reuse-values", "--take-ownership"];
        arguments.extend(settings.iter().flat_map(|it| ["--set", it]));
        cluster.our_chart("upgrade", &arguments).unwrap();
        assert_eq!(identities(&cluster), before, "{settings:?}");
    }
    // A namespace of another name is kept as well, when the values name the next one.
    let elsewhere = || cluster.get("namespace", "elsewhere")["metadata"]["uid"].clone();
    let before = elsewhere();
    assert!(before.is_string());
    cluster.our_chart("upgrade", &["--reuse-values", "--set", "mountpointPod.namespace=mount-s3"]).unwrap();
    assert_eq!(elsewhere(), before, "a custom namespace");
}

#[test]
fn an_upgrade_does_not_silently_end_provisioning() {
    let cluster = with_earlier_chart("chart-provisions");
    let class = json!({
        "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": "their-class"},
        "provisioner": "s3.csi.scality.com",
    });
    let volume = json!({
        "apiVersion": "v1", "kind": "PersistentVolume",
        "metadata": {
            "name": "their-volume", "annotations": {"pv.kubernetes.io/provisioned-by": "s3.csi.scality.com"},
        },
        "spec": {
            "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteMany"],
            "csi": {"driver": "s3.csi.scality.com", "volumeHandle": "their-volume"},
        },
    });
    for (object, found) in
        [(class, "(StorageClass their-class)"), (volume, "(StorageClass their-class, PersistentVolume their-volume)")]
    {
        cluster.control_plane.apply(&object.to_string()).unwrap();
        let error = take_over(&cluster, &[]).unwrap_err();
        assert!(error.contains(&format!("{found}, but dynamic provisioning is not configured")), "{error}");
    }
    // Its volumes must be deleted some day, even if no claim can be made any more.
    cluster.control_plane.kubectl(&["delete", "storageclass", "their-class"]).unwrap();
    let error = take_over(&cluster, &[]).unwrap_err();
    assert!(error.contains("(PersistentVolume their-volume), but dynamic provisioning is not configured"), "{error}");
    assert!(error.contains("set sidecars.csiProvisioner.enabled=true"), "{error}");
    assert_eq!(elements(&node(&cluster)["containers"]).count(), 2, "the earlier driver is still installed");

    take_over(&cluster, &["sidecars.csiProvisioner.enabled=true"]).unwrap();
    let controller = cluster.get("deployment", "s3-csi-controller");
    let containers = &controller["spec"]["template"]["spec"]["containers"];
    assert!(elements(containers).any(|it| it["name"] == "csi-provisioner"), "{containers}");
    cluster.our_chart("upgrade", &["--reuse-values", "--set", "sidecars.csiProvisioner.enabled=false"]).unwrap();
    let controller = cluster.get("deployment", "s3-csi-controller");
    let containers = &controller["spec"]["template"]["spec"]["containers"];
    assert!(elements(containers).all(|it| it["name"] != "csi-provisioner"), "{containers}");
}

fn node(cluster: &Cluster) -> Value {
    cluster.get("daemonset", "s3-csi-node")["spec"]["template"]["spec"].clone()
}

#[test]
fn permissions_of_the_earlier_pods_last_until_the_next_upgrade_and_a_rollback_works() {
    let cluster = with_earlier_chart("chart-rollback");
    let before = identities(&cluster);
    let notes = take_over(&cluster, &[]).unwrap();
    assert!(notes.contains("this release replaces the Scality driver"), "{notes}");
    assert!(cluster.get("clusterrole", "s3-csi-driver-takeover").is_object());
    let notes = cluster.our_chart("upgrade", &["--reuse-values"]).unwrap();
    assert!(!notes.contains("replaces the Scality driver"), "{notes}");
    assert_eq!(cluster.get("clusterrole", "s3-csi-driver-takeover"), Value::Null);
    assert_eq!(elements(&node(&cluster)["containers"]).count(), 1);

    chart::run(cluster.helm(&["rollback", RELEASE, "1"])).unwrap();
    assert_eq!(elements(&node(&cluster)["containers"]).count(), 2, "the earlier driver is back");
    assert_eq!(identities(&cluster), before);
    // And forward again.
    take_over(&cluster, &[]).unwrap();
    assert_eq!(elements(&node(&cluster)["containers"]).count(), 1);
    assert_eq!(identities(&cluster), before);
}

#[test]
fn own_service_accounts_must_exist_and_need_no_token_of_their_own() {
    let cluster = Cluster::start("chart-accounts");
    let own = ["--set", "node.serviceAccount.create=false", "--set", "node.serviceAccount.name=own"];
    let error = cluster.our_chart("install", &own).unwrap_err();
    assert!(error.contains("service account kube-system/own does not exist"), "{error}");
    let create = ["create", "serviceaccount", "own", "--namespace", chart::NAMESPACE];
    cluster.control_plane.kubectl(&create).unwrap();
    cluster.our_chart("install", &own).unwrap();
    assert_eq!(node(&cluster)["serviceAccountName"], "own");
    assert_eq!(node(&cluster)["automountServiceAccountToken"], true);
}
