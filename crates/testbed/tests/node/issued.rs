//! The driver's own keys from issuers of temporary keys and from a profile: fresh, refreshed, revoked, missing, malformed and expired.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use s3csi_s3_server::store::{Account, Store as _};
use s3csi_testbed::credential_issuer::{CredentialIssuer, IssuerMode, ROLE};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::wait::{SOON, wait_for, wait_patiently_until};
use tonic::Code;

use crate::world::{BUCKET, World, check_refused, volume};

/// The workload identity of the driver itself.
const TOKEN: &str = "driver-token-NeverPrintThis";

/// No test lasts as long.
const LIFETIME: Duration = Duration::from_hours(1);

/// A driver without keys of its own, its issuer, and the file of its token.
struct IssuerWorld<'a> {
    world: World<'a>,
    issuer: CredentialIssuer,
    token: PathBuf,
    arguments: Vec<String>,
}

impl<'a> IssuerWorld<'a> {
    fn start(fixture: &'a Fixture, lifetime: Duration, arguments: impl FnOnce(&str, &str) -> Vec<String>) -> Self {
        let mut world = World::prepare_with(fixture, |it| it.account = None);
        let issuer = CredentialIssuer::start(world.store.sessions(), world.store.account(), TOKEN, lifetime);
        let token = fixture.path("token");
        fs::write(&token, format!("{TOKEN}\n")).unwrap();
        let arguments = arguments(&issuer.url(), token.to_str().unwrap());
        world.start_mounter();
        let mut started = Self { world, issuer, token, arguments };
        started.start_node();
        started
    }

    fn start_node(&mut self) {
        let arguments: Vec<&str> = self.arguments.iter().map(String::as_str).collect();
        self.world.start_node_with(&arguments);
    }

    /// A publish by a plugin that has no keys yet.
    fn check_refused(&mut self, code: Code, words: &[&str]) {
        self.world.stop_node();
        self.start_node();
        check_refused(self.world.try_publish(&volume(1)), code, words);
        self.world.check_nothing_left();
    }

    fn credentials(&self) -> String {
        let file = self.world.mounter_source_directory().join("credentials/s3-csi-credentials");
        fs::read_to_string(file).unwrap()
    }

    /// What every issuer has in common, after its own refusals.
    fn check(mut self) {
        let expectations = [
            (IssuerMode::Malformed, Code::Unauthenticated, "its answer is malformed"),
            (IssuerMode::IssueExpired, Code::Unauthenticated, "expired already"),
            (IssuerMode::Fail, Code::Unavailable, "status 500"),
        ];
        for (mode, code, words) in expectations {
            self.issuer.set_mode(mode);
            self.check_refused(code, &["the driver's credentials cannot be used", words]);
        }
        self.issuer.set_mode(IssuerMode::Issue { lifetime: LIFETIME });
        self.world.stop_node();
        self.start_node();
        let target = self.world.publish(&volume(1));
        fs::write(target.join("file"), "x").unwrap();
        assert_eq!(self.world.store.keys(BUCKET), ["file"]);
        let number = self.issuer.issued();
        let credentials = self.credentials();
        assert!(credentials.contains(&format!("aws_session_token=session-token-{number}-")), "other keys were written");

        // A second volume uses the same keys. The issuer may be away meanwhile.
        self.issuer.set_mode(IssuerMode::Fail);
        self.world.publish(&volume(1));
        assert_eq!((self.issuer.issued(), self.credentials()), (number, credentials));

        // The store decides: revoked keys mount nothing more.
        self.world.store.sessions().revoke_all();
        let mut other = volume(2);
        "bucket-2".clone_into(&mut other.bucket);
        "pv-2".clone_into(&mut other.pv);
        check_refused(self.world.try_publish(&other), Code::Unauthenticated, &["Could not mount", "bucket-2"]);
        self.world.unpublish(&volume(1));
        self.world.check_nothing_left();
    }
}

fn flags(all: &[&str]) -> Vec<String> {
    all.iter().map(ToString::to_string).collect()
}

#[test]
fn instance_profile() {
    let fixture = Fixture::new("issued-instance");
    let mut issued = IssuerWorld::start(&fixture, LIFETIME, |url, _| {
        flags(&["--credentials-source", "instance-profile", "--instance-metadata-url", url])
    });
    issued.issuer.set_mode(IssuerMode::Refuse);
    issued.check_refused(Code::Unauthenticated, &["the instance metadata service", "has no instance profile"]);
    issued.check();
}

fn web_identity(url: &str, token: &str) -> Vec<String> {
    let source = ["--credentials-source", "web-identity", "--role-arn", ROLE];
    let source = flags(&source).into_iter();
    source.chain(flags(&["--sts-endpoint-url", url, "--web-identity-token-file", token])).collect()
}

#[test]
fn web_identity_token() {
    let fixture = Fixture::new("issued-web-identity");
    let mut issued = IssuerWorld::start(&fixture, LIFETIME, web_identity);
    issued.issuer.set_mode(IssuerMode::Refuse);
    issued.check_refused(Code::Unauthenticated, &["the security token service", "AccessDenied", "not yours"]);
    issued.issuer.set_mode(IssuerMode::Issue { lifetime: LIFETIME });
    fs::write(&issued.token, "another-NeverPrintThis").unwrap();
    issued.check_refused(Code::Unauthenticated, &["InvalidIdentityToken", "<secret>"]);
    fs::write(&issued.token, "two words-NeverPrintThis").unwrap();
    issued.check_refused(Code::Unauthenticated, &["the token", "not one line of text"]);
    fs::remove_file(&issued.token).unwrap();
    issued.check_refused(Code::Unauthenticated, &["failed to read the token"]);
    fs::write(&issued.token, TOKEN).unwrap();
    issued.check();
}

#[test]
fn container_agent() {
    let fixture = Fixture::new("issued-container");
    let mut issued = IssuerWorld::start(&fixture, LIFETIME, |url, token| {
        let url = format!("{url}/v1/credentials");
        flags(&[
            "--credentials-source",
            "container",
            "--container-credentials-url",
            &url,
            "--container-token-file",
            token,
        ])
    });
    fs::write(&issued.token, "another-NeverPrintThis").unwrap();
    issued.check_refused(Code::Unauthenticated, &["the agent for containers", "status 401"]);
    fs::write(&issued.token, TOKEN).unwrap();
    issued.check();
}

/// Keys are renewed when a quarter of their lifetime is left, and reach the running mount with kubelet's next call.
#[test]
fn temporary_keys_are_renewed_before_they_expire() {
    let fixture = Fixture::new("issued-renewed");
    // The engine starts within a fraction of it.
    let lifetime = Duration::from_secs(24);
    let issued = IssuerWorld::start(&fixture, lifetime, |url, token| {
        let mut arguments = web_identity(url, token);
        arguments.extend(flags(&["--health-address", "127.0.0.1:0"]));
        arguments
    });
    let IssuerWorld { world, issuer, .. } = &issued;
    let target = world.publish(&volume(1));
    let (engine, first) = (world.engine(), issued.credentials());
    issuer.set_mode(IssuerMode::Issue { lifetime: LIFETIME });
    let has_next_keys = || {
        world.publish(&volume(1));
        issued.credentials() != first
    };
    assert!(wait_patiently_until(Instant::now() + SOON, has_next_keys), "kubelet's calls brought no other keys");
    wait_for("an engine with the next keys serves", || world.engines().iter().all(|it| *it != engine));
    fs::write(target.join("after"), "x").unwrap();
    assert_eq!(world.store.keys(BUCKET), ["after"]);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    wait_for("the metric shows the next expiry", || {
        world.figure("s3csi_credentials_expiry_timestamp_seconds") > (now + LIFETIME / 2).as_secs()
    });
    world.unpublish(&volume(1));
    world.check_nothing_left();
}

#[test]
fn a_profile_s_keys_change_without_a_restart() {
    let fixture = Fixture::new("issued-profile");
    let mut world = World::prepare_with(&fixture, |it| it.account = None);
    let directory = fixture.create_directory("shared-files");
    let write = |name: &str, Account { access_key, secret_key }: &Account| {
        let text = format!("[{name}]\naws_access_key_id={access_key}\naws_secret_access_key={secret_key}\n");
        fs::write(directory.join("credentials"), text).unwrap();
    };
    world.start_mounter();
    let directory_flag = directory.to_str().unwrap();
    let arguments = ["--credentials-source", "profile", "--credentials-directory", directory_flag];
    world.start_node_with(&[arguments.as_slice(), &["--credentials-profile", "ours"]].concat());
    let refuse = |words: &[&str]| {
        check_refused(world.try_publish(&volume(1)), Code::Unauthenticated, words);
        world.check_nothing_left();
    };
    refuse(&["there is no profile \"ours\"", "credentials.profile"]);
    let old = world.store.account().clone();
    write("other", &old);
    refuse(&["there is no profile \"ours\""]);
    fs::write(directory.join("credentials"), "[ours]\nrole_arn=x\n").unwrap();
    refuse(&["profile \"ours\" has role_arn, which is not supported"]);
    write("ours", &old);
    let target = world.publish(&volume(1));
    let engine = world.engine();

    let new = Account::new(&old.access_key, "rotated-NeverPrintThis");
    world.store.add_account(&new).unwrap();
    write("ours", &new);
    world.publish(&volume(1));
    wait_for("an engine with the new key serves", || world.engines().iter().all(|it| *it != engine));
    fs::write(target.join("after"), "x").unwrap();
    world.unpublish(&volume(1));
    world.check_nothing_left();
}
