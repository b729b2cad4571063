use std::collections::BTreeMap;
use std::sync::Arc;

use s3csi_core::AccessMode;
use s3csi_core::attachment::{
    Activity, Attachment, AttachmentFields, ClaimRef, ClaimSource, Entry, HeadroomGate, InlineVolume, MountpointPod,
    PodPhase, Timestamp, VolumeLifecycle,
};
use s3csi_core::headroom::{HeadroomPod, Reservation, headroom_pod_name};
use s3csi_core::mountpoint_pod_name;

use super::*;
use crate::controller::facts::OwnPod;
use crate::controller::queue::Queue;

const DRIVER: &str = "s3.csi.scality.com";

fn cache() -> Cache {
    Cache::new(DRIVER, "3.0.0", 1)
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
        phase: PodPhase::Pending,
        is_terminating: false,
        is_unready: false,
        has_dead_mount: false,
        fs_group: None,
        claims: vec![ClaimSource::Claim(claim.to_owned())],
        headroom_gate: HeadroomGate::Absent,
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

fn volume(name: &str, claim: &str) -> VolumeFacts {
    VolumeFacts {
        name: name.parse().unwrap(),
        driver: Some(DRIVER.to_owned()),
        handle: format!("handle of {name}"),
        claim: Some(ClaimRef { namespace: "ns".to_owned(), name: claim.to_owned(), uid: None }),
        mount_options: Vec::new(),
        attributes: BTreeMap::from([("bucketName".to_owned(), "bucket".to_owned())]),
        secret: None,
        access_mode: Some(AccessMode::MultiNodeMultiWriter),
        pod_problem: None,
        lifecycle: VolumeLifecycle::Persistent,
    }
}

fn attachment(name: &str, node: &str, volume: &str, version: &str, entries: &[(&str, &str)]) -> AttachmentWithStatus {
    let entry = |workload: &str| vec![Entry { workload: uid(workload), attached_at: Timestamp::from_unix_seconds(0) }];
    AttachmentWithStatus {
        attachment: Attachment {
            name: name.to_owned(),
            resource_version: version.to_owned(),
            is_terminating: false,
            fields: AttachmentFields {
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

fn pod(name: &str, uid: &str, place: Option<(&str, &str)>) -> MountpointPodFacts {
    MountpointPodFacts {
        pod: MountpointPod {
            name: name.to_owned(),
            source: name.to_owned(),
            uid: uid.to_owned(),
            resource_version: "1".to_owned(),
            phase: PodPhase::Running,
            is_terminating: false,
            is_retired: false,
            refuses_new_workloads: false,
            driver_version: None,
            is_mounted: false,
            is_movable: false,
            created_at: Timestamp::from_unix_seconds(0),
            problem: None,
            warm: None,
        },
        node: place.map(|(node, _)| node.to_owned()),
        persistent_volume: place.map(|(_, volume)| volume.parse().unwrap()),
        mounted: None,
    }
}

fn key(node: &str, volume: &str) -> ReconcileKey {
    ReconcileKey { node: node.to_owned(), persistent_volume: volume.parse().unwrap() }
}

#[track_caller]
fn check(affected: ReconcileKeys, expected: &[(&str, &str)]) {
    let expected: ReconcileKeys = expected.iter().map(|(node, volume)| key(node, volume)).collect();
    assert_eq!(Vec::from_iter(affected), Vec::from_iter(expected));
}

#[test]
fn whichever_comes_last_makes_the_unit_known() {
    let all = [0, 1, 2];
    for first in all {
        for second in all.into_iter().filter(|it| *it != first) {
            let mut cache = cache();
            let mut update = |which| match which {
                0 => cache.update_workloads(WatchUpdate::Changed(workload("a", "node", "c")), Instant::now()),
                1 => cache.update_claims(WatchUpdate::Changed(claim("c", Some("pv")))),
                _ => cache.update_volumes(WatchUpdate::Changed(volume("pv", "c"))),
            };
            check(update(first), &[]);
            check(update(second), &[]);
            check(update(3 - first - second), &[("node", "pv")]);
            let observed = cache.observe(&key("node", "pv"));
            assert_eq!(observed.volume, VolumeState::Usable);
            assert!(matches!(observed.workloads[0].requirement, Some(Ok(_))), "{observed:?}");
        }
    }
}

/// A cache that knows workload `a` on `node`, which uses `pv`.
fn one_workload() -> Cache {
    let mut cache = cache();
    cache.update_workloads(WatchUpdate::Listed(vec![workload("a", "node", "c")]), Instant::now());
    cache.update_claims(WatchUpdate::Listed(vec![claim("c", Some("pv"))]));
    cache.update_volumes(WatchUpdate::Listed(vec![volume("pv", "c")]));
    cache
}

#[test]
fn unchanged_objects_affect_nothing() {
    let mut cache = one_workload();
    check(cache.update_workloads(WatchUpdate::Changed(workload("a", "node", "c")), Instant::now()), &[]);
    check(cache.update_claims(WatchUpdate::Listed(vec![claim("c", Some("pv"))])), &[]);
    check(cache.update_volumes(WatchUpdate::Changed(volume("pv", "c"))), &[]);
}

#[test]
fn volumes_of_other_drivers_affect_nothing() {
    let mut cache = one_workload();
    let other = VolumeFacts { driver: Some("other".to_owned()), ..volume("pv2", "c2") };
    cache.update_volumes(WatchUpdate::Changed(other));
    cache.update_claims(WatchUpdate::Changed(claim("c2", Some("pv2"))));
    check(cache.update_workloads(WatchUpdate::Changed(workload("b", "node", "c2")), Instant::now()), &[]);
    assert_eq!(cache.all_keys(), ReconcileKeys::from([key("node", "pv")]));
}

#[test]
fn a_workload_that_is_gone_is_remembered_for_a_while() {
    let now = Instant::now();
    for news in [WatchUpdate::Deleted(workload("a", "node", "c")), WatchUpdate::Listed(Vec::new())] {
        let mut cache = one_workload();
        check(cache.update_workloads(news, now), &[("node", "pv")]);
        let observed = cache.observe(&key("node", "pv"));
        assert_eq!((observed.workloads, observed.gone), (Vec::new(), BTreeSet::from([uid("a")])));
        cache.expire_gone(now + Duration::from_secs(299));
        assert_eq!(cache.observe(&key("node", "pv")).gone.len(), 1);
        cache.expire_gone(now + Duration::from_secs(301));
        assert_eq!(cache.observe(&key("node", "pv")).gone.len(), 0);
    }
}

#[test]
fn a_volume_affects_attached_workloads_even_if_none_uses_it_any_more() {
    let mut cache = cache();
    check(
        cache.update_attachments(WatchUpdate::Changed(attachment("A", "node", "pv", "1", &[("mp-a", "a")]))),
        &[("node", "pv")],
    );
    check(cache.update_volumes(WatchUpdate::Changed(volume("pv", "c"))), &[("node", "pv")]);
    check(cache.update_volumes(WatchUpdate::Listed(Vec::new())), &[("node", "pv")]);
    assert_eq!(cache.observe(&key("node", "pv")).volume, VolumeState::Missing);
}

#[test]
fn attached_workloads_are_seen_whatever_they_use() {
    let mut cache = cache();
    cache.update_attachments(WatchUpdate::Changed(attachment("A", "node", "pv", "1", &[("mp-a", "a")])));
    check(
        cache.update_workloads(WatchUpdate::Changed(workload("a", "node", "other")), Instant::now()),
        &[("node", "pv")],
    );
    let observed = cache.observe(&key("node", "pv"));
    assert_eq!(observed.workloads, [PodOnNode { uid: uid("a"), activity: Activity::Starting, requirement: None }]);
}

#[test]
fn workloads_require_nothing_of_a_strategy_that_is_drained() {
    let requires = |new_workloads: NewWorkloads| {
        let mut cache = cache().with_new_workloads(new_workloads);
        cache.update_volumes(WatchUpdate::Changed(volume("pv", "c")));
        cache.update_claims(WatchUpdate::Changed(claim("c", Some("pv"))));
        cache.update_workloads(WatchUpdate::Changed(workload("a", "node", "c")), Instant::now());
        let observed = cache.observe(&key("node", "pv"));
        assert_eq!(observed.workloads.len(), 1, "it is known");
        observed.workloads[0].requirement.is_some()
    };
    assert!(requires(NewWorkloads::Attached));
    assert!(!requires(NewWorkloads::LeftAlone));
}

#[test]
fn our_own_writes_are_not_taken_back_by_older_news() {
    let mut cache = cache();
    let versions = |cache: &Cache| {
        let observed = cache.observe(&key("node", "pv"));
        observed.attachments.iter().map(|it| it.resource_version.clone()).collect::<Vec<_>>()
    };
    cache.update_attachments(WatchUpdate::Changed(attachment("A", "node", "pv", "10", &[])));
    check(cache.update_attachments(WatchUpdate::Changed(attachment("A", "node", "pv", "9", &[("mp-a", "a")]))), &[]);
    assert_eq!(versions(&cache), ["10"]);
    check(cache.update_attachments(WatchUpdate::Changed(attachment("A", "node", "pv", "11", &[]))), &[("node", "pv")]);
    assert_eq!(versions(&cache), ["11"]);
    // A list is the truth, also after the API server's memory was restored from an older copy.
    check(
        cache.update_attachments(WatchUpdate::Listed(vec![attachment("A", "node", "pv", "3", &[])])),
        &[("node", "pv")],
    );
    assert_eq!(versions(&cache), ["3"]);
}

#[test]
fn mountpoint_pods_are_found_by_what_they_say_and_by_who_names_them() {
    let mut cache = cache();
    check(cache.update_pods(WatchUpdate::Changed(pod("mp-a", "1", Some(("node", "pv"))))), &[("node", "pv")]);
    check(cache.update_pods(WatchUpdate::Changed(pod("mp-b", "2", None))), &[]);
    cache.update_attachments(WatchUpdate::Changed(attachment("A", "node", "pv", "1", &[("mp-b", "b")])));
    let names = |cache: &Cache| {
        let observed = cache.observe(&key("node", "pv"));
        observed.mountpoint_pods.iter().map(|it| it.name.clone()).collect::<Vec<_>>()
    };
    assert_eq!(names(&cache), ["mp-a", "mp-b"]);
    check(cache.update_pods(WatchUpdate::Deleted(pod("mp-b", "2", None))), &[("node", "pv")]);
    assert_eq!(names(&cache), ["mp-a"]);
    // Of an earlier Pod of the same name.
    check(cache.update_pods(WatchUpdate::Deleted(pod("mp-a", "0", Some(("node", "pv"))))), &[]);
    assert_eq!(names(&cache), ["mp-a"]);
}

#[test]
fn attached_workloads_that_a_later_list_does_not_know_are_gone() {
    let mut cache = cache();
    cache.update_attachments(WatchUpdate::Listed(vec![attachment("A", "node", "pv", "1", &[("mp-a", "a")])]));
    cache.expect_attached_workloads();
    // Attached while the list was on its way: it may be too young to be in there.
    cache.update_attachments(WatchUpdate::Changed(attachment("B", "node", "pv", "2", &[("mp-b", "b")])));
    check(cache.update_workloads(WatchUpdate::Listed(Vec::new()), Instant::now()), &[("node", "pv")]);
    assert_eq!(cache.observe(&key("node", "pv")).gone, BTreeSet::from([uid("a")]));
    // A list that was not announced proves nothing.
    check(cache.update_workloads(WatchUpdate::Listed(Vec::new()), Instant::now()), &[]);
}

fn with_inline(name: &str) -> Workload {
    let attributes = [("bucketName", "bucket"), ("authenticationSource", "secret")];
    let attributes = attributes.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    let volume = InlineVolume { name: "data".to_owned(), attributes, secret: Some("keys".to_owned()) };
    Workload { claims: vec![ClaimSource::Inline(volume)], ..workload(name, "node", "none") }
}

#[test]
fn an_inline_volume_is_known_as_long_as_its_workload() {
    let mut cache = cache().with_inline_volumes(InlineVolumes::Allowed);
    let workload = with_inline("w");
    let name = s3csi_core::names::inline_volume_name(&workload.uid, "data");
    let key = ReconcileKey { node: "node".to_owned(), persistent_volume: name.clone() };
    let affected = cache.update_workloads(WatchUpdate::Changed(workload.clone()), Instant::now());
    assert_eq!(affected, ReconcileKeys::from([key.clone()]));
    let observed = cache.observe(&key);
    assert_eq!(observed.volume, VolumeState::Usable);
    assert!(matches!(&observed.workloads[..], [PodOnNode { requirement: Some(Ok(_)), .. }]), "{observed:?}");
    assert_eq!(cache.volume(&name).unwrap().secret.as_deref(), Some("ns/keys"));
    let affected = cache.update_workloads(WatchUpdate::Deleted(workload), Instant::now());
    assert_eq!(affected, ReconcileKeys::from([key.clone()]));
    assert_eq!(cache.observe(&key).volume, VolumeState::Missing);
}

#[test]
fn inline_volumes_do_not_exist_where_they_are_refused() {
    let mut cache = cache();
    let affected = cache.update_workloads(WatchUpdate::Changed(with_inline("w")), Instant::now());
    assert_eq!(affected, ReconcileKeys::new());
}

/// A cache in which room may be reserved, and the queue of workloads.
fn with_headroom() -> (Cache, Arc<Queue<WorkloadUid>>) {
    let queue = Arc::new(Queue::default());
    (cache().with_headroom(Reservation::On, queue.clone()), queue)
}

/// What was enqueued since the last call.
async fn enqueued(queue: &Queue<WorkloadUid>) -> Vec<String> {
    let mut found = Vec::new();
    while 0 < queue.depth(tokio::time::Instant::now()).due {
        let uid = queue.next().await;
        queue.done(&uid, None);
        found.push(uid.to_string());
    }
    found
}

fn gated(name: &str, claims: &[&str]) -> Workload {
    let claims = claims.iter().map(|it| ClaimSource::Claim((*it).to_owned())).collect();
    Workload { node: None, headroom_gate: HeadroomGate::Present, claims, ..workload(name, "", "") }
}

fn headroom_pod(workload: &str, volume: &str) -> HeadroomPod {
    let (workload, persistent_volume) = (uid(workload), volume.parse().unwrap());
    HeadroomPod {
        name: headroom_pod_name(&workload, &persistent_volume),
        uid: "uid".to_owned(),
        workload,
        persistent_volume,
        phase: PodPhase::Running,
        is_terminating: false,
    }
}

#[tokio::test]
async fn a_gated_workload_is_looked_at_when_its_volumes_become_known() {
    let (mut cache, queue) = with_headroom();
    cache.update_workloads(WatchUpdate::Changed(gated("a", &["c"])), Instant::now());
    assert_eq!(enqueued(&queue).await, ["a"]);
    assert_eq!(cache.observe_headroom(&uid("a")).workload.unwrap().unresolved.len(), 1);
    cache.update_claims(WatchUpdate::Changed(claim("c", Some("pv"))));
    assert_eq!(enqueued(&queue).await, ["a"]);
    cache.update_volumes(WatchUpdate::Changed(volume("pv", "c")));
    assert_eq!(enqueued(&queue).await, ["a"]);
    let observed = cache.observe_headroom(&uid("a")).workload.unwrap();
    assert_eq!((observed.volumes, observed.unresolved), (["pv".parse().unwrap()].into(), BTreeMap::new()));
    assert_eq!(cache.headroom_workloads(), [uid("a")].into());
    // Ungated, nothing is left to do.
    let admitted = Workload { headroom_gate: HeadroomGate::Removed, ..gated("a", &["c"]) };
    cache.update_workloads(WatchUpdate::Changed(admitted), Instant::now());
    assert_eq!((enqueued(&queue).await, cache.headroom_workloads()), (Vec::new(), BTreeSet::new()));
}

#[test]
fn pods_without_volumes_and_gate_are_not_kept() {
    let (mut cache, _) = with_headroom();
    let bare = |gate| Workload { headroom_gate: gate, ..gated("a", &[]) };
    cache.update_workloads(WatchUpdate::Changed(bare(HeadroomGate::Present)), Instant::now());
    assert!(cache.workload(&uid("a")).is_some());
    cache.update_workloads(WatchUpdate::Changed(bare(HeadroomGate::Absent)), Instant::now());
    assert!(cache.workload(&uid("a")).is_none());
}

#[test]
fn mountpoint_pods_may_preempt_until_their_workload_runs_also_when_headroom_was_evicted() {
    let admitted = || Workload { headroom_gate: HeadroomGate::Removed, ..workload("a", "node", "c") };
    let check = |reservation: Reservation, workload: Workload, expected: bool| {
        let mut cache = cache().with_headroom(reservation, Arc::new(Queue::default()));
        cache.update_own_pods(WatchUpdate::Listed(vec![OwnPod::Headroom(headroom_pod("a", "pv"))]));
        cache.update_workloads(WatchUpdate::Changed(workload), Instant::now());
        assert_eq!(cache.has_headroom(&uid("a")), expected);
        cache.update_own_pods(WatchUpdate::Deleted(OwnPod::Headroom(headroom_pod("a", "pv"))));
        assert_eq!(cache.has_headroom(&uid("a")), expected);
    };
    check(Reservation::On, admitted(), true);
    check(Reservation::On, Workload { phase: PodPhase::Running, ..admitted() }, false);
    check(Reservation::On, workload("a", "node", "c"), false);
    check(Reservation::Off, admitted(), false);
}

#[tokio::test]
async fn a_volume_is_served_when_its_mountpoint_pod_runs_or_is_that_of_another_workload() {
    let (mut cache, queue) = with_headroom();
    cache.update_own_pods(WatchUpdate::Listed(vec![OwnPod::Headroom(headroom_pod("a", "pv"))]));
    assert_eq!(enqueued(&queue).await, ["a"]);
    cache.update_workloads(WatchUpdate::Changed(workload("a", "node", "c")), Instant::now());
    enqueued(&queue).await;
    let is_served = |cache: &Cache| !cache.observe_headroom(&uid("a")).workload.unwrap().served.is_empty();

    let own = mountpoint_pod_name(&uid("a"), &"pv".parse().unwrap());
    cache.update_attachments(WatchUpdate::Changed(attachment("x", "node", "pv", "1", &[(&own, "a")])));
    assert_eq!((enqueued(&queue).await, is_served(&cache)), (vec!["a".to_owned()], false));
    let mut starting = pod(&own, "1", Some(("node", "pv")));
    starting.pod.phase = PodPhase::Pending;
    cache.update_own_pods(WatchUpdate::Changed(OwnPod::Mountpoint(starting)));
    assert_eq!((enqueued(&queue).await, is_served(&cache)), (vec!["a".to_owned()], false));
    cache.update_own_pods(WatchUpdate::Changed(OwnPod::Mountpoint(pod(&own, "1", Some(("node", "pv"))))));
    assert_eq!((enqueued(&queue).await, is_served(&cache)), (vec!["a".to_owned()], true));

    let shared = attachment("x", "node", "pv", "2", &[("mp-of-another", "a")]);
    cache.update_attachments(WatchUpdate::Changed(shared));
    assert!(is_served(&cache));

    // It is deleted: another one of this name would be a different Pod.
    let other = HeadroomPod { uid: "other".to_owned(), ..headroom_pod("a", "pv") };
    cache.update_own_pods(WatchUpdate::Deleted(OwnPod::Headroom(other)));
    assert_eq!(cache.headroom_workloads(), [uid("a")].into());
    cache.update_own_pods(WatchUpdate::Deleted(OwnPod::Headroom(headroom_pod("a", "pv"))));
    assert_eq!(cache.headroom_workloads(), BTreeSet::new());
}
