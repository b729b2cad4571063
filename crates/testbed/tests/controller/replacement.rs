//! A Mountpoint Pod that is lost while somebody needs it is replaced, under the same name.

use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::json;

use crate::late_binding::check_nothing_before_another;
use crate::world::objects::on;
use crate::world::{Workload, World, eventually};

const PENDING: [&str; 2] = ["attachment pv on node: mp(a)=a", "pod mp(a) of pv on node: Pending"];
const RUNNING: [&str; 2] = ["attachment pv on node: mp(a)=a", "pod mp(a) of pv on node: Running"];

/// A workload that runs on its Mountpoint Pod.
async fn running(name: &str) -> (World, Workload) {
    let world = World::shared(name).await;
    world.volume("pv").await;
    let a = world.workload("a", on("node", &["pv"])).await;
    world.check(&[&a], &PENDING).await;
    world.set_pod_phase(&a, "pv", "Running").await;
    world.set_phase(&a, "Running").await;
    world.check(&[&a], &RUNNING).await;
    (world, a)
}

async fn uid_of_pod(world: &World) -> String {
    let [pod] = world.mountpoint_pods().await.try_into().unwrap();
    pod.metadata.uid.unwrap()
}

async fn check_replaced(world: &World, a: &Workload, old: &str) {
    eventually("there is another Mountpoint Pod under the same name", async || {
        let pods = world.mountpoint_pods().await;
        pods.first().is_some_and(|it| it.metadata.uid.as_deref() != Some(old)).then_some(())
    })
    .await;
    world.check(&[a], &PENDING).await;
}

/// What a Pod looks like after an eviction, too.
#[tokio::test]
async fn a_failed_mountpoint_pod_is_replaced() {
    let (world, a) = running("failed").await;
    let old = uid_of_pod(&world).await;
    world.set_pod_phase(&a, "pv", "Failed").await;
    check_replaced(&world, &a, &old).await;
}

#[tokio::test]
async fn a_mountpoint_pod_that_ended_unasked_is_replaced() {
    let (world, a) = running("ended").await;
    let old = uid_of_pod(&world).await;
    world.set_pod_phase(&a, "pv", "Succeeded").await;
    check_replaced(&world, &a, &old).await;
}

#[tokio::test]
async fn a_deleted_mountpoint_pod_is_replaced() {
    let (world, a) = running("deleted").await;
    let old = uid_of_pod(&world).await;
    let name = world.pod_of(&a, "pv");
    let pods = world.pod_api(&world.mountpoint_namespace);
    pods.delete(&name, &DeleteParams::default().grace_period(0)).await.unwrap();
    check_replaced(&world, &a, &old).await;
}

#[tokio::test]
async fn a_deleted_attachment_is_recreated_with_the_same_pod() {
    let (world, a) = running("deleted-attachment").await;
    let old = uid_of_pod(&world).await;
    let [attachment] = world.attachments().await.try_into().unwrap();
    let name = attachment.metadata.name.unwrap();
    world.attachment_api().delete(&name, &DeleteParams::default()).await.unwrap();
    eventually("the attachment is recreated", async || {
        let [found] = world.attachments().await.try_into().ok()?;
        (found.metadata.uid != attachment.metadata.uid).then_some(())
    })
    .await;
    world.check(&[&a], &RUNNING).await;
    assert_eq!(uid_of_pod(&world).await, old);
}

/// The unit of version 1 that serves it has died, as its node says; its containers run on.
#[tokio::test]
async fn a_running_workload_with_a_dead_mount_gets_a_mountpoint_pod() {
    let world = World::shared("dead-unit").await;
    world.create_volume("pv", world.order(&[], &[])).await;
    world.create_claim("pv").await;
    let a = world.workload("a", on("node", &["pv"])).await;
    world.set_phase(&a, "Running").await;
    check_nothing_before_another(&world, &a, "unbound").await;
    world.bind("pv").await;
    check_nothing_before_another(&world, &a, "served").await;
    let mounted = async |status: &str| {
        let condition = json!({ "type": format!("{}/Mounted", world.driver), "status": status });
        let patch = Patch::Strategic(json!({ "status": { "conditions": [condition] } }));
        world.pod_api(&a.namespace).patch_status(&a.name, &PatchParams::default(), &patch).await.unwrap();
    };
    mounted("False").await;
    world.check(&[&a], &PENDING).await;
    world.set_pod_phase(&a, "pv", "Running").await;
    mounted("True").await;
    world.check(&[&a], &RUNNING).await;
}
