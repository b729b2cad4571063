//! The rules by example, and the laws in random worlds: a gate is removed when its time has come, and no headroom Pod is left behind.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;

const UID: &str = "a4509011-bd2a-4f37-b1b0-05d715087852";

fn volume(name: &str) -> PvName {
    name.parse().unwrap()
}

fn volumes(names: &[&str]) -> BTreeSet<PvName> {
    names.iter().map(|it| volume(it)).collect()
}

fn gated(names: &[&str]) -> HeadroomWorkload {
    HeadroomWorkload {
        uid: UID.parse().unwrap(),
        gate: HeadroomGate::Present,
        phase: PodPhase::Pending,
        is_terminating: false,
        volumes: volumes(names),
        unresolved: BTreeMap::new(),
        served: BTreeSet::new(),
    }
}

fn admitted(names: &[&str], served: &[&str]) -> HeadroomWorkload {
    HeadroomWorkload { gate: HeadroomGate::Absent, served: volumes(served), ..gated(names) }
}

fn pod(name: &str, phase: PodPhase) -> HeadroomPod {
    HeadroomPod {
        name: headroom_pod_name(&UID.parse().unwrap(), &volume(name)),
        uid: format!("uid of {name}"),
        workload: UID.parse().unwrap(),
        persistent_volume: volume(name),
        phase,
        is_terminating: false,
    }
}

fn pending(names: &[&str]) -> Vec<HeadroomPod> {
    names.iter().map(|it| pod(it, PodPhase::Pending)).collect()
}

/// `+a` creates the headroom Pod of volume a, `-a` deletes it, `label` and `ungate` are writes to the workload.
#[track_caller]
fn check(reservation: Reservation, workload: Option<HeadroomWorkload>, pods: Vec<HeadroomPod>, expected: &[&str]) {
    let decision = decide(&ObservedHeadroom { reservation, workload, pods });
    let volume_of = |name: &str| {
        let all = ["a", "b", "c"].into_iter();
        all.filter(|it| pod(it, PodPhase::Pending).name == name).collect::<String>()
    };
    let line = |it: &HeadroomAction| match it {
        HeadroomAction::Reserve { name, persistent_volume } => {
            assert_eq!(volume_of(name), persistent_volume.as_str());
            format!("+{persistent_volume}")
        }
        HeadroomAction::Delete { name, uid } => {
            assert_eq!(*uid, format!("uid of {}", volume_of(name)));
            format!("-{}", volume_of(name))
        }
        HeadroomAction::LabelAndRemoveGate => "label, ungate".to_owned(),
        HeadroomAction::RemoveGate => "ungate".to_owned(),
    };
    let mut lines: Vec<String> = decision.actions.iter().map(line).collect();
    lines.extend(decision.notice.map(|it| it.to_string()));
    assert_eq!(lines, expected);
}

#[test]
fn each_volume_gets_a_headroom_pod_before_the_gate_is_removed() {
    check(Reservation::On, Some(gated(&["a", "b"])), vec![], &["+a", "+b", "label, ungate"]);
    check(Reservation::On, Some(gated(&["a", "b"])), pending(&["a"]), &["+b", "label, ungate"]);
    check(Reservation::On, Some(gated(&["a", "b"])), pending(&["a", "b"]), &["label, ungate"]);
}

#[test]
fn a_workload_without_volumes_of_ours_loses_just_the_gate() {
    check(Reservation::On, Some(gated(&[])), vec![], &["ungate"]);
    check(Reservation::On, Some(gated(&[])), pending(&["a"]), &["-a", "ungate"]);
}

#[test]
fn the_gate_stays_until_all_claims_are_bound() {
    let unresolved = BTreeMap::from([("data".to_owned(), UnresolvedClaim::ClaimNotBound)]);
    let workload = HeadroomWorkload { unresolved, ..gated(&["a"]) };
    let expected = "room for Mountpoint Pods is reserved when every claim of the Pod is bound; claim data: the claim is not bound yet";
    check(Reservation::On, Some(workload), vec![], &[expected]);
}

#[test]
fn a_headroom_pod_that_has_ended_is_replaced_before_the_gate_is_removed() {
    check(Reservation::On, Some(gated(&["a"])), vec![pod("a", PodPhase::Failed)], &["-a"]);
    let ending = HeadroomPod { is_terminating: true, ..pod("a", PodPhase::Pending) };
    check(Reservation::On, Some(gated(&["a", "b"])), vec![ending], &["+b"]);
}

#[test]
fn headroom_stays_until_its_volume_is_served() {
    let both = || vec![pod("a", PodPhase::Running), pod("b", PodPhase::Pending)];
    check(Reservation::On, Some(admitted(&["a", "b"], &[])), both(), &[]);
    check(Reservation::On, Some(admitted(&["a", "b"], &["b"])), both(), &["-b"]);
    check(Reservation::On, Some(admitted(&["a", "b"], &["a", "b"])), both(), &["-a", "-b"]);
}

#[test]
fn headroom_that_was_preempted_is_not_created_again() {
    check(Reservation::On, Some(admitted(&["a"], &[])), vec![], &[]);
}

#[test]
fn headroom_ends_with_the_start_and_with_the_end_of_its_workload() {
    let check_end = |workload: Option<HeadroomWorkload>| {
        check(Reservation::On, workload, pending(&["a", "b"]), &["-a", "-b"]);
    };
    check_end(None);
    for phase in [PodPhase::Running, PodPhase::Succeeded, PodPhase::Failed, PodPhase::Unknown] {
        check_end(Some(HeadroomWorkload { phase, ..admitted(&["a", "b"], &[]) }));
    }
    check_end(Some(HeadroomWorkload { is_terminating: true, ..admitted(&["a", "b"], &[]) }));
    check_end(Some(HeadroomWorkload { is_terminating: true, ..gated(&["a", "b"]) }));
}

#[test]
fn without_the_feature_gates_stay_and_headroom_ends() {
    check(Reservation::Off, Some(gated(&["a"])), pending(&["a"]), &["-a"]);
    check(Reservation::Off, Some(admitted(&["a"], &[])), pending(&["a"]), &["-a"]);
    check(Reservation::Off, Some(gated(&["a"])), vec![], &[]);
}

#[test]
fn names_are_derived_and_recognised() {
    let name = headroom_pod_name(&UID.parse().unwrap(), &volume("test-vol"));
    assert_eq!(name, "hr-55f7d2331f3149f00d62d7af839d4cee895e1c68a2f0d96ffd359f79");
    assert!(is_headroom_pod_name(&name));
    assert!(!is_headroom_pod_name("hr-55f7"));
    assert!(!is_headroom_pod_name(&name.replace("hr-", "mp-")));
}

/// A workload and its headroom Pods as they really are, and two controllers with caches of them.
#[derive(Default)]
struct World {
    serial: u64,
    claims: usize,
    workload: Option<HeadroomWorkload>,
    pods: BTreeMap<String, HeadroomPod>,
    controllers: [Controller; 2],
}

#[derive(Default)]
struct Controller {
    cache: (Option<HeadroomWorkload>, BTreeMap<String, HeadroomPod>),
    steps: VecDeque<HeadroomAction>,
}

#[derive(Clone, Copy, Debug)]
enum Event {
    ClaimIsBound,
    WorkloadIsScheduledAndServed(usize),
    WorkloadRuns,
    WorkloadIsDeleted,
    WorkloadIsGone,
    PodRuns(usize),
    PodFails(usize),
    PodIsDeleted(usize),
    PodIsGone(usize),
    CatchesUp(usize),
    Decides(usize),
    Advances(usize),
    Crashes(usize),
    Reconciles(usize),
}

fn events() -> impl Strategy<Value = Event> {
    let (index, controller) = (|| 0..3_usize, || 0..2_usize);
    prop_oneof![
        6 => Just(Event::ClaimIsBound),
        3 => index().prop_map(Event::WorkloadIsScheduledAndServed),
        1 => Just(Event::WorkloadRuns),
        1 => Just(Event::WorkloadIsDeleted),
        1 => Just(Event::WorkloadIsGone),
        2 => index().prop_map(Event::PodRuns),
        2 => index().prop_map(Event::PodFails),
        1 => index().prop_map(Event::PodIsDeleted),
        3 => index().prop_map(Event::PodIsGone),
        4 => controller().prop_map(Event::CatchesUp),
        6 => controller().prop_map(Event::Decides),
        10 => controller().prop_map(Event::Advances),
        2 => controller().prop_map(Event::Crashes),
        6 => controller().prop_map(Event::Reconciles),
    ]
}

const NAMES: [&str; 3] = ["a", "b", "c"];

proptest! {
    #![proptest_config(ProptestConfig { cases: 3_000, ..ProptestConfig::default() })]

    #[test]
    fn a_gate_is_removed_when_its_room_was_reserved_and_nothing_is_left(
        count in 0..4_usize,
        events in prop::collection::vec(events(), 0..80),
    ) {
        let mut world = World { workload: Some(gated(&[])), ..World::default() };
        world.bind(0, count);
        for event in &events {
            world.happen(*event, count).map_err(TestCaseError::fail)?;
        }
        world.settle(count).map_err(TestCaseError::fail)?;
    }
}

impl World {
    /// The first claims of so many are bound, each to a volume of ours.
    fn bind(&mut self, bound: usize, count: usize) {
        self.claims = bound.min(count);
        if let Some(workload) = &mut self.workload {
            let names = &NAMES[..count];
            workload.volumes = volumes(&names[..self.claims]);
            let unbound = names[self.claims..].iter();
            workload.unresolved = unbound.map(|it| ((*it).to_owned(), UnresolvedClaim::ClaimNotBound)).collect();
        }
    }

    fn happen(&mut self, event: Event, count: usize) -> Result<(), String> {
        let is_admitted = self.workload.as_ref().is_some_and(|it| it.gate == HeadroomGate::Absent);
        match event {
            Event::ClaimIsBound => self.bind(self.claims + 1, count),
            Event::WorkloadIsScheduledAndServed(index) if is_admitted => {
                let name = volume(NAMES[index]);
                self.change_workload(|it| {
                    it.served.insert(name);
                });
            }
            Event::WorkloadRuns if is_admitted => self.change_workload(|it| it.phase = PodPhase::Running),
            Event::WorkloadIsDeleted => self.change_workload(|it| it.is_terminating = true),
            Event::WorkloadIsGone => self.workload = None,
            Event::PodRuns(index) if is_admitted => self.touch(index, |it| it.phase = PodPhase::Running),
            Event::PodFails(index) => self.touch(index, |it| it.phase = PodPhase::Failed),
            Event::PodIsDeleted(index) => self.touch(index, |it| it.is_terminating = true),
            Event::PodIsGone(index) => {
                if let Some(name) = self.pods.keys().nth(index).cloned() {
                    self.pods.remove(&name);
                }
            }
            Event::CatchesUp(controller) => {
                self.controllers[controller].cache = (self.workload.clone(), self.pods.clone());
            }
            Event::Decides(controller) => self.decide(controller),
            Event::Advances(controller) => self.step(controller)?,
            Event::Crashes(controller) => self.controllers[controller].steps.clear(),
            Event::Reconciles(controller) => self.reconcile(controller)?,
            // The scheduler has not seen it yet.
            Event::WorkloadIsScheduledAndServed(_) | Event::WorkloadRuns | Event::PodRuns(_) => {}
        }
        Ok(())
    }

    fn change_workload(&mut self, change: impl FnOnce(&mut HeadroomWorkload)) {
        self.workload.as_mut().map(change);
    }

    fn touch(&mut self, index: usize, change: impl FnOnce(&mut HeadroomPod)) {
        self.pods.values_mut().nth(index).map(change);
    }

    fn decide(&mut self, controller: usize) {
        let controller = &mut self.controllers[controller];
        let (workload, pods) = controller.cache.clone();
        let pods = pods.into_values().collect();
        controller.steps = decide(&ObservedHeadroom { reservation: Reservation::On, workload, pods }).actions.into();
    }

    fn step(&mut self, controller: usize) -> Result<(), String> {
        match self.controllers[controller].steps.pop_front() {
            None => {}
            Some(HeadroomAction::Reserve { name, persistent_volume }) => {
                self.serial += 1;
                let uid = self.serial.to_string();
                let pod = HeadroomPod { uid, ..pod(persistent_volume.as_str(), PodPhase::Pending) };
                let pod = self.pods.entry(name.clone()).or_insert(pod).clone();
                self.controllers[controller].cache.1.insert(name, pod);
            }
            Some(HeadroomAction::Delete { name, uid }) => {
                self.pods.retain(|_, it| it.name != name || it.uid != uid);
            }
            Some(HeadroomAction::LabelAndRemoveGate) => self.ungate(controller)?,
            Some(HeadroomAction::RemoveGate) => {
                let has_volumes = self.workload.as_ref().is_some_and(|it| !it.volumes.is_empty());
                if has_volumes {
                    return Err("the gate was removed without a label".to_owned());
                }
                self.ungate(controller)?;
            }
        }
        Ok(())
    }

    fn ungate(&mut self, controller: usize) -> Result<(), String> {
        if let Some(workload) = &mut self.workload {
            if !workload.unresolved.is_empty() {
                return Err(format!("the gate was removed before {:?} were bound", workload.unresolved));
            }
            workload.gate = HeadroomGate::Absent;
            self.controllers[controller].cache.0 = Some(workload.clone());
        }
        Ok(())
    }

    fn reconcile(&mut self, controller: usize) -> Result<(), String> {
        self.controllers[controller].cache = (self.workload.clone(), self.pods.clone());
        self.decide(controller);
        while !self.controllers[controller].steps.is_empty() {
            self.step(controller)?;
        }
        Ok(())
    }

    /// Claims are bound, the gate is removed with room for every volume, and the workload ends.
    fn settle(&mut self, count: usize) -> Result<(), String> {
        let was_gated = self.workload.as_ref().is_some_and(|it| it.gate == HeadroomGate::Present && !it.is_terminating);
        self.bind(count, count);
        for _ in 0..5 {
            self.pods.retain(|_, it| !it.is_terminating);
            self.reconcile(0)?;
        }
        if was_gated {
            let is_open = self.workload.as_ref().is_some_and(|it| it.gate == HeadroomGate::Absent);
            if !is_open || self.pods.len() != count {
                return Err(format!("{} headroom Pods for {count} volumes, gate removed: {is_open}", self.pods.len()));
            }
        }
        self.change_workload(|it| it.served = volumes(&NAMES));
        self.reconcile(1)?;
        let is_waiting = self.workload.as_ref().is_some_and(|it| it.gate == HeadroomGate::Present);
        if !self.pods.is_empty() && !is_waiting {
            return Err(format!("left behind: {:?}", self.pods));
        }
        self.workload = None;
        self.reconcile(1)?;
        self.pods.is_empty().then_some(()).ok_or(format!("left behind: {:?}", self.pods))
    }
}
