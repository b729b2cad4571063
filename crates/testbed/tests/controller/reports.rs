//! What people see: the columns of `kubectl get s3pa`, conditions, Events.

use k8s_openapi::api::events::v1::Event;
use kube::Api;
use kube::api::{ListParams, Patch, PatchParams};
use s3csi_driver::api::MountpointS3PodAttachmentStatus;
use serde_json::json;

use crate::world::objects::on;
use crate::world::{Workload, WorkloadOptions, World, eventually};

/// Waits for an Event on a workload, and returns all of them: `Normal Reason: text`.
pub async fn wait_for_event(world: &World, workload: &Workload, expected: &str) -> Vec<String> {
    let events: Api<Event> = Api::namespaced(world.client.clone(), &workload.namespace);
    let what = format!("workload {} has Event {expected:?}", workload.name);
    eventually(&what, async || {
        let events = events.list(&ListParams::default()).await.unwrap().items;
        let is_about =
            |it: &Event| it.regarding.as_ref().and_then(|it| it.uid.as_deref()) == Some(workload.uid.as_str());
        let text = |it: &Event| {
            format!(
                "{} {}: {}",
                it.type_.as_deref().unwrap(),
                it.reason.as_deref().unwrap(),
                it.note.as_deref().unwrap()
            )
        };
        let found: Vec<String> = events.iter().filter(|it| is_about(it)).map(text).collect();
        found.iter().any(|it| it.contains(expected)).then_some(found)
    })
    .await
}

async fn wait_for_status(
    world: &World,
    what: &str,
    is_reached: impl Fn(&MountpointS3PodAttachmentStatus) -> bool,
) -> MountpointS3PodAttachmentStatus {
    eventually(what, async || {
        let [attachment] = world.attachments().await.try_into().ok()?;
        attachment.status.filter(|it| is_reached(it))
    })
    .await
}

#[tokio::test]
async fn the_status_says_who_is_served_and_whether_it_runs() {
    let world = World::shared("status").await;
    world.volume_with("pv", &["allow-delete"], &[]).await;
    let order = || WorkloadOptions { fs_group: Some(1234), ..on("node", &["pv"]) };
    let a = world.workload("a", order()).await;
    let status = wait_for_status(&world, "the status is written", |it| it.workloads == 1).await;
    assert_eq!((status.mountpoint_pod_count, status.ready.as_str()), (1, "0/1"));
    let pod = world.pod_of(&a, "pv");
    let conditions = |status: &MountpointS3PodAttachmentStatus| {
        let conditions = &status.mountpoint_pods[&pod].conditions;
        conditions.iter().map(|it| format!("{}={} {}", it.kind, it.status, it.reason)).collect::<Vec<_>>()
    };
    assert_eq!(conditions(&status), ["Ready=False Pending", "Mounted=Unknown NotReported"]);

    world.set_pod_phase(&a, "pv", "Running").await;
    world.workload("b", order()).await;
    let status = wait_for_status(&world, "two are served", |it| it.ready == "1/1" && it.workloads == 2).await;
    assert_eq!(conditions(&status), ["Ready=True Running", "Mounted=Unknown NotReported"]);
    assert_eq!(status.mounted, "0/1");

    // What a node sees, it writes on the Mountpoint Pod.
    for (said, reason, mounted) in
        [("True", "Serving", "1/1"), ("False", "EngineDied", "0/1"), ("True", "Serving", "1/1")]
    {
        let condition =
            json!({ "type": "s3.csi.scality.com/Mounted", "status": said, "reason": reason, "message": "words" });
        let patch = Patch::Strategic(json!({ "status": { "conditions": [condition] } }));
        let pods = world.pod_api(&world.mountpoint_namespace);
        pods.patch_status(&pod, &PatchParams::default(), &patch).await.unwrap();
        let expected = format!("Mounted={said} {reason}");
        let status = wait_for_status(&world, &expected, |it| conditions(it)[1] == expected).await;
        assert_eq!(status.mounted, mounted);
        assert_eq!(status.mountpoint_pods[&pod].conditions[1].message, "words");
    }

    let name = world.attachments().await[0].metadata.name.clone().unwrap();
    // The short name is everybody's here: each driver of this suite has its own kind.
    let kind = format!("mountpoints3podattachments.{}", world.driver);
    let table = world.control_plane.kubectl(&["get", &kind, &name]).unwrap();
    let columns: Vec<&str> =
        table.lines().next().unwrap().split("  ").map(str::trim).filter(|it| !it.is_empty()).collect();
    assert_eq!(columns, ["NAME", "NODE", "PV NAME", "WORKLOADS", "MOUNTPOINT PODS", "READY", "MOUNTED", "AGE"]);
    let row: Vec<&str> = table.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(row[1..7], ["status.node", "status.pv", "2", "1", "1/1", "1/1"]);
    let wide = world.control_plane.kubectl(&["get", &kind, &name, "--output=wide"]).unwrap();
    let row: Vec<&str> = wide.lines().nth(1).unwrap().split_whitespace().collect();
    assert!(["allow-delete", "1234", "driver"].iter().all(|it| row.contains(it)), "{wide}");
}

#[tokio::test]
async fn attachments_are_selected_by_every_field() {
    let world = World::shared("fields").await;
    world.volume_with("pv", &["allow-delete"], &[]).await;
    let a = world.workload("a", WorkloadOptions { fs_group: Some(7), ..on("node", &["pv"]) }).await;
    world.check(&[&a], &["attachment pv on node: mp(a)=a", "pod mp(a) of pv on node: Pending"]).await;
    let selector = "spec.nodeName=fields.node,spec.persistentVolumeName=fields.pv,spec.volumeID=handle-fields.pv,\
                    spec.mountOptions=allow-delete,spec.workloadFSGroup=7,spec.authenticationSource=driver,\
                    spec.workloadNamespace=,spec.workloadServiceAccountName=";
    let found = world.attachment_api().list(&ListParams::default().fields(selector)).await.unwrap();
    assert_eq!(found.items.len(), 1);
}

#[tokio::test]
async fn the_fields_that_say_whom_an_attachment_is_for_never_change() {
    let world = World::shared("immutable").await;
    world.volume("pv").await;
    let a = world.workload("a", on("node", &["pv"])).await;
    world.check(&[&a], &["attachment pv on node: mp(a)=a", "pod mp(a) of pv on node: Pending"]).await;
    let name = world.attachments().await[0].metadata.name.clone().unwrap();
    for field in
        ["nodeName", "persistentVolumeName", "volumeID", "mountOptions", "workloadFSGroup", "authenticationSource"]
    {
        let patch = Patch::Merge(json!({ "spec": { field: "other" } }));
        let error = world.attachment_api().patch(&name, &PatchParams::default(), &patch).await.unwrap_err().to_string();
        assert!(error.contains(&format!("{field} is immutable")), "{error}");
    }
}

#[tokio::test]
async fn one_event_names_the_mountpoint_pod_of_a_workload() {
    let world = World::shared("assigned").await;
    world.volume("pv").await;
    let a = world.workload("a", on("node", &["pv"])).await;
    let pod = world.pod_of(&a, "pv");
    wait_for_event(
        &world,
        &a,
        &format!("Normal MountpointPodAssigned: served by Mountpoint Pod {pod} (kubectl describe s3pa s3pa-"),
    )
    .await;
    world.set_pod_phase(&a, "pv", "Running").await;
    wait_for_status(&world, "it runs", |it| it.ready == "1/1").await;
    let events = wait_for_event(&world, &a, "MountpointPodAssigned").await;
    assert_eq!(events.len(), 1, "{events:?}");
}

#[tokio::test]
async fn an_event_says_why_the_mountpoint_pod_does_not_run() {
    let world = World::shared("trouble").await;
    world.volume("pv").await;
    let a = world.workload("a", on("node", &["pv"])).await;
    world.check(&[&a], &["attachment pv on node: mp(a)=a", "pod mp(a) of pv on node: Pending"]).await;
    let condition = json!({
        "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available",
    });
    let patch = Patch::Merge(json!({ "status": { "conditions": [condition] } }));
    let pods = world.pod_api(&world.mountpoint_namespace);
    pods.patch_status(&world.pod_of(&a, "pv"), &PatchParams::default(), &patch).await.unwrap();
    wait_for_event(&world, &a, "Warning VolumeNotServed: Mountpoint Pod").await;
    wait_for_event(&world, &a, "is not running: Unschedulable: 0/3 nodes are available").await;
}

#[tokio::test]
async fn an_event_says_why_a_volume_cannot_be_served() {
    let world = World::shared("refused").await;
    world.volume_with("pv", &[], &[("bucketName", "No_Bucket")]).await;
    let a = world.workload("a", on("node", &["pv"])).await;
    wait_for_event(&world, &a, "Warning VolumeNotServed: the volume cannot be published: Bucket name not valid").await;
    world.check_now(&[&a], &[]).await;
}

#[tokio::test]
async fn a_corrected_volume_is_served_without_a_restart() {
    let world = World::shared("corrected").await;
    world.volume_with("pv", &["cache /x"], &[("cache", "emptyDir")]).await;
    let a = world.workload("a", on("node", &["pv"])).await;
    wait_for_event(&world, &a, "a cache is requested twice").await;
    world.check_now(&[&a], &[]).await;
    world.edit_volume("pv", json!({ "spec": { "mountOptions": [] } })).await;
    world.check(&[&a], &["attachment pv on node: mp(a)=a", "pod mp(a) of pv on node: Pending"]).await;
}

#[tokio::test]
async fn an_event_says_that_the_mountpoint_pod_was_refused() {
    let world = World::own(&crate::world::CONTROL_PLANE, "refusing").await;
    let _controller = world.start_controller(&["--mountpoint-priority-class-name=no-such-class"]);
    world.volume("pv").await;
    let a = world.workload("a", on("node", &["pv"])).await;
    wait_for_event(&world, &a, "Warning MountpointPodNotCreated: failed to create Mountpoint Pod").await;
    wait_for_event(&world, &a, "no PriorityClass with name no-such-class was found").await;
}

/// Each volume of a Pod waits for a reason of its own. A recorder that knew only the last message of a Pod would take turns for ever.
#[tokio::test]
async fn a_workload_with_two_volumes_that_wait_gets_one_event_for_each() {
    let world = World::shared("two-waiting").await;
    let volumes = ["pv-1", "pv-2"];
    for volume in volumes {
        world.volume_with(volume, &[], &[("bucketName", &format!("No_Bucket_{volume}"))]).await;
    }
    let a = world.workload("a", on("node", &volumes)).await;
    for volume in volumes {
        wait_for_event(&world, &a, &format!("No_Bucket_{volume}")).await;
    }
    // Every other workload with these volumes on this node makes the controller look at them again.
    for name in ["b", "c", "d", "e"] {
        let other = world.workload(name, on("node", &volumes)).await;
        for volume in volumes {
            wait_for_event(&world, &other, &format!("No_Bucket_{volume}")).await;
        }
    }
    let events = wait_for_event(&world, &a, "No_Bucket_pv-1").await;
    assert_eq!(events.len(), 2, "{events:#?}");
}
