//! Volumes on demand in a cluster, with the real external-provisioner beside the controller: claims become buckets or prefixes,
//! and end as their `StorageClass` says.

use std::process::Command;
use std::sync::{LazyLock, PoisonError, RwLock};

use rustix::fs::getxattr;
use s3csi_testbed::cluster::{Cluster, STORE_ADMINISTRATOR};
use s3csi_testbed::{environment, image};
use serde_json::Value;

use crate::world::{DRIVER, eventually, wait_for_pod, wait_for_rollout};

/// Who restarts the controller is alone meanwhile.
static PEACE: RwLock<()> = RwLock::new(());

/// A cluster of its own, because its controller is restarted and crashes.
static CLUSTER: LazyLock<Cluster> = LazyLock::new(|| {
    let directory = tempfile::Builder::new().prefix("s3csi-test-").tempdir_in("/tmp").unwrap();
    let [driver, provisioner] = ["s3csi.tar", "provisioner.tar"].map(|it| directory.path().join(it));
    image::write(&driver).unwrap();
    let script = environment::workspace().join("scripts/provisioner-image.sh");
    run(Command::new(script).arg(&provisioner));
    let cluster = Cluster::start("provisioning", 1).unwrap();
    cluster.load(&driver).unwrap();
    cluster.load(&provisioner).unwrap();
    let settings = ["controller.replicas=1", "controller.logLevel=4", "sidecars.csiProvisioner.enabled=true"];
    let more = settings
        .into_iter()
        .chain(["sidecars.csiProvisioner.image.pullPolicy=Never", "sidecars.csiProvisioner.secretNamespaces={*}"]);
    let more: Vec<&str> = more.flat_map(|it| ["--set", it]).collect();
    cluster.install_driver("kube-system", DRIVER, &more).unwrap();
    cluster
});

#[track_caller]
fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// A `StorageClass`. `parameters` are those of YAML's flow style.
#[track_caller]
fn class(name: &str, binding: &str, parameters: &str) {
    CLUSTER
        .apply(&format!(
            "
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {{name: {name}}}
provisioner: {DRIVER}
volumeBindingMode: {binding}
reclaimPolicy: Delete
mountOptions: [allow-delete, allow-overwrite, metadata-ttl 0]
parameters: {{{parameters}}}
"
        ))
        .unwrap();
}

fn claim_yaml(namespace: &str, name: &str, class: &str) -> String {
    format!(
        "
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {{name: {name}, namespace: {namespace}}}
spec: {{accessModes: [ReadWriteMany], storageClassName: {class}, resources: {{requests: {{storage: 1Gi}}}}}}
"
    )
}

#[track_caller]
fn claim(namespace: &str, name: &str, class: &str) {
    CLUSTER.apply(&claim_yaml(namespace, name, class)).unwrap();
}

fn get(arguments: &[&str]) -> Value {
    let all = [&["get", "--output", "json"], arguments].concat();
    CLUSTER.kubectl(&all).ok().and_then(|it| serde_json::from_str(&it).ok()).unwrap_or_default()
}

/// What the volume of a claim says to the node, once it is there.
#[track_caller]
fn wait_for_volume(namespace: &str, name: &str) -> Value {
    let mut volume = Value::Null;
    eventually(&format!("claim {name} is bound: {}", describe(namespace, name)), || {
        let claim = get(&["pvc", name, "--namespace", namespace]);
        let is_bound = claim["status"]["phase"] == "Bound";
        if is_bound {
            volume = get(&["pv", claim["spec"]["volumeName"].as_str().unwrap_or_default()]);
        }
        is_bound
    });
    volume
}

fn describe(namespace: &str, name: &str) -> String {
    CLUSTER.kubectl(&["describe", "pvc", name, "--namespace", namespace]).unwrap_or_default()
}

fn attribute(volume: &Value, name: &str) -> String {
    volume["spec"]["csi"]["volumeAttributes"][name].as_str().unwrap_or_default().to_owned()
}

#[track_caller]
fn start_pod(namespace: &str, name: &str, claim: &str) {
    CLUSTER
        .apply(&format!(
            "
apiVersion: v1
kind: Pod
metadata: {{name: {name}, namespace: {namespace}}}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: main
    image: localhost/busybox:1
    imagePullPolicy: Never
    command: [sleep, '100000']
    volumeMounts: [{{name: data, mountPath: /data}}]
  volumes: [{{name: data, persistentVolumeClaim: {{claimName: {claim}}}}}]
"
        ))
        .unwrap();
    wait_for_pod(&CLUSTER, namespace, name);
}

#[track_caller]
fn exec(namespace: &str, pod: &str, script: &str) -> String {
    CLUSTER.kubectl(&["exec", "--namespace", namespace, pod, "--", "sh", "-ec", script]).unwrap()
}

#[track_caller]
fn delete(namespace: &str, kind: &str, name: &str) {
    CLUSTER.kubectl(&["delete", kind, name, "--namespace", namespace, "--timeout=120s"]).unwrap();
}

#[track_caller]
fn delete_volume_of(namespace: &str, pod: &str, claim: &str) {
    delete(namespace, "pod", pod);
    delete(namespace, "pvc", claim);
}

/// A user of the store who may create buckets; returns the secret key.
#[track_caller]
fn create_user(name: &str) -> String {
    let secret = format!("{name}-NeverPrintThis");
    let user = ["create-user", "--access", name, "--secret", &secret, "--role", "userplus"];
    CLUSTER.administer_store(STORE_ADMINISTRATOR, &user).unwrap();
    secret
}

fn owner(bucket: &str) -> String {
    let mut list = vec![0; 4096];
    let length = getxattr(CLUSTER.bucket(bucket), "user.acl", list.as_mut_slice()).unwrap_or(0);
    let list: Value = serde_json::from_slice(&list[..length]).unwrap_or_default();
    list["Owner"].as_str().unwrap_or_default().to_owned()
}

/// The buckets whose names begin so.
fn buckets(beginning: &str) -> Vec<String> {
    let entries = std::fs::read_dir(CLUSTER.bucket("")).unwrap().flatten();
    let names = entries.map(|it| it.file_name().to_string_lossy().into_owned());
    names.filter(|it| it.starts_with(beginning)).collect()
}

#[test]
fn a_claim_becomes_a_bucket_and_goes_with_it() {
    let _peace = PEACE.read().unwrap_or_else(PoisonError::into_inner);
    class("all", "Immediate", "onDelete: delete-all, bucketNamePrefix: all-");
    claim("default", "all", "all");
    let volume = wait_for_volume("default", "all");
    let bucket = attribute(&volume, "bucketName");
    assert_eq!(buckets("all-"), [bucket.as_str()]);
    assert_eq!(volume["spec"]["csi"]["volumeHandle"], bucket.as_str());
    assert_eq!(volume["spec"]["mountOptions"][0], "allow-delete");
    start_pod("default", "all", "all");
    exec("default", "all", "mkdir /data/dir; echo from the Pod > /data/dir/file");
    eventually("the file is in the bucket", || {
        CLUSTER.object(&bucket, "dir/file").is_some_and(|it| it == b"from the Pod\n")
    });
    delete_volume_of("default", "all", "all");
    eventually("the bucket is gone", || buckets("all-").is_empty());
    eventually("the volume is gone", || get(&["pv", volume["metadata"]["name"].as_str().unwrap()]).is_null());
    check_no_request_was_forbidden();
}

#[test]
fn the_example_in_the_documentation_works() {
    let _peace = PEACE.read().unwrap_or_else(PoisonError::into_inner);
    let example = include_str!("../../../../docs/examples/storage-class.yaml");
    CLUSTER.apply(example).unwrap();
    let bucket = attribute(&wait_for_volume("default", "on-demand"), "bucketName");
    assert_eq!(buckets("csi-s3-"), [bucket]);
    CLUSTER.delete(example).unwrap();
    eventually("the bucket is gone", || buckets("csi-s3-").is_empty());
}

#[test]
fn a_bucket_stays_if_its_class_says_so_or_data_would_be_lost() {
    let _peace = PEACE.read().unwrap_or_else(PoisonError::into_inner);
    class("careful", "Immediate", "bucketNamePrefix: careful-");
    class("kept", "Immediate", "onDelete: retain, bucketNamePrefix: kept-");
    for name in ["careful", "kept"] {
        claim("default", name, name);
        let volume = wait_for_volume("default", name);
        start_pod("default", name, name);
        exec("default", name, "echo precious > /data/file");
        delete_volume_of("default", name, name);
        let volume_name = volume["metadata"]["name"].as_str().unwrap();
        if name == "kept" {
            eventually("the volume is gone", || get(&["pv", volume_name]).is_null());
        } else {
            eventually("an event says why the volume stays", || {
                let selector = format!("--field-selector=involvedObject.name={volume_name},reason=VolumeFailedDelete");
                let said = CLUSTER.kubectl(&["get", "events", "--all-namespaces", &selector, "--output", "json"]);
                said.is_ok_and(|it| it.contains("is not empty") && it.contains("onDelete is delete-if-empty"))
            });
        }
        assert_eq!(CLUSTER.object(&attribute(&volume, "bucketName"), "file").unwrap(), b"precious\n");
    }
}

#[test]
fn a_bucket_may_wait_for_the_first_consumer() {
    let _peace = PEACE.read().unwrap_or_else(PoisonError::into_inner);
    class("late", "WaitForFirstConsumer", "onDelete: delete-all, bucketNamePrefix: late-");
    claim("default", "late", "late");
    eventually("the claim waits", || {
        let events =
            CLUSTER.kubectl(&["get", "events", "--field-selector=involvedObject.name=late", "--output", "name"]);
        events.is_ok_and(|it| !it.trim().is_empty())
    });
    assert_eq!(buckets("late-"), [""; 0]);
    start_pod("default", "late", "late");
    assert_eq!(buckets("late-").len(), 1);
    delete_volume_of("default", "late", "late");
    eventually("the bucket is gone", || buckets("late-").is_empty());
}

#[test]
fn twenty_claims_at_once_get_twenty_buckets() {
    let _peace = PEACE.read().unwrap_or_else(PoisonError::into_inner);
    class("many", "Immediate", "bucketNamePrefix: many-");
    let names: Vec<String> = (1..=20).map(|it| format!("many-{it}")).collect();
    let yaml: String = names.iter().map(|it| claim_yaml("default", it, "many")).collect();
    CLUSTER.apply(&yaml).unwrap();
    for name in &names {
        wait_for_volume("default", name);
    }
    assert_eq!(buckets("many-").len(), 20);
    CLUSTER.delete(&yaml).unwrap();
    eventually("all buckets are gone", || buckets("many-").is_empty());
}

#[test]
fn two_tenants_own_what_is_made_for_them() {
    let _peace = PEACE.read().unwrap_or_else(PoisonError::into_inner);
    class(
        "tenants",
        "Immediate",
        "onDelete: delete-all, bucketNamePrefix: tenant-, \
         csi.storage.k8s.io/provisioner-secret-name: s3-keys, \
         csi.storage.k8s.io/provisioner-secret-namespace: '${pvc.namespace}', \
         csi.storage.k8s.io/node-publish-secret-name: s3-keys, \
         csi.storage.k8s.io/node-publish-secret-namespace: '${pvc.namespace}'",
    );
    let mut made = Vec::new();
    for tenant in ["alice", "bob"] {
        let secret = create_user(tenant);
        CLUSTER
            .apply(&format!(
                "
apiVersion: v1
kind: Namespace
metadata: {{name: {tenant}}}
---
apiVersion: v1
kind: Secret
metadata: {{name: s3-keys, namespace: {tenant}}}
stringData: {{access_key_id: {tenant}, secret_access_key: {secret}}}
"
            ))
            .unwrap();
        eventually("the namespace has its service account", || {
            get(&["serviceaccount", "default", "--namespace", tenant]).is_object()
        });
        claim(tenant, "data", "tenants");
        let volume = wait_for_volume(tenant, "data");
        let bucket = attribute(&volume, "bucketName");
        assert_eq!(owner(&bucket), tenant);
        assert_eq!(attribute(&volume, "authenticationSource"), "secret");
        start_pod(tenant, "app", "data");
        exec(tenant, "app", &format!("echo {tenant} > /data/name"));
        eventually("the file is in the bucket", || CLUSTER.object(&bucket, "name").is_some());
        made.push(bucket);
    }
    assert_ne!(made[0], made[1]);
    for tenant in ["alice", "bob"] {
        delete_volume_of(tenant, "app", "data");
    }
    eventually("the buckets are gone", || buckets("tenant-").is_empty());
}

#[test]
fn two_claims_in_one_bucket_cannot_see_each_other() {
    let _peace = PEACE.read().unwrap_or_else(PoisonError::into_inner);
    CLUSTER.create_bucket("shared").unwrap();
    class(
        "prefixes",
        "Immediate",
        "bucket: shared, prefixTemplate: '${pvc.namespace}/${pvc.name}', onDelete: delete-all",
    );
    for name in ["one", "one-more"] {
        claim("default", name, "prefixes");
        let volume = wait_for_volume("default", name);
        assert_eq!(attribute(&volume, "prefix"), format!("default/{name}/"));
        start_pod("default", name, name);
        exec("default", name, &format!("seq 1 100000 > /data/{name}; mkdir /data/dir; echo {name} > /data/dir/file"));
    }
    assert_eq!(exec("default", "one", "ls /data"), "dir\none\n");
    assert_eq!(exec("default", "one-more", "ls /data"), "dir\none-more\n");
    let content = || CLUSTER.object("shared", "default/one-more/one-more").unwrap();
    let before = content();
    delete_volume_of("default", "one", "one");
    eventually("the prefix is gone", || !CLUSTER.bucket("shared").join("default/one").exists());
    assert!(content() == before, "the other volume was changed");
    assert_eq!(exec("default", "one-more", "cat /data/dir/file; ls /data"), "one-more\ndir\none-more\n");
    delete_volume_of("default", "one-more", "one-more");
    eventually("nothing is left", || !CLUSTER.bucket("shared").join("default").exists());
}

#[test]
fn a_controller_that_dies_before_it_answers_makes_no_second_bucket() {
    let _alone = PEACE.write().unwrap_or_else(PoisonError::into_inner);
    class("crash", "Immediate", "bucketNamePrefix: crash-");
    let arguments = |change: &str| {
        let patch = format!(r#"[{{"op": {change}}}]"#);
        CLUSTER
            .kubectl(&[
                "patch",
                "deployment",
                "s3-csi-controller",
                "--namespace=kube-system",
                "--type=json",
                "--patch",
                &patch,
            ])
            .unwrap();
        wait_for_rollout(&CLUSTER, "kube-system", "deployment/s3-csi-controller");
    };
    let path = "/spec/template/spec/containers/0/args";
    arguments(&format!(r#""add", "path": "{path}/1", "value": "--stop-after-change=bucket-created""#));
    claim("default", "crash", "crash");
    let restarts = || {
        let pods = get(&["pods", "--namespace", "kube-system", "--selector", "app=s3-csi-controller"]);
        let containers = pods["items"].as_array().into_iter().flatten();
        let containers = containers.flat_map(|it| it["status"]["containerStatuses"].as_array().into_iter().flatten());
        containers
            .filter(|it| it["name"] == "s3-pod-reconciler")
            .filter_map(|it| it["restartCount"].as_u64())
            .sum::<u64>()
    };
    eventually("the controller has died", || 0 < restarts());
    assert_eq!(buckets("crash-").len(), 1);
    arguments(&format!(r#""remove", "path": "{path}/1""#));
    let volume = wait_for_volume("default", "crash");
    assert_eq!(buckets("crash-"), [attribute(&volume, "bucketName")]);
    delete("default", "pvc", "crash");
    eventually("the bucket is gone", || buckets("crash-").is_empty());
}

/// The chart's roles grant all that the driver and the provisioner ask for.
#[track_caller]
fn check_no_request_was_forbidden() {
    let events = CLUSTER.audit().into_iter();
    let ours = events.filter(|it| it.user.username.starts_with("system:serviceaccount:kube-system:s3-csi-"));
    let refused = ours.filter(|it| it.response_status.as_ref().is_some_and(|it| it.code == 403));
    let refused: Vec<String> =
        refused.map(|it| format!("{} {} {}", it.user.username, it.verb, it.request_uri)).collect();
    assert!(refused.is_empty(), "the API server refused:\n{}", refused.join("\n"));
}

/// The external-provisioner deletes volumes without credentials if their Secret is gone: the driver's keys must not take its place.
#[test]
fn a_volume_whose_secret_was_deleted_is_not_deleted_with_the_driver_s_keys() {
    let _peace = PEACE.read().unwrap_or_else(PoisonError::into_inner);
    class(
        "orphan",
        "Immediate",
        "onDelete: delete-all, bucketNamePrefix: orphan-, \
         csi.storage.k8s.io/provisioner-secret-name: orphan-keys, \
         csi.storage.k8s.io/provisioner-secret-namespace: '${pvc.namespace}'",
    );
    let secret = create_user("orphan");
    let keys = format!(
        "
apiVersion: v1
kind: Secret
metadata: {{name: orphan-keys, namespace: default}}
stringData: {{access_key_id: orphan, secret_access_key: {secret}}}
"
    );
    CLUSTER.apply(&keys).unwrap();
    claim("default", "orphan", "orphan");
    let volume = wait_for_volume("default", "orphan");
    let (name, bucket) = (volume["metadata"]["name"].as_str().unwrap(), attribute(&volume, "bucketName"));
    CLUSTER.delete(&keys).unwrap();
    delete("default", "pvc", "orphan");
    eventually("the failed deletion is reported", || {
        let events = CLUSTER.kubectl(&["get", "events", "--field-selector", &format!("involvedObject.name={name}")]);
        events.is_ok_and(|it| it.contains("the volume was created with a provisioner secret, and the request has none"))
    });
    assert_eq!(buckets("orphan-"), [bucket.as_str()]);
    CLUSTER.apply(&keys).unwrap();
    eventually("the bucket is gone", || buckets("orphan-").is_empty());
    eventually("the volume is gone", || get(&["pv", name]).is_null());
}
