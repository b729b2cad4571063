//! Whose keys a volume is mounted with.

use std::collections::BTreeSet;

use super::*;

#[test]
fn the_authentication_source_decides_whose_keys_are_used() {
    let keys = [("access_key_id", "accessKey1"), ("secret_access_key", "verySecretKey1")];
    let source = |given: &Given| given.parse().unwrap().identity.source().as_str();
    assert_eq!(source(&Given::fine()), "driver");
    assert_eq!(source(&Given::attribute("authenticationSource", "")), "driver");
    assert_eq!(source(&Given::attribute("authenticationSource", "driver")), "driver");
    assert_eq!(source(&Given::secret(&keys)), "secret");
    assert_eq!(source(&Given { context: Given::fine().context, ..Given::secret(&keys) }), "driver");
    assert_eq!(source(&Given::workload("team", "robot")), "pod");
    check_refused(
        &Given::attribute("authenticationSource", "vault"),
        "authenticationSource \"vault\" is not known: only \"driver\", \"secret\" and \"pod\" are supported",
    );
}

#[test]
fn secret_means_secret() {
    let unusable = "authenticationSource is \"secret\", but no usable Secret came with the request";
    let correct = "correct the Secret that spec.csi.nodePublishSecretRef of the PersistentVolume names";
    for (secret, reason) in [
        (
            &[][..],
            "set spec.csi.nodePublishSecretRef of the PersistentVolume to a Secret with access_key_id and secret_access_key"
                .to_owned(),
        ),
        (&[("access_key_id", "a")], format!("{correct}: the Secret lacks secret_access_key")),
        (
            &[("access_key_id", "a"), ("secret_access_key", "hush hush")],
            format!(
                "{correct}: the Secret has a malformed value for secret_access_key; it must be the plain key: \
             printable ASCII without spaces"
            ),
        ),
    ] {
        let given = Given::secret(secret);
        check_refused(&given, &format!("{unusable}: {reason}"));
        assert!(given.parse().unwrap_err().is_about_credentials());
    }
    assert!(!Given::attribute("authenticationSource", "vault").parse().unwrap_err().is_about_credentials());
}

/// What kubelet sends with a call: which source the volume says, whether it names a Secret, whether there are tokens and the names of
/// namespace and account, whether the namespace is listed for the fallback.
#[test]
fn the_precedence_of_identities() {
    let missing = "set spec.csi.nodePublishSecretRef of the PersistentVolume to a Secret with access_key_id and \
                   secret_access_key";
    let disabled = "set the chart value podIdentity.enabled, so that kubelet sends a token of the Pod's service account \
                    with each call";
    let unnamed = "kubelet must name the Pod's namespace and service account: podInfoOnMount of the CSIDriver object \
                   must be true";
    for case in 0..16_u8 {
        let [has_secret, has_tokens, is_named, is_listed] = [1, 2, 4, 8].map(|bit| case & bit != 0);
        let check = |source: &str, expected: Result<&str, &str>| {
            let mut given = Given::attribute("authenticationSource", source);
            let mut secrets: Vec<(&str, &str)> = Vec::new();
            secrets.extend(
                has_secret.then_some([("access_key_id", "a"), ("secret_access_key", "b")]).into_iter().flatten(),
            );
            secrets.extend(has_tokens.then_some((context::SERVICE_ACCOUNT_TOKENS, "{}")));
            given.secrets =
                secrets.iter().map(|(key, value)| ((*key).to_owned(), Secret::new((*value).to_owned()))).collect();
            if is_named {
                given.context.extend(Given::workload("old", "robot").context);
                given.context.insert("authenticationSource".to_owned(), source.to_owned());
            }
            given.fallback = SecretFallback::in_namespaces(is_listed.then(|| "old".to_owned()));
            let found = given.parse().map(|it| it.identity.source().as_str());
            let found = found.map_err(|error| {
                assert!(error.is_about_credentials());
                Chain(&error).to_string().split_once("came with the request: ").unwrap().1.to_owned()
            });
            assert_eq!(found.as_ref().copied().map_err(String::as_str), expected, "{source} {given:?}");
        };
        check("driver", Ok("driver"));
        check(
            "secret",
            match (has_secret, is_named && is_listed) {
                (true, _) => Ok("secret"),
                (false, true) => Ok("driver"),
                (false, false) => Err(missing),
            },
        );
        check(
            "pod",
            match (has_tokens, is_named) {
                (true, true) => Ok("pod"),
                (true, false) => Err(unnamed),
                (false, _) => Err(disabled),
            },
        );
    }
}

#[test]
fn different_workload_identities_never_share() {
    let name = |given: &Given| given.parse().unwrap().sharing_key("node").name();
    let with_role = |role: &str| {
        let mut given = Given::workload("team", "robot");
        given.context.insert("roleArn".to_owned(), format!("arn:aws:iam::1:role/{role}"));
        given
    };
    let rotated = Given {
        secrets: BTreeMap::from([(context::SERVICE_ACCOUNT_TOKENS.to_owned(), Secret::new("new".to_owned()))]),
        ..Given::workload("team", "robot")
    };
    assert_eq!(name(&rotated), name(&Given::workload("team", "robot")), "a new token is the same identity");
    let different = [
        Given::fine(),
        Given::workload("team", "robot"),
        Given::workload("team", "other"),
        Given::workload("other", "robot"),
        with_role("a"),
        with_role("b"),
    ];
    let names: BTreeSet<String> = different.iter().map(name).collect();
    assert_eq!(names.len(), different.len());
}

/// A volume that says `secret`, with this Secret, of a workload in this namespace; the fallback is on in `old`.
fn falling_back(namespace: &str, secret: &[(&str, &str)]) -> Given {
    let mut given = Given::secret(secret);
    given.context.insert("csi.storage.k8s.io/pod.namespace".to_owned(), namespace.to_owned());
    given.fallback = SecretFallback::in_namespaces(["old".to_owned(), String::new()]);
    given
}

#[test]
fn a_missing_secret_falls_back_to_the_driver_s_keys_in_listed_namespaces_only() {
    let publish = falling_back("old", &[]).parse().unwrap();
    assert_eq!((&publish.identity, publish.has_fallen_back()), (&Identity::Driver, true));
    for namespace in ["other", ""] {
        assert!(falling_back(namespace, &[]).parse().unwrap_err().is_about_credentials());
    }
    let mut unlisted = falling_back("old", &[]);
    unlisted.fallback = SecretFallback::default();
    assert!(unlisted.parse().unwrap_err().is_about_credentials());
    assert!(!Given::fine().parse().unwrap().has_fallen_back());
}

#[test]
fn the_fallback_is_not_for_malformed_secrets_nor_for_other_stores() {
    let malformed = falling_back("old", &[("access_key_id", "a")]);
    assert!(malformed.parse().unwrap_err().is_about_credentials());
    let mut elsewhere = falling_back("old", &[]);
    elsewhere.context.insert("endpointUrl".to_owned(), "http://elsewhere.example".to_owned());
    assert!(elsewhere.parse().unwrap_err().is_about_credentials());
}

#[test]
fn a_workload_that_fell_back_shares_nothing_with_one_that_has_a_secret() {
    let with_secret = falling_back("old", &[("access_key_id", "a"), ("secret_access_key", "b")]).parse().unwrap();
    assert!(!with_secret.has_fallen_back());
    let without = falling_back("old", &[]).parse().unwrap();
    assert_ne!(without.sharing_key("node"), with_secret.sharing_key("node"));
}

proptest! {
    /// Neither namespace, account nor role of one workload can be written so that it shares with another one.
    #[test]
    fn workloads_share_exactly_if_their_identities_are_equal(
        one in ("[ab:\n]{1,3}", "[ab:\n]{1,3}"), other in ("[ab:\n]{1,3}", "[ab:\n]{1,3}"),
    ) {
        let name = |(namespace, account): &(String, String)| {
            Given::workload(namespace, account).parse().unwrap().sharing_key("node").name()
        };
        prop_assert_eq!(one == other, name(&one) == name(&other));
    }
}
