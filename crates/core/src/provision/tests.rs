//! Rules of requests for volumes, of their IDs and of their metadata.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::chain::Chain;
use crate::publish::{AccessMode, AccessType, AuthenticationSource, RawCapability};
use crate::secret::Secret;

/// An owned request that is fine; each test spoils or adds one thing.
#[derive(Clone, Debug)]
struct Given {
    name: String,
    modes: Vec<Option<AccessMode>>,
    is_block: bool,
    mount_flags: Vec<String>,
    parameters: BTreeMap<String, String>,
    secrets: BTreeMap<String, Secret<String>>,
    required_bytes: i64,
    limit_bytes: i64,
    has_content_source: bool,
    has_mutable_parameters: bool,
}

const KEYS: [(&str, &str); 2] = [("access_key_id", "accessKey1"), ("secret_access_key", "hushHush1")];

/// Of `pvc-1`.
const KEY: &str = "csi-s3-0f087007-bb94-8ce4-af0b-e31105b7408e";

impl Given {
    fn fine() -> Self {
        Self {
            name: "pvc-1".to_owned(),
            modes: vec![Some(AccessMode::MultiNodeMultiWriter)],
            is_block: false,
            mount_flags: Vec::new(),
            parameters: BTreeMap::new(),
            secrets: BTreeMap::new(),
            required_bytes: 5,
            limit_bytes: 0,
            has_content_source: false,
            has_mutable_parameters: false,
        }
    }

    fn with(change: impl FnOnce(&mut Self)) -> Self {
        let mut given = Self::fine();
        change(&mut given);
        given
    }

    fn parameters(entries: &[(&str, &str)]) -> Self {
        Self::with(|it| it.parameters = entries.iter().map(|(key, value)| (text(key), text(value))).collect())
    }

    /// Of a claim `team/data`, as the provisioner sends it.
    fn claim(entries: &[(&str, &str)]) -> Self {
        let mut given = Self::parameters(entries);
        given.parameters.insert(text(parameter::CLAIM_NAMESPACE), text("team"));
        given.parameters.insert(text(parameter::CLAIM_NAME), text("data"));
        given
    }

    fn secret(mut self, entries: &[(&str, &str)]) -> Self {
        self.secrets = entries.iter().map(|(key, value)| (text(key), Secret::new(text(value)))).collect();
        self
    }

    fn parse(&self) -> Result<CreateRequest, InvalidCreateRequest> {
        let access_type = || {
            if self.is_block {
                AccessType::Block
            } else {
                AccessType::Mount { fs_type: "", mount_flags: &self.mount_flags, volume_mount_group: "" }
            }
        };
        let capabilities: Vec<RawCapability<'_>> = self
            .modes
            .iter()
            .map(|mode| RawCapability { access_mode: mode.clone(), access_type: access_type() })
            .collect();
        CreateRequest::parse(&RawCreateRequest {
            name: &self.name,
            capabilities: &capabilities,
            parameters: &self.parameters,
            secrets: &self.secrets,
            required_bytes: self.required_bytes,
            limit_bytes: self.limit_bytes,
            has_content_source: self.has_content_source,
            has_mutable_parameters: self.has_mutable_parameters,
        })
    }
}

fn text(text: &str) -> String {
    text.to_owned()
}

#[track_caller]
fn check_refused(given: &Given, expected: &str) {
    assert_eq!(Chain(&given.parse().unwrap_err()).to_string(), expected);
}

#[track_caller]
fn check_context(given: &Given, id: &str, expected: &[(&str, &str)]) {
    let create = given.parse().unwrap();
    assert_eq!(create.id.to_string(), id);
    let context = create.volume_context();
    let context: Vec<(&str, &str)> = context.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
    assert_eq!(context, expected);
}

/// Volumes are found again after an upgrade of the driver by this name alone.
#[test]
fn the_key_of_a_request_never_changes() {
    assert_eq!(VolumeKey::of_request("pvc-1").as_str(), KEY);
}

#[test]
fn a_volume_is_a_bucket_named_after_the_request() {
    let bucket = [("authenticationSource", "driver"), ("bucketName", KEY), ("dynamicProvisioning", "true")];
    check_context(&Given::fine(), KEY, &bucket);
    check_context(&Given::parameters(&[("bucketNamePrefix", ""), ("onDelete", " ")]), KEY, &bucket);

    let named = format!("team-a-{KEY}");
    check_context(
        &Given::parameters(&[("bucketNamePrefix", "team-a-"), ("region", "eu-1")]),
        &named,
        &[("authenticationSource", "driver"), ("bucketName", &named), ("dynamicProvisioning", "true")],
    );
    let record = Given::claim(&[("region", "eu-1"), ("onDelete", "delete-all")]).parse().unwrap().record;
    assert_eq!(record.region.as_deref(), Some("eu-1"));
    assert_eq!((record.on_delete, record.capacity_bytes), (OnDelete::DeleteAll, 5));
    assert_eq!(record.claim.as_deref(), Some("team/data"));
}

#[test]
fn a_volume_may_be_a_prefix_named_after_the_claim() {
    let shared = [("bucket", "shared"), ("prefixTemplate", "${pvc.namespace}/${pvc.name}")];
    check_context(
        &Given::claim(&shared),
        &format!("shared/{KEY}"),
        &[
            ("authenticationSource", "driver"),
            ("bucketName", "shared"),
            ("dynamicProvisioning", "true"),
            ("prefix", "team/data/"),
        ],
    );
    // The PV is named after the request, also if that is not sent.
    let create = Given::parameters(&[("bucket", "shared"), ("prefixTemplate", "${pv.name}")]).parse().unwrap();
    assert_eq!(create.place.prefix().unwrap().as_str(), "pvc-1/");
    check_refused(
        &Given::parameters(&shared),
        "the StorageClass is not usable: prefixTemplate \"${pvc.namespace}/${pvc.name}\" needs pvc.namespace, which was \
         not sent: start the external-provisioner with --extra-create-metadata",
    );
    let mut twice = Given::claim(&shared);
    twice.mount_flags = vec![text("prefix=x/")];
    check_refused(
        &twice,
        "mount option prefix and parameter prefixTemplate exclude each other; remove the mount option",
    );
}

#[test]
fn a_secret_decides_in_whose_name() {
    let create = Given::fine().secret(&KEYS).parse().unwrap();
    assert_eq!(create.identity.source(), AuthenticationSource::Secret);
    assert_eq!(create.record.authentication_source, AuthenticationSource::Secret);
    assert_eq!(create.identity.signing_region, None);
    let with_region = Given::fine().secret(&[KEYS[0], KEYS[1], ("region", " eu-1\n")]).parse().unwrap();
    assert_eq!(with_region.identity.signing_region.as_deref(), Some("eu-1"));
    for (region, is_fine) in
        [("a".repeat(63), true), ("a".repeat(64), false), ("Eu_1.x".to_owned(), true), ("e u".to_owned(), false)]
    {
        let parsed = Given::fine().secret(&[KEYS[0], KEYS[1], ("region", &region)]).parse();
        assert_eq!(parsed.is_ok(), is_fine, "{region}");
    }

    let source = |given: Given| given.parse().unwrap().record.authentication_source.as_str();
    assert_eq!(source(Given::fine()), "driver");
    assert_eq!(source(Given::parameters(&[("authenticationSource", "secret")])), "secret");
    assert_eq!(source(Given::parameters(&[("authenticationSource", "driver")]).secret(&KEYS)), "driver");
    let [name, namespace] = parameter::NODE_PUBLISH_SECRET;
    assert_eq!(source(Given::parameters(&[(name, "s"), (namespace, "n")])), "secret");

    check_refused(
        &Given::fine().secret(&KEYS[..1]),
        "the provisioner secret is not usable: correct the Secret that the StorageClass names: the Secret lacks \
         secret_access_key",
    );
}

#[test]
fn another_store_needs_a_secret() {
    let endpoint = [("endpointUrl", "https://s3.example.com:8443/")];
    check_context(
        &Given::parameters(&endpoint).secret(&KEYS),
        &format!("{KEY}@https://s3.example.com:8443"),
        &[
            ("authenticationSource", "secret"),
            ("bucketName", KEY),
            ("dynamicProvisioning", "true"),
            ("endpointUrl", "https://s3.example.com:8443"),
        ],
    );
    check_refused(
        &Given::parameters(&endpoint),
        "endpointUrl names another store, which needs keys of its own: set csi.storage.k8s.io/provisioner-secret-name and \
         -namespace",
    );
    check_refused(
        &Given::parameters(&[endpoint[0], ("authenticationSource", "driver")]).secret(&KEYS),
        "endpointUrl names another store, whose volumes cannot be mounted with the driver's keys: remove \
         authenticationSource, and name a node-publish secret",
    );
    // The ID is `csi-s3-<uuid>@<endpoint>`, of at most 128 bytes.
    let longest = format!("https://{}", "a".repeat(76));
    assert_eq!(
        Given::parameters(&[("endpointUrl", &longest)]).secret(&KEYS).parse().unwrap().id.to_string().len(),
        128
    );
    let refused = Given::parameters(&[("endpointUrl", &format!("{longest}a"))]).secret(&KEYS).parse().unwrap_err();
    assert!(matches!(refused, InvalidCreateRequest::Id { .. }), "{refused}");
}

#[test]
fn what_is_missing_or_impossible_is_said() {
    let table: [(Given, &str); 13] = [
        (Given::with(|it| it.name.clear()), "volume name is required"),
        (Given::with(|it| it.modes.clear()), "volume capabilities are required"),
        (Given::with(|it| it.modes = vec![None]), "volume capability access mode is required"),
        (
            Given::with(|it| it.modes.push(Some(AccessMode::Other(text("SINGLE_NODE_WRITER"))))),
            "access mode SINGLE_NODE_WRITER cannot be enforced: use ReadWriteMany (MULTI_NODE_MULTI_WRITER), ReadOnlyMany \
             (MULTI_NODE_READER_ONLY), or with strategy pod ReadWriteOnce or ReadWriteOncePod",
        ),
        (Given::with(|it| it.is_block = true), "a bucket is not a block device: use volumeMode: Filesystem"),
        (
            Given::with(|it| it.mount_flags = vec![text("--")]),
            "mountOptions of the StorageClass are not understood: mount option \"--\" has no name",
        ),
        (
            Given::with(|it| it.mount_flags = vec![text("uid=1"), text("uid=2")]),
            "mountOptions of the StorageClass contradict each other: mount option --uid is given more than once, with \
             different values (1, 2); keep one of them",
        ),
        (
            Given::with(|it| it.mount_flags = vec![text("read-only=no")]),
            "mountOptions of the StorageClass cannot work: mount option --read-only takes no value, but has \"no\"; \
             remove the value, or the option",
        ),
        (
            Given::with(|it| it.has_content_source = true),
            "a volume cannot be created from a snapshot or another volume: remove dataSource from the claim",
        ),
        (
            Given::with(|it| it.has_mutable_parameters = true),
            "volume attributes classes are not supported: remove volumeAttributesClassName from the claim",
        ),
        (Given::with(|it| it.limit_bytes = 4), "the requested capacity is invalid: 5 to 4 bytes"),
        (Given::with(|it| it.required_bytes = -1), "the requested capacity is invalid: -1 to 0 bytes"),
        (
            Given::parameters(&[("bucketNamePrefix", "-x")]),
            "the StorageClass is not usable: bucketNamePrefix \"-x\" is not a valid beginning of a bucket name: bucket name \
             \"-xcsi-s3-137732f9-d20d-812f-a587-45d2d30de7da\" must begin and end with a letter or a digit",
        ),
    ];
    for (given, expected) in table {
        check_refused(&given, expected);
    }
    let readers = Given::with(|it| it.modes = vec![Some(AccessMode::MultiNodeReaderOnly)]);
    assert!(readers.parse().is_ok());
}

#[test]
fn parameters_are_checked_and_unknown_ones_refused_by_name() {
    let known =
        "known are bucketNamePrefix, region, bucket, prefixTemplate, onDelete, endpointUrl, authenticationSource";
    let table: [(&[(&str, &str)], &str); 12] = [
        (&[("bucketPrefix", "")], &format!("StorageClass parameter \"bucketPrefix\" is not known; {known}")),
        (&[("onDelete", "purge")], "onDelete \"purge\" is not known: use retain, delete-if-empty or delete-all"),
        (
            &[("region", "EU")],
            "region \"EU\" is not usable: it is a name of lower-case letters, digits and hyphens, such as eu-west-1",
        ),
        (
            &[("authenticationSource", "vault")],
            "authenticationSource \"vault\" is not known: only \"driver\", \"secret\" and \"pod\" are supported",
        ),
        (
            &[("endpointUrl", "s3")],
            "endpointUrl \"s3\" must look like https://s3.example.com or http://s3.example.com:8000, without a path",
        ),
        (&[("prefixTemplate", "${pv.name}")], "prefixTemplate requires a shared bucket: set parameter bucket as well"),
        (
            &[("bucket", "shared")],
            "parameter bucket names a shared bucket, in which each volume needs a prefix: set prefixTemplate, for example to \
             ${pvc.namespace}/${pvc.name}",
        ),
        (
            &[("bucket", "shared"), ("prefixTemplate", "${pv.name}"), ("region", "eu-1")],
            "region is for buckets that are created for each volume; it has no meaning together with bucket",
        ),
        (
            &[("bucket", "Shared"), ("prefixTemplate", "${pv.name}")],
            "parameter bucket is not usable: bucket name \"Shared\" may only contain lower-case letters, digits, dots and \
             hyphens",
        ),
        (
            &[("bucket", "shared"), ("prefixTemplate", "all")],
            "prefixTemplate \"all\" has no variable that differs from claim to claim: use ${pvc.name} with \
             ${pvc.namespace}, or ${pv.name}",
        ),
        (
            &[("csi.storage.k8s.io/provisioner-secret-name", "s")],
            "provisioner secret name provided but namespace is missing",
        ),
        (
            &[("csi.storage.k8s.io/node-publish-secret-namespace", "n")],
            "node-publish secret namespace provided but name is missing",
        ),
    ];
    for (parameters, expected) in table {
        check_refused(&Given::parameters(parameters), &format!("the StorageClass is not usable: {expected}"));
    }
}

#[test]
fn requests_are_printed_without_their_keys() {
    let given = Given::fine().secret(&KEYS);
    assert!(!format!("{given:?} {:?}", given.parse().unwrap()).contains("hush"));
}

#[track_caller]
fn check_id(id: &str, expected: Option<&ProvisionedVolume>) {
    let parsed = id.parse::<ProvisionedId>().ok();
    if let Some(parsed) = &parsed {
        assert_eq!(parsed.to_string(), id);
    }
    assert_eq!(parsed.as_ref().map(|it| &it.data), expected, "{id}");
}

#[test]
fn ids_are_known_by_their_shape() {
    let key = || VolumeKey::of_request("pvc-1");
    let bucket = |it: &str| it.parse().unwrap();
    check_id(KEY, Some(&ProvisionedVolume::Bucket { bucket: bucket(KEY), key: key() }));
    let named = format!("csi-s3-team-{KEY}");
    check_id(&named, Some(&ProvisionedVolume::Bucket { bucket: bucket(&named), key: key() }));
    check_id(&format!("shared/{KEY}"), Some(&ProvisionedVolume::Prefix { bucket: bucket("shared"), key: key() }));
    check_id(&format!("{KEY}@http://s3:80"), Some(&ProvisionedVolume::Bucket { bucket: bucket(KEY), key: key() }));

    let earlier = "csi-s3-6b8f2f0e-6f0f-4f3c-8a51-0a4d8a0f3f3b";
    check_id(earlier, Some(&ProvisionedVolume::LegacyBucket(bucket(earlier))));
    for foreign in [
        "",
        "my-bucket",
        "csi-s3-",
        "csi-s3-1",
        &format!("team-{earlier}"),
        &format!("shared/{earlier}"),
        &format!("{earlier}@http://s3"),
        &format!("{KEY}@s3"),
        &format!("{KEY}@http://s3/"),
        &format!("{KEY}0"),
        &format!("{KEY}/x"),
        &format!("/{KEY}"),
        &format!("a/b/{KEY}"),
        &KEY.to_uppercase(),
        "csi-s3-6b8f2f0e-6f0f-1f3c-8a51-0a4d8a0f3f3b",
        "csi-s3-6b8f2f0e-6f0f-8f3c-7a51-0a4d8a0f3f3b",
    ] {
        check_id(foreign, None);
    }
}

#[test]
fn differences_between_then_and_now() {
    let now = Given::claim(&[("onDelete", "retain")]).parse().unwrap();
    let difference = |then: &Given, now: &CreateRequest| {
        then.parse().unwrap().record.difference(&now.record, now.capacity).map(|it| it.to_string())
    };
    assert_eq!(difference(&Given::parameters(&[("onDelete", "retain")]), &now), None);
    assert_eq!(difference(&Given::fine(), &now).unwrap(), "onDelete is delete-if-empty, but retain is requested");
    let region = Given::parameters(&[("onDelete", "retain"), ("region", "eu-1")]);
    assert_eq!(difference(&region, &now).unwrap(), "region is eu-1, but none is requested");
    let more = Given::with(|it| it.required_bytes = 6).parse().unwrap();
    assert_eq!(difference(&Given::fine(), &more).unwrap(), "its capacity in bytes is 5, but 6 or more is requested");
    let less = Given::with(|it| (it.required_bytes, it.limit_bytes) = (1, 4)).parse().unwrap();
    assert_eq!(difference(&Given::fine(), &less).unwrap(), "its capacity in bytes is 5, but 1 to 4 is requested");
    let other = Given::with(|it| it.name = text("pvc-2")).parse().unwrap();
    assert!(difference(&Given::fine(), &other).unwrap().starts_with("its volume is csi-s3-"));
}

#[test]
fn notes_of_others_and_of_newer_versions() {
    assert_eq!(VolumeRecord::from_text("Owner=somebody\n"), Ok(None));
    let newer = Given::fine().parse().unwrap().record.to_text().replace("delete-if-empty", "shred");
    assert_eq!(
        VolumeRecord::from_text(&newer).unwrap_err().to_string(),
        "the volume's metadata is not valid: s3csi/on-delete is \"shred\"; a newer version of the driver may have \
         written it"
    );
}

proptest! {
    /// Names of requests are texts of up to 128 bytes; what comes out is always a bucket's name and an ID of ours.
    #[test]
    fn every_name_gives_one_volume(name in "\\PC{1,40}", other in "\\PC{1,40}", prefix in "([a-z][a-z0-9-]{0,19})?") {
        let given = |name: &str| Given { name: text(name), ..Given::parameters(&[("bucketNamePrefix", &prefix)]) };
        let create = given(&name).parse().unwrap();
        prop_assert_eq!(given(&name).parse().unwrap().id, create.id.clone());
        prop_assert_eq!(given(&other).parse().unwrap().id == create.id, name == other);
        prop_assert_eq!(create.id.to_string().parse::<ProvisionedId>(), Ok(create.id.clone()));
        prop_assert_eq!(create.id.bucket(), create.place.bucket());
    }

    #[test]
    fn a_record_is_read_as_it_is_written(capacity in any::<u64>(), prefix in "[a-z/.= ]{0,9}", region in "[a-z0-9-]{1,9}") {
        let record = VolumeRecord {
            capacity_bytes: capacity,
            prefix: prefix.parse().ok(),
            region: Some(region),
            ..Given::claim(&[("onDelete", "delete-all")]).parse().unwrap().record
        };
        prop_assert_eq!(VolumeRecord::from_text(&record.to_text()), Ok(Some(record.clone())));
        let entries = record.entries().into_iter().map(|(key, value)| (text(key), value)).collect();
        prop_assert_eq!(VolumeRecord::from_entries(&entries), Ok(Some(record)));
    }

    /// What a caller sends besides never changes what was agreed: no text can add an entry of its own.
    #[test]
    fn no_claim_can_forge_an_entry(namespace in any::<String>(), name in "\\PC{0,9}(\n|\r)s3csi/on-delete=delete-all") {
        let mut given = Given::parameters(&[("onDelete", "retain")]);
        given.parameters.insert(text(parameter::CLAIM_NAMESPACE), namespace);
        given.parameters.insert(text(parameter::CLAIM_NAME), name);
        let record = given.parse().unwrap().record;
        let read = VolumeRecord::from_text(&record.to_text()).unwrap().unwrap();
        prop_assert_eq!(read.on_delete, OnDelete::Retain);
        prop_assert_eq!(read, record);
    }

    /// One ID, one spelling; and an ID with another endpoint is never taken for one of the driver's.
    #[test]
    fn an_id_is_written_as_it_was_read(
        bucket in "[a-z0-9.-]{0,12}", separator in "[/@]{0,2}", endpoint in "(@https?://[a-z0-9.:/\\[\\]-]{0,12})?",
    ) {
        let version = ["0f087007-bb94-8ce4-af0b-e31105b7408e", "6b8f2f0e-6f0f-4f3c-8a51-0a4d8a0f3f3b"];
        for uuid in version {
            let id = format!("{bucket}{separator}csi-s3-{uuid}{endpoint}");
            if let Ok(parsed) = id.parse::<ProvisionedId>() {
                prop_assert_eq!(parsed.to_string(), id.clone());
                prop_assert_eq!(parsed.endpoint.is_some(), id.contains('@'));
                prop_assert!(id.len() <= 128);
            }
        }
    }

    /// A store, or a tenant who may write tags, chooses these texts.
    #[test]
    fn metadata_are_never_half_understood(lines in prop::collection::vec("(s3csi/(volume|on-delete|capacity-bytes|authentication-source|provisioned-with|region|prefix|claim))?=\\PC{0,12}", 0..9)) {
        if let Ok(Some(record)) = VolumeRecord::from_text(&lines.join("\n")) {
            prop_assert_eq!(VolumeRecord::from_text(&record.to_text()), Ok(Some(record)));
        }
    }

    #[test]
    fn parsing_never_panics(id in any::<String>(), key in any::<String>(), value in any::<String>(), note in any::<String>()) {
        let _ = id.parse::<ProvisionedId>();
        let _ = VolumeRecord::from_text(&note);
        let _ = Given { name: id, ..Given::parameters(&[(&key, &value), ("bucket", &value), ("endpointUrl", &note)]) }.parse();
    }
}
