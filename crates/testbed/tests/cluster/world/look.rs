//! What is there: objects as the API server has them, mounts and engines as the nodes have them.

use std::collections::BTreeSet;
use std::path::Path;

use rustix::process::Pid;
use s3csi_testbed::cluster::ClusterHost;
use s3csi_testbed::processes;
use serde_json::Value;

use super::{CLUSTER, DRIVER, eventually};

/// The objects of a list, such as `/api/v1/pods?labelSelector=…`.
pub fn objects(path: &str) -> Vec<Value> {
    let list = CLUSTER.get(path).unwrap_or_else(|| panic!("the API server does not know {path}"));
    list["items"].as_array().cloned().unwrap_or_default()
}

/// A Pod in namespace `default`, or nothing.
pub fn pod(name: &str) -> Value {
    CLUSTER.get(&format!("/api/v1/namespaces/default/pods/{name}")).unwrap_or_default()
}

/// What the Events of a Pod in namespace `default` say that have this reason.
pub fn events(pod: &str, reason: &str) -> Vec<String> {
    let selector = format!("fieldSelector=involvedObject.name={pod},reason={reason}");
    let events = objects(&format!("/api/v1/namespaces/default/events?{selector}"));
    events.iter().filter_map(|it| it["message"].as_str().map(str::to_owned)).collect()
}

/// The attachments of a volume.
pub fn attachments(volume: &str) -> Vec<Value> {
    let selector = format!("fieldSelector=spec.persistentVolumeName={volume}");
    objects(&format!("/apis/{DRIVER}/v2/mountpoints3podattachments?{selector}"))
}

/// The Mountpoint Pods that serve a volume, as its attachments say.
pub fn mountpoint_pods(volume: &str) -> BTreeSet<String> {
    let attachments = attachments(volume);
    let served = attachments.iter().filter_map(|it| it["spec"]["mountpointS3PodAttachments"].as_object());
    served.flat_map(|it| it.keys().cloned()).collect()
}

#[track_caller]
pub fn one_mountpoint_pod(volume: &str) -> String {
    let pods: Vec<String> = mountpoint_pods(volume).into_iter().collect();
    let [pod] = pods.try_into().unwrap_or_else(|pods| panic!("volume {volume} is served by {pods:?}"));
    pod
}

pub fn existing_mountpoint_pods() -> BTreeSet<String> {
    let pods = objects("/api/v1/namespaces/mount-s3/pods");
    pods.iter().filter_map(|it| it["metadata"]["name"].as_str().map(str::to_owned)).collect()
}

/// The Mountpoint Pod that serves a volume with one source, as its node says: after a move another one than the attachment names.
pub fn serving_pod(volume: &str) -> Option<Value> {
    let is_serving = |it: &Value| {
        let conditions = it["status"]["conditions"].as_array().into_iter().flatten();
        let mounted = format!("{DRIVER}/Mounted");
        let is_mounted = conditions.clone().any(|it| it["type"] == mounted.as_str() && it["status"] == "True");
        let is_ready = conditions.clone().any(|it| it["type"] == "Ready" && it["status"] == "True");
        is_mounted && is_ready && it["metadata"]["deletionTimestamp"].is_null()
    };
    let pods = objects(&format!("/api/v1/namespaces/mount-s3/pods?labelSelector={DRIVER}/volume-name={volume}"));
    pods.into_iter().find(is_serving)
}

/// The same as soon as its node says so.
#[track_caller]
pub fn wait_for_serving_pod(volume: &str) -> Value {
    let mut found = None;
    eventually("the node says which Mountpoint Pod serves the volume", || {
        found = serving_pod(volume);
        found.is_some()
    });
    found.unwrap_or_default()
}

/// The lines of a node's mount table that mention a text.
#[track_caller]
pub fn mounts(place: ClusterHost, text: &str) -> Vec<String> {
    let table = std::fs::read_to_string(format!("/proc/{}/mountinfo", node_of(place))).unwrap();
    table.lines().filter(|it| it.contains(text)).map(str::to_owned).collect()
}

/// The first process of a node.
#[track_caller]
fn node_of(place: ClusterHost) -> Pid {
    let file = CLUSTER.directory().join(place.name()).join("pid");
    let number = std::fs::read_to_string(file).unwrap();
    number.trim().parse().ok().and_then(Pid::from_raw).unwrap()
}

/// The engines that serve a bucket with a name of its own; without their supervisors.
pub fn engines_of(bucket: &str) -> Vec<Pid> {
    let all = processes::running("mount-s3", Path::new(bucket));
    let supervisors: Vec<Pid> = all.iter().filter_map(|it| processes::parent(*it)).collect();
    all.into_iter().filter(|it| !supervisors.contains(it)).collect()
}
