//! The driver's own temporary keys under a running mount, and their metric. States of all sources: `credential_matrix`.

use std::fs;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use s3csi_s3_server::store::Store as _;
use s3csi_testbed::credential_issuer::{CredentialIssuer, IssuerMode, ROLE};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::wait::{SOON, wait_for, wait_patiently_until};

use crate::world::{BUCKET, World, volume};

/// The workload identity of the driver itself.
const TOKEN: &str = "driver-token-NeverPrintThis";

/// Keys are renewed when a quarter of their lifetime is left, and reach the running mount with kubelet's next call.
#[test]
fn temporary_keys_are_renewed_before_they_expire() {
    let fixture = Fixture::new("issued-renewed");
    // The engine starts within a fraction of the first one; no test lasts as long as the second one.
    let (first, second) = (Duration::from_secs(24), Duration::from_hours(1));
    let mut world = World::prepare_with(&fixture, |it| it.account = None);
    let issuer = CredentialIssuer::start(world.store.sessions(), world.store.account(), TOKEN, first);
    let token = fixture.path("token");
    fs::write(&token, format!("{TOKEN}\n")).unwrap();
    world.start_mounter();
    let source = ["--credentials-source", "web-identity", "--role-arn", ROLE, "--sts-endpoint-url", &issuer.url()];
    let token = ["--web-identity-token-file", token.to_str().unwrap()];
    world.start_node_with(&[source.as_slice(), &token, &["--health-address", "127.0.0.1:0"]].concat());

    let target = world.publish(&volume(1));
    let credentials = || {
        let file = world.mounter_source_directory().join("credentials/s3-csi-credentials");
        fs::read_to_string(file).unwrap()
    };
    let (engine, before) = (world.engine(), credentials());
    issuer.set_mode(IssuerMode::Issue { lifetime: second });
    let has_next_keys = || {
        world.publish(&volume(1));
        credentials() != before
    };
    assert!(wait_patiently_until(Instant::now() + SOON, has_next_keys), "kubelet's calls brought no other keys");
    wait_for("an engine with the next keys serves", || world.engines().iter().all(|it| *it != engine));
    fs::write(target.join("after"), "x").unwrap();
    assert_eq!(world.store.keys(BUCKET), ["after"]);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    wait_for("the metric shows the next expiry", || {
        world.figure("s3csi_credentials_expiry_timestamp_seconds") > (now + second / 2).as_secs()
    });
    world.unpublish(&volume(1));
    world.check_nothing_left();
}
