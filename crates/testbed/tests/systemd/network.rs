//! Proxies, certificates and inline volumes with units of systemd: the same as with mounters.

use std::fs;

use s3csi_s3_server::certificates::UNRESOLVABLE_HOST;
use s3csi_s3_server::store::Store as _;
use s3csi_s3_server::{Config, Transport};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::forward_proxy::ForwardProxy;
use s3csi_testbed::kubelet::CsiVolume;
use s3csi_testbed::plugin::PluginStrategy;
use s3csi_testbed::systemd::beside_systemd;
use s3csi_testbed::world::pod;
use tonic::Code;

use crate::world::{BUCKET, World, check_refused, volume};

fn tls_world(fixture: &Fixture) -> World<'_> {
    let config = Config { transport: Transport::Tls, ..Config::default() };
    let mut world = World::prepare_for(fixture, config, |_| {});
    world.plugin.set_strategy(PluginStrategy::Systemd);
    world
}

#[test]
fn a_volume_reaches_its_own_store_through_its_own_proxy_with_its_own_certificates() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-volume-proxy");
        let mut world = tls_world(&fixture);
        let host = format!("{UNRESOLVABLE_HOST}:8443");
        let proxy = ForwardProxy::start(&[(&host, world.store.port())]).unwrap();
        world.start_node();
        let account = world.store.account();
        let mut volume = volume(1)
            .with_secret(&account.access_key, &account.secret_key)
            .with_attribute("endpointUrl", &format!("https://{host}"))
            .with_attribute("httpsProxy", &proxy.url());
        check_refused(world.try_publish(&volume), Code::Unavailable, &["Could not mount", "certificate"]);
        volume.secrets.insert("ca.crt".to_owned(), world.store.authority_pem().unwrap().to_owned());
        world.check_serves(&world.publish(&volume));
        assert!(proxy.connections().iter().all(|it| *it == format!("CONNECT {host}")));
        world.unpublish(&volume);
        world.check_nothing_left();
    });
}

#[test]
fn the_driver_s_certificates_are_trusted_beside_the_node_s() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-certificates");
        let mut world = tls_world(&fixture);
        let file = fixture.create_directory("certificates").join("ca.crt");
        fs::write(&file, world.store.authority_pem().unwrap()).unwrap();
        world.start_node();
        check_refused(world.try_publish(&volume(1)), Code::Unavailable, &["Could not mount", "certificate"]);
        world.stop_node();
        world.start_node_with(&["--engine-ca-bundle", file.to_str().unwrap()]);
        world.check_serves(&world.publish(&volume(1)));
        world.unpublish(&volume(1));
        world.check_nothing_left();
    });
}

#[test]
fn an_inline_volume_is_mounted_with_its_own_keys() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-inline");
        let mut world = World::prepare_beside_systemd(&fixture);
        world.start_node_with(&["--inline-volumes", "on"]);
        let account = world.store.account();
        let own =
            CsiVolume::inline(BUCKET, "data", &pod(1)).with_attribute("mountOptions", "allow-delete,allow-overwrite");
        check_refused(world.try_publish(&own), Code::InvalidArgument, &["must bring its own keys"]);
        let own = own.with_secret(&account.access_key, &account.secret_key);
        world.check_serves(&world.publish(&own));
        world.unpublish(&own);
        world.check_nothing_left();
    });
}
