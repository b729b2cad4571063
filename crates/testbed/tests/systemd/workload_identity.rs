//! `authenticationSource: pod` with engines in units of systemd.

use std::fs;
use std::time::{Duration, Instant};

use s3csi_s3_server::store::Store as _;
use s3csi_testbed::credential_issuer::{CredentialIssuer, IssuerMode};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::kubelet::CsiVolume;
use s3csi_testbed::systemd::{beside_systemd, systemctl};
use s3csi_testbed::wait::{SOON, wait_for, wait_patiently_until};
use s3csi_testbed::workload_identity::{
    SERVICE_ACCOUNT, TEAMS, add_teams, arguments, own_bucket, role, shared_volume, trust_teams, with_role,
};
use s3csi_testbed::world::pod;
use tonic::Code;

use crate::world::{World, check_refused, mount_units};

fn of_team(number: u32, team: &str) -> CsiVolume {
    with_role(shared_volume(&pod(number), team, SERVICE_ACCOUNT), &role(team))
}

/// Two identities, the renewal of their keys under load, and the end of a role; no token or key in a unit.
#[test]
fn workloads_use_their_own_keys_which_are_renewed() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-identity");
        let mut world = World::prepare_beside_systemd(&fixture);
        // The engines start within a fraction of it.
        let lifetime = Duration::from_secs(32);
        let account = world.store.account().clone();
        let token = "no token is the driver's";
        let issuer = CredentialIssuer::start(world.store.sessions(), &account, token, lifetime);
        let trusts = add_teams(&world.store);
        trust_teams(&issuer, &trusts);
        let mut flags = arguments(&issuer);
        flags.extend(["--pod-identity-service-account-roles", "off"].map(str::to_owned));
        world.start_node_with(&flags.iter().map(String::as_str).collect::<Vec<_>>());

        let numbered: Vec<(u32, &str)> = (1..).zip(TEAMS).collect();
        let targets: Vec<_> = numbered.iter().map(|(number, team)| world.publish(&of_team(*number, team))).collect();
        issuer.set_mode(IssuerMode::Issue { lifetime: Duration::from_hours(1) });
        let mut round = 0;
        let is_renewed = || {
            round += 1;
            for ((number, team), target) in numbered.iter().zip(&targets) {
                world.publish(&of_team(*number, team));
                fs::write(target.join(format!("file-{round}")), "x").unwrap();
                assert_eq!(fs::read_to_string(target.join("whose")).unwrap(), *team);
            }
            issuer.issued() == 4
        };
        assert!(wait_patiently_until(Instant::now() + SOON, is_renewed), "the keys were not renewed");
        for team in TEAMS {
            assert_eq!(world.store.keys(&own_bucket(team)).len(), round + 1);
        }
        for unit in mount_units() {
            let properties = systemctl(&["show", &unit]);
            assert!(!properties.contains("NeverPrintThis"), "a secret is in the unit {unit}");
        }

        // A role that is taken away, and sessions that the store ends.
        trust_teams(&issuer, &[]);
        world.store.sessions().revoke_all();
        wait_for("the store refuses the keys", || fs::write(targets[0].join("late"), "x").is_err());
        let stranger = with_role(shared_volume(&pod(3), "red", "stranger"), &role("red"));
        check_refused(world.try_publish(&stranger), Code::Unauthenticated, &["red/stranger", "AccessDenied"]);
        for (number, team) in &numbered {
            world.unpublish(&of_team(*number, team));
        }
        world.check_nothing_left();
    });
}
