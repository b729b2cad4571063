//! Who shares a Mountpoint Pod with whom, and who does not (C6–C17).

use kube::api::{Patch, PatchParams, PostParams};
use s3csi_core::attachment::is_mountpoint_pod_name;
use s3csi_driver::api;
use serde_json::{Value, json};

use crate::world::objects::{VolumeOrder, on};
use crate::world::{Workload, WorkloadOptions, World};

/// Two workloads on one node that use one volume, and what becomes of them.
async fn two(name: &str, one: WorkloadOptions, other: WorkloadOptions) -> (World, Workload, Workload) {
    let world = World::shared(name).await;
    world.volume("pv").await;
    let a = world.workload("a", one).await;
    world.check(&[&a], &FIRST).await;
    let b = world.workload("b", other).await;
    (world, a, b)
}

const FIRST: [&str; 2] = ["attachment pv on node: mp(a)=a", "pod mp(a) of pv on node: Pending"];
const SHARED: [&str; 2] = ["attachment pv on node: mp(a)=a b", "pod mp(a) of pv on node: Pending"];
const SEPARATE: [&str; 4] = [
    "attachment pv on node: mp(a)=a",
    "attachment pv on node: mp(b)=b",
    "pod mp(a) of pv on node: Pending",
    "pod mp(b) of pv on node: Pending",
];

fn plain() -> WorkloadOptions {
    on("node", &["pv"])
}

fn with_group(group: i64) -> WorkloadOptions {
    WorkloadOptions { fs_group: Some(group), ..plain() }
}

#[tokio::test]
async fn c6_same_node_and_volume_share() {
    let (world, a, b) = two("c6", plain(), plain()).await;
    world.check(&[&a, &b], &SHARED).await;
}

#[tokio::test]
async fn c6_also_when_the_claim_is_bound_late() {
    let world = World::shared("c6-late").await;
    world.create_volume("pv", world.order(&[], &[])).await;
    world.create_claim("pv").await;
    let a = world.workload("a", plain()).await;
    let b = world.workload("b", plain()).await;
    world.bind("pv").await;
    crate::world::eventually("both share one Mountpoint Pod, whosever it is", async || {
        let state = world.state(&[&a, &b]).await;
        let after = |it: &str| {
            state == [format!("attachment pv on node: mp({it})=a b"), format!("pod mp({it}) of pv on node: Pending")]
        };
        (after("a") || after("b")).then_some(())
    })
    .await;
}

#[tokio::test]
async fn c7_options_that_changed_meanwhile_separate() {
    let world = World::shared("c7").await;
    world.volume_with("pv", &["allow-delete"], &[]).await;
    let a = world.workload("a", plain()).await;
    world.check(&[&a], &FIRST).await;
    world.edit_volume("pv", json!({ "spec": { "mountOptions": ["allow-delete", "uid=1000"] } })).await;
    let b = world.workload("b", plain()).await;
    world.check(&[&a, &b], &SEPARATE).await;
}

#[tokio::test]
async fn options_in_another_order_or_spelling_share() {
    let world = World::shared("spelling").await;
    world.volume_with("pv", &["allow-delete", "--uid=1000"], &[]).await;
    let a = world.workload("a", plain()).await;
    world.check(&[&a], &FIRST).await;
    world.edit_volume("pv", json!({ "spec": { "mountOptions": ["uid 1000", "--allow-delete"] } })).await;
    let b = world.workload("b", plain()).await;
    world.check(&[&a, &b], &SHARED).await;
}

#[tokio::test]
async fn c8_same_fs_group_shares() {
    let (world, a, b) = two("c8", with_group(1000), with_group(1000)).await;
    world.check(&[&a, &b], &SHARED).await;
}

#[tokio::test]
async fn c9_different_fs_groups_separate() {
    let (world, a, b) = two("c9", with_group(1000), with_group(2000)).await;
    world.check(&[&a, &b], &SEPARATE).await;
}

#[tokio::test]
async fn no_fs_group_is_another_one() {
    let (world, a, b) = two("no-group", with_group(1000), plain()).await;
    world.check(&[&a, &b], &SEPARATE).await;
}

/// C10, C13 and C14 are about identities of workloads. Ours belong to the volume, so the service account does not matter.
#[tokio::test]
async fn c10_to_c14_identities_of_the_volume_are_shared_by_all_service_accounts() {
    let other = WorkloadOptions { service_account: Some("other".to_owned()), ..plain() };
    let (world, a, b) = two("c13", plain(), other).await;
    world.check(&[&a, &b], &SHARED).await;
}

#[tokio::test]
async fn the_authentication_source_separates() {
    let world = World::shared("auth").await;
    world.volume("pv").await;
    let a = world.workload("a", plain()).await;
    world.check(&[&a], &FIRST).await;
    // A PV is recreated under its old name, with a Secret.
    let volume = world.volume_api().get(&world.unique("pv")).await.unwrap();
    remove_volume(&world, "pv").await;
    let mut order = world.order(&[], &[("authenticationSource", "secret")]);
    order.handle = volume.spec.unwrap().csi.map(|it| it.volume_handle);
    world.create_volume("pv", order).await;
    let b = world.workload("b", plain()).await;
    world.check(&[&a, &b], &SEPARATE).await;
    let mut sources: Vec<Option<String>> =
        world.attachments().await.into_iter().map(|it| it.spec.authentication_source).collect();
    sources.sort();
    assert_eq!(sources, [Some("driver".to_owned()), Some("secret".to_owned())]);
}

/// A PV is recreated under its old name and handle, with another Secret: its keys must not reach the workloads of the old one.
#[tokio::test]
async fn the_secret_separates() {
    let world = World::shared("secret").await;
    let order = |secret: &str| {
        let order = world.order(&[], &[("authenticationSource", "secret")]);
        VolumeOrder { handle: Some(world.unique("handle")), secret: Some(secret.to_owned()), ..order }
    };
    world.create_volume("pv", order("one")).await;
    world.create_claim("pv").await;
    world.bind("pv").await;
    let a = world.workload("a", plain()).await;
    world.check(&[&a], &FIRST).await;
    remove_volume(&world, "pv").await;
    world.create_volume("pv", order("two")).await;
    let b = world.workload("b", plain()).await;
    world.check(&[&a, &b], &SEPARATE).await;
}

async fn remove_volume(world: &World, name: &str) {
    let name = world.unique(name);
    world.volume_api().delete(&name, &kube::api::DeleteParams::default()).await.unwrap();
    let free = Patch::Merge(json!({ "metadata": { "finalizers": null } }));
    world.volume_api().patch(&name, &PatchParams::default(), &free).await.unwrap();
}

#[tokio::test]
async fn c15_a_mountpoint_pod_that_is_ending_gets_no_workload() {
    let (world, a, b) = annotated("c15", "needs-unmount").await;
    world
        .check(
            &[&a, &b],
            &[
                "attachment pv on node: mp(a)=a, mp(b)=b",
                "pod mp(a) of pv on node: Pending retired",
                "pod mp(b) of pv on node: Pending",
            ],
        )
        .await;
}

#[tokio::test]
async fn c17_a_mountpoint_pod_that_is_being_drained_gets_no_workload() {
    let (world, a, b) = annotated("c17", "no-new-workload").await;
    world.check(&[&a, &b], &OWN_POD_EACH).await;
}

const OWN_POD_EACH: [&str; 3] =
    ["attachment pv on node: mp(a)=a, mp(b)=b", "pod mp(a) of pv on node: Pending", "pod mp(b) of pv on node: Pending"];

/// The Pod of a first workload gets an annotation, then a second one comes.
async fn annotated(name: &str, annotation: &str) -> (World, Workload, Workload) {
    let world = World::shared(name).await;
    world.volume("pv").await;
    let a = world.workload("a", plain()).await;
    world.check(&[&a], &FIRST).await;
    world.annotate_pod(&a, "pv", annotation).await;
    let b = world.workload("b", plain()).await;
    (world, a, b)
}

#[tokio::test]
async fn c16_a_mountpoint_pod_of_another_version_gets_no_workload() {
    let world = World::shared("c16").await;
    world.volume("pv").await;
    let a = world.workload("a", plain()).await;
    world.check(&[&a], &FIRST).await;
    let label =
        json!({ "metadata": { "labels": { format!("{}/mounted-by-csi-driver-version", world.driver): "2.2.0" } } });
    let pods = world.pod_api(&world.mountpoint_namespace);
    pods.patch(&world.pod_of(&a, "pv"), &PatchParams::default(), &Patch::Merge(label)).await.unwrap();
    let b = world.workload("b", plain()).await;
    world.check(&[&a, &b], &OWN_POD_EACH).await;
}

/// An attachment as earlier drivers wrote it.
pub async fn legacy_attachment(world: &World, entries: Value) {
    let attachment = json!({
        "apiVersion": format!("{}/v2", world.driver),
        "kind": "MountpointS3PodAttachment",
        "metadata": { "generateName": "s3pa-" },
        "spec": {
            "nodeName": world.unique("node"),
            "persistentVolumeName": world.unique("pv"),
            "volumeID": format!("handle-{}", world.unique("pv")),
            "mountOptions": "",
            "workloadFSGroup": "",
            "mountpointS3PodAttachments": entries,
        },
    });
    let attachments = api::attachments(world.client.clone(), &world.driver);
    attachments.create(&PostParams::default(), &serde_json::from_value(attachment).unwrap()).await.unwrap();
}

#[tokio::test]
async fn attachments_of_earlier_drivers_are_used_and_not_duplicated() {
    let world = World::shared("legacy").await;
    world.volume("pv").await;
    // Its workload runs, and its Mountpoint Pod is of an earlier version.
    let a = world.workload("a", WorkloadOptions { node: None, ..plain() }).await;
    world.set_phase(&a, "Running").await;
    let pod = world.pod_of(&a, "pv");
    assert!(is_mountpoint_pod_name(&pod));
    legacy_pod(&world, &a).await;
    // Attached just now: until its workload is scheduled, an older entry would be stale.
    let now = k8s_openapi::jiff::Timestamp::from_second(k8s_openapi::jiff::Timestamp::now().as_second()).unwrap();
    let served = json!({ pod: [{ "workloadPodUID": a.uid.as_str(), "attachmentTime": now.to_string() }] });
    legacy_attachment(&world, served).await;
    world.schedule(&a, "node").await;
    let b = world.workload("b", plain()).await;
    world
        .check(
            &[&a, &b],
            &[
                "attachment pv on node: mp(a)=a, mp(b)=b",
                "pod mp(a) of pv on node: Pending",
                "pod mp(b) of pv on node: Pending",
            ],
        )
        .await;
    let [attachment] = world.attachments().await.try_into().unwrap();
    assert!(attachment.metadata.name.unwrap().len() < 16, "a new attachment was made");
}

/// A Mountpoint Pod as the earlier driver created it, for a workload on `node`.
async fn legacy_pod(world: &World, workload: &Workload) {
    let driver = &world.driver;
    let pod = json!({
        "metadata": {
            "name": world.pod_of(workload, "pv"),
            "labels": {
                format!("{driver}/pod-uid"): workload.uid.as_str(),
                format!("{driver}/volume-name"): world.unique("pv"),
                format!("{driver}/mounted-by-csi-driver-version"): "2.2.0",
            },
            // Only so that this test finds it.
            "annotations": { format!("{driver}/volume-name"): world.unique("pv") },
        },
        "spec": {
            "affinity": { "nodeAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": { "nodeSelectorTerms": [
                { "matchFields": [{ "key": "metadata.name", "operator": "In", "values": [world.unique("node")] }] },
            ] } } },
            "securityContext": { "runAsNonRoot": true, "seccompProfile": { "type": "RuntimeDefault" } },
            "containers": [{
                "name": "mountpoint", "image": "none",
                "securityContext": { "allowPrivilegeEscalation": false, "capabilities": { "drop": ["ALL"] } },
            }],
        },
    });
    let pods = world.pod_api(&world.mountpoint_namespace);
    pods.create(&PostParams::default(), &serde_json::from_value(pod).unwrap()).await.unwrap();
}
