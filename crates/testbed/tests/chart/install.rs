//! The chart in a real cluster's API server: installed, upgraded, taken over from the earlier chart, uninstalled. And the
//! examples of the documents, which must be accepted there.

use std::fs;
use std::path::Path;
use std::process::Command;

use s3csi_testbed::chart::write_earlier_chart;
use s3csi_testbed::cluster::ControlPlane;
use s3csi_testbed::environment::workspace;
use s3csi_testbed::wait::wait_for;
use serde_json::{Value, json};

use crate::chart::{self, NAMESPACE, RELEASE, directory, documents, helm, read};

/// An API server and a Helm that talks to it.
pub struct Cluster {
    pub control_plane: ControlPlane,
    pub home: tempfile::TempDir,
}

impl Cluster {
    pub fn start(name: &str) -> Self {
        let home = tempfile::Builder::new().prefix("s3csi-test-").tempdir_in("/tmp").unwrap();
        Self { control_plane: ControlPlane::start(name).unwrap(), home }
    }

    pub fn helm(&self, arguments: &[&str]) -> Command {
        let mut helm = helm();
        helm.env("HOME", self.home.path()).args(["--namespace", NAMESPACE, "--kubeconfig"]);
        helm.arg(self.control_plane.kubeconfig()).args(arguments);
        helm
    }

    /// Installs or upgrades our chart.
    pub fn our_chart(&self, verb: &str, arguments: &[&str]) -> Result<String, String> {
        let mut helm = self.helm(&[verb, RELEASE]);
        helm.arg(directory()).args(arguments);
        chart::run(helm)
    }

    /// An object as the API server has it, or nothing.
    pub fn get(&self, kind: &str, name: &str) -> Value {
        let arguments = ["get", kind, name, "--namespace", NAMESPACE, "--ignore-not-found", "--output=json"];
        let text = self.control_plane.kubectl(&arguments).unwrap();
        if text.trim().is_empty() { Value::Null } else { serde_json::from_str(&text).unwrap() }
    }
}

pub const DEFINITION: &str = "mountpoints3podattachments.s3.csi.scality.com";

#[test]
fn the_chart_is_installed_changes_its_strategy_and_leaves_only_what_the_documents_say() {
    let cluster = Cluster::start("chart");
    let notes = cluster.our_chart("install", &["--set", "s3.endpointUrl=http://10.0.0.1:7070"]).unwrap();
    assert!(notes.contains("--selector app=scality-s3-csi-node"), "{notes}");
    assert!(!notes.contains("NOTE:"), "{notes}");
    let node = cluster.get("daemonset", "s3-csi-node");
    assert_eq!(node["spec"]["selector"]["matchLabels"]["app"], "scality-s3-csi-node");

    for strategy in ["daemon", "systemd"] {
        let set = format!("strategy={strategy}");
        cluster.our_chart("upgrade", &["--reuse-values", "--set", &set]).unwrap();
        assert_eq!(cluster.get("deployment", "s3-csi-controller"), Value::Null, "{strategy}");
        assert!(cluster.get("crd", DEFINITION).is_object(), "attachments outlive strategy {strategy}");
        let arguments = &cluster.get("daemonset", "s3-csi-node")["spec"]["template"]["spec"]["containers"][0]["args"];
        assert_eq!(arguments[1], format!("--{set}"));
    }
    assert_eq!(cluster.get("daemonset", "s3-csi-mounter"), Value::Null);
    cluster.our_chart("upgrade", &["--reuse-values", "--set", "strategy=pod"]).unwrap();
    assert!(cluster.get("deployment", "s3-csi-controller").is_object());
    check_inline_volumes(&cluster);

    chart::run(cluster.helm(&["uninstall", "--wait", RELEASE])).unwrap();
    for (kind, name) in [
        ("daemonset", "s3-csi-node"),
        ("deployment", "s3-csi-controller"),
        ("csidriver", "s3.csi.scality.com"),
        ("clusterrole", "s3-csi-driver-cluster-role"),
        ("clusterrole", "s3-csi-driver-controller-cluster-role"),
        ("priorityclass", "mount-s3-critical"),
        ("serviceaccount", "s3-csi-driver-sa"),
    ] {
        assert_eq!(cluster.get(kind, name), Value::Null);
    }
    assert!(cluster.get("crd", DEFINITION).is_object());
    assert!(cluster.get("namespace", "mount-s3").is_object());

    // What was kept is taken over by the next install.
    cluster.our_chart("install", &["--set", "cleanupCRDOnUninstall=true"]).unwrap();
    chart::run(cluster.helm(&["uninstall", "--wait", RELEASE])).unwrap();
    assert_eq!(cluster.get("crd", DEFINITION), Value::Null);
}

/// The API server does not let the lifecycle modes of a driver change; Helm says what to do.
fn check_inline_volumes(cluster: &Cluster) {
    for (value, modes) in [("true", json!(["Persistent", "Ephemeral"])), ("false", json!(["Persistent"]))] {
        let upgrade = ["--reuse-values", "--set", &format!("inlineVolumes.enabled={value}")];
        let refused = cluster.our_chart("upgrade", &upgrade).unwrap_err();
        assert!(refused.contains("kubectl delete csidriver s3.csi.scality.com"), "{refused}");
        cluster.control_plane.kubectl(&["delete", "csidriver", "s3.csi.scality.com"]).unwrap();
        cluster.our_chart("upgrade", &upgrade).unwrap();
        assert_eq!(cluster.get("csidriver", "s3.csi.scality.com")["spec"]["volumeLifecycleModes"], modes);
    }
}

#[test]
fn what_serves_running_workloads_outlives_a_change_of_the_strategy() {
    let cluster = Cluster::start("chart-strategies");
    let change =
        |strategy: &str| cluster.our_chart("upgrade", &["--reuse-values", "--set", &format!("strategy={strategy}")]);
    let draining = |kind: &str, name: &str| {
        let arguments = cluster.get(kind, name)["spec"]["template"]["spec"]["containers"][0]["args"].clone();
        chart::elements(&arguments).find_map(|it| it.as_str()?.strip_prefix("--draining=").map(str::to_owned))
    };
    let apply = |objects: &[Value]| {
        for (number, object) in objects.iter().enumerate() {
            let file = cluster.home.path().join(format!("{number}.json"));
            fs::write(&file, object.to_string()).unwrap();
            cluster.control_plane.kubectl(&["apply", "--filename", file.to_str().unwrap()]).unwrap();
        }
    };
    cluster.our_chart("install", &[]).unwrap();
    apply(&[json!({
        "apiVersion": "s3.csi.scality.com/v2", "kind": "MountpointS3PodAttachment", "metadata": { "name": "used" },
        "spec": {
            "nodeName": "node", "persistentVolumeName": "pv", "volumeID": "pv", "mountOptions": "", "workloadFSGroup": "",
            "mountpointS3PodAttachments": {},
        },
    })]);

    let notes = change("systemd").unwrap();
    assert!(notes.contains("mounts of strategy pod are served until their Pods are deleted"), "{notes}");
    assert_eq!(draining("daemonset", "s3-csi-node").unwrap(), "pod");
    assert_eq!(draining("deployment", "s3-csi-controller").unwrap(), "pod");
    assert!(cluster.get("priorityclass", "mount-s3-critical").is_object(), "for Mountpoint Pods that are replaced");
    cluster.control_plane.kubectl(&["delete", "s3pa", "used"]).unwrap();
    check_pods_that_the_controller_ends(&cluster);
    change("daemon").unwrap();
    assert_eq!(cluster.get("deployment", "s3-csi-controller"), Value::Null);
    assert_eq!(draining("daemonset", "s3-csi-node"), None);

    apply(&[
        json!({
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": { "name": "pv" },
            "spec": {
                "capacity": { "storage": "1Gi" }, "accessModes": ["ReadWriteMany"],
                "claimRef": { "namespace": "default", "name": "claim" },
                "csi": { "driver": "s3.csi.scality.com", "volumeHandle": "pv" },
            },
        }),
        json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": { "name": "default", "namespace": "default" } }),
        json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "workload", "namespace": "default" },
            "spec": {
                "containers": [{ "name": "main", "image": "none" }],
                "volumes": [{ "name": "data", "persistentVolumeClaim": { "claimName": "claim" } }],
            },
        }),
    ]);
    let mounter = || cluster.get("daemonset", "s3-csi-mounter");
    let identity = mounter()["metadata"]["uid"].clone();
    let template = mounter()["spec"]["template"].clone();
    for _ in 0..2 {
        change("systemd").unwrap();
        assert_eq!(mounter()["metadata"]["uid"], identity);
        assert_eq!(mounter()["spec"]["template"], template, "its Pods are not replaced");
        assert_eq!(draining("daemonset", "s3-csi-node").unwrap(), "daemon");
    }
    cluster.control_plane.kubectl(&["delete", "pod", "workload", "--namespace", "default", "--force"]).unwrap();
    change("systemd").unwrap();
    assert_eq!(mounter(), Value::Null);
    assert_eq!(draining("daemonset", "s3-csi-node"), None);
}

/// Warm and headroom Pods have no attachment; no other part ends them.
fn check_pods_that_the_controller_ends(cluster: &Cluster) {
    for pod in ["warm", "headroom"] {
        let before = ["--reuse-values", "--set", "strategy=pod,mountpointPod.reserveHeadroom=true"];
        cluster.our_chart("upgrade", &before).unwrap();
        let object = read(&format!("crates/driver/tests/mountpoint_pod/{pod}.yaml"));
        // The API server may learn of the new priority class a moment later.
        wait_for("the Pod is accepted", || cluster.control_plane.apply(&object).is_ok());
        cluster.our_chart("upgrade", &["--reuse-values", "--set", "strategy=systemd"]).unwrap();
        let controller = cluster.get("deployment", "s3-csi-controller");
        let mut arguments = chart::elements(&controller["spec"]["template"]["spec"]["containers"][0]["args"]);
        assert!(arguments.any(|it| it == "--draining=pod"), "{pod}");
        cluster.control_plane.kubectl(&["delete", "pods", "--all", "--namespace", "mount-s3", "--force"]).unwrap();
    }
}

#[test]
fn an_upgrade_in_place_from_the_earlier_chart_keeps_what_cannot_change() {
    let cluster = Cluster::start("chart-upgrade");
    let earlier = cluster.home.path().join("earlier");
    write_earlier_chart(&earlier).unwrap();
    let mut install = cluster.helm(&["install", RELEASE, "--set", "s3.endpointUrl=http://s3.kept.example"]);
    install.arg(&earlier);
    chart::run(install).unwrap();
    let selector = |kind: &str, name: &str| cluster.get(kind, name)["spec"]["selector"].clone();
    let before = (selector("daemonset", "s3-csi-node"), selector("deployment", "s3-csi-controller"));

    let error = cluster.our_chart("upgrade", &["--reuse-values"]).unwrap_err();
    assert!(error.contains("use --reset-then-reuse-values in place of --reuse-values"), "{error}");
    let error = cluster.our_chart("upgrade", &["--reset-then-reuse-values"]).unwrap_err();
    assert!(error.contains("invalid ownership metadata"), "{error}");
    let notes = cluster.our_chart("upgrade", &["--reset-then-reuse-values", "--take-ownership"]).unwrap();
    assert!(notes.contains("--selector app=s3-csi-node"), "{notes}");

    assert_eq!((selector("daemonset", "s3-csi-node"), selector("deployment", "s3-csi-controller")), before);
    assert_eq!(before.0["matchLabels"]["app.kubernetes.io/name"], "scality-mountpoint-s3-csi-driver");
    let plugin = cluster.get("daemonset", "s3-csi-node")["spec"]["template"]["spec"]["containers"].clone();
    assert_eq!(plugin.as_array().unwrap().len(), 1, "the sidecars are gone");
    let endpoint = chart::elements(&plugin[0]["env"]).find(|it| it["name"] == "AWS_ENDPOINT_URL").unwrap();
    assert_eq!(endpoint["value"], "http://s3.kept.example");
    assert_eq!(
        cluster.get("crd", DEFINITION)["metadata"]["annotations"]["helm.sh/resource-policy"],
        json!("keep"),
        "the definition belongs to the release now"
    );
    // And a second upgrade needs nothing special.
    cluster.our_chart("upgrade", &["--reuse-values", "--set", "node.logLevel=5"]).unwrap();
    assert_eq!(selector("daemonset", "s3-csi-node"), before.0);
}

#[test]
fn examples_of_the_documents_are_accepted() {
    let cluster = Cluster::start("chart-documents");
    cluster.our_chart("install", &[]).unwrap();
    let mut accepted = 0;
    for document in documents_with_examples() {
        for example in yaml_blocks(&read(&document)) {
            let file = cluster.home.path().join("example.yaml");
            write(&file, example);
            let file = file.to_str().unwrap();
            let outcome = if documents(example).iter().all(|it| it["kind"].is_string()) {
                let arguments = ["apply", "--dry-run=server", "--validate=strict", "--filename", file];
                cluster.control_plane.kubectl(&arguments).map_err(|it| it.to_string())
            } else {
                cluster.our_chart("upgrade", &["--dry-run=server", "--values", file])
            };
            outcome.unwrap_or_else(|error| panic!("{document}: {error}\n{example}"));
            accepted += 1;
        }
    }
    assert!(accepted >= 8, "only {accepted} examples were found");
}

/// README.md and all pages.
fn documents_with_examples() -> Vec<String> {
    let pages =
        fs::read_dir(workspace().join("docs")).unwrap().map(|it| it.unwrap().file_name().into_string().unwrap());
    let is_page = |it: &String| Path::new(it).extension().is_some_and(|it| it == "md");
    let pages = pages.filter(is_page).map(|it| format!("docs/{it}"));
    std::iter::once("README.md".to_owned()).chain(pages).collect()
}

fn yaml_blocks(document: &str) -> impl Iterator<Item = &str> {
    document.split("```yaml\n").skip(1).filter_map(|it| it.split_once("\n```")).map(|(block, _)| block)
}

fn write(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// Who creates a `PersistentVolume` acts with the driver's keys; the policy says for which buckets.
#[test]
fn volumes_of_a_namespace_use_only_the_buckets_that_are_allowed() {
    let cluster = Cluster::start("chart-volumes");
    let allowed = "volumeAdmission.allowedBuckets={\"team-a\":[\"logs\",\"team-a-*\"],\"*\":[\"csi-s3-*\"]}";
    let arguments =
        ["--set", "s3.endpointUrl=http://10.0.0.1:7070", "--set", "volumeAdmission.enabled=true", "--set-json"];
    cluster.our_chart("install", &[&arguments[..], &[allowed]].concat()).unwrap();
    let create = |name: &str, namespace: Option<&str>, bucket: &str, source: &str| {
        let mut volume = json!({
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": { "name": name },
            "spec": {
                "accessModes": ["ReadWriteMany"], "capacity": { "storage": "1Gi" },
                "csi": {
                    "driver": "s3.csi.scality.com", "volumeHandle": name,
                    "volumeAttributes": { "bucketName": bucket, "authenticationSource": source },
                },
            },
        });
        if let Some(namespace) = namespace {
            volume["spec"]["claimRef"] = json!({ "namespace": namespace, "name": "data" });
        }
        cluster.control_plane.apply(&volume.to_string()).map_err(|it| it.to_string())
    };
    // The API server compiles a new policy within seconds.
    let mut attempt = 0;
    wait_for("the policy is effective", || {
        attempt += 1;
        create(&format!("wrong-{attempt}"), Some("team-a"), "payroll", "driver").is_err()
    });
    let refused = create("wrong", Some("team-a"), "payroll", "driver").unwrap_err();
    assert!(refused.contains("claims of namespace team-a may not use bucket payroll"), "{refused}");
    create("other", Some("team-b"), "logs", "driver").unwrap_err();
    create("similar", Some("team-a"), "logs-2", "driver").unwrap_err();
    for (name, namespace, bucket, source) in [
        ("named", Some("team-a"), "logs", "driver"),
        ("pattern", Some("team-a"), "team-a-1", "driver"),
        ("provisioned", Some("team-b"), "csi-s3-1", "driver"),
        ("own-keys", Some("team-b"), "payroll", "secret"),
        ("unbound", None, "payroll", "driver"),
    ] {
        create(name, namespace, bucket, source).unwrap();
    }
    // Binding is an update.
    let claim = json!({ "spec": { "claimRef": { "namespace": "team-a", "name": "data" } } }).to_string();
    let bound = cluster.control_plane.kubectl(&["patch", "pv", "unbound", "--type=merge", "--patch", &claim]);
    assert!(bound.is_err_and(|it| it.to_string().contains("may not use bucket payroll")));
    // A volume that names no Secret may use the driver's keys now.
    let fallback = "legacy.secretFallsBackToDriver=[\"team-b\"]";
    cluster.our_chart("upgrade", &[&arguments[..], &[allowed, "--set-json", fallback]].concat()).unwrap();
    wait_for("the changed policy is effective", || {
        attempt += 1;
        create(&format!("no-secret-{attempt}"), Some("team-b"), "payroll", "secret").is_err()
    });
    let with_secret = json!({
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": { "name": "with-secret" },
        "spec": {
            "accessModes": ["ReadWriteMany"], "capacity": { "storage": "1Gi" },
            "claimRef": { "namespace": "team-b", "name": "data" },
            "csi": {
                "driver": "s3.csi.scality.com", "volumeHandle": "with-secret",
                "nodePublishSecretRef": { "namespace": "team-b", "name": "keys" },
                "volumeAttributes": { "bucketName": "payroll", "authenticationSource": "secret" },
            },
        },
    });
    cluster.control_plane.apply(&with_secret.to_string()).unwrap();
}
