//! What does not work, and in which words it is said: a table of codes and messages.

use std::collections::HashMap;

use s3csi_driver::csi::proto::CreateVolumeRequest;
use s3csi_driver::csi::proto::volume_capability::access_mode::Mode;
use s3csi_s3_server::store::{Account, Store as _};
use s3csi_s3_server::{Config, Effect, Fault, S3Operation};
use s3csi_testbed::provisioning::{capability, request, secret};
use tonic::Code;

use crate::on_both_servers;
use crate::world::{BUCKETS, World, check_refused, in_process_with};

on_both_servers!(
    wrong_requests_make_nothing,
    keys_that_are_not_known_are_said_to_be,
    keys_of_any_printable_characters_create_and_delete,
    a_driver_without_keys_needs_secrets
);

fn with(change: impl FnOnce(&mut CreateVolumeRequest)) -> CreateVolumeRequest {
    let mut request = request("pvc-1", &[]);
    change(&mut request);
    request
}

fn wrong_requests_make_nothing(world: &World) {
    let provisioning = world.provisioning();
    let _controller = provisioning.start();
    let incomplete = HashMap::from([("access_key_id".to_owned(), "a".to_owned())]);
    let table: [(CreateVolumeRequest, Code, &str); 14] = [
        (with(|it| it.name.clear()), Code::InvalidArgument, "volume name is required"),
        (with(|it| it.volume_capabilities.clear()), Code::InvalidArgument, "volume capabilities are required"),
        (
            with(|it| it.volume_capabilities[0].access_mode = None),
            Code::InvalidArgument,
            "volume capability access mode is required",
        ),
        (
            with(|it| it.volume_capabilities = vec![capability(Mode::SingleNodeWriter, &[])]),
            Code::InvalidArgument,
            "access mode SINGLE_NODE_WRITER cannot be enforced: use ReadWriteMany",
        ),
        (
            with(|it| it.volume_capabilities = vec![capability(Mode::MultiNodeReaderOnly, &["uid=1", "uid=2"])]),
            Code::InvalidArgument,
            "mountOptions of the StorageClass contradict each other",
        ),
        (
            request("pvc-1", &[("bucketPrefix", "x")]),
            Code::InvalidArgument,
            "the StorageClass is not usable: StorageClass parameter \"bucketPrefix\" is not known; known are \
             bucketNamePrefix, region, bucket, prefixTemplate, onDelete, endpointUrl, authenticationSource",
        ),
        (request("pvc-1", &[("onDelete", "purge")]), Code::InvalidArgument, "onDelete \"purge\" is not known"),
        (request("pvc-1", &[("region", "Mars!")]), Code::InvalidArgument, "region \"Mars!\" is not usable"),
        (
            request("pvc-1", &[("bucketNamePrefix", "X")]),
            Code::InvalidArgument,
            "is not a valid beginning of a bucket name",
        ),
        (request("pvc-1", &[("bucket", "shared")]), Code::InvalidArgument, "set prefixTemplate"),
        (
            request("pvc-1", &[("bucket", "shared"), ("prefixTemplate", "${pvc.namespace}/${pvc.name}")]),
            Code::InvalidArgument,
            "start the external-provisioner with --extra-create-metadata",
        ),
        (
            request("pvc-1", &[("endpointUrl", "http://s3.example.com")]),
            Code::InvalidArgument,
            "endpointUrl names another store, which needs keys of its own",
        ),
        (
            with(|it| it.secrets = incomplete),
            Code::Unauthenticated,
            "the provisioner secret is not usable: correct the Secret that the StorageClass names: the Secret lacks \
             secret_access_key",
        ),
        (
            with(|it| it.capacity_range.as_mut().unwrap().limit_bytes = 1),
            Code::OutOfRange,
            "the requested capacity is invalid",
        ),
    ];
    for (request, code, message) in table {
        check_refused(provisioning.create(request), code, message);
    }
    assert_eq!(world.buckets(), [""; 0]);
}

fn keys_that_are_not_known_are_said_to_be(world: &World) {
    let provisioning = world.provisioning();
    let _controller = provisioning.start();
    let volume = provisioning.create(request("pvc-1", &[])).unwrap();
    let stranger = secret(&Account::named("stranger"));
    let mut create = request("pvc-2", &[]);
    create.secrets.clone_from(&stranger);
    check_refused(provisioning.create(create), Code::Unauthenticated, "S3 answered InvalidAccessKeyId (403)");
    let wrong = secret(&Account::new(&world.store.account().access_key, "NotTheSecret"));
    let mut create = request("pvc-2", &[]);
    create.secrets.clone_from(&wrong);
    check_refused(provisioning.create(create), Code::Unauthenticated, "S3 answered SignatureDoesNotMatch (403)");
    check_refused(
        provisioning.delete_as(&volume.volume_id, &stranger),
        Code::Unauthenticated,
        "S3 answered InvalidAccessKeyId (403)",
    );
    assert_eq!(world.buckets(), [volume.volume_id.as_str()]);
}

/// Administrators of S3-compatible stores choose the names of accounts.
fn keys_of_any_printable_characters_create_and_delete(world: &World) {
    let provisioning = world.provisioning();
    let _controller = provisioning.start();
    let account = Account::new("a-b_c.d", "k-1_2.3~NeverPrintThis");
    world.store.add_account(&account).unwrap();
    let mut create = request("pvc-1", &[]);
    create.secrets = secret(&account);
    let volume = provisioning.create(create).unwrap();
    assert_eq!(world.owner(&volume.volume_id).as_deref(), Some("a-b_c.d"));
    provisioning.delete_as(&volume.volume_id, &secret(&account)).unwrap();
    assert_eq!(world.buckets(), [""; 0]);
}

fn a_driver_without_keys_needs_secrets(world: &World) {
    let mut provisioning = world.provisioning();
    provisioning.set_account(None);
    let _controller = provisioning.start();
    let missing = "the request has no provisioner secret and the driver has no keys";
    check_refused(provisioning.create(request("pvc-1", &[])), Code::Unauthenticated, missing);
    let mut create = request("pvc-1", &[]);
    create.secrets = secret(world.store.account());
    let volume = provisioning.create(create).unwrap();
    check_refused(provisioning.delete(&volume.volume_id), Code::Unauthenticated, missing);
    provisioning.delete_as(&volume.volume_id, &secret(world.store.account())).unwrap();
    assert_eq!(world.buckets(), [""; 0]);
}

#[test]
fn a_store_that_is_not_there_is_unavailable() {
    let world = in_process_with("no-account", Config::default());
    let mut provisioning = world.provisioning();
    // Nothing listens on port 1.
    provisioning.set_endpoint("http://127.0.0.1:1");
    let _controller = provisioning.start();
    check_refused(provisioning.create(request("pvc-1", &[])), Code::Unavailable, "Connection refused");
    check_refused(
        provisioning.delete("csi-s3-0f087007-bb94-8ce4-af0b-e31105b7408e"),
        Code::Unavailable,
        "Connection refused",
    );
    // The class may name another store, with keys of its own.
    let mut create = request("pvc-1", &[("endpointUrl", &world.store.endpoint())]);
    create.secrets = secret(world.store.account());
    let volume = provisioning.create(create).unwrap();
    assert_eq!(volume.volume_context["endpointUrl"], world.store.endpoint());
    assert_eq!(volume.volume_context["authenticationSource"], "secret");
    assert_eq!(world.buckets().len(), 1);
    provisioning.delete_as(&volume.volume_id, &secret(world.store.account())).unwrap();
    assert_eq!(world.buckets(), [""; 0]);
}

#[test]
fn a_store_that_does_not_answer_fails_the_call_in_time() {
    let world = in_process_with("frozen", Config::default());
    let provisioning = world.provisioning();
    let _controller = provisioning.start();
    world.store.inject(Fault::new(Effect::Frozen));
    let begun = std::time::Instant::now();
    let answer = provisioning.create_within(request("pvc-1", &[]), std::time::Duration::from_secs(3));
    check_refused(answer, Code::DeadlineExceeded, "the volume was not created in time; the next call continues");
    assert!(begun.elapsed() < std::time::Duration::from_secs(4), "{:?}", begun.elapsed());
    world.store.release_faults();
    provisioning.create(request("pvc-1", &[])).unwrap();
    assert_eq!(world.buckets().len(), 1);
}

#[test]
fn what_the_store_does_not_allow() {
    let world = in_process_with("denied", Config::default());
    let provisioning = world.provisioning();
    let _controller = provisioning.start();
    let denied = |operation: S3Operation| Fault::new(Effect::Denied).operation(operation);
    let fault = world.store.inject(denied(S3Operation::CreateBucket));
    check_refused(
        provisioning.create(request("pvc-1", &[])),
        Code::PermissionDenied,
        "failed to create the bucket: CreateBucket for bucket \"csi-s3-0f087007-bb94-8ce4-af0b-e31105b7408e\" failed: S3 \
         answered AccessDenied (403): Access Denied",
    );
    fault.release();
    // What cannot be recorded is not kept: no later call would find it again.
    let fault = world.store.inject(denied(S3Operation::PutBucketTagging));
    check_refused(
        provisioning.create(request("pvc-1", &[])),
        Code::PermissionDenied,
        "failed to write the volume's metadata to bucket",
    );
    assert_eq!(world.buckets(), [""; 0]);
    fault.release();
    let fault = world.store.inject(denied(S3Operation::GetBucketTagging));
    check_refused(provisioning.create(request("pvc-1", &[])), Code::PermissionDenied, "GetBucketTagging");
    assert_eq!(world.buckets(), [""; 0]);
    fault.release();
    // What passes is kept, for the next call.
    let fault = world.store.inject(Fault::new(Effect::Unavailable).operation(S3Operation::PutBucketTagging));
    check_refused(provisioning.create(request("pvc-1", &[])), Code::Unavailable, "S3 answered SlowDown (503)");
    assert_eq!(world.buckets().len(), 1);
    fault.release();
    provisioning.create(request("pvc-1", &[])).unwrap();
    assert_eq!(world.buckets().len(), 1);
}

#[test]
fn a_region_is_where_the_bucket_is_made() {
    let world = in_process_with("region", Config::default());
    let provisioning = world.provisioning();
    let _controller = provisioning.start();
    let location = |name: &str, region: &str| {
        let volume = provisioning.create(request(name, &[("region", region)])).unwrap();
        world.store.location(&volume.volume_id)
    };
    assert_eq!(location("pvc-1", "eu-1").as_deref(), Some("eu-1"));
    // The store's own region needs no constraint, and AWS refuses one.
    assert_eq!(location("pvc-2", "us-east-1"), None);
}

#[test]
fn a_region_that_the_store_does_not_have_is_ignored() {
    let world = World::versitygw("region", BUCKETS);
    let provisioning = world.provisioning();
    let controller = provisioning.start();
    let volume = provisioning.create(request("pvc-1", &[("region", "eu-1")])).unwrap();
    assert_eq!(world.buckets(), [volume.volume_id.as_str()]);
    controller.wait_for_log("location constraint refused, creating the bucket without it");
    assert_eq!(provisioning.create(request("pvc-1", &[("region", "eu-1")])).unwrap(), volume, "a repeated call agrees");
    provisioning.delete(&volume.volume_id).unwrap();
    assert_eq!(world.buckets(), [""; 0]);
}
