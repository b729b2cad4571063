use super::*;

fn attributes(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

fn options(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|it| (*it).to_owned()).collect()
}

fn quantity(text: &str) -> Quantity {
    text.parse().unwrap()
}

#[track_caller]
fn check(pairs: &[(&str, &str)], mount_options: &[&str], expected: Result<PodShape, &str>) {
    let shape = PodShape::parse(&attributes(pairs), &options(mount_options));
    assert_eq!(shape.map_err(|it| it.to_string()), expected.map_err(str::to_owned));
}

/// The engine's options in a Pod for this PV.
#[track_caller]
fn check_options(pairs: &[(&str, &str)], mount_options: &[&str], expected: &[&str]) {
    let shape = PodShape::parse(&attributes(pairs), &options(mount_options)).unwrap();
    let mut arguments = MountArguments::parse(mount_options).unwrap();
    shape.set_cache_options(&mut arguments).unwrap();
    assert_eq!(arguments.render(), expected);
}

#[test]
fn a_plain_volume_asks_for_nothing() {
    check(&[("bucketName", "b"), ("cache", "")], &["allow-delete"], Ok(PodShape::default()));
    check_options(&[], &["allow-delete"], &["--allow-delete"]);
}

#[test]
fn resources() {
    check(
        &[
            ("mountpointContainerResourcesRequestsCpu", "100m"),
            ("mountpointContainerResourcesRequestsMemory", "64Mi"),
            ("mountpointContainerResourcesLimitsCpu", "1.5"),
            ("mountpointContainerResourcesLimitsMemory", "1Gi"),
        ],
        &[],
        Ok(PodShape {
            requests: Resources { cpu: Some(quantity("100m")), memory: Some(quantity("64Mi")) },
            limits: Resources { cpu: Some(quantity("1.5")), memory: Some(quantity("1Gi")) },
            ..PodShape::default()
        }),
    );
    check(
        &[("mountpointContainerResourcesLimitsMemory", "much")],
        &[],
        Err(
            "volume attribute mountpointContainerResourcesLimitsMemory \"much\" is not a quantity such as 500m, 2 or 512Mi, greater than zero",
        ),
    );
    check(
        &[("mountpointContainerResourcesRequestsCpu", "2"), ("mountpointContainerResourcesLimitsCpu", "1500m")],
        &[],
        Err(
            "volume attribute mountpointContainerResourcesRequestsCpu (2) is greater than mountpointContainerResourcesLimitsCpu (1500m)",
        ),
    );
}

#[test]
fn service_accounts() {
    let shape = PodShape { service_account: Some("s3.reader-1".to_owned()), ..PodShape::default() };
    check(&[("mountpointPodServiceAccountName", "s3.reader-1")], &[], Ok(shape));
    let longest = "a".repeat(253);
    let shape = PodShape { service_account: Some(longest.clone()), ..PodShape::default() };
    check(&[("mountpointPodServiceAccountName", &longest)], &[], Ok(shape));
    for wrong in ["A", "-a", "a-", "a..b", "a/b", &"a".repeat(254)] {
        let message =
            format!("volume attribute mountpointPodServiceAccountName {wrong:?} is not the name of a service account");
        check(&[("mountpointPodServiceAccountName", wrong)], &[], Err(&message));
    }
}

#[test]
fn staging() {
    let with = |stage| Ok(PodShape { stage: Some(stage), ..PodShape::default() });
    check(&[("mountpointStageSizeLimit", "20Gi")], &[], with(StageLimit::Size(quantity("20Gi"))));
    check(&[("mountpointStageSizeLimit", "0")], &[], with(StageLimit::Off));
    check(&[("mountpointStageSizeLimit", "")], &[], Ok(PodShape::default()));
    check(
        &[("mountpointStageSizeLimit", "much")],
        &[],
        Err("volume attribute mountpointStageSizeLimit \"much\" is not a size such as 1Gi, or 0 for none"),
    );
}

fn cached(cache: CacheVolume) -> PodShape {
    PodShape { cache: Some(cache), ..PodShape::default() }
}

#[test]
fn caches() {
    let unlimited = cached(CacheVolume::EmptyDir { size_limit: None, medium: Medium::Disk });
    check(&[], &["cache /tmp/x"], Ok(unlimited.clone()));
    check(&[("cache", "emptyDir")], &[], Ok(unlimited));
    check(
        &[("cache", "emptyDir"), ("cacheEmptyDirSizeLimit", "1Gi"), ("cacheEmptyDirMedium", "Memory")],
        &[],
        Ok(cached(CacheVolume::EmptyDir { size_limit: Some(quantity("1Gi")), medium: Medium::Memory })),
    );
    check(
        &[
            ("cache", "ephemeral"),
            ("cacheEphemeralStorageClassName", "fast"),
            ("cacheEphemeralStorageResourceRequest", "10Gi"),
        ],
        &[],
        Ok(cached(CacheVolume::Ephemeral { storage_class: "fast".to_owned(), request: quantity("10Gi") })),
    );
}

#[test]
fn caches_that_cannot_be_made() {
    check(
        &[("cache", "emptyDir")],
        &["--cache=/x"],
        Err(
            "a cache is requested twice, by mount option --cache and by volume attribute cache; remove the mount option",
        ),
    );
    check(
        &[("cache", "hostPath")],
        &[],
        Err("volume attribute cache \"hostPath\" is not known: only \"emptyDir\" and \"ephemeral\" are"),
    );
    check(
        &[("cache", "emptyDir"), ("cacheEmptyDirMedium", "HugePages")],
        &[],
        Err("volume attribute cacheEmptyDirMedium \"HugePages\" is not known: only \"Memory\" is"),
    );
    check(
        &[("cache", "ephemeral"), ("cacheEphemeralStorageResourceRequest", "1Gi")],
        &[],
        Err("volume attribute cacheEphemeralStorageClassName is missing: a cache of kind \"ephemeral\" needs it"),
    );
    check(
        &[("cache", "ephemeral"), ("cacheEphemeralStorageClassName", "fast")],
        &[],
        Err("volume attribute cacheEphemeralStorageResourceRequest is missing: a cache of kind \"ephemeral\" needs it"),
    );
    check(
        &[("cache", "emptyDir"), ("cacheEmptyDirSizeLimit", "1Gi")],
        &["max-cache-size 1025"],
        Err("mount option --max-cache-size (1025 MiB) is greater than volume attribute cacheEmptyDirSizeLimit (1Gi)"),
    );
}

#[test]
fn the_cache_stays_below_the_size_at_which_kubelet_evicts() {
    let one_gibibyte = [("cache", "emptyDir"), ("cacheEmptyDirSizeLimit", "1Gi")];
    check_options(&one_gibibyte, &[], &["--cache=/local-cache", "--max-cache-size=972"]);
    check_options(&one_gibibyte, &["max-cache-size=1024"], &["--cache=/local-cache", "--max-cache-size=972"]);
    check_options(&one_gibibyte, &["max-cache-size=100"], &["--cache=/local-cache", "--max-cache-size=100"]);
    let in_memory = [one_gibibyte[0], one_gibibyte[1], ("cacheEmptyDirMedium", "Memory")];
    check_options(&in_memory, &[], &["--cache=/local-cache"]);
    check_options(&[], &["cache /host/path"], &["--cache=/local-cache"]);
}
