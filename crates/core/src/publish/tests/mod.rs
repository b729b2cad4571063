//! Rules of requests, each against a request that is fine but for one thing.

mod connection;
mod identity;
mod inline;

use proptest::prelude::*;

use super::*;
use crate::chain::Chain;

const TARGET: &str = "/var/lib/kubelet/pods/uid-1/volumes/kubernetes.io~csi/pv-1/mount";

/// An owned request that is fine; each test spoils or adds one thing.
#[derive(Clone, Debug)]
struct Given {
    volume_id: String,
    target_path: String,
    context: BTreeMap<String, String>,
    capability: bool,
    access_mode: Option<AccessMode>,
    access_type: &'static str,
    mount_flags: Vec<String>,
    fs_group: String,
    readonly: bool,
    secrets: BTreeMap<String, Secret<String>>,
    fallback: SecretFallback,
}

impl Given {
    fn fine() -> Self {
        Self {
            volume_id: "handle-1".to_owned(),
            target_path: TARGET.to_owned(),
            context: BTreeMap::from([("bucketName".to_owned(), "bucket-1".to_owned())]),
            capability: true,
            access_mode: Some(AccessMode::MultiNodeMultiWriter),
            access_type: "mount",
            mount_flags: Vec::new(),
            fs_group: String::new(),
            readonly: false,
            secrets: BTreeMap::new(),
            fallback: SecretFallback::default(),
        }
    }

    fn with(change: impl FnOnce(&mut Self)) -> Self {
        let mut given = Self::fine();
        change(&mut given);
        given
    }

    fn flags(flags: &[&str]) -> Self {
        Self::with(|it| it.mount_flags = flags.iter().map(|it| (*it).to_owned()).collect())
    }

    fn group(fs_group: &str, flags: &[&str]) -> Self {
        Self { fs_group: fs_group.to_owned(), ..Self::flags(flags) }
    }

    fn attribute(key: &str, value: &str) -> Self {
        Self::with(|it| {
            it.context.insert(key.to_owned(), value.to_owned());
        })
    }

    fn secret(entries: &[(&str, &str)]) -> Self {
        let secret = |(key, value): &(&str, &str)| ((*key).to_owned(), Secret::new((*value).to_owned()));
        Self { secrets: entries.iter().map(secret).collect(), ..Self::attribute("authenticationSource", "secret") }
    }

    fn workload(namespace: &str, service_account: &str) -> Self {
        let mut given = Self::attribute("authenticationSource", "pod");
        for (key, value) in [(context::POD_NAMESPACE, namespace), (context::SERVICE_ACCOUNT_NAME, service_account)] {
            given.context.insert(key.to_owned(), value.to_owned());
        }
        given.secrets.insert(context::SERVICE_ACCOUNT_TOKENS.to_owned(), Secret::new("{}".to_owned()));
        given
    }

    fn parse(&self) -> Result<Publish, InvalidPublish> {
        let access_type = match self.access_type {
            "mount" => AccessType::Mount {
                fs_type: "ext4",
                mount_flags: &self.mount_flags,
                volume_mount_group: &self.fs_group,
            },
            "block" => AccessType::Block,
            _ => AccessType::Unset,
        };
        let capability = RawCapability { access_mode: self.access_mode.clone(), access_type };
        let raw = RawPublish {
            volume_id: &self.volume_id,
            target_path: &self.target_path,
            volume_context: &self.context,
            capability: self.capability.then_some(capability),
            readonly: self.readonly,
            secrets: &self.secrets,
        };
        Publish::parse(&raw, &self.fallback)
    }
}

/// The whole message, causes included.
#[track_caller]
fn check_refused(given: &Given, expected: &str) {
    assert_eq!(Chain(&given.parse().unwrap_err()).to_string(), expected);
}

#[track_caller]
fn check_arguments(given: &Given, expected: &[&str]) {
    assert_eq!(given.parse().unwrap().arguments.render(), expected);
}

#[track_caller]
fn check_access(given: &Given, workload: Access, volume: Access) {
    let publish = given.parse().unwrap();
    assert_eq!((publish.access, publish.volume_access), (workload, volume));
    assert!(!publish.arguments.has("--read-only"));
}

#[test]
fn a_complete_request_is_understood() {
    let mut given = Given::attribute("csi.storage.k8s.io/pod.namespace", "team");
    given.context.insert("csi.storage.k8s.io/serviceAccount.name".to_owned(), "robot".to_owned());
    let publish = given.parse().unwrap();
    assert_eq!(publish.volume_id.as_str(), "handle-1");
    assert_eq!(publish.bucket.as_str(), "bucket-1");
    assert_eq!(publish.target.workload().as_str(), "uid-1");
    assert_eq!(publish.target.volume().as_str(), "pv-1");
    assert_eq!(publish.workload_namespace.as_deref(), Some("team"));
    assert_eq!(publish.service_account.as_deref(), Some("robot"));
    assert_eq!(publish.fs_group, None);
    assert_eq!(publish.identity, Identity::Driver);
}

#[test]
fn what_is_missing_is_said_in_the_order_of_the_contract() {
    let mut given = Given {
        volume_id: String::new(),
        target_path: String::new(),
        context: BTreeMap::new(),
        capability: false,
        access_mode: None,
        access_type: "block",
        ..Given::fine()
    };
    check_refused(&given, "Volume ID not provided: set spec.csi.volumeHandle of the PersistentVolume");
    given.volume_id = "handle".to_owned();
    let bucket = "Bucket name not provided: set spec.csi.volumeAttributes.bucketName of the PersistentVolume";
    check_refused(&given, bucket);
    given.context.insert("bucketName".to_owned(), String::new());
    check_refused(&given, bucket);
    given.context.insert("bucketName".to_owned(), "bucket".to_owned());
    check_refused(&given, "Target path not provided: kubelet must say where to mount");
    given.target_path = TARGET.to_owned();
    check_refused(&given, "Volume capability not provided: kubelet must say how the volume is used");
    given.capability = true;
    let modes = "use ReadWriteMany (MULTI_NODE_MULTI_WRITER), ReadOnlyMany (MULTI_NODE_READER_ONLY), or with strategy \
                 pod ReadWriteOnce or ReadWriteOncePod";
    check_refused(&given, &format!("Volume capability not supported: access mode is missing; {modes}"));
    given.access_mode = Some(AccessMode::Other("SINGLE_NODE_WRITER".to_owned()));
    check_refused(&given, &format!("Volume capability not supported: access mode is SINGLE_NODE_WRITER; {modes}"));
    given.access_mode = Some(AccessMode::MultiNodeReaderOnly);
    check_refused(
        &given,
        "Volume capability not supported: a bucket is not a block device; use volumeMode: Filesystem",
    );
    given.access_type = "unset";
    assert!(given.parse().is_ok());
}

#[test]
fn names_and_paths_are_checked() {
    check_refused(
        &Given::attribute("bucketName", "No_Bucket"),
        "Bucket name not valid: correct spec.csi.volumeAttributes.bucketName of the PersistentVolume: bucket name \
         \"No_Bucket\" may only contain lower-case letters, digits, dots and hyphens",
    );
    check_refused(
        &Given::with(|it| it.target_path = "/tmp/target".to_owned()),
        "Target path not understood: only paths that kubelet makes for volumes of Pods are served: target path \
         \"/tmp/target\" is not of the form /<kubelet>/pods/<uid>/volumes/kubernetes.io~csi/<pv name>/mount",
    );
}

#[test]
fn mount_options_that_cannot_work_are_refused() {
    let wrong = "mountOptions not understood: correct spec.mountOptions of the PersistentVolume";
    check_refused(&Given::flags(&["uid 1", "--"]), &format!("{wrong}: mount option \"--\" has no name"));
    check_refused(&Given::flags(&[""]), &format!("{wrong}: mount option \"\" is empty"));
    let root = |option| {
        format!(
            "mount option {option}=0 is not possible: the engine refuses to show files as owned by root; use a number \
             from 1 up (root itself has access anyway)"
        )
    };
    check_refused(&Given::flags(&["uid 0"]), &root("--uid"));
    check_refused(&Given::flags(&["gid=1", "gid=00"]), &root("--gid"));
    check_refused(
        &Given::flags(&["read-only=false"]),
        "mount option --read-only takes no value, but has \"false\"; remove the value, or the option",
    );
}

#[test]
fn a_volume_is_read_only_by_mode_or_option_and_a_workload_also_by_request() {
    use Access::{ReadOnly, ReadWrite};
    check_access(&Given::fine(), ReadWrite, ReadWrite);
    check_access(&Given::with(|it| it.readonly = true), ReadOnly, ReadWrite);
    check_access(&Given::with(|it| it.access_mode = Some(AccessMode::MultiNodeReaderOnly)), ReadOnly, ReadOnly);
    check_access(&Given::flags(&["read-only"]), ReadOnly, ReadOnly);
    check_access(&Given { readonly: true, ..Given::flags(&["--read-only"]) }, ReadOnly, ReadOnly);
}

#[test]
fn the_driver_s_metadata_are_not_mounted() {
    for prefix in ["prefix .s3csi/", "--prefix=.s3csi/volumes/", "prefix=.s3csi"] {
        let value = prefix.rsplit([' ', '=']).next().unwrap();
        check_refused(
            &Given::flags(&[prefix]),
            &format!("mount option prefix {value:?} is reserved for the driver's metadata; use another prefix"),
        );
    }
}

#[test]
fn a_prefix_of_the_volume_becomes_an_option() {
    check_arguments(&Given::attribute("prefix", "team/a"), &["--allow-root", "--force-path-style", "--prefix=team/a/"]);
    check_refused(
        &Given { context: Given::attribute("prefix", "a").context, ..Given::flags(&["prefix=b/"]) },
        "mount option prefix and volume attribute prefix exclude each other; remove one of them",
    );
    check_refused(
        &Given::attribute("prefix", "a//b"),
        "prefix not usable: correct spec.csi.volumeAttributes.prefix of the PersistentVolume: prefix \"a//b\" must not \
         begin with a slash, have two slashes in a row or contain \".\" or \"..\"",
    );
}

#[test]
fn another_store_needs_other_keys() {
    let mut given = Given::secret(&[("access_key_id", "a"), ("secret_access_key", "b")]);
    given.context.insert("endpointUrl".to_owned(), "https://s3.example.com".to_owned());
    assert_eq!(given.parse().unwrap().endpoint.unwrap().as_str(), "https://s3.example.com");
    check_refused(
        &Given::attribute("endpointUrl", "https://s3.example.com"),
        "endpointUrl is only for volumes with keys of their own: set authenticationSource: secret (or pod), so that the \
         driver's are never sent elsewhere",
    );
    check_refused(
        &Given::attribute("endpointUrl", "s3.example.com"),
        "endpointUrl not usable: correct spec.csi.volumeAttributes.endpointUrl of the PersistentVolume: endpointUrl \
         \"s3.example.com\" must look like https://s3.example.com or http://s3.example.com:8000, without a path",
    );
}

#[test]
fn defaults_are_added_unless_the_user_chose() {
    check_arguments(&Given::fine(), &["--allow-root", "--force-path-style"]);
    check_arguments(&Given::flags(&["allow-other"]), &["--allow-other", "--force-path-style"]);
    check_arguments(&Given::flags(&["allow-root", "uid 7"]), &["--allow-root", "--force-path-style", "--uid=7"]);
}

#[test]
fn an_fs_group_opens_the_volume_to_that_group() {
    check_arguments(
        &Given::group("2000", &[]),
        &["--allow-other", "--dir-mode=770", "--file-mode=660", "--force-path-style", "--gid=2000"],
    );
    check_arguments(
        &Given::group("2000", &["dir-mode 750", "allow-other"]),
        &["--allow-other", "--dir-mode=750", "--file-mode=660", "--force-path-style", "--gid=2000"],
    );
    assert_eq!(Given::group("2000", &[]).parse().unwrap().fs_group.as_deref(), Some("2000"));
}

#[test]
fn an_fs_group_changes_nothing_where_the_user_chose_or_the_engine_cannot() {
    check_arguments(&Given::group("2000", &["gid 3"]), &["--allow-root", "--force-path-style", "--gid=3"]);
    check_arguments(
        &Given::group("2000", &["allow-root"]),
        &["--allow-root", "--dir-mode=770", "--file-mode=660", "--force-path-style", "--gid=2000"],
    );
    check_arguments(&Given::group("0", &["allow-other"]), &["--allow-other", "--force-path-style"]);
    assert_eq!(Given::group("0", &[]).parse().unwrap().fs_group.as_deref(), Some("0"));
}

#[test]
fn an_fs_group_is_a_number() {
    for value in ["staff", "-1", "1 --allow-delete", "4294967296"] {
        check_refused(
            &Given::group(value, &[]),
            &format!("fsGroup {value:?} is not a number: correct securityContext.fsGroup of the Pod"),
        );
    }
}

#[test]
fn requests_are_printed_without_their_keys() {
    let given = Given::secret(&[("access_key_id", "hush1"), ("secret_access_key", "hush2")]);
    assert!(!format!("{given:?} {:?}", given.parse().unwrap()).contains("hush"));
}

#[test]
fn workloads_share_a_source_only_if_the_volume_and_its_keys_are_the_same() {
    let name = |given: &Given| given.parse().unwrap().sharing_key("node-1").name();
    let fine = name(&Given::fine());
    let other_workload = TARGET.replace("uid-1", "uid-2");
    assert_eq!(name(&Given::with(|it| it.target_path = other_workload)), fine);
    assert_eq!(name(&Given::with(|it| it.readonly = true)), fine);
    assert_eq!(name(&Given::attribute("csi.storage.k8s.io/pod.namespace", "team")), fine);

    let keys = |id| Given::secret(&[("access_key_id", id), ("secret_access_key", "secret")]);
    assert_eq!(name(&keys("before")), name(&keys("after")), "rotated keys must reach the running source");

    for other in [
        keys("a"),
        Given::with(|it| it.volume_id = "handle-2".to_owned()),
        Given::with(|it| it.target_path = TARGET.replace("pv-1", "pv-2")),
        Given::attribute("bucketName", "bucket-2"),
        Given::attribute("prefix", "a"),
        Given::flags(&["uid 1"]),
        Given::flags(&["read-only"]),
        Given::group("2000", &["gid 1"]),
    ] {
        assert_ne!(name(&other), fine, "{other:?}");
    }
    assert_ne!(Given::fine().parse().unwrap().sharing_key("node-2").name(), fine);
}

/// Options, each as a list of texts that all mean the same.
const SPELLINGS: [[&str; 4]; 5] = [
    ["debug", "-d", "--debug", " -d "],
    ["uid 1000", "--uid=1000", "uid=1000", "--uid   1000"],
    ["prefix=a b=c/", "--prefix a b=c/", "prefix  a b=c/", "--prefix= a b=c/ "],
    ["allow-delete", "--allow-delete", " allow-delete", "allow-delete="],
    ["region eu", "--region=eu", "region=eu ", "--region  eu"],
];

fn spelled(option: usize) -> impl Strategy<Value = String> {
    prop::sample::select(SPELLINGS[option].to_vec()).prop_map(str::to_owned)
}

/// A set of options, and two ways to write it: spelled, ordered and repeated differently.
fn written_twice() -> impl Strategy<Value = (Vec<usize>, Vec<String>, Vec<String>)> {
    let chosen = prop::sample::subsequence((0..SPELLINGS.len()).collect::<Vec<_>>(), 0..=SPELLINGS.len());
    chosen.prop_flat_map(|chosen| {
        let written = |repeat: usize| {
            let options: Vec<_> = chosen.iter().cycle().take(chosen.len() * repeat).map(|it| spelled(*it)).collect();
            options.prop_shuffle()
        };
        let (once, twice) = (written(1), written(2));
        (Just(chosen), once, twice)
    })
}

proptest! {
    #[test]
    fn spelling_order_and_repetition_do_not_split_sharing((_, first, second) in written_twice()) {
        let name = |flags: &[String]| {
            Given::with(|it| it.mount_flags = flags.to_vec()).parse().unwrap().sharing_key("node").name()
        };
        prop_assert_eq!(name(&first), name(&second));
    }

    #[test]
    fn different_options_never_share((one, first, _) in written_twice(), (other, second, _) in written_twice()) {
        let name = |flags: &[String]| {
            Given::with(|it| it.mount_flags = flags.to_vec()).parse().unwrap().sharing_key("node").name()
        };
        prop_assert_eq!(one == other, name(&first) == name(&second));
    }

    #[test]
    fn parsing_never_panics(
        volume_id in any::<String>(), bucket in any::<String>(), target in any::<String>(), fs_group in any::<String>(),
        source in any::<String>(), flags in prop::collection::vec(any::<String>(), 0..3), key in any::<String>(),
    ) {
        let given = Given {
            volume_id,
            target_path: target,
            fs_group,
            mount_flags: flags,
            secrets: BTreeMap::from([("access_key_id".to_owned(), Secret::new(key))]),
            context: BTreeMap::from([("bucketName".to_owned(), bucket), ("authenticationSource".to_owned(), source)]),
            ..Given::fine()
        };
        let _ = given.parse();
    }
}
