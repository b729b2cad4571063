//! Of several controllers one works; when it ends, another one does.

use k8s_openapi::api::coordination::v1::Lease;
use kube::Api;

use crate::world::objects::on;
use crate::world::{CONTROL_PLANE, World, eventually};

async fn holder(world: &World) -> Option<String> {
    let leases: Api<Lease> = Api::namespaced(world.client.clone(), "default");
    leases.get_opt(&world.name).await.unwrap()?.spec?.holder_identity
}

async fn wait_for_holder(world: &World, identity: &str) {
    eventually(&format!("{identity} holds the Lease"), async || {
        (holder(world).await.as_deref() == Some(identity)).then_some(())
    })
    .await;
}

#[tokio::test]
async fn the_successor_of_a_killed_controller_goes_on() {
    let world = World::own(&CONTROL_PLANE, "killed").await;
    let flags = |identity| [identity, "--lease-duration=3"];
    let first = world.start_controller(&flags("--identity=first"));
    wait_for_holder(&world, "first").await;
    let second = world.start_controller(&flags("--identity=second"));
    world.volume("pv").await;
    let a = world.workload("a", on("node", &["pv"])).await;
    world.check(&[&a], &["attachment pv on node: mp(a)=a", "pod mp(a) of pv on node: Pending"]).await;
    assert!(!second.log_contains("became leader"), "two work at once");

    first.kill();
    wait_for_holder(&world, "second").await;
    let b = world.workload("b", on("node", &["pv"])).await;
    world.check(&[&a, &b], &["attachment pv on node: mp(a)=a b", "pod mp(a) of pv on node: Pending"]).await;
}

#[tokio::test]
async fn a_controller_that_is_asked_to_end_gives_the_lease_back() {
    let world = World::own(&CONTROL_PLANE, "resigned").await;
    // Longer than this test could wait for its end.
    let flags = |identity| [identity, "--lease-duration=600"];
    let first = world.start_controller(&flags("--identity=first"));
    wait_for_holder(&world, "first").await;
    assert!(first.terminate().success());
    assert_eq!(holder(&world).await, None);
    let _second = world.start_controller(&flags("--identity=second"));
    wait_for_holder(&world, "second").await;
}
