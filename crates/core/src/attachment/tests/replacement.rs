//! What happens when a Mountpoint Pod is lost: the next one takes its name, and the attachment does not change.

use super::*;

#[track_caller]
fn check(change: impl FnOnce(&mut MountpointPod), expected: &[&str]) {
    let mut lost = pod("a", Phase::Running);
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
        .check(&["edit A: a from mp(a) over", "start mp(a) for b in A"]);
}

#[test]
fn a_pod_that_failed_or_ended_in_use_makes_room_for_the_next() {
    check(|it| it.phase = Phase::Failed, &["delete mp(a)"]);
    check(|it| it.phase = Phase::Succeeded, &["delete mp(a)"]);
    check(
        |it| {
            it.phase = Phase::Failed;
            it.is_terminating = true;
        },
        &[],
    );
}

#[test]
fn a_pod_that_fails_at_once_is_not_replaced_in_a_hot_loop() {
    check(
        |it| {
            it.phase = Phase::Failed;
            it.created_at = at(NOW - 3);
        },
        &["look again in 7 s"],
    );
}

#[test]
fn a_pod_in_use_is_never_retired_or_deleted() {
    check(|_| (), &[]);
    check(|it| it.phase = Phase::Pending, &[]);
    check(|it| it.phase = Phase::Unknown, &[]);
    check(|it| it.is_terminating = true, &[]);
    check(|it| it.is_retired = true, &[]);
    check(|it| it.driver_version = None, &[]);
    check(|it| it.refuses_new_workloads = true, &[]);
    check(
        |it| {
            it.is_retired = true;
            it.phase = Phase::Pending;
        },
        &[],
    );
}

#[test]
fn nothing_is_started_for_workloads_nobody_has_seen() {
    scene().attachment(&["mp(a): a"]).check(&["look again in 110 s"]);
    scene().attachment(&["mp(a): a"]).pod(pod("a", Phase::Failed)).check(&["delete mp(a)", "look again in 110 s"]);
}

#[test]
fn without_its_volume_no_pod_can_be_built_and_nothing_is_taken_away() {
    let scene = scene().starting("a").attachment(&["mp(a): a"]);
    let scene = scene.with(|it| it.volume = VolumeState::Missing);
    scene.check(&[]);
    scene.check_notices(&["a: the PersistentVolume is missing, no Mountpoint Pod can be made without it"]);
    let scene = scene.with(|it| it.volume = VolumeState::Refused { problem: "limit \"x\" is no quantity".to_owned() });
    scene.check(&[]);
    scene.check_notices(&["a: no Mountpoint Pod can be made for the volume: limit \"x\" is no quantity"]);
}

#[test]
fn a_workload_keeps_its_entry_even_if_nobody_can_say_any_more_what_it_uses() {
    let scene = scene().attachment(&["mp(a): a"]).running_pod("a");
    scene.with(|it| it.workloads.push(Resident { uid: uid("a"), activity: Activity::Using, wish: None })).check(&[]);
}
