//! Every source of keys in every state, with strategy `systemd`.

use s3csi_testbed::credential_matrix::{KeySource, check_key_source, check_private_authority};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::systemd::beside_systemd;

use crate::world::World;

fn check(source: KeySource) {
    let fixture = Fixture::new(&format!("systemd-keys-{source:?}"));
    check_key_source(&mut World::prepare_beside_systemd(&fixture), &fixture, source);
}

fn check_authority(source: KeySource) {
    let fixture = Fixture::new(&format!("systemd-keys-authority-{source:?}"));
    check_private_authority(&mut World::prepare_beside_systemd(&fixture), &fixture, source);
}

#[test]
fn secret() {
    beside_systemd(|| check(KeySource::Secret));
}

#[test]
fn driver_secret() {
    beside_systemd(|| check(KeySource::DriverSecret));
}

#[test]
fn profile() {
    beside_systemd(|| check(KeySource::Profile));
}

#[test]
fn instance_profile() {
    beside_systemd(|| check(KeySource::InstanceProfile));
}

#[test]
fn web_identity() {
    beside_systemd(|| check(KeySource::WebIdentity));
}

#[test]
fn container() {
    beside_systemd(|| check(KeySource::Container));
}

#[test]
fn pod_identity() {
    beside_systemd(|| check(KeySource::PodIdentity));
}

#[test]
fn private_certificate_authority_of_web_identity() {
    beside_systemd(|| check_authority(KeySource::WebIdentity));
}

#[test]
fn private_certificate_authority_of_pod_identity() {
    beside_systemd(|| check_authority(KeySource::PodIdentity));
}
