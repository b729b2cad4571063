//! Stores that only a proxy reaches, and stores whose certificate only the volume trusts.

use std::fs;
use std::time::Duration;

use s3csi_s3_server::certificates::{CertificateAuthority, UNRESOLVABLE_HOST};
use s3csi_s3_server::store::Store as _;
use s3csi_s3_server::{Config, Transport};
use s3csi_testbed::credential_issuer::{CredentialIssuer, ROLE};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::forward_proxy::ForwardProxy;
use s3csi_testbed::kubelet::CsiVolume;
use s3csi_testbed::wait::wait_for;
use tonic::Code;

use crate::world::{World, check_refused, volume};

const PORT: u16 = 8443;

fn store_host() -> String {
    format!("{UNRESOLVABLE_HOST}:{PORT}")
}

fn proxy_to(world: &World<'_>) -> ForwardProxy {
    ForwardProxy::start(&[(&store_host(), world.store.port())]).unwrap()
}

/// The store speaks TLS with a certificate of its own authority, and the driver is configured with a store that does not exist.
fn tls_world(fixture: &Fixture) -> World<'_> {
    let config = Config { transport: Transport::Tls, ..Config::default() };
    World::prepare_for(fixture, config, |it| "http://127.0.0.1:1".clone_into(&mut it.endpoint_url))
}

/// A volume with keys of its own in the store of `tls_world`.
fn own(world: &World<'_>, number: u32) -> CsiVolume {
    let account = world.store.account();
    volume(number).with_secret(&account.access_key, &account.secret_key)
}

fn with_ca(mut volume: CsiVolume, pem: &str) -> CsiVolume {
    volume.secrets.insert("ca.crt".to_owned(), pem.to_owned());
    volume
}

fn authority(world: &World<'_>) -> String {
    world.store.authority_pem().unwrap().to_owned()
}

#[test]
fn a_store_that_only_the_driver_s_proxy_reaches_is_mounted_through_it() {
    let fixture = Fixture::new("network-driver-proxy");
    let mut world = World::prepare_with(&fixture, |it| it.endpoint_url = format!("http://{UNRESOLVABLE_HOST}:{PORT}"));
    let proxy = proxy_to(&world);
    world.start_mounter();
    world.start_node();
    check_refused(world.try_publish(&volume(1)), Code::Unavailable, &["Could not mount"]);
    assert_eq!(proxy.connections(), [""; 0]);
    world.stop_node();

    world.start_node_with(&["--http-proxy", &proxy.url(), "--no-proxy", ".svc,10.0.0.0/8"]);
    let target = world.publish(&volume(1));
    world.check_serves(&target);
    let connections = proxy.connections();
    assert!(!connections.is_empty());
    assert!(connections.iter().all(|it| it.ends_with(&format!(" {}", store_host()))), "{connections:?}");
    world.unpublish(&volume(1));
    world.check_nothing_left();
}

#[test]
fn a_volume_reaches_its_own_store_through_its_own_proxy_with_its_own_certificates() {
    let fixture = Fixture::new("network-volume-proxy");
    let mut world = tls_world(&fixture);
    let proxy = proxy_to(&world);
    world.start_mounter();
    world.start_node_with(&["--https-proxy", "http://127.0.0.1:1"]);
    let endpoint = format!("https://{}", store_host());
    for (number, attribute) in [(1, "httpsProxy"), (2, "mountpointEnv.HTTPS_PROXY")] {
        let volume = own(&world, number).with_attribute("endpointUrl", &endpoint);
        let volume = with_ca(volume.with_attribute(attribute, &proxy.url()), &authority(&world));
        let target = world.publish(&volume);
        world.check_serves(&target);
        world.unpublish(&volume);
    }
    let connections = proxy.connections();
    assert!(!connections.is_empty());
    assert!(connections.iter().all(|it| *it == format!("CONNECT {}", store_host())), "{connections:?}");
    world.check_nothing_left();
}

/// The driver's token and keys travel through it as well.
#[test]
fn a_security_token_service_that_only_the_proxy_reaches_is_asked_through_it() {
    const TOKEN: &str = "driver-token-NeverPrintThis";
    let fixture = Fixture::new("network-sts-proxy");
    let mut world = World::prepare_with(&fixture, |it| it.account = None);
    let lifetime = Duration::from_hours(1);
    let issuer = CredentialIssuer::start(world.store.sessions(), world.store.account(), TOKEN, lifetime);
    let url = issuer.url();
    let port = url.trim_end_matches('/').rsplit(':').next().unwrap().parse().unwrap();
    let proxy = ForwardProxy::start(&[("sts.invalid:8080", port)]).unwrap();
    let token = fixture.path("token");
    fs::write(&token, TOKEN).unwrap();
    world.start_mounter();
    world.start_node_with(&[
        "--credentials-source",
        "web-identity",
        "--role-arn",
        ROLE,
        "--web-identity-token-file",
        token.to_str().unwrap(),
        "--sts-endpoint-url",
        "http://sts.invalid:8080",
        "--http-proxy",
        &proxy.url(),
        "--no-proxy",
        "127.0.0.0/8",
    ]);
    world.check_serves(&world.publish(&volume(1)));
    assert_eq!(proxy.connections(), ["POST sts.invalid:8080"]);
    world.unpublish(&volume(1));
    world.check_nothing_left();
}

#[test]
fn hosts_in_the_list_are_reached_directly() {
    let fixture = Fixture::new("network-no-proxy");
    let mut world = World::prepare(&fixture);
    let proxy = ForwardProxy::start(&[]).unwrap();
    world.start_mounter();
    world.start_node_with(&["--http-proxy", &proxy.url(), "--no-proxy", "127.0.0.0/8"]);
    let target = world.publish(&volume(1));
    world.check_serves(&target);
    assert_eq!(proxy.connections(), [""; 0]);
    world.unpublish(&volume(1));

    // A volume with keys of its own may go another way.
    let indirect = own(&world, 2).with_attribute("noProxy", "elsewhere.example.com");
    // This proxy answers all requests with 403.
    check_refused(world.try_publish(&indirect), Code::PermissionDenied, &["Could not mount"]);
    assert!(!proxy.connections().is_empty());
    world.check_nothing_left();
}

#[test]
fn only_volumes_with_keys_of_their_own_name_a_proxy_or_certificates() {
    let fixture = Fixture::new("network-driver-keys");
    let world = World::start(&fixture);
    let pem = CertificateAuthority::new().unwrap().pem();
    for (attribute, value) in [("httpsProxy", "http://127.0.0.1:1"), ("noProxy", "*"), ("caBundle", &pem)] {
        let volume = volume(1).with_attribute(attribute, value);
        check_refused(world.try_publish(&volume), Code::InvalidArgument, &[attribute, "keys of their own"]);
    }
    let malformed = own(&world, 1).with_attribute("httpsProxy", "http://user:NeverPrintThis@proxy");
    check_refused(
        world.try_publish(&malformed),
        Code::InvalidArgument,
        &["httpsProxy", "http://proxy.example.com:3128"],
    );
    assert!(!world.node().errors().contains("NeverPrintThis"));
    assert_eq!(world.store.requests(), []);
    world.check_nothing_left();
}

#[test]
fn certificates_are_those_of_the_volume_and_of_no_other() {
    let fixture = Fixture::new("network-certificates");
    let mut world = tls_world(&fixture);
    world.start_mounter();
    world.start_node();
    let endpoint = world.store.endpoint();
    let at_the_store = |number| own(&world, number).with_attribute("endpointUrl", &endpoint);
    let other = CertificateAuthority::new().unwrap().pem();

    let by_attribute = at_the_store(1).with_attribute("caBundle", &authority(&world));
    let target = world.publish(&by_attribute);
    world.check_serves(&target);
    let by_secret = with_ca(at_the_store(2), &authority(&world));
    world.check_serves(&world.publish(&by_secret));
    // Both places count, and one more certificate does no harm.
    let by_both = with_ca(at_the_store(3).with_attribute("caBundle", &other), &authority(&world));
    world.check_serves(&world.publish(&by_both));

    // Workloads of one PV with one Secret share an engine: the next ones shall have their own.
    for volume in [by_attribute, by_secret, by_both] {
        world.unpublish(&volume);
    }
    let untrusting = [at_the_store(4), with_ca(at_the_store(4), &other)];
    for volume in &untrusting {
        check_refused(world.try_publish(volume), Code::Unavailable, &["Could not mount", "certificate"]);
    }
    let malformed = with_ca(at_the_store(4), "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n");
    check_refused(world.try_publish(&malformed), Code::Unavailable, &["certificates"]);
    check_refused(world.try_publish(&with_ca(at_the_store(4), "no PEM")), Code::InvalidArgument, &["ca.crt", "PEM"]);

    world.check_nothing_left();
}

#[test]
fn other_certificates_of_the_secret_reach_a_running_mount() {
    let fixture = Fixture::new("network-certificates-rotated");
    let mut world = tls_world(&fixture);
    world.start_mounter();
    world.start_node();
    let (own_ca, other) = (authority(&world), CertificateAuthority::new().unwrap().pem());
    let volume = own(&world, 1).with_attribute("endpointUrl", &world.store.endpoint());
    let target = world.publish(&with_ca(volume.clone(), &own_ca));
    let file = world.mounter_source_directory().join("credentials/s3-csi-ca.crt");
    assert_eq!(fs::read_to_string(&file).unwrap(), own_ca.replace("\r\n", "\n"));
    let engine = world.engine();
    let open = fs::File::create(target.join("open")).unwrap();

    world.publish(&with_ca(volume.clone(), &format!("{other}{own_ca}")));
    wait_for("an engine with the next certificates serves", || world.engines().iter().all(|it| *it != engine));
    assert!(fs::read_to_string(&file).unwrap().starts_with(other.replace("\r\n", "\n").as_str()));
    drop(open);
    world.check_serves(&target);
    world.unpublish(&volume);
    world.check_nothing_left();
}

/// The mounter's certificates, which the chart sets for all volumes, are trusted together with those of a volume.
#[test]
fn the_driver_s_certificates_and_those_of_a_volume_add_up() {
    let fixture = Fixture::new("network-certificates-driver");
    let mut world = tls_world(&fixture);
    let directory = fixture.create_directory("certificates");
    let (mine, other) = (directory.join("mine.crt"), directory.join("other.crt"));
    fs::write(&mine, authority(&world)).unwrap();
    fs::write(&other, CertificateAuthority::new().unwrap().pem()).unwrap();
    let endpoint = world.store.endpoint();

    world.start_mounter_with(&["--ca-bundle", mine.to_str().unwrap()]);
    world.start_node();
    let foreign =
        with_ca(own(&world, 1).with_attribute("endpointUrl", &endpoint), &fs::read_to_string(&other).unwrap());
    world.check_serves(&world.publish(&foreign));
    world.unpublish(&foreign);
    world.check_nothing_left();
}
