//! Every source of keys in every state, with strategy `daemon`.

use s3csi_testbed::credential_matrix::{KeySource, check_key_source, check_private_authority};
use s3csi_testbed::fixture::Fixture;

use crate::world::World;

fn prepare(fixture: &Fixture) -> World<'_> {
    let mut world = World::prepare(fixture);
    world.start_mounter();
    world
}

fn check(source: KeySource) {
    let fixture = Fixture::new(&format!("keys-{source:?}"));
    check_key_source(&mut prepare(&fixture), &fixture, source);
}

fn check_authority(source: KeySource) {
    let fixture = Fixture::new(&format!("keys-authority-{source:?}"));
    check_private_authority(&mut prepare(&fixture), &fixture, source);
}

#[test]
fn secret() {
    check(KeySource::Secret);
}

#[test]
fn driver_secret() {
    check(KeySource::DriverSecret);
}

#[test]
fn profile() {
    check(KeySource::Profile);
}

#[test]
fn instance_profile() {
    check(KeySource::InstanceProfile);
}

#[test]
fn web_identity() {
    check(KeySource::WebIdentity);
}

#[test]
fn container() {
    check(KeySource::Container);
}

#[test]
fn pod_identity() {
    check(KeySource::PodIdentity);
}

#[test]
fn private_certificate_authority_of_web_identity() {
    check_authority(KeySource::WebIdentity);
}

#[test]
fn private_certificate_authority_of_pod_identity() {
    check_authority(KeySource::PodIdentity);
}
