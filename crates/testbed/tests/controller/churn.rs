//! Two controllers at once, both at work, while two hundred Pods come and go.

use std::collections::{BTreeMap, BTreeSet};

use futures::StreamExt as _;
use s3csi_driver::api::attachment_facts;

use crate::world::objects::on;
use crate::world::{CONTROL_PLANE, Workload, World, eventually};

const VOLUMES: usize = 5;
const NODES: usize = 4;
const PODS: usize = 200;

fn volume(number: usize) -> String {
    format!("pv{}", number % VOLUMES)
}

/// Every living workload is attached once, every entry has a Pod, and nothing else is there.
async fn is_right(world: &World, living: &BTreeMap<String, String>) -> Result<(), String> {
    let mut attached: BTreeMap<String, String> = BTreeMap::new();
    let mut named = BTreeSet::new();
    for object in world.attachments().await {
        let attachment = attachment_facts(&object).unwrap();
        if attachment.entries.is_empty() {
            return Err(format!("{} is empty", attachment.name));
        }
        for (pod, entries) in attachment.entries {
            for entry in entries {
                let place = format!("{} {pod}", attachment.name);
                if let Some(other) = attached.insert(entry.workload.as_str().to_owned(), place.clone()) {
                    return Err(format!("{} is at {place} and at {other}", entry.workload));
                }
            }
            if !named.insert(pod.clone()) {
                return Err(format!("{pod} is named twice"));
            }
        }
    }
    let (attached, living): (BTreeSet<&String>, BTreeSet<&String>) =
        (attached.keys().collect(), living.keys().collect());
    if attached != living {
        return Err(format!("{} attached, {} living", attached.len(), living.len()));
    }
    let pods: BTreeSet<String> =
        world.mountpoint_pods().await.into_iter().map(|it| it.metadata.name.unwrap()).collect();
    if pods != named {
        return Err(format!("{} Pods, {} named", pods.len(), named.len()));
    }
    Ok(())
}

async fn wait_until_right(world: &World, living: &BTreeMap<String, String>) {
    let mut problem = String::new();
    let what = format!("{} workloads are served, each once", living.len());
    eventually(&what, async || {
        let outcome = is_right(world, living).await;
        if let Err(found) = &outcome
            && *found != problem
        {
            problem.clone_from(found);
            eprintln!("not yet: {problem}");
        }
        outcome.ok()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_controllers_at_once_leave_no_duplicate_and_no_orphan() {
    let world = World::own(&CONTROL_PLANE, "churn").await;
    let first = world.start_controller(&["--leader-election=off"]);
    let _second = world.start_controller(&["--leader-election=off"]);
    let _nodes = world.play_nodes();
    for number in 0..VOLUMES {
        world.volume(&volume(number)).await;
    }
    let create = async |number: usize| {
        let order = on(&format!("node{}", number / VOLUMES % NODES), &[&volume(number)]);
        let workload = world.workload(&format!("w{number}"), order).await;
        // Every third is gone at once, every third is gone later, the rest stays.
        if number.is_multiple_of(3) {
            world.remove(&workload).await;
        }
        (number, workload)
    };
    let made: Vec<(usize, Workload)> = futures::stream::iter(0..PODS).map(create).buffer_unordered(16).collect().await;
    let living = |is_living: fn(usize) -> bool| -> BTreeMap<String, String> {
        let living = made.iter().filter(|(number, _)| is_living(*number));
        living.map(|(_, it)| (it.uid.as_str().to_owned(), it.name.clone())).collect()
    };
    // One of the two is replaced in the middle of it.
    first.kill();
    let _third = world.start_controller(&["--leader-election=off"]);
    wait_until_right(&world, &living(|it| it % 3 != 0)).await;

    let remove = |wanted: usize| {
        let chosen: Vec<&Workload> = made.iter().filter(|(it, _)| it % 3 == wanted).map(|(_, it)| it).collect();
        futures::stream::iter(chosen).for_each_concurrent(16, |it| world.remove(it))
    };
    remove(1).await;
    wait_until_right(&world, &living(|it| it % 3 == 2)).await;
    remove(2).await;
    wait_until_right(&world, &BTreeMap::new()).await;
}
