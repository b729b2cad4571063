//! The controller is killed between any two calls, and the next one repairs: nothing is lost, doubled or retired in use.

use clap::ValueEnum as _;
use s3csi_driver::controller::failpoints::Failpoint;
use s3csi_testbed::wait::SOON;

use crate::world::objects::on;
use crate::world::{CONTROL_PLANE, World};

const OFF: &str = "--leader-election=off";

/// The life of two workloads that share a Mountpoint Pod, with a controller that dies after the first call of a kind.
async fn check(step: Failpoint) {
    let name = step.to_possible_value().unwrap().get_name().to_owned();
    let world = World::own(&CONTROL_PLANE, &name).await;
    let flag = format!("--stop-after={name}");
    let dying = world.start_controller(&[OFF, &flag]);
    let next = || {
        let controller = world.start_controller(&[OFF]);
        assert!(dying.wait(std::time::Duration::ZERO).is_some());
        controller
    };
    let mut successor = None;
    let mut survive = || {
        if !dying.is_running() && successor.is_none() {
            successor = Some(next());
        }
    };
    world.volume("pv").await;
    let a = world.workload("a", on("node", &["pv"])).await;
    let started = ["attachment pv on node: mp(a)=a", "pod mp(a) of pv on node: Pending"];
    wait_through(&world, &mut survive, &[&a], &started).await;
    world.set_pod_phase(&a, "pv", "Running").await;
    let b = world.workload("b", on("node", &["pv"])).await;
    let shared = ["attachment pv on node: mp(a)=a b", "pod mp(a) of pv on node: Running"];
    wait_through(&world, &mut survive, &[&a, &b], &shared).await;
    world.remove(&a).await;
    let one_left = ["attachment pv on node: mp(a)=b", "pod mp(a) of pv on node: Running"];
    wait_through(&world, &mut survive, &[&a, &b], &one_left).await;
    world.remove(&b).await;
    wait_through(&world, &mut survive, &[&a, &b], &["pod mp(a) of pv on node: Running retired"]).await;
    world.set_pod_phase(&a, "pv", "Succeeded").await;
    wait_through(&world, &mut survive, &[&a, &b], &[]).await;
    // The last call is seen by everybody before its answer is.
    assert!(dying.wait(SOON).is_some(), "the controller never got to {name}, so nothing was shown");
}

/// Waits for a state, and starts the next controller when the first one dies on the way.
async fn wait_through(
    world: &World,
    survive: &mut impl FnMut(),
    workloads: &[&crate::world::Workload],
    expected: &[&str],
) {
    let mut found = Vec::new();
    let what = format!("{expected:?}");
    crate::world::eventually(&what, async || {
        survive();
        found = world.state(workloads).await;
        (found == expected).then_some(())
    })
    .await;
}

#[tokio::test]
async fn attachment_created() {
    check(Failpoint::AttachmentCreated).await;
}

#[tokio::test]
async fn attachment_edited() {
    check(Failpoint::AttachmentEdited).await;
}

#[tokio::test]
async fn pod_started() {
    check(Failpoint::PodStarted).await;
}

#[tokio::test]
async fn pod_retired() {
    check(Failpoint::PodRetired).await;
}

#[tokio::test]
async fn pod_deleted() {
    check(Failpoint::PodDeleted).await;
}

#[tokio::test]
async fn attachment_deleted() {
    check(Failpoint::AttachmentDeleted).await;
}

#[tokio::test]
async fn status_written() {
    check(Failpoint::StatusWritten).await;
}

#[tokio::test]
async fn event_written() {
    check(Failpoint::EventWritten).await;
}
