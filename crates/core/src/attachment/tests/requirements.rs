//! Which volumes of a workload are ours, in whatever order its claims, PVs and node appear.

use super::*;
use crate::chain::Chain;
use crate::publish::AccessMode;

const DRIVER: &str = "s3.csi.scality.com";

fn workload(claims: &[&str]) -> Workload {
    Workload {
        uid: uid("a"),
        namespace: "space".to_owned(),
        name: "app".to_owned(),
        service_account: "default".to_owned(),
        node: Some("node".to_owned()),
        phase: PodPhase::Pending,
        is_terminating: false,
        is_unready: false,
        has_dead_mount: false,
        fs_group: None,
        claims: claims.iter().map(|it| ClaimSource::Claim((*it).to_owned())).collect(),
        headroom_gate: HeadroomGate::Absent,
    }
}

fn claim(name: &str, volume: &str) -> Claim {
    Claim {
        namespace: "space".to_owned(),
        name: name.to_owned(),
        uid: format!("uid of {name}"),
        is_bound: true,
        volume: Some(volume.to_owned()),
        owner: None,
    }
}

fn volume(name: &str, claim: &str) -> VolumeFacts {
    VolumeFacts {
        name: name.parse().unwrap(),
        driver: Some(DRIVER.to_owned()),
        handle: "handle".to_owned(),
        claim: Some(ClaimRef {
            namespace: "space".to_owned(),
            name: claim.to_owned(),
            uid: Some(format!("uid of {claim}")),
        }),
        mount_options: Vec::new(),
        attributes: BTreeMap::from([("bucketName".to_owned(), "bucket".to_owned())]),
        secret: None,
        access_mode: Some(AccessMode::MultiNodeMultiWriter),
        pod_problem: None,
        lifecycle: VolumeLifecycle::Persistent,
    }
}

#[test]
fn only_modes_of_one_node_keep_a_volume_to_one_node() {
    let scope = |access_mode| VolumeFacts { access_mode, ..volume("pv", "claim") }.scope();
    assert_eq!(scope(Some(AccessMode::SingleNodeMultiWriter)), NodeScope::SingleNode);
    assert_eq!(scope(Some(AccessMode::SingleNodeSingleWriter)), NodeScope::SingleNode);
    assert_eq!(scope(Some(AccessMode::MultiNodeMultiWriter)), NodeScope::AllNodes);
    assert_eq!(scope(Some(AccessMode::MultiNodeReaderOnly)), NodeScope::AllNodes);
    assert_eq!(scope(None), NodeScope::AllNodes);
}

fn objects(claims: &[Claim], volumes: &[VolumeFacts]) -> Objects {
    Objects {
        claims: claims.iter().map(|it| ((it.namespace.clone(), it.name.clone()), it.clone())).collect(),
        volumes: volumes.iter().map(|it| (it.name.as_str().to_owned(), it.clone())).collect(),
    }
}

/// `expected`: a PV that is ours, or `claim: why it waits`.
#[track_caller]
fn check(workload: &Workload, objects: &Objects, expected: &[&str]) {
    let RequiredVolumes { ours, unresolved } = required_volumes(workload, DRIVER, objects);
    let mut lines: Vec<String> = ours
        .iter()
        .map(|(name, requirement)| match requirement {
            Ok(_) => name.to_string(),
            Err(refused) => format!("{name}: {}", Chain(refused)),
        })
        .collect();
    lines.extend(unresolved.iter().map(|(claim, reason)| format!("{claim}: {reason}")));
    assert_eq!(lines, expected);
}

/// C1 to C4
#[test]
fn claims_volumes_and_nodes_may_come_in_any_order() {
    let unscheduled = Workload { node: None, ..workload(&["data"]) };
    let unbound = || Claim { is_bound: false, volume: None, ..claim("data", "pv") };
    let half_bound = Claim { is_bound: false, ..claim("data", "pv") };
    let bound = || [claim("data", "pv")];
    let unclaimed = || VolumeFacts { claim: None, ..volume("pv", "data") };

    check(&workload(&["data"]), &objects(&bound(), &[volume("pv", "data")]), &["pv"]);
    check(&unscheduled, &objects(&bound(), &[volume("pv", "data")]), &[]);
    check(&unscheduled, &objects(&[unbound()], &[unclaimed()]), &[]);
    let ahead = unscheduled_volumes(&unscheduled, DRIVER, &objects(&bound(), &[volume("pv", "data")]));
    assert_eq!(ahead.ours.keys().map(PvName::as_str).collect::<Vec<_>>(), ["pv"]);
    let ahead = unscheduled_volumes(&unscheduled, DRIVER, &objects(&[unbound()], &[unclaimed()]));
    assert_eq!(ahead.unresolved, BTreeMap::from([("data".to_owned(), UnresolvedClaim::ClaimNotBound)]));
    check(&workload(&["data"]), &objects(&[], &[]), &["data: the claim does not exist yet"]);
    check(&workload(&["data"]), &objects(&[unbound()], &[unclaimed()]), &["data: the claim is not bound yet"]);
    check(
        &workload(&["data"]),
        &objects(&[half_bound], &[volume("pv", "data")]),
        &["data: the claim is not bound yet"],
    );
    check(&workload(&["data"]), &objects(&bound(), &[]), &["data: the claim's PersistentVolume does not exist yet"]);
    check(
        &workload(&["data"]),
        &objects(&bound(), &[unclaimed()]),
        &["data: the claim's PersistentVolume is bound to another claim"],
    );
}

/// C1 to C4, each with several volumes, other drivers and a mixture; C19 to C21
#[test]
fn only_our_volumes_count_and_each_once() {
    let other = VolumeFacts { driver: Some("other.csi".to_owned()), ..volume("pv-2", "logs") };
    let no_csi = VolumeFacts { driver: None, ..volume("pv-3", "disk") };
    let objects = objects(
        &[claim("data", "pv-1"), claim("logs", "pv-2"), claim("disk", "pv-3"), claim("more", "pv-4")],
        &[volume("pv-1", "data"), other, no_csi, volume("pv-4", "more")],
    );
    check(&workload(&[]), &objects, &[]);
    check(&workload(&["logs", "disk"]), &objects, &[]);
    check(&workload(&["data", "more"]), &objects, &["pv-1", "pv-4"]);
    check(&workload(&["logs", "data", "disk"]), &objects, &["pv-1"]);
    check(&workload(&["data", "data"]), &objects, &["pv-1"]);
    check(&workload(&["data", "late"]), &objects, &["pv-1", "late: the claim does not exist yet"]);
}

/// Its volume may have been mounted by version 1, whose engine died.
#[test]
fn a_running_workload_with_a_dead_mount_or_not_ready_waits_for_its_volumes() {
    let running = Workload { phase: PodPhase::Running, ..workload(&["data"]) };
    assert_eq!(running.activity(), Activity::Using);
    let dead = Workload { has_dead_mount: true, ..running.clone() };
    assert_eq!(dead.activity(), Activity::Starting);
    assert_eq!(Workload { is_terminating: true, ..dead }.activity(), Activity::Using);
    let unready = Workload { is_unready: true, ..running };
    assert_eq!(unready.activity(), Activity::Starting);
    assert_eq!(Workload { is_terminating: true, ..unready.clone() }.activity(), Activity::Using);
    assert_eq!(Workload { phase: PodPhase::Unknown, ..unready.clone() }.activity(), Activity::Using);
    assert_eq!(Workload { phase: PodPhase::Succeeded, ..unready }.activity(), Activity::Finished);
}

#[test]
fn a_volume_counts_only_if_it_is_bound_back() {
    let elsewhere = |change: fn(&mut ClaimRef)| {
        let mut claimed = volume("pv", "data").claim.unwrap();
        change(&mut claimed);
        objects(&[claim("data", "pv")], &[VolumeFacts { claim: Some(claimed), ..volume("pv", "data") }])
    };
    let another = ["data: the claim's PersistentVolume is bound to another claim"];
    check(&workload(&["data"]), &elsewhere(|it| it.namespace = "other".to_owned()), &another);
    check(&workload(&["data"]), &elsewhere(|it| it.name = "other".to_owned()), &another);
    check(&workload(&["data"]), &elsewhere(|it| it.uid = Some("of a former claim".to_owned())), &another);
    check(&workload(&["data"]), &elsewhere(|it| it.uid = None), &["pv"]);
}

#[test]
fn a_generic_ephemeral_volume_is_served_if_its_claim_is_the_workloads_own() {
    let reference = ClaimSource::Ephemeral { volume: "scratch".to_owned() };
    let workload = Workload { claims: vec![reference], ..workload(&[]) };
    let own = Claim { owner: Some(uid("a")), ..claim("app-scratch", "pv") };
    check(&workload, &objects(&[own], &[volume("pv", "app-scratch")]), &["pv"]);
    check(
        &workload,
        &objects(&[claim("app-scratch", "pv")], &[volume("pv", "app-scratch")]),
        &["app-scratch: the claim belongs to another Pod"],
    );
}

#[track_caller]
fn need_of(workload: &Workload, volume: VolumeFacts) -> Result<MountRequirement, String> {
    let objects = objects(&[claim("data", "pv")], &[volume]);
    let mut uses = required_volumes(workload, DRIVER, &objects);
    uses.ours.remove(&volume_name()).unwrap().map_err(|it| Chain(&it).to_string())
}

#[test]
fn the_key_of_a_volume() {
    let options = |it: &[&str]| it.iter().map(|it| (*it).to_owned()).collect::<Vec<_>>();
    let with_options = |it: &[&str]| VolumeFacts { mount_options: options(it), ..volume("pv", "data") };
    let workload = workload(&["data"]);
    let MountRequirement { key, fields, .. } = need_of(&workload, with_options(&["uid=1", "allow-delete"])).unwrap();
    assert_eq!(key, plain_key());
    let expected = AttachmentFields { mount_options: "uid=1,allow-delete".to_owned(), ..plain_need().fields };
    assert_eq!(fields, expected);

    let reordered = need_of(&workload, with_options(&["--allow-delete", "--uid 1"])).unwrap();
    assert_eq!(reordered.key, key);
    let read_only = need_of(&workload, with_options(&["read-only"])).unwrap();
    assert_eq!(read_only.key.volume_access, Access::ReadOnly);
    let readers =
        VolumeFacts { access_mode: Some(AccessMode::MultiNodeReaderOnly), ..with_options(&["uid=1", "allow-delete"]) };
    assert_eq!(need_of(&workload, readers).unwrap().key, SharingKey { volume_access: Access::ReadOnly, ..plain_key() });

    let grouped = Workload { fs_group: Some(1000), ..workload.clone() };
    let MountRequirement { key, fields, .. } = need_of(&grouped, volume("pv", "data")).unwrap();
    assert_eq!((key.fs_group.as_deref(), fields.fs_group.as_str()), (Some("1000"), "1000"));

    let mut secret = volume("pv", "data");
    secret.attributes.insert("authenticationSource".to_owned(), "secret".to_owned());
    let MountRequirement { key, fields, .. } = need_of(&workload, secret).unwrap();
    assert_eq!(key.authentication_source, AuthenticationSource::Secret);
    assert_eq!(fields.authentication_source.as_deref(), Some("secret"));

    let mut part = volume("pv", "data");
    for (key, value) in [("prefix", "team/a"), ("endpointUrl", "http://s3:80"), ("authenticationSource", "secret")] {
        part.attributes.insert(key.to_owned(), value.to_owned());
    }
    let MountRequirement { key, .. } = need_of(&workload, part).unwrap();
    assert_eq!(key.prefix.unwrap().as_str(), "team/a/");
    assert_eq!(key.endpoint.unwrap().as_str(), "http://s3:80");
}

/// Who the workload is does not matter as long as the identity is the volume's.
#[test]
fn workloads_of_other_namespaces_and_accounts_have_the_same_key() {
    let one = need_of(&workload(&["data"]), volume("pv", "data")).unwrap();
    let other = Workload { service_account: "other".to_owned(), uid: uid("b"), ..workload(&["data"]) };
    assert_eq!(need_of(&other, volume("pv", "data")).unwrap(), one);
}

/// C10, C13, C14: where the identity is the workload's, it separates.
#[test]
fn a_workload_s_own_identity_is_part_of_the_key() {
    let mut own = volume("pv", "data");
    own.attributes.insert("authenticationSource".to_owned(), "pod".to_owned());
    let with_role = |role: &str| {
        let mut volume = own.clone();
        volume.attributes.insert("roleArn".to_owned(), role.to_owned());
        volume
    };
    let one = need_of(&workload(&["data"]), own.clone()).unwrap();
    assert_eq!(one.key.authentication_source, AuthenticationSource::Pod);
    assert_eq!(one.fields.workload_namespace.as_deref(), Some(workload(&[]).namespace.as_str()));
    assert_eq!(one.fields.service_account.as_deref(), Some(workload(&[]).service_account.as_str()));
    let same = Workload { uid: uid("b"), ..workload(&["data"]) };
    assert_eq!(need_of(&same, own.clone()).unwrap(), one);
    let other = Workload { service_account: "other".to_owned(), ..same.clone() };
    assert_ne!(need_of(&other, own.clone()).unwrap().key, one.key);
    let role = need_of(&same, with_role("arn:aws:iam::1:role/a")).unwrap();
    assert_ne!(role.key, one.key);
    assert_eq!(
        need_of(&same, with_role("admin")).unwrap_err(),
        "the volume cannot be published: roleArn not usable: correct spec.csi.volumeAttributes.roleArn of the \
         PersistentVolume: role \"admin\" must look like arn:aws:iam::123456789012:role/name"
    );
}

#[test]
fn what_the_node_would_refuse_is_refused_here_in_the_same_words() {
    let refused = |change: fn(&mut VolumeFacts), expected: &str| {
        let mut volume = volume("pv", "data");
        change(&mut volume);
        assert_eq!(need_of(&workload(&["data"]), volume).unwrap_err(), expected);
    };
    let publish = "the volume cannot be published: ";
    refused(
        |it| it.handle = String::new(),
        &format!("{publish}Volume ID not provided: set spec.csi.volumeHandle of the PersistentVolume"),
    );
    refused(
        |it| it.attributes.clear(),
        &format!("{publish}Bucket name not provided: set spec.csi.volumeAttributes.bucketName of the PersistentVolume"),
    );
    refused(
        |it| it.access_mode = Some(AccessMode::Other("ReadWriteOnce".to_owned())),
        &format!(
            "{publish}Volume capability not supported: access mode is ReadWriteOnce; use ReadWriteMany \
             (MULTI_NODE_MULTI_WRITER), ReadOnlyMany (MULTI_NODE_READER_ONLY), or with strategy pod \
             ReadWriteOnce or ReadWriteOncePod"
        ),
    );
    refused(
        |it| it.mount_options = vec![String::new()],
        &format!(
            "{publish}mountOptions not understood: correct spec.mountOptions of the PersistentVolume: mount option \"\" is \
             empty"
        ),
    );
    refused(
        |it| it.mount_options = vec!["uid=1".to_owned(), "uid=2".to_owned()],
        "the volume's mount options contradict each other: mount option --uid is given more than once, with different \
         values (1, 2); keep one of them",
    );
    refused(
        |it| {
            it.attributes.insert("authenticationSource".to_owned(), "vault".to_owned());
        },
        &format!(
            "{publish}authenticationSource \"vault\" is not known: only \"driver\", \"secret\" and \"pod\" are supported"
        ),
    );
    refused(
        |it| {
            it.attributes.insert("prefix".to_owned(), "a".to_owned());
            it.mount_options = vec!["prefix=b/".to_owned()];
        },
        &format!("{publish}mount option prefix and volume attribute prefix exclude each other; remove one of them"),
    );
    refused(
        |it| it.pod_problem = Some("cache type \"disk\" is not known".to_owned()),
        "no Mountpoint Pod can be created for the volume: cache type \"disk\" is not known",
    );
    let grouped = Workload { fs_group: Some(-1), ..workload(&["data"]) };
    assert_eq!(
        need_of(&grouped, volume("pv", "data")).unwrap_err(),
        format!("{publish}fsGroup \"-1\" is not a number: correct securityContext.fsGroup of the Pod")
    );
}

#[test]
fn a_pod_on_the_node_requires_its_volume() {
    let workload = workload(&["data"]);
    let uses = required_volumes(&workload, DRIVER, &objects(&[claim("data", "pv")], &[volume("pv", "data")]));
    let on_node = PodOnNode::new(&workload, &uses, &volume_name());
    assert_eq!((on_node.uid, on_node.activity), (uid("a"), Activity::Starting));
    assert!(matches!(on_node.requirement, Some(Ok(_))));
    assert_eq!(PodOnNode::new(&workload, &uses, &"other".parse().unwrap()).requirement, None);

    assert_eq!(VolumeState::of(None), VolumeState::Missing);
    assert_eq!(VolumeState::of(Some(&volume("pv", "data"))), VolumeState::Usable);
    let problem = VolumeFacts { pod_problem: Some("no".to_owned()), ..volume("pv", "data") };
    assert_eq!(VolumeState::of(Some(&problem)), VolumeState::Refused { problem: "no".to_owned() });
}

fn inline(attributes: &[(&str, &str)]) -> Workload {
    let attributes = attributes.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    let volume = InlineVolume { name: "data".to_owned(), attributes, secret: Some("keys".to_owned()) };
    Workload { claims: vec![ClaimSource::Inline(volume)], ..workload(&[]) }
}

const INLINE: [(&str, &str); 2] = [("bucketName", "bucket"), ("authenticationSource", "secret")];

#[test]
fn an_inline_volume_needs_no_claim_and_belongs_to_its_workload() {
    let one = inline(&INLINE);
    let required = required_volumes(&one, DRIVER, &objects(&[], &[]));
    let name = crate::names::inline_volume_name(&one.uid, "data");
    assert_eq!(required.ours.keys().collect::<Vec<_>>(), [&name]);
    assert!(required.unresolved.is_empty());
    let requirement = required.ours[&name].as_ref().unwrap();
    assert_eq!(requirement.fields.persistent_volume, name);
    assert_eq!(requirement.fields.volume_id, name.as_str());
    assert_eq!(requirement.key.secret.as_deref(), Some("space/keys"));
    assert_eq!(requirement.scope, NodeScope::AllNodes);
    let other = Workload { uid: uid("b"), ..one };
    let other = required_volumes(&other, DRIVER, &objects(&[], &[]));
    assert!(!other.ours.contains_key(&name));
}

#[test]
fn an_inline_volume_is_refused_here_as_on_the_node() {
    let refusal = |attributes: &[(&str, &str)]| {
        let required = required_volumes(&inline(attributes), DRIVER, &objects(&[], &[]));
        Chain(required.ours.values().next().unwrap().as_ref().unwrap_err()).to_string()
    };
    let publish = "the volume cannot be published: correct the volume in the spec of the Pod: ";
    assert_eq!(
        refusal(&[("bucketName", "bucket")]),
        format!(
            "{publish}an inline volume must bring its own keys: set authenticationSource: secret and nodePublishSecretRef, or \
             authenticationSource: pod"
        )
    );
    assert_eq!(
        refusal(&[INLINE[0], INLINE[1], ("mountpointPodServiceAccountName", "admin")]),
        format!(
            "{publish}volume attribute mountpointPodServiceAccountName is not available to inline volumes, only to those of \
             administrators: use a PersistentVolume"
        )
    );
}

#[test]
fn a_volume_that_is_reached_in_another_way_is_another_volume() {
    let reached = |key: &str, value: &str| {
        let mut changed = volume("pv", "data");
        changed.attributes.insert("authenticationSource".to_owned(), "secret".to_owned());
        changed.attributes.insert(key.to_owned(), value.to_owned());
        need_of(&workload(&["data"]), changed)
    };
    let plain = reached("none", "").unwrap();
    for (key, value) in [
        ("region", "eu-1"),
        ("forcePathStyle", "false"),
        ("httpsProxy", "http://a"),
        ("noProxy", "a"),
        ("requesterPays", "true"),
    ] {
        assert_ne!(reached(key, value).unwrap().key, plain.key, "{key}");
    }
    let mut driver = volume("pv", "data");
    driver.attributes.insert("httpsProxy".to_owned(), "http://a".to_owned());
    assert!(need_of(&workload(&["data"]), driver).unwrap_err().contains("only for volumes with keys of their own"));
}
