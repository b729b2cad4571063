//! The cluster itself: Pods run, its parts may die, and nothing is left of it.

use std::fs::File;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process};
use s3csi_testbed::cluster::{Cluster, ClusterHost, ServiceAction};
use s3csi_testbed::leftovers::mounts_beneath;
use s3csi_testbed::wait::wait_for;

use crate::world::{eventually, wait_for_pod};

const SLEEPER: &str = "
apiVersion: v1
kind: Pod
metadata: {name: sleeper, namespace: default}
spec:
  terminationGracePeriodSeconds: 1
  containers: [{name: main, image: 'localhost/busybox:1', imagePullPolicy: Never, command: [sleep, '100000']}]
";

#[test]
fn pods_outlive_every_part_of_the_cluster_and_the_cluster_leaves_nothing() {
    let cluster = Cluster::start("life", 1).unwrap();
    let directory = cluster.directory().to_owned();
    cluster.apply(SLEEPER).unwrap();
    wait_for_pod(&cluster, "default", "sleeper");
    for service in ["etcd", "apiserver", "controller-manager", "scheduler"] {
        cluster.service(ClusterHost::ControlPlane, ServiceAction::Kill, service).unwrap();
    }
    for service in ["containerd", "kubelet"] {
        cluster.service(ClusterHost::Node(1), ServiceAction::Kill, service).unwrap();
    }
    eventually("a command runs in the Pod", || cluster.kubectl(&["exec", "sleeper", "--", "true"]).is_ok());
    let restarts = "jsonpath={.status.containerStatuses[0].restartCount}";
    assert_eq!(cluster.kubectl(&["get", "pod", "sleeper", "--output", restarts]).unwrap(), "0");
    assert_eq!(cluster.run(ClusterHost::Node(1), &["systemctl", "is-system-running"]).unwrap().trim(), "running");

    drop(cluster);
    check_nothing_is_left(&directory);
}

#[test]
fn a_cluster_whose_owner_was_killed_is_gone_and_its_leftovers_are_removed() {
    let cluster = Cluster::start("killed", 1).unwrap();
    let directory = cluster.directory().to_owned();
    kill_process(Pid::from_child(cluster.script()), Signal::KILL).unwrap();
    // Every living process of it holds the lock, and as long as it is held no other script sweeps.
    let lock = File::open(directory.join("lock")).unwrap();
    wait_for("all processes have ended", || flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok());
    assert!(!has_processes(&directory));
    drop(lock);
    drop(cluster);
    // The next one removes what a killed one could not.
    drop(Cluster::start("next", 1).unwrap());
    check_nothing_is_left(&directory);
}

#[track_caller]
fn check_nothing_is_left(directory: &Path) {
    wait_for("processes and directory are gone", || !has_processes(directory) && !directory.exists());
    assert_eq!(mounts_beneath(directory), Vec::<std::path::PathBuf>::new());
}

fn has_processes(directory: &Path) -> bool {
    ["kube", "systemd", "containerd", "bash"]
        .iter()
        .any(|it| !s3csi_testbed::processes::running(it, directory).is_empty())
}
