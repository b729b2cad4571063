//! Whose keys an engine works with, and where they lie. States of all sources: `credential_matrix`.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use s3csi_s3_server::store::{Account, Store as _};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::kubelet::CsiVolume;
use s3csi_testbed::wait::wait_for;
use tonic::Code;

use crate::world::{BUCKET, PV, World, check_refused, pod, volume};

/// The user and group that the mounter runs as.
const MOUNTER: u32 = 1000;

/// A bucket that only the second account may use.
const SECOND_BUCKET: &str = "second-bucket";

fn second(world: &World<'_>) -> Account {
    let account = Account::named("second");
    world.store.add_account(&account).unwrap();
    world.store.create_bucket(SECOND_BUCKET, &account).unwrap();
    account
}

fn of_second_bucket(account: &Account) -> CsiVolume {
    CsiVolume::new(SECOND_BUCKET, "pv-second", &pod(1)).with_secret(&account.access_key, &account.secret_key)
}

fn credentials_file(world: &World<'_>) -> PathBuf {
    world.mounter_source_directory().join("credentials/s3-csi-credentials")
}

fn profile(account: &Account) -> String {
    let Account { access_key, secret_key } = account;
    format!("[s3-csi]\naws_access_key_id={access_key}\naws_secret_access_key={secret_key}\n")
}

/// Mode, user and group.
fn ownership(path: &Path) -> (u32, u32, u32) {
    let found = fs::metadata(path).unwrap();
    (found.mode() & 0o7777, found.uid(), found.gid())
}

/// Files beneath a directory that contain the text. Mounts are not entered.
fn files_with(directory: &Path, text: &str, mounts: &[PathBuf]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).unwrap().map(Result::unwrap) {
        let (path, kind) = (entry.path(), entry.file_type().unwrap());
        if kind.is_dir() && !mounts.contains(&path) {
            found.extend(files_with(&path, text, mounts));
        } else if kind.is_file() && contains(&path, text) {
            found.push(path);
        }
    }
    found
}

fn contains(path: &Path, text: &str) -> bool {
    fs::read(path).unwrap().windows(text.len()).any(|it| it == text.as_bytes())
}

#[test]
fn driver_keys_are_in_one_file_that_only_the_mounter_reads() {
    let fixture = Fixture::new("credentials-driver");
    let world = World::start(&fixture);
    world.publish(&volume(1));
    let account = world.store.account();

    let file = credentials_file(&world);
    assert_eq!(fs::read_to_string(&file).unwrap(), profile(account));
    assert_eq!(fs::read_to_string(file.with_file_name("s3-csi-config")).unwrap(), "[profile s3-csi]\n");
    assert_eq!(ownership(&file), (0o640, 0, MOUNTER));
    assert_eq!(ownership(file.parent().unwrap()), (0o2750, 0, MOUNTER));
    assert_eq!(ownership(&world.mounter_source_directory()), (0o2770, 0, MOUNTER));
    assert_eq!(files_with(fixture.directory(), &account.secret_key, &world.mounts()), [file]);
    for file in ["environ", "cmdline"] {
        let path = PathBuf::from(format!("/proc/{}/{file}", world.engine()));
        assert!(!contains(&path, &account.secret_key), "{} shows the key", path.display());
    }
    world.unpublish(&volume(1));
    world.check_nothing_left();
}

#[test]
fn a_secret_s_keys_are_used_and_the_driver_s_are_not() {
    let fixture = Fixture::new("credentials-secret");
    let world = World::start(&fixture);
    let account = second(&world);
    let volume = of_second_bucket(&account);
    let target = world.publish(&volume);
    fs::write(target.join("mine"), "x").unwrap();
    assert_eq!(world.store.keys(SECOND_BUCKET), ["mine"]);
    assert_eq!(fs::read_to_string(credentials_file(&world)).unwrap(), profile(&account));

    // The driver's own account may not use that bucket.
    let stranger = CsiVolume { secrets: [].into(), attributes: [].into(), pod_uid: pod(2), ..volume.clone() };
    check_refused(world.try_publish(&stranger), Code::PermissionDenied, &["Could not mount", SECOND_BUCKET]);

    world.unpublish(&volume);
    world.check_nothing_left();
}

#[test]
fn secret_without_a_secret_is_refused_and_never_the_driver_s_keys() {
    let fixture = Fixture::new("credentials-none");
    let world = World::start(&fixture);
    let mut volume = volume(1);
    volume.attributes.insert("authenticationSource".to_owned(), "secret".to_owned());
    check_refused(world.try_publish(&volume), Code::Unauthenticated, &["no usable Secret", "nodePublishSecretRef"]);
    assert_eq!(world.store.requests(), [], "a request reached the store");
    world.check_nothing_left();
}

/// Volumes of earlier drivers say `secret` and name none.
#[test]
fn a_missing_secret_means_the_driver_s_keys_in_listed_namespaces() {
    let fixture = Fixture::new("credentials-fallback");
    let mut world = World::prepare(&fixture);
    world.start_mounter();
    world.start_node_with(&["--secret-falls-back-to-driver", "elsewhere,default"]);
    let without = |number: u32, attributes: &[(&str, &str)]| {
        let mut volume = volume(number);
        volume.attributes.insert("authenticationSource".to_owned(), "secret".to_owned());
        volume.attributes.extend(attributes.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())));
        volume
    };
    let target = world.publish(&without(1, &[]));
    world.check_serves(&target);
    assert_eq!(fs::read_to_string(credentials_file(&world)).unwrap(), profile(world.store.account()));
    world.node().wait_for_log("a volume without a Secret uses the driver's keys");

    let refuse = |volume: &CsiVolume| {
        check_refused(world.try_publish(volume), Code::Unauthenticated, &["no usable Secret"]);
    };
    refuse(&without(2, &[("csi.storage.k8s.io/pod.namespace", "other")]));
    refuse(&without(2, &[("endpointUrl", "http://127.0.0.1:1")]));
    let mut malformed = without(2, &[]);
    malformed.secrets.insert("access_key_id".to_owned(), "alone".to_owned());
    refuse(&malformed);

    // The same volume with a Secret, of the same account, has an engine of its own.
    let account = world.store.account().clone();
    let with_secret = volume(3).with_secret(&account.access_key, &account.secret_key);
    world.publish(&with_secret);
    assert_eq!(world.engines().len(), 2);
    world.unpublish(&with_secret);
    world.unpublish(&without(1, &[]));
    world.check_nothing_left();
}

#[test]
fn a_wrong_secret_is_refused_with_the_stores_message() {
    let fixture = Fixture::new("credentials-wrong");
    let world = World::start(&fixture);
    let account = world.store.account().clone();
    for (id, message) in [(account.access_key.as_str(), "SignatureDoesNotMatch"), ("unknown", "InvalidAccessKeyId")] {
        let volume = volume(1).with_secret(id, "wrong");
        let words = ["Could not mount", BUCKET, PV, message];
        check_refused(world.try_publish(&volume), Code::Unauthenticated, &words);
        world.check_nothing_left();
    }
}

#[test]
fn a_session_token_is_passed_on() {
    let fixture = Fixture::new("credentials-token");
    let world = World::start(&fixture);
    let account = world.store.account().clone();
    let mut volume = volume(1).with_secret(&account.access_key, &account.secret_key);
    volume.secrets.insert("session_token".to_owned(), "token-NeverPrintThis".to_owned());
    volume.secrets.insert("unknown".to_owned(), "whatever".to_owned());
    let target = world.publish(&volume);
    fs::write(target.join("file"), "x").unwrap();
    let expected = format!("{}aws_session_token=token-NeverPrintThis\n", profile(&account));
    assert_eq!(fs::read_to_string(credentials_file(&world)).unwrap(), expected);
    world.unpublish(&volume);
}

#[test]
fn a_rotated_secret_reaches_the_running_mount_with_the_next_publish() {
    let fixture = Fixture::new("credentials-rotated");
    let world = World::start(&fixture);
    let old = second(&world);
    let volume = of_second_bucket(&old);
    let target = world.publish(&volume);
    fs::write(target.join("before"), "x").unwrap();
    let (engine, inode) = (world.engine(), fs::metadata(credentials_file(&world)).unwrap().ino());

    let new = Account::new(&old.access_key, "rotated-NeverPrintThis");
    world.store.add_account(&new).unwrap();
    let volume = of_second_bucket(&new);
    world.publish(&volume);
    let file = credentials_file(&world);
    assert_eq!(fs::read_to_string(&file).unwrap(), profile(&new));
    assert_eq!(ownership(&file), (0o640, 0, MOUNTER));
    assert_ne!(fs::metadata(&file).unwrap().ino(), inode, "written by rename, never half");
    assert!(files_with(fixture.directory(), &old.secret_key, &world.mounts()).is_empty(), "the old key is still there");
    // The old key is invalid now, and nothing is mounted again.
    wait_for("an engine with the new key serves", || world.engines().iter().all(|it| *it != engine));
    fs::write(target.join("after"), "x").unwrap();
    assert_eq!(world.store.keys(SECOND_BUCKET), ["after", "before"]);
    world.unpublish(&volume);
    world.check_nothing_left();
}

#[test]
fn rotated_driver_keys_arrive_with_the_restarted_plugin() {
    let fixture = Fixture::new("credentials-restart");
    let mut world = World::start(&fixture);
    let target = world.publish(&volume(1));
    let engine = world.engine();
    let new = Account::new(&world.store.account().access_key, "rotated-NeverPrintThis");
    world.store.add_account(&new).unwrap();
    world.stop_node();
    world.plugin.set_account(Some(new.clone()));
    world.start_node();
    world.publish(&volume(1));
    assert_eq!(fs::read_to_string(credentials_file(&world)).unwrap(), profile(&new));
    wait_for("an engine with the new key serves", || world.engines().iter().all(|it| *it != engine));
    fs::write(target.join("after"), "x").unwrap();
    world.unpublish(&volume(1));
    world.check_nothing_left();
}

#[test]
fn a_driver_without_keys_serves_volumes_that_bring_their_own() {
    let fixture = Fixture::new("credentials-no-driver-keys");
    let world = World::start_with(&fixture, |it| it.account = None);
    let words = ["the driver has no credentials", "s3CredentialSecret", "nodePublishSecretRef"];
    check_refused(world.try_publish(&volume(1)), Code::Unauthenticated, &words);
    world.check_nothing_left();

    let account = world.store.account().clone();
    let volume = volume(1).with_secret(&account.access_key, &account.secret_key);
    fs::write(world.publish(&volume).join("file"), "x").unwrap();
    world.unpublish(&volume);
    world.check_nothing_left();
}
