//! Volumes that the author of a Pod wrote.

use super::*;
use crate::ca_certificates::tests::PEM;

const HANDLE: &str = "csi-0123456789abcdef";

fn inline(attributes: &[(&str, &str)]) -> Given {
    let mut given = Given::secret(&[("access_key_id", "a"), ("secret_access_key", "b")]);
    given.volume_id = HANDLE.to_owned();
    given.target_path = "/var/lib/kubelet/pods/uid-1/volumes/kubernetes.io~csi/data/mount".to_owned();
    given.access_mode = Some(AccessMode::SingleNodeMultiWriter);
    for (key, value) in [
        (context::EPHEMERAL, "true"),
        (context::POD_NAMESPACE, "team"),
        ("csi.storage.k8s.io/pod.name", "app"),
        (context::SERVICE_ACCOUNT_NAME, "default"),
    ]
    .iter()
    .chain(attributes)
    {
        given.context.insert((*key).to_owned(), (*value).to_owned());
    }
    given
}

#[test]
fn an_inline_volume_is_called_by_its_handle() {
    let publish = inline(&[("prefix", "a/"), ("region", "eu-1"), ("caBundle", PEM)]).parse().unwrap();
    assert_eq!((publish.volume.as_str(), publish.is_inline), (HANDLE, true));
    assert_eq!(publish.sharing_key("node").persistent_volume, HANDLE);
    let persistent = Given::fine().parse().unwrap();
    assert_eq!((persistent.volume.as_str(), persistent.is_inline), ("pv-1", false));
    check_refused(
        &Given { volume_id: "a/b".to_owned(), ..inline(&[]) },
        "correct the volume in the spec of the Pod: volume ID \"a/b\" is not one that kubelet makes for inline volumes",
    );
}

#[test]
fn mount_options_are_an_attribute() {
    check_arguments(
        &inline(&[("mountOptions", "allow-delete, uid 1000,,gid=1000")]),
        &["--allow-delete", "--allow-root", "--force-path-style", "--gid=1000", "--uid=1000"],
    );
    assert!(inline(&[("mountOptions", "read-only")]).parse().unwrap().access.is_read_only());
    check_arguments(&Given::attribute("mountOptions", "allow-delete"), &["--allow-root", "--force-path-style"]);
}

/// The author of a Pod never gets the driver's keys.
#[test]
fn an_inline_volume_brings_its_own_keys() {
    let own = "correct the volume in the spec of the Pod: an inline volume must bring its own keys: set authenticationSource: secret \
               and nodePublishSecretRef, or authenticationSource: pod";
    check_refused(&inline(&[("authenticationSource", "driver")]), own);
    check_refused(&inline(&[("authenticationSource", "")]), own);
    let mut missing = inline(&[]);
    missing.context.remove("authenticationSource");
    check_refused(&missing, own);
    let mut fallen = inline(&[]);
    fallen.secrets.clear();
    fallen.fallback = SecretFallback::in_namespaces(["team".to_owned()]);
    assert!(fallen.parse().unwrap_err().is_about_credentials());
    let mut workload = inline(&[("authenticationSource", "pod")]);
    workload.secrets = BTreeMap::from([(context::SERVICE_ACCOUNT_TOKENS.to_owned(), Secret::new("{}".to_owned()))]);
    assert_eq!(workload.parse().unwrap().identity.source(), AuthenticationSource::Pod);
}

#[test]
fn what_administrators_decide_is_not_available() {
    for attribute in [
        "endpointUrl",
        "httpsProxy",
        "httpProxy",
        "noProxy",
        "mountpointEnv.HTTPS_PROXY",
        "mountpointPodServiceAccountName",
        "mountpointContainerResourcesLimitsMemory",
        "cache",
        "cacheEphemeralStorageClassName",
        "mountpointStageSizeLimit",
        "anything",
    ] {
        check_refused(
            &inline(&[(attribute, "x")]),
            &format!(
                "correct the volume in the spec of the Pod: volume attribute {attribute} is not available to inline volumes, only to \
                 those of administrators: use a PersistentVolume"
            ),
        );
    }
    for option in ["--cache=/x", "--memory-target=100000", "--endpoint-url=http://x", "--profile=x", "-d", "-o=ro"] {
        let error = Chain(&inline(&[("mountOptions", option)]).parse().unwrap_err()).to_string();
        assert!(error.contains("is not available to inline volumes; available are --allow-delete"), "{error}");
    }
}

/// kubelet writes this attribute after those of the volume, so no author can take it away.
#[test]
fn only_the_word_true_makes_a_volume_inline() {
    for text in ["false", "", "True"] {
        assert!(!Given::attribute(context::EPHEMERAL, text).parse().unwrap().is_inline);
    }
}

proptest! {
    /// Whatever an author writes: never the driver's keys, never another place for requests.
    #[test]
    fn no_inline_volume_gets_the_driver_s_keys(
        source in "(driver|secret|pod|)", key in "[a-zA-Z.]{0,12}", value in "[a-z:/.]{0,12}", has_keys in any::<bool>(),
        options in "[a-z, =-]{0,20}",
    ) {
        let mut given = inline(&[("authenticationSource", &source), (&key, &value), ("mountOptions", &options)]);
        given.fallback = SecretFallback::in_namespaces(["team".to_owned()]);
        if !has_keys {
            given.secrets.clear();
        }
        if let Ok(publish) = given.parse() {
            prop_assert_ne!(publish.identity.source(), AuthenticationSource::Driver);
            prop_assert_eq!(publish.endpoint, None);
            prop_assert_eq!(publish.connection.proxy, crate::proxy::ProxySettings::default());
        }
    }
}
