//! How the store is reached, and with whose keys that may be said.

use super::*;
use crate::ca_certificates::tests::PEM;

const KEYS: [(&str, &str); 2] = [("access_key_id", "a"), ("secret_access_key", "b")];

/// A volume with keys of its own.
fn own(attributes: &[(&str, &str)]) -> Given {
    let mut given = Given::secret(&KEYS);
    given.context.extend(attributes.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())));
    given
}

#[test]
fn attributes_reach_the_engine_as_options() {
    check_arguments(
        &Given::attribute("region", "eu-west-1"),
        &["--allow-root", "--force-path-style", "--region=eu-west-1"],
    );
    check_arguments(&Given::attribute("forcePathStyle", "false"), &["--allow-root"]);
    check_arguments(
        &Given::attribute("requesterPays", "true"),
        &["--allow-root", "--force-path-style", "--requester-pays"],
    );
}

#[test]
fn malformed_attributes_are_refused() {
    check_refused(
        &Given::attribute("requesterPays", "yes"),
        "correct spec.csi.volumeAttributes of the PersistentVolume: volume attribute requesterPays \"yes\" must be \"true\" or \
         \"false\"",
    );
}

#[test]
fn only_volumes_with_their_own_keys_name_proxies_and_certificates() {
    for (attribute, value) in
        [("httpsProxy", "http://a"), ("httpProxy", "http://a"), ("noProxy", "*"), ("caBundle", PEM)]
    {
        check_refused(
            &Given::attribute(attribute, value),
            &format!(
                "{attribute} is only for volumes with keys of their own: set authenticationSource: secret (or pod), so that the \
                 driver's keys are used only where its administrator says"
            ),
        );
        assert!(own(&[(attribute, value)]).parse().is_ok());
        let mut workload = Given::workload("team", "robot");
        workload.context.insert(attribute.to_owned(), value.to_owned());
        assert!(workload.parse().is_ok());
        // The driver's keys do not stand in for a missing Secret either.
        let mut fallen = own(&[(attribute, value), (context::POD_NAMESPACE, "old")]);
        fallen.secrets.clear();
        fallen.fallback = SecretFallback::in_namespaces(["old".to_owned()]);
        assert!(fallen.parse().unwrap_err().is_about_credentials());
    }
}

#[test]
fn certificates_come_from_the_attribute_and_from_the_secret() {
    let certificates = |given: &Given| given.parse().unwrap().ca_certificates.map(|it| it.as_str().to_owned());
    let with_secret = |mut given: Given, text: &str| {
        given.secrets.insert("ca.crt".to_owned(), Secret::new(text.to_owned()));
        given
    };
    assert_eq!(certificates(&own(&[])), None);
    assert_eq!(certificates(&with_secret(own(&[]), " \n")), None);
    assert_eq!(certificates(&own(&[("caBundle", PEM)])).as_deref(), Some(PEM));
    assert_eq!(certificates(&with_secret(own(&[]), PEM)).as_deref(), Some(PEM));
    assert_eq!(certificates(&with_secret(own(&[("caBundle", PEM)]), PEM)), Some(PEM.repeat(2)));
    assert_eq!(certificates(&with_secret(Given::workload("team", "robot"), PEM)).as_deref(), Some(PEM));
    assert_eq!(certificates(&with_secret(Given::fine(), PEM)), None, "the Secret of a volume with the driver's keys");
    check_refused(
        &with_secret(own(&[]), "x"),
        "key ca.crt of the volume's Secret not usable: must be certificates in PEM (-----BEGIN CERTIFICATE-----): it has no \
         certificate",
    );
}

#[test]
fn volumes_that_are_reached_differently_never_share() {
    let name = |given: &Given| given.parse().unwrap().sharing_key("node").name();
    let mut rotated = own(&[]);
    rotated.secrets.insert("ca.crt".to_owned(), Secret::new(PEM.to_owned()));
    assert_eq!(name(&rotated), name(&own(&[])), "certificates of the Secret change as its keys do");
    let different = [
        own(&[]),
        own(&[("region", "eu-1")]),
        own(&[("forcePathStyle", "false")]),
        own(&[("requesterPays", "true")]),
        own(&[("httpsProxy", "http://a")]),
        own(&[("httpProxy", "http://a")]),
        own(&[("noProxy", "a")]),
        own(&[("caBundle", PEM)]),
        own(&[("endpointUrl", "http://a")]),
    ];
    let names: std::collections::BTreeSet<String> = different.iter().map(name).collect();
    assert_eq!(names.len(), different.len());
}

#[test]
fn access_points_are_named_in_the_host_of_requests() {
    let arn = "arn:aws:s3:eu-west-1:123456789012:accesspoint/point";
    check_arguments(&Given::attribute("bucketName", arn), &["--allow-root"]);
    assert_eq!(Given::attribute("bucketName", arn).parse().unwrap().sharing_key("node").bucket, arn);
    check_arguments(&Given::attribute("bucketName", "point-a1b2c3-s3alias"), &["--allow-root", "--force-path-style"]);
    let mut contradiction = Given::attribute("bucketName", arn);
    contradiction.context.insert("forcePathStyle".to_owned(), "true".to_owned());
    check_refused(
        &contradiction,
        "forcePathStyle is not possible with the ARN of an access point, which only the host of requests can name; remove it",
    );
    check_refused(
        &Given::attribute("bucketName", "arn:aws:s3:::logs"),
        "Bucket name not valid: correct spec.csi.volumeAttributes.bucketName of the PersistentVolume: bucket name \
         \"arn:aws:s3:::logs\" is the ARN of a bucket; use the bucket's name",
    );
}
