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

s3csi_testbed::credential_matrix_tests!(|source| beside_systemd(|| check(source)), |source| beside_systemd(|| {
    check_authority(source);
}));
