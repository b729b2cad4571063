//! Whose a bucket is: nothing of others is ever taken for a volume, and tenants own what is made for them.

use s3csi_s3_server::store::Store as _;
use s3csi_s3_server::{Config, TaggingSupport};
use s3csi_testbed::provisioning::{request, secret};
use tonic::Code;

use crate::on_both_servers;
use crate::world::{World, check_refused, in_process_with};

on_both_servers!(
    a_bucket_of_another_account_is_refused,
    a_bucket_with_objects_and_without_a_note_is_refused,
    an_empty_bucket_without_a_note_is_taken,
    two_tenants_own_their_buckets,
    a_volume_of_another_tenant_is_not_deleted,
);

/// Of `pvc-1`.
const NAME: &str = "csi-s3-0f087007-bb94-8ce4-af0b-e31105b7408e";

fn a_bucket_of_another_account_is_refused(world: &World) {
    let other = world.add_account("other");
    world.create_bucket(NAME, &other);
    let mine = world.add_account("mine");
    let provisioning = world.provisioning();
    let _controller = provisioning.start();
    let mut create = request("pvc-1", &[]);
    create.secrets = secret(&mine);
    check_refused(
        provisioning.create(create),
        Code::AlreadyExists,
        "exists and belongs to another account; it is not used",
    );
    assert_eq!(world.owner(NAME).as_deref(), Some("other"));
}

fn a_bucket_with_objects_and_without_a_note_is_refused(world: &World) {
    world.create_bucket(NAME, world.store.account());
    world.put_into(NAME, "precious", b"content");
    let provisioning = world.provisioning();
    let _controller = provisioning.start();
    check_refused(
        provisioning.create(request("pvc-1", &[])),
        Code::AlreadyExists,
        "contains objects and has no metadata of ours; it is not used",
    );
    check_refused(provisioning.delete(NAME), Code::FailedPrecondition, "there is \"precious\"");
    assert_eq!(world.store.object(NAME, "precious").unwrap(), "content");
}

fn an_empty_bucket_without_a_note_is_taken(world: &World) {
    world.create_bucket(NAME, world.store.account());
    let provisioning = world.provisioning();
    let _controller = provisioning.start();
    let volume = provisioning.create(request("pvc-1", &[("onDelete", "retain")])).unwrap();
    assert_eq!(volume.volume_id, NAME);
    check_refused(provisioning.create(request("pvc-1", &[])), Code::AlreadyExists, "onDelete is retain");
}

fn two_tenants_own_their_buckets(world: &World) {
    let provisioning = world.provisioning();
    let _controller = provisioning.start();
    for tenant in ["alice", "bob"] {
        let account = world.add_account(tenant);
        let mut create = request(&format!("pvc-{tenant}"), &[]);
        create.secrets = secret(&account);
        let volume = provisioning.create(create).unwrap();
        assert_eq!(volume.volume_context["authenticationSource"], "secret");
        assert_eq!(world.owner(&volume.volume_id).as_deref(), Some(tenant));
        provisioning.delete_as(&volume.volume_id, &secret(&account)).unwrap();
    }
    assert_eq!(world.buckets(), [""; 0]);
}

fn a_volume_of_another_tenant_is_not_deleted(world: &World) {
    let (alice, bob) = (world.add_account("alice"), world.add_account("bob"));
    let provisioning = world.provisioning();
    let _controller = provisioning.start();
    let mut create = request("pvc-1", &[]);
    create.secrets = secret(&alice);
    let volume = provisioning.create(create).unwrap();
    check_refused(
        provisioning.delete_as(&volume.volume_id, &secret(&bob)),
        Code::PermissionDenied,
        "S3 answered AccessDenied (403)",
    );
    assert_eq!(world.owner(&volume.volume_id).as_deref(), Some("alice"));
}

#[test]
fn where_buckets_have_no_tags_an_object_says_whose_it_is() {
    let world = in_process_with("no-tags", Config { tagging: TaggingSupport::Refused, ..Config::default() });
    let provisioning = world.provisioning();
    let controller = provisioning.start();
    let volume = provisioning.create(request("pvc-1", &[("onDelete", "delete-all")])).unwrap();
    assert_eq!(world.store.keys(&volume.volume_id), [".s3csi/volume"]);
    assert_eq!(provisioning.create(request("pvc-1", &[("onDelete", "delete-all")])).unwrap(), volume);
    check_refused(provisioning.create(request("pvc-1", &[])), Code::AlreadyExists, "onDelete is delete-all");

    // The note itself is no content, and is gone with the bucket.
    let empty = provisioning.create(request("pvc-2", &[])).unwrap();
    provisioning.delete(&empty.volume_id).unwrap();
    world.store.put_object(&volume.volume_id, "a/b", b"content").unwrap();
    controller.kill();

    // A crash after the note was removed leaves a bucket that is known by its name alone.
    let crashing = provisioning.start_with(&["--stop-after-change", "metadata-deleted"]);
    provisioning.delete(&volume.volume_id).unwrap_err();
    crashing.wait_for_end();
    assert_eq!(world.buckets(), [volume.volume_id.as_str()]);
    let _controller = provisioning.start();
    provisioning.delete(&volume.volume_id).unwrap();
    assert_eq!(world.buckets(), [""; 0]);
}
