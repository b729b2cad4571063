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

s3csi_testbed::credential_matrix_tests!(check, check_authority);
