//! Names, and which attachment is meant: old ones are found by their fields, duplicates are reduced to one.

use super::*;

#[test]
fn attachments_are_named_after_their_key() {
    let name = attachment_name(&plain_key());
    assert_eq!(name, format!("s3pa-{}", plain_key().name()));
    assert!(name.len() <= 63 && name.chars().all(|it| it.is_ascii_lowercase() || it.is_ascii_digit() || it == '-'));
}

#[test]
fn only_pods_with_derived_names_are_ours() {
    assert!(is_mountpoint_pod_name(&own_pod("a")));
    for other in ["", "mp-", "mp-x1y2z", "my-app", &own_pod("a")[1..], &own_pod("a").to_uppercase()] {
        assert!(!is_mountpoint_pod_name(other), "{other}");
    }
}

#[test]
fn of_two_pods_of_one_second_the_successor_is_newer() {
    for workload in ["a", "b", "c", "d", "e", "f"] {
        let (first, second) = (pod(workload, PodPhase::Running), successor(workload));
        let second = MountpointPod { created_at: first.created_at, ..second };
        for pods in [[&first, &second], [&second, &first]] {
            let names: Vec<&str> =
                newest_first(pods, MountpointPod::identity).iter().map(|it| it.name.as_str()).collect();
            assert_eq!(names, [&second.name, &first.name], "{workload}");
        }
    }
}

#[test]
fn a_pod_accepts_its_own_workload_unless_it_ends() {
    let check = |change: fn(&mut MountpointPod), expected| {
        let mut pod = pod("a", PodPhase::Running);
        change(&mut pod);
        assert_eq!(pod.accepts_its_creator(), expected);
    };
    check(|_| (), true);
    check(|it| it.phase = PodPhase::Pending, true);
    check(|it| it.refuses_new_workloads = true, true);
    check(|it| it.driver_version = None, true);
    check(|it| it.phase = PodPhase::Failed, false);
    check(|it| it.is_terminating = true, false);
    check(|it| it.is_retired = true, false);
}

#[track_caller]
fn check_legacy(change: impl FnOnce(&mut AttachmentFields), is_used: bool) {
    let mut fields = legacy_fields();
    change(&mut fields);
    let scene = scene().using("a").starting("b").attachment_at("s3pa-x1y2z", fields, &["mp(a): a"], NOW - 10);
    let scene = scene.running_pod("a");
    if is_used {
        scene.check(&["edit s3pa-x1y2z: b to mp(a)"]);
    } else {
        scene.check(&["create A: b to mp(b)", "start mp(b) for b in A"]);
    }
}

#[test]
fn attachments_of_earlier_drivers_are_found_by_their_fields() {
    check_legacy(|_| (), true);
    check_legacy(|it| it.mount_options = "uid=1,allow-delete".to_owned(), true);
    check_legacy(|it| it.mount_options = "--uid 1,--allow-delete".to_owned(), true);
    check_legacy(|it| it.mount_options = "allow-delete".to_owned(), false);
    check_legacy(|it| it.mount_options = String::new(), false);
    check_legacy(|it| it.volume_id = "other".to_owned(), false);
    check_legacy(|it| it.fs_group = "1000".to_owned(), false);
    check_legacy(|it| it.authentication_source = Some("driver".to_owned()), true);
    check_legacy(|it| it.authentication_source = Some("secret".to_owned()), false);
    check_legacy(|it| it.workload_namespace = Some("one".to_owned()), false);
}

#[test]
fn options_with_commas_are_found_as_they_were_written() {
    let comma = requirement(SharingKey { mount_options: "--prefix=a,b/".to_owned(), ..plain_key() });
    let fields = AttachmentFields { authentication_source: None, ..comma.fields.clone() };
    scene()
        .using("a")
        .requiring("b", Activity::Starting, Ok(comma))
        .attachment_at("s3pa-x1y2z", fields, &["mp(a): a"], NOW - 10)
        .running_pod("a")
        .check(&["edit s3pa-x1y2z: b to mp(a)"]);
}

#[test]
fn an_old_attachment_of_a_workload_identity_is_not_used() {
    let own = requirement(SharingKey {
        workload_namespace: Some("one".to_owned()),
        service_account: Some("account".to_owned()),
        ..plain_key()
    });
    let name = attachment_name(&own.key);
    let expected = [format!("create {name}: b to mp(b)"), format!("start mp(b) for b in {name}")];
    scene()
        .using("a")
        .requiring("b", Activity::Starting, Ok(own))
        .legacy("s3pa-x1y2z", &["mp(a): a"])
        .running_pod("a")
        .check(&expected.each_ref().map(String::as_str));
}

#[test]
fn a_new_pod_beside_old_ones_is_entered_in_the_old_attachment() {
    let old = MountpointPod { driver_version: Some("1.9".to_owned()), ..pod("a", PodPhase::Running) };
    scene()
        .using("a")
        .starting("b")
        .legacy("s3pa-x1y2z", &["mp(a): a"])
        .pod(old)
        .check(&["edit s3pa-x1y2z: b to mp(b)", "start mp(b) for b in s3pa-x1y2z"]);
}

/// The fields of both are equal: only the name shows that the PV was recreated with another bucket.
#[test]
fn an_attachment_of_another_key_is_not_taken_for_its_fields() {
    let other = requirement(SharingKey { bucket: "other".to_owned(), ..plain_key() });
    assert_eq!(other.fields, plain_need().fields);
    let name = attachment_name(&other.key);
    let expected = [format!("create {name}: b to mp(b)"), format!("start mp(b) for b in {name}")];
    scene()
        .using("a")
        .requiring("b", Activity::Starting, Ok(other))
        .attachment(&["mp(a): a"])
        .running_pod("a")
        .check(&expected.each_ref().map(String::as_str));
}

/// C26
#[test]
fn empty_duplicates_are_deleted_and_a_fresh_one_is_made() {
    scene().starting("a").legacy("s3pa-x1y2z", &[]).legacy("s3pa-x3y4z", &["mp(b):"]).check(&[
        "edit s3pa-x3y4z: without mp(b)",
        "create A: a to mp(a)",
        "start mp(a) for a in A",
        "delete s3pa-x1y2z at 7",
        "delete s3pa-x3y4z as written",
    ]);
}

/// C27
#[test]
fn of_duplicates_the_one_in_use_is_kept_and_joined() {
    scene()
        .using("a")
        .starting("b")
        .legacy("s3pa-x1y2z", &[])
        .legacy("s3pa-x3y4z", &["mp(a): a"])
        .running_pod("a")
        .check(&["edit s3pa-x3y4z: b to mp(a)", "delete s3pa-x1y2z at 7"]);
}

#[test]
fn of_duplicates_in_use_all_serve_on_and_one_is_joined() {
    scene()
        .using("a")
        .using("b")
        .starting("c")
        .legacy("s3pa-x1y2z", &["mp(a): a"])
        .legacy("s3pa-x3y4z", &["mp(b): b"])
        .running_pod("a")
        .running_pod("b")
        .check(&["edit s3pa-x1y2z: c to mp(a)"]);
}

#[test]
fn a_workload_attached_twice_stays_where_it_was_first() {
    let fields = plain_need().fields;
    let given = |ours: i64, theirs: i64| {
        scene()
            .using("a")
            .using("b")
            .attachment_at(&attachment_name(&plain_key()), fields.clone(), &["mp(a): a"], NOW - ours)
            .attachment_at("s3pa-zzzzz", legacy_fields(), &["mp(b): a b"], NOW - theirs)
            .running_pod("a")
            .running_pod("b")
    };
    given(10, 5).check(&["edit s3pa-zzzzz: a from mp(b) duplicate"]);
    given(5, 10).check(&["edit A: a from mp(a) duplicate, without mp(a)", "delete A as written"]);
    given(5, 5).check(&["edit s3pa-zzzzz: a from mp(b) duplicate"]);
    for (ours, theirs, expected) in [(10, 5, own_pod("a")), (5, 10, own_pod("b")), (5, 5, own_pod("a"))] {
        let scene = given(ours, theirs);
        let assigned = assignment(&scene.observed.attachments, &uid("a")).unwrap();
        assert_eq!(assigned.mountpoint_pod, expected);
    }
}

#[test]
fn a_workload_listed_twice_in_one_entry_is_listed_once() {
    scene().using("a").attachment(&["mp(a): a a"]).running_pod("a").check(&["edit A: a from mp(a) duplicate"]);
}

#[test]
fn a_workload_without_an_entry_has_no_assignment() {
    let scene = scene().attachment(&["mp(a): a"]);
    assert_eq!(assignment(&scene.observed.attachments, &uid("b")), None);
    let name = attachment_name(&plain_key());
    let expected = Assignment { attachment: &name, mountpoint_pod: &own_pod("a") };
    assert_eq!(assignment(&scene.observed.attachments, &uid("a")), Some(expected));
}
