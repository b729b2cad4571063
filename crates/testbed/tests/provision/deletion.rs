//! Deleting a volume does what was agreed when it was made, or says why not.

use aws_sdk_s3::types::{BucketVersioningStatus, VersioningConfiguration};
use s3csi_s3_server::store::Store as _;
use s3csi_s3_server::{Config, Effect, Fault, S3Operation, Transport};
use s3csi_testbed::provisioning::request;
use s3csi_testbed::versitygw::Versioning;
use tonic::Code;

use crate::on_both_servers;
use crate::world::{BUCKETS, World, check_refused, in_process_with, versitygw_with};

on_both_servers!(
    an_empty_volume_is_deleted_and_deleted_again,
    a_volume_with_data_is_not_deleted_unless_so_agreed,
    an_upload_in_progress_is_data,
    a_retained_volume_stays,
    everything_is_deleted_if_so_agreed,
    ids_of_others_are_refused,
    volumes_of_the_earlier_driver,
);

fn an_empty_volume_is_deleted_and_deleted_again(world: &World) {
    let provisioning = world.provisioning();
    let _controller = provisioning.start();
    let volume = provisioning.create(request("pvc-1", &[])).unwrap();
    provisioning.delete(&volume.volume_id).unwrap();
    assert_eq!(world.buckets(), [""; 0]);
    provisioning.delete(&volume.volume_id).unwrap();
}

fn a_volume_with_data_is_not_deleted_unless_so_agreed(world: &World) {
    let provisioning = world.provisioning();
    let _controller = provisioning.start();
    let volume = provisioning.create(request("pvc-1", &[("onDelete", "delete-if-empty")])).unwrap();
    world.put_into(&volume.volume_id, "dir/file", b"content");
    check_refused(
        provisioning.delete(&volume.volume_id),
        Code::FailedPrecondition,
        "is not empty (there is \"dir/file\"), and the volume's onDelete is delete-if-empty",
    );
    assert_eq!(world.store.object(&volume.volume_id, "dir/file").unwrap(), "content");
}

fn begin_upload(world: &World, bucket: &str) {
    let client = world.client();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let begun = runtime.block_on(client.create_multipart_upload().bucket(bucket).key("big").send());
    begun.unwrap();
}

fn uploads(world: &World, bucket: &str) -> usize {
    let client = world.client();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let listed = runtime.block_on(client.list_multipart_uploads().bucket(bucket).send());
    listed.unwrap().uploads().len()
}

fn an_upload_in_progress_is_data(world: &World) {
    let provisioning = world.provisioning();
    let _controller = provisioning.start();
    let volume = provisioning.create(request("pvc-1", &[])).unwrap();
    begin_upload(world, &volume.volume_id);
    check_refused(
        provisioning.delete(&volume.volume_id),
        Code::FailedPrecondition,
        "there is an upload in progress, for \"big\"",
    );
    assert_eq!(uploads(world, &volume.volume_id), 1);
}

fn a_retained_volume_stays(world: &World) {
    let provisioning = world.provisioning();
    let _controller = provisioning.start();
    let volume = provisioning.create(request("pvc-1", &[("onDelete", "retain")])).unwrap();
    world.put_into(&volume.volume_id, "file", b"content");
    provisioning.delete(&volume.volume_id).unwrap();
    assert_eq!(world.store.object(&volume.volume_id, "file").unwrap(), "content");
}

fn everything_is_deleted_if_so_agreed(world: &World) {
    let provisioning = world.provisioning();
    let controller = provisioning.start();
    let volume = provisioning.create(request("pvc-1", &[("onDelete", "delete-all")])).unwrap();
    // More than one request can name.
    for number in 0..1100 {
        world.put_into(&volume.volume_id, &format!("dir {}/file-{number}", number % 7), b"x");
    }
    world.put_into(&volume.volume_id, ".s3csi/volume", b"a file of the user's");
    begin_upload(world, &volume.volume_id);
    provisioning.delete(&volume.volume_id).unwrap();
    assert_eq!(world.buckets(), [""; 0]);
    controller.wait_for_log("deleted the volume's data");
    assert!(controller.log_contains("objects=1100 uploads=1"), "{controller}");
}

#[test]
fn keys_with_characters_that_xml_cannot_carry_are_deleted() {
    let world = World::in_process("control-characters", BUCKETS);
    let provisioning = world.provisioning();
    let _controller = provisioning.start();
    let volume = provisioning.create(request("pvc-1", &[("onDelete", "delete-all")])).unwrap();
    let (client, runtime) = (world.client(), tokio::runtime::Runtime::new().unwrap());
    for key in ["bell\u{7}", "dir/\u{1}/file", "line\nbreak", "a b+c%20d", "plus+", "&<>\"'", "\u{e9}", " space "] {
        let put = client.put_object().bucket(&volume.volume_id).key(key).body(b"x".to_vec().into());
        runtime.block_on(put.send()).unwrap();
    }
    let shared = "shared";
    world.create_bucket(shared, world.store.account());
    let mut claim =
        request("pvc-2", &[("bucket", shared), ("prefixTemplate", "${pv.name}"), ("onDelete", "delete-all")]);
    claim.parameters.insert("csi.storage.k8s.io/pv/name".to_owned(), "pvc-2".to_owned());
    let prefix = provisioning.create(claim).unwrap();
    let put = client.put_object().bucket(shared).key("pvc-2/\u{1f}").body(b"x".to_vec().into());
    runtime.block_on(put.send()).unwrap();

    provisioning.delete(&volume.volume_id).unwrap();
    provisioning.delete(&prefix.volume_id).unwrap();
    assert_eq!(world.buckets(), [shared]);
    assert_eq!(world.store.keys(shared), [""; 0]);
}

/// versitygw does not encode keys: it lists a replacement character instead, and the name is lost.
#[test]
fn success_is_not_reported_for_a_key_that_the_store_does_not_spell_out() {
    let world = World::versitygw("control-characters", BUCKETS);
    let provisioning = world.provisioning();
    let _controller = provisioning.start();
    let volume = provisioning.create(request("pvc-1", &[("onDelete", "delete-all")])).unwrap();
    let (client, runtime) = (world.client(), tokio::runtime::Runtime::new().unwrap());
    let put = client.put_object().bucket(&volume.volume_id).key("bell\u{7}").body(b"x".to_vec().into());
    runtime.block_on(put.send()).unwrap();
    let message = "lists a key with characters that it does not encode";
    check_refused(provisioning.delete(&volume.volume_id), Code::FailedPrecondition, message);
    assert_eq!(world.buckets(), [volume.volume_id.as_str()]);
    runtime.block_on(client.delete_object().bucket(&volume.volume_id).key("bell\u{7}").send()).unwrap();
    provisioning.delete(&volume.volume_id).unwrap();
    assert_eq!(world.buckets(), [""; 0]);
}

fn ids_of_others_are_refused(world: &World) {
    world.create_bucket("precious", world.store.account());
    let provisioning = world.provisioning();
    let _controller = provisioning.start();
    check_refused(
        provisioning.delete("precious"),
        Code::FailedPrecondition,
        "bucket \"precious\" was not created by this driver; it is not deleted",
    );
    assert_eq!(world.buckets(), ["precious"]);
    check_refused(provisioning.delete(""), Code::InvalidArgument, "volume ID is required");
    // What does not exist is deleted, whatever it is called.
    provisioning.delete("no-such-bucket").unwrap();
    provisioning.delete("No bucket could be called so").unwrap();
    provisioning.delete("precious/csi-s3-0f087007-bb94-8ce4-af0b-e31105b7408e").unwrap();
    assert_eq!(world.buckets(), ["precious"]);
}

fn volumes_of_the_earlier_driver(world: &World) {
    let earlier = "csi-s3-6b8f2f0e-6f0f-4f3c-8a51-0a4d8a0f3f3b";
    world.create_bucket(earlier, world.store.account());
    world.put_into(earlier, "file", b"content");
    let provisioning = world.provisioning();
    let _controller = provisioning.start();
    check_refused(provisioning.delete(earlier), Code::FailedPrecondition, "is not empty (there is \"file\")");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(world.client().delete_object().bucket(earlier).key("file").send()).unwrap();
    provisioning.delete(earlier).unwrap();
    assert_eq!(world.buckets(), [""; 0]);
}

#[test]
fn versions_and_delete_markers_are_data_and_deleted_with_it() {
    let world = versitygw_with("versions", Transport::Plain, Versioning::Available);
    let provisioning = world.provisioning();
    let _controller = provisioning.start();
    let (client, runtime) = (world.client(), tokio::runtime::Runtime::new().unwrap());
    let fill = |bucket: &str| {
        runtime.block_on(async {
            let enabled = VersioningConfiguration::builder().status(BucketVersioningStatus::Enabled).build();
            let versioning = client.put_bucket_versioning().bucket(bucket).versioning_configuration(enabled);
            versioning.send().await.unwrap();
            for content in ["one", "two"] {
                let body = content.as_bytes().to_vec().into();
                client.put_object().bucket(bucket).key("file").body(body).send().await.unwrap();
            }
            client.delete_object().bucket(bucket).key("file").send().await.unwrap();
            let listed = client.list_objects_v2().bucket(bucket).send().await.unwrap();
            assert_eq!(listed.contents().len(), 0);
            let versions = client.list_object_versions().bucket(bucket).send().await.unwrap();
            assert_eq!((versions.versions().len(), versions.delete_markers().len()), (2, 1));
        });
    };
    let careful = provisioning.create(request("pvc-1", &[])).unwrap();
    fill(&careful.volume_id);
    check_refused(provisioning.delete(&careful.volume_id), Code::FailedPrecondition, "there is \"file\"");
    let careless = provisioning.create(request("pvc-2", &[("onDelete", "delete-all")])).unwrap();
    fill(&careless.volume_id);
    provisioning.delete(&careless.volume_id).unwrap();
    assert_eq!(world.buckets(), [careful.volume_id.as_str()]);
}

/// Objects that were written before versioning was enabled have the version `null`, which must be named to delete them.
#[test]
fn what_was_written_before_versioning_was_enabled_is_deleted() {
    let world = versitygw_with("null-version", Transport::Plain, Versioning::Available);
    let provisioning = world.provisioning();
    let controller = provisioning.start();
    let (client, runtime) = (world.client(), tokio::runtime::Runtime::new().unwrap());
    let put = |bucket: &str, key: String| {
        let put = client.put_object().bucket(bucket).key(key).body(b"x".to_vec().into());
        runtime.block_on(put.send()).unwrap();
    };
    let enable = |bucket: &str| {
        let enabled = VersioningConfiguration::builder().status(BucketVersioningStatus::Enabled).build();
        let versioning = client.put_bucket_versioning().bucket(bucket).versioning_configuration(enabled);
        runtime.block_on(versioning.send()).unwrap();
    };
    let volume = provisioning.create(request("pvc-1", &[("onDelete", "delete-all")])).unwrap();
    // More than one request can name.
    (0..1100).for_each(|number| put(&volume.volume_id, format!("file-{number}")));
    enable(&volume.volume_id);
    put(&volume.volume_id, "file-1".to_owned());

    world.store.create_bucket("shared", world.store.account()).unwrap();
    let mut claim =
        request("pvc-2", &[("bucket", "shared"), ("prefixTemplate", "${pv.name}"), ("onDelete", "delete-all")]);
    claim.parameters.insert("csi.storage.k8s.io/pv/name".to_owned(), "pvc-2".to_owned());
    let prefix = provisioning.create(claim).unwrap();
    put("shared", "pvc-2/file".to_owned());
    enable("shared");

    provisioning.delete(&volume.volume_id).unwrap();
    provisioning.delete(&prefix.volume_id).unwrap();
    assert_eq!(world.buckets(), ["shared"]);
    let left = runtime.block_on(client.list_object_versions().bucket("shared").send()).unwrap();
    assert_eq!((left.versions().len(), left.delete_markers().len()), (0, 0), "{left:?}");
    // Nothing is deleted twice.
    controller.wait_for_log("objects=1101 uploads=0");
}

#[test]
fn deletions_report_and_survive_a_store_that_fails_for_a_moment() {
    let world = in_process_with("stumbles", Config::default());
    let provisioning = world.provisioning();
    let _controller = provisioning.start();
    let volume = provisioning.create(request("pvc-1", &[("onDelete", "delete-all")])).unwrap();
    world.store.put_object(&volume.volume_id, "file", b"content").unwrap();
    for (operation, effect, code, message) in [
        (
            S3Operation::DeleteObjects,
            Effect::Denied,
            Code::PermissionDenied,
            "failed to delete the volume's data: DeleteObjects",
        ),
        (S3Operation::DeleteObjects, Effect::Unavailable, Code::Unavailable, "S3 answered SlowDown (503)"),
        (
            S3Operation::DeleteBucket,
            Effect::Denied,
            Code::PermissionDenied,
            "failed to delete the bucket: DeleteBucket",
        ),
        (S3Operation::ListMultipartUploads, Effect::Dropped, Code::Unavailable, "failed to delete the volume's data"),
    ] {
        let fault = world.store.inject(Fault::new(effect).operation(operation));
        check_refused(provisioning.delete(&volume.volume_id), code, message);
        assert!(0 < fault.hits(), "{operation:?}");
        fault.release();
        assert_eq!(world.buckets(), [volume.volume_id.as_str()]);
    }
    provisioning.delete(&volume.volume_id).unwrap();
    assert_eq!(world.buckets(), [""; 0]);
}
