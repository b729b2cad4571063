//! Volume IDs, Secrets and stores that were made to harm: the driver's keys stay with the driver's store, and answers are bounded.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;

use s3csi_driver::csi::proto::ValidateVolumeCapabilitiesRequest;
use s3csi_driver::csi::proto::volume_capability::access_mode::Mode;
use s3csi_s3_server::Config;
use s3csi_s3_server::store::Store as _;
use s3csi_testbed::process::Process;
use s3csi_testbed::provisioning::{capability, request, secret};
use tonic::Code;

use crate::on_both_servers;
use crate::world::{BUCKETS, World, check_refused, in_process_with};

on_both_servers!(
    a_volume_that_was_created_with_a_secret_is_not_deleted_with_the_driver_s_keys,
    a_region_that_is_no_header_value_is_refused,
    a_class_that_was_recreated_with_another_prefix_leads_to_no_second_bucket,
);

/// Of `pvc-1`.
const NAME: &str = "csi-s3-0f087007-bb94-8ce4-af0b-e31105b7408e";

#[test]
fn the_driver_s_keys_are_never_sent_to_another_store() {
    let world = in_process_with("relay", Config::default());
    let forged = in_process_with("relay-forged", Config::default());
    let provisioning = world.provisioning();
    let _controller = provisioning.start();
    forged.store.forget_requests();
    for id in [format!("{NAME}@{}", forged.store.endpoint()), format!("shared/{NAME}@{}", forged.store.endpoint())] {
        let message = "the driver's keys are never sent to another store";
        check_refused(provisioning.delete(&id), Code::Unauthenticated, message);
        let validate = ValidateVolumeCapabilitiesRequest {
            volume_id: id,
            volume_capabilities: vec![capability(Mode::MultiNodeMultiWriter, &[])],
            ..ValidateVolumeCapabilitiesRequest::default()
        };
        let mut controller = provisioning.controller();
        let answer = provisioning.block_on(async { controller.validate_volume_capabilities(validate).await });
        check_refused(answer, Code::Unauthenticated, message);
    }
    assert_eq!(forged.store.requests().len(), 0, "the forged store was asked with the driver's keys");
}

fn a_volume_that_was_created_with_a_secret_is_not_deleted_with_the_driver_s_keys(world: &World) {
    let provisioning = world.provisioning();
    let _controller = provisioning.start();
    // Keys that may do everything: only whose they are makes the difference.
    let keys = secret(world.store.account());
    let mut create = request("pvc-1", &[("onDelete", "delete-all")]);
    create.secrets.clone_from(&keys);
    let volume = provisioning.create(create).unwrap();
    let message = "the volume was created with a provisioner secret, and the request has none";
    check_refused(provisioning.delete(&volume.volume_id), Code::Unauthenticated, message);
    check_refused(provisioning.create(request("pvc-1", &[("onDelete", "delete-all")])), Code::Unauthenticated, message);
    assert_eq!(world.buckets(), [volume.volume_id.as_str()]);
    provisioning.delete_as(&volume.volume_id, &keys).unwrap();

    // Mounted with a Secret, but created by the driver: it may delete what it created.
    let parameters = [("authenticationSource", "secret"), ("onDelete", "delete-all")];
    let volume = provisioning.create(request("pvc-2", &parameters)).unwrap();
    assert_eq!(volume.volume_context["authenticationSource"], "secret");
    provisioning.delete(&volume.volume_id).unwrap();
    assert_eq!(world.buckets(), [""; 0]);
}

/// A bucket whose name is known in advance can be created by anybody first, with tags that say it is ours.
#[test]
fn a_bucket_of_another_account_is_refused_though_it_has_our_tags() {
    let world = World::versitygw("squatting", BUCKETS);
    let provisioning = world.provisioning();
    let _controller = provisioning.start();
    let volume = provisioning.create(request("pvc-1", &[])).unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let client = world.client();
    let tags = runtime.block_on(client.get_bucket_tagging().bucket(NAME).send()).unwrap().tag_set;
    provisioning.delete(&volume.volume_id).unwrap();

    let squatter = world.add_account("squatter");
    world.create_bucket(NAME, &squatter);
    let tagging = aws_sdk_s3::types::Tagging::builder().set_tag_set(Some(tags)).build().unwrap();
    runtime.block_on(client.put_bucket_tagging().bucket(NAME).tagging(tagging).send()).unwrap();
    check_refused(
        provisioning.create(request("pvc-1", &[])),
        Code::AlreadyExists,
        "exists and belongs to another account; it is not used",
    );
    assert_eq!(world.owner(NAME).as_deref(), Some("squatter"));
}

fn a_region_that_is_no_header_value_is_refused(world: &World) {
    let provisioning = world.provisioning();
    let controller = provisioning.start();
    for region in ["eu\r\nx-amz-acl: public-read", "e u", "\u{e9}u", &"e".repeat(64)] {
        let mut create = request("pvc-1", &[]);
        create.secrets = secret(world.store.account());
        create.secrets.insert("region".to_owned(), region.to_owned());
        let secrets = create.secrets.clone();
        check_refused(provisioning.create(create), Code::Unauthenticated, "malformed value for region");
        check_refused(provisioning.delete_as(NAME, &secrets), Code::Unauthenticated, "malformed value for region");
    }
    assert!(!controller.log_contains("panicked"), "{controller}");
    assert_eq!(world.buckets(), [""; 0]);
}

fn a_class_that_was_recreated_with_another_prefix_leads_to_no_second_bucket(world: &World) {
    let provisioning = world.provisioning();
    let _controller = provisioning.start();
    let volume = provisioning.create(request("pvc-1", &[("bucketNamePrefix", "one-")])).unwrap();
    for prefix in ["two-", ""] {
        check_refused(
            provisioning.create(request("pvc-1", &[("bucketNamePrefix", prefix)])),
            Code::AlreadyExists,
            &format!("it has bucket \"one-{NAME}\" already: restore parameter bucketNamePrefix"),
        );
    }
    assert_eq!(world.buckets(), [volume.volume_id.as_str()]);
    assert_eq!(provisioning.create(request("pvc-1", &[("bucketNamePrefix", "one-")])).unwrap(), volume);
}

/// Answers every request with the same head and then with what `body` writes, until the client has had enough.
fn serve_forever(head: &'static str, body: fn(&mut TcpStream) -> std::io::Result<()>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            thread::spawn(move || {
                let lines = BufReader::new(stream.try_clone().unwrap()).lines();
                for line in lines {
                    if line.is_ok_and(|it| it.is_empty()) {
                        break;
                    }
                }
                let _ = stream.write_all(head.as_bytes()).and_then(|()| body(&mut stream));
            });
        }
    });
    address
}

fn peak_memory_kilobytes(process: &Process) -> u64 {
    let file = format!("/proc/{}/status", process.pid().as_raw_nonzero());
    let status = std::fs::read_to_string(file).unwrap();
    let line = status.lines().find(|it| it.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn an_endless_answer_does_not_fill_the_memory() {
    let world = in_process_with("endless", Config::default());
    let mut provisioning = world.provisioning();
    let endless = serve_forever("HTTP/1.1 200 OK\r\nContent-Type: application/xml\r\n\r\n<List>", |stream| {
        let piece = "<Tag>aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa</Tag>".repeat(1000);
        loop {
            stream.write_all(piece.as_bytes())?;
        }
    });
    provisioning.set_endpoint(&format!("http://{endless}"));
    let controller = provisioning.start();
    check_refused(provisioning.create(request("pvc-1", &[])), Code::Unavailable, "length limit exceeded");
    check_refused(provisioning.delete(NAME), Code::Unavailable, "length limit exceeded");
    let peak = peak_memory_kilobytes(&controller);
    assert!(peak < 128 << 10, "{peak} kB");
}

#[test]
fn a_long_message_of_a_store_is_cut() {
    let world = in_process_with("long-message", Config::default());
    let mut provisioning = world.provisioning();
    let head = "HTTP/1.1 403 Forbidden\r\nContent-Type: application/xml\r\nConnection: close\r\n\r\n\
                <Error><Code>AccessDenied</Code><Message>";
    let long = serve_forever(head, |stream| {
        stream.write_all("no&#10;".repeat(400_000).as_bytes())?;
        stream.write_all(b"</Message></Error>")
    });
    provisioning.set_endpoint(&format!("http://{long}"));
    let controller = provisioning.start();
    let status = provisioning.create(request("pvc-1", &[])).unwrap_err();
    assert_eq!(status.code(), Code::PermissionDenied, "{}", status.message());
    assert!(status.message().len() < 4096, "{} bytes", status.message().len());
    assert!(status.message().contains("AccessDenied") && !status.message().contains('\n'), "{}", status.message());
    let logged = controller.output().len() + controller.errors().len();
    assert!(logged < 64 << 10, "{logged} bytes");
}
