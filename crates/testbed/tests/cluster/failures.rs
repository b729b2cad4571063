//! What is wrong is said in an Event of the Pod that does not start, in words a person can act on; once it is right, the Pod starts by itself.

use serde_json::json;

use crate::world::{CLUSTER, Volume, Workload, events, eventually, mountpoint_pods};

/// Waits for kubelet's Event that says all of this, and returns it.
#[track_caller]
fn failed_mount(workload: &Workload, words: &[&str]) -> String {
    let mut said = Vec::new();
    let mut found = None;
    eventually(&format!("an Event of {} says {words:?}", workload.name), || {
        said = events(&workload.name, "FailedMount");
        found = said.iter().find(|it| words.iter().all(|word| it.contains(word))).cloned();
        found.is_some()
    });
    found.unwrap()
}

fn keys(name: &str, access: &str, secret: &str) -> String {
    json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": { "name": name, "namespace": "default" },
        "stringData": { "access_key_id": access, "secret_access_key": secret },
    })
    .to_string()
}

#[test]
fn a_bucket_that_does_not_exist_is_named_and_the_pod_starts_once_it_does() {
    Volume::new("missing-bucket").create_without_bucket();
    let workload = Workload::new("missing-bucket", "missing-bucket");
    workload.create();
    failed_mount(
        &workload,
        &["bucket \"missing-bucket\" does not exist", "check its name, or create it", "kubectl logs -n mount-s3 mp-"],
    );
    CLUSTER.create_bucket("missing-bucket").unwrap();
    workload.wait_until_it_runs();
    workload.delete();
}

#[test]
fn wrong_keys_are_named_and_the_pod_starts_once_the_secret_is_right() {
    CLUSTER.apply(&keys("corrected", "unknown", "nothing")).unwrap();
    Volume { secret: Some("corrected"), ..Volume::new("wrong-keys") }.create();
    let workload = Workload::new("wrong-keys", "wrong-keys");
    workload.create();
    failed_mount(&workload, &["does not know the access key"]);
    CLUSTER.apply(&keys("corrected", "testbed", "testbed-NeverPrintThis")).unwrap();
    workload.wait_until_it_runs();
    workload.run("echo hello > /data/file");
    workload.delete();
}

#[test]
fn a_secret_that_lacks_a_key_is_named() {
    CLUSTER.apply(&keys("incomplete", "testbed", "").replace("secret_access_key", "another_key")).unwrap();
    Volume { secret: Some("incomplete"), ..Volume::new("lacking-keys") }.create();
    let workload = Workload::new("lacking-keys", "lacking-keys");
    workload.create();
    failed_mount(&workload, &["the Secret lacks secret_access_key"]);
    workload.delete();
}

#[test]
fn options_that_cannot_be_used_are_named() {
    Volume { options: &["uid 0"], ..Volume::new("owned-by-root") }.create();
    Volume { options: &["region one", "region two"], ..Volume::new("two-regions") }.create();
    let owned = Workload::new("owned-by-root", "owned-by-root");
    let regions = Workload::new("two-regions", "two-regions");
    owned.create();
    regions.create();
    failed_mount(&owned, &["mount option --uid=0 is not possible"]);
    failed_mount(&regions, &["mount option --region is given more than once", "keep one of them"]);
    owned.delete();
    regions.delete();
}

#[test]
fn an_option_that_only_the_driver_decides_is_named_while_the_pod_runs() {
    Volume { options: &["endpoint-url http://elsewhere.example"], ..Volume::new("blocked-option") }.create();
    let workload = Workload::new("blocked-option", "blocked-option").start();
    eventually("an Event says which option has no effect, and why", || {
        let said = events("blocked-option", "MountOptionIgnored");
        said.iter()
            .any(|it| it.contains("mount option --endpoint-url has no effect: the endpoint is a setting of the driver"))
    });
    workload.delete();
}

/// kubelet gives up after two minutes, and its message says nothing. Ours is there before.
#[test]
fn a_publish_that_waits_for_a_mountpoint_pod_reports_why_before_kubelet_gives_up() {
    let attributes = &[("mountpointContainerResourcesRequestsMemory", "100Ti")];
    Volume { attributes, ..Volume::new("no-room") }.create();
    let workload = Workload::new("no-room", "no-room");
    workload.create();
    let said =
        failed_mount(&workload, &["is not scheduled", "Insufficient memory", "kubectl describe pod -n mount-s3 mp-"]);
    assert!(said.contains("Unavailable"), "{said}");
    for message in events("no-room", "FailedMount") {
        assert!(!message.contains("context deadline exceeded"), "kubelet gave up: {message}");
    }
    workload.delete();
    eventually("its Mountpoint Pod is not wanted any more", || mountpoint_pods("no-room").is_empty());
}
