//! A Mountpoint Pod that serves and is about to end gets a successor first, and ends when that one serves.

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::world::objects::on;
use crate::world::{Workload, World, eventually};

/// A workload on its Mountpoint Pod, which can be taken over. Answers the Pod's name.
async fn serving(world: &World, name: &str, node: &str, volume: &str) -> (Workload, String) {
    world.volume(volume).await;
    let workload = world.workload(name, on(node, &[volume])).await;
    let pod = world.pod_of(&workload, volume);
    eventually("it has a Mountpoint Pod", async || find(world, &pod).await.map(drop)).await;
    run(world, &pod).await;
    world.set_phase(&workload, "Running").await;
    // Without a kubelet a deleted Pod would be gone at once.
    edit(world, &pod, json!({ "metadata": { "finalizers": ["s3csi.test/kubelet"] } })).await;
    (workload, pod)
}

async fn find(world: &World, name: &str) -> Option<Pod> {
    world.pod_api(&world.mountpoint_namespace).get_opt(name).await.unwrap()
}

async fn edit(world: &World, name: &str, change: Value) {
    let pods = world.pod_api(&world.mountpoint_namespace);
    pods.patch(name, &PatchParams::default(), &Patch::Merge(change)).await.unwrap();
}

/// Its container runs, and its node says that it serves.
async fn run(world: &World, name: &str) {
    world.set_phase_of(&world.mountpoint_namespace, name, "Running").await;
    report(world, name, "True").await;
}

async fn report(world: &World, name: &str, status: &str) {
    let condition = |kind: &str| json!({ "type": format!("{}/{kind}", world.driver), "status": status });
    let patch = json!({ "status": { "conditions": [condition("Mounted"), condition("Movable")] } });
    let pods = world.pod_api(&world.mountpoint_namespace);
    pods.patch_status(name, &PatchParams::default(), &Patch::Strategic(patch)).await.unwrap();
}

/// The names of all Mountpoint Pods that were started to take over this source.
async fn successors(world: &World, source: &str) -> Vec<String> {
    let label = format!("{}/source", world.driver);
    let is_successor =
        |it: &Pod| it.metadata.labels.as_ref().and_then(|it| it.get(&label)).is_some_and(|it| it == source);
    let pods = world.mountpoint_pods().await;
    pods.into_iter().filter(is_successor).filter_map(|it| it.metadata.name).collect()
}

async fn successor(world: &World, source: &str) -> String {
    eventually("it has a successor", async || successors(world, source).await.pop()).await
}

/// The node moves the mount.
async fn take_over(world: &World, old: &str, new: &str) {
    run(world, new).await;
    report(world, old, "False").await;
}

async fn check_gone(world: &World, name: &str) {
    edit(world, name, json!({ "metadata": { "finalizers": null } })).await;
    eventually("the replaced Pod is gone", async || find(world, name).await.is_none().then_some(())).await;
}

#[tokio::test]
async fn a_deleted_pod_gets_a_successor_while_it_serves() {
    let world = World::shared("ahead").await;
    let (a, old) = serving(&world, "a", "node", "pv").await;
    world.pod_api(&world.mountpoint_namespace).delete(&old, &DeleteParams::default()).await.unwrap();
    let new = successor(&world, &old).await;
    let [attachment] = world.attachments().await.try_into().unwrap();
    let named: Vec<&String> = attachment.spec.mountpoint_s3_pod_attachments.keys().collect();
    assert_eq!(named, [&old], "the source keeps its name");
    take_over(&world, &old, &new).await;
    check_gone(&world, &old).await;
    eventually("the attachment is ready again", async || {
        let status = world.attachments().await.pop()?.status?;
        (status.ready == "1/1" && status.mounted == "1/1").then_some(())
    })
    .await;
    // Its successor's successor has another name.
    edit(&world, &new, json!({ "metadata": { "finalizers": ["s3csi.test/kubelet"] } })).await;
    world.pod_api(&world.mountpoint_namespace).delete(&new, &DeleteParams::default()).await.unwrap();
    let third = eventually("it has another successor", async || {
        successors(&world, &old).await.into_iter().find(|it| *it != new)
    })
    .await;
    take_over(&world, &new, &third).await;
    check_gone(&world, &new).await;
    // An unused source ends whatever its Pod is called.
    world.remove(&a).await;
    let retired = format!("{}/needs-unmount", world.driver);
    eventually("it is retired", async || {
        find(&world, &third).await?.metadata.annotations?.contains_key(&retired).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_pod_that_cannot_be_taken_over_is_waited_for() {
    let world = World::shared("immovable").await;
    let (_a, old) = serving(&world, "a", "node", "pv").await;
    report(&world, &old, "False").await;
    world.pod_api(&world.mountpoint_namespace).delete(&old, &DeleteParams::default()).await.unwrap();
    let (uid, pods) = (find(&world, &old).await.unwrap().metadata.uid, world.pod_api(&world.mountpoint_namespace));
    edit(&world, &old, json!({ "metadata": { "finalizers": null } })).await;
    eventually("the next Pod has its name", async || {
        let pod = pods.get_opt(&old).await.unwrap()?;
        (pod.metadata.uid != uid).then_some(())
    })
    .await;
    assert_eq!(successors(&world, &old).await, Vec::<String>::new());
}

#[tokio::test]
async fn outdated_pods_of_a_node_are_replaced_one_after_the_other() {
    let world = World::shared("outdated").await;
    let (_a, one) = serving(&world, "a", "node", "pv-1").await;
    let (_b, other) = serving(&world, "b", "node", "pv-2").await;
    let version = format!("{}/mounted-by-csi-driver-version", world.driver);
    for pod in [&one, &other] {
        edit(&world, pod, json!({ "metadata": { "labels": { &version: "0.0.1" } } })).await;
    }
    let started = async || {
        let (one, other) = (successors(&world, &one).await, successors(&world, &other).await);
        [one, other].concat()
    };
    let first = eventually("one of them has a successor", async || started().await.pop()).await;
    let (moved, waiting) =
        if successors(&world, &one).await == [first.clone()] { (&one, &other) } else { (&other, &one) };
    take_over(&world, moved, &first).await;
    // Deleted by the controller.
    eventually("the old one is deleted", async || find(&world, moved).await?.metadata.deletion_timestamp.map(drop))
        .await;
    assert_eq!(started().await, [first], "the other one waits for its turn");
    check_gone(&world, moved).await;
    let second = successor(&world, waiting).await;
    take_over(&world, waiting, &second).await;
    check_gone(&world, waiting).await;
}

#[tokio::test]
async fn on_a_cordoned_node_no_successor_is_started() {
    let world = World::shared("cordoned").await;
    let node = world.unique("node");
    let nodes: Api<Node> = Api::all(world.client.clone());
    let object = serde_json::from_value(json!({ "metadata": { "name": node } })).unwrap();
    let uid = nodes.create(&PostParams::default(), &object).await.unwrap().metadata.uid;
    let (_a, old) = serving(&world, "a", "node", "pv").await;
    let [owner] = find(&world, &old).await.unwrap().metadata.owner_references.unwrap().try_into().unwrap();
    assert_eq!((owner.kind.as_str(), Some(owner.uid), owner.controller), ("Node", uid, Some(true)));

    let cordon = async |is_cordoned: bool| {
        let patch = Patch::Merge(json!({ "spec": { "unschedulable": is_cordoned } }));
        nodes.patch(&node, &PatchParams::default(), &patch).await.unwrap();
    };
    cordon(true).await;
    world.pod_api(&world.mountpoint_namespace).delete(&old, &DeleteParams::default()).await.unwrap();
    crate::world::SHARED.wait_for_log(&format!("node {node} is cordoned"));
    assert_eq!(successors(&world, &old).await, Vec::<String>::new());
    cordon(false).await;
    let new = successor(&world, &old).await;
    take_over(&world, &old, &new).await;
    check_gone(&world, &old).await;
}
