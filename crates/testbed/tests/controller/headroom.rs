//! Room for Mountpoint Pods (C39–C47, C49): a workload with the scheduling gate gets a headroom Pod for each volume, then loses the gate;
//! its Mountpoint Pods may preempt them; and none is left behind.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, ListParams, PostParams};
use s3csi_core::headroom::headroom_pod_name;
use s3csi_testbed::process::Process;
use s3csi_testbed::wait::SOON;
use serde_json::{Value, json};

use crate::reports::wait_for_event;
use crate::world::objects::on;
use crate::world::{CONTROL_PLANE, Workload, World, eventually};

const OTHER_GATE: &str = "example.com/quota";

/// With priority classes of its own, as the chart makes them.
async fn world(name: &str) -> World {
    let world = World::own(&CONTROL_PLANE, name).await;
    for (class, value, policy) in
        [("preempting", 1_000_000_000, "PreemptLowerPriority"), ("headroom", -10, "Never"), ("critical", 9, "Never")]
    {
        let object = json!({
            "apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": { "name": world.unique(class) },
            "value": value, "preemptionPolicy": policy,
        });
        world.control_plane.apply(&object.to_string()).unwrap();
    }
    world
}

fn start(world: &World, flags: &[&str]) -> Process {
    let class = |flag: &str, name: &str| format!("--{flag}-priority-class-name={}", world.unique(name));
    let classes = [
        class("mountpoint", "critical"),
        class("mountpoint-preempting", "preempting"),
        class("mountpoint-headroom", "headroom"),
    ];
    let mut all = vec!["--leader-election=off", "--reserve-headroom=on"];
    all.extend(classes.iter().map(String::as_str));
    all.extend(flags);
    world.start_controller(&all)
}

/// A Pod that waits for the removal of its gates.
async fn gated(world: &World, name: &str, claims: &[&str], gates: &[&str]) -> Workload {
    let volume = |it: &&str| json!({ "name": it, "persistentVolumeClaim": { "claimName": it } });
    let ours = format!("{}/reserve-headroom-for-mppod", world.driver);
    let gates: Vec<Value> =
        std::iter::once(ours.as_str()).chain(gates.iter().copied()).map(|it| json!({ "name": it })).collect();
    let pod = json!({
        "metadata": { "name": name },
        "spec": {
            "containers": [{ "name": "main", "image": "none" }],
            "schedulingGates": gates,
            "volumes": claims.iter().map(volume).collect::<Vec<_>>(),
        },
    });
    let pods = world.pod_api(&world.name);
    let pod = pods.create(&PostParams::default(), &serde_json::from_value(pod).unwrap()).await.unwrap();
    Workload { name: name.to_owned(), namespace: world.name.clone(), uid: pod.metadata.uid.unwrap().parse().unwrap() }
}

async fn pod(world: &World, workload: &Workload) -> Pod {
    world.pod_api(&workload.namespace).get(&workload.name).await.unwrap()
}

fn gates(pod: &Pod) -> Vec<&str> {
    let gates = pod.spec.as_ref().unwrap().scheduling_gates.iter().flatten();
    gates.map(|it| it.name.as_str()).collect()
}

fn label<'a>(pod: &'a Pod, key: &str) -> Option<&'a str> {
    pod.metadata.labels.as_ref()?.get(key).map(String::as_str)
}

/// Waits until our gate is removed.
async fn wait_for_admission(world: &World, workload: &Workload) -> Pod {
    let ours = format!("{}/reserve-headroom-for-mppod", world.driver);
    eventually("the gate is removed", async || {
        let pod = pod(world, workload).await;
        (!gates(&pod).contains(&ours.as_str())).then_some(pod)
    })
    .await
}

fn name_of(world: &World, workload: &Workload, volume: &str) -> String {
    headroom_pod_name(&workload.uid, &world.unique(volume).parse().unwrap())
}

async fn headroom(world: &World) -> BTreeMap<String, Pod> {
    let all = world.pod_api(&world.mountpoint_namespace).list(&ListParams::default()).await.unwrap();
    let pods = all.items.into_iter().filter(|it| it.metadata.deletion_timestamp.is_none());
    pods.map(|it| (it.metadata.name.clone().unwrap(), it)).filter(|(name, _)| name.starts_with("hr-")).collect()
}

/// Waits until the headroom Pods are these: workloads and volumes.
async fn check(world: &World, expected: &[(&Workload, &str)]) {
    let expected: BTreeSet<String> = expected.iter().map(|(workload, it)| name_of(world, workload, it)).collect();
    eventually(&format!("the headroom Pods are {expected:?}"), async || {
        let found: BTreeSet<String> = headroom(world).await.into_keys().collect();
        (found == expected).then_some(())
    })
    .await;
}

/// What a workload does that was admitted: the scheduler binds it, and it gets its Mountpoint Pod.
async fn mountpoint_pod(world: &World, workload: &Workload, volume: &str) -> Pod {
    world.schedule(workload, "node").await;
    let name = world.pod_of(workload, volume);
    eventually("the Mountpoint Pod exists", async || {
        world.pod_api(&world.mountpoint_namespace).get_opt(&name).await.unwrap()
    })
    .await
}

fn class(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.priority_class_name.as_deref()
}

#[tokio::test]
async fn c39_room_is_reserved_used_and_given_back() {
    let world = world("headroom").await;
    let _controller = start(&world, &["--headroom-pod-labels=team=storage,example.com/kind="]);
    let attributes =
        [("mountpointContainerResourcesRequestsCpu", "300m"), ("mountpointContainerResourcesLimitsMemory", "1Gi")];
    world.volume_with("pv", &[], &attributes).await;
    let a = gated(&world, "a", &["pv"], &[]).await;
    let admitted = wait_for_admission(&world, &a).await;
    assert_eq!(gates(&admitted), [""; 0]);
    let wanted = format!("{}/headroom-for-workload", world.driver);
    assert_eq!(label(&admitted, &wanted), Some(a.uid.as_str()));

    let pods = headroom(&world).await;
    assert_eq!(pods.len(), 1);
    let reserved = &pods[&name_of(&world, &a, "pv")];
    assert_eq!(class(reserved), Some(world.unique("headroom").as_str()));
    assert_eq!(label(reserved, &format!("{}/headroom-for-pod", world.driver)), Some(a.uid.as_str()));
    assert_eq!(label(reserved, &format!("{}/headroom-for-volume", world.driver)), Some(world.unique("pv").as_str()));
    // C49
    assert_eq!((label(reserved, "team"), label(reserved, "example.com/kind")), (Some("storage"), Some("")));
    let spec = reserved.spec.as_ref().unwrap();
    assert_eq!(spec.priority, Some(-10));
    let affinity = json!(spec.affinity.as_ref().unwrap().pod_affinity);
    let term = &affinity["requiredDuringSchedulingIgnoredDuringExecution"][0];
    assert_eq!(term["labelSelector"]["matchLabels"], json!({ wanted: a.uid.as_str() }));
    assert_eq!(term["namespaces"], json!([world.name]));

    let serving = mountpoint_pod(&world, &a, "pv").await;
    assert_eq!(class(&serving), Some(world.unique("preempting").as_str()));
    let resources = |pod: &Pod| pod.spec.as_ref().unwrap().containers[0].resources.clone();
    assert_eq!(resources(reserved), resources(&serving));
    assert_eq!(spec.tolerations, serving.spec.as_ref().unwrap().tolerations);
    check(&world, &[(&a, "pv")]).await;
    world.set_pod_phase(&a, "pv", "Running").await;
    check(&world, &[]).await;

    // What replaces a Mountpoint Pod of a running workload does not preempt. One watch reports all workloads, in order: a controller that
    // admits another one knows that this one runs.
    world.set_phase(&a, "Running").await;
    let b = gated(&world, "b", &["pv"], &[]).await;
    wait_for_admission(&world, &b).await;
    let pods = world.pod_api(&world.mountpoint_namespace);
    let name = serving.metadata.name.as_deref().unwrap();
    pods.delete(name, &DeleteParams::default().grace_period(0)).await.unwrap();
    let next = eventually("it is replaced", async || {
        pods.get_opt(name).await.unwrap().filter(|it| it.metadata.uid != serving.metadata.uid)
    })
    .await;
    assert_eq!(class(&next), Some(world.unique("critical").as_str()));
}

#[tokio::test]
async fn c40_each_volume_has_room_and_other_gates_stay() {
    let world = world("headroom-volumes").await;
    let _controller = start(&world, &[]);
    let mut theirs = world.order(&[], &[]);
    "ebs.csi.example.com".clone_into(&mut theirs.driver);
    world.create_volume("theirs", theirs).await;
    world.create_claim("theirs").await;
    world.bind("theirs").await;
    for volume in ["one", "two"] {
        world.volume(volume).await;
    }
    let a = gated(&world, "a", &["one", "theirs", "two"], &[OTHER_GATE]).await;
    assert_eq!(gates(&wait_for_admission(&world, &a).await), [OTHER_GATE]);
    check(&world, &[(&a, "one"), (&a, "two")]).await;
    // C41, C44: it ends before it was scheduled.
    world.remove(&a).await;
    check(&world, &[]).await;
}

#[tokio::test]
async fn c42_and_c43_headroom_ends_with_its_workload() {
    let world = world("headroom-ends").await;
    let _controller = start(&world, &[]);
    world.volume("pv").await;
    let mut workloads = Vec::new();
    for phase in ["Failed", "Succeeded", "Running"] {
        let workload = gated(&world, &phase.to_lowercase(), &["pv"], &[]).await;
        wait_for_admission(&world, &workload).await;
        workloads.push((workload, phase));
    }
    let terminating = gated(&world, "terminating", &["pv"], &[]).await;
    wait_for_admission(&world, &terminating).await;
    // Pods of one volume on one node would share a Mountpoint Pod: these are not scheduled, apart from the last one.
    world.schedule(&terminating, "node").await;
    let [first, second, third] = [&workloads[0].0, &workloads[1].0, &workloads[2].0];
    check(&world, &[(first, "pv"), (second, "pv"), (third, "pv"), (&terminating, "pv")]).await;
    for (workload, phase) in &workloads {
        world.set_phase(workload, phase).await;
    }
    check(&world, &[(&terminating, "pv")]).await;
    world.delete(&terminating).await;
    check(&world, &[]).await;
}

#[tokio::test]
async fn c45_workloads_without_volumes_of_ours_lose_just_the_gate() {
    let world = world("headroom-none").await;
    let _controller = start(&world, &[]);
    let mut theirs = world.order(&[], &[]);
    "ebs.csi.example.com".clone_into(&mut theirs.driver);
    world.create_volume("theirs", theirs).await;
    world.create_claim("theirs").await;
    world.bind("theirs").await;
    for (name, claims) in [("other", vec!["theirs"]), ("none", vec![])] {
        let workload = gated(&world, name, &claims, &[OTHER_GATE]).await;
        let admitted = wait_for_admission(&world, &workload).await;
        assert_eq!(gates(&admitted), [OTHER_GATE], "{name}");
        assert_eq!(label(&admitted, &format!("{}/headroom-for-workload", world.driver)), None, "{name}");
    }
    assert!(headroom(&world).await.is_empty());
}

#[tokio::test]
async fn c46_and_c47_the_gate_is_removed_when_every_claim_is_bound() {
    let world = world("headroom-unbound").await;
    let _controller = start(&world, &[]);
    world.volume("bound").await;
    world.create_volume("late", world.order(&[], &[])).await;
    let a = gated(&world, "a", &["bound", "late"], &[]).await;
    let waits = "Normal WaitingForClaims: room for Mountpoint Pods is reserved when every claim of the Pod is bound; claim late: the claim";
    wait_for_event(&world, &a, &format!("{waits} does not exist yet")).await;
    world.create_claim("late").await;
    wait_for_event(&world, &a, &format!("{waits} is not bound yet")).await;
    // Another one is admitted meanwhile.
    let b = gated(&world, "b", &["bound"], &[]).await;
    wait_for_admission(&world, &b).await;
    assert_eq!(gates(&pod(&world, &a).await).len(), 1);
    check(&world, &[(&b, "bound")]).await;
    world.bind("late").await;
    wait_for_admission(&world, &a).await;
    check(&world, &[(&a, "bound"), (&a, "late"), (&b, "bound")]).await;
}

#[tokio::test]
async fn a_mountpoint_pod_may_preempt_when_its_headroom_pod_was_evicted() {
    let world = world("headroom-evicted").await;
    let _controller = start(&world, &[]);
    world.volume("pv").await;
    let a = gated(&world, "a", &["pv"], &[]).await;
    wait_for_admission(&world, &a).await;
    let pods = world.pod_api(&world.mountpoint_namespace);
    pods.delete(&name_of(&world, &a, "pv"), &DeleteParams::default().grace_period(0)).await.unwrap();
    check(&world, &[]).await;
    let serving = mountpoint_pod(&world, &a, "pv").await;
    assert_eq!(class(&serving), Some(world.unique("preempting").as_str()));
    check(&world, &[]).await;
}

#[tokio::test]
async fn a_workload_that_shares_a_mountpoint_pod_gives_its_room_back() {
    let world = world("headroom-shared").await;
    let _controller = start(&world, &[]);
    world.volume("pv").await;
    let plain = world.workload("plain", on("node", &["pv"])).await;
    let name = world.pod_of(&plain, "pv");
    let pods = world.pod_api(&world.mountpoint_namespace);
    let first = eventually("the Mountpoint Pod exists", async || pods.get_opt(&name).await.unwrap()).await;
    assert_eq!(class(&first), Some(world.unique("critical").as_str()));
    let a = gated(&world, "a", &["pv"], &[]).await;
    wait_for_admission(&world, &a).await;
    check(&world, &[(&a, "pv")]).await;
    // The Pod that both wait for may need the room.
    world.schedule(&a, "node").await;
    check(&world, &[]).await;
    let shared = ["attachment pv on node: mp(plain)=a plain", "pod mp(plain) of pv on node: Pending"];
    eventually("it shares the Mountpoint Pod", async || {
        let state: Vec<String> = world.state(&[&a, &plain]).await;
        (state == shared).then_some(())
    })
    .await;
}

#[tokio::test]
async fn what_cannot_be_reserved_is_said_and_tried_again() {
    let world = world("headroom-refused").await;
    let missing = format!("--mountpoint-headroom-priority-class-name={}", world.unique("late"));
    let flags = ["--leader-election=off", "--reserve-headroom=on", missing.as_str()];
    let _controller = world.start_controller(&flags);
    world.volume("pv").await;
    let a = gated(&world, "a", &["pv"], &[]).await;
    wait_for_event(&world, &a, "Warning HeadroomNotReserved: failed to create headroom Pod hr-").await;
    assert_eq!(gates(&pod(&world, &a).await).len(), 1);
    let object = json!({
        "apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": { "name": world.unique("late") },
        "value": -1,
    });
    world.control_plane.apply(&object.to_string()).unwrap();
    wait_for_admission(&world, &a).await;
    check(&world, &[(&a, "pv")]).await;
}

#[tokio::test]
async fn nothing_is_left_of_a_feature_that_is_turned_off() {
    let world = world("headroom-off").await;
    let controller = start(&world, &[]);
    world.volume("pv").await;
    let a = gated(&world, "a", &["pv"], &[]).await;
    wait_for_admission(&world, &a).await;
    let gone = gated(&world, "gone", &["pv"], &[]).await;
    wait_for_admission(&world, &gone).await;
    drop(controller);
    world.remove(&gone).await;
    let controller = start(&world, &[]);
    check(&world, &[(&a, "pv")]).await;
    drop(controller);
    let b = gated(&world, "b", &["pv"], &[]).await;
    let _off = world.start_controller(&["--leader-election=off"]);
    check(&world, &[]).await;
    // It serves other workloads, and leaves the gate alone.
    let plain = world.workload("plain", on("node", &["pv"])).await;
    let name = world.pod_of(&plain, "pv");
    let pods = world.pod_api(&world.mountpoint_namespace);
    eventually("the Mountpoint Pod exists", async || pods.get_opt(&name).await.unwrap()).await;
    assert_eq!(gates(&pod(&world, &b).await).len(), 1);
}

/// The life of a workload with a controller that dies after the first call of a kind.
async fn check_crash(step: &str) {
    let world = world(step).await;
    let dying = start(&world, &[&format!("--stop-after={step}")]);
    world.volume("one").await;
    world.volume("two").await;
    let mut successor = None;
    let a = gated(&world, "a", &["one", "two"], &[]).await;
    let ours = format!("{}/reserve-headroom-for-mppod", world.driver);
    let mut survive = || {
        if !dying.is_running() && successor.is_none() {
            successor = Some(start(&world, &[]));
        }
    };
    eventually("the gate is removed", async || {
        survive();
        (!gates(&pod(&world, &a).await).contains(&ours.as_str())).then_some(())
    })
    .await;
    check(&world, &[(&a, "one"), (&a, "two")]).await;
    world.schedule(&a, "node").await;
    for volume in ["one", "two"] {
        let name = world.pod_of(&a, volume);
        eventually("the Mountpoint Pod exists", async || {
            survive();
            world.pod_api(&world.mountpoint_namespace).get_opt(&name).await.unwrap()
        })
        .await;
        world.set_pod_phase(&a, volume, "Running").await;
    }
    eventually("nothing is left", async || {
        survive();
        headroom(&world).await.is_empty().then_some(())
    })
    .await;
    assert!(dying.wait(SOON).is_some(), "the controller never got to {step}, so nothing was shown");
}

#[tokio::test]
async fn headroom_pod_created() {
    check_crash("headroom-pod-created").await;
}

#[tokio::test]
async fn gate_removed() {
    check_crash("gate-removed").await;
}

#[tokio::test]
async fn headroom_pod_deleted() {
    check_crash("headroom-pod-deleted").await;
}
