//! The rules by example, and the laws in random worlds: a pool reaches its size, never exceeds it, and leaves nothing behind.

use std::collections::{BTreeMap, VecDeque};

use proptest::prelude::*;

use super::*;

const NOW: i64 = 1_000_000;
const VERSION: &str = "2.0";
const NODE: &str = "node";

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_unix_seconds(seconds)
}

fn template() -> PodTemplate {
    PodTemplate::of_spec("spec")
}

fn warm_pod(number: usize, phase: PodPhase) -> MountpointPod {
    let name = warm_pod_name(NODE, number);
    MountpointPod {
        source: name.clone(),
        uid: format!("uid {number}"),
        name,
        resource_version: "5".to_owned(),
        phase,
        is_terminating: false,
        is_retired: false,
        refuses_new_workloads: false,
        driver_version: Some(VERSION.to_owned()),
        is_mounted: false,
        is_movable: false,
        created_at: at(NOW - 60 + i64::try_from(number).unwrap()),
        problem: None,
        warm: Some(template()),
    }
}

fn pool(size: usize, warm_pods: Vec<MountpointPod>) -> ObservedPool {
    ObservedPool {
        node: NODE.to_owned(),
        size,
        plugin: NodePlugin::Registered,
        driver_version: VERSION.to_owned(),
        template: template(),
        taken_names: warm_pods.iter().map(|it| it.name.clone()).collect(),
        warm_pods,
    }
}

/// `+1` starts the warm Pod of this number, `-1` deletes it, `30 s` is when to look again.
#[track_caller]
fn check(observed: &ObservedPool, expected: &[&str]) {
    let decision = decide(observed, at(NOW));
    let number = |name: &str| (0..9).find(|it| warm_pod_name(NODE, *it) == name).unwrap();
    let mut lines: Vec<String> = decision
        .actions
        .iter()
        .map(|it| match it {
            PoolAction::Start { name } => format!("+{}", number(name)),
            PoolAction::Delete { name, uid, resource_version } => {
                assert!(!uid.is_empty() && resource_version == "5");
                format!("-{}", number(name))
            }
        })
        .collect();
    lines.extend(decision.requeue_after.map(|it| format!("{} s", it.as_secs())));
    assert_eq!(lines, expected);
}

#[test]
fn a_pool_is_filled_to_its_size() {
    check(&pool(0, vec![]), &[]);
    check(&pool(2, vec![]), &["+0", "+1"]);
    check(&pool(2, vec![warm_pod(0, PodPhase::Pending)]), &["+1"]);
    check(&pool(2, vec![warm_pod(0, PodPhase::Running), warm_pod(1, PodPhase::Pending)]), &[]);
}

#[test]
fn names_that_are_taken_are_left_out() {
    let adopted = ObservedPool { taken_names: [0, 2].map(|it| warm_pod_name(NODE, it)).into(), ..pool(3, vec![]) };
    check(&adopted, &["+1", "+3", "+4"]);
    let ending = MountpointPod { is_terminating: true, ..warm_pod(0, PodPhase::Running) };
    check(&pool(1, vec![ending]), &["+1"]);
}

#[test]
fn a_pool_that_shrinks_keeps_those_that_run_and_the_oldest() {
    let pods = || vec![warm_pod(0, PodPhase::Pending), warm_pod(1, PodPhase::Running), warm_pod(2, PodPhase::Running)];
    check(&pool(2, pods()), &["-0"]);
    check(&pool(1, pods()), &["-2", "-0"]);
    check(&pool(0, pods()), &["-1", "-2", "-0"]);
}

#[test]
fn pods_that_no_source_would_adopt_are_replaced() {
    let check_change = |change: fn(&mut MountpointPod)| {
        let mut pod = warm_pod(0, PodPhase::Running);
        change(&mut pod);
        check(&pool(1, vec![pod]), &["-0", "+1"]);
    };
    check_change(|it| it.driver_version = Some("1.9".to_owned()));
    check_change(|it| it.warm = Some(PodTemplate::of_spec("other")));
    check_change(|it| it.is_retired = true);
    check_change(|it| it.refuses_new_workloads = true);
    check_change(|it| it.phase = PodPhase::Succeeded);
}

#[test]
fn a_pod_that_fails_at_once_is_not_replaced_at_once() {
    let failed = |age| MountpointPod { created_at: at(NOW - age), ..warm_pod(0, PodPhase::Failed) };
    check(&pool(1, vec![failed(3)]), &["7 s"]);
    check(&pool(2, vec![failed(3)]), &["+1", "7 s"]);
    check(&pool(1, vec![failed(10)]), &["-0", "+1"]);
}

#[test]
fn a_node_whose_plugin_restarts_keeps_its_pods_for_two_minutes() {
    let given = |size, since| ObservedPool {
        plugin: NodePlugin::Missing { since: at(NOW - since) },
        ..pool(size, vec![warm_pod(0, PodPhase::Running), warm_pod(1, PodPhase::Running)])
    };
    check(&given(3, 10), &["110 s"]);
    check(&given(1, 10), &["-1", "110 s"]);
    check(&given(3, 120), &["-0", "-1"]);
    check(&ObservedPool { plugin: NodePlugin::NoNode, ..given(3, 0) }, &["-0", "-1"]);
}

/// The Pods of a node as they really are, and two controllers with caches of them.
#[derive(Default)]
struct World {
    now: i64,
    serial: u64,
    size: usize,
    upgrades: u8,
    plugin: Option<NodePlugin>,
    pods: BTreeMap<String, MountpointPod>,
    adopted: BTreeSet<String>,
    controllers: [Controller; 2],
}

#[derive(Default)]
struct Controller {
    cache: BTreeMap<String, MountpointPod>,
    steps: VecDeque<PoolAction>,
}

#[derive(Clone, Debug)]
enum Event {
    PodRuns(usize),
    PodFails(usize),
    PodIsDeleted(usize),
    PodDisappears(usize),
    /// By a controller that sees its cache.
    SourceAdopts(usize, usize),
    SizeChanges(usize),
    DriverIsUpgraded,
    PluginRestarts,
    PluginReturns,
    NodeGoes,
    TimePasses(i64),
    CatchesUp(usize),
    Decides(usize),
    Advances(usize),
    Crashes(usize),
    Reconciles(usize),
}

fn events() -> impl Strategy<Value = Event> {
    let (index, controller) = (|| 0..6_usize, || 0..2_usize);
    prop_oneof![
        4 => index().prop_map(Event::PodRuns),
        2 => index().prop_map(Event::PodFails),
        2 => index().prop_map(Event::PodIsDeleted),
        2 => index().prop_map(Event::PodDisappears),
        6 => (controller(), index()).prop_map(|(controller, index)| Event::SourceAdopts(controller, index)),
        1 => (0..4_usize).prop_map(Event::SizeChanges),
        1 => Just(Event::DriverIsUpgraded),
        1 => Just(Event::PluginRestarts),
        2 => Just(Event::PluginReturns),
        1 => Just(Event::NodeGoes),
        3 => (1..150_i64).prop_map(Event::TimePasses),
        4 => controller().prop_map(Event::CatchesUp),
        4 => controller().prop_map(Event::Decides),
        8 => controller().prop_map(Event::Advances),
        1 => controller().prop_map(Event::Crashes),
        6 => controller().prop_map(Event::Reconciles),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3_000, ..ProptestConfig::default() })]

    #[test]
    fn a_pool_settles_at_its_size_and_no_pod_is_adopted_twice(events in prop::collection::vec(events(), 0..90)) {
        let mut world = World { now: NOW, size: 2, plugin: Some(NodePlugin::Registered), ..World::default() };
        for event in &events {
            world.happen(event).map_err(TestCaseError::fail)?;
        }
        world.settle().map_err(TestCaseError::fail)?;
    }

    #[test]
    fn one_controller_never_has_more_than_its_size(events in prop::collection::vec(events(), 0..60)) {
        let mut world = World { now: NOW, size: 2, plugin: Some(NodePlugin::Registered), ..World::default() };
        for event in &events {
            match event {
                Event::CatchesUp(_) | Event::Decides(_) | Event::Advances(_) | Event::Reconciles(_) => {
                    world.reconcile(0).map_err(TestCaseError::fail)?;
                    let count = world.warm().filter(|it| !it.is_terminating && !it.phase.is_finished()).count();
                    prop_assert!(count <= world.size, "{} warm Pods, size {}", count, world.size);
                }
                event => world.happen(event).map_err(TestCaseError::fail)?,
            }
        }
    }
}

impl World {
    fn happen(&mut self, event: &Event) -> Result<(), String> {
        match *event {
            Event::PodRuns(index) => self.touch(index, |it| it.phase = PodPhase::Running),
            Event::PodFails(index) => self.touch(index, |it| it.phase = PodPhase::Failed),
            Event::PodIsDeleted(index) => self.touch(index, |it| it.is_terminating = true),
            Event::PodDisappears(index) => {
                if let Some(name) = self.pods.keys().nth(index).cloned() {
                    self.pods.remove(&name);
                }
            }
            Event::SourceAdopts(controller, index) => {
                let template = self.template();
                let seen = self.controllers[controller].cache.values().filter(|it| it.warm.is_some()).nth(index);
                if let Some(seen) = seen.filter(|it| it.is_ready_for(&template, VERSION)).cloned() {
                    self.adopt(&seen)?;
                }
            }
            Event::SizeChanges(size) => self.size = size,
            Event::DriverIsUpgraded => self.upgrades += 1,
            Event::PluginRestarts => self.plugin = Some(NodePlugin::Missing { since: at(self.now) }),
            Event::PluginReturns => self.plugin = Some(NodePlugin::Registered),
            Event::NodeGoes => self.plugin = Some(NodePlugin::NoNode),
            Event::TimePasses(seconds) => self.now += seconds,
            Event::CatchesUp(controller) => self.controllers[controller].cache.clone_from(&self.pods),
            Event::Decides(controller) => self.decide(controller),
            Event::Advances(controller) => self.step(controller)?,
            Event::Crashes(controller) => self.controllers[controller].steps.clear(),
            Event::Reconciles(controller) => self.reconcile(controller)?,
        }
        Ok(())
    }

    /// The versions of driver and settings change together.
    fn template(&self) -> PodTemplate {
        PodTemplate::of_spec(&self.upgrades.to_string())
    }

    fn warm(&self) -> impl Iterator<Item = &MountpointPod> {
        self.pods.values().filter(|it| it.warm.is_some())
    }

    fn next(&mut self) -> String {
        self.serial += 1;
        self.serial.to_string()
    }

    fn touch(&mut self, index: usize, change: impl FnOnce(&mut MountpointPod)) {
        let version = self.next();
        if let Some(pod) = self.pods.values_mut().filter(|it| !it.phase.is_finished()).nth(index) {
            change(pod);
            pod.resource_version = version;
        }
    }

    fn adopt(&mut self, seen: &MountpointPod) -> Result<(), String> {
        let version = self.next();
        match self.pods.get_mut(&seen.name).filter(|it| it.resource_version == seen.resource_version) {
            Some(pod) if !self.adopted.insert(pod.uid.clone()) => Err(format!("{} was adopted twice", pod.name)),
            Some(pod) => {
                (pod.warm, pod.resource_version) = (None, version);
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn decide(&mut self, controller: usize) {
        let (template, now) = (self.template(), at(self.now));
        let (size, plugin) = (self.size, self.plugin.unwrap_or(NodePlugin::NoNode));
        let controller = &mut self.controllers[controller];
        let warm_pods = controller.cache.values().filter(|it| it.warm.is_some()).cloned().collect();
        let taken_names = controller.cache.keys().cloned().collect();
        let observed = ObservedPool { plugin, template, taken_names, ..pool(size, warm_pods) };
        controller.steps = decide(&observed, now).actions.into();
    }

    fn step(&mut self, controller: usize) -> Result<(), String> {
        match self.controllers[controller].steps.pop_front() {
            None => {}
            Some(PoolAction::Start { name }) => {
                let (uid, resource_version, template) = (self.next(), self.next(), self.template());
                let created_at = at(self.now);
                let pod = MountpointPod {
                    name: name.clone(),
                    uid,
                    resource_version,
                    created_at,
                    warm: Some(template),
                    ..warm_pod(0, PodPhase::Pending)
                };
                let pod = self.pods.entry(name.clone()).or_insert(pod);
                self.controllers[controller].cache.insert(name, pod.clone());
            }
            Some(PoolAction::Delete { name, uid, resource_version }) => {
                let found = self.pods.get(&name);
                if let Some(pod) = found.filter(|it| it.uid == uid && it.resource_version == resource_version) {
                    if pod.warm.is_none() {
                        return Err(format!("{name} was deleted although it was adopted"));
                    }
                    self.pods.remove(&name);
                }
            }
        }
        Ok(())
    }

    fn reconcile(&mut self, controller: usize) -> Result<(), String> {
        self.controllers[controller].cache.clone_from(&self.pods);
        self.decide(controller);
        while !self.controllers[controller].steps.is_empty() {
            self.step(controller)?;
        }
        Ok(())
    }

    /// Time passes until nothing is left to do.
    fn settle(&mut self) -> Result<(), String> {
        for _ in 0..30 {
            self.now += 15;
            self.pods.retain(|_, it| !it.is_terminating);
            self.reconcile(0)?;
        }
        let fit = self.warm().filter(|it| it.warm == Some(self.template()) && !it.phase.is_finished()).count();
        let expected = if self.plugin == Some(NodePlugin::Registered) { self.size } else { 0 };
        let all = self.warm().count();
        (fit == expected && all == expected).then_some(()).ok_or(format!("{fit} of {all} warm Pods, not {expected}"))
    }
}
