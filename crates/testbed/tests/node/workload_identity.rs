//! `authenticationSource: pod`: tokens of workloads are exchanged for keys. States of all sources: `credential_matrix`.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use s3csi_s3_server::store::Store as _;
use s3csi_testbed::credential_issuer::{CredentialIssuer, IssuerMode};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::kubelet::CsiVolume;
use s3csi_testbed::wait::{SOON, wait_for, wait_patiently_until};
use s3csi_testbed::workload_identity::{
    AGENT_AUDIENCE, SERVICE_ACCOUNT, TEAMS, add_teams, arguments, own_bucket, role, shared_volume, subject, token,
    tokens, trust_teams, with_role, with_tokens, with_tokens_among_attributes,
};
use tonic::Code;

use crate::world::{World, check_refused, device, pod};

/// No test lasts as long.
const LIFETIME: Duration = Duration::from_hours(1);

/// A driver without keys of its own that exchanges tokens, and the issuer that it asks.
struct IdentityWorld<'a> {
    world: World<'a>,
    issuer: CredentialIssuer,
}

impl<'a> IdentityWorld<'a> {
    fn start(fixture: &'a Fixture, lifetime: Duration, more: &[&str]) -> Self {
        let mut world = World::prepare_with(fixture, |it| it.account = None);
        let token = "no token is the driver's";
        let issuer = CredentialIssuer::start(world.store.sessions(), world.store.account(), token, lifetime);
        trust_teams(&issuer, &add_teams(&world.store));
        world.start_mounter();
        let mut started = Self { world, issuer };
        started.start_node(more);
        started
    }

    fn start_node(&mut self, more: &[&str]) {
        let mut all = arguments(&self.issuer);
        all.extend(["--pod-identity-service-account-roles", "off"].map(str::to_owned));
        all.extend(more.iter().map(ToString::to_string));
        self.world.start_node_with(&all.iter().map(String::as_str).collect::<Vec<_>>());
    }
}

fn of_team(number: u32, team: &str) -> CsiVolume {
    with_role(shared_volume(&pod(number), team, SERVICE_ACCOUNT), &role(team))
}

#[track_caller]
fn check_whose(target: &Path, team: &str) {
    assert_eq!(fs::read_to_string(target.join("whose")).unwrap(), team);
}

#[test]
fn workloads_of_one_volume_see_what_their_own_account_has() {
    let fixture = Fixture::new("identity-two");
    let IdentityWorld { world, issuer } = &IdentityWorld::start(&fixture, LIFETIME, &[]);
    let [red, blue] = [of_team(1, "red"), of_team(2, "blue")].map(|it| world.publish(&it));
    check_whose(&red, "red");
    check_whose(&blue, "blue");
    assert_ne!(device(&red), device(&blue), "two identities share an engine");
    fs::write(red.join("new"), "from red").unwrap();
    assert_eq!(world.store.object(&own_bucket("red"), "new").as_deref(), Some(b"from red".as_slice()));
    assert_eq!(world.store.keys(&own_bucket("blue")), ["whose"]);

    // Workloads with the same identity share the engine and its keys.
    let third = world.publish(&of_team(3, "red"));
    assert_eq!((device(&third), issuer.issued()), (device(&red), 2));
    for (number, team) in [(1, "red"), (2, "blue"), (3, "red")] {
        world.unpublish(&of_team(number, team));
    }
    world.check_nothing_left();
}

/// The service account may not have the role of the other team: the issuer decides, and says so.
#[test]
fn what_is_not_the_workload_s_or_not_granted_is_refused() {
    let fixture = Fixture::new("identity-refused");
    let IdentityWorld { world, issuer } = &IdentityWorld::start(&fixture, LIFETIME, &[]);
    // Failures of one identity are remembered for some seconds, so each case has a service account of its own.
    let named = |account: &str| with_role(shared_volume(&pod(1), "red", account), &role("red"));
    let stranger = tokens(&token(&subject("red", "other"), SystemTime::now() + LIFETIME));
    let own = "the Pod's own identity gives no credentials";
    for (volume, words) in [
        (with_tokens(named("no-audience"), "{}"), [own, "no token for the audience \"sts.testbed\""]),
        (with_tokens(named("stranger"), &stranger), [own, "not that of service account red/stranger"]),
        (shared_volume(&pod(1), "red", "no-role"), [own, "no role is named"]),
        (with_role(shared_volume(&pod(1), "red", SERVICE_ACCOUNT), &role("blue")), ["red/robot", "AccessDenied"]),
    ] {
        check_refused(world.try_publish(&volume), Code::Unauthenticated, &words);
        world.check_nothing_left();
    }
    let invalid = with_role(shared_volume(&pod(1), "red", SERVICE_ACCOUNT), "admin");
    check_refused(world.try_publish(&invalid), Code::InvalidArgument, &["roleArn not usable", "\"admin\""]);
    assert_eq!(issuer.issued(), 0, "keys were issued");
}

/// kubelet sends tokens among the secrets since Kubernetes 1.35, and among the attributes before; a volume cannot bring one in addition.
#[test]
fn tokens_among_the_secrets_win() {
    let fixture = Fixture::new("identity-tokens");
    let IdentityWorld { world, .. } = &IdentityWorld::start(&fixture, LIFETIME, &[]);
    let fresh = |team: &str| tokens(&token(&subject(team, SERVICE_ACCOUNT), SystemTime::now() + LIFETIME));
    let before = with_tokens_among_attributes(of_team(1, "red"), &fresh("red"));
    check_whose(&world.publish(&before), "red");
    let both = with_tokens(with_tokens_among_attributes(of_team(2, "blue"), &fresh("red")), &fresh("blue"));
    check_whose(&world.publish(&both), "blue");
    world.unpublish(&before);
    world.unpublish(&both);
    world.check_nothing_left();
    assert!(!world.node().log_contains("NeverPrintThis"), "a token was printed");
}

#[test]
fn tokens_are_not_exchanged_unless_that_is_enabled() {
    let fixture = Fixture::new("identity-off");
    let world = World::start(&fixture);
    let refused = world.try_publish(&of_team(1, "red"));
    check_refused(refused, Code::Unauthenticated, &["tokens of Pods are not exchanged", "podIdentity.enabled"]);
    world.check_nothing_left();
}

#[test]
fn an_agent_issues_keys_where_no_role_is_named() {
    let fixture = Fixture::new("identity-agent");
    let mut identity = IdentityWorld::start(&fixture, LIFETIME, &[]);
    identity.world.stop_node();
    let url = format!("{}/v1/credentials", identity.issuer.url());
    identity.start_node(&["--pod-identity-agent-url", &url, "--pod-identity-agent-audience", AGENT_AUDIENCE]);
    let IdentityWorld { world, .. } = &identity;
    for (number, team) in (1..).zip(TEAMS) {
        check_whose(&world.publish(&shared_volume(&pod(number), team, SERVICE_ACCOUNT)), team);
    }
    let unknown = world.try_publish(&shared_volume(&pod(3), "red", "unknown"));
    check_refused(unknown, Code::Unauthenticated, &["the agent for containers", "red/unknown", "status 401"]);
    for (number, team) in (1..).zip(TEAMS) {
        world.unpublish(&shared_volume(&pod(number), team, SERVICE_ACCOUNT));
    }
    world.check_nothing_left();
}

#[test]
fn the_default_role_is_for_those_who_name_none() {
    let fixture = Fixture::new("identity-default");
    let default = role("red");
    let IdentityWorld { world, .. } = &IdentityWorld::start(&fixture, LIFETIME, &["--pod-identity-role-arn", &default]);
    let [red, blue] = [shared_volume(&pod(1), "red", SERVICE_ACCOUNT), of_team(2, "blue")];
    check_whose(&world.publish(&red), "red");
    check_whose(&world.publish(&blue), "blue");
    world.unpublish(&red);
    world.unpublish(&blue);
    world.check_nothing_left();
}

/// kubelet's calls bring fresh tokens; keys are renewed when a quarter of their lifetime is left, under a workload that reads and writes.
#[test]
fn keys_are_renewed_under_load_before_they_expire() {
    let fixture = Fixture::new("identity-renewed");
    // The engine starts within a fraction of it.
    let lifetime = Duration::from_secs(24);
    let IdentityWorld { world, issuer } =
        &IdentityWorld::start(&fixture, lifetime, &["--health-address", "127.0.0.1:0"]);
    let target = world.publish(&of_team(1, "red"));
    let engine = world.engine();
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let expiry = || world.figure("s3csi_workload_credentials_expiry_timestamp_seconds");
    assert!((now().as_secs()..=(now() + lifetime).as_secs()).contains(&expiry()), "expiry {}", expiry());
    issuer.set_mode(IssuerMode::Issue { lifetime: LIFETIME });
    let mut round = 0;
    let is_renewed = || {
        world.publish(&of_team(1, "red"));
        round += 1;
        fs::write(target.join(format!("file-{round}")), "x").unwrap();
        check_whose(&target, "red");
        issuer.issued() == 2 && world.engines().iter().all(|it| *it != engine)
    };
    assert!(wait_patiently_until(Instant::now() + SOON, is_renewed), "the keys were not renewed");
    assert!(expiry() > (now() + LIFETIME / 2).as_secs());
    assert_eq!(world.store.keys(&own_bucket("red")).len(), round + 1);
    world.unpublish(&of_team(1, "red"));
    world.check_nothing_left();
}

/// A role that is taken away: the mount keeps its keys until they expire, then the store refuses them.
#[test]
fn revoked_roles_last_until_the_keys_expire() {
    let fixture = Fixture::new("identity-revoked");
    let lifetime = Duration::from_secs(20);
    let IdentityWorld { world, issuer } = &IdentityWorld::start(&fixture, lifetime, &[]);
    let target = world.publish(&of_team(1, "red"));
    let expires = Instant::now() + lifetime;
    trust_teams(issuer, &[]);
    let mut is_refused = false;
    while !is_refused {
        match world.try_publish(&of_team(1, "red")) {
            Ok(_) => assert!(Instant::now() < expires, "keys that have expired were used"),
            outcome => {
                check_refused(outcome, Code::Unauthenticated, &["red/robot", "AccessDenied: Not authorized"]);
                is_refused = true;
            }
        }
        assert!(Instant::now() < expires + SOON);
    }
    wait_for("the store refuses the keys", || fs::write(target.join("late"), "x").is_err());
    // The role is given back: kubelet's next calls heal the mount.
    trust_teams(issuer, &add_teams(&world.store));
    issuer.set_mode(IssuerMode::Issue { lifetime: LIFETIME });
    let is_back = || world.try_publish(&of_team(1, "red")).is_ok();
    assert!(wait_patiently_until(Instant::now() + SOON, is_back), "the mount got no keys");
    wait_for("the mount works", || fs::write(target.join("again"), "x").is_ok());
    world.unpublish(&of_team(1, "red"));
    world.check_nothing_left();
}
