//! `ReadWriteOnce`: Kubernetes does not enforce it for drivers without an attach operation, so the controller does.

use serde_json::json;

use crate::reports::wait_for_event;
use crate::world::objects::on;
use crate::world::{World, eventually};

#[tokio::test]
async fn a_volume_for_one_node_is_served_on_one_node_at_a_time() {
    let world = World::shared("single-node").await;
    world.volume("pv").await;
    world.edit_volume("pv", json!({ "spec": { "accessModes": ["ReadWriteOnce"] } })).await;
    let a = world.workload("a", on("one", &["pv"])).await;
    let first = "attachment pv on one: mp(a)=a";
    eventually("the first is attached", async || world.state(&[&a]).await.contains(&first.to_owned()).then_some(()))
        .await;

    let b = world.workload("b", on("two", &["pv"])).await;
    let refused = format!(
        "Warning VolumeNotServed: the volume is ReadWriteOnce and in use on node {} by Pod {}/a",
        world.unique("one"),
        a.namespace
    );
    wait_for_event(&world, &b, &refused).await;
    let state = world.state(&[&a, &b]).await;
    assert!(state.iter().all(|it| !it.contains("on two")), "{state:?}");

    // A second Pod on the same node may share it.
    let c = world.workload("c", on("one", &["pv"])).await;
    let both = "attachment pv on one: mp(a)=a c";
    eventually("the third shares it", async || {
        world.state(&[&a, &b, &c]).await.iter().any(|it| it == both).then_some(())
    })
    .await;

    world.remove(&a).await;
    world.remove(&c).await;
    eventually("the second node is served", async || {
        world.state(&[&a, &b, &c]).await.contains(&"attachment pv on two: mp(b)=b".to_owned()).then_some(())
    })
    .await;
}

/// Workers for two nodes must not both find the volume unused.
#[tokio::test]
async fn two_nodes_at_once_do_not_both_get_the_volume() {
    let world = World::shared("single-node-race").await;
    for number in 0..10 {
        let volume = format!("pv-{number}");
        world.volume(&volume).await;
        world.edit_volume(&volume, json!({ "spec": { "accessModes": ["ReadWriteOncePod"] } })).await;
        let names = [format!("a-{number}"), format!("b-{number}")];
        let (a, b) = tokio::join!(
            world.workload(&names[0], on("one", &[&volume])),
            world.workload(&names[1], on("two", &[&volume])),
        );
        let attachments = || async {
            let state = world.state(&[&a, &b]).await;
            state.into_iter().filter(|it| it.starts_with(&format!("attachment {volume} "))).count()
        };
        eventually("one of them is attached", async || (0 < attachments().await).then_some(())).await;
        let waits = "the volume is ReadWriteOnce and in use on node";
        tokio::select! {
            _ = wait_for_event(&world, &a, waits) => {}
            _ = wait_for_event(&world, &b, waits) => {}
        }
        assert_eq!(attachments().await, 1, "{volume}");
    }
}
