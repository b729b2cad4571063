//! A crash after any change in the store is repaired by the same call, sent again: nothing is made twice, nothing is left.

use s3csi_driver::csi::proto::CreateVolumeRequest;
use s3csi_testbed::provisioning::request;

use crate::on_both_servers;
use crate::world::World;

on_both_servers!(
    a_bucket_is_made_once_whenever_the_driver_dies,
    a_bucket_is_deleted_whenever_the_driver_dies,
    a_prefix_is_taken_once_whenever_the_driver_dies,
    a_prefix_is_deleted_whenever_the_driver_dies,
);

fn whole() -> CreateVolumeRequest {
    request("pvc-1", &[("onDelete", "delete-all")])
}

fn part() -> CreateVolumeRequest {
    request("pvc-1", &[("onDelete", "delete-all"), ("bucket", "shared"), ("prefixTemplate", "${pv.name}")])
}

fn a_bucket_is_made_once_whenever_the_driver_dies(world: &World) {
    let provisioning = world.provisioning();
    for step in ["bucket-created", "bucket-marked"] {
        let crashing = provisioning.start_with(&["--stop-after-change", step]);
        provisioning.create(whole()).unwrap_err();
        assert!(!crashing.wait_for_end().success(), "{step}");
        assert_eq!(world.buckets().len(), 1, "{step}");
        let controller = provisioning.start();
        let volume = provisioning.create(whole()).unwrap();
        assert_eq!(world.buckets(), [volume.volume_id.as_str()], "{step}");
        provisioning.delete(&volume.volume_id).unwrap();
        assert_eq!(world.buckets(), [""; 0], "{step}");
        controller.kill();
    }
}

fn a_bucket_is_deleted_whenever_the_driver_dies(world: &World) {
    let provisioning = world.provisioning();
    for step in ["data-deleted", "metadata-deleted", "bucket-deleted"] {
        let controller = provisioning.start();
        let volume = provisioning.create(whole()).unwrap();
        world.put_into(&volume.volume_id, "file", b"content");
        controller.kill();
        let crashing = provisioning.start_with(&["--stop-after-change", step]);
        provisioning.delete(&volume.volume_id).unwrap_err();
        assert!(!crashing.wait_for_end().success(), "{step}");
        let controller = provisioning.start();
        provisioning.delete(&volume.volume_id).unwrap();
        assert_eq!(world.buckets(), [""; 0], "{step}");
        controller.kill();
    }
}

fn a_prefix_is_taken_once_whenever_the_driver_dies(world: &World) {
    world.create_bucket("shared", world.store.account());
    let provisioning = world.provisioning();
    for step in ["metadata-written", "prefix-taken"] {
        let crashing = provisioning.start_with(&["--stop-after-change", step]);
        provisioning.create(part()).unwrap_err();
        assert!(!crashing.wait_for_end().success(), "{step}");
        let controller = provisioning.start();
        let volume = provisioning.create(part()).unwrap();
        assert_eq!(world.store.keys("shared").len(), 2, "{step}");
        provisioning.delete(&volume.volume_id).unwrap();
        assert_eq!(world.store.keys("shared"), [""; 0], "{step}");
        controller.kill();
    }
}

fn a_prefix_is_deleted_whenever_the_driver_dies(world: &World) {
    world.create_bucket("shared", world.store.account());
    let provisioning = world.provisioning();
    for step in ["data-deleted", "prefix-released", "metadata-deleted"] {
        let controller = provisioning.start();
        let volume = provisioning.create(part()).unwrap();
        world.put_into("shared", "pvc-1/file", b"content");
        controller.kill();
        let crashing = provisioning.start_with(&["--stop-after-change", step]);
        provisioning.delete(&volume.volume_id).unwrap_err();
        assert!(!crashing.wait_for_end().success(), "{step}");
        let controller = provisioning.start();
        provisioning.delete(&volume.volume_id).unwrap();
        assert_eq!(world.store.keys("shared"), [""; 0], "{step}");
        controller.kill();
    }
}
