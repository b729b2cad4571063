//! Workloads, claims and volumes come in any order (C1–C5, C18–C21).

use serde_json::json;

use crate::world::objects::on;
use crate::world::{Workload, WorkloadOptions, World};

/// What happens last: the claims are bound, or the Pod is scheduled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Late {
    Nothing,
    Binding,
    Scheduling,
    Both,
}

const OTHER_DRIVER: &str = "ebs.csi.example.com";

/// A workload with two volumes of ours and one of somebody else, in the given order of events.
async fn check(name: &str, late: Late) {
    let world = World::shared(name).await;
    world.create_volume("one", world.order(&[], &[])).await;
    world.create_volume("two", world.order(&["allow-delete"], &[])).await;
    let mut theirs = world.order(&[], &[]);
    OTHER_DRIVER.clone_into(&mut theirs.driver);
    world.create_volume("theirs", theirs).await;
    let claims = ["one", "two", "theirs"];
    for claim in claims {
        world.create_claim(claim).await;
    }
    let is_bound_late = matches!(late, Late::Binding | Late::Both);
    let is_scheduled_late = matches!(late, Late::Scheduling | Late::Both);
    if !is_bound_late {
        bind(&world, &claims).await;
    }
    let mut order = on("node", &claims);
    if is_scheduled_late {
        order.node = None;
    }
    let workload = world.workload("a", order).await;
    if is_bound_late {
        check_nothing_before_another(&world, &workload, "unbound").await;
        bind(&world, &claims).await;
    }
    if is_scheduled_late {
        check_nothing_before_another(&world, &workload, "unscheduled").await;
        world.schedule(&workload, "node").await;
    }
    world
        .check(
            &[&workload],
            &[
                "attachment one on node: mp(a)=a",
                "attachment two on node: mp(a)=a",
                "pod mp(a) of one on node: Pending",
                "pod mp(a) of two on node: Pending",
            ],
        )
        .await;
}

async fn bind(world: &World, claims: &[&str]) {
    for claim in claims {
        world.bind(claim).await;
    }
}

#[tokio::test]
async fn c1_scheduled_and_bound() {
    check("c1", Late::Nothing).await;
}

#[tokio::test]
async fn c2_scheduled_and_bound_late() {
    check("c2", Late::Binding).await;
}

#[tokio::test]
async fn c3_scheduled_late_and_bound() {
    check("c3", Late::Scheduling).await;
}

#[tokio::test]
async fn c4_scheduled_late_and_bound_late() {
    check("c4", Late::Both).await;
}

#[tokio::test]
async fn the_volume_may_come_last() {
    let world = World::shared("volume-last").await;
    world.create_claim("pv").await;
    let workload = world.workload("a", on("node", &["pv"])).await;
    world.create_volume("pv", world.order(&[], &[])).await;
    world.bind("pv").await;
    world.check(&[&workload], &SERVED).await;
}

const SERVED: [&str; 2] = ["attachment pv on node: mp(a)=a", "pod mp(a) of pv on node: Pending"];

/// A workload is not served: another one that is created later is, and nothing else exists then. It is removed again.
pub async fn check_nothing_before_another(world: &World, workload: &Workload, other: &str) {
    world.volume(other).await;
    let later = world.workload(other, on(other, &[other])).await;
    let expected = [
        format!("attachment {other} on {other}: mp({other})={other}"),
        format!("pod mp({other}) of {other} on {other}: Pending"),
    ];
    world.check(&[workload, &later], &[&expected[0], &expected[1]]).await;
    world.remove(&later).await;
    world.check(&[workload, &later], &[]).await;
}

#[tokio::test]
async fn c5_a_workload_that_runs_already_has_another_mount_and_is_left_alone() {
    let world = World::shared("c5").await;
    world.volume("pv").await;
    let workload = world.workload("a", WorkloadOptions { node: None, ..on("", &["pv"]) }).await;
    world.set_phase(&workload, "Running").await;
    world.schedule(&workload, "node").await;
    check_nothing_before_another(&world, &workload, "other").await;
    // Recreated, it moves to a Mountpoint Pod.
    world.remove(&workload).await;
    let recreated = world.workload("a", on("node", &["pv"])).await;
    world.check(&[&recreated], &SERVED).await;
}

#[tokio::test]
async fn c18_each_node_has_its_own() {
    let world = World::shared("c18").await;
    world.volume("pv").await;
    let a = world.workload("a", on("node-1", &["pv"])).await;
    let b = world.workload("b", on("node-2", &["pv"])).await;
    world
        .check(
            &[&a, &b],
            &[
                "attachment pv on node-1: mp(a)=a",
                "attachment pv on node-2: mp(b)=b",
                "pod mp(a) of pv on node-1: Pending",
                "pod mp(b) of pv on node-2: Pending",
            ],
        )
        .await;
}

#[tokio::test]
async fn c19_to_c21_other_kinds_of_volumes_need_nothing() {
    let world = World::shared("c19").await;
    let mut theirs = world.order(&[], &[]);
    theirs.driver = OTHER_DRIVER.to_owned();
    world.create_volume("theirs", theirs).await;
    world.create_claim("theirs").await;
    world.bind("theirs").await;
    let volumes = vec![
        json!({ "name": "empty", "emptyDir": {} }),
        json!({ "name": "host", "hostPath": { "path": "/tmp" } }),
        json!({ "name": "settings", "configMap": { "name": "settings" } }),
    ];
    let workload = world.workload("a", WorkloadOptions { volumes, ..on("node", &["theirs"]) }).await;
    check_nothing_before_another(&world, &workload, "other").await;
}

#[tokio::test]
async fn a_claim_that_is_bound_elsewhere_is_not_served_before_it_is_right() {
    let world = World::shared("bound-elsewhere").await;
    world.volume("pv").await;
    world.create_claim("wrong").await;
    world.bind_to("wrong", "pv").await;
    // The PV is reserved for the claim "pv"; other claims that name it get nothing.
    let restore = json!({ "spec": { "claimRef": { "uid": world.claim_api().get("pv").await.unwrap().metadata.uid } } });
    world.edit_volume("pv", restore).await;
    let workload = world.workload("a", on("node", &["wrong"])).await;
    check_nothing_before_another(&world, &workload, "other").await;
}

#[tokio::test]
async fn generic_ephemeral_volumes_are_served() {
    let world = World::shared("ephemeral").await;
    let template =
        json!({ "spec": { "accessModes": ["ReadWriteMany"], "resources": { "requests": { "storage": "1Gi" } } } });
    let volumes = vec![json!({ "name": "scratch", "ephemeral": { "volumeClaimTemplate": template } })];
    let workload = world.workload("a", WorkloadOptions { volumes, ..on("node", &[]) }).await;
    world.create_volume("a-scratch", world.order(&[], &[])).await;
    let owner = json!({
        "apiVersion": "v1", "kind": "Pod", "name": workload.name, "uid": workload.uid.as_str(), "controller": true,
    });
    world.create_claim_of("a-scratch", json!({ "ownerReferences": [owner] })).await;
    world.bind("a-scratch").await;
    world
        .check(&[&workload], &["attachment a-scratch on node: mp(a)=a", "pod mp(a) of a-scratch on node: Pending"])
        .await;
}
