//! A volume may be a part of a shared bucket: it is its claim's alone, and ends without touching the others.

use s3csi_driver::csi::proto::volume_capability::access_mode::Mode;
use s3csi_driver::csi::proto::{CreateVolumeRequest, Volume};
use s3csi_s3_server::store::Store as _;
use s3csi_s3_server::{Config, Effect, Fault, S3Operation, S3Server};
use s3csi_testbed::provisioning::{Provisioning, capability, request};
use s3csi_testbed::wait::wait_for;
use tonic::{Code, Status};

use crate::on_both_servers;
use crate::world::{World, check_refused, in_process_with};

on_both_servers!(
    a_claim_gets_a_prefix_of_the_shared_bucket,
    one_prefix_is_deleted_and_the_other_stays_byte_for_byte,
    no_two_volumes_overlap,
    what_was_there_before_is_never_deleted,
    a_retained_prefix_is_found_by_the_next_claim_of_that_name,
    a_prefix_with_data_is_not_deleted_unless_so_agreed,
    the_shared_bucket_must_exist,
    a_template_must_not_give_two_claims_one_prefix,
    volumes_that_are_created_at_once_do_not_overlap,
    the_driver_s_metadata_are_no_volume,
);

const TEMPLATE: (&str, &str) = ("prefixTemplate", "${pvc.namespace}/${pvc.name}");

/// The request for a claim of namespace `team`, as the external-provisioner sends it with `--extra-create-metadata`.
fn claim(uid: &str, name: &str, parameters: &[(&str, &str)]) -> CreateVolumeRequest {
    let mut request = request(&format!("pvc-{uid}"), &[("bucket", "shared"), TEMPLATE]);
    let sent = [("csi.storage.k8s.io/pvc/namespace", "team"), ("csi.storage.k8s.io/pvc/name", name)];
    for (key, value) in parameters.iter().chain(&sent) {
        request.parameters.insert((*key).to_owned(), (*value).to_owned());
    }
    request
}

fn start(world: &World) -> Provisioning<'_> {
    world.create_bucket("shared", world.store.account());
    world.provisioning()
}

fn notes(world: &World) -> Vec<String> {
    world.store.keys("shared").into_iter().filter(|it| it.starts_with(".s3csi/")).collect()
}

fn a_claim_gets_a_prefix_of_the_shared_bucket(world: &World) {
    let provisioning = start(world);
    let _controller = provisioning.start();
    let volume = provisioning.create(claim("1", "a", &[])).unwrap();
    assert_eq!(volume.volume_id, "shared/csi-s3-0f087007-bb94-8ce4-af0b-e31105b7408e");
    assert_eq!(volume.volume_context["bucketName"], "shared");
    assert_eq!(volume.volume_context["prefix"], "team/a/");
    assert_eq!(provisioning.create(claim("1", "a", &[])).unwrap(), volume);
    check_refused(
        provisioning.create(claim("1", "a", &[("onDelete", "retain")])),
        Code::AlreadyExists,
        "onDelete is delete-if-empty, but retain is requested",
    );
    check_refused(
        provisioning.create(claim("1", "b", &[])),
        Code::AlreadyExists,
        "its prefix is team/a/, but team/b/ is requested",
    );
    let mut options = claim("2", "b", &[]);
    options.volume_capabilities = vec![capability(Mode::MultiNodeMultiWriter, &["prefix=x/"])];
    check_refused(provisioning.create(options), Code::InvalidArgument, "exclude each other");
    assert_eq!(world.buckets(), ["shared"]);
    assert_eq!(notes(world).len(), 2);
}

fn one_prefix_is_deleted_and_the_other_stays_byte_for_byte(world: &World) {
    let provisioning = start(world);
    let _controller = provisioning.start();
    let one = provisioning.create(claim("1", "a", &[("onDelete", "delete-all")])).unwrap();
    // Its name begins like the other one's.
    let other = provisioning.create(claim("2", "a.b", &[("onDelete", "delete-all")])).unwrap();
    let content: Vec<u8> = (0..100_000_u32).flat_map(u32::to_le_bytes).collect();
    for key in ["team/a/x", "team/a/y/z", "team/a.b/x", "team/a.b/y/z", "unrelated"] {
        world.put_into("shared", key, &content);
    }
    provisioning.delete(&one.volume_id).unwrap();
    let left: Vec<String> = world.store.keys("shared").into_iter().filter(|it| !it.starts_with(".s3csi/")).collect();
    assert_eq!(left, ["team/a.b/x", "team/a.b/y/z", "unrelated"]);
    for key in left {
        assert!(world.store.object("shared", &key).unwrap() == content, "{key} was changed");
    }
    provisioning.delete(&one.volume_id).unwrap();
    provisioning.delete(&other.volume_id).unwrap();
    assert_eq!(world.store.keys("shared"), ["unrelated"]);
}

fn no_two_volumes_overlap(world: &World) {
    let provisioning = start(world);
    let _controller = provisioning.start();
    let at = |name: &str, template: &str| -> Result<Volume, Status> {
        provisioning.create(request(name, &[("bucket", "shared"), ("prefixTemplate", template)]))
    };
    at("pvc-1", "x/${pv.name}/y").unwrap();
    check_refused(at("x", "${pv.name}"), Code::AlreadyExists, "overlaps with that of volume csi-s3-");
    check_refused(at("z", "x/pvc-1/y/${pv.name}"), Code::AlreadyExists, "overlaps with that of volume csi-s3-");
    // Two claims of one name, one after the other.
    provisioning.create(claim("2", "a", &[])).unwrap();
    check_refused(provisioning.create(claim("3", "a", &[])), Code::AlreadyExists, "prefix \"team/a/\" of bucket");
    // Nothing is left of those that were refused.
    assert_eq!(notes(world).len(), 4);
    at("x-y", "x/${pv.name}").unwrap();
}

fn what_was_there_before_is_never_deleted(world: &World) {
    let provisioning = start(world);
    let _controller = provisioning.start();
    world.put_into("shared", "team/a/precious", b"content");
    check_refused(
        provisioning.create(claim("1", "a", &[("onDelete", "delete-all")])),
        Code::FailedPrecondition,
        "contains objects that belong to no volume",
    );
    assert_eq!(notes(world), [""; 0]);
    // The other policies do no harm.
    let volume = provisioning.create(claim("1", "a", &[])).unwrap();
    check_refused(provisioning.delete(&volume.volume_id), Code::FailedPrecondition, "there is \"team/a/precious\"");
    assert_eq!(world.store.object("shared", "team/a/precious").unwrap(), "content");
}

fn a_retained_prefix_is_found_by_the_next_claim_of_that_name(world: &World) {
    let provisioning = start(world);
    let _controller = provisioning.start();
    let volume = provisioning.create(claim("1", "a", &[("onDelete", "retain")])).unwrap();
    world.put_into("shared", "team/a/file", b"content");
    provisioning.delete(&volume.volume_id).unwrap();
    assert_eq!(world.store.keys("shared"), ["team/a/file"]);
    let next = provisioning.create(claim("2", "a", &[("onDelete", "retain")])).unwrap();
    assert_eq!(next.volume_context["prefix"], "team/a/");
    assert_ne!(next.volume_id, volume.volume_id);
}

fn a_prefix_with_data_is_not_deleted_unless_so_agreed(world: &World) {
    let provisioning = start(world);
    let _controller = provisioning.start();
    let volume = provisioning.create(claim("1", "a", &[])).unwrap();
    world.put_into("shared", "team/a/file", b"content");
    check_refused(
        provisioning.delete(&volume.volume_id),
        Code::FailedPrecondition,
        "prefix \"team/a/\" of bucket \"shared\" is not empty (there is \"team/a/file\")",
    );
    assert_eq!(world.store.object("shared", "team/a/file").unwrap(), "content");
}

fn the_shared_bucket_must_exist(world: &World) {
    let provisioning = world.provisioning();
    let _controller = provisioning.start();
    check_refused(
        provisioning.create(claim("1", "a", &[])),
        Code::FailedPrecondition,
        "the shared bucket does not exist: create it, or correct parameter bucket of the StorageClass",
    );
    assert_eq!(world.buckets(), [""; 0]);
}

/// `team`/`prod-data` must not get what `team-prod`/`data` left behind.
fn a_template_must_not_give_two_claims_one_prefix(world: &World) {
    let provisioning = start(world);
    let _controller = provisioning.start();
    let template = ("prefixTemplate", "${pvc.namespace}-${pvc.name}");
    check_refused(
        provisioning.create(claim("1", "prod-data", &[template])),
        Code::InvalidArgument,
        "has two variables without a slash between them",
    );
    assert_eq!(notes(world), [""; 0]);
}

fn volumes_that_are_created_at_once_do_not_overlap(world: &World) {
    let provisioning = start(world);
    let _controller = provisioning.start();
    for round in 0..20 {
        let outer = format!("outer-{round}");
        let within = format!("${{pvc.namespace}}/{outer}/${{pvc.name}}");
        let requests = vec![
            claim(&format!("{round}-outer"), &outer, &[]),
            claim(&format!("{round}-inner"), "inner", &[("prefixTemplate", &within)]),
        ];
        let answers = provisioning.create_together(requests);
        assert!(!answers.iter().all(Result::is_ok), "one volume lies within the other: {answers:?}");
        // A volume that was refused left nothing behind that would keep the other one away.
        let created = answers.iter().filter(|it| it.is_ok()).count();
        assert_eq!(notes(world).iter().filter(|it| it.contains(&outer)).count(), created, "{answers:?}");
        for volume in answers.into_iter().flatten() {
            provisioning.delete(&volume.volume_id).unwrap();
        }
    }
    assert_eq!(notes(world), [""; 0]);
}

/// The claim on the prefix of claim `a`.
const CLAIM: &str = ".s3csi/prefixes/team/a/:volume";

/// Another volume claims the prefix while ours is about to, and gives it back before we see whose it is: `times` times.
fn create_while_claims_vanish(world: &World<S3Server>, times: usize) -> Result<Volume, Status> {
    world.create_bucket("shared", world.store.account());
    let provisioning = world.provisioning();
    let _controller = provisioning.start();
    let (client, runtime) = (world.client(), tokio::runtime::Runtime::new().unwrap());
    let frozen =
        |operation| world.store.inject(Fault::new(Effect::Frozen).operation(operation).key_prefix(CLAIM).times(1));
    std::thread::scope(|scope| {
        let mut write = frozen(S3Operation::PutObject);
        let creating = scope.spawn(|| provisioning.create(claim("1", "a", &[])));
        for _ in 0..times {
            wait_for("the claim is about to be written", || 0 < write.hits());
            world.put_into("shared", CLAIM, b"csi-s3-another");
            let read = frozen(S3Operation::GetObject);
            let next = frozen(S3Operation::PutObject);
            write.release();
            wait_for("the claim of the other volume is about to be read", || 0 < read.hits());
            runtime.block_on(client.delete_object().bucket("shared").key(CLAIM).send()).unwrap();
            read.release();
            write = next;
        }
        write.release();
        creating.join().unwrap()
    })
}

#[test]
fn a_prefix_whose_claim_vanished_is_claimed_again() {
    let world = in_process_with("vanished-claim", Config::default());
    let volume = create_while_claims_vanish(&world, 2).unwrap();
    let (_, name) = volume.volume_id.split_once('/').unwrap();
    assert_eq!(world.store.object("shared", CLAIM).as_deref(), Some(name.as_bytes()), "the prefix is not ours");
}

#[test]
fn a_prefix_whose_claims_vanish_again_and_again_is_not_taken_for_ours() {
    let world = in_process_with("vanishing-claims", Config::default());
    let refused = create_while_claims_vanish(&world, 3).unwrap_err();
    assert_eq!(refused.code(), Code::Aborted, "{}", refused.message());
    assert_eq!(world.store.object("shared", CLAIM), None);
}

fn the_driver_s_metadata_are_no_volume(world: &World) {
    let provisioning = start(world);
    let _controller = provisioning.start();
    let mut options = request("pvc-1", &[]);
    options.volume_capabilities = vec![capability(Mode::MultiNodeMultiWriter, &["prefix .s3csi/"])];
    check_refused(provisioning.create(options), Code::InvalidArgument, "is reserved for the driver's metadata");
    let template = ("prefixTemplate", ".s3csi/${pvc.namespace}/${pvc.name}");
    check_refused(
        provisioning.create(claim("2", "a", &[template])),
        Code::InvalidArgument,
        "is reserved for the driver's metadata",
    );
}
