//! Who shares a Mountpoint Pod with whom, and who gets one of his own.

use super::*;

#[test]
fn a_workload_gets_an_attachment_and_then_a_mountpoint_pod() {
    scene().starting("a").check(&["create A: a to mp(a)", "start mp(a) for a in A"]);
    scene().starting("a").check_notices(&["a: served by Mountpoint Pod mp(a) (kubectl describe s3pa A)"]);
}

#[test]
fn a_new_attachment_carries_the_entry_and_all_fields() {
    let decision = decide(&scene().starting("a").observed, at(NOW));
    let [AttachmentWrite::CreateAttachment { name, fields, entries, .. }] = &decision.attachment_writes[..] else {
        panic!("{:?}", decision.attachment_writes);
    };
    assert_eq!(*name, attachment_name(&plain_key()));
    assert_eq!(*fields, plain_need().fields);
    let entry = Entry { workload: uid("a"), attached_at: at(NOW) };
    assert_eq!(*entries, BTreeMap::from([(own_pod("a"), vec![entry])]));
}

/// C6
#[test]
fn workloads_with_the_same_key_share() {
    scene().starting("a").starting("b").check(&["create A: a to mp(a), b to mp(a)", "start mp(a) for a in A"]);
    scene().using("a").starting("b").attachment(&["mp(a): a"]).running_pod("a").check(&["edit A: b to mp(a)"]);
}

#[test]
fn a_pod_that_is_about_to_be_started_is_shared_too() {
    scene()
        .starting("a")
        .starting("b")
        .attachment(&["mp(a): a"])
        .check(&["edit A: b to mp(a)", "start mp(a) for a in A"]);
    scene().starting("b").attachment(&["mp(a): a"]).check(&[
        "edit A: b to mp(a)",
        "start mp(a) for b in A",
        "look again in 110 s",
    ]);
    scene()
        .starting("b")
        .starting("a")
        .attachment(&["mp(a): a"])
        .pod(pod("a", PodPhase::Pending))
        .check(&["edit A: b to mp(a)"]);
}

#[test]
fn what_is_attached_and_served_needs_nothing() {
    scene().using("a").starting("b").attachment(&["mp(a): a b"]).running_pod("a").check(&[]);
}

/// C8, C9
#[test]
fn another_fs_group_is_another_mountpoint_pod() {
    let group = || Ok(with_fs_group("1000"));
    scene()
        .starting("a")
        .requiring("b", Activity::Starting, group())
        .requiring("c", Activity::Starting, group())
        .check(&[
            "create A: a to mp(a)",
            "create A(1000): b to mp(b), c to mp(b)",
            "start mp(a) for a in A",
            "start mp(b) for b in A(1000)",
        ]);
}

/// C7, C10 to C14, C18: whatever is part of the key, and nothing else, separates.
#[test]
fn any_difference_in_the_key_separates() {
    let text = |it: &str| it.to_owned();
    let workload = |namespace: &str, account: &str| SharingKey {
        workload_namespace: Some(text(namespace)),
        service_account: Some(text(account)),
        ..plain_key()
    };
    let separate = |one: SharingKey, other: SharingKey, expected: usize| {
        let scene = scene().requiring("a", Activity::Starting, Ok(requirement(one))).requiring(
            "b",
            Activity::Starting,
            Ok(requirement(other)),
        );
        assert_eq!(decide(&scene.observed, at(NOW)).pods.len(), expected);
    };
    separate(plain_key(), plain_key(), 1);
    separate(plain_key(), SharingKey { node: text("other"), ..plain_key() }, 2);
    separate(plain_key(), SharingKey { volume_id: text("other"), ..plain_key() }, 2);
    separate(plain_key(), SharingKey { bucket: text("other"), ..plain_key() }, 2);
    separate(plain_key(), SharingKey { mount_options: text("--uid=2"), ..plain_key() }, 2);
    separate(plain_key(), SharingKey { authentication_source: AuthenticationSource::Secret, ..plain_key() }, 2);
    separate(plain_key(), SharingKey { volume_access: Access::ReadOnly, ..plain_key() }, 2);
    separate(workload("one", "account"), workload("one", "account"), 1);
    separate(workload("one", "account"), workload("one", "other"), 2);
    separate(workload("one", "account"), workload("two", "account"), 2);
    separate(workload("one", "account"), plain_key(), 2);
    let role = |name: &str| SharingKey {
        role: Some(format!("arn:aws:iam::1:role/{name}").parse().unwrap()),
        ..workload("one", "account")
    };
    separate(role("a"), role("a"), 1);
    separate(role("a"), role("b"), 2);
    separate(role("a"), workload("one", "account"), 2);
}

#[track_caller]
fn check_new_one(change: impl FnOnce(&mut MountpointPod)) {
    let mut first = pod("a", PodPhase::Running);
    change(&mut first);
    scene()
        .using("a")
        .starting("b")
        .attachment(&["mp(a): a"])
        .pod(first)
        .check(&["edit A: b to mp(b)", "start mp(b) for b in A"]);
}

/// C15, C16, C17
#[test]
fn a_pod_that_is_not_open_to_new_workloads_is_not_shared() {
    check_new_one(|it| it.is_retired = true);
    check_new_one(|it| it.refuses_new_workloads = true);
    check_new_one(|it| it.driver_version = Some("1.9".to_owned()));
    check_new_one(|it| it.driver_version = None);
    check_new_one(|it| it.is_terminating = true);
    check_new_one(|it| it.phase = PodPhase::Unknown);
}

#[test]
fn a_pod_that_failed_is_not_shared() {
    scene().using("a").starting("b").attachment(&["mp(a): a"]).pod(pod("a", PodPhase::Failed)).check(&[
        "edit A: b to mp(b)",
        "start mp(b) for b in A",
        "delete mp(a)",
    ]);
}

#[test]
fn of_several_suitable_pods_the_busiest_is_joined() {
    scene()
        .using("a")
        .using("b")
        .using("c")
        .starting("d")
        .attachment(&["mp(a): a", "mp(b): b c"])
        .running_pod("a")
        .running_pod("b")
        .check(&["edit A: d to mp(b)"]);
}

#[test]
fn a_pod_that_is_there_is_joined_rather_than_one_that_is_yet_to_be_started() {
    scene()
        .using("a")
        .starting("b")
        .starting("c")
        .starting("d")
        .attachment(&["mp(a): a", "mp(b): b c"])
        .running_pod("a")
        .check(&["edit A: d to mp(a)", "start mp(b) for b in A"]);
}

#[test]
fn a_suitable_pod_without_workloads_is_used_again() {
    scene()
        .over("a")
        .starting("b")
        .attachment(&["mp(a): a"])
        .running_pod("a")
        .check(&["edit A: a from mp(a) finished, b to mp(a)"]);
    scene().starting("b").attachment(&["mp(a):"]).running_pod("a").check(&["edit A: b to mp(a)"]);
}

/// C7: the PV was edited after the first workload was attached.
#[test]
fn an_edited_volume_strands_no_workload() {
    let edited = requirement(SharingKey { mount_options: "--uid=2".to_owned(), ..plain_key() });
    let old_name = attachment_name(&plain_key());
    let fields = plain_need().fields;
    let given = |activity| {
        scene().requiring("a", activity, Ok(edited.clone())).attachment_at(
            &old_name,
            fields.clone(),
            &["mp(a): a"],
            NOW - 10,
        )
    };
    given(Activity::Starting).running_pod("a").check(&[]);
    given(Activity::Using).running_pod("a").check(&[]);
    given(Activity::Using).check(&["start mp(a) for a in A"]);
    given(Activity::Finished).running_pod("a").check(&[
        "edit A: a from mp(a) finished, without mp(a)",
        "retire mp(a)",
        "delete A as written",
    ]);
}

/// C5
#[test]
fn a_workload_that_runs_on_a_systemd_mount_is_left_alone() {
    scene().using("a").check(&[]);
    scene().using("a").check_notices(&[]);
    scene().using("a").starting("b").check(&["create A: b to mp(b)", "start mp(b) for b in A"]);
}

/// C33 to C37
#[test]
fn a_volume_that_cannot_be_served_gets_nothing_but_an_explanation() {
    let refused = || Err(VolumeRefusal::MountpointPod { problem: "cache type \"disk\" is not known".to_owned() });
    let scene = scene().requiring("a", Activity::Starting, refused()).requiring("b", Activity::Using, refused());
    scene.check(&[]);
    scene.check_notices(&["a: no Mountpoint Pod can be created for the volume: cache type \"disk\" is not known"]);
}

#[test]
fn a_pod_that_was_started_before_its_attachment_is_adopted() {
    scene().starting("a").running_pod("a").check(&["create A: a to mp(a)"]);
    let other_version = MountpointPod { driver_version: Some("1.9".to_owned()), ..pod("a", PodPhase::Pending) };
    scene().starting("a").pod(other_version).check(&["create A: a to mp(a)"]);
    scene()
        .using("b")
        .starting("a")
        .attachment(&["mp(b): b"])
        .running_pod("b")
        .running_pod("a")
        .check(&["edit A: a to mp(a)"]);
}

#[test]
fn a_leftover_that_cannot_serve_is_succeeded_under_its_name() {
    let retired = MountpointPod { is_retired: true, ..pod("a", PodPhase::Running) };
    let scene_of = |it: MountpointPod| scene().starting("a").pod(it);
    scene_of(retired.clone()).check(&["create A: a to mp(a)"]);
    scene_of(retired).check_notices(&[
        "a: served by Mountpoint Pod mp(a) (kubectl describe s3pa A)",
        "a: Mountpoint Pod mp(a) is terminating; the next one is created when it is gone",
    ]);
    scene_of(pod("a", PodPhase::Failed)).check(&["create A: a to mp(a)", "delete mp(a)"]);
}

#[test]
fn an_attachment_deleted_by_hand_is_written_again() {
    scene().using("a").running_pod("a").check(&["create A: a to mp(a)"]);
}

#[test]
fn an_attachment_that_is_being_deleted_takes_no_new_workload() {
    let scene = scene().using("a").starting("b").attachment(&["mp(a): a"]).running_pod("a");
    let scene = scene.with(|it| it.attachments[0].is_terminating = true);
    scene.check(&[]);
    scene.check_notices(&["b: attachment A is being deleted; the next one is created when it is gone"]);
}

#[test]
fn why_a_workload_waits() {
    let check = |pod: MountpointPod, expected: &[&str]| {
        scene().starting("a").using("b").attachment(&["mp(a): a b"]).pod(pod).check_notices(expected);
    };
    check(pod("a", PodPhase::Running), &[]);
    check(pod("a", PodPhase::Pending), &["a: Mountpoint Pod mp(a) is not running yet"]);
    let unschedulable =
        MountpointPod { problem: Some("0/1 nodes are available".to_owned()), ..pod("a", PodPhase::Pending) };
    check(unschedulable, &["a: Mountpoint Pod mp(a) is not running: 0/1 nodes are available"]);
    let ending = MountpointPod { is_terminating: true, ..pod("a", PodPhase::Running) };
    check(ending, &["a: Mountpoint Pod mp(a) is terminating; the next one is created when it is gone"]);
    check(
        pod("a", PodPhase::Failed),
        &[
            "a: Mountpoint Pod mp(a) failed and is replaced",
            "b: Mountpoint Pod mp(a) failed while it was in use and is replaced",
        ],
    );
}

/// Kubernetes does not enforce `ReadWriteOnce` for drivers without an attach operation: we do.
#[test]
fn a_volume_for_one_node_is_not_served_on_a_second_one() {
    let single = || Ok(MountRequirement { scope: NodeScope::SingleNode, ..plain_need() });
    let elsewhere = |it: &mut ObservedState| {
        it.elsewhere = ["web-2", "web-1"]
            .map(|name| AttachedElsewhere { node: "other".to_owned(), workload: format!("team/{name}") })
            .to_vec();
    };
    let refused = scene().requiring("a", Activity::Starting, single()).with(elsewhere);
    refused.check(&[]);
    refused.check_notices(&[
        "a: the volume is ReadWriteOnce and in use on node other by Pod team/web-1; it can be used here when that Pod is gone",
    ]);
    // What is mounted here stays, as do volumes for all nodes.
    scene()
        .requiring("a", Activity::Using, single())
        .attachment(&["mp(a): a"])
        .running_pod("a")
        .with(elsewhere)
        .check(&[]);
    scene().starting("a").with(elsewhere).check(&["create A: a to mp(a)", "start mp(a) for a in A"]);
    scene().requiring("a", Activity::Starting, single()).check(&["create A: a to mp(a)", "start mp(a) for a in A"]);
}
