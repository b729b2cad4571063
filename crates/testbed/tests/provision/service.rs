//! The socket itself: what it announces, what it confirms, whom it trusts, and how it starts and ends.

use std::collections::HashMap;
use std::time::Duration;

use s3csi_driver::csi::proto::controller_service_capability::{Type, rpc};
use s3csi_driver::csi::proto::plugin_capability::{self, service};
use s3csi_driver::csi::proto::volume_capability::AccessType;
use s3csi_driver::csi::proto::volume_capability::BlockVolume;
use s3csi_driver::csi::proto::volume_capability::access_mode::Mode;
use s3csi_driver::csi::proto::{
    ControllerGetCapabilitiesRequest, GetCapacityRequest, GetPluginCapabilitiesRequest, GetPluginInfoRequest,
    ListVolumesRequest, ProbeRequest, ValidateVolumeCapabilitiesRequest, ValidateVolumeCapabilitiesResponse,
    VolumeCapability,
};
use s3csi_s3_server::certificates::{CertificateAuthority, UNRESOLVABLE_HOST};
use s3csi_s3_server::store::Store as _;
use s3csi_s3_server::{Config, Transport};
use s3csi_testbed::credential_issuer::{CredentialIssuer, IssuerMode};
use s3csi_testbed::forward_proxy::ForwardProxy;
use s3csi_testbed::provisioning::{Provisioning, bundle, capability, request};
use s3csi_testbed::versitygw::Versioning;
use tonic::{Code, Status};

use crate::on_both_servers;
use crate::world::{World, check_refused, in_process_with, versitygw_with};

on_both_servers!(capabilities_are_checked_and_confirmed);

/// The driver's own keys are what they are at the time of the call.
#[test]
fn the_driver_s_keys_may_change_and_expire() {
    let world = in_process_with("changing-keys", Config::default());
    let mut provisioning = world.provisioning();
    provisioning.set_account(None);
    let (account, token) = (world.store.account(), "driver-token-NeverPrintThis");
    let directory = world.fixture.create_directory("driver-secret");
    let controller = provisioning.start_with(&["--credentials-directory", directory.to_str().unwrap()]);
    let missing = "the driver has no keys";
    check_refused(provisioning.create(request("pvc-1", &[])), Code::Unauthenticated, missing);
    bundle(&world.fixture, "driver-secret/access_key_id", &account.access_key);
    let lacks = "the Secret lacks secret_access_key";
    check_refused(provisioning.create(request("pvc-1", &[])), Code::Unauthenticated, lacks);
    bundle(&world.fixture, "driver-secret/secret_access_key", &account.secret_key);
    let volume = provisioning.create(request("pvc-1", &[])).unwrap();
    assert!(controller.terminate().success());

    let issuer = CredentialIssuer::start(world.store.sessions(), account, token, Duration::from_hours(1));
    let (url, file) = (format!("{}/v1/credentials", issuer.url()), bundle(&world.fixture, "token", token));
    let source = ["--credentials-source", "container", "--container-credentials-url", &url];
    let arguments = [source.as_slice(), &["--container-token-file", file.to_str().unwrap()]].concat();
    issuer.set_mode(IssuerMode::Fail);
    let controller = provisioning.start_with(&arguments);
    check_refused(provisioning.delete(&volume.volume_id), Code::Unavailable, "refused with status 500");
    assert!(controller.terminate().success());
    issuer.set_mode(IssuerMode::Issue { lifetime: Duration::from_hours(1) });
    let _controller = provisioning.start_with(&arguments);
    provisioning.delete(&volume.volume_id).unwrap();
    assert_eq!(world.buckets(), [""; 0]);
}

#[test]
fn the_socket_announces_what_it_can() {
    let world = in_process_with("announces", Config::default());
    let provisioning = world.provisioning();
    let controller = provisioning.start();
    let mut identity = provisioning.identity();
    let info = provisioning.block_on(identity.get_plugin_info(GetPluginInfoRequest {})).unwrap().into_inner();
    assert_eq!(info.name, "s3.csi.scality.com");
    let announced = provisioning.block_on(identity.get_plugin_capabilities(GetPluginCapabilitiesRequest {})).unwrap();
    let services: Vec<i32> = announced
        .into_inner()
        .capabilities
        .into_iter()
        .filter_map(|it| match it.r#type {
            Some(plugin_capability::Type::Service(service)) => Some(service.r#type),
            _ => None,
        })
        .collect();
    assert_eq!(services, [i32::from(service::Type::ControllerService)]);
    assert_eq!(provisioning.block_on(identity.probe(ProbeRequest {})).unwrap().into_inner().ready, Some(true));

    let mut service = provisioning.controller();
    assert_eq!(announced_by_controller(&provisioning), [i32::from(rpc::Type::CreateDeleteVolume)]);
    check_refused(
        provisioning.block_on(service.get_capacity(GetCapacityRequest::default())),
        Code::Unimplemented,
        "GetCapacity is not part of this driver's announced capabilities",
    );
    let listed = provisioning.block_on(service.list_volumes(ListVolumesRequest::default()));
    check_refused(listed, Code::Unimplemented, "ListVolumes");
    assert!(controller.terminate().success());
    assert!(!provisioning.socket().exists());
}

fn announced_by_controller(provisioning: &Provisioning<'_>) -> Vec<i32> {
    let mut service = provisioning.controller();
    let announced = provisioning.block_on(service.controller_get_capabilities(ControllerGetCapabilitiesRequest {}));
    let types = announced.unwrap().into_inner().capabilities.into_iter().map(|it| match it.r#type {
        Some(Type::Rpc(rpc)) => rpc.r#type,
        None => -1,
    });
    types.collect()
}

/// `ReadWriteOnce` and `ReadWriteOncePod`, which the controller of strategy `pod` keeps to one node.
#[test]
fn volumes_for_one_node_are_created_with_strategy_pod() {
    let world = in_process_with("single-node", Config::default());
    let mut provisioning = world.provisioning();
    provisioning.set_strategy_pod();
    let _controller = provisioning.start();
    let announced = [rpc::Type::CreateDeleteVolume, rpc::Type::SingleNodeMultiWriter].map(i32::from);
    assert_eq!(announced_by_controller(&provisioning), announced);
    for (name, mode) in [("pvc-1", Mode::SingleNodeMultiWriter), ("pvc-2", Mode::SingleNodeSingleWriter)] {
        let mut create = request(name, &[]);
        create.volume_capabilities = vec![capability(mode, &[])];
        let volume = provisioning.create(create).unwrap();
        let capabilities = vec![capability(mode, &[])];
        let answer = validate(&provisioning, &volume.volume_id, capabilities, &volume.volume_context).unwrap();
        assert!(answer.confirmed.is_some(), "{answer:?}");
    }
    assert_eq!(world.buckets().len(), 2);
}

fn validate(
    provisioning: &Provisioning<'_>,
    volume_id: &str,
    capabilities: Vec<VolumeCapability>,
    context: &HashMap<String, String>,
) -> Result<ValidateVolumeCapabilitiesResponse, Status> {
    let request = ValidateVolumeCapabilitiesRequest {
        volume_id: volume_id.to_owned(),
        volume_capabilities: capabilities,
        volume_context: context.clone(),
        ..ValidateVolumeCapabilitiesRequest::default()
    };
    let mut service = provisioning.controller();
    let answer = provisioning.block_on(service.validate_volume_capabilities(request))?;
    Ok(answer.into_inner())
}

fn capabilities_are_checked_and_confirmed(world: &World) {
    let provisioning = world.provisioning();
    let _controller = provisioning.start();
    let volume = provisioning.create(request("pvc-1", &[])).unwrap();
    let many =
        || vec![capability(Mode::MultiNodeMultiWriter, &["uid=1000"]), capability(Mode::MultiNodeReaderOnly, &[])];
    let answer = validate(&provisioning, &volume.volume_id, many(), &volume.volume_context).unwrap();
    let confirmed = answer.confirmed.unwrap();
    assert_eq!((confirmed.volume_capabilities, confirmed.volume_context), (many(), volume.volume_context.clone()));

    let block = VolumeCapability { access_type: Some(AccessType::Block(BlockVolume {})), ..many().remove(0) };
    for (capabilities, message) in [
        (vec![capability(Mode::SingleNodeWriter, &[])], "access mode SINGLE_NODE_WRITER cannot be enforced"),
        (vec![block], "a bucket is not a block device"),
    ] {
        let answer = validate(&provisioning, &volume.volume_id, capabilities, &HashMap::new()).unwrap();
        assert!(answer.confirmed.is_none() && answer.message.contains(message), "{answer:?}");
    }
    let elsewhere = HashMap::from([("bucketName".to_owned(), "other".to_owned())]);
    let answer = validate(&provisioning, &volume.volume_id, many(), &elsewhere).unwrap();
    assert!(answer.confirmed.is_none() && answer.message.contains("its context says \"other\""), "{answer:?}");

    let none = HashMap::new();
    check_refused(validate(&provisioning, "", many(), &none), Code::InvalidArgument, "volume ID is required");
    check_refused(
        validate(&provisioning, &volume.volume_id, Vec::new(), &none),
        Code::InvalidArgument,
        "volume capabilities are required",
    );
    check_refused(validate(&provisioning, "other", many(), &none), Code::NotFound, "was not created by this driver");
    provisioning.delete(&volume.volume_id).unwrap();
    check_refused(validate(&provisioning, &volume.volume_id, many(), &none), Code::NotFound, "there is no volume");
}

#[test]
fn a_store_with_an_authority_of_its_own_in_process() {
    let world = in_process_with("tls", Config { transport: Transport::Tls, ..Config::default() });
    let mut provisioning = world.provisioning();
    check_trust(&mut provisioning, world.store.authority_pem().unwrap(), &world.fixture);
}

#[test]
fn a_store_with_an_authority_of_its_own_versitygw() {
    let world = versitygw_with("tls", Transport::Tls, Versioning::Unavailable);
    let mut provisioning = world.provisioning();
    check_trust(&mut provisioning, world.store.authority_pem().unwrap(), &world.fixture);
}

fn check_trust(provisioning: &mut Provisioning<'_>, authority: &str, fixture: &s3csi_testbed::fixture::Fixture) {
    let controller = provisioning.start();
    check_refused(provisioning.create(request("pvc-1", &[])), Code::Unavailable, "invalid peer certificate");
    controller.kill();
    // A bundle may hold several.
    let other = CertificateAuthority::new().unwrap().pem();
    provisioning.set_authority(bundle(fixture, "bundle.pem", &format!("{other}{authority}")));
    let controller = provisioning.start();
    let volume = provisioning.create(request("pvc-1", &[])).unwrap();
    provisioning.delete(&volume.volume_id).unwrap();
    controller.kill();
    // A private authority is added to those of the system.
    provisioning.set_authority(bundle(fixture, "other.pem", &other));
    provisioning.set_system_roots(bundle(fixture, "system.pem", authority));
    let controller = provisioning.start();
    let volume = provisioning.create(request("pvc-1", &[])).unwrap();
    provisioning.delete(&volume.volume_id).unwrap();
    controller.kill();
}

/// The store has a name that only the proxy knows.
#[test]
fn a_store_that_only_a_proxy_reaches_is_asked_through_it() {
    for (scheme, transport) in [("http", Transport::Plain), ("https", Transport::Tls)] {
        let world = in_process_with(&format!("proxy-{scheme}"), Config { transport, ..Config::default() });
        let mut provisioning = world.provisioning();
        let port = provisioning.endpoint().rsplit(':').next().unwrap().parse().unwrap();
        let host = format!("{UNRESOLVABLE_HOST}:8443");
        let proxy = ForwardProxy::start(&[(&host, port)]).unwrap();
        provisioning.set_endpoint(&format!("{scheme}://{host}"));
        if let Some(authority) = world.store.authority_pem() {
            provisioning.set_authority(bundle(&world.fixture, "bundle.pem", authority));
        }
        let flag = format!("--{scheme}-proxy");
        let _controller = provisioning.start_with(&[&flag, &proxy.url(), "--no-proxy", "127.0.0.0/8"]);
        let volume = provisioning.create(request("pvc-1", &[])).unwrap();
        provisioning.delete(&volume.volume_id).unwrap();
        let connections = proxy.connections();
        assert!(!connections.is_empty() && connections.iter().all(|it| it.ends_with(&host)), "{connections:?}");
    }
}

#[test]
fn what_it_cannot_start_with_is_said() {
    let world = in_process_with("start", Config::default());
    let mut provisioning = world.provisioning();
    let check = |provisioning: &Provisioning<'_>, arguments: &[&str], message: &str| {
        let controller = provisioning.spawn(arguments).unwrap();
        assert!(!controller.wait_for_end().success());
        assert!(controller.errors().contains(message), "{controller}");
    };
    check(
        &provisioning,
        &["--csi-endpoint", ""],
        "there is nothing to do but to serve requests for volumes: set --csi-endpoint",
    );
    check(&provisioning, &["--csi-endpoint", "tcp://x"], "must look like unix:/path/to/csi.sock");
    check(&provisioning, &["--s3-endpoint-url", ""], "AWS_ENDPOINT_URL environment variable must be set");
    provisioning.set_authority(bundle(&world.fixture, "bundle.pem", "no certificate\n"));
    check(&provisioning, &[], "the CA bundle is not usable: it contains no certificate");
}

#[test]
fn health_is_that_of_the_socket() {
    let world = in_process_with("health", Config::default());
    let provisioning = world.provisioning();
    let controller = provisioning.start_with(&["--health-address", "127.0.0.1:0"]);
    controller.wait_for_log("serving /healthz, /readyz and /metrics");
    let log = controller.errors();
    let (_, rest) = log.split_once("address=").unwrap();
    let address = rest.split_whitespace().next().unwrap();
    let ask = |path: &str| s3csi_testbed::http::get(address, path);
    assert_eq!((ask("/healthz").status, ask("/readyz").status), (200, 200));
    std::fs::remove_file(provisioning.socket()).unwrap();
    assert_eq!((ask("/healthz").status, ask("/readyz").status), (503, 503));
}
