//! A mount outlives everything but its node: what serves it ends, and workloads that read, list, create and append see a pause.

use std::path::Path;

use rustix::process::{Pid, Signal, kill_process};
use s3csi_testbed::processes;
use serde_json::{Value, json};

use crate::strategies::{DAEMON, install_daemon};
use crate::world::{
    CLUSTER, DRIVER, NODE, SteadyWorkload, Volume, engines_of, events, eventually, mounts, objects, serving_pod,
    wait_for_rollout, wait_for_serving_pod,
};

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// The Mountpoint Pod that serves a volume, by name and UID.
#[track_caller]
pub fn server(volume: &str) -> (String, String) {
    let metadata = &wait_for_serving_pod(volume)["metadata"];
    (text(&metadata["name"]), text(&metadata["uid"]))
}

/// Returns the Mountpoint Pod that serves the volume in place of another one, which is gone.
#[track_caller]
fn wait_for_another_server(volume: &str, (name, uid): &(String, String)) -> (String, String) {
    eventually("another Mountpoint Pod serves", || {
        serving_pod(volume).is_some_and(|it| it["metadata"]["uid"] != uid.as_str())
    });
    eventually("the first Mountpoint Pod is gone", || {
        let pod = CLUSTER.get(&format!("/api/v1/namespaces/mount-s3/pods/{name}")).unwrap_or_default();
        pod["metadata"]["uid"] != uid.as_str()
    });
    server(volume)
}

/// The first process of a mounter's container; the kernel ends all others with it.
#[track_caller]
pub fn mounter_of(pod: &str) -> Pid {
    let found = processes::running("s3csi-mounter", Path::new(&format!("HOSTNAME={pod}")));
    let [mounter] = found.as_slice() else { panic!("the mounters of {pod}: {found:?}") };
    *mounter
}

#[track_caller]
fn kill_container(pod: &str) {
    kill_process(mounter_of(pod), Signal::KILL).unwrap();
}

/// Nothing that served a volume is left after its last workload.
#[track_caller]
pub fn finish(workload: SteadyWorkload, volume: &str) {
    workload.finish();
    eventually("nothing is left of what served the volume", || {
        let selector = format!("labelSelector={DRIVER}/volume-name={volume}");
        let pods = objects(&format!("/api/v1/namespaces/mount-s3/pods?{selector}"));
        pods.is_empty() && engines_of(volume).is_empty()
    });
}

#[test]
fn a_mountpoint_pod_is_deleted_by_force() {
    let workload = SteadyWorkload::start(&Volume::new("deleted-by-force"), NODE);
    let first = server("deleted-by-force");
    CLUSTER.kubectl(&["delete", "pod", "--namespace", "mount-s3", &first.0, "--grace-period=0", "--force"]).unwrap();
    wait_for_another_server("deleted-by-force", &first);
    workload.check_undisturbed("kubectl delete pod --grace-period=0 --force");
    finish(workload, "deleted-by-force");
}

#[test]
fn the_container_of_a_mountpoint_pod_is_killed() {
    let workload = SteadyWorkload::start(&Volume::new("container-killed"), NODE);
    let (pod, uid) = server("container-killed");
    let engines = engines_of("container-killed");
    kill_container(&pod);
    eventually("another engine serves", || {
        let now = engines_of("container-killed");
        now.len() == 1 && now != engines
    });
    workload.check_undisturbed("kill -9 of the whole container");
    assert_eq!(server("container-killed"), (pod, uid), "the Pod stays, with another container");
    eventually("an Event says so", || !events("container-killed", "EngineResumed").is_empty());
    finish(workload, "container-killed");
}

#[test]
fn a_mountpoint_pod_is_deleted() {
    let workload = SteadyWorkload::start(&Volume::new("moved-by-deletion"), NODE);
    let first = server("moved-by-deletion");
    CLUSTER.kubectl(&["delete", "pod", "--namespace", "mount-s3", &first.0, "--timeout=120s"]).unwrap();
    let second = wait_for_another_server("moved-by-deletion", &first);
    assert_ne!(second.0, first.0, "the next Pod was there before the first one ended");
    workload.check_undisturbed("kubectl delete pod");
    let moved = events("moved-by-deletion", "EngineReplaced");
    assert_eq!(moved.len(), 1, "a planned move: {moved:?}");
    finish(workload, "moved-by-deletion");
}

#[test]
fn a_mountpoint_pod_is_evicted() {
    let workload = SteadyWorkload::start(&Volume::new("moved-by-eviction"), NODE);
    let first = server("moved-by-eviction");
    let eviction = json!({
        "apiVersion": "policy/v1", "kind": "Eviction", "metadata": { "name": first.0, "namespace": "mount-s3" },
    });
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("eviction.json");
    std::fs::write(&file, eviction.to_string()).unwrap();
    let path = format!("/api/v1/namespaces/mount-s3/pods/{}/eviction", first.0);
    CLUSTER.kubectl(&["create", "--raw", &path, "--filename", file.to_str().unwrap()]).unwrap();
    wait_for_another_server("moved-by-eviction", &first);
    workload.check_undisturbed("an eviction");
    assert_eq!(events("moved-by-eviction", "EngineReplaced").len(), 1, "a planned move");
    finish(workload, "moved-by-eviction");
}

#[test]
fn the_mounter_of_strategy_daemon_is_killed_and_restarted() {
    let _daemon = install_daemon();
    let workload = SteadyWorkload::start(&Volume { driver: DAEMON.driver, ..Volume::new("daemon-killed") }, NODE);
    let namespace = DAEMON.namespace;
    let selector = format!("labelSelector=app=s3-csi-mounter&fieldSelector=spec.nodeName={}", NODE.name());
    let mounter = || {
        let pods = objects(&format!("/api/v1/namespaces/{namespace}/pods?{selector}"));
        pods.first().map(|it| text(&it["metadata"]["name"])).unwrap_or_default()
    };
    let (first, engines) = (mounter(), engines_of("daemon-killed"));
    kill_container(&first);
    eventually("another engine serves", || {
        let now = engines_of("daemon-killed");
        now.len() == 1 && now != engines
    });
    workload.check_undisturbed("kill -9 of the mounter's container");

    CLUSTER.kubectl(&["rollout", "restart", "--namespace", namespace, "daemonset/s3-csi-mounter"]).unwrap();
    wait_for_rollout(&CLUSTER, namespace, "daemonset/s3-csi-mounter");
    assert_ne!(mounter(), first);
    workload.check_undisturbed("kubectl rollout restart of the mounters");
    workload.finish();
    let sources = format!("/plugins/{}/mnt/", DAEMON.driver);
    eventually("no source is left", || mounts(NODE, &sources).is_empty() && engines_of("daemon-killed").is_empty());
}
