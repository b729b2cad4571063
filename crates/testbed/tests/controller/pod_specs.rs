//! What a PV says about its Mountpoint Pods (C28–C38), as the API server keeps it. The whole object is a snapshot elsewhere.

use k8s_openapi::api::core::v1::{Pod, PodSpec};

use crate::world::World;
use crate::world::objects::on;

const SERVED: [&str; 2] = ["attachment pv on node: mp(a)=a", "pod mp(a) of pv on node: Pending"];

/// The Mountpoint Pod for a volume with these attributes and options.
async fn pod(name: &str, options: &[&str], attributes: &[(&str, &str)]) -> Pod {
    let world = World::shared(name).await;
    world.volume_with("pv", options, attributes).await;
    let a = world.workload("a", on("node", &["pv"])).await;
    world.check(&[&a], &SERVED).await;
    world.mountpoint_pods().await.remove(0)
}

async fn spec(name: &str, options: &[&str], attributes: &[(&str, &str)]) -> PodSpec {
    pod(name, options, attributes).await.spec.unwrap()
}

/// No Mountpoint Pod is created for such a volume, and an Event on the workload says why.
async fn check_refused(name: &str, options: &[&str], attributes: &[(&str, &str)], reason: &str) {
    use k8s_openapi::api::events::v1::Event;
    let world = World::shared(name).await;
    world.volume_with("pv", options, attributes).await;
    let a = world.workload("a", on("node", &["pv"])).await;
    let events: kube::Api<Event> = kube::Api::namespaced(world.client.clone(), &world.name);
    crate::world::eventually("an Event on the workload", async || {
        let events = events.list(&kube::api::ListParams::default()).await.unwrap();
        events.items.iter().any(|it| it.note.as_deref().is_some_and(|it| it.contains(reason))).then_some(())
    })
    .await;
    world.check_now(&[&a], &[]).await;
}

#[tokio::test]
async fn a_plain_one_has_everything_that_was_decided() {
    let pod = pod("plain", &[], &[]).await;
    let driver = crate::world::DRIVER;
    let labels = pod.metadata.labels.unwrap();
    assert_eq!(labels[&format!("{driver}/mounted-by-csi-driver-version")], env!("CARGO_PKG_VERSION"));
    assert_eq!(labels[&format!("{driver}/mountpoint-version")], env!("CARGO_PKG_VERSION"));
    let annotations = pod.metadata.annotations.unwrap();
    assert_eq!(annotations[&format!("{driver}/volume-name")], "plain.pv");
    assert_eq!(annotations[&format!("{driver}/volume-id")], "handle-plain.pv");
    assert_eq!(annotations["cluster-autoscaler.kubernetes.io/daemonset-pod"], "true");
    let spec = pod.spec.unwrap();
    assert_eq!(spec.restart_policy.as_deref(), Some("OnFailure"));
    assert_eq!(spec.priority_class_name.as_deref(), Some("mount-s3-critical"));
    assert_eq!(spec.priority, Some(1_000_000_000));
    assert_eq!(spec.node_selector.unwrap()["kubernetes.io/os"], "linux");
    assert_eq!(spec.termination_grace_period_seconds, Some(600));
    assert_eq!(spec.automount_service_account_token, Some(false));
    assert!(spec.tolerations.unwrap().iter().any(|it| it.key.is_none() && it.operator.as_deref() == Some("Exists")));
    let container = &spec.containers[0];
    assert_eq!(container.image.as_deref(), Some("localhost/s3csi:test"));
    assert_eq!(container.image_pull_policy.as_deref(), Some("Never"));
    assert_eq!(container.command.as_deref(), Some(["/bin/s3csi-mounter".to_owned()].as_slice()));
}

#[tokio::test]
async fn c28_the_service_account_of_the_volume_is_used() {
    let spec = spec("c28", &[], &[("mountpointPodServiceAccountName", "reader")]).await;
    assert_eq!(spec.service_account_name.as_deref(), Some("reader"));
}

#[tokio::test]
async fn c29_a_long_volume_handle_lands_in_an_annotation() {
    let world = World::shared("c29").await;
    let handle = "any text, ünd long; ".repeat(40);
    let mut order = world.order(&[], &[]);
    order.handle = Some(handle.clone());
    world.create_volume("pv", order).await;
    world.create_claim("pv").await;
    world.bind("pv").await;
    let a = world.workload("a", on("node", &["pv"])).await;
    world.check(&[&a], &SERVED).await;
    let pod = world.mountpoint_pods().await.remove(0);
    assert_eq!(pod.metadata.annotations.unwrap()[&format!("{}/volume-id", world.driver)], handle);
}

#[tokio::test]
async fn a_long_volume_name_is_no_label_and_no_obstacle() {
    let world = World::shared("long-name").await;
    let name = "v".repeat(120);
    world.volume(&name).await;
    let a = world.workload("a", on("node", &[&name])).await;
    let expected = [format!("attachment {name} on node: mp(a)=a"), format!("pod mp(a) of {name} on node: Pending")];
    world.check(&[&a], &[&expected[0], &expected[1]]).await;
}

fn cache_of(spec: &PodSpec) -> &k8s_openapi::api::core::v1::Volume {
    let mount = spec.containers[0].volume_mounts.as_ref().unwrap().iter().find(|it| it.name == "local-cache").unwrap();
    assert_eq!(mount.mount_path, "/local-cache");
    spec.volumes.as_ref().unwrap().iter().find(|it| it.name == "local-cache").unwrap()
}

fn stage_limit_of(spec: &PodSpec) -> Option<&str> {
    let volume = spec.volumes.as_ref().unwrap().iter().find(|it| it.name == "local-stage")?;
    Some(&volume.empty_dir.as_ref().unwrap().size_limit.as_ref().unwrap().0)
}

#[tokio::test]
async fn each_has_a_volume_for_staged_files() {
    let plain = spec("stage", &[], &[]).await;
    assert_eq!(stage_limit_of(&plain), Some("1Gi"));
    let arguments = plain.containers[0].args.as_ref().unwrap();
    for argument in ["--stage-dir=/local-stage", "--stage-size-limit=1Gi"] {
        assert!(arguments.iter().any(|it| it == argument), "{arguments:?}");
    }
    let large = spec("stage-large", &[], &[("mountpointStageSizeLimit", "20Gi")]).await;
    assert_eq!(stage_limit_of(&large), Some("20Gi"));
    let none = spec("stage-none", &[], &[("mountpointStageSizeLimit", "0")]).await;
    assert_eq!(stage_limit_of(&none), None);
    let reason = "volume attribute mountpointStageSizeLimit \"much\" is not a size such as 1Gi, or 0 for none";
    check_refused("stage-wrong", &[], &[("mountpointStageSizeLimit", "much")], reason).await;
}

#[tokio::test]
async fn c30_a_cache_by_mount_option_is_an_empty_dir() {
    let spec = spec("c30", &["cache /tmp/x"], &[]).await;
    let cache = cache_of(&spec).empty_dir.as_ref().unwrap();
    assert_eq!((&cache.medium, &cache.size_limit), (&None, &None));
}

#[tokio::test]
async fn c31_an_empty_dir_with_limit_and_medium() {
    let attributes = [("cache", "emptyDir"), ("cacheEmptyDirSizeLimit", "1Gi"), ("cacheEmptyDirMedium", "Memory")];
    let spec = spec("c31", &[], &attributes).await;
    let cache = cache_of(&spec).empty_dir.as_ref().unwrap();
    assert_eq!(cache.medium.as_deref(), Some("Memory"));
    assert_eq!(cache.size_limit.as_ref().unwrap().0, "1Gi");
}

#[tokio::test]
async fn c32_an_ephemeral_volume() {
    let attributes = [
        ("cache", "ephemeral"),
        ("cacheEphemeralStorageClassName", "fast"),
        ("cacheEphemeralStorageResourceRequest", "10Gi"),
    ];
    let spec = spec("c32", &[], &attributes).await;
    let template = cache_of(&spec).ephemeral.as_ref().unwrap().volume_claim_template.as_ref().unwrap();
    assert_eq!(template.spec.storage_class_name.as_deref(), Some("fast"));
    assert_eq!(template.spec.resources.as_ref().unwrap().requests.as_ref().unwrap()["storage"].0, "10Gi");
}

#[tokio::test]
async fn c33_a_cache_asked_for_twice_is_refused() {
    check_refused("c33", &["cache /x"], &[("cache", "emptyDir")], "a cache is requested twice").await;
}

#[tokio::test]
async fn c34_an_ephemeral_cache_needs_a_storage_class() {
    let attributes = [("cache", "ephemeral"), ("cacheEphemeralStorageResourceRequest", "1Gi")];
    check_refused("c34", &[], &attributes, "cacheEphemeralStorageClassName is missing").await;
}

#[tokio::test]
async fn c35_an_ephemeral_cache_needs_a_request() {
    let attributes = [("cache", "ephemeral"), ("cacheEphemeralStorageClassName", "fast")];
    check_refused("c35", &[], &attributes, "cacheEphemeralStorageResourceRequest is missing").await;
}

#[tokio::test]
async fn c36_a_quantity_must_be_one() {
    let attributes = [("cache", "emptyDir"), ("cacheEmptyDirSizeLimit", "much")];
    check_refused("c36", &[], &attributes, "cacheEmptyDirSizeLimit \"much\" is not a quantity").await;
}

#[tokio::test]
async fn c37_an_unknown_kind_of_cache_is_refused() {
    check_refused("c37", &[], &[("cache", "hostPath")], "cache \"hostPath\" is not known").await;
}

#[tokio::test]
async fn c38_requests_and_limits() {
    let attributes = [
        ("mountpointContainerResourcesRequestsCpu", "100m"),
        ("mountpointContainerResourcesRequestsMemory", "64Mi"),
        ("mountpointContainerResourcesLimitsCpu", "2"),
        ("mountpointContainerResourcesLimitsMemory", "1Gi"),
    ];
    let spec = spec("c38", &[], &attributes).await;
    let resources = spec.containers[0].resources.clone().unwrap();
    let (requests, limits) = (resources.requests.unwrap(), resources.limits.unwrap());
    assert_eq!((requests["cpu"].0.as_str(), requests["memory"].0.as_str()), ("100m", "64Mi"));
    assert_eq!((limits["cpu"].0.as_str(), limits["memory"].0.as_str()), ("2", "1Gi"));
}
