//! `authenticationSource: pod` with a real API server: roles of service accounts, and Events about credentials that expire.

use std::fs;
use std::time::Duration;

use s3csi_s3_server::store::{Account, Store as _};
use s3csi_testbed::credential_issuer::{CredentialIssuer, IssuerMode, ROLE, RoleTrust};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::kubelet::CsiVolume;
use s3csi_testbed::wait::wait_for;
use s3csi_testbed::workload_identity::{add_teams, arguments, role, shared_volume, subject, trust_teams, with_role};
use serde_json::json;
use tonic::Code;

use crate::cluster::control_plane;
use crate::world::{PV, World, check_refused};

const LIFETIME: Duration = Duration::from_hours(1);

const TOKEN: &str = "driver-token-NeverPrintThis";

/// A service account in namespace `default` with the role of a team, or what its annotation says.
fn create_account(name: &str, role: Option<&str>) {
    let annotations = json!({ "eks.amazonaws.com/role-arn": role });
    let account = json!({
        "apiVersion": "v1", "kind": "ServiceAccount",
        "metadata": { "name": name, "namespace": "default", "annotations": role.map(|_| annotations) },
    });
    control_plane().apply(&account.to_string()).unwrap();
}

impl World<'_> {
    /// An issuer that lets these service accounts have the roles of both teams, and a node plugin that asks it.
    pub fn start_with_identities(&mut self, accounts: &[&str], lifetime: Duration) -> CredentialIssuer {
        let (sessions, account) = (self.store.sessions(), Account::named("unused"));
        let issuer = CredentialIssuer::start(sessions, &account, TOKEN, lifetime);
        let mut trusts = add_teams(&self.store);
        for (name, team) in accounts.iter().flat_map(|it| ["red", "blue"].map(|team| (*it, team))) {
            let (subject, role) = (subject("default", name), Some(role(team)));
            trusts.push(RoleTrust { subject, role, account: Account::named(team) });
        }
        trust_teams(&issuer, &trusts);
        self.start_node_with(&arguments(&issuer).iter().map(String::as_str).collect::<Vec<_>>());
        issuer
    }

    /// The volume of both teams for a workload with this service account.
    pub fn identity_volume(&self, number: u32, account: &str) -> CsiVolume {
        CsiVolume { pv: PV.to_owned(), ..shared_volume(&self.workload(number), "default", account) }
    }

    fn wait_for_credentials_event(&self, workload: u32, expected: &str) {
        wait_for(&format!("workload {workload} has Event {expected:?}"), || {
            let events = self.runtime.block_on(self.cluster.events(&self.workload(workload)));
            events.iter().any(|it| it.contains(expected))
        });
    }
}

#[test]
fn the_service_account_s_role_wins_and_the_volume_s_fills_its_absence() {
    let fixture = Fixture::new("pod-identity-roles");
    let mut world = World::prepare(&fixture);
    for (name, role) in [
        ("identity-red", Some(role("red"))),
        ("identity-plain", None),
        ("identity-wrong", Some("admin".to_owned())),
        ("identity-none", None),
    ] {
        create_account(name, role.as_deref());
    }
    let accounts = ["identity-red", "identity-plain", "identity-wrong", "identity-none"];
    let _issuer = world.start_with_identities(&accounts, LIFETIME);
    let volumes = [
        with_role(world.identity_volume(1, "identity-red"), &role("blue")),
        with_role(world.identity_volume(2, "identity-plain"), &role("blue")),
    ];
    let pods = [world.serve(&[1]), world.serve(&[2])];
    for (volume, team) in volumes.iter().zip(["red", "blue"]) {
        let target = world.publish(volume);
        assert_eq!(fs::read_to_string(target.join("whose")).unwrap(), team);
    }
    // What one Mountpoint Pod reads is of no use to the other.
    let keys =
        pods.each_ref().map(|it| fs::read_to_string(it.directory.join("credentials/s3-csi-credentials")).unwrap());
    assert_ne!(keys[0], keys[1]);

    let wrong = world.serve(&[3]);
    let refused = world.try_publish(&with_role(world.identity_volume(3, "identity-wrong"), &role("blue")));
    let annotation = "correct the annotation eks.amazonaws.com/role-arn of service account default/identity-wrong";
    check_refused(refused, Code::Unauthenticated, &[annotation, "\"admin\""]);
    let without = world.serve(&[4]);
    let refused = world.try_publish(&world.identity_volume(4, "identity-none"));
    check_refused(refused, Code::Unauthenticated, &["no role is named", "default/identity-none"]);
    for volume in &volumes {
        world.unpublish(volume);
    }
    for pod in pods.iter().chain([&wrong, &without]) {
        world.retire(pod);
    }
    world.check_nothing_mounted();
}

/// Neither the driver's keys nor a workload's can be renewed: Events say so when they have expired.
#[test]
fn expired_credentials_are_an_event() {
    let fixture = Fixture::new("pod-identity-expired");
    let mut world = World::prepare(&fixture);
    create_account("identity-expires", Some(&role("red")));
    // Both engines start within a fraction of it.
    let lifetime = Duration::from_secs(20);
    let (sessions, account) = (world.store.sessions(), world.store.account().clone());
    let issuer = CredentialIssuer::start(sessions, &account, TOKEN, lifetime);
    let mut trusts = add_teams(&world.store);
    let subject = subject("default", "identity-expires");
    trusts.push(RoleTrust { subject, role: Some(role("red")), account: Account::named("red") });
    trust_teams(&issuer, &trusts);
    let token = fixture.path("token");
    fs::write(&token, TOKEN).unwrap();
    world.plugin.set_account(None);
    let mut flags = arguments(&issuer);
    for (flag, value) in [
        ("--credentials-source", "web-identity"),
        ("--role-arn", ROLE),
        ("--sts-endpoint-url", &issuer.url()),
        ("--web-identity-token-file", token.to_str().unwrap()),
    ] {
        flags.extend([flag.to_owned(), value.to_owned()]);
    }
    world.start_node_with(&flags.iter().map(String::as_str).collect::<Vec<_>>());
    let pods = [world.serve(&[1]), world.serve(&[2])];
    world.publish(&world.volume(1));
    world.publish(&world.identity_volume(2, "identity-expires"));
    issuer.set_mode(IssuerMode::Refuse);
    world.wait_for_credentials_event(
        1,
        "Warning DriverCredentialsExpired: bucket \"bucket-1\": the driver's temporary credentials have expired",
    );
    world.wait_for_credentials_event(
        2,
        "Warning WorkloadCredentialsExpired: bucket \"shared\": the temporary credentials of the Pod's service account have expired",
    );
    let refused = world.try_publish(&world.identity_volume(2, "identity-expires"));
    check_refused(refused, Code::Unauthenticated, &["default/identity-expires", "AccessDenied: the role is not yours"]);
    world.unpublish(&world.volume(1));
    world.unpublish(&world.identity_volume(2, "identity-expires"));
    for pod in &pods {
        world.retire(pod);
    }
    world.check_nothing_mounted();
}
