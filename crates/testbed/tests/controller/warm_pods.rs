//! Warm Mountpoint Pods: each node with a node plugin has some, volumes adopt them, and none is left behind.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::storage::v1::CSINode;
use kube::Api;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use s3csi_testbed::wait::SOON;
use serde_json::json;

use crate::world::objects::on;
use crate::world::{CONTROL_PLANE, Workload, World, eventually};

const OFF: &str = "--leader-election=off";

fn nodes(world: &World) -> Api<CSINode> {
    Api::all(world.client.clone())
}

/// kubelet knows the driver on a node.
async fn register(world: &World, node: &str) {
    let object = json!({
        "metadata": { "name": world.unique(node) },
        "spec": { "drivers": [{ "name": world.driver, "nodeID": node, "topologyKeys": [] }] },
    });
    nodes(world).create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap();
}

async fn all_pods(world: &World) -> Vec<Pod> {
    world.pod_api(&world.mountpoint_namespace).list(&ListParams::default()).await.unwrap().items
}

fn label(pod: &Pod, key: &str) -> Option<String> {
    pod.metadata.labels.as_ref()?.get(key).cloned()
}

/// The names of the warm Pods that do not end.
async fn warm_pods(world: &World) -> BTreeSet<String> {
    let key = format!("{}/warm", world.driver);
    let is_warm = |it: &Pod| label(it, &key).is_some() && it.metadata.deletion_timestamp.is_none();
    all_pods(world).await.into_iter().filter(is_warm).filter_map(|it| it.metadata.name).collect()
}

/// Waits until there are so many warm Pods, which then run.
async fn wait_for_warm_pods(world: &World, count: usize) -> BTreeSet<String> {
    let warm = eventually(&format!("{count} warm Pods"), async || {
        let warm = warm_pods(world).await;
        (warm.len() == count).then_some(warm)
    })
    .await;
    for name in &warm {
        world.set_phase_of(&world.mountpoint_namespace, name, "Running").await;
    }
    warm
}

/// The Pod that serves the source of this workload, under another name than the source's.
async fn adopted_pod(world: &World, workload: &Workload, volume: &str) -> Pod {
    let (key, source) = (format!("{}/source", world.driver), world.pod_of(workload, volume));
    eventually("a warm Pod is adopted", async || {
        all_pods(world).await.into_iter().find(|it| label(it, &key).as_ref() == Some(&source))
    })
    .await
}

async fn check_entry(world: &World, workload: &Workload, volume: &str) {
    let source = world.pod_of(workload, volume);
    eventually("the workload is attached to its source", async || {
        let attachments = world.attachments().await;
        attachments.iter().any(|it| it.spec.mountpoint_s3_pod_attachments.contains_key(&source)).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_volume_adopts_a_warm_pod_and_the_pool_is_filled_again() {
    let world = World::own(&CONTROL_PLANE, "warm").await;
    register(&world, "node").await;
    let _controller = world.start_controller(&[OFF, "--mountpoint-warm-pods=2"]);
    let before = wait_for_warm_pods(&world, 2).await;
    world.volume("pv").await;
    let a = world.workload("a", on("node", &["pv"])).await;
    let pod = adopted_pod(&world, &a, "pv").await;
    let name = pod.metadata.name.clone().unwrap();
    assert!(before.contains(&name), "{name} was not warm before");
    check_entry(&world, &a, "pv").await;
    let volume = Some(world.unique("pv"));
    assert_eq!(label(&pod, &format!("{}/warm", world.driver)), None);
    assert_eq!(label(&pod, &format!("{}/volume-name", world.driver)), volume);
    assert_eq!(label(&pod, &format!("{}/pod-uid", world.driver)).as_deref(), Some(a.uid.as_str()));
    let annotations = pod.metadata.annotations.unwrap();
    assert_eq!(annotations.get(&format!("{}/volume-name", world.driver)), volume.as_ref());
    assert!(annotations.contains_key(&format!("{}/volume-id", world.driver)));

    // The next one of the same volume shares it, and one with other settings starts its own.
    let after = wait_for_warm_pods(&world, 2).await;
    assert!(!after.contains(&name));
    let b = world.workload("b", on("node", &["pv"])).await;
    world.volume_with("large", &[], &[("mountpointContainerResourcesLimitsMemory", "4Gi")]).await;
    let c = world.workload("c", on("node", &["large"])).await;
    let shared = eventually("all are attached", async || {
        let state = world.state(&[&a, &b, &c]).await;
        let is_cold = state.contains(&"pod mp(c) of large on node: Pending".to_owned());
        (is_cold && state.contains(&"attachment pv on node: mp(a)=a b".to_owned())).then_some(state)
    })
    .await;
    assert_eq!(shared.iter().filter(|it| it.starts_with("pod ")).count(), 2, "{shared:?}");
    assert_eq!(warm_pods(&world).await, after);

    // It ends like any other.
    world.remove(&a).await;
    world.remove(&b).await;
    let retired = format!("{}/needs-unmount", world.driver);
    eventually("the adopted Pod is retired", async || {
        let pod = world.pod_api(&world.mountpoint_namespace).get(&name).await.unwrap();
        pod.metadata.annotations?.contains_key(&retired).then_some(())
    })
    .await;
}

#[tokio::test]
async fn volumes_that_come_together_adopt_different_pods() {
    let world = World::own(&CONTROL_PLANE, "warm-burst").await;
    register(&world, "node").await;
    let _controller = world.start_controller(&[OFF, "--mountpoint-warm-pods=3"]);
    let before = wait_for_warm_pods(&world, 3).await;
    let mut workloads = Vec::new();
    for name in ["one", "two", "three"] {
        world.volume(name).await;
    }
    for name in ["one", "two", "three"] {
        workloads.push((name, world.workload(name, on("node", &[name])).await));
    }
    let mut adopted = BTreeSet::new();
    for (volume, workload) in &workloads {
        adopted.extend(adopted_pod(&world, workload, volume).await.metadata.name);
    }
    assert_eq!(adopted, before);
}

#[tokio::test]
async fn nothing_is_left_of_a_pool_that_changes() {
    let world = World::own(&CONTROL_PLANE, "warm-changes").await;
    register(&world, "node").await;
    register(&world, "other").await;
    let first = world.start_controller(&[OFF, "--mountpoint-warm-pods=1"]);
    let before = wait_for_warm_pods(&world, 2).await;
    drop(first);
    // Other settings, as after an upgrade.
    let second = world.start_controller(&[OFF, "--mountpoint-warm-pods=1", "--mountpoint-stage-size-limit=2Gi"]);
    let after = eventually("both are replaced", async || {
        let warm = warm_pods(&world).await;
        (warm.len() == 2 && warm.is_disjoint(&before)).then_some(warm)
    })
    .await;
    // One of them is of an earlier version.
    let outdated = after.first().unwrap();
    let version = format!("{}/mounted-by-csi-driver-version", world.driver);
    let patch = Patch::Merge(json!({ "metadata": { "labels": { version: "0.0.1" } } }));
    let pods = world.pod_api(&world.mountpoint_namespace);
    let uid = pods.patch(outdated, &PatchParams::default(), &patch).await.unwrap().metadata.uid;
    eventually("it is replaced", async || {
        let is_gone = pods.get_opt(outdated).await.unwrap().is_none_or(|it| it.metadata.uid != uid);
        (is_gone && warm_pods(&world).await.len() == 2).then_some(())
    })
    .await;
    // A node goes.
    nodes(&world).delete(&world.unique("other"), &DeleteParams::default()).await.unwrap();
    wait_for_warm_pods(&world, 1).await;
    drop(second);
    let _third = world.start_controller(&[OFF]);
    wait_for_warm_pods(&world, 0).await;
}

#[tokio::test]
async fn a_cordoned_node_gets_no_warm_pods() {
    let world = World::own(&CONTROL_PLANE, "warm-cordoned").await;
    let node = world.unique("node");
    let api: Api<Node> = Api::all(world.client.clone());
    let object = json!({ "metadata": { "name": node }, "spec": { "unschedulable": true } });
    api.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap();
    register(&world, "node").await;
    let controller = world.start_controller(&[OFF, "--mountpoint-warm-pods=1"]);
    controller.wait_for_log("the node is cordoned");
    assert_eq!(warm_pods(&world).await, BTreeSet::new());
    let patch = Patch::Merge(json!({ "spec": { "unschedulable": false } }));
    let uid = api.patch(&node, &PatchParams::default(), &patch).await.unwrap().metadata.uid;
    wait_for_warm_pods(&world, 1).await;
    let [pod] = all_pods(&world).await.try_into().unwrap();
    assert_eq!(pod.metadata.owner_references.unwrap()[0].uid, uid.unwrap());
}

/// A controller dies after a call, and the next one goes on: there is one Pod for the source, and the pool is full.
async fn check_crash(step: &str) {
    let world = World::own(&CONTROL_PLANE, &format!("warm-{step}")).await;
    register(&world, "node").await;
    let filling = world.start_controller(&[OFF, "--mountpoint-warm-pods=1"]);
    wait_for_warm_pods(&world, 1).await;
    drop(filling);
    let dying = world.start_controller(&[OFF, "--mountpoint-warm-pods=1", &format!("--stop-after={step}")]);
    world.volume("pv").await;
    let a = world.workload("a", on("node", &["pv"])).await;
    assert!(dying.wait(SOON).is_some(), "the controller never got to {step}");
    let _next = world.start_controller(&[OFF, "--mountpoint-warm-pods=1"]);
    adopted_pod(&world, &a, "pv").await;
    check_entry(&world, &a, "pv").await;
    wait_for_warm_pods(&world, 1).await;
    assert_eq!(all_pods(&world).await.len(), 2);
}

#[tokio::test]
async fn attachment_created() {
    check_crash("attachment-created").await;
}

#[tokio::test]
async fn pod_adopted() {
    check_crash("pod-adopted").await;
}
