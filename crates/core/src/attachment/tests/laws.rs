//! The laws of the controller, in random worlds: it settles, every living workload ends up with exactly one Mountpoint Pod,
//! and none that serves a living workload is ever retired.

use proptest::prelude::*;

use super::world::{Controller, Part, Trust, WorkloadState, World};
use super::*;

/// Something that happens. Numbers choose among what there is.
#[derive(Clone, Debug)]
enum Event {
    WorkloadAppears {
        has_fs_group: bool,
    },
    WorkloadRunsOnSystemd,
    WorkloadStarts(usize),
    WorkloadTerminates(usize),
    WorkloadEnds(usize),
    WorkloadIsRemoved(usize),
    WarmPodAppears,
    /// By the source of another volume.
    WarmPodIsAdopted(usize),
    PodRuns(usize),
    PodFails(usize),
    PodIsDeleted(usize),
    PodDisappears(usize),
    PodEndsIfRetired(usize),
    /// The driver was upgraded since it was started.
    PodIsOutdated(usize),
    UserRetires(usize),
    UserDrains(usize),
    UserDeletesAttachment(usize),
    UserEditsVolume,
    OldDriverAttaches(usize),
    TimePasses(i64),
    Catches {
        controller: usize,
        part: Part,
    },
    Decides(usize),
    Advances(usize),
    Crashes(usize),
    /// Everything at once, as it usually goes.
    Reconciles(usize),
    /// The same, but it comes no further than this many calls for now.
    ReconcilesPartly {
        controller: usize,
        calls: usize,
    },
    NodesWork,
}

const CONTROLLERS: usize = 2;

/// More than enough for every chain of consequences; a world that needs more does not settle.
const ROUNDS: usize = 60;

proptest! {
    #![proptest_config(ProptestConfig { cases: 10_000, ..ProptestConfig::default() })]

    #[test]
    fn every_living_workload_is_served_by_exactly_one_pod_that_is_never_retired(
        events in prop::collection::vec(events(), 0..90),
    ) {
        live_through(&events, Trust::Reads).map_err(TestCaseError::fail)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_500, ..ProptestConfig::default() })]

    #[test]
    fn what_two_controllers_with_old_caches_break_is_repaired(events in prop::collection::vec(events(), 0..90)) {
        live_through(&events, Trust::Cache).map_err(TestCaseError::fail)?;
    }

    #[test]
    fn the_order_of_facts_does_not_matter(events in prop::collection::vec(events(), 0..40)) {
        let mut world = World::new(Trust::Reads);
        let mut controllers = [Controller::default(), Controller::default()];
        for event in events {
            happen(&mut world, &mut controllers, &event).map_err(TestCaseError::fail)?;
        }
        let observed = world.facts.observe(&BTreeSet::new());
        let mut reversed = observed.clone();
        reversed.workloads.reverse();
        reversed.attachments.reverse();
        reversed.mountpoint_pods.reverse();
        reversed.warm_pods.reverse();
        prop_assert_eq!(decide(&observed, at(world.now)), decide(&reversed, at(world.now)));
    }
}

fn events() -> impl Strategy<Value = Event> {
    let index = || 0..6_usize;
    let controller = || 0..CONTROLLERS;
    let part = prop_oneof![
        Just(Part::Workloads),
        Just(Part::WorkloadsWithoutDeletions),
        Just(Part::Pods),
        Just(Part::Attachments),
        Just(Part::Volume),
    ];
    let users = prop_oneof![
        6 => any::<bool>().prop_map(|has_fs_group| Event::WorkloadAppears { has_fs_group }),
        1 => Just(Event::WorkloadRunsOnSystemd),
        4 => index().prop_map(Event::WorkloadStarts),
        3 => index().prop_map(Event::WorkloadTerminates),
        4 => index().prop_map(Event::WorkloadEnds),
        4 => index().prop_map(Event::WorkloadIsRemoved),
        1 => index().prop_map(Event::UserRetires),
        1 => index().prop_map(Event::UserDrains),
        1 => index().prop_map(Event::UserDeletesAttachment),
        2 => Just(Event::UserEditsVolume),
        2 => index().prop_map(Event::OldDriverAttaches),
    ];
    let nodes = prop_oneof![
        3 => Just(Event::WarmPodAppears),
        1 => index().prop_map(Event::WarmPodIsAdopted),
        4 => index().prop_map(Event::PodRuns),
        2 => index().prop_map(Event::PodFails),
        2 => index().prop_map(Event::PodIsDeleted),
        2 => index().prop_map(Event::PodDisappears),
        3 => index().prop_map(Event::PodEndsIfRetired),
        2 => index().prop_map(Event::PodIsOutdated),
        2 => Just(Event::NodesWork),
        3 => (1..150_i64).prop_map(Event::TimePasses),
    ];
    let controllers = prop_oneof![
        6 => (controller(), part).prop_map(|(controller, part)| Event::Catches { controller, part }),
        5 => controller().prop_map(Event::Decides),
        10 => controller().prop_map(Event::Advances),
        1 => controller().prop_map(Event::Crashes),
        4 => controller().prop_map(Event::Reconciles),
        6 => (controller(), 0..4_usize)
            .prop_map(|(controller, calls)| Event::ReconcilesPartly { controller, calls }),
    ];
    prop_oneof![4 => users, 2 => nodes, 6 => controllers]
}

/// Everything happens, interrupted controllers continue, and then nothing changes any more.
fn live_through(events: &[Event], trust: Trust) -> Result<(), String> {
    let mut world = World::new(trust);
    let mut controllers = [Controller::default(), Controller::default()];
    for event in events {
        happen(&mut world, &mut controllers, event)?;
        world.check()?;
    }
    for controller in &mut controllers {
        finish(&mut world, controller, usize::MAX)?;
    }
    settle(&mut world)?;
    world.check_settled()
}

fn happen(world: &mut World, controllers: &mut [Controller], event: &Event) -> Result<(), String> {
    match *event {
        Event::WorkloadAppears { has_fs_group } => world.add_workload(PodPhase::Pending, has_fs_group),
        Event::WorkloadRunsOnSystemd => world.add_workload(PodPhase::Running, false),
        Event::WorkloadStarts(index) => {
            if let Some(workload) = pick(world.facts.workloads.keys(), index) {
                world.start_workload(&workload);
            }
        }
        Event::WorkloadTerminates(index) => change_workload(world, index, |it| it.is_terminating = true),
        Event::WorkloadEnds(index) => change_workload(world, index, |it| it.phase = PodPhase::Succeeded),
        Event::WorkloadIsRemoved(index) => {
            if let Some(workload) = pick(world.facts.workloads.keys(), index) {
                world.facts.workloads.remove(&workload);
            }
        }
        Event::OldDriverAttaches(index) => {
            let waiting = world.facts.workloads.iter().filter(|(_, it)| it.activity() == Activity::Starting);
            if let Some(workload) = pick(waiting.map(|(it, _)| it), index) {
                world.attach_as_before(&workload);
            }
        }
        Event::WarmPodAppears => world.add_warm_pod(),
        Event::WarmPodIsAdopted(index) => {
            if let Some(name) = pick(world.facts.warm.keys(), index) {
                let version = world.facts.warm[&name].resource_version.clone();
                world.adopt(&name, &version, None)?;
            }
        }
        Event::PodRuns(index) => change_pod(world, index, |it| {
            if it.phase == PodPhase::Pending {
                it.phase = PodPhase::Running;
            }
        }),
        Event::PodFails(index) => change_pod(world, index, |it| it.phase = PodPhase::Failed),
        Event::PodIsDeleted(index) => change_pod(world, index, |it| it.is_terminating = true),
        Event::PodDisappears(index) => {
            if let Some(pod) = pick(world.facts.pods.keys(), index) {
                world.facts.pods.remove(&pod);
            }
        }
        Event::PodEndsIfRetired(index) => change_pod(world, index, |it| {
            if it.is_retired && it.phase == PodPhase::Running {
                it.phase = PodPhase::Succeeded;
            }
        }),
        Event::PodIsOutdated(index) => change_pod(world, index, |it| it.driver_version = Some("1.99".to_owned())),
        Event::UserRetires(index) => change_pod(world, index, |it| it.is_retired = true),
        Event::UserDrains(index) => change_pod(world, index, |it| it.refuses_new_workloads = true),
        Event::UserDeletesAttachment(index) => {
            if let Some(attachment) = pick(world.facts.attachments.keys(), index) {
                world.delete_attachment_by_hand(&attachment);
            }
        }
        Event::UserEditsVolume => world.facts.edits = world.facts.edits % 3 + 1,
        Event::TimePasses(seconds) => world.now += seconds,
        Event::Catches { controller, part } => controllers[controller].catch_up(world, part),
        Event::Decides(controller) => {
            // One worker at a time works on one PV of one node.
            if controllers[controller].steps.is_empty() {
                controllers[controller].decide(world);
            }
        }
        Event::Advances(controller) => controllers[controller].step(world)?,
        Event::Crashes(controller) => controllers[controller].crash(),
        Event::Reconciles(controller) => reconcile(world, &mut controllers[controller], usize::MAX)?,
        Event::ReconcilesPartly { controller, calls } => reconcile(world, &mut controllers[controller], calls)?,
        Event::NodesWork => {
            world.let_nodes_work();
        }
    }
    Ok(())
}

fn reconcile(world: &mut World, controller: &mut Controller, calls: usize) -> Result<(), String> {
    finish(world, controller, usize::MAX)?;
    controller.catch_up_fully(world);
    controller.decide(world);
    finish(world, controller, calls)
}

/// Makes the calls that are left, or the first of them.
fn finish(world: &mut World, controller: &mut Controller, calls: usize) -> Result<(), String> {
    for _ in 0..calls {
        if controller.steps.is_empty() {
            break;
        }
        controller.step(world)?;
        world.check()?;
    }
    Ok(())
}

/// A controller that was just started and sees the truth, until nothing is left to do or to wait for.
fn settle(world: &mut World) -> Result<(), String> {
    let mut controller = Controller::default();
    for _ in 0..ROUNDS {
        controller.catch_up_fully(world);
        let decision = controller.decide(world);
        let has_nothing_to_do = decision.is_settled() && decision.requeue_after.is_none();
        finish(world, &mut controller, usize::MAX)?;
        let is_quiet = !world.let_nodes_work();
        world.check()?;
        if has_nothing_to_do && is_quiet {
            return Ok(());
        }
        world.now += 15;
    }
    Err("the world does not settle".to_owned())
}

fn pick<'a, T: Clone + 'a>(from: impl Iterator<Item = &'a T>, index: usize) -> Option<T> {
    let all: Vec<&T> = from.collect();
    let chosen = index.checked_rem(all.len())?;
    all.get(chosen).map(|it| (*it).clone())
}

/// A workload that is over stays so.
fn change_workload(world: &mut World, index: usize, change: impl FnOnce(&mut WorkloadState)) {
    let live = world.facts.workloads.iter().filter(|(_, it)| it.activity().is_live()).map(|(it, _)| it);
    if let Some(workload) = pick(live, index)
        && let Some(state) = world.facts.workloads.get_mut(&workload)
    {
        change(state);
    }
}

/// A Pod that has finished stays so.
fn change_pod(world: &mut World, index: usize, change: impl FnOnce(&mut MountpointPod)) {
    let unfinished = world.facts.pods.iter().filter(|(_, it)| !it.phase.is_finished()).map(|(it, _)| it);
    if let Some(pod) = pick(unfinished, index) {
        world.touch_pod(&pod, change);
    }
}
