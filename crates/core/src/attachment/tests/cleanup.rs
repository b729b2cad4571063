//! What is taken away, when, and in which order: the attachment's entry, then the Mountpoint Pod, then the attachment.

use super::*;

/// C24
#[test]
fn the_last_workload_takes_everything_with_it() {
    scene().over("a").attachment(&["mp(a): a"]).running_pod("a").check(&[
        "edit A: a from mp(a) finished, without mp(a)",
        "retire mp(a)",
        "delete A as written",
    ]);
    scene().gone("a").attachment(&["mp(a): a"]).running_pod("a").check(&[
        "edit A: a from mp(a) gone, without mp(a)",
        "retire mp(a)",
        "delete A as written",
    ]);
}

#[test]
fn a_pod_that_serves_others_stays() {
    scene().over("a").using("b").attachment(&["mp(a): a b"]).running_pod("a").check(&["edit A: a from mp(a) finished"]);
    scene()
        .over("a")
        .using("b")
        .attachment(&["mp(a): a", "mp(b): b"])
        .running_pod("a")
        .running_pod("b")
        .check(&["edit A: a from mp(a) finished, without mp(a)", "retire mp(a)"]);
}

/// C23, C25 and the table of phases.
#[test]
fn which_workloads_use_their_mount() {
    for (phase, is_terminating, expected) in [
        (PodPhase::Pending, false, Activity::Starting),
        (PodPhase::Pending, true, Activity::Finished),
        (PodPhase::Running, false, Activity::Using),
        (PodPhase::Running, true, Activity::Using),
        (PodPhase::Unknown, false, Activity::Using),
        (PodPhase::Unknown, true, Activity::Using),
        (PodPhase::Succeeded, false, Activity::Finished),
        (PodPhase::Succeeded, true, Activity::Finished),
        (PodPhase::Failed, false, Activity::Finished),
        (PodPhase::Failed, true, Activity::Finished),
    ] {
        assert_eq!(Activity::of(phase, is_terminating), expected, "{phase:?}, terminating: {is_terminating}");
    }
    for (text, expected) in [
        (None, PodPhase::Pending),
        (Some(""), PodPhase::Pending),
        (Some("Pending"), PodPhase::Pending),
        (Some("Running"), PodPhase::Running),
        (Some("Succeeded"), PodPhase::Succeeded),
        (Some("Failed"), PodPhase::Failed),
        (Some("Unknown"), PodPhase::Unknown),
    ] {
        assert_eq!(PodPhase::from_text(text), expected, "{text:?}");
    }
}

/// C23
#[test]
fn a_workload_deleted_while_it_waits_leaves_nothing_and_gets_nothing_again() {
    scene().over("a").check(&[]);
    scene().over("a").attachment(&["mp(a): a"]).pod(pod("a", PodPhase::Pending)).check(&[
        "edit A: a from mp(a) finished, without mp(a)",
        "retire mp(a)",
        "delete A as written",
    ]);
}

#[test]
fn a_workload_that_died_before_its_attachment_was_seen_blocks_no_other() {
    scene()
        .gone("a")
        .starting("b")
        .attachment(&["mp(a): a"])
        .check(&["edit A: a from mp(a) gone, b to mp(b), without mp(a)", "start mp(b) for b in A"]);
    scene()
        .gone("a")
        .starting("b")
        .attachment(&["mp(a): a"])
        .running_pod("a")
        .check(&["edit A: a from mp(a) gone, b to mp(a)"]);
}

#[test]
fn a_workload_that_was_never_seen_is_stale_after_two_minutes() {
    let given = |age: i64| {
        scene()
            .attachment_at(&attachment_name(&plain_key()), plain_need().fields, &["mp(a): a"], NOW - age)
            .running_pod("a")
    };
    given(-30).check(&["look again in 120 s"]);
    given(0).check(&["look again in 120 s"]);
    given(119).check(&["look again in 1 s"]);
    given(120).check(&[
        "edit A: a from mp(a) stale, without mp(a)",
        "retire mp(a) if really unused",
        "delete A as written",
    ]);
    let decision = decide(&given(120).observed, at(NOW));
    assert_eq!(decision.attachment_writes[0].stale_workloads().collect::<Vec<_>>(), [&uid("a")]);
}

#[test]
fn a_stale_workload_does_not_take_its_neighbours_along() {
    scene()
        .using("b")
        .attachment_at(&attachment_name(&plain_key()), plain_need().fields, &["mp(a): a b"], NOW - 1000)
        .running_pod("a")
        .check(&["edit A: a from mp(a) stale"]);
}

#[test]
fn an_attachment_without_workloads_is_deleted() {
    scene().attachment(&[]).check(&["delete A at 7"]);
    scene().attachment(&["mp(a):"]).check(&["edit A: without mp(a)", "delete A as written"]);
    scene().attachment(&[]).with(|it| it.attachments[0].is_terminating = true).check(&[]);
}

/// C22
#[test]
fn a_pod_that_ended_is_deleted() {
    scene().pod(pod("a", PodPhase::Succeeded)).check(&["delete mp(a)"]);
    scene().pod(pod("a", PodPhase::Failed)).check(&["delete mp(a)"]);
    scene().pod(MountpointPod { is_terminating: true, ..pod("a", PodPhase::Succeeded) }).check(&[]);
}

#[test]
fn a_retired_pod_is_left_to_the_node_unless_it_never_ran() {
    let retired = |phase| scene().pod(MountpointPod { is_retired: true, ..pod("a", phase) });
    retired(PodPhase::Running).check(&[]);
    retired(PodPhase::Unknown).check(&[]);
    retired(PodPhase::Pending).check(&["delete mp(a)"]);
}

#[test]
fn a_deleted_pod_without_workloads_is_retired_so_that_it_need_not_wait_for_its_grace_period() {
    let deleted = MountpointPod { is_terminating: true, ..pod("a", PodPhase::Running) };
    scene().over("a").attachment(&["mp(a): a"]).pod(deleted).check(&[
        "edit A: a from mp(a) finished, without mp(a)",
        "retire mp(a)",
        "delete A as written",
    ]);
}

#[test]
fn a_pod_that_no_attachment_names_is_retired_once_no_workload_can_come_for_it() {
    let aged = |age: i64| MountpointPod { created_at: at(NOW - age), ..pod("a", PodPhase::Running) };
    scene().over("a").pod(aged(1)).check(&["retire mp(a)"]);
    scene().gone("a").pod(aged(1)).check(&["retire mp(a)"]);
    scene().pod(aged(1)).check(&["look again in 119 s"]);
    scene().pod(aged(120)).check(&["retire mp(a) if really unused"]);
    scene().using("a").attachment_of(&with_fs_group("1"), &["mp(b): a"]).running_pod("b").pod(aged(999)).check(&[]);
}

#[test]
fn a_pod_may_be_retired_once_no_attachment_names_it_and_its_creator_is_over() {
    let check = |scene: Scene, expected: bool| assert_eq!(may_retire(&scene.observed, &own_pod("a")), expected);
    check(scene(), true);
    check(scene().over("a").using("b").attachment(&["mp(b): b"]), true);
    check(scene().starting("a"), false);
    check(scene().using("a"), false);
    check(scene().attachment(&["mp(a): b"]), false);
    check(scene().attachment(&["mp(a):"]), false);
}

#[test]
fn a_pod_that_a_second_attachment_names_is_kept() {
    scene()
        .over("a")
        .using("b")
        .attachment(&["mp(a): a"])
        .legacy("s3pa-x1y2z", &["mp(a): b"])
        .running_pod("a")
        .check(&["edit A: a from mp(a) finished, without mp(a)", "delete A as written"]);
}
