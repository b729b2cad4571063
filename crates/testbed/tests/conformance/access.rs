//! Accounts and certificates.

use std::fs;

use s3csi_s3_server::store::{Account, Store};
use s3csi_s3_server::{Config, Transport};
use s3csi_testbed::engine::{EngineLauncher, Trust};
use s3csi_testbed::fixture::Fixture;

use crate::on_both_servers;
use crate::world::{BUCKET, World, in_process_with, start_versitygw};

on_both_servers!(two_accounts_use_their_own_buckets_side_by_side,);

fn two_accounts_use_their_own_buckets_side_by_side(world: &World) {
    let [alice, bob] = ["alice", "bob"].map(Account::named);
    for (account, bucket) in [(&alice, "alices-bucket"), (&bob, "bobs-bucket")] {
        world.store.add_account(account).unwrap();
        world.store.create_bucket(bucket, account).unwrap();
    }
    let engine = |account: &Account, bucket: &str| {
        EngineLauncher::new(&world.fixture, world.store.as_ref(), bucket).writable().account(account)
    };
    let first = engine(&alice, "alices-bucket").mount();
    let second = engine(&bob, "bobs-bucket").mount();
    fs::write(first.path("file"), "alice's").unwrap();
    fs::write(second.path("file"), "bob's").unwrap();
    assert_eq!(world.store.object("alices-bucket", "file").unwrap(), "alice's");
    assert_eq!(world.store.object("bobs-bucket", "file").unwrap(), "bob's");
    first.unmount();
    second.unmount();
}

fn check_trust(fixture: &Fixture, store: &dyn Store, trust: Trust) {
    let mount = EngineLauncher::new(fixture, store, BUCKET).writable().trust(trust).mount();
    fs::write(mount.path("file"), "over TLS").unwrap();
    assert_eq!(store.object(BUCKET, "file").unwrap(), "over TLS");
    assert_eq!(fs::read(mount.path("file")).unwrap(), b"over TLS");
    mount.unmount();
}

fn check_in_process(trust: Trust) {
    let world = in_process_with("tls", Config { transport: Transport::Tls, ..Config::default() });
    check_trust(&world.fixture, world.store.as_ref(), trust);
}

fn check_versitygw(trust: Trust) {
    let fixture = Fixture::new("tls");
    let store = start_versitygw(&fixture, Transport::Tls);
    check_trust(&fixture, store.as_ref(), trust);
    drop(store);
}

#[test]
fn an_own_authority_is_trusted_by_flag() {
    check_in_process(Trust::Flag);
}

#[test]
fn an_own_authority_is_trusted_by_environment() {
    check_in_process(Trust::Environment);
}

#[test]
fn an_own_authority_is_trusted_by_flag_with_versitygw() {
    check_versitygw(Trust::Flag);
}

#[test]
fn an_own_authority_is_trusted_by_environment_with_versitygw() {
    check_versitygw(Trust::Environment);
}
