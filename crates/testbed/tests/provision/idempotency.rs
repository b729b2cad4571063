//! The same request is the same volume, however often and by whom it is sent.

use s3csi_driver::csi::proto::CapacityRange;
use s3csi_testbed::provisioning::{request, secret};
use tonic::Code;

use crate::on_both_servers;
use crate::world::{World, check_refused};

on_both_servers!(
    a_volume_is_a_bucket_of_a_derived_name,
    the_same_request_is_the_same_volume_also_after_a_restart,
    other_parameters_are_another_volume_and_refused,
    many_requests_at_once_make_one_bucket_each,
    a_volume_with_data_is_found_again,
);

fn a_volume_is_a_bucket_of_a_derived_name(world: &World) {
    let provisioning = world.provisioning();
    let _controller = provisioning.start();
    let volume = provisioning.create(request("pvc-1", &[("bucketNamePrefix", "team-a-")])).unwrap();
    assert_eq!(volume.volume_id, "team-a-csi-s3-0f087007-bb94-8ce4-af0b-e31105b7408e");
    assert_eq!(volume.capacity_bytes, 1 << 30);
    let context = |key: &str| volume.volume_context.get(key).map(String::as_str);
    assert_eq!(context("bucketName"), Some(volume.volume_id.as_str()));
    assert_eq!(context("authenticationSource"), Some("driver"));
    assert_eq!(context("dynamicProvisioning"), Some("true"));
    assert_eq!(world.buckets(), [volume.volume_id.as_str()]);
    assert_eq!(world.owner(&volume.volume_id).as_deref(), Some(world.store.account().access_key.as_str()));
    // No mount shows anything of the driver's.
    assert_eq!(world.store.keys(&volume.volume_id), Vec::<String>::new());
}

fn the_same_request_is_the_same_volume_also_after_a_restart(world: &World) {
    let provisioning = world.provisioning();
    let controller = provisioning.start();
    let first = provisioning.create(request("pvc-1", &[("onDelete", "retain")])).unwrap();
    assert_eq!(provisioning.create(request("pvc-1", &[("onDelete", "retain")])).unwrap(), first);
    controller.kill();
    let _controller = provisioning.start();
    assert_eq!(provisioning.create(request("pvc-1", &[("onDelete", "retain")])).unwrap(), first);
    assert_eq!(world.buckets(), [first.volume_id.as_str()]);
}

fn other_parameters_are_another_volume_and_refused(world: &World) {
    let provisioning = world.provisioning();
    let _controller = provisioning.start();
    provisioning.create(request("pvc-1", &[])).unwrap();

    let other = provisioning.create(request("pvc-1", &[("onDelete", "delete-all")]));
    check_refused(
        other,
        Code::AlreadyExists,
        "a volume of this name exists with other parameters: onDelete is delete-if-empty, but delete-all is requested",
    );
    let mut bigger = request("pvc-1", &[]);
    bigger.capacity_range = Some(CapacityRange { required_bytes: 2 << 30, limit_bytes: 0 });
    check_refused(provisioning.create(bigger), Code::AlreadyExists, "its capacity in bytes is 1073741824");
    let mut enough = request("pvc-1", &[]);
    enough.capacity_range = Some(CapacityRange { required_bytes: 1, limit_bytes: 4 << 30 });
    assert_eq!(provisioning.create(enough).unwrap().capacity_bytes, 1);
    let mut owned = request("pvc-1", &[]);
    owned.secrets = secret(world.store.account());
    check_refused(
        provisioning.create(owned),
        Code::AlreadyExists,
        "authenticationSource is driver, but secret is requested",
    );
    assert_eq!(world.buckets().len(), 1);
}

fn many_requests_at_once_make_one_bucket_each(world: &World) {
    let provisioning = world.provisioning();
    let _controller = provisioning.start();
    let names: Vec<String> = (0..20).map(|it| format!("pvc-{}", it / 2)).collect();
    let answers = provisioning.create_together(names.iter().map(|it| request(it, &[])).collect());
    for (name, answer) in names.iter().zip(answers) {
        match answer {
            Ok(volume) => assert!(world.buckets().contains(&volume.volume_id), "{name}"),
            // The same volume is being created by the other call.
            Err(status) => assert_eq!(status.code(), Code::Aborted, "{name}: {}", status.message()),
        }
        provisioning.create(request(name, &[])).unwrap();
    }
    assert_eq!(world.buckets().len(), 10);
}

fn a_volume_with_data_is_found_again(world: &World) {
    let provisioning = world.provisioning();
    let _controller = provisioning.start();
    let volume = provisioning.create(request("pvc-1", &[])).unwrap();
    world.put_into(&volume.volume_id, "file", b"content");
    assert_eq!(provisioning.create(request("pvc-1", &[])).unwrap(), volume);
    assert_eq!(world.store.object(&volume.volume_id, "file").unwrap(), "content");
}
