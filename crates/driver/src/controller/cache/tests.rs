use std::collections::BTreeMap;

use s3csi_core::AccessMode;
use s3csi_core::attachment::{
    Activity, Attachment, ClaimOf, ClaimReference, Entry, Fields, MountpointPod, Phase, Timestamp,
};

use super::*;

const DRIVER: &str = "s3.csi.scality.com";

fn cache() -> Cache {
    Cache::new(DRIVER, "3.0.0")
}

fn uid(text: &str) -> WorkloadUid {
    text.parse().unwrap()
}

fn workload(name: &str, node: &str, claim: &str) -> Workload {
    Workload {
        uid: uid(name),
        namespace: "ns".to_owned(),
        name: name.to_owned(),
        service_account: "default".to_owned(),
        node: Some(node.to_owned()),
        phase: Phase::Pending,
        is_terminating: false,
        fs_group: None,
        claims: vec![ClaimReference::Claim(claim.to_owned())],
    }
}

fn claim(name: &str, volume: Option<&str>) -> Claim {
    Claim {
        namespace: "ns".to_owned(),
        name: name.to_owned(),
        uid: format!("uid of {name}"),
        is_bound: volume.is_some(),
        volume: volume.map(str::to_owned),
        owner: None,
    }
}

fn volume(name: &str, claim: &str) -> Volume {
    Volume {
        name: name.parse().unwrap(),
        driver: Some(DRIVER.to_owned()),
        handle: format!("handle of {name}"),
        claim: Some(ClaimOf { namespace: "ns".to_owned(), name: claim.to_owned(), uid: None }),
        mount_options: Vec::new(),
        attributes: BTreeMap::from([("bucketName".to_owned(), "bucket".to_owned())]),
        access_mode: Some(AccessMode::MultiNodeMultiWriter),
        pod_problem: None,
    }
}

fn attachment(name: &str, node: &str, volume: &str, version: &str, entries: &[(&str, &str)]) -> ReportedAttachment {
    let entry = |workload: &str| vec![Entry { workload: uid(workload), attached_at: Timestamp::from_unix_seconds(0) }];
    ReportedAttachment {
        attachment: Attachment {
            name: name.to_owned(),
            resource_version: version.to_owned(),
            is_terminating: false,
            fields: Fields {
                node: node.to_owned(),
                persistent_volume: volume.parse().unwrap(),
                volume_id: String::new(),
                mount_options: String::new(),
                fs_group: String::new(),
                authentication_source: None,
                workload_namespace: None,
                service_account: None,
            },
            entries: entries.iter().map(|(pod, workload)| ((*pod).to_owned(), entry(workload))).collect(),
        },
        status: None,
    }
}

fn pod(name: &str, uid: &str, place: Option<(&str, &str)>) -> StartedPod {
    StartedPod {
        pod: MountpointPod {
            name: name.to_owned(),
            uid: uid.to_owned(),
            resource_version: "1".to_owned(),
            phase: Phase::Running,
            is_terminating: false,
            is_retired: false,
            refuses_new_workloads: false,
            driver_version: None,
            created_at: Timestamp::from_unix_seconds(0),
            trouble: None,
        },
        node: place.map(|(node, _)| node.to_owned()),
        persistent_volume: place.map(|(_, volume)| volume.parse().unwrap()),
        mounted: None,
    }
}

fn unit(node: &str, volume: &str) -> Unit {
    Unit { node: node.to_owned(), persistent_volume: volume.parse().unwrap() }
}

#[track_caller]
fn check(affected: Affected, expected: &[(&str, &str)]) {
    let expected: Affected = expected.iter().map(|(node, volume)| unit(node, volume)).collect();
    assert_eq!(Vec::from_iter(affected), Vec::from_iter(expected));
}

#[test]
fn whichever_comes_last_makes_the_unit_known() {
    let all = [0, 1, 2];
    for first in all {
        for second in all.into_iter().filter(|it| *it != first) {
            let mut cache = cache();
            let mut tell = |which| match which {
                0 => cache.tell_workloads(News::Changed(workload("a", "node", "c")), Instant::now()),
                1 => cache.tell_claims(News::Changed(claim("c", Some("pv")))),
                _ => cache.tell_volumes(News::Changed(volume("pv", "c"))),
            };
            check(tell(first), &[]);
            check(tell(second), &[]);
            check(tell(3 - first - second), &[("node", "pv")]);
            let observed = cache.observe(&unit("node", "pv"));
            assert_eq!(observed.volume, VolumeState::Usable);
            assert!(matches!(observed.workloads[0].wish, Some(Ok(_))), "{observed:?}");
        }
    }
}

/// A cache that knows workload `a` on `node`, which uses `pv`.
fn one_workload() -> Cache {
    let mut cache = cache();
    cache.tell_workloads(News::All(vec![workload("a", "node", "c")]), Instant::now());
    cache.tell_claims(News::All(vec![claim("c", Some("pv"))]));
    cache.tell_volumes(News::All(vec![volume("pv", "c")]));
    cache
}

#[test]
fn old_news_affect_nobody() {
    let mut cache = one_workload();
    check(cache.tell_workloads(News::Changed(workload("a", "node", "c")), Instant::now()), &[]);
    check(cache.tell_claims(News::All(vec![claim("c", Some("pv"))])), &[]);
    check(cache.tell_volumes(News::Changed(volume("pv", "c"))), &[]);
}

#[test]
fn volumes_of_others_affect_nobody() {
    let mut cache = one_workload();
    let other = Volume { driver: Some("other".to_owned()), ..volume("pv2", "c2") };
    cache.tell_volumes(News::Changed(other));
    cache.tell_claims(News::Changed(claim("c2", Some("pv2"))));
    check(cache.tell_workloads(News::Changed(workload("b", "node", "c2")), Instant::now()), &[]);
    assert_eq!(cache.units(), Affected::from([unit("node", "pv")]));
}

#[test]
fn a_workload_that_is_gone_is_remembered_for_a_while() {
    let now = Instant::now();
    for news in [News::Gone(workload("a", "node", "c")), News::All(Vec::new())] {
        let mut cache = one_workload();
        check(cache.tell_workloads(news, now), &[("node", "pv")]);
        let observed = cache.observe(&unit("node", "pv"));
        assert_eq!((observed.workloads, observed.gone), (Vec::new(), BTreeSet::from([uid("a")])));
        cache.forget_gone(now + Duration::from_secs(299));
        assert_eq!(cache.observe(&unit("node", "pv")).gone.len(), 1);
        cache.forget_gone(now + Duration::from_secs(301));
        assert_eq!(cache.observe(&unit("node", "pv")).gone.len(), 0);
    }
}

#[test]
fn a_volume_affects_whoever_is_attached_even_if_nobody_uses_it_any_more() {
    let mut cache = cache();
    check(
        cache.tell_attachments(News::Changed(attachment("A", "node", "pv", "1", &[("mp-a", "a")]))),
        &[("node", "pv")],
    );
    check(cache.tell_volumes(News::Changed(volume("pv", "c"))), &[("node", "pv")]);
    check(cache.tell_volumes(News::All(Vec::new())), &[("node", "pv")]);
    assert_eq!(cache.observe(&unit("node", "pv")).volume, VolumeState::Missing);
}

#[test]
fn attached_workloads_are_seen_whatever_they_use() {
    let mut cache = cache();
    cache.tell_attachments(News::Changed(attachment("A", "node", "pv", "1", &[("mp-a", "a")])));
    check(cache.tell_workloads(News::Changed(workload("a", "node", "other")), Instant::now()), &[("node", "pv")]);
    let observed = cache.observe(&unit("node", "pv"));
    assert_eq!(observed.workloads, [Resident { uid: uid("a"), activity: Activity::Starting, wish: None }]);
}

#[test]
fn our_own_writes_are_not_taken_back_by_older_news() {
    let mut cache = cache();
    let versions = |cache: &Cache| {
        let observed = cache.observe(&unit("node", "pv"));
        observed.attachments.iter().map(|it| it.resource_version.clone()).collect::<Vec<_>>()
    };
    cache.tell_attachments(News::Changed(attachment("A", "node", "pv", "10", &[])));
    check(cache.tell_attachments(News::Changed(attachment("A", "node", "pv", "9", &[("mp-a", "a")]))), &[]);
    assert_eq!(versions(&cache), ["10"]);
    check(cache.tell_attachments(News::Changed(attachment("A", "node", "pv", "11", &[]))), &[("node", "pv")]);
    assert_eq!(versions(&cache), ["11"]);
    // A list is the truth, also after the API server's memory was restored from an older copy.
    check(cache.tell_attachments(News::All(vec![attachment("A", "node", "pv", "3", &[])])), &[("node", "pv")]);
    assert_eq!(versions(&cache), ["3"]);
}

#[test]
fn mountpoint_pods_are_found_by_what_they_say_and_by_who_names_them() {
    let mut cache = cache();
    check(cache.tell_pods(News::Changed(pod("mp-a", "1", Some(("node", "pv"))))), &[("node", "pv")]);
    check(cache.tell_pods(News::Changed(pod("mp-b", "2", None))), &[]);
    cache.tell_attachments(News::Changed(attachment("A", "node", "pv", "1", &[("mp-b", "b")])));
    let names = |cache: &Cache| {
        let observed = cache.observe(&unit("node", "pv"));
        observed.mountpoint_pods.iter().map(|it| it.name.clone()).collect::<Vec<_>>()
    };
    assert_eq!(names(&cache), ["mp-a", "mp-b"]);
    check(cache.tell_pods(News::Gone(pod("mp-b", "2", None))), &[("node", "pv")]);
    assert_eq!(names(&cache), ["mp-a"]);
    // Of a predecessor under the same name.
    check(cache.tell_pods(News::Gone(pod("mp-a", "0", Some(("node", "pv"))))), &[]);
    assert_eq!(names(&cache), ["mp-a"]);
}

#[test]
fn attached_workloads_that_a_later_list_does_not_know_are_gone() {
    let mut cache = cache();
    cache.tell_attachments(News::All(vec![attachment("A", "node", "pv", "1", &[("mp-a", "a")])]));
    cache.expect_attached_workloads();
    // Attached while the list was on its way: it may be too young to be in there.
    cache.tell_attachments(News::Changed(attachment("B", "node", "pv", "2", &[("mp-b", "b")])));
    check(cache.tell_workloads(News::All(Vec::new()), Instant::now()), &[("node", "pv")]);
    assert_eq!(cache.observe(&unit("node", "pv")).gone, BTreeSet::from([uid("a")]));
    // A list that nobody announced proves nothing.
    check(cache.tell_workloads(News::All(Vec::new()), Instant::now()), &[]);
}
