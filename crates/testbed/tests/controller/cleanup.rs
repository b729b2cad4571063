//! What happens when workloads end (C22–C27), and to what is left over.

use serde_json::json;

use crate::sharing::legacy_attachment;
use crate::world::objects::on;
use crate::world::{Workload, WorkloadOptions, World, eventually};

const SERVED: [&str; 2] = ["attachment pv on node: mp(a)=a", "pod mp(a) of pv on node: Running"];

fn plain() -> WorkloadOptions {
    on("node", &["pv"])
}

/// A workload whose Mountpoint Pod runs.
async fn served(name: &str) -> (World, Workload) {
    let world = World::shared(name).await;
    world.volume("pv").await;
    let a = world.workload("a", plain()).await;
    world.check(&[&a], &["attachment pv on node: mp(a)=a", "pod mp(a) of pv on node: Pending"]).await;
    world.set_pod_phase(&a, "pv", "Running").await;
    (world, a)
}

#[tokio::test]
async fn c22_a_mountpoint_pod_that_has_ended_is_deleted() {
    let (world, a) = served("c22").await;
    world.remove(&a).await;
    world.check(&[&a], &["pod mp(a) of pv on node: Running retired"]).await;
    world.set_pod_phase(&a, "pv", "Succeeded").await;
    world.check(&[&a], &[]).await;
}

#[tokio::test]
async fn c23_a_workload_deleted_before_it_ran_is_released_and_not_served_again() {
    let (world, a) = served("c23").await;
    world.delete(&a).await;
    world.check(&[&a], &["pod mp(a) of pv on node: Running retired"]).await;
    world.remove(&a).await;
    world.set_pod_phase(&a, "pv", "Succeeded").await;
    world.check(&[&a], &[]).await;
}

#[tokio::test]
async fn c24_the_attachment_of_a_workload_that_is_gone_is_deleted() {
    let (world, a) = served("c24").await;
    world.set_phase(&a, "Running").await;
    world.remove(&a).await;
    world.check(&[&a], &["pod mp(a) of pv on node: Running retired"]).await;
}

#[tokio::test]
async fn c24_also_of_one_that_has_ended() {
    for (name, phase) in [("c24-succeeded", "Succeeded"), ("c24-failed", "Failed")] {
        let (world, a) = served(name).await;
        world.set_phase(&a, phase).await;
        world.check(&[&a], &["pod mp(a) of pv on node: Running retired"]).await;
    }
}

#[tokio::test]
async fn c25_a_workload_that_is_terminating_but_runs_keeps_its_mount() {
    let (world, a) = served("c25").await;
    world.set_phase(&a, "Running").await;
    world.delete(&a).await;
    // Whatever was told before another workload joins has been seen, too.
    let b = world.workload("b", plain()).await;
    world.check(&[&a, &b], &["attachment pv on node: mp(a)=a b", "pod mp(a) of pv on node: Running"]).await;
    world.remove(&b).await;
    world.check(&[&a, &b], &SERVED).await;
    world.remove(&a).await;
    world.check(&[&a, &b], &["pod mp(a) of pv on node: Running retired"]).await;
}

#[tokio::test]
async fn the_last_workload_to_leave_ends_the_mountpoint_pod() {
    let (world, a) = served("last").await;
    let b = world.workload("b", plain()).await;
    world.check(&[&a, &b], &["attachment pv on node: mp(a)=a b", "pod mp(a) of pv on node: Running"]).await;
    world.remove(&a).await;
    world.check(&[&a, &b], &["attachment pv on node: mp(a)=b", "pod mp(a) of pv on node: Running"]).await;
    world.remove(&b).await;
    world.check(&[&a, &b], &["pod mp(a) of pv on node: Running retired"]).await;
}

#[tokio::test]
async fn a_recreated_workload_does_not_use_a_mountpoint_pod_that_is_ending() {
    let (world, a) = served("again").await;
    world.remove(&a).await;
    world.check(&[&a], &["pod mp(a) of pv on node: Running retired"]).await;
    let b = world.workload("b", plain()).await;
    world
        .check(
            &[&a, &b],
            &[
                "attachment pv on node: mp(b)=b",
                "pod mp(a) of pv on node: Running retired",
                "pod mp(b) of pv on node: Pending",
            ],
        )
        .await;
}

#[tokio::test]
async fn a_mountpoint_pod_that_never_ran_is_deleted_at_once() {
    let world = World::shared("never-ran").await;
    world.volume("pv").await;
    let a = world.workload("a", plain()).await;
    world.check(&[&a], &["attachment pv on node: mp(a)=a", "pod mp(a) of pv on node: Pending"]).await;
    world.remove(&a).await;
    world.check(&[&a], &[]).await;
}

#[tokio::test]
async fn c26_empty_duplicates_are_removed() {
    let world = World::shared("c26").await;
    world.volume("pv").await;
    legacy_attachment(&world, json!({})).await;
    legacy_attachment(&world, json!({})).await;
    let a = world.workload("a", plain()).await;
    world.check(&[&a], &["attachment pv on node: mp(a)=a", "pod mp(a) of pv on node: Pending"]).await;
}

#[tokio::test]
async fn c27_of_duplicates_the_one_in_use_is_kept() {
    let (world, a) = served("c27").await;
    legacy_attachment(&world, json!({})).await;
    world.check(&[&a], &SERVED).await;
    let b = world.workload("b", plain()).await;
    world.check(&[&a, &b], &["attachment pv on node: mp(a)=a b", "pod mp(a) of pv on node: Running"]).await;
}

#[tokio::test]
async fn a_workload_that_is_attached_twice_stays_where_it_was_first() {
    let (world, a) = served("twice").await;
    // A controller that did not see ours wrote a second attachment later.
    let other = format!("mp-{}", "0".repeat(56));
    let later = json!({ other: [{ "workloadPodUID": a.uid.as_str(), "attachmentTime": "2999-01-01T00:00:00Z" }] });
    legacy_attachment(&world, later).await;
    world.check(&[&a], &SERVED).await;
}

#[tokio::test]
async fn entries_of_unknown_workloads_are_removed_after_two_minutes_and_not_before() {
    let (world, a) = served("stale").await;
    let pod = format!("mp-{}", "1".repeat(56));
    let entry = |uid: &str, at: i64| {
        let at = api_time(at);
        json!({ pod.clone(): [{ "workloadPodUID": uid, "attachmentTime": at }] })
    };
    legacy_attachment(&world, entry("11111111-2222-3333-4444-555555555555", -119 - 60)).await;
    world.check(&[&a], &SERVED).await;
    legacy_attachment(&world, entry("66666666-2222-3333-4444-555555555555", 0)).await;
    let fresh = format!("attachment pv on node: {pod}=66666666-2222-3333-4444-555555555555");
    let b = world.workload("b", plain()).await;
    world
        .check(&[&a, &b], &["attachment pv on node: mp(a)=a b", fresh.as_str(), "pod mp(a) of pv on node: Running"])
        .await;
}

fn api_time(seconds_from_now: i64) -> String {
    let now = k8s_openapi::jiff::Timestamp::now().as_second();
    k8s_openapi::jiff::Timestamp::from_second(now + seconds_from_now).unwrap().to_string()
}

#[tokio::test]
async fn a_workload_that_died_before_its_attachment_was_seen_blocks_no_other() {
    let world = World::shared("died").await;
    world.volume("pv").await;
    let a = world.workload("a", plain()).await;
    world.remove(&a).await;
    let b = world.workload("b", plain()).await;
    eventually("the second workload is served by a Mountpoint Pod of its own, and nothing else is there", async || {
        let state = world.state(&[&a, &b]).await;
        let own = ["attachment pv on node: mp(b)=b", "pod mp(b) of pv on node: Pending"];
        let inherited = ["attachment pv on node: mp(a)=b", "pod mp(a) of pv on node: Pending"];
        (state == own || state == inherited).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_volume_that_is_deleted_while_used_changes_nothing() {
    let (world, a) = served("deleted-volume").await;
    world.set_phase(&a, "Running").await;
    let volumes = world.volume_api();
    volumes.delete(&world.unique("pv"), &kube::api::DeleteParams::default()).await.unwrap();
    world.edit_volume("pv", json!({ "metadata": { "finalizers": null } })).await;
    world.volume("other").await;
    let b = world.workload("b", on("node", &["other"])).await;
    world
        .check(
            &[&a, &b],
            &[SERVED[0], SERVED[1], "attachment other on node: mp(b)=b", "pod mp(b) of other on node: Pending"],
        )
        .await;
    world.remove(&a).await;
    world
        .check(
            &[&a, &b],
            &[
                "pod mp(a) of pv on node: Running retired",
                "attachment other on node: mp(b)=b",
                "pod mp(b) of other on node: Pending",
            ],
        )
        .await;
}

#[tokio::test]
async fn foreign_pods_in_the_namespace_are_ignored() {
    let (world, a) = served("strangers").await;
    let stranger = json!({
        "metadata": { "name": "mp-stranger" },
        "spec": {
            "securityContext": { "runAsNonRoot": true, "seccompProfile": { "type": "RuntimeDefault" } },
            "containers": [{
                "name": "main", "image": "none",
                "securityContext": { "allowPrivilegeEscalation": false, "capabilities": { "drop": ["ALL"] } },
            }],
        },
    });
    let pods = world.pod_api(&world.mountpoint_namespace);
    pods.create(&kube::api::PostParams::default(), &serde_json::from_value(stranger).unwrap()).await.unwrap();
    world.set_phase_of(&world.mountpoint_namespace, "mp-stranger", "Succeeded").await;
    world.remove(&a).await;
    world.check(&[&a], &["pod mp(a) of pv on node: Running retired"]).await;
    world.set_pod_phase(&a, "pv", "Succeeded").await;
    world.check(&[&a], &[]).await;
    pods.get("mp-stranger").await.unwrap();
}
