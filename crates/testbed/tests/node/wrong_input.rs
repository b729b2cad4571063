//! Requests that are wrong, over the real socket: the exact code, the words, and nothing done.

use std::collections::HashMap;
use std::path::Path;

use s3csi_driver::csi::proto::volume_capability::access_mode::Mode;
use s3csi_driver::csi::proto::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use s3csi_driver::csi::proto::{
    NodeExpandVolumeRequest, NodeGetVolumeStatsRequest, NodePublishVolumeRequest, NodeStageVolumeRequest,
    NodeUnstageVolumeRequest, VolumeCapability,
};
use s3csi_s3_server::store::{SECRET_MARK, Store as _};
use s3csi_testbed::fixture::Fixture;
use tonic::Code;

use crate::world::{BUCKET, World, check_refused, volume};

/// Sends a request that is fine but for one thing.
#[track_caller]
fn check(world: &World<'_>, change: impl FnOnce(&mut NodePublishVolumeRequest), code: Code, words: &[&str]) {
    let mut request = world.kubelet.publish_request(&volume(1));
    change(&mut request);
    let outcome = world.runtime.block_on(world.kubelet.send_publish(request));
    if let Err(status) = &outcome {
        assert!(!status.message().contains(SECRET_MARK), "a secret is in: {}", status.message());
    }
    check_refused(outcome, code, words);
}

/// What every table must leave: nothing.
#[track_caller]
fn check_untouched(world: &World<'_>) {
    world.check_nothing_left();
    assert_eq!(world.store.requests(), [], "a request reached the store");
    let text = format!("{}{}", world.node().output(), world.node().errors());
    assert!(!text.contains(SECRET_MARK), "a secret is in the log");
}

#[test]
fn volume_context_and_target() {
    let fixture = Fixture::new("wrong-context");
    let world = World::start(&fixture);
    let invalid = Code::InvalidArgument;
    check(&world, |it| it.volume_id.clear(), invalid, &["Volume ID not provided", "volumeHandle"]);
    check(
        &world,
        |it| it.volume_context.clear(),
        invalid,
        &["Bucket name not provided", "volumeAttributes.bucketName"],
    );
    let bucket = |name: &str, words: &[&str]| {
        check(&world, |it| drop(it.volume_context.insert("bucketName".into(), name.into())), invalid, words);
    };
    bucket("", &["Bucket name not provided"]);
    bucket("ab", &["Bucket name not valid", "\"ab\"", "3 to 63"]);
    bucket("--endpoint-url=http://evil", &["Bucket name not valid"]);
    bucket("UPPER", &["Bucket name not valid"]);
    bucket("a/../b", &["Bucket name not valid"]);
    let target = |path: &str, words: &[&str]| check(&world, |it| it.target_path = path.into(), invalid, words);
    target("", &["Target path not provided"]);
    target("/etc", &["Target path not understood", "/etc"]);
    target("relative/pods/u/volumes/kubernetes.io~csi/pv/mount", &["must be absolute"]);
    target("/k/pods/../volumes/kubernetes.io~csi/pv/mount", &["Target path not understood"]);
    target("/k/pods/u/volumes/kubernetes.io~csi/pv/other", &["kubernetes.io~csi/<pv name>/mount"]);
    let source = "authenticationSource";
    let words = ["authenticationSource \"vault\" is not known", "\"driver\", \"secret\" and \"pod\""];
    check(&world, |it| drop(it.volume_context.insert(source.into(), "vault".into())), invalid, &words);
    check_untouched(&world);
}

#[test]
fn capabilities() {
    let fixture = Fixture::new("wrong-capability");
    let world = World::start(&fixture);
    let invalid = Code::InvalidArgument;
    check(&world, |it| it.volume_capability = None, invalid, &["Volume capability not provided"]);
    let set_mode = |request: &mut NodePublishVolumeRequest, mode: Option<AccessMode>| {
        request.volume_capability.get_or_insert_default().access_mode = mode;
    };
    check(&world, |it| set_mode(it, None), invalid, &["Volume capability not supported", "access mode is missing"]);
    for mode in [
        Mode::Unknown,
        Mode::SingleNodeWriter,
        Mode::SingleNodeReaderOnly,
        Mode::MultiNodeSingleWriter,
        Mode::SingleNodeSingleWriter,
        Mode::SingleNodeMultiWriter,
    ] {
        let words = ["Volume capability not supported", mode.as_str_name(), "ReadWriteMany", "ReadOnlyMany"];
        check(&world, |it| set_mode(it, Some(AccessMode { mode: mode.into() })), invalid, &words);
    }
    let block = VolumeCapability {
        access_mode: Some(AccessMode { mode: Mode::MultiNodeMultiWriter.into() }),
        access_type: Some(AccessType::Block(BlockVolume {})),
    };
    check(&world, |it| it.volume_capability = Some(block), invalid, &["not a block device", "volumeMode: Filesystem"]);
    for group in ["staff", "-1", "1.5", "4294967296"] {
        let words = ["fsGroup", group, "is not a number"];
        check(&world, |it| mount(it).volume_mount_group = group.to_owned(), invalid, &words);
    }
    check_untouched(&world);
}

fn mount(request: &mut NodePublishVolumeRequest) -> &mut MountVolume {
    match request.volume_capability.as_mut().and_then(|it| it.access_type.as_mut()) {
        Some(AccessType::Mount(mount)) => mount,
        other => panic!("not a mount: {other:?}"),
    }
}

#[test]
fn mount_options() {
    let fixture = Fixture::new("wrong-options");
    let world = World::start(&fixture);
    let options = |list: &[&str], words: &[&str]| {
        let list: Vec<String> = list.iter().map(|it| (*it).to_owned()).collect();
        check(&world, |it| mount(it).mount_flags = list, Code::InvalidArgument, words);
    };
    options(&[""], &["mountOptions not understood", "is empty"]);
    options(&["--"], &["mountOptions not understood", "has no name"]);
    options(&["/etc/passwd"], &["mountOptions not understood", "is not an option"]);
    options(&["prefix=a\nb"], &["mountOptions not understood", "control character"]);
    options(&["read-only=false"], &["--read-only takes no value", "false"]);
    options(&["uid=0"], &["--uid=0 is not possible"]);
    options(&["gid 0"], &["--gid=0 is not possible"]);
    options(&["uid=1", "--uid 2"], &["bucket-1", "--uid is given more than once", "1, 2"]);
    options(&["aws-max-attempts=0"], &["--aws-max-attempts", "\"0\""]);
    options(&["aws-max-attempts=many"], &["--aws-max-attempts", "\"many\""]);
    check_untouched(&world);
}

#[test]
fn options_that_only_the_engine_knows_to_be_wrong() {
    let fixture = Fixture::new("wrong-engine-options");
    let world = World::start(&fixture);
    let options = |list: &[&str], words: &[&str]| {
        let list: Vec<String> = list.iter().map(|it| (*it).to_owned()).collect();
        check(&world, |it| mount(it).mount_flags = list, Code::InvalidArgument, words);
        world.check_nothing_left();
    };
    options(&["no-such-option"], &["Could not mount", "--no-such-option"]);
    options(&["dir-mode=999"], &["Could not mount", "999"]);
    options(&["allow-root", "allow-other"], &["Could not mount", "--allow-root"]);
}

#[test]
fn secrets() {
    let fixture = Fixture::new("wrong-secrets");
    let world = World::start(&fixture);
    let secret = |entries: &[(&str, &str)], words: &[&str]| {
        let owned = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        let secrets: HashMap<String, String> = entries.iter().map(owned).collect();
        let change = |it: &mut NodePublishVolumeRequest| {
            it.volume_context.insert("authenticationSource".to_owned(), "secret".to_owned());
            it.secrets = secrets;
        };
        check(&world, change, Code::Unauthenticated, words);
    };
    let value = format!("a {SECRET_MARK}");
    secret(&[], &["no usable Secret", "access_key_id and secret_access_key"]);
    secret(&[("other", SECRET_MARK)], &["the Secret lacks access_key_id, secret_access_key", "nodePublishSecretRef"]);
    secret(&[("access_key_id", SECRET_MARK)], &["the Secret lacks secret_access_key"]);
    secret(&[("access_key_id", " "), ("secret_access_key", SECRET_MARK)], &["the Secret lacks access_key_id"]);
    let words = ["malformed value for access_key_id, secret_access_key", "without spaces"];
    secret(&[("access_key_id", &value), ("secret_access_key", &value)], &words);
    let token = format!("{SECRET_MARK}\n[other]");
    let all = [("access_key_id", "a"), ("secret_access_key", "b"), ("session_token", token.as_str())];
    secret(&all, &["malformed value for session_token"]);
    check_untouched(&world);
}

#[test]
fn unpublish() {
    let fixture = Fixture::new("wrong-unpublish");
    let world = World::start(&fixture);
    let check = |volume: &str, target: &str, words: &[&str]| {
        let outcome = world.runtime.block_on(world.kubelet.send_unpublish(volume, Path::new(target)));
        check_refused(outcome, Code::InvalidArgument, words);
    };
    check("", "/a", &["Volume ID not provided"]);
    check("handle", "", &["Target path not provided"]);
    check("handle", "relative", &["\"relative\" is not absolute"]);
    check_untouched(&world);
}

#[test]
fn statistics_without_a_volume_or_a_path() {
    let fixture = Fixture::new("wrong-stats");
    let world = World::start(&fixture);
    let mut node = world.kubelet.node();
    let mut ask = |volume_id: &str, volume_path: &str| {
        let (volume_id, volume_path) = (volume_id.to_owned(), volume_path.to_owned());
        let request = NodeGetVolumeStatsRequest { volume_id, volume_path, staging_target_path: String::new() };
        world.runtime.block_on(node.node_get_volume_stats(request))
    };
    check_refused(ask("", "/x"), Code::InvalidArgument, &["Volume ID not provided"]);
    check_refused(ask("volume", ""), Code::InvalidArgument, &["Volume path not provided"]);
    check_refused(ask("volume", "/no/such/target"), Code::NotFound, &["is not mounted at"]);
}

#[test]
fn calls_that_are_not_announced() {
    let fixture = Fixture::new("wrong-calls");
    let world = World::start(&fixture);
    let mut node = world.kubelet.node();
    let unimplemented = Code::Unimplemented;
    let run = &world.runtime;
    let stage = run.block_on(node.node_stage_volume(NodeStageVolumeRequest::default()));
    check_refused(stage, unimplemented, &["NodeStageVolume"]);
    let unstage = run.block_on(node.node_unstage_volume(NodeUnstageVolumeRequest::default()));
    check_refused(unstage, unimplemented, &["NodeUnstageVolume"]);
    let expand = run.block_on(node.node_expand_volume(NodeExpandVolumeRequest::default()));
    check_refused(expand, unimplemented, &["NodeExpandVolume"]);
}

#[test]
fn blocked_options_are_left_out_and_the_log_says_why() {
    let fixture = Fixture::new("wrong-blocked");
    let world = World::start(&fixture);
    let blocked = ["endpoint-url=http://127.0.0.1:1", "--profile other", "-o ro", "user-agent-prefix=me", "endpoint=x"];
    let mut volume = volume(1);
    volume.mount_options.extend(blocked.map(str::to_owned));
    let target = world.publish(&volume);
    std::fs::write(target.join("file"), "x").unwrap();
    assert_eq!(world.store.object(BUCKET, "file").as_deref(), Some(b"x".as_slice()));
    let log = world.node().errors();
    for option in ["--endpoint-url", "--profile", "-o", "--user-agent-prefix", "--endpoint"] {
        let line = log.lines().find(|it| it.contains(&format!("option=\"{option}\"")));
        assert!(
            line.is_some_and(|it| it.contains("mount option ignored") && it.contains("reason=")),
            "{option}: {log}"
        );
    }
    world.unpublish(&volume);
    world.check_nothing_left();
}
