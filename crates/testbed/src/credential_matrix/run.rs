//! Takes a source of keys through its states, and checks what can be mounted and whether what is mounted works.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use s3csi_s3_server::store::{SECRET_MARK, Store as _};
use tonic::{Code, Status};

use super::supply::{EXPIRED, KeySupply, LIFETIME, Refusal, SessionKeys, Supply, TOKEN};
use super::{CredentialWorld, KeySource};
use crate::credential_issuer::CredentialIssuer;
use crate::fixture::Fixture;
use crate::kubelet::CsiVolume;
use crate::test_node::check_refused;
use crate::wait::{SOON, wait_for, wait_patiently_until};
use crate::world::BUCKET;

/// Of keys that are to expire, or to be renewed, while the test looks. No step fails if it takes longer.
const SHORT_LIFETIME: Duration = Duration::from_secs(12);

/// How a volume is refused with keys that the store does not know any more.
const REVOKED: [&str; 2] = ["Could not mount", "InvalidAccessKeyId"];

/// Takes a source through all states.
pub fn check_key_source(world: &mut dyn CredentialWorld<'_>, fixture: &Fixture, source: KeySource) {
    let store = &world.test_node().store;
    let issuer = CredentialIssuer::start(store.sessions(), store.account(), TOKEN, LIFETIME);
    let mut run = MatrixRun::prepare(world, fixture, source, issuer);
    run.start_node();
    let node = run.world.test_node().node().pid();
    run.check_unusable();
    run.check_fresh();
    run.check_revoked();
    run.check_expired();
    run.check_refreshed();
    run.check_outage();
    let is_restarted = run.world.test_node().node().pid() != node;
    assert_eq!(is_restarted, source.is_issued(), "files are read without a restart of the node plugin");
    run.finish();
}

/// A security token service may have a certificate of a private authority, which the driver must be configured to trust.
pub fn check_private_authority(world: &mut dyn CredentialWorld<'_>, fixture: &Fixture, source: KeySource) {
    let store = &world.test_node().store;
    let issuer = CredentialIssuer::start_with_tls(store.sessions(), store.account(), TOKEN, LIFETIME);
    let mut run = MatrixRun::prepare(world, fixture, source, issuer);
    run.supply.set(Supply::Keys { lifetime: LIFETIME });
    run.start_node();
    check_refused(run.publish(), Code::Unavailable, &["failed to connect to 127.0.0.1", "certificate"]);
    run.world.check_nothing_left();
    let bundle = fixture.path("ca-bundle.crt");
    fs::write(&bundle, run.supply.issuer.authority_pem().unwrap()).unwrap();
    run.supply.arguments.extend(["--sts-ca-bundle".to_owned(), bundle.to_string_lossy().into_owned()]);
    run.forget_answers();
    run.publish().unwrap();
    run.check_works("trusted");
    run.finish();
}

struct MatrixRun<'r, 'a> {
    world: &'r mut dyn CredentialWorld<'a>,
    supply: KeySupply,
    workload: CsiVolume,
    other: CsiVolume,
}

impl<'r, 'a> MatrixRun<'r, 'a> {
    /// The driver has no keys but those of the source.
    fn prepare(
        world: &'r mut dyn CredentialWorld<'a>,
        fixture: &Fixture,
        source: KeySource,
        issuer: CredentialIssuer,
    ) -> Self {
        world.test_node_mut().plugin.set_account(None);
        let store = &world.test_node().store;
        let supply = KeySupply::new(fixture, source, issuer, store);
        let [workload, other] = [1, 2].map(|it| world.start_workload(it));
        Self { world, supply, workload, other }
    }

    fn start_node(&mut self) {
        let arguments: Vec<&str> = self.supply.arguments.iter().map(String::as_str).collect();
        self.world.test_node_mut().start_node_with(&arguments);
    }

    /// The node plugin remembers the answers of an issuer: keys until it is time to renew them, and a failure for some seconds.
    fn forget_answers(&mut self) {
        if self.supply.source.is_issued() {
            self.world.test_node_mut().stop_node();
            self.start_node();
        }
    }

    fn publish(&self) -> Result<PathBuf, Status> {
        self.world.test_node().try_publish(&self.supply.with_keys(self.workload.clone()))
    }

    fn publish_other(&self) -> Result<PathBuf, Status> {
        self.world.test_node().try_publish(&self.supply.with_keys(self.other.clone()))
    }

    fn target(&self) -> PathBuf {
        self.world.test_node().kubelet.target(&self.workload)
    }

    fn credentials(&self) -> String {
        fs::read_to_string(self.world.credentials_file()).unwrap()
    }

    /// Missing, malformed and expired: nothing is mounted, nothing stays, and the message says why.
    fn check_unusable(&mut self) {
        for Refusal { supply, code, words } in self.supply.source.refusals() {
            self.supply.set(supply);
            self.forget_answers();
            check_refused(self.publish(), code, &words);
            self.world.check_nothing_left();
        }
    }

    /// Fresh: the engine works with the keys of the source, and with no others.
    fn check_fresh(&mut self) {
        self.supply.set(Supply::Keys { lifetime: LIFETIME });
        self.forget_answers();
        self.publish().unwrap();
        self.check_works("fresh");
        let number = self.supply.issuer.issued();
        let token = match &self.supply.written {
            Some(SessionKeys { token, .. }) => token.clone(),
            None => format!("session-token-{number}-{SECRET_MARK}+/="),
        };
        let credentials = self.credentials();
        assert!(credentials.contains(&format!("aws_session_token={token}\n")), "other keys were written");
        // kubelet's next call changes nothing.
        self.publish().unwrap();
        assert_eq!((self.supply.issuer.issued(), self.credentials()), (number, credentials));
    }

    /// Revoked: the store decides. What the node plugin has in memory neither works nor mounts anything more, and new keys heal the mount.
    fn check_revoked(&mut self) {
        self.world.test_node().store.sessions().revoke_all();
        self.wait_until_refused();
        check_refused(self.publish_other(), Code::Unauthenticated, &REVOKED);
        self.supply.set(Supply::Keys { lifetime: LIFETIME });
        self.forget_answers();
        self.wait_for_replacement();
        self.check_works("after-revoked");
    }

    /// Expired while they are in use: the mount stays and fails, and nothing more is mounted.
    fn check_expired(&mut self) {
        if let Some(session) = &self.supply.written {
            self.supply.expire(session);
            self.wait_until_refused();
            check_refused(self.publish_other(), Code::Unauthenticated, &EXPIRED);
            return;
        }
        self.supply.set(Supply::Keys { lifetime: SHORT_LIFETIME });
        self.forget_answers();
        self.wait_for_replacement();
        let refusals = self.supply.source.refusals();
        let Refusal { supply, code, words } = refusals.iter().find(|it| it.supply == Supply::Missing).unwrap();
        self.supply.set(*supply);
        self.wait_until_refused();
        check_refused(self.publish(), *code, words);
        check_refused(self.publish_other(), *code, words);
    }

    /// Refreshed: kubelet's calls bring the next keys after the last ones have expired, and before; nothing is mounted again.
    fn check_refreshed(&mut self) {
        let mounts = self.world.test_node().mounts();
        for lifetime in [SHORT_LIFETIME, LIFETIME] {
            self.supply.set(Supply::Keys { lifetime });
            self.wait_for_replacement();
        }
        self.check_works("after-refreshed");
        assert_eq!(self.world.test_node().mounts(), mounts);
    }

    /// A source that fails later does not affect the mount: temporary keys are used on, and files with errors are refused.
    fn check_outage(&mut self) {
        let (credentials, is_issued) = (self.credentials(), self.supply.source.is_issued());
        for Refusal { supply, code, words } in self.supply.source.refusals() {
            if !matches!(supply, Supply::Missing | Supply::Malformed) {
                continue;
            }
            self.supply.set(supply);
            let outcome = self.publish();
            if is_issued {
                outcome.unwrap();
            } else {
                check_refused(outcome, code, &words);
            }
            assert!(self.credentials() == credentials, "{supply:?} keys have replaced those in use");
            self.check_works(&format!("{supply:?}"));
        }
    }

    #[track_caller]
    fn check_works(&self, name: &str) {
        let file = self.target().join(name);
        wait_for("the mount works", || fs::write(&file, name).is_ok());
        let stored = self.world.test_node().store.object(BUCKET, name);
        assert_eq!(stored.as_deref(), Some(name.as_bytes()));
    }

    #[track_caller]
    fn wait_until_refused(&self) {
        let file = self.target().join("refused");
        wait_for("the store refuses the keys", || fs::write(&file, "x").is_err());
    }

    /// kubelet's calls bring other keys to the engine than it has now: another one takes over.
    #[track_caller]
    fn wait_for_replacement(&self) {
        let (engines, credentials) = (self.world.engines(), self.credentials());
        let mut outcome = Ok(PathBuf::new());
        let is_replaced = wait_patiently_until(Instant::now() + SOON, || {
            outcome = self.publish();
            let now = self.world.engines();
            let are_others = !now.is_empty() && !now.iter().any(|it| engines.contains(it));
            outcome.is_ok() && are_others && self.credentials() != credentials
        });
        assert!(is_replaced, "{engines:?} still serve, or the keys are the same; the last call: {outcome:?}");
    }

    fn finish(self) {
        let Self { world, workload, .. } = self;
        world.end_workload(&workload);
        world.check_nothing_left();
        let node = world.test_node().node();
        assert!(!node.log_contains(SECRET_MARK), "a secret was printed");
        let environment = fs::read(format!("/proc/{}/environ", node.pid())).unwrap();
        assert!(!String::from_utf8_lossy(&environment).contains(SECRET_MARK), "the environment shows a secret");
    }
}
