//! What happens when a Mountpoint Pod is lost: the next one takes its name, and the attachment does not change.

use super::*;

#[track_caller]
fn check(change: impl FnOnce(&mut MountpointPod), expected: &[&str]) {
    let mut lost = pod("a", PodPhase::Running);
    change(&mut lost);
    scene().using("a").using("b").attachment(&["mp(a): a b"]).pod(lost).check(expected);
}

#[test]
fn a_lost_pod_is_started_again_under_its_name() {
    scene().using("a").using("b").attachment(&["mp(a): a b"]).check(&["start mp(a) for a in A"]);
    scene()
        .using("a")
        .attachment(&["mp(a): a"])
        .check_notices(&["a: Mountpoint Pod mp(a) disappeared while it was in use and is replaced"]);
}

#[test]
fn the_name_outlives_the_workload_it_was_made_from() {
    scene()
        .over("a")
        .using("b")
        .attachment(&["mp(a): a b"])
        .check(&["edit A: a from mp(a) finished", "start mp(a) for b in A"]);
}

#[test]
fn a_pod_that_failed_or_ended_in_use_makes_room_for_the_next() {
    check(|it| it.phase = PodPhase::Failed, &["delete mp(a)"]);
    check(|it| it.phase = PodPhase::Succeeded, &["delete mp(a)"]);
    check(
        |it| {
            it.phase = PodPhase::Failed;
            it.is_terminating = true;
        },
        &[],
    );
}

#[test]
fn a_pod_that_fails_at_once_is_not_replaced_in_a_hot_loop() {
    check(
        |it| {
            it.phase = PodPhase::Failed;
            it.created_at = at(NOW - 3);
        },
        &["look again in 7 s"],
    );
}

#[test]
fn a_pod_in_use_is_never_retired_or_deleted() {
    check(|_| (), &[]);
    check(|it| it.phase = PodPhase::Pending, &[]);
    check(|it| it.phase = PodPhase::Unknown, &[]);
    check(|it| it.is_terminating = true, &[]);
    check(|it| it.is_retired = true, &[]);
    check(|it| it.driver_version = None, &[]);
    check(|it| it.refuses_new_workloads = true, &[]);
    check(
        |it| {
            it.is_retired = true;
            it.phase = PodPhase::Pending;
        },
        &[],
    );
}

#[test]
fn nothing_is_started_for_workloads_that_were_never_seen() {
    scene().attachment(&["mp(a): a"]).check(&["look again in 110 s"]);
    scene().attachment(&["mp(a): a"]).pod(pod("a", PodPhase::Failed)).check(&["delete mp(a)", "look again in 110 s"]);
    // At the earliest of several times.
    let two = scene().attachment(&["mp(a): a"]).attachment_at("s3pa-x", legacy_fields(), &["mp(b): b"], NOW - 60);
    two.check(&["look again in 60 s"]);
}

#[test]
fn without_its_volume_no_pod_can_be_built_and_nothing_is_taken_away() {
    let scene = scene().starting("a").attachment(&["mp(a): a"]);
    let scene = scene.with(|it| it.volume = VolumeState::Missing);
    scene.check(&[]);
    scene.check_notices(&["a: the PersistentVolume does not exist, no Mountpoint Pod can be created without it"]);
    let scene = scene.with(|it| it.volume = VolumeState::Refused { problem: "limit \"x\" is no quantity".to_owned() });
    scene.check(&[]);
    scene.check_notices(&["a: no Mountpoint Pod can be created for the volume: limit \"x\" is no quantity"]);
}

#[test]
fn what_a_person_must_change_does_not_pass_by_itself() {
    let mountpoint_pod = || "mp-1".to_owned();
    let not_running = |problem| WaitReason::NotRunning { mountpoint_pod: mountpoint_pod(), problem };
    assert!(not_running(None).passes_by_itself());
    assert!(!not_running(Some("Unschedulable".to_owned())).passes_by_itself());
    assert!(WaitReason::PodEnding { mountpoint_pod: mountpoint_pod() }.passes_by_itself());
    assert!(!WaitReason::VolumeMissing.passes_by_itself());
}

#[test]
fn a_workload_keeps_its_entry_even_if_its_volume_is_unknown() {
    let scene = scene().attachment(&["mp(a): a"]).running_pod("a");
    scene
        .with(|it| it.workloads.push(PodOnNode { uid: uid("a"), activity: Activity::Using, requirement: None }))
        .check(&[]);
}

fn serving(change: impl FnOnce(&mut MountpointPod)) -> MountpointPod {
    let mut pod = MountpointPod { is_mounted: true, is_movable: true, ..pod("a", PodPhase::Running) };
    change(&mut pod);
    pod
}

#[track_caller]
fn check_serving(change: impl FnOnce(&mut MountpointPod), expected: &[&str]) {
    scene().using("a").attachment(&["mp(a): a"]).pod(serving(change)).check(expected);
}

const TAKES_OVER: [&str; 1] = ["start next(a) to take over mp(a)"];

#[test]
fn a_pod_that_is_deleted_or_outdated_gets_a_successor_before_it_ends() {
    check_serving(|_| (), &[]);
    check_serving(|it| it.is_terminating = true, &TAKES_OVER);
    check_serving(|it| it.driver_version = Some("1.9".to_owned()), &TAKES_OVER);
    check_serving(|it| it.driver_version = None, &TAKES_OVER);
}

#[test]
fn only_a_pod_that_serves_and_can_be_taken_over_gets_a_successor() {
    let check = |change: fn(&mut MountpointPod)| {
        check_serving(
            |it| {
                it.is_terminating = true;
                change(it);
            },
            &[],
        );
    };
    check(|it| it.is_movable = false);
    check(|it| it.is_mounted = false);
    check(|it| it.is_retired = true);
    check(|it| it.phase = PodPhase::Unknown);
    check_serving(
        |it| {
            it.driver_version = None;
            it.refuses_new_workloads = true;
        },
        &[],
    );
}

#[test]
fn without_its_volume_no_successor_is_started() {
    let scene = scene().using("a").attachment(&["mp(a): a"]).pod(serving(|it| it.is_terminating = true));
    scene.with(|it| it.volume = VolumeState::Missing).check(&[]);
}

#[test]
fn a_pod_that_several_attachments_name_is_started_for_the_first_workload() {
    scene()
        .using("a")
        .using("b")
        .attachment(&["mp(a): a"])
        .attachment_at("s3pa-x", legacy_fields(), &["mp(a): b"], NOW - 20)
        .check(&["start mp(a) for b in s3pa-x"]);
}

#[test]
fn upgrades_wait_for_their_turn_and_deleted_pods_do_not() {
    let scene = |change: fn(&mut MountpointPod)| {
        let scene = scene().using("a").attachment(&["mp(a): a"]).pod(serving(change));
        scene.with(|it| it.may_upgrade = false)
    };
    scene(|it| it.driver_version = None).check(&["look again in 20 s"]);
    scene(|it| it.is_terminating = true).check(&TAKES_OVER);
}

#[test]
fn the_old_pod_is_deleted_when_the_new_one_serves() {
    let check = |old: MountpointPod, new: MountpointPod, expected: &[&str]| {
        scene().using("a").starting("b").attachment(&["mp(a): a b"]).pod(old).pod(new).check(expected);
    };
    let outdated = || serving(|it| it.driver_version = None);
    let released = || MountpointPod { is_mounted: false, is_movable: false, ..outdated() };
    let mounted = || MountpointPod { is_mounted: true, is_movable: true, ..successor("a") };
    check(outdated(), MountpointPod { phase: PodPhase::Pending, ..successor("a") }, &[]);
    check(outdated(), successor("a"), &[]);
    check(outdated(), mounted(), &[]);
    check(released(), mounted(), &["delete mp(a)"]);
    check(MountpointPod { is_terminating: true, ..released() }, mounted(), &[]);
    check(outdated(), MountpointPod { phase: PodPhase::Failed, ..successor("a") }, &["delete next(a)"]);
    // The next successor gets the same name, so this one must be gone first.
    check(outdated(), MountpointPod { is_terminating: true, ..successor("a") }, &[]);
}

#[test]
fn all_pods_of_an_unused_source_are_retired() {
    let new = MountpointPod { is_mounted: true, ..successor("a") };
    scene().over("a").running_pod("a").pod(new).check(&["retire next(a)", "retire mp(a)"]);
}
