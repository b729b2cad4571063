//! Whom a publish waits for, and what it says when its time is up.

use std::fs;
use std::time::{Duration, Instant};

use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::plugin::PluginStrategy;
use s3csi_testbed::wait::wait_for;
use serde_json::json;
use tonic::Code;

use crate::cluster::{NAMESPACE, attachment_name, control_plane};
use crate::world::{BUCKET, PV, World, check_refused};

/// Kubelet gives two minutes; the rules are the same.
const TIME: Duration = Duration::from_secs(5);

#[track_caller]
fn check(world: &World<'_>, words: &[&str]) {
    let mut words = words.to_vec();
    words.extend(["Could not mount", BUCKET]);
    check_refused(world.try_publish_within(&world.volume(1), TIME), Code::Unavailable, &words);
    world.check_nothing_mounted();
}

#[test]
fn the_error_for_an_unassigned_workload_names_the_controller() {
    let fixture = Fixture::new("pod-unassigned");
    let world = World::start(&fixture);
    let workload = world.workload(1);
    let command = "kubectl logs -n default -l app=s3-csi-controller";
    check(&world, &["no Mountpoint Pod is assigned", &workload, PV, &world.node_name, "kubectl get s3pa", command]);
}

#[test]
fn an_entry_for_another_workload_or_node_is_not_taken() {
    let fixture = Fixture::new("pod-other");
    let world = World::start(&fixture);
    let pod = world.run_pod(2);
    world.assign(&pod.name, &[2]);
    let entries = [(world.pod_name(2), vec![world.workload(1)])].into();
    world.runtime.block_on(world.cluster.attach(&format!("{}-other", world.node_name), PV, &entries));
    check(&world, &["no Mountpoint Pod is assigned"]);
}

#[test]
fn a_mountpoint_pod_that_does_not_exist_is_named() {
    let fixture = Fixture::new("pod-gone");
    let world = World::start(&fixture);
    let pod = world.pod_name(1);
    world.assign(&pod, &[1]);
    let command = format!("kubectl describe s3pa {}", attachment_name(&world.node_name, PV));
    check(&world, &[&pod, "does not exist", &command]);
}

#[test]
fn the_error_has_the_schedulers_message_for_an_unscheduled_mountpoint_pod() {
    let fixture = Fixture::new("pod-unscheduled");
    let world = World::start(&fixture);
    let pod = world.pod_name(1);
    world.runtime.block_on(world.cluster.create_pod(&pod, None));
    let condition = json!({
        "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available",
    });
    world.runtime.block_on(world.cluster.set_status(&pod, json!({ "phase": "Pending", "conditions": [condition] })));
    world.assign(&pod, &[1]);
    let command = format!("kubectl describe pod -n {NAMESPACE} {pod}");
    check(&world, &["not scheduled", "0/3 nodes are available", &command]);
}

#[test]
fn a_mountpoint_pod_on_another_node_is_of_no_use() {
    let fixture = Fixture::new("pod-elsewhere");
    let world = World::start(&fixture);
    let pod = world.pod_name(1);
    world.runtime.block_on(world.cluster.create_pod(&pod, Some("far-away")));
    world.assign(&pod, &[1]);
    check(&world, &[&pod, "is on node far-away", "kubectl describe s3pa"]);
}

#[test]
fn the_error_has_kubelets_message_for_a_mountpoint_pod_that_does_not_run() {
    let fixture = Fixture::new("pod-pending");
    let world = World::start(&fixture);
    let pod = world.create_pod(1);
    world.assign(&pod.name, &[1]);
    let state = json!({ "waiting": { "reason": "ImagePullBackOff", "message": "no such image" } });
    let container = json!({
        "name": "mountpoint", "image": "x", "imageID": "", "ready": false, "restartCount": 0, "state": state,
    });
    let status = json!({ "phase": "Pending", "containerStatuses": [container] });
    world.runtime.block_on(world.cluster.set_status(&pod.name, status));
    let command = format!("kubectl logs -n {NAMESPACE} {}", pod.name);
    check(&world, &["not running", "ImagePullBackOff: no such image", &command]);
}

#[test]
fn a_mountpoint_pod_that_has_ended_is_not_used() {
    let fixture = Fixture::new("pod-ended");
    let world = World::start(&fixture);
    let pod = world.create_pod(1);
    world.assign(&pod.name, &[1]);
    world.set_phase(&pod, "Failed");
    check(&world, &["has ended (Failed)", &format!("kubectl logs -n {NAMESPACE} {}", pod.name)]);
}

#[test]
fn a_mountpoint_pod_that_is_to_end_gets_no_new_workload() {
    let fixture = Fixture::new("pod-leaving");
    let world = World::start(&fixture);
    let pod = world.serve(&[1]);
    world.retire(&pod);
    check(&world, &["is terminating", &pod.name, "kubectl describe s3pa"]);
}

#[test]
fn a_publish_waits_for_what_comes_late() {
    let fixture = Fixture::new("pod-late");
    let world = World::start(&fixture);
    let publish = world.publish_in_background(&world.volume(1));
    let pod = world.create_pod(1);
    world.assign(&pod.name, &[1]);
    assert!(!publish.is_finished());
    let start = Instant::now();
    let pod = world.start_mounter(&pod, &[]);
    world.set_phase(&pod, "Running");
    let target = world.runtime.block_on(publish).unwrap().unwrap();
    assert!(start.elapsed() < Duration::from_secs(30), "took {:?}", start.elapsed());
    fs::write(target.join("file"), "x").unwrap();
    world.unpublish(&world.volume(1));
}

#[test]
fn a_mounter_that_listens_is_used_before_kubelet_reports_its_pod() {
    let fixture = Fixture::new("pod-unreported");
    let world = World::start(&fixture);
    let pod = world.create_pod(1);
    world.assign(&pod.name, &[1, 2]);
    let publish = world.publish_in_background(&world.volume(1));
    let pod = world.start_mounter(&pod, &[]);
    let target = world.runtime.block_on(publish).unwrap().unwrap();
    fs::write(target.join("file"), "x").unwrap();
    // What kubelet writes late does not take the mount away, nor the Pod from the next workload.
    world.set_phase(&pod, "Pending");
    world.publish(&world.volume(2));
    world.set_phase(&pod, "Running");
    assert_eq!(fs::read_to_string(target.join("file")).unwrap(), "x");
    for workload in [1, 2] {
        world.unpublish(&world.volume(workload));
    }
}

#[test]
fn a_wait_asks_the_api_server_nothing() {
    let fixture = Fixture::new("pod-no-polling");
    let world = World::start(&fixture);
    world.assign(&world.pod_name(1), &[1]);
    // Only the one question at its end, which makes the message better.
    check(&world, &["does not exist"]);
    let pod = world.pod_name(1);
    let is_about_us = |uri: &str| uri.contains(&pod) || uri.contains(&format!("spec.nodeName%3D{}&", world.node_name));
    let asked = || -> Vec<String> {
        let requests = control_plane().audit().into_iter();
        let requests = requests.filter(|it| it.verb != "watch" && is_about_us(&it.request_uri));
        requests.map(|it| format!("{} {}", it.verb, it.request_uri)).collect()
    };
    // The audit log is written a moment after the answer.
    wait_for("the one question is in the audit log", || asked().iter().any(|it| it.starts_with("get ")));
    let asked = asked();
    let gets = asked.iter().filter(|it| it.starts_with("get ")).count();
    assert!(gets == 1 && asked.len() <= 3, "{asked:#?}");
}

#[test]
fn without_an_api_server_the_node_says_so_and_lets_go_of_what_it_has() {
    let fixture = Fixture::new("pod-blind");
    let mut world = World::start(&fixture);
    let pod = world.serve(&[1, 2]);
    let target = world.publish(&world.volume(1));
    world.stop_node();

    // Nothing listens on port 1.
    let kubeconfig = fs::read_to_string(control_plane().kubeconfig()).unwrap();
    let nowhere = fixture.path("nowhere.kubeconfig");
    fs::write(&nowhere, kubeconfig.replace(&control_plane().server(), "https://127.0.0.1:1")).unwrap();
    world.plugin.set_strategy(PluginStrategy::Pod { kubeconfig: nowhere });
    world.start_node();
    // Who is served goes on being served, and leaves when he likes.
    world.publish(&world.volume(1));
    fs::write(target.join("file"), "x").unwrap();
    let outcome = world.try_publish_within(&world.volume(2), TIME);
    check_refused(
        outcome,
        Code::Unavailable,
        &["has not synced yet", "kubectl auth can-i watch", "get daemonset s3-csi-node"],
    );
    world.unpublish(&world.volume(1));
    assert!(!target.exists());
    world.stop_node();

    world.plugin.set_strategy(PluginStrategy::Pod { kubeconfig: control_plane().kubeconfig() });
    world.start_node();
    world.retire(&pod);
    world.check_nothing_mounted();
}
