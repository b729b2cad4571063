//! Mountpoint Pods as they are sent to the API server, each written down in a file beside this one.
//! `make update-generated` rewrites them; what changed is then read in the diff.

use std::collections::BTreeMap;
use std::path::Path;

use k8s_openapi::api::core::v1::Pod;
use s3csi_core::mountpoint_pod::{DefaultResources, PodShape, Resources};
use s3csi_core::stage::StageLimit;
use s3csi_driver::api::MetadataKeys;
use s3csi_driver::controller::headroom_pod::{HeadroomParameters, HeadroomSettings, headroom_pod};
use s3csi_driver::controller::pod::{
    Platform, PodOwner, PodParameters, PodSettings, Room, adoption, mountpoint_pod, template, warm_pod,
};

fn settings() -> PodSettings {
    PodSettings {
        keys: MetadataKeys::new("s3.csi.scality.com"),
        namespace: "mount-s3".to_owned(),
        image: "ghcr.io/example/s3csi:3.0.0".to_owned(),
        image_pull_policy: Some("IfNotPresent".to_owned()),
        image_pull_secrets: Vec::new(),
        command: "/bin/s3csi-mounter".to_owned(),
        mounter_arguments: Vec::new(),
        priority_class: Some("mount-s3-critical".to_owned()),
        driver_version: "3.0.0".to_owned(),
        mountpoint_version: "1.19.0".to_owned(),
        ca_config_map: None,
        default_resources: DefaultResources::default(),
        stage: StageLimit::Off,
        platform: Platform::Kubernetes,
        headroom: None,
    }
}

const NAME: &str = "mp-55f7d2331f3149f00d62d7af839d4cee895e1c68a2f0d96ffd359f79";

/// Compares the Pod for a PV with these attributes and options with the file of that name.
#[track_caller]
fn check(file: &str, settings: &PodSettings, volume: &str, attributes: &[(&str, &str)], options: &[&str]) {
    let attributes = attributes.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    let options: Vec<String> = options.iter().map(|it| (*it).to_owned()).collect();
    let order = PodParameters {
        name: NAME,
        source: NAME,
        node_uid: None,
        node: "worker-1",
        workload: &"a4509011-bd2a-4f37-b1b0-05d715087852".parse().unwrap(),
        persistent_volume: &volume.parse().unwrap(),
        volume_id: "a handle, which may be any text/of any length",
        shape: &PodShape::parse(&attributes, &options).unwrap(),
        room: Room::NotReserved,
    };
    check_pod(file, settings, &order);
}

#[track_caller]
fn check_pod(file: &str, settings: &PodSettings, order: &PodParameters<'_>) {
    check_file(file, &mountpoint_pod(settings, order));
}

#[track_caller]
fn check_file(file: &str, pod: &Pod) {
    let pod = serde_saphyr::to_string(pod).unwrap();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mountpoint_pod").join(file);
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&path, &pod).unwrap();
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(pod, expected, "{file} is not the Pod that is built now; if that is right, run: make update-generated");
}

#[test]
fn a_plain_volume() {
    check("plain.yaml", &settings(), "test-vol", &[("bucketName", "b")], &["allow-delete"]);
}

#[test]
fn a_pod_that_takes_over_names_its_source_and_its_node_owns_it() {
    let order = PodParameters {
        name: "mp-66f7d2331f3149f00d62d7af839d4cee895e1c68a2f0d96ffd359f79",
        source: NAME,
        node_uid: Some("11111111-1111-4111-8111-111111111111"),
        node: "worker-1",
        workload: &"a4509011-bd2a-4f37-b1b0-05d715087852".parse().unwrap(),
        persistent_volume: &"test-vol".parse().unwrap(),
        volume_id: "handle",
        shape: &PodShape::parse(&BTreeMap::new(), &[]).unwrap(),
        room: Room::NotReserved,
    };
    check_pod("successor.yaml", &settings(), &order);
}

fn warm() -> Pod {
    let node_uid = Some("11111111-1111-4111-8111-111111111111");
    warm_pod(&settings(), PodOwner { name: NAME, node: "worker-1", node_uid })
}

#[test]
fn a_warm_pod_serves_nothing_yet() {
    check_file("warm.yaml", &warm());
}

/// What an adopted Pod says of itself is what one says that was started for the volume.
#[test]
fn an_adopted_pod_is_like_one_that_was_started() {
    let order = PodParameters {
        name: NAME,
        source: "mp-66f7d2331f3149f00d62d7af839d4cee895e1c68a2f0d96ffd359f79",
        node_uid: Some("11111111-1111-4111-8111-111111111111"),
        node: "worker-1",
        workload: &"a4509011-bd2a-4f37-b1b0-05d715087852".parse().unwrap(),
        persistent_volume: &"test-vol".parse().unwrap(),
        volume_id: "handle",
        shape: &PodShape::default(),
        room: Room::NotReserved,
    };
    let patch = adoption(&settings(), &order, "uid", "7");
    assert_eq!((&patch["metadata"]["uid"], &patch["metadata"]["resourceVersion"]), (&"uid".into(), &"7".into()));
    let mut adopted = warm();
    let merge = |into: &mut Option<BTreeMap<String, String>>, key: &str| {
        for (key, value) in patch["metadata"][key].as_object().unwrap() {
            match value.as_str() {
                Some(value) => into.get_or_insert_default().insert(key.clone(), value.to_owned()),
                None => into.get_or_insert_default().remove(key),
            };
        }
    };
    merge(&mut adopted.metadata.labels, "labels");
    merge(&mut adopted.metadata.annotations, "annotations");
    assert_eq!(adopted, mountpoint_pod(&settings(), &order));
}

fn headroom() -> HeadroomSettings {
    HeadroomSettings {
        priority_class: Some("mount-s3-headroom".to_owned()),
        preempting_priority_class: Some("mount-s3-preempting".to_owned()),
        labels: BTreeMap::from([("team".to_owned(), "storage".to_owned())]),
        ..HeadroomSettings::default()
    }
}

/// The headroom Pod for a volume that asks for much more than room.
fn headroom_of(headroom: &HeadroomSettings) -> Pod {
    let attributes = [
        ("mountpointContainerResourcesRequestsCpu", "100m"),
        ("mountpointContainerResourcesLimitsMemory", "2Gi"),
        ("mountpointPodServiceAccountName", "other"),
        ("cache", "ephemeral"),
        ("cacheEphemeralStorageClassName", "fast"),
        ("cacheEphemeralStorageResourceRequest", "50Gi"),
    ];
    let attributes = attributes.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
    let parameters = HeadroomParameters {
        name: "hr-55f7d2331f3149f00d62d7af839d4cee895e1c68a2f0d96ffd359f79",
        workload: &"a4509011-bd2a-4f37-b1b0-05d715087852".parse().unwrap(),
        namespace: "team-a",
        persistent_volume: &"test-vol".parse().unwrap(),
        shape: &PodShape::parse(&attributes, &[]).unwrap(),
    };
    let ca_config_map = Some("s3-ca".to_owned());
    let settings = PodSettings { stage: "1Gi".parse().unwrap(), ca_config_map, ..settings() };
    headroom_pod(&settings, headroom, &parameters)
}

#[test]
fn headroom_requests_what_the_mountpoint_pod_will_and_nothing_else() {
    check_file("headroom.yaml", &headroom_of(&headroom()));
}

#[test]
fn headroom_may_run_an_image_that_waits_by_itself() {
    let image = Some("registry.example.com/pause:3.10".to_owned());
    check_file("headroom-image.yaml", &headroom_of(&HeadroomSettings { image, ..headroom() }));
}

#[test]
fn a_pod_that_room_is_reserved_for_preempts() {
    let of = |room: Room, headroom: Option<HeadroomSettings>| {
        let order = PodParameters {
            name: NAME,
            source: NAME,
            node_uid: None,
            node: "worker-1",
            workload: &"a4509011-bd2a-4f37-b1b0-05d715087852".parse().unwrap(),
            persistent_volume: &"test-vol".parse().unwrap(),
            volume_id: "handle",
            shape: &PodShape::default(),
            room,
        };
        mountpoint_pod(&PodSettings { headroom, ..settings() }, &order).spec.unwrap().priority_class_name
    };
    let class = |it: &str| Some(it.to_owned());
    assert_eq!(of(Room::Reserved, Some(headroom())), class("mount-s3-preempting"));
    assert_eq!(of(Room::NotReserved, Some(headroom())), class("mount-s3-critical"));
    assert_eq!(of(Room::Reserved, None), class("mount-s3-critical"));
}

#[test]
fn pods_of_the_same_spec_have_the_same_template() {
    let of = |settings: &PodSettings, attributes: &[(&str, &str)]| {
        let attributes = attributes.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        template(settings, &PodShape::parse(&attributes, &[]).unwrap())
    };
    let plain = of(&settings(), &[]);
    assert_eq!(of(&settings(), &[("bucketName", "b")]), plain);
    assert_eq!(of(&PodSettings { driver_version: "3.0.1".to_owned(), ..settings() }, &[]), plain);
    assert_ne!(of(&settings(), &[("mountpointPodServiceAccountName", "reader")]), plain);
    assert_ne!(of(&settings(), &[("mountpointContainerResourcesLimitsMemory", "1Gi")]), plain);
    assert_ne!(of(&settings(), &[("cache", "emptyDir")]), plain);
    assert_ne!(of(&PodSettings { image: "other".to_owned(), ..settings() }, &[]), plain);
}

#[test]
fn on_openshift_the_cluster_chooses_the_user() {
    let settings = PodSettings { platform: Platform::OpenShift, ..settings() };
    check("openshift.yaml", &settings, "test-vol", &[], &[]);
}

#[test]
fn arguments_of_every_mounter() {
    let mounter_arguments = vec!["--standby=on".to_owned(), "--drain-time=3m".to_owned()];
    let settings = PodSettings { mounter_arguments, ..settings() };
    check("mounter-arguments.yaml", &settings, "test-vol", &[("bucketName", "b")], &[]);
}

#[test]
fn resources_and_service_account_of_the_volume() {
    let attributes = [
        ("mountpointContainerResourcesRequestsCpu", "100m"),
        ("mountpointContainerResourcesRequestsMemory", "64Mi"),
        ("mountpointContainerResourcesLimitsCpu", "2"),
        ("mountpointContainerResourcesLimitsMemory", "1Gi"),
        ("mountpointPodServiceAccountName", "reader"),
    ];
    check("resources.yaml", &settings(), "test-vol", &attributes, &[]);
}

#[test]
fn default_resources_and_a_limit_of_the_volume() {
    let resources = |cpu: &str, memory: &str| Resources {
        cpu: (!cpu.is_empty()).then(|| cpu.parse().unwrap()),
        memory: Some(memory.parse().unwrap()),
    };
    let default_resources = DefaultResources { requests: resources("10m", "64Mi"), limits: resources("", "2Gi") };
    let settings = PodSettings { default_resources, ..settings() };
    let attributes = [("mountpointContainerResourcesLimitsMemory", "1Gi")];
    check("default-resources.yaml", &settings, "test-vol", &attributes, &[]);
}

#[test]
fn a_cache_on_disk_with_a_limit() {
    let attributes = [("cache", "emptyDir"), ("cacheEmptyDirSizeLimit", "10Gi")];
    check("cache-disk.yaml", &settings(), "test-vol", &attributes, &[]);
}

#[test]
fn a_cache_in_memory() {
    let attributes = [("cache", "emptyDir"), ("cacheEmptyDirSizeLimit", "1Gi"), ("cacheEmptyDirMedium", "Memory")];
    check("cache-memory.yaml", &settings(), "test-vol", &attributes, &[]);
}

#[test]
fn a_cache_on_a_volume_of_its_own() {
    let attributes = [
        ("cache", "ephemeral"),
        ("cacheEphemeralStorageClassName", "fast"),
        ("cacheEphemeralStorageResourceRequest", "50Gi"),
    ];
    check("cache-ephemeral.yaml", &settings(), "test-vol", &attributes, &[]);
}

#[test]
fn a_cache_asked_for_by_mount_option() {
    check("cache-option.yaml", &settings(), "test-vol", &[], &["cache /tmp/somewhere"]);
}

#[test]
fn staging_with_the_limit_of_the_driver() {
    let settings = PodSettings { stage: "1Gi".parse().unwrap(), ..settings() };
    check("stage.yaml", &settings, "test-vol", &[("cache", "emptyDir")], &[]);
}

#[test]
fn staging_with_the_limit_of_the_volume() {
    let settings = PodSettings { stage: "1Gi".parse().unwrap(), ..settings() };
    check("stage-volume.yaml", &settings, "test-vol", &[("mountpointStageSizeLimit", "20Gi")], &[]);
}

#[test]
fn a_volume_may_turn_staging_off() {
    let settings = PodSettings { stage: "1Gi".parse().unwrap(), ..settings() };
    check("plain.yaml", &settings, "test-vol", &[("mountpointStageSizeLimit", "0")], &[]);
}

#[test]
fn certificates_and_pull_secrets_and_text_that_is_no_label() {
    let settings = PodSettings {
        ca_config_map: Some("s3-ca".to_owned()),
        image_pull_secrets: vec!["registry".to_owned()],
        image_pull_policy: None,
        priority_class: None,
        mountpoint_version: "not a label".to_owned(),
        ..settings()
    };
    check("certificates.yaml", &settings, &"v".repeat(100), &[], &[]);
}
